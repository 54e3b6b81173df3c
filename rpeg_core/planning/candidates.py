"""Which assignments are legal: rules P1-P8 of the paper (A-J2a), with the reason when one is not.

**[choice]** Intra-node data parallelism: a node hosts ``floor(Ng / (s * Pt))`` replicas when a pipeline fits one node,
and a plan that needs only part of one node occupies just that part. An allocation over several nodes fills each of
them, so that every allocated GPU holds exactly one shard (P8) and every allocation is an interval.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from rpeg_core.costing.batches import Ints, Layouts
from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload

__all__ = [
    "Candidates",
    "Extent",
    "extent_or_reason",
    "illegal_assignment",
    "illegal_layout",
    "legal_candidates",
    "legal_layouts",
    "origins",
]

MIN_SEQUENCES_PER_MICROBATCH = 8
"""P5: B_local / mb >= 8 keeps the SMs busy (paper, A-J2a)."""


@attrs.frozen
class Extent:
    """What an allocation spans in each dimension: whole racks, or nodes of one rack, or GPUs of one node."""

    racks: int
    nodes: int
    gpus: int


def extent_or_reason(machine: DeviceSpace, layout: Layout) -> Extent | str:
    """The extent of a layout (P6, P8), or the sentence that says why it does not pack."""
    per_node = machine.gpus_per_node
    stages = min(layout.pipeline, per_node // layout.tensor)
    if layout.pipeline % stages:
        return (
            f"P8: {stages} pipeline stages fit a node of {per_node} GPUs at tp={layout.tensor}, "
            f"which does not divide pp={layout.pipeline}"
        )
    nodes_per_replica = layout.pipeline // stages
    if nodes_per_replica == 1:
        replicas_per_node = per_node // (stages * layout.tensor)
        if layout.data <= replicas_per_node:
            return Extent(1, 1, layout.gpus)
        if replicas_per_node * stages * layout.tensor != per_node:
            return (
                f"P8: {replicas_per_node} replica(s) of {stages * layout.tensor} GPUs leave some of the "
                f"{per_node} GPUs of a node idle, so dp={layout.data} cannot continue on the next node"
            )
        if layout.data % replicas_per_node:
            return f"P8: dp={layout.data} does not fill whole nodes of {replicas_per_node} replica(s)"
        nodes = layout.data // replicas_per_node
    else:
        nodes = layout.data * nodes_per_replica
    if nodes <= machine.nodes_per_rack:
        return Extent(1, nodes, per_node)
    if nodes % machine.nodes_per_rack:
        return f"P6: {nodes} nodes are more than a rack of {machine.nodes_per_rack} and not whole racks"
    racks = nodes // machine.nodes_per_rack
    if racks > machine.racks:
        return f"P6: {racks} racks are needed, the cluster has {machine.racks}"
    return Extent(racks, machine.nodes_per_rack, per_node)


def illegal_layout(
    machine: DeviceSpace, workload: Workload, model: ModelSpec | None, layout: Layout, microbatches: int
) -> str | None:
    """The first broken rule of P1-P6 and P8 as a sentence, None when legal. ``model`` None is a function."""
    pd, pp, pt = layout.data, layout.pipeline, layout.tensor
    for name, value in (("dp", pd), ("pp", pp), ("tp", pt), ("microbatches", microbatches)):
        if value < 1:
            return f"{name} must be at least 1, not {value}"
    if model is None and (pp, pt) != (1, 1):
        return "a function without a model is only data parallel: pp=1 and tp=1"
    if machine.gpus_per_node % pt:
        return f"P1: tp={pt} does not divide the {machine.gpus_per_node} GPUs of a node"
    if model is not None:
        reason = model.tp_problem(pt)
        if reason is not None:
            return f"P1: {reason}"
        if model.layers % pp:
            return f"P2: pp={pp} does not divide the {model.layers} layers of {model.name}"
        if pp > 1 and pp % 2:
            return f"P2: pp={pp} is odd; a pipeline has 1 or an even number of stages"
    if workload.prompts % pd:
        return f"P3: dp={pd} does not divide the {workload.prompts} prompts of a step"
    if pd > machine.gpus:
        return f"P3: dp={pd} exceeds the {machine.gpus} GPUs of the cluster"
    local = workload.sequences // pd
    if pp == 1 and microbatches != 1:
        return f"P4: without a pipeline there is 1 microbatch, not {microbatches}"
    if pp > 1:
        if local % microbatches:
            return f"P5: {microbatches} microbatches do not divide the {local} sequences of a replica"
        if microbatches < pp:
            return f"P5: {microbatches} microbatches do not fill a pipeline of {pp} stages"
        if local // microbatches < MIN_SEQUENCES_PER_MICROBATCH:
            return (
                f"P5: {local} sequences in {microbatches} microbatches are fewer than "
                f"{MIN_SEQUENCES_PER_MICROBATCH} each"
            )
    extent = extent_or_reason(machine, layout)
    return extent if isinstance(extent, str) else None


def origins(machine: DeviceSpace, layout: Layout) -> tuple[int, ...]:
    """Start positions of the aligned allocations of a packable layout (P7), ascending."""
    extent = extent_or_reason(machine, layout)
    if isinstance(extent, str):
        return ()
    if extent.racks > 1 or extent.nodes == machine.nodes_per_rack > 1:
        step = extent.racks * machine.gpus_per_rack
        return tuple(range(0, machine.gpus - layout.gpus + 1, step))
    rack_starts = range(0, machine.gpus, machine.gpus_per_rack)
    if extent.nodes > 1:
        step = extent.nodes * machine.gpus_per_node
        within = range(0, machine.gpus_per_rack - layout.gpus + 1, step)
        return tuple(rack + start for rack in rack_starts for start in within)
    within = range(0, machine.gpus_per_node - extent.gpus + 1, extent.gpus)
    return tuple(node + start for node in range(0, machine.gpus, machine.gpus_per_node) for start in within)


def illegal_assignment(
    machine: DeviceSpace, workload: Workload, model: ModelSpec | None, assignment: Assignment
) -> str | None:
    """The first broken rule of P1-P8 as a sentence, None when the assignment is legal."""
    reason = illegal_layout(machine, workload, model, assignment.layout, assignment.microbatches)
    if reason is not None:
        return reason
    where, size = assignment.allocation, assignment.layout.gpus
    if where.size != size:
        return f"P8: GPUs {where} are {where.size}, {assignment.layout} needs {size}"
    if where.start < 0 or where.stop > machine.gpus:
        return f"P7: GPUs {where} are outside the cluster's 0-{machine.gpus - 1}"
    starts = origins(machine, assignment.layout)
    if where.start not in starts:
        near = min(starts, key=lambda start: abs(start - where.start))
        return (
            f"P7: an allocation of {size} GPUs for {assignment.layout} cannot start at GPU {where.start}; "
            f"the nearest aligned start is {near}"
        )
    return None


def legal_layouts(
    machine: DeviceSpace, workload: Workload, model: ModelSpec | None, also: Sequence[ModelSpec] = ()
) -> tuple[tuple[Layout, int], ...]:
    """All (layout, microbatches) that satisfy P1-P6 and P8 for the model, and for those in ``also``; sorted."""
    tensors = _divisors(machine.gpus_per_node) if model is not None else (1,)
    pipelines = [p for p in _divisors(model.layers) if p == 1 or p % 2 == 0] if model is not None else [1]
    found = []
    for pd in _divisors(workload.prompts):
        local = workload.sequences // pd
        for pp in pipelines:
            counts = (1,) if pp == 1 else tuple(mb for mb in _divisors(local) if mb >= pp)
            for pt in tensors:
                layout = Layout(pd, pp, pt)
                if layout.gpus > machine.gpus:
                    continue
                found.extend(
                    (layout, mb)
                    for mb in counts
                    if all(illegal_layout(machine, workload, m, layout, mb) is None for m in (model, *also))
                )
    return tuple(sorted(found))


@attrs.frozen(kw_only=True, eq=False)
class Candidates:
    """X_cand(v): every legal assignment of one operator, as arrays.

    ``layout``, ``start`` and ``stop`` have one entry per candidate; ``layout`` indexes ``layouts``.
    """

    operator: str
    layouts: Layouts
    layout: Ints
    start: Ints
    stop: Ints

    def __len__(self) -> int:
        return len(self.layout)

    def assignment(self, index: int) -> Assignment:
        """The candidate as an assignment."""
        row = int(self.layout[index])
        return Assignment(
            Allocation(int(self.start[index]), int(self.stop[index])),
            self.layouts.layout(row),
            int(self.layouts.microbatches[row]),
        )

    def find(self, assignment: Assignment) -> int | None:
        """Index of an assignment, None when it is not a candidate."""
        rows = self.layouts
        hit = (
            (self.start == assignment.allocation.start)
            & (self.stop == assignment.allocation.stop)
            & (rows.data[self.layout] == assignment.layout.data)
            & (rows.pipeline[self.layout] == assignment.layout.pipeline)
            & (rows.tensor[self.layout] == assignment.layout.tensor)
            & (rows.microbatches[self.layout] == assignment.microbatches)
        )
        found = np.flatnonzero(hit)
        return int(found[0]) if len(found) else None

    def take(self, indices: Ints) -> Candidates:
        """The candidates at ``indices``, in that order."""
        return attrs.evolve(self, layout=self.layout[indices], start=self.start[indices], stop=self.stop[indices])


def legal_candidates(
    operator: str,
    machine: DeviceSpace,
    workload: Workload,
    model: ModelSpec | None,
    also: Sequence[ModelSpec] = (),
) -> Candidates:
    """All legal candidates of an operator, sorted by (layout, microbatches, start).

    A fused operator's are legal for each of its models, ``model`` and those in ``also``.
    """
    pairs = legal_layouts(machine, workload, model, also)
    layout, start, stop = [], [], []
    cache: dict[Layout, tuple[int, ...]] = {}
    for row, (degrees, _) in enumerate(pairs):
        if degrees not in cache:
            cache[degrees] = origins(machine, degrees)
        for origin in cache[degrees]:
            layout.append(row)
            start.append(origin)
            stop.append(origin + degrees.gpus)
    return Candidates(
        operator=operator,
        layouts=_layouts(machine, pairs),
        layout=np.array(layout, np.int64),
        start=np.array(start, np.int64),
        stop=np.array(stop, np.int64),
    )


def _layouts(machine: DeviceSpace, pairs: tuple[tuple[Layout, int], ...]) -> Layouts:
    data_tier, stage_tier, stages = [], [], []
    for layout, _ in pairs:
        start = origins(machine, layout)[0]
        data_tier.append(int(machine.tier(start, start + layout.gpus)))
        replica = layout.pipeline * layout.tensor
        stage_tier.append(
            max(int(machine.tier(first, first + replica)) for first in range(start, start + layout.gpus, replica))
        )
        stages.append(min(layout.pipeline, machine.gpus_per_node // layout.tensor))

    def column(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    return Layouts(
        data=column([layout.data for layout, _ in pairs]),
        pipeline=column([layout.pipeline for layout, _ in pairs]),
        tensor=column([layout.tensor for layout, _ in pairs]),
        microbatches=column([mb for _, mb in pairs]),
        gpus=column([layout.gpus for layout, _ in pairs]),
        data_tier=column(data_tier),
        stage_tier=column(stage_tier),
        stages_per_node=column(stages),
    )


def _divisors(value: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return tuple(sorted({*small, *(value // d for d in small)}))
