"""Peak memory per GPU from placement (paper, V-D3 and D-J; model.md, section 4).

``peak(d) = sum over models on d of S(m, d) + max over operators on d of A(v)``.

S is the sum of

* on a GPU that trains m, the training state;
* on a GPU that serves m, copies of its weights: one of a frozen model, tau of a trainable one, so none with tau = 0. A
  copy has the largest shard when several operators serve m there **[choice]**.

A(v) is the operator's transients, plus its weights unless it serves from such a copy.

**[choice]** The paper's shadow copy is the case of tau = 1 and serving apart from training; it adds none where they
share GPUs, and says in A-G that "physical copy lifetime is determined by actual workers and required versions". Shared
or not, while step k is trained the steps after it still have to be served with versions k - tau + 1 to k, and the
trainer makes version k + 1 of the one it holds.
"""

from __future__ import annotations

import attrs

from rpeg_core.costing.book import CostBook
from rpeg_core.ir import Role, Rpeg, training_operator
from rpeg_core.passes.schedule import Segments
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.records import MemoryKind
from rpeg_core.spec.machine import Allocation

__all__ = ["DeviceMemory", "MemoryItem", "SegmentMemory", "device_memory", "serving_copies"]


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


def serving_copies(rpeg: Rpeg, model: str) -> int:
    """How many versions of ``model`` a GPU that serves it keeps: 1 when frozen, tau when trained."""
    if not rpeg.model(model).trainable:
        return 1
    return rpeg.model(model).staleness if training_operator(rpeg, model) is not None else 0


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
        # The state of a fused training is that of all its models; it counts once, with the first.
        users = [op for op in here if op.model == model.name]
        for trainer in (op.name for op in users if op.role is Role.TRAINING):
            kind = MemoryKind.TRAINING_STATE
            persistent.extend(_items(book, plan, model.name, trainer, {kind}, persistent=True))
            persistent_bytes = persistent_bytes + _bytes(book, plan, trainer, kind)
        serving = [op.name for op in users if op.role is not Role.TRAINING]
        copies = serving_copies(rpeg, model.name)
        if serving and copies:
            resident.add(model.name)
            kind = MemoryKind.WEIGHTS
            owner = max(serving, key=lambda name: _bytes(book, plan, name, MemoryKind.WEIGHTS))
            persistent.extend(_items(book, plan, model.name, owner, {kind}, persistent=True, copies=copies))
            persistent_bytes = persistent_bytes + copies * _bytes(book, plan, owner, kind)
    worst_bytes, worst, worst_kinds = 0.0, None, frozenset()
    for op in here:
        transient = _bytes(book, plan, op.name, MemoryKind.TRANSIENT)
        kinds = {MemoryKind.TRANSIENT}
        if op.model not in resident or op.role is Role.TRAINING:
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
    copies: int = 1,
) -> list[MemoryItem]:
    memory, row = book.operators[operator].memory, book.row(plan[operator], operator)
    return [
        MemoryItem(
            model=model,
            operator=operator,
            quantity=term.quantity,
            bytes=copies * float(memory.values[i, row]),
            persistent=persistent,
        )
        for i, term in enumerate(memory.terms)
        if term.memory in kinds and memory.values[i, row] > 0
    ]
