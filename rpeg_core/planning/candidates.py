"""Which assignments are legal: rules P1-P8 of the paper (A-J2a), with the reason when one is not.

**[choice]** Intra-node data parallelism: a node hosts ``floor(Ng / (s * Pt))`` replicas when a pipeline fits one node,
and a plan that needs only part of one node occupies just that part. An allocation over several nodes fills each of
them, so that every allocated GPU holds exactly one shard (P8) and every allocation is an interval.

**[choice]** Context and expert parallelism, which the paper does not have. A stage of a replica is Pc * Pt GPUs, and
takes the place of Pt in the packing: floor(Ng / (Pc * Pt)) stages per node, or whole nodes for a stage that is larger
than one. Batches are divided by Pd only: context ranks work on the same sequences (P3, P5). Pe needs no GPUs and
divides the Pd * Pc * Pt ranks of a stage, as in Megatron-LM (``expert_model_parallel_size``, megatron/core/
parallel_state.py, with experts that are not tensor parallel). The two chunks of a sequence that a context rank has,
for equal causal work, are Megatron-LM's too (``get_batch_on_this_cp_rank``).
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import attrs
import numpy as np

from rpeg_core.costing.batches import Ints, Layouts
from rpeg_core.planning.assignment import Assignment, Layout, Mode
from rpeg_core.planning.axes import Axes, illegal_mode
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload

__all__ = [
    "PAPER",
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


PAPER = Axes()
"""The paper's plan space."""


@attrs.frozen
class Extent:
    """What an allocation spans in each dimension: whole racks, or nodes of one rack, or GPUs of one node."""

    racks: int
    nodes: int
    gpus: int


