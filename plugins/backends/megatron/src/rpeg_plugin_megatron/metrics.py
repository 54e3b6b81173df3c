"""What the workers report, as numbers per node and per step; ``metrics.jsonl`` and TensorBoard.

Names of a step's metrics:

* ``<operator>/<name>`` for whatever an operator's ranks reported: ``actor_training/loss``. Of several ranks the mean is
  taken over those that report the name, each for the whole batch or for an equal share of it; of a name that ends in
  ``_max`` the largest. Length phases of an operator count alike.
* ``seconds/<operator>``: from the dispatch of its nodes to their end; ``transfer_seconds/<operator>``: of the transfers
  that it waited for.
* ``seconds``: since the step before ended, or the checkpoint after it was written; ``time_s``: since the run began;
  ``tokens_per_s``: of the workload.
"""

from __future__ import annotations

import collections
import json
import math
import statistics
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import attrs

from rpeg_core.errors import BackendError
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_plugin_megatron.messages import Done

__all__ = ["MetricsFiles", "StepMetrics", "charged_bytes", "combine"]

FLUSH_S = 10
"""How often TensorBoard's writer, which has a thread of its own, writes what it was given."""


def charged_bytes(node: Node, delivered_bytes: int, container_bytes: int, due_bytes: int | None = None) -> float:
    """What lowering charges for a transfer that delivered ``delivered_bytes`` of unique payload over all its ranks.

    Weights that go to partly the same GPUs are charged for the share of the larger allocation that does not overlap
    (model.md, section 2, stage 4); a rank routes what its new shard lacks, which depends on the layouts. The part of a
    length phase is a fraction of the rows; when exactly the whole rows that stand for it arrived, that is charged.
    Everything else is charged as it is.

    Args:
        node: the transfer.
        delivered_bytes: the sum over the ranks; ``container_bytes`` when all of the container arrived.
        container_bytes: of the whole container.
        due_bytes: of the whole rows of a length phase, see :func:`rpeg_plugin_megatron.flow.due_bytes`.
    """
    if due_bytes is not None and delivered_bytes == due_bytes:
        return node.payload_bytes
    if node.kind is not NodeKind.COMM or node.model is None or node.source is None:
        return float(delivered_bytes)
    largest = max(node.source.size, node.allocation.size)
    share = (largest - node.source.overlap(node.allocation)) / largest
    charged = container_bytes * share
    return charged if delivered_bytes == container_bytes else charged * (delivered_bytes / container_bytes)


def combine(reports: Iterable[Mapping[str, float]]) -> dict[str, float]:
    """One value for each name that was reported, by name."""
    values: dict[str, list[float]] = collections.defaultdict(list)
    for report in reports:
        for name, value in report.items():
            values[name].append(value)
    return {
        name: max(found) if name.endswith("_max") else statistics.fmean(found) for name, found in sorted(values.items())
    }


@attrs.define
class _Step:
    """A step in progress."""

    reported: dict[str, list[Mapping[str, float]]] = attrs.field(factory=lambda: collections.defaultdict(list))
    seconds: dict[str, float] = attrs.field(factory=lambda: collections.defaultdict(float))


class StepMetrics:
    """Collects what nodes report, by step; keeps the steps in progress only.

    Args:
        tokens_per_step: of the workload.
    """

    def __init__(self, tokens_per_step: float) -> None:
        self._tokens_per_step = tokens_per_step
        self._steps: dict[int, _Step] = collections.defaultdict(_Step)
        self._previous_s = 0.0

    def add(self, node: Node, seconds: float, reports: Sequence[Done]) -> None:
        """A node ended on all its ranks, ``seconds`` after its dispatch."""
        step = self._steps[node.step]
        if node.kind is NodeKind.OP:
            step.reported[node.operator].append(combine(done.metrics for done in reports))
        step.seconds[("seconds/" if node.kind is NodeKind.OP else "transfer_seconds/") + node.operator] += seconds

    def leave_out(self, time_s: float) -> None:
        """What happened since the last step ended was no work on the next one."""
        self._previous_s = time_s

    def close(self, step: int, time_s: float) -> dict[str, float]:
        """The metrics of a step that is complete, by name, ``time_s`` after the start of the run."""
        found = self._steps.pop(step, _Step())
        seconds = time_s - self._previous_s
        self._previous_s = time_s
        metrics = {"seconds": seconds, "time_s": time_s}
        if seconds > 0:
            metrics["tokens_per_s"] = self._tokens_per_step / seconds
        metrics |= dict(sorted(found.seconds.items()))
        for operator, reports in sorted(found.reported.items()):
            metrics |= {f"{operator}/{name}": value for name, value in combine(reports).items()}
        return metrics


class MetricsFiles:
    """``metrics.jsonl``, one line per step, and a TensorBoard folder; both are readable while the run goes on.

    Args:
        lines: path of the JSON lines. Lines of steps from ``first_step`` on, which are about to be run again, are
            dropped; a run that starts at 0 begins anew.
        tensorboard: folder of event files, None for none.
        first_step: of this run.

    Raises:
        BackendError: a file cannot be written.
    """

    def __init__(self, lines: Path, tensorboard: Path | None, first_step: int) -> None:
        try:
            kept = _earlier(lines, first_step)
            self._lines = lines.open("w", encoding="utf-8")
            self._lines.writelines(kept)
            self._lines.flush()
        except OSError as error:
            raise BackendError(f"cannot write {lines}", facts=[error.strerror or str(error)]) from error
        self._events = None if tensorboard is None else _Events(tensorboard, first_step)

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        """Add a step; JSON has no word for a value that is not a finite number, so that it becomes null."""
        finite = {name: value if math.isfinite(value) else None for name, value in metrics.items()}
        self._lines.write(json.dumps({"step": step, **finite}) + "\n")
        self._lines.flush()
        if self._events is not None:
            self._events.write(step, metrics)

    def close(self) -> None:
        """Close the files."""
        self._lines.close()
        if self._events is not None:
            self._events.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def _earlier(lines: Path, first_step: int) -> list[str]:
    """The lines of steps before ``first_step``; a last line that was cut is dropped."""
    if first_step == 0 or not lines.exists():
        return []
    kept = []
    for line in lines.read_text(encoding="utf-8").splitlines(keepends=True):
        try:
            if json.loads(line)["step"] < first_step:
                kept.append(line)
        except ValueError:
            break
    return kept


class _Events:
    """Scalars for TensorBoard, by its own writer, which needs no torch."""

    def __init__(self, folder: Path, first_step: int) -> None:
        from tensorboard.compat.proto.event_pb2 import Event, SessionLog
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        self._event, self._summary = Event, Summary
        self._writer = EventFileWriter(str(folder), flush_secs=FLUSH_S)
        # What earlier event files say of these steps is void.
        start = SessionLog(status=SessionLog.START)
        self._writer.add_event(Event(wall_time=time.time(), step=first_step, session_log=start))

    def write(self, step: int, metrics: Mapping[str, float]) -> None:
        values = [self._summary.Value(tag=name, simple_value=value) for name, value in metrics.items()]
        summary = self._summary(value=values)
        self._writer.add_event(self._event(wall_time=time.time(), step=step, summary=summary))

    def close(self) -> None:
        self._writer.close()
