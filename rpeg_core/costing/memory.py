"""Peak memory per GPU from placement (paper, V-D3 and D-J; model.md, section 4).

``peak(d) = sum over models on d of S(m, d) + max over operators on d of A(v)``.

* Training GPU of m: S is the training state.
* Otherwise, frozen m, or trainable m with tau > 0 served on GPUs disjoint from training (a shadow copy): S is the
  weights; the largest shard when several operators serve m there **[choice]**.
* Otherwise S is 0 and weights are held only while an operator runs.

A(v) is the operator's transients, plus its weights where S does not hold a serving copy.
"""

from __future__ import annotations

import attrs

from rpeg_core.costing.book import CostBook
from rpeg_core.ir import Model, Role, Rpeg, training_operator
from rpeg_core.passes.schedule import Segments
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.records import MemoryKind
from rpeg_core.spec.machine import Allocation

__all__ = ["DeviceMemory", "MemoryItem", "SegmentMemory", "device_memory", "serves_from_shadow"]


@attrs.frozen(kw_only=True)
class MemoryItem:
    """Bytes that one operator's term contributes to a GPU's peak."""

    model: str | None
    operator: str
    quantity: str
    bytes: float
    persistent: bool


@attrs.frozen(kw_only=True)
class SegmentMemory:
    """GPUs ``gpus`` hold ``items`` at their peak, while operator ``moment`` runs (None: nothing is placed there)."""

    gpus: Allocation
    peak_bytes: float
    moment: str | None
    items: tuple[MemoryItem, ...]


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """Peaks of the whole cluster, segment by segment."""

    segments: tuple[SegmentMemory, ...]

    @property
    def peak(self) -> SegmentMemory:
        """The segment with the largest peak, the first of equals."""
        return max(self.segments, key=lambda segment: segment.peak_bytes)


def serves_from_shadow(rpeg: Rpeg, plan: ExecutionPlan, operator: str) -> bool:
    """True when ``operator`` serves a trainable model with tau > 0 on GPUs disjoint from its training."""
    model = rpeg.model_of(operator)
    if model is None or not model.trainable or model.staleness == 0:
        return False
    trainer = training_operator(rpeg, model.name)
    if trainer is None or trainer == operator:
        return False
    return plan[operator].allocation.disjoint(plan[trainer].allocation)


def device_memory(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook) -> DeviceMemory:
    """Peak memory of every GPU under ``plan``."""
    segments = Segments.of([plan[op.name].allocation for op in rpeg.operators], book.machine.gpus)
    return DeviceMemory(
        segments=tuple(_segment(rpeg, plan, book, segments.allocation(s)) for s in range(segments.count))
    )


def _segment(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, gpus: Allocation) -> SegmentMemory:
    here = [op for op in rpeg.operators if not plan[op.name].allocation.disjoint(gpus)]
    persistent: list[MemoryItem] = []
    persistent_bytes = 0.0
    resident: set[str] = set()  # models whose serving weights stay on these GPUs
    for model in rpeg.models:
        kind, owner = _persistent_state(rpeg, plan, book, model, [op.name for op in here if op.model == model.name])
        if owner is not None:
            if kind is MemoryKind.WEIGHTS:
                resident.add(model.name)
            items = _items(book, plan, model.name, owner, {kind}, persistent=True)
            persistent.extend(items)
            persistent_bytes = persistent_bytes + _bytes(book, plan, owner, kind)
    worst_bytes, worst, worst_kinds = 0.0, None, frozenset()
    for op in here:
        transient = _bytes(book, plan, op.name, MemoryKind.TRANSIENT)
        kinds = {MemoryKind.TRANSIENT}
        if op.model not in resident:
            transient = transient + _bytes(book, plan, op.name, MemoryKind.WEIGHTS)
            kinds.add(MemoryKind.WEIGHTS)
        if worst is None or transient > worst_bytes:
            worst_bytes, worst, worst_kinds = transient, op, frozenset(kinds)
    items = list(persistent)
    if worst is not None:
        items.extend(_items(book, plan, worst.model, worst.name, worst_kinds, persistent=False))
    return SegmentMemory(
        gpus=gpus,
        peak_bytes=persistent_bytes + worst_bytes,
        moment=None if worst is None else worst.name,
        items=tuple(items),
    )


def _persistent_state(
    rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, model: Model, here: list[str]
) -> tuple[MemoryKind, str | None]:
    """Which kind of state of ``model`` stays on GPUs shared by operators ``here``, and whose layout it has."""
    for name in here:
        if rpeg.operator(name).role is Role.TRAINING:
            return MemoryKind.TRAINING_STATE, name
    stays = not model.trainable or any(serves_from_shadow(rpeg, plan, name) for name in here)
    if not here or not stays:
        return MemoryKind.WEIGHTS, None
    return MemoryKind.WEIGHTS, max(here, key=lambda name: _bytes(book, plan, name, MemoryKind.WEIGHTS))


def _bytes(book: CostBook, plan: ExecutionPlan, operator: str, kind: MemoryKind) -> float:
    costs = book.operators[operator]
    table = {
        MemoryKind.TRAINING_STATE: costs.training_state,
        MemoryKind.WEIGHTS: costs.weights,
        MemoryKind.TRANSIENT: costs.transient,
    }[kind]
    return float(table[book.row(plan[operator], operator)])


def _items(
    book: CostBook,
    plan: ExecutionPlan,
    model: str | None,
    operator: str,
    kinds: set[MemoryKind] | frozenset[MemoryKind],
    *,
    persistent: bool,
) -> list[MemoryItem]:
    memory, row = book.operators[operator].memory, book.row(plan[operator], operator)
    return [
        MemoryItem(
            model=model,
            operator=operator,
            quantity=term.quantity,
            bytes=float(memory.values[i, row]),
            persistent=persistent,
        )
        for i, term in enumerate(memory.terms)
        if term.memory in kinds and memory.values[i, row] > 0
    ]