def extent_or_reason(machine: DeviceSpace, layout: Layout) -> Extent | str:
    """The extent of a layout (P6, P8), or the sentence that says why it does not pack."""
    per_node = machine.gpus_per_node
    stages = _stages_per_node(machine, layout)
    if layout.stage > per_node and layout.stage % per_node:
        return f"P8: a stage of cp={layout.context} * tp={layout.tensor} GPUs is more than a node and not whole nodes"
    if layout.pipeline % stages:
        degrees = f"tp={layout.tensor}" + (f" and cp={layout.context}" if layout.context > 1 else "")
        return (
            f"P8: {stages} pipeline stages fit a node of {per_node} GPUs at {degrees}, "
            f"which does not divide pp={layout.pipeline}"
        )
    nodes_per_replica = layout.pipeline // stages * max(1, layout.stage // per_node)
    if nodes_per_replica > 1 and stages * layout.stage < per_node:
        return (
            f"P8: {stages} pipeline stages of {layout.stage} GPUs leave some of the {per_node} GPUs of a node idle, "
            f"so pp={layout.pipeline} cannot continue on the next node"
        )
    if nodes_per_replica == 1:
        replicas_per_node = per_node // layout.replica
        if layout.data <= replicas_per_node:
            return Extent(1, 1, layout.gpus)
        if replicas_per_node * layout.replica != per_node:
            return (
                f"P8: {replicas_per_node} replica(s) of {layout.replica} GPUs leave some of the "
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


def _stages_per_node(machine: DeviceSpace, layout: Layout) -> int:
    """s: stages of one replica in a node; 1 for a stage of one or more nodes."""
    return min(layout.pipeline, max(1, machine.gpus_per_node // layout.stage))


def illegal_layout(
    machine: DeviceSpace, workload: Workload, model: ModelSpec | None, layout: Layout, microbatches: int
) -> str | None:
    """The first broken rule of P1-P6, P8, CP and EP as a sentence, None when legal. ``model`` None is a function."""
    pd, pp, pt, pc, pe = layout.data, layout.pipeline, layout.tensor, layout.context, layout.expert
    degrees = {"dp": pd, "pp": pp, "tp": pt, "cp": pc, "ep": pe, "microbatches": microbatches}
    for name, value in degrees.items():
        if value < 1:
            return f"{name} must be at least 1, not {value}"
    if model is None and (pp, pt, pc, pe) != (1, 1, 1, 1):
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
        reason = _illegal_sharing(workload, model, layout)
        if reason is not None:
            return reason
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


def _illegal_sharing(workload: Workload, model: ModelSpec, layout: Layout) -> str | None:
    """The first broken rule of CP and EP."""
    pc, pe = layout.context, layout.expert
    if pc > 1 and 2 * pc > workload.sequence_tokens:
        return f"CP: cp={pc} ranks with two chunks each have more chunks than a sequence has tokens"
    if pe > 1:
        if model.moe is None:
            return f"EP: {model.name} is no mixture of experts"
        if model.moe.experts % pe:
            return f"EP: ep={pe} does not divide the {model.moe.experts} experts of {model.name}"
        if layout.data * layout.stage % pe:
            return f"EP: ep={pe} does not divide the dp * cp * tp = {layout.data * layout.stage} ranks of a stage"
    return None


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
    """The first broken rule of P1-P8, CP, EP and of the mode as a sentence, None when the assignment is legal."""
    reason = illegal_layout(machine, workload, model, assignment.layout, assignment.microbatches)
    reason = reason or illegal_mode(assignment.layout, assignment.mode)
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
    machine: DeviceSpace,
    workload: Workload,
    model: ModelSpec | None,
    also: Sequence[ModelSpec] = (),
    axes: Axes = PAPER,
) -> tuple[tuple[Layout, int], ...]:
    """All (layout, microbatches) that satisfy P1-P6, P8, CP and EP for the model, and for those in ``also``; sorted.

    Pc and Pe are of ``axes``.
    """
    tensors = _divisors(machine.gpus_per_node) if model is not None else (1,)
    pipelines = [p for p in _divisors(model.layers) if p == 1 or p % 2 == 0] if model is not None else [1]
    found = []
    for pd in _divisors(workload.prompts):
        local = workload.sequences // pd
        for pp in pipelines:
            counts = (1,) if pp == 1 else tuple(mb for mb in _divisors(local) if mb >= pp)
            for pt, pc, pe in itertools.product(tensors, axes.context, axes.expert):
                layout = Layout(pd, pp, pt, pc, pe)
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
            self.layouts.mode_of(row),
        )

    def find(self, assignment: Assignment) -> int | None:
        """Index of an assignment, None when it is not a candidate."""
        rows = self.layouts
        if assignment.mode not in rows.modes:
            return None
        hit = (
            (self.start == assignment.allocation.start)
            & (self.stop == assignment.allocation.stop)
            & (rows.data[self.layout] == assignment.layout.data)
            & (rows.pipeline[self.layout] == assignment.layout.pipeline)
            & (rows.tensor[self.layout] == assignment.layout.tensor)
            & (rows.context[self.layout] == assignment.layout.context)
            & (rows.expert[self.layout] == assignment.layout.expert)
            & (rows.microbatches[self.layout] == assignment.microbatches)
            & (rows.mode[self.layout] == rows.modes.index(assignment.mode))
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
    axes: Axes = PAPER,
) -> Candidates:
    """All legal candidates of an operator, sorted by (layout, microbatches, mode, start).

    A fused operator's are legal for each of its models, ``model`` and those in ``also``.
    """
    modes = sorted(axes.modes())
    rows = [
        (degrees, microbatches, mode)
        for degrees, microbatches in legal_layouts(machine, workload, model, also, axes)
        for mode in modes
        if illegal_mode(degrees, mode) is None
    ]
    layout, start, stop = [], [], []
    cache: dict[Layout, tuple[int, ...]] = {}
    for row, (degrees, _, _) in enumerate(rows):
        if degrees not in cache:
            cache[degrees] = origins(machine, degrees)
        for origin in cache[degrees]:
            layout.append(row)
            start.append(origin)
            stop.append(origin + degrees.gpus)
    return Candidates(
        operator=operator,
        layouts=_layouts(machine, rows, tuple(modes)),
        layout=np.array(layout, np.int64),
        start=np.array(start, np.int64),
        stop=np.array(stop, np.int64),
    )


def _layouts(machine: DeviceSpace, rows: Sequence[tuple[Layout, int, Mode]], modes: tuple[Mode, ...]) -> Layouts:
    tiers = {layout: _tiers(machine, layout) for layout in dict.fromkeys(layout for layout, _, _ in rows)}

    def column(values: list[int]) -> Ints:
        return np.array(values, np.int64)

    layouts = [layout for layout, _, _ in rows]
    return Layouts(
        data=column([layout.data for layout in layouts]),
        pipeline=column([layout.pipeline for layout in layouts]),
        tensor=column([layout.tensor for layout in layouts]),
        microbatches=column([microbatches for _, microbatches, _ in rows]),
        gpus=column([layout.gpus for layout in layouts]),
        data_tier=column([tiers[layout][0] for layout in layouts]),
        stage_tier=column([tiers[layout][1] for layout in layouts]),
        stages_per_node=column([_stages_per_node(machine, layout) for layout in layouts]),
        context=column([layout.context for layout in layouts]),
        expert=column([layout.expert for layout in layouts]),
        mode=column([modes.index(mode) for _, _, mode in rows]),
        modes=modes,
    )


def _tiers(machine: DeviceSpace, layout: Layout) -> tuple[int, int]:
    """The tier of the whole allocation, and the slowest of a replica."""
    start, replica = origins(machine, layout)[0], layout.replica
    replicas = (int(machine.tier(first, first + replica)) for first in range(start, start + layout.gpus, replica))
    return int(machine.tier(start, start + layout.gpus)), max(replicas)


def _divisors(value: int) -> tuple[int, ...]:
    small = [d for d in range(1, int(value**0.5) + 1) if value % d == 0]
    return tuple(sorted({*small, *(value // d for d in small)}))
