"""A trace as a value: times, work per operator, files."""

from __future__ import annotations

import collections
import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import attrs

from rpeg_core.passes.schedule import Segments
from rpeg_core.runtime.trace.files import TraceWriter, opened, read_records
from rpeg_core.runtime.trace.records import (
    Bound,
    Dispatched,
    Ended,
    Record,
    Started,
    Stopped,
    TraceHeader,
    Transferred,
)

__all__ = ["Trace"]


@attrs.frozen
class Trace:
    """A run that is over."""

    header: TraceHeader
    records: tuple[Record, ...]

    @property
    def makespan_s(self) -> float:
        """From the start of the run to the last end."""
        return max((record.time_s for record in self.records if isinstance(record, Ended)), default=0.0)

    @property
    def steps(self) -> int:
        """RL steps that this run completed: without those before its first one, and those that a stop cut off."""
        last = self.records[-1] if self.records else None
        done = last.steps_done if isinstance(last, Stopped) else self.header.steps
        return done - self.header.first_step

    @property
    def step_s(self) -> float:
        """Mean seconds per complete RL step: until the last of them ended; infinite when none is complete."""
        if self.steps == 0:
            return math.inf
        after = self.header.first_step + self.steps
        if after == self.header.steps:
            return self.makespan_s / self.steps
        step = {record.node: record.step for record in self.records if isinstance(record, Dispatched)}
        ends = (record for record in self.records if isinstance(record, Ended))
        return max(record.time_s for record in ends if step[record.node] < after) / self.steps

    def intervals(self) -> Iterator[tuple[Dispatched, float, float]]:
        """(dispatch, start, end) of every node that ended, in the order of the ends."""
        dispatched: dict[int, Dispatched] = {}
        started: dict[int, float] = {}
        for record in self.records:
            if isinstance(record, Dispatched):
                dispatched[record.node] = record
            elif isinstance(record, Started):
                started[record.node] = record.time_s
            elif isinstance(record, Ended):
                yield dispatched.pop(record.node), started.pop(record.node), record.time_s

    def busy_s(self) -> dict[str, tuple[float, float]]:
        """Operator -> (seconds that it ran, seconds of transfers to it), over the run, by operator name."""
        total: dict[str, list[float]] = collections.defaultdict(lambda: [0.0, 0.0])
        for node, start_s, end_s in self.intervals():
            total[node.operator][node.kind != "OP"] += end_s - start_s
        return {name: (run, moved) for name, (run, moved) in sorted(total.items())}

    def write(self, path: Path | str) -> None:
        """Write JSON lines.

        Raises:
            TraceFileError: the file cannot be written.
        """
        with TraceWriter(path, self.header) as writer:
            for record in self.records:
                writer.write(record)

    @classmethod
    def read(cls, path: Path | str) -> Trace:
        """Read JSON lines.

        Raises:
            TraceFileError: the file or one of its lines cannot be read, was changed, or lines are missing.
        """
        header, *records = read_records(path)
        return cls(header, tuple(records))

    def write_chrome(self, path: Path | str) -> None:
        """Write a Chrome trace for https://ui.perfetto.dev: a track per group of GPUs that no plan tells apart.

        Raises:
            TraceFileError: the file cannot be written.
        """
        with opened(path, "w") as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(self._chrome_events())}, file)

    def _chrome_events(self) -> Iterator[dict[str, Any]]:
        nodes = [record for record in self.records if isinstance(record, Dispatched)]
        versions: dict[int, list[str]] = {}
        for record in self.records:
            if isinstance(record, Bound):
                versions.setdefault(record.node, []).append(f"{record.model} {record.version}")
        moved = {record.node: record for record in self.records if isinstance(record, Transferred)}
        ends = [a for node in nodes for a in (node.allocation, node.source) if a is not None]
        segments = Segments.of(ends, max((a.stop for a in ends), default=1))
        for segment in range(segments.count):
            name = f"GPU {segments.allocation(segment)}"
            yield _meta("thread_name", segment, name=name)
            yield _meta("thread_sort_index", segment, sort_index=segment)
        for node, start_s, end_s in self.intervals():
            details = {
                "node": node.node,
                "step": node.step,
                "GPUs": str(node.allocation),
                "layout": None if node.layout is None else str(node.layout),
                "version": ", ".join(versions[node.node]) if node.node in versions else None,
                "bytes": None if node.node not in moved else moved[node.node].bytes,
                "wire_bytes": None if node.node not in moved else moved[node.node].wire_bytes,
            }
            held = {a for a in (node.allocation, node.source) if a is not None}
            for segment in sorted({s for a in held for s in segments.within(a)}):
                yield {
                    "ph": "X",
                    "pid": 0,
                    "tid": segment,
                    "name": node.label,
                    "cat": node.kind,
                    "ts": start_s * 1e6,
                    "dur": (end_s - start_s) * 1e6,
                    "args": {key: value for key, value in details.items() if value is not None},
                }


def _meta(event: str, track: int, **values: object) -> dict[str, Any]:
    return {"ph": "M", "pid": 0, "tid": track, "name": event, "args": values}
