"""The engine: executes the graph of a plan, step after step, as a pure state machine without torch, sockets or clock.

Policy. A node is *ready* when its predecessors are done. It is dispatched when every GPU that it holds is free: an
operator's allocation, a transfer's destination and its source. Among the ready nodes the order is: earlier RL step,
transfers (COMM, RESHARD) before operators, then topological order. A transfer belongs to the step that made what it
carries: published weights of step k go before the data of step k + 1, or else a busy trainer would hold them up until
its next update. A node that has to wait for a GPU does not keep
others off the GPUs that it could have (no reservation). Predicted times play no part. A transfer of weights with
staleness also waits until the version whose room it takes was served for the last time (:attr:`StepShape.vacating`).

Memory. At most ``window.depth`` steps are in progress: step k opens when all nodes of step ``k - depth`` are done, so
that an operator that waits for nothing cannot run away from its consumers. What is kept does not grow with the number
of steps (:attr:`Engine.counters`); a step is forgotten once it and all before it are done.

Artifacts. What a node made is released when its last reader is done, at once when nothing reads it. The weights that
the last step's training made are the result of the run and never released. A run that pauses for checkpoints, or began
at one, can be continued with more steps: it keeps what later steps would read, and releases the rest of that last.

Pauses. With ``pause_every`` no node of step N, 2N, ... is opened until everything before is done; the engine then
says :class:`Pause`, nothing runs, and what is live (:attr:`Engine.live`) is all that the steps to come need. It goes on
with :class:`Proceed`. It pauses at the end of the run too. A run that starts at ``first_step`` takes all earlier steps
as done and their artifacts, those that are live at a pause there, as made.

Cancelling. After :class:`Cancel` nothing is dispatched; the run stops when the running nodes are done.

The cost of an event is O(log n) in the nodes that wait for a GPU, whatever the number of GPUs: GPUs between
neighbouring ends of allocations are one segment; a blocked node waits in the queue of one busy segment of those it
needs, and is looked at again when that one is free and everything before it in the queue was.
"""

from __future__ import annotations

import bisect
import collections
import heapq

import attrs

from rpeg_core.errors import ExecutionError
from rpeg_core.ir import Role
from rpeg_core.passes.lower import NodeKind
from rpeg_core.passes.schedule import Segments, reserved
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
    WorkerLost,
)
from rpeg_core.runtime.window import StepShape, Window
from rpeg_core.spec.machine import Allocation

__all__ = ["Counters", "Engine"]

STORY_LENGTH = 2000
"""How many transitions are remembered for :meth:`Engine.story`."""

_WAITING, _READY, _RUNNING, _DONE = range(4)


@attrs.frozen(kw_only=True)
class Counters:
    """How much the engine keeps now, and what it did so far."""

    open_steps: int
    open_nodes: int
    blocked: int
    running: int
    artifacts: int
    steps_done: int
    dispatched: int
    finished: int


@attrs.frozen(eq=False)
class _Places:
    """What the nodes of one shape hold, by position: allocations, segments, and segments as bits."""

    held: tuple[tuple[Allocation, ...], ...]
    segments: tuple[tuple[int, ...], ...]
    masks: tuple[int, ...]

    @classmethod
    def of(cls, shape: StepShape, segments: Segments) -> _Places:
        held = tuple(reserved(node, reserve_source=True) for node in shape.nodes)
        within = tuple(tuple(sorted({s for a in each for s in segments.within(a)})) for each in held)
        return cls(held, within, tuple(sum(1 << s for s in each) for each in within))


@attrs.define(eq=False)
class _OpenStep:
    """A step in progress: state and missing predecessors by position, and how many nodes are not done."""

    shape: StepShape
    places: _Places
    state: bytearray
    missing: list[int]
    left: int


