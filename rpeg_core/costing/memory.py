"""Peak memory per GPU from placement (paper, V-D3 and D-J; model.md, section 4).

``peak(d) = sum over models on d of S(m, d) + max over operators placed on d of A(v)``.

S is the sum of

* on a GPU that trains m, the training state;
* on a GPU that serves m, copies of its weights: one of a frozen model, tau of a trainable one, so none with tau = 0. A
  copy has the largest shard when several operators serve m there **[choice]**.

A(v) is the operator's transients, plus its weights unless it serves from such a copy. Where m is trained and served on
the same GPU in different places, A is also that of the moment when new weights arrive: both shards at once, because
the trainer's is read while the served one is written **[choice]**; the paper moves weights in no memory. It counts
where the KV cache and the activations are smaller than a shard: small batches of large models.

**[choice]** The paper's shadow copy is the case of tau = 1 and serving apart from training; it adds none where they
share GPUs, and says in A-G that "physical copy lifetime is determined by actual workers and required versions". Shared
or not, while step k is trained the steps after it still have to be served with versions k - tau + 1 to k, and the
trainer makes version k + 1 of the one it holds.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator

import attrs

from rpeg_core.costing.book import CostBook
from rpeg_core.ir import Operator, Role, Rpeg, training_operator
from rpeg_core.passes.schedule import Segments
from rpeg_core.planning.assignment import Assignment, ExecutionPlan
from rpeg_core.records import MemoryKind
from rpeg_core.spec.machine import Allocation

__all__ = [
    "Demand",
    "DeviceMemory",
    "Holding",
    "MemoryItem",
    "Phase",
    "SegmentMemory",
    "demands",
    "device_memory",
    "held_always",
    "memory_items",
    "placed_on",
    "serving_copies",
]


class Phase(enum.Enum):
    """What an operator does at a moment."""

    RUN = "runs"
    PASSES = "computes gradients"  # a training's forward and backward passes
    UPDATE = "updates weights"  # its optimizer step
    ARRIVAL = "gets new weights"  # a serving operator, on GPUs that also train its model


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
    """GPUs ``gpus`` hold ``items`` at their peak, while operator ``moment`` is in ``phase``.

    Both are None where nothing is placed.
    """

    gpus: Allocation
    peak_bytes: float
    moment: str | None
    items: tuple[MemoryItem, ...]
    phase: Phase | None = None


@attrs.frozen(kw_only=True)
class DeviceMemory:
    """Peaks of the whole cluster, segment by segment."""

    segments: tuple[SegmentMemory, ...]

    @property
    def peak(self) -> SegmentMemory:
        """The segment with the largest peak, the first of equals."""
        return max(self.segments, key=lambda segment: segment.peak_bytes)


@attrs.frozen(kw_only=True)
class Holding:
    """What GPUs hold all the time.

    Attributes:
        bytes: the sum of S(m, d).
        parts: (model, operator whose term it is, kind, copies).
        resident: models whose serving weights are among it.
    """

    bytes: float
    parts: tuple[tuple[str, str, MemoryKind, int], ...]
    resident: frozenset[str]


@attrs.frozen(kw_only=True)
class Demand:
    """What an operator needs beyond that in one of its phases: A(v), the kinds of bytes by operator."""

    operator: str
    phase: Phase
    bytes: float
    parts: tuple[tuple[str, frozenset[MemoryKind]], ...]


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
    here = placed_on(rpeg, plan, gpus)
    held = held_always(rpeg, plan, book, here)
    worst: Demand | None = None
    for demand in demands(rpeg, plan, book, here, held):
        if worst is None or demand.bytes > worst.bytes:
            worst = demand
    return SegmentMemory(
        gpus=gpus,
        peak_bytes=held.bytes + (0.0 if worst is None else worst.bytes),
        moment=None if worst is None else worst.operator,
        phase=None if worst is None else worst.phase,
        items=memory_items(rpeg, plan, book, held, worst),
    )


def placed_on(rpeg: Rpeg, plan: ExecutionPlan, gpus: Allocation) -> tuple[Operator, ...]:
    """The operators on ``gpus``, in graph order."""
    return tuple(op for op in rpeg.operators if not plan[op.name].allocation.disjoint(gpus))


def held_always(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, here: tuple[Operator, ...]) -> Holding:
    """S of the models of the operators that are ``here``."""
    total = 0.0
    parts: list[tuple[str, str, MemoryKind, int]] = []
    resident: set[str] = set()
    for model in rpeg.models:
        # The state of a fused training is that of all its models; it counts once, with the first.
        users = [op for op in here if op.model == model.name]
        for trainer in (op.name for op in users if op.role is Role.TRAINING):
            parts.append((model.name, trainer, MemoryKind.TRAINING_STATE, 1))
            total = total + _bytes(book, plan, trainer, MemoryKind.TRAINING_STATE)
        serving = [op.name for op in users if op.role is not Role.TRAINING]
        copies = serving_copies(rpeg, model.name)
        if serving and copies:
            resident.add(model.name)
            owner = max(serving, key=lambda name: _bytes(book, plan, name, MemoryKind.WEIGHTS))
            parts.append((model.name, owner, MemoryKind.WEIGHTS, copies))
            total = total + copies * _bytes(book, plan, owner, MemoryKind.WEIGHTS)
    return Holding(bytes=total, parts=tuple(parts), resident=frozenset(resident))


def demands(
    rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, here: tuple[Operator, ...], held: Holding
) -> Iterator[Demand]:
    """A of every operator that is ``here``, then of every arrival of weights."""
    running = frozenset({MemoryKind.GRADIENTS, MemoryKind.TRANSIENT})
    for op in here:
        needed, kinds = _bytes(book, plan, op.name, MemoryKind.TRANSIENT), running
        if op.model not in held.resident or op.role is Role.TRAINING:
            needed = needed + _bytes(book, plan, op.name, MemoryKind.WEIGHTS)
            kinds = running | {MemoryKind.WEIGHTS}
        phase = Phase.PASSES if op.role is Role.TRAINING else Phase.RUN
        yield Demand(operator=op.name, phase=phase, bytes=needed, parts=((op.name, kinds),))
    weights = frozenset({MemoryKind.WEIGHTS})
    names = {op.name for op in here}
    for op in here:
        if op.model is None or op.role is Role.TRAINING:
            continue
        trainer = training_operator(rpeg, op.model)
        if trainer in names and not _same_place(plan[trainer], plan[op.name]):
            both = _bytes(book, plan, trainer, MemoryKind.WEIGHTS) + _bytes(book, plan, op.name, MemoryKind.WEIGHTS)
            yield Demand(
                operator=op.name, phase=Phase.ARRIVAL, bytes=both, parts=((trainer, weights), (op.name, weights))
            )


def memory_items(
    rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, held: Holding, demand: Demand | None
) -> tuple[MemoryItem, ...]:
    """What is held, then what is needed, term by term; terms of 0 bytes are left out."""
    items: list[MemoryItem] = []
    for model, operator, kind, copies in held.parts:
        items += _items(book, plan, model, operator, frozenset({kind}), persistent=True, copies=copies)
    for operator, kinds in () if demand is None else demand.parts:
        items += _items(book, plan, rpeg.operator(operator).model, operator, kinds, persistent=False)
    return tuple(items)


def _same_place(one: Assignment, other: Assignment) -> bool:
    return one.allocation == other.allocation and one.layout == other.layout


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
    kinds: frozenset[MemoryKind],
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
