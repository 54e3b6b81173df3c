"""The records of a trace, as values."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

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
    "Stopped",
    "TraceHeader",
    "Transferred",
    "dispatch_records",
    "release_record",
]

SCHEMA = 1
"""Of the file."""


@attrs.frozen(kw_only=True)
class TraceHeader:
    """Where a trace comes from.

    Attributes:
        plan: digest of the executed plan, None when it was made without a plan file.
        backend: name of the backend.
        steps: the run was to end after steps ``0 .. steps - 1``; it ended earlier when a :class:`Stopped` says so.
        clock: ``virtual`` or ``wall``; times count from the start of the run.
        notes: what a reader of the times must know, a sentence each.
        first_step: the run began at the start of this step; an earlier run made those before it.
        schema: of the file.
    """

    plan: str | None
    backend: str
    steps: int
    clock: str
    notes: tuple[str, ...] = ()
    first_step: int = 0
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
    """Weights that a node uses or installs; a fused operator has a record for each of its models."""

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
    """A COMM or RESHARD moved something; ``time_s`` is when it ended.

    ``bytes`` are those of the container that lowering charges. ``wire_bytes`` are all that went from one worker to
    another, as measured; None where nothing was measured.
    """

    time_s: float
    node: int
    bytes: float
    wire_bytes: float | None = None


@attrs.frozen
class Released:
    """Nothing needs the artifact any more."""

    time_s: float
    artifact: Artifact


@attrs.frozen
class Stopped:
    """The run ended before its last step, on purpose or by a failure; the last record of such a run.

    Steps ``0 .. steps_done - 1`` are complete, those before the run's first step included.
    """

    time_s: float
    reason: str
    steps_done: int


Record = Dispatched | Bound | Started | Ended | Transferred | Released | Stopped


def dispatch_records(instruction: Dispatch, time_s: float) -> Iterator[Record]:
    """The records of a dispatch: the node, and the versions that it is bound to."""
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
    if node.version is not None:
        for model in node.models:
            yield Bound(time_s, node.index, model, node.version)


def release_record(instruction: Release, time_s: float) -> Released:
    """The record of a release."""
    return Released(time_s, instruction.artifact)