class Engine:
    """Executes ``steps`` steps of a window; the controller calls :meth:`start`, then :meth:`handle` for every event.

    The same events give the same instructions. A controller that learns of several events at one time hands them over
    in one call: nothing is dispatched until all of them are taken in.

    Args:
        window: the executable graph.
        steps: the run ends when steps ``0 .. steps - 1`` are done; more than ``first_step``.
        first_step: all steps before it were done by an earlier run.
        pause_every: pause where that many steps, or a multiple, are done, and at the end; None for no pauses.
        depth: steps in progress at once, ``window.depth`` by default; at least 1.
        limit_s: a node that runs longer ends the run when the next tick says so; None for no limit.
    """

    def __init__(
        self,
        window: Window,
        steps: int,
        *,
        first_step: int = 0,
        pause_every: int | None = None,
        depth: int | None = None,
        limit_s: float | None = None,
    ) -> None:
        for name, value in (("steps", steps), ("pause_every", pause_every), ("depth", depth)):
            if value is not None and value < 1:
                raise ValueError(f"{name} is {value}; allowed: at least 1")
        if not 0 <= first_step < steps:
            raise ValueError(f"first_step is {first_step} of {steps} steps; allowed: 0 to {steps - 1}")
        self._window, self._steps, self._limit_s = window, steps, limit_s
        self._depth = window.depth if depth is None else depth
        self._first, self._pause_every = first_step, pause_every
        self._goes_on = pause_every is not None or first_step > 0  # another run may follow and read what is left
        self._gate = self._next_gate(first_step)  # steps from here on are not opened
        self._paused: int | None = None
        self._cancelled: str | None = None
        shapes = [window.shape(step) for step in range(window.steady_step + 1)]
        ends = [a for shape in shapes for node in shape.nodes for a in reserved(node, reserve_source=True)]
        self._segments = Segments.of(ends, max(a.stop for a in ends))
        self._places = [_Places.of(shape, self._segments) for shape in shapes]
        self._free = (1 << self._segments.count) - 1
        self._open: dict[int, _OpenStep] = {}
        self._oldest = self._next = first_step
        # heaps of (step that made what is carried, rank, step, position): ready and not looked at yet, and held up
        self._new: list[tuple[int, int, int, int]] = []
        self._blocked: list[list[tuple[int, int, int, int]]] = [[] for _ in range(self._segments.count)]
        self._freed: set[int] = set()  # segments that became free since the last look
        self._running: dict[tuple[int, int], float] = {}  # (step, position) -> time of dispatch, oldest first
        self._unread: dict[tuple[int, int, str], int] = {}  # (step, position, container) -> readers not done
        self._last: dict[int, tuple[int, int]] = {}  # segment -> the node dispatched to it last
        self._log: collections.deque[tuple[float, int, str]] = collections.deque(maxlen=STORY_LENGTH)
        self._dispatched = self._finished = 0
        self._started = self._stopped = False

    @property
    def counters(self) -> Counters:
        """How much is kept now; everything but the last three stays bounded in a run of any length."""
        return Counters(
            open_steps=len(self._open),
            open_nodes=sum(step.left for step in self._open.values()),
            blocked=sum(map(len, self._blocked)),
            running=len(self._running),
            artifacts=len(self._unread),
            steps_done=self._oldest,
            dispatched=self._dispatched,
            finished=self._finished,
        )

    @property
    def steps_done(self) -> int:
        """How many steps are done, not counting those that an earlier one still has to follow."""
        return self._oldest

    @property
    def live(self) -> tuple[Artifact, ...]:
        """What was made, or is there from the start, and still has a reader to come; in a fixed order."""
        return tuple(self._window.artifact(*key) for key in sorted(self._unread))

    @property
    def stopped(self) -> bool:
        """Whether :class:`Stop` was given; the engine ignores what comes after."""
        return self._stopped

    def start(self, time_s: float = 0.0) -> list[Instruction]:
        """The first instructions."""
        if self._started:
            raise ExecutionError("the engine was started twice")
        self._started = True
        self._take_over()
        self._open_steps(time_s)
        return self._dispatch_all(time_s, [])

    def handle(self, *events: Event) -> list[Instruction]:
        """What to do about events that became known at one time.

        Raises:
            ExecutionError: a node is reported finished that does not run, or the engine shall go on but is not paused.
        """
        out: list[Instruction] = []
        for event in events:
            if self._stopped:
                return out
            if isinstance(event, NodeFinished):
                self._finish(event, out)
            elif isinstance(event, WorkerLost):
                self._lose(event, out)
            elif isinstance(event, Cancel):
                self._cancelled = event.reason
            elif isinstance(event, Proceed):
                self._proceed(event, out)
            else:
                self._check_limit(event.time_s, out)
        return out if self._stopped or not events else self._dispatch_all(events[-1].time_s, out)

    def story(self, index: int) -> tuple[str, ...]:
        """What happened to a node and what it waits for, one line each, for messages about failures."""
        step, position = self._window.locate(index)
        node = self._window.node(step, position)
        where = " and ".join(f"GPUs {a}" for a in reserved(node, reserve_source=True))
        lines = [f"{node.label}: step {step}, {where}"]
        lines += [f"at {time_s:.6g} s: {what}" for time_s, other, what in self._log if other == index]
        if step >= self._next:
            return (*lines, f"step {step} is not open; step {self._oldest} is in progress")
        if step < self._oldest:
            return (*lines, "done")
        opened = self._open[step]
        state = opened.state[position]
        if state == _WAITING:
            for back, other in (*opened.shape.predecessors[position], *opened.shape.vacating[position]):
                if not self._is_done(step - back, other):
                    lines.append(f"waits for {self._window.node(step - back, other).label}")
        elif state == _READY:
            needed = opened.places.masks[position]
            for other in self._running:
                if self._places[min(other[0], self._window.steady_step)].masks[other[1]] & needed:
                    lines.append(f"waits for the GPUs of {self._window.node(*other).label}")
        return (*lines, ("waiting", "ready", "running", "done")[state])

    # Steps

    def _next_gate(self, done: int) -> int:
        """The next step boundary to pause at after ``done`` steps, or the end of the run."""
        every = self._pause_every
        return self._steps if every is None else min(self._steps, (done // every + 1) * every)

    def _take_over(self) -> None:
        """Count the readers to come of what was there before the first step: initial weights, earlier steps' work."""
        first, steady = self._first, self._window.steady_step
        last = steady if self._goes_on else min(self._steps, steady)
        for step in range(first, last):
            for reads in self._window.shape(step).reads:
                for _, position, container in reads:
                    if position < 0:
                        key = (-1, position, container)
                        self._unread[key] = self._unread.get(key, 0) + 1
        for step in range(max(0, first - steady), first):  # no edge spans more steps
            shape = self._window.shape(step)
            for position, (made, by_container) in enumerate(zip(shape.writes, shape.readers, strict=True)):
                for container, readers in zip(made, by_container, strict=True):
                    count = sum(1 for ahead, _ in readers if step + ahead >= first)
                    if count:
                        self._unread[step, position, container] = count

    def _proceed(self, event: Proceed, out: list[Instruction]) -> None:
        if self._paused is None:
            raise ExecutionError("the engine shall go on, but it is not paused")
        self._paused = None
        self._gate = self._next_gate(self._oldest)
        if self._oldest == self._steps:
            self._complete(out)
        else:
            self._open_steps(event.time_s)

    def _open_steps(self, time_s: float) -> None:
        while self._next < min(self._gate, self._oldest + self._depth):
            step = self._next
            shape = self._window.shape(step)
            count = len(shape.nodes)
            opened = _OpenStep(
                shape=shape,
                places=self._places[min(step, self._window.steady_step)],
                state=bytearray(count),
                missing=[
                    sum(1 for back, other in (*before, *serving) if not self._is_done(step - back, other))
                    for before, serving in zip(shape.predecessors, shape.vacating, strict=True)
                ],
                left=count,
            )
            self._open[step] = opened
            self._next += 1
            for position, missing in enumerate(opened.missing):
                if missing == 0:
                    self._make_ready(step, opened, position, time_s)

    def _is_done(self, step: int, position: int) -> bool:
        return step < self._oldest or (step in self._open and self._open[step].state[position] == _DONE)

    def _make_ready(self, step: int, opened: _OpenStep, position: int, time_s: float) -> None:
        opened.state[position] = _READY
        self._log.append((time_s, self._window.index(step, position), "ready"))
        shape = opened.shape
        heapq.heappush(self._new, (step - shape.carried[position], shape.rank[position], step, position))

    # Nodes

    def _dispatch_all(self, time_s: float, out: list[Instruction]) -> list[Instruction]:
        """Dispatch what can run: best first among the new nodes and those that waited for a segment now free."""
        if self._cancelled is not None:
            if self._oldest == self._steps and not self._stopped:  # paused at the end
                self._complete(out)
            elif not self._running and not self._stopped:
                self._stop(Stop(self._cancelled, failed=False), out)
            return out
        queues = [(-1, self._new), *((segment, self._blocked[segment]) for segment in sorted(self._freed))]
        self._freed.clear()
        heads = [(queue[0], segment, queue) for segment, queue in queues if queue]
        heapq.heapify(heads)
        while heads:
            candidate, segment, queue = heads[0]
            if segment >= 0 and not self._free >> segment & 1:  # taken again, the rest of the queue goes on waiting
                heapq.heappop(heads)
                continue
            heapq.heappop(queue)
            if queue:
                heapq.heapreplace(heads, (queue[0], segment, queue))
            else:
                heapq.heappop(heads)
            _, _, step, position = candidate
            opened = self._open[step]
            busy = opened.places.masks[position] & ~self._free
            if busy:
                heapq.heappush(self._blocked[busy.bit_length() - 1], candidate)
            else:
                out.append(self._dispatch(step, opened, position, time_s))
        if not self._running and not self._stopped and self._paused is None:
            first = min(self._open)
            stuck = self._open[first].state.index(_WAITING)
            raise ExecutionError("no node can run", facts=self.story(self._window.index(first, stuck)))
        return out

    def _dispatch(self, step: int, opened: _OpenStep, position: int, time_s: float) -> Dispatch:
        self._free &= ~opened.places.masks[position]
        opened.state[position] = _RUNNING
        key = (step, position)
        self._running[key] = time_s
        for segment in opened.places.segments[position]:
            self._last[segment] = key
        self._dispatched += 1
        node = self._window.node(step, position)
        self._log.append((time_s, node.index, "dispatched"))
        reads = opened.shape.reads[position]
        artifact = self._window.artifact
        inputs = tuple([artifact(step - back, maker, container) for back, maker, container in reads])
        return Dispatch(node, inputs, opened.places.held[position])

    def _finish(self, event: NodeFinished, out: list[Instruction]) -> None:
        step, position = self._window.locate(event.node)
        if self._running.pop((step, position), None) is None:
            raise ExecutionError(
                f"node {event.node} was reported finished, but it is not running", facts=self.story(event.node)
            )
        opened = self._open[step]
        opened.state[position] = _DONE
        opened.left -= 1
        self._finished += 1
        self._log.append((event.time_s, event.node, "finished"))
        self._free |= opened.places.masks[position]
        self._freed.update(opened.places.segments[position])
        self._consume(step, opened.shape, position, out)
        self._produce(step, opened.shape, position, out)
        for ahead, other in (*opened.shape.successors[position], *opened.shape.vacated[position]):
            later = self._open.get(step + ahead)
            if later is not None:
                later.missing[other] -= 1
                if later.missing[other] == 0:
                    self._make_ready(step + ahead, later, other, event.time_s)
        while self._oldest in self._open and self._open[self._oldest].left == 0:
            del self._open[self._oldest]
            self._oldest += 1
        self._open_steps(event.time_s)
        if self._oldest == self._gate and self._pause_every is not None:
            self._paused = self._oldest
            out.append(Pause(self._oldest))
        elif self._oldest == self._steps:
            self._complete(out)

    # Artifacts

    def _consume(self, step: int, shape: StepShape, position: int, out: list[Instruction]) -> None:
        for back, maker, container in shape.reads[position]:
            key = (step - back if maker >= 0 else -1, maker, container)
            self._unread[key] -= 1
            if self._unread[key] == 0:
                del self._unread[key]
                out.append(Release(self._window.artifact(*key)))

    def _produce(self, step: int, shape: StepShape, position: int, out: list[Instruction]) -> None:
        for container, readers in zip(shape.writes[position], shape.readers[position], strict=True):
            count = len(readers)
            if step + self._window.steady_step >= self._steps:  # the last steps
                if not self._goes_on:
                    count = sum(1 for ahead, _ in readers if step + ahead < self._steps)
                count += self._is_result(step, position)
            if count:
                self._unread[step, position, container] = count
            else:
                out.append(Release(self._window.artifact(step, position, container)))

    def _is_result(self, step: int, position: int) -> bool:
        """Whether the node trains in the last step, so that its weights are the result of the run."""
        if step != self._steps - 1 or position < 0:
            return False
        node = self._window.shape(step).nodes[position]
        return node.kind is NodeKind.OP and self._window.rpeg.operator(node.operator).role is Role.TRAINING

    # Ends

    def _complete(self, out: list[Instruction]) -> None:
        for key in sorted(key for key in self._unread if not self._is_result(*key[:2])):
            del self._unread[key]
            out.append(Release(self._window.artifact(*key)))
        self._stop(Stop(f"all {self._steps} steps are done", failed=False), out)

    def _stop(self, stop: Stop, out: list[Instruction]) -> None:
        self._stopped = True
        out.append(stop)

    def _lose(self, event: WorkerLost, out: list[Instruction]) -> None:
        segment = bisect.bisect_right(self._segments.bounds, event.rank) - 1
        last = self._last.get(segment) if 0 <= segment < self._segments.count else None
        facts = [f"no instruction was given to GPU {event.rank} before"]
        if last is not None:
            verb = "it was running" if last in self._running else "its last instruction was"
            facts = [f"{verb} {self._describe(*last)}", *self.story(self._window.index(*last))[1:]]
        facts.append(f"steps done: {self._oldest} of {self._steps}")
        reason = f"the worker of GPU {event.rank} was lost: {event.reason}"
        self._stop(Stop(reason, failed=True, facts=tuple(facts)), out)

    def _check_limit(self, time_s: float, out: list[Instruction]) -> None:
        oldest = next(iter(self._running.items()), None)
        if self._limit_s is None or oldest is None or time_s - oldest[1] <= self._limit_s:
            return
        key, since_s = oldest
        reason = f"{self._describe(*key)} has been running for {time_s - since_s:.6g} s"
        facts = (f"the limit is {self._limit_s:g} s", *self.story(self._window.index(*key)))
        self._stop(Stop(reason, failed=True, facts=facts), out)

    def _describe(self, step: int, position: int) -> str:
        node = self._window.node(step, position)
        return f"{node.label} (operator {node.operator}, step {step}, GPUs {node.allocation})"
