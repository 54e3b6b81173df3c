"""The controller of a run: takes the engine's instructions to the workers, and what they report back to the engine.

One thread, one loop: wait for reports (at most :data:`rpeg_plugin_megatron.crew.POLL_S`), hand the engine what they
mean, carry out what it says. Every record is written as it happens and is with the operating system before the loop
waits again. A node starts when it is dispatched, since its GPUs are free then, and ends with its last rank's report;
times are seconds of this process's monotonic clock since the start of the first node.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import attrs

from rpeg_core.errors import ExecutionError, RpegError
from rpeg_core.passes.lower import Node
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import (
    Artifact,
    Cancel,
    Dispatch,
    Event,
    Instruction,
    NodeFinished,
    Pause,
    Proceed,
    Release,
    Stop,
    Tick,
    WorkerLost,
)
from rpeg_core.runtime.trace import Ended, Record, Started, Stopped, Transferred, dispatch_records, release_record
from rpeg_core.runtime.window import Window
from rpeg_plugin_megatron.crew import Crew, Lost
from rpeg_plugin_megatron.messages import Checkpoint, Done, Drop, Execute, Export, FromWorker, Restore, Saved, ToWorker
from rpeg_plugin_megatron.metrics import StepMetrics, charged_bytes

__all__ = ["Controller", "Journal", "reason_of"]

INTERRUPTED = "interrupted"
"""Reason of the stop after Ctrl-C."""

GIVEN_UP = "interrupted before what ran was finished"
"""Reason of the stop after the second one."""


class Journal(Protocol):
    """Where records go."""

    def write(self, record: Record) -> None:
        """Append one."""
        ...

    def flush(self) -> None:
        """Make what was written outlive this process."""
        ...


@attrs.define
class _Running:
    """A dispatched node and what its ranks reported so far."""

    node: Node
    since_s: float
    ranks: frozenset[int]
    reports: dict[int, Done] = attrs.field(factory=dict)


class Controller:
    """Runs an engine on a crew.

    Args:
        engine: not started.
        window: of the engine.
        steps: of the engine.
        crew: ready.
        journal: gets the records.
        metrics: collects what nodes report.
        due_bytes: of the whole rows that the transfer of a length phase delivers, None for any other node.
        clock: monotonic, in seconds.
        checkpoint: ``checkpoint(step, save)``: have the workers write a checkpoint with ``save(folder)``.
        step_finished: told of each complete step, in order.
        cancelled: true when the user wants the run to end.
        status: told in a few words what happens outside the steps.
        limit_s: for a checkpoint, a restore or an export.
    """

    def __init__(
        self,
        *,
        engine: Engine,
        window: Window,
        steps: int,
        crew: Crew,
        journal: Journal,
        metrics: StepMetrics,
        due_bytes: Callable[[Node], int | None],
        clock: Callable[[], float],
        checkpoint: Callable[[int, Callable[[Path], None]], None],
        step_finished: Callable[[int, Mapping[str, float]], None],
        cancelled: Callable[[], bool],
        status: Callable[[str], None],
        limit_s: float,
    ) -> None:
        self._engine, self._window, self._steps, self._crew = engine, window, steps, crew
        self._journal, self._metrics, self._clock = journal, metrics, clock
        self._due_bytes = due_bytes
        self._bytes = {container.name: container.bytes for container in window.rpeg.containers}
        self._checkpoint, self._step_finished = checkpoint, step_finished
        self._cancelled, self._status, self._limit_s = cancelled, status, limit_s
        self._running: dict[int, _Running] = {}
        self._lost: list[Lost] = []
        self._begin_s = 0.0
        self._left: dict[int, int] = {}  # step -> nodes that did not end, of the steps that were reached
        self._complete = self._told = engine.steps_done  # steps of which all nodes ended; and that the user knows of
        self._cancel_sent = False

    def run(self) -> None:
        """Execute all steps, or as many as the user lets it.

        Raises:
            ExecutionError: a worker was lost, or a node took too long; a :class:`Stopped` is the last record then.
        """
        self._begin_s = self._clock()
        try:
            instructions = self._engine.start(0.0)
            while True:
                events = self._carry_out(instructions)
                self._journal.flush()
                if self._engine.stopped:
                    return
                instructions = self._engine.handle(*(events or self._wait()))
                self._tell()
        except BaseException as error:
            self._stop(reason_of(error))
            raise

    def restore(self, folder: Path) -> None:
        """Have all workers take back a checkpoint.

        Raises:
            ExecutionError: one of them cannot, or they take too long.
        """
        self._all(Restore(str(folder)), folder, "restore the checkpoint")

    def export(self, folder: Path, model: str) -> None:
        """Have the workers write the trained weights of a model.

        Raises:
            ExecutionError: one of them cannot, or they take too long.
        """
        self._all(Export(str(folder), model), folder, f"export {model}")

    # Instructions

    def _carry_out(self, instructions: Sequence[Instruction]) -> list[Event]:
        """Do as told; what the engine has to hear at once comes back."""
        now = self._now()
        for instruction in instructions:
            if isinstance(instruction, Stop) and instruction.failed:
                raise self._failure(instruction)
        released = tuple(i.artifact for i in instructions if isinstance(i, Release))
        if released:
            self._drop(released, now)
        events: list[Event] = []
        for instruction in instructions:
            match instruction:
                case Dispatch():
                    self._dispatch(instruction, now)
                case Pause(step):
                    self._tell()
                    self._checkpoint(step, lambda folder, step=step: self._save(folder, step))
                    self._metrics.leave_out(self._now())
                    events = [*self._cancel(), Proceed(self._now())]
                case Stop(reason) if self._complete < self._steps:
                    self._stop(reason)
        return events

    def _drop(self, artifacts: tuple[Artifact, ...], now: float) -> None:
        for artifact in artifacts:
            self._journal.write(release_record(Release(artifact), now))
        self._crew.send(range(self._crew.world), Drop(artifacts))

    def _dispatch(self, dispatch: Dispatch, now: float) -> None:
        node = dispatch.node
        for record in dispatch_records(dispatch, now):
            self._journal.write(record)
        self._journal.write(Started(now, node.index))
        ranks = frozenset(rank for a in dispatch.held for rank in range(a.start, a.stop))
        self._running[node.index] = _Running(node, now, ranks)
        self._crew.send(sorted(ranks), Execute(node, dispatch.inputs))

    def _save(self, folder: Path, step: int) -> None:
        self._all(Checkpoint(str(folder), step), folder, "write the checkpoint")

    def _all(self, message: ToWorker, folder: Path, what: str) -> None:
        """Have every worker do something outside the graph, and wait until all have."""
        begin = self._clock()
        waiting = set(range(self._crew.world))
        self._crew.send(sorted(waiting), message)
        while waiting:
            for report in self._crew.receive():
                match report:
                    case Saved(rank, name) if name == str(folder):
                        waiting.discard(rank)
                    case Lost(rank, reason):
                        raise ExecutionError(
                            f"the worker of GPU {rank} was lost when it was to {what}: {reason}",
                            facts=[f"folder: {folder}", *self._crew.last_words(rank, report.lines)],
                            hint=None if report.error is None else report.error.hint,
                        )
            if self._clock() - begin > self._limit_s:
                raise ExecutionError(
                    f"workers {', '.join(map(str, sorted(waiting)))} did not {what} within {self._limit_s:g} s",
                    facts=[f"folder: {folder}"],
                    hint="megatron.node_timeout_s is the limit",
                )

    # Reports

    def _wait(self) -> list[Event]:
        """What became known, waiting for it a bounded time."""
        events: list[Event] = []
        for report in self._crew.receive():
            if isinstance(report, Lost):
                self._lost.append(report)
                events.append(WorkerLost(report.rank, report.reason, self._now()))
            else:
                events += self._take_in(report)
        events += self._cancel()
        return events or [Tick(self._now())]

    def _cancel(self) -> Iterable[Event]:
        """What the engine hears, once, of a user who wants the run to end."""
        if self._cancelled() and not self._cancel_sent:
            self._cancel_sent = True
            self._status("interrupted; finishing what runs")
            yield Cancel(INTERRUPTED, self._now())

    def _take_in(self, report: FromWorker) -> Iterable[Event]:
        if not isinstance(report, Done):
            raise ExecutionError(f"worker sent {type(report).__name__}, which nobody asked for")
        running = self._running.get(report.node)
        if running is None or report.rank not in running.ranks or report.rank in running.reports:
            raise ExecutionError(
                f"worker {report.rank} reported node {report.node}, which it was not given",
                facts=self._engine.story(report.node),
            )
        running.reports[report.rank] = report
        if len(running.reports) == len(running.ranks):
            yield self._end(running)

    def _end(self, running: _Running) -> NodeFinished:
        now, node = self._now(), running.node
        del self._running[node.index]
        reports = [running.reports[rank] for rank in sorted(running.ranks)]
        if node.source is not None:
            delivered = sum(report.bytes for report in reports)
            charged = charged_bytes(node, delivered, self._bytes[node.container or ""], self._due_bytes(node))
            wire = float(sum(report.wire_bytes for report in reports))
            self._journal.write(Transferred(now, node.index, charged, wire))
        self._journal.write(Ended(now, node.index))
        self._metrics.add(node, now - running.since_s, reports)
        self._count(node.step)
        return NodeFinished(node.index, now)

    def _count(self, step: int) -> None:
        left = self._left.get(step, len(self._window.shape(step).nodes)) - 1
        self._left[step] = left
        while self._left.get(self._complete) == 0:
            del self._left[self._complete]
            self._complete += 1

    def _tell(self) -> None:
        """Tell the user of the steps that are complete."""
        while self._told < self._complete:
            step, self._told = self._told, self._told + 1
            self._step_finished(step, self._metrics.close(step, self._now()))

    # Ends

    def _failure(self, stop: Stop) -> ExecutionError:
        """What is known of a lost worker and those that were lost with it, or of a node that takes too long."""
        if not self._lost:
            self._crew.dump_stacks()
            slowest = min(self._running.values(), key=lambda running: running.since_s)
            missing = sorted(slowest.ranks - set(slowest.reports))
            words = self._crew.last_words(missing[0]) if missing else []
            waits = f"without a report: the workers of GPUs {', '.join(map(str, missing))}"
            return ExecutionError(
                stop.reason, facts=[waits, *stop.facts, *words], hint="megatron.node_timeout_s is the limit"
            )
        first, *others = self._lost
        facts = [
            f"worker {first.rank}: {self._crew.device(first.rank)}",
            *stop.facts,
            *(f"lost with it: the worker of GPU {other.rank}: {other.reason}" for other in others),
            *self._crew.last_words(first.rank, first.lines),
        ]
        return ExecutionError(stop.reason, facts=facts)

    def _stop(self, reason: str) -> None:
        """Close the journal of a run that ends early."""
        self._journal.write(Stopped(self._now(), reason, self._complete))
        self._journal.flush()

    def _now(self) -> float:
        return self._clock() - self._begin_s


def reason_of(error: BaseException) -> str:
    """Why a run ended that this error ends, for the last record of its trace."""
    if isinstance(error, KeyboardInterrupt):
        return GIVEN_UP
    return error.what if isinstance(error, RpegError) else type(error).__name__
