"""The time axis of a GPU's memory inside one RL step: what is held while each operator runs, and in which part of it.

Moments of a training: its forward and backward passes (weights, gradients, activations, logits), then its optimizer
step, when the activations are gone and the optimizer's moments are there. Of a serving operator: its run, and before
it, on GPUs that train its model in another place, the arrival of new weights.

The largest of a GPU's moments is its peak in :mod:`rpeg_core.costing.memory`, which is what a search compares with the
usable memory; the optimizer step holds a part of what the passes hold and is never that peak.

The first step of a run holds less: an optimizer makes part of its state in its first update (:attr:`CostTerm.first_step
<rpeg_core.records.CostTerm.first_step>`). While an operator runs in it, trainings that come before it in the graph have
their whole state already, itself and later ones have not.
"""

from __future__ import annotations

import attrs

from rpeg_core.costing.book import CostBook
from rpeg_core.costing.memory import (
    Demand,
    Holding,
    MemoryItem,
    Phase,
    demands,
    held_always,
    memory_items,
    placed_on,
)
from rpeg_core.ir import Role, Rpeg
from rpeg_core.passes.schedule import Segments
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.records import MemoryKind
from rpeg_core.spec.machine import Allocation

__all__ = ["Moment", "SegmentMoments", "first_step_growth", "memory_moments"]


@attrs.frozen(kw_only=True)
class Moment:
    """What GPUs hold while ``operator`` is in ``phase``.

    Attributes:
        bytes: in every step but the first.
        first_step_bytes: in the first step of a run.
        items: the terms of ``bytes``.
    """

    operator: str
    phase: Phase
    bytes: float
    first_step_bytes: float
    items: tuple[MemoryItem, ...]


@attrs.frozen(kw_only=True)
class SegmentMoments:
    """The moments of a group of GPUs, in graph order; none where nothing is placed."""

    gpus: Allocation
    moments: tuple[Moment, ...]

    @property
    def peak(self) -> Moment | None:
        """The largest, the first of equals."""
        return max(self.moments, key=lambda moment: moment.bytes, default=None)

    @property
    def first_step_bytes(self) -> float:
        """The peak of the first step."""
        return max((moment.first_step_bytes for moment in self.moments), default=0.0)


def memory_moments(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook) -> tuple[SegmentMoments, ...]:
    """All moments of every GPU under ``plan``, by the groups of :func:`rpeg_core.costing.memory.device_memory`."""
    segments = Segments.of([plan[op.name].allocation for op in rpeg.operators], book.machine.gpus)
    return tuple(_segment(rpeg, plan, book, segments.allocation(s)) for s in range(segments.count))


def first_step_growth(segments: tuple[SegmentMoments, ...]) -> SegmentMoments | None:
    """The GPUs whose peak grows most after the first step; None when none does."""
    grows = [s for s in segments if s.peak is not None and s.peak.bytes > s.first_step_bytes]
    return max(grows, key=lambda s: s.peak.bytes - s.first_step_bytes, default=None)


def _segment(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, gpus: Allocation) -> SegmentMoments:
    here = placed_on(rpeg, plan, gpus)
    held = held_always(rpeg, plan, book, here)
    needed: list[Demand] = []
    for demand in demands(rpeg, plan, book, here, held):
        needed.append(demand)
        if demand.phase is Phase.PASSES:
            needed.append(_update(plan, book, demand.operator))
    needed.sort(key=lambda demand: (rpeg.index(demand.operator), demand.phase is not Phase.ARRIVAL))
    return SegmentMoments(
        gpus=gpus,
        moments=tuple(
            Moment(
                operator=demand.operator,
                phase=demand.phase,
                bytes=held.bytes + demand.bytes,
                first_step_bytes=held.bytes + demand.bytes - _not_yet(rpeg, plan, book, held, demand),
                items=memory_items(rpeg, plan, book, held, demand),
            )
            for demand in needed
        ),
    )


def _update(plan: ExecutionPlan, book: CostBook, operator: str) -> Demand:
    """A training's optimizer step: its weights and gradients."""
    kinds = frozenset({MemoryKind.WEIGHTS, MemoryKind.GRADIENTS})
    costs, row = book.operators[operator], book.row(plan[operator], operator)
    needed = sum(
        float(costs.memory.values[i, row]) for i, term in enumerate(costs.memory.terms) if term.memory in kinds
    )
    return Demand(operator=operator, phase=Phase.UPDATE, bytes=needed, parts=((operator, kinds),))


def _not_yet(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, held: Holding, demand: Demand) -> float:
    """Bytes of the training states that ``demand`` does not find in the first step."""
    missing = 0.0
    for _, trainer, kind, _ in held.parts:
        if kind is not MemoryKind.TRAINING_STATE or rpeg.operator(trainer).role is not Role.TRAINING:
            continue
        if rpeg.index(trainer) < rpeg.index(demand.operator):
            continue
        if trainer == demand.operator and demand.phase is Phase.UPDATE:
            continue
        costs, row = book.operators[trainer], book.row(plan[trainer], trainer)
        for i, term in enumerate(costs.memory.terms):
            if term.memory is MemoryKind.TRAINING_STATE:
                missing += float(costs.memory.values[i, row] - costs.first_step[i, row])
    return missing
