"""What a run did: one record per dispatch, version bind, start, end, transfer and release.

As a file, JSON lines: a header, then the records in the order in which they happened::

    {"record": "header", "plan": "sha256:...", "backend": "simulator", "steps": 8, "clock": "virtual", ...}
    {"record": "dispatch", "time_s": 0.0, "node": 0, "label": "actor_generation@0", "kind": "OP", ...}
    {"record": "end", "time_s": 4.0, "node": 0}

A record keeps each fact once: what a node is stands in its dispatch, the version in its bind, bytes in its transfer.
"""

from __future__ import annotations

import collections
import json
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError

from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import RpegError
from rpeg_core.passes.schedule import Segments
from rpeg_core.planning.assignment import Layout
from rpeg_core.runtime.protocol import Artifact, Dispatch, Release
from rpeg_core.spec.machine import Allocation

__all__ = [
    "SCHEMA",
    "Bound",
    "Dispatched",
    "Ended",
    "Record",
    "Released",
    "Started",
    "Trace",
    "TraceFileError",
    "TraceHeader",
    "Transferred",
    "dispatch_records",
    "release_record",
]

SCHEMA = 1


class TraceFileError(RpegError):
    """A trace file cannot be read."""

    code = "trace-file"
    exit_code = ExitCode.BAD_INPUT


@attrs.frozen(kw_only=True)
class TraceHeader:
    """Where a trace comes from.

    Attributes:
        plan: digest of the executed plan, None when it was made without a plan file.
        backend: name of the backend.
        steps: RL steps that were run.
        clock: ``virtual`` or ``wall``; times count from the start of the run.
        notes: what a reader of the times must know, a sentence each.
        schema: of the file.
    """

    plan: str | None
    backend: str
    steps: int
    clock: str
    notes: tuple[str, ...] = ()
    schema: int = SCHEMA


@attrs.frozen
class Dispatched:
    """The controller sent a node to its workers; fields as in :class:`rpeg_core.passes.lower.Node`."""

    time_s: float
    node: int
    label: str
    kind: str
    operator: str
    step: int
    phase: int | None
    allocation: Allocation
    source: Allocation | None
    layout: Layout | None
    microbatches: int
    container: str | None
    inputs: tuple[Artifact, ...]


@attrs.frozen
class Bound:
    """The weights that a node uses or installs."""

    time_s: float
    node: int
    model: str
    version: int


@attrs.frozen
class Started:
    """The first rank began."""

    time_s: float
    node: int


@attrs.frozen
class Ended:
    """The last rank was done."""

    time_s: float
    node: int


@attrs.frozen
class Transferred:
    """A COMM or RESHARD moved ``bytes``; ``time_s`` is when it ended."""

    time_s: float
    node: int
    bytes: float


@attrs.frozen
class Released:
    """Nothing needs the artifact any more."""

    time_s: float
    artifact: Artifact


Record = Dispatched | Bound | Started | Ended | Transferred | Released

_RECORDS: Mapping[str, type] = types.MappingProxyType(
    {
        "header": TraceHeader,
        "dispatch": Dispatched,
        "bind": Bound,
        "start": Started,
        "end": Ended,
        "transfer": Transferred,
        "release": Released,
    }
)
_NAMES = types.MappingProxyType({cls: name for name, cls in _RECORDS.items()})


def dispatch_records(instruction: Dispatch, time_s: float) -> Iterator[Record]:
    """The records of a dispatch: the node, and the version that it is bound to."""
    node = instruction.node
    yield Dispatched(
        time_s,
        node.index,
        node.label,
        node.kind.value,
        node.operator,
        node.step,
        node.phase,
        node.allocation,
        node.source,
        node.layout,
        node.microbatches,
        node.container,
        instruction.inputs,
    )
    if node.model is not None and node.version is not None:
        yield Bound(time_s, node.index, node.model, node.version)


def release_record(instruction: Release, time_s: float) -> Released:
    """The record of a release."""
    return Released(time_s, instruction.artifact)


@attrs.frozen
class Trace:
    """A finished run."""

    header: TraceHeader
    records: tuple[Record, ...]

    @property
    def makespan_s(self) -> float:
        """From the start of the run to the last end."""
        return max((record.time_s for record in self.records if isinstance(record, Ended)), default=0.0)

    @property
    def step_s(self) -> float:
        """Mean seconds per RL step."""
        return self.makespan_s / self.header.steps

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
        with _writing(path) as file:
            for record in (self.header, *self.records):
                kind = {"record": _NAMES[type(record)]}
                file.write(json.dumps({**kind, **_CONVERTER.unstructure(record)}) + "\n")

    @classmethod
    def read(cls, path: Path | str) -> Trace:
        """Read JSON lines.

        Raises:
            TraceFileError: the file or one of its lines cannot be read; names the line.
        """
        try:
            lines = Path(path).read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise TraceFileError(f"cannot read {path}", facts=[str(error)]) from error
        records = []
        for number, line in enumerate(lines, start=1):
            try:
                fields = json.loads(line)
                cls_of_record = _RECORDS[fields.pop("record")]
                if (cls_of_record is TraceHeader) != (number == 1):
                    raise ValueError("the first line, and no other, is the header")
                records.append(_CONVERTER.structure(fields, cls_of_record))
            except (ValueError, KeyError, TypeError, AttributeError, ForbiddenExtraKeysError) as error:
                raise TraceFileError(
                    f"line {number} of {path} is not a trace record", facts=[f"{type(error).__name__}: {error}"]
                ) from error
        if not records:
            raise TraceFileError(f"{path} is empty", facts=["a trace starts with a header"])
        if records[0].schema != SCHEMA:
            raise TraceFileError(f"{path} has schema {records[0].schema}", facts=[f"allowed: {SCHEMA}"])
        return cls(records[0], tuple(records[1:]))

    def write_chrome(self, path: Path | str) -> None:
        """Write a Chrome trace for https://ui.perfetto.dev: a track per group of GPUs that no plan tells apart.

        Raises:
            TraceFileError: the file cannot be written.
        """
        with _writing(path) as file:
            json.dump({"displayTimeUnit": "ms", "traceEvents": list(self._chrome_events())}, file)

    def _chrome_events(self) -> Iterator[dict[str, Any]]:
        nodes = [record for record in self.records if isinstance(record, Dispatched)]
        versions = {record.node: record for record in self.records if isinstance(record, Bound)}
        sizes = {record.node: record.bytes for record in self.records if isinstance(record, Transferred)}
        ends = [a for node in nodes for a in (node.allocation, node.source) if a is not None]
        segments = Segments.of(ends, max((a.stop for a in ends), default=1))
        for segment in range(segments.count):
            name = f"GPU {segments.allocation(segment)}"
            yield _meta("thread_name", segment, name=name)
            yield _meta("thread_sort_index", segment, sort_index=segment)
        for node, start_s, end_s in self.intervals():
            bound = versions.get(node.node)
            details = {
                "node": node.node,
                "step": node.step,
                "GPUs": str(node.allocation),
                "layout": None if node.layout is None else str(node.layout),
                "version": None if bound is None else f"{bound.model} {bound.version}",
                "bytes": sizes.get(node.node),
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


def _writing(path: Path | str) -> IO[str]:
    try:
        return Path(path).open("w", encoding="utf-8")
    except OSError as error:
        raise TraceFileError(f"cannot write {path}", facts=[error.strerror or str(error)]) from error


def _converter() -> cattrs.Converter:
    """Strict: every field must be there, no other, and of its type, so that a changed file is noticed."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)

    def exact(value: object, cls: type) -> object:
        if type(value) is not cls and not (cls is float and type(value) is int):
            raise TypeError(f"{value!r} is not of type {cls.__name__}")
        return cls(value)

    for cls in (int, float, str):
        converter.register_structure_hook(cls, exact)
    return converter


_CONVERTER = _converter()
