"""The cost book of one graph: cost terms called once, their results kept as tables (architecture.md, "What flows").

Both evaluators read these tables, so that they add the same numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rpeg_core.costing.batches import (
    Floats,
    FusedBatch,
    Ints,
    Layouts,
    MemoryBatch,
    OperatorBatch,
    TransferBatch,
    execution_of,
)
from rpeg_core.errors import CostTermError
from rpeg_core.ir import Model, Operator, Role, Rpeg
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.records import CostTerm, MemoryKind, Target
from rpeg_core.spec.execution import Execution
from rpeg_core.spec.machine import DeviceSpace, HardwareProfile
from rpeg_core.spec.workload import LengthPhase, Workload

__all__ = ["ActiveTerm", "CostBook", "OperatorCosts", "TermValues"]


@attrs.frozen(kw_only=True)
class ActiveTerm:
    """A cost term that this problem uses, with its settings and where it came from."""

    term: CostTerm
    settings: Any
    distribution: str
    version: str


@attrs.frozen(eq=False)
class TermValues:
    """One row per term: ``values[i, j]`` is term ``terms[i]`` at layout j; ``total`` is the sum over terms."""

    terms: tuple[CostTerm, ...]
    values: Floats
    total: Floats


@attrs.frozen(kw_only=True, eq=False)
class OperatorCosts:
    """The tables of one operator.

    Attributes:
        layouts: the legal layouts; every array below has one column per layout.
        whole: seconds of the unsplit operator.
        phases: seconds of each length-phase sub-node, empty for training and with one phase.
        memory: bytes per GPU by term.
        first_step: like ``memory.values``, before the first optimizer step.
        training_state, weights: bytes per GPU, summed by :class:`MemoryKind`.
        transient: likewise, gradients included.
    """

    layouts: Layouts
    whole: TermValues
    phases: tuple[TermValues, ...]
    memory: TermValues
    first_step: Floats
    training_state: Floats
    weights: Floats
    transient: Floats

    def seconds(self, phase: int | None) -> TermValues:
        """The table of the whole operator or of one sub-node."""
        return self.whole if phase is None else self.phases[phase]

    @property
    def isolated(self) -> Floats:
        """Bytes per GPU when the operator has the GPUs to itself: all its own state and transients."""
        return self.training_state + self.weights + self.transient


class CostBook:
    """All costs of one graph on one machine.

    Terms see one execution at a time: layouts that differ in Pc, Pe or their mode are priced apart. ``frameworks`` are
    those whose coefficients price an operator; without a name, those of the plan's own subset.

    Raises:
        CostTermError: no term prices operators; or a term raises, returns the wrong shape, a negative or a
            non-finite number.
    """

    def __init__(
        self,
        *,
        rpeg: Rpeg,
        machine: DeviceSpace,
        hardware: HardwareProfile,
        workload: Workload,
        layouts: Mapping[str, Layouts],
        terms: Sequence[ActiveTerm],
        frameworks: Mapping[str, str] | None = None,
    ) -> None:
        self._frameworks = dict(frameworks or {})
        self.machine, self.hardware, self.workload = machine, hardware, workload
        self.terms, self._rpeg = tuple(terms), rpeg
        if not any(active.term.target is Target.OPERATOR for active in terms):
            raise CostTermError(
                "no cost term prices operators",
                facts=[f"selected: {', '.join(active.term.name for active in terms) or 'none'}"],
                hint="name a cost model under costs:, e.g. costs: [analytical]",
            )
        self.operators: dict[str, OperatorCosts] = {
            operator.name: self._operator(rpeg, operator, layouts[operator.name]) for operator in rpeg.operators
        }
        self._rows = {
            name: {
                (c.layouts.layout(row), int(c.layouts.microbatches[row]), c.layouts.mode_of(row)): row
                for row in range(len(c.layouts))
            }
            for name, c in self.operators.items()
        }
        self._transfers: dict[tuple[bool, float, int, int, int], float] = {}

    def row(self, node_or_assignment: Any, operator: str) -> int:
        """Column of a node's or assignment's (layout, microbatches, mode) in the operator's tables."""
        subject = node_or_assignment
        return self._rows[operator][subject.layout, subject.microbatches, subject.mode]

    def node_seconds(self, node: Node) -> float:
        """Duration of a node of an executable graph."""
        if node.kind is NodeKind.OP:
            table = self.operators[node.operator].seconds(node.phase)
            return float(table.total[self.row(node, node.operator)])
        tier = self.machine.tier_between(node.allocation, node.source)
        return self.transfer_seconds(
            node.kind is NodeKind.RESHARD,
            node.payload_bytes,
            node.source.size,
            node.allocation.size,
            int(tier),
        )

    def transfer_seconds(self, reshard: bool, payload: float, source: int, destination: int, tier: int) -> float:
        """Duration of a COMM or RESHARD of ``payload`` bytes between allocations of the given sizes."""
        key = (reshard, payload, source, destination, tier)
        if key not in self._transfers:
            self._transfers[key] = float(self.transfer_table(reshard, *(np.array([v]) for v in key[1:])).total[0])
        return self._transfers[key]

    def transfer_table(
        self, reshard: bool, payload: Floats, source: np.ndarray, destination: np.ndarray, tier: np.ndarray
    ) -> TermValues:
        """Seconds by term of n transfers given as arrays of shape (n,)."""
        return self._price(
            Target.TRANSFER,
            lambda settings: TransferBatch(
                reshard=reshard,
                bytes=np.asarray(payload, np.float64),
                source_gpus=np.asarray(source, np.int64),
                destination_gpus=np.asarray(destination, np.int64),
                tier=np.asarray(tier, np.int64),
                hardware=self.hardware,
                settings=settings,
            ),
            len(payload),
            "a transfer",
        )

    def host_bytes(self, rpeg: Rpeg, operator: Operator) -> Floats:
        """Host memory of a training's process, for each of its layouts, if its state were kept there."""
        layouts = self.operators[operator.name].layouts
        total = np.zeros(len(layouts))
        what = f"the host of {operator.name!r}"
        for a in self.terms:
            if a.term.host is None:
                continue
            for rows in layouts.executed_alike():
                alike = layouts.take(rows)
                for model in rpeg.models_of(operator.name):
                    batch = self._memory_batch(operator, model, alike, a.settings)
                    total[rows] += _checked(a, a.term.host, batch, len(alike), what)
        return total

    def _operator(self, rpeg: Rpeg, operator: Operator, layouts: Layouts) -> OperatorCosts:
        groups = layouts.executed_alike()
        if len(groups) == 1:
            return self._executed_alike(rpeg, operator, layouts)
        parts = [self._executed_alike(rpeg, operator, layouts.take(rows)) for rows in groups]
        place = np.argsort(np.concatenate(groups))
        return OperatorCosts(
            layouts=layouts,
            whole=_joined([part.whole for part in parts], place),
            phases=tuple(_joined(phase, place) for phase in zip(*(part.phases for part in parts), strict=True)),
            memory=_joined([part.memory for part in parts], place),
            first_step=np.concatenate([part.first_step for part in parts], axis=1)[:, place],
            training_state=np.concatenate([part.training_state for part in parts])[place],
            weights=np.concatenate([part.weights for part in parts])[place],
            transient=np.concatenate([part.transient for part in parts])[place],
        )

    def _executed_alike(self, rpeg: Rpeg, operator: Operator, layouts: Layouts) -> OperatorCosts:
        phases = self.workload.phases
        split = len(phases) > 1 and operator.role is not Role.TRAINING
        memory = self._memory(rpeg, operator, layouts)

        def held(*kinds: MemoryKind) -> Floats:
            return _sum(memory.values, [i for i, term in enumerate(memory.terms) if term.memory in kinds])

        return OperatorCosts(
            layouts=layouts,
            whole=self._seconds(rpeg, operator, layouts, None),
            phases=tuple(self._seconds(rpeg, operator, layouts, p) for p in phases) if split else (),
            memory=memory,
            first_step=self._first_step(rpeg, operator, layouts, memory),
            training_state=held(MemoryKind.TRAINING_STATE) * (operator.role is Role.TRAINING),
            weights=held(MemoryKind.WEIGHTS),
            transient=held(MemoryKind.GRADIENTS, MemoryKind.TRANSIENT),
        )

    def _common(self, operator: Operator, model: Model | None, layouts: Layouts) -> dict[str, Any]:
        return {
            "role": operator.role,
            "model": None if model is None else model.spec,
            "seconds_per_sample": operator.seconds_per_sample,
            "workload": self.workload,
            "machine": self.machine,
            "hardware": self.hardware,
            "layouts": layouts,
            "execution": self._execution(operator.name, layouts),
        }

    def batches(self, operator: str, column: int) -> tuple[OperatorBatch, ...]:
        """An unsplit operator as cost terms see it at one of its layouts, a batch for each of its models."""
        found, layouts = self._rpeg.operator(operator), self.operators[operator].layouts.take(np.array([column]))
        models = self._rpeg.models_of(operator) or (None,)
        return tuple(self._batch(found, model, layouts, None, None) for model in models)

    def _execution(self, operator: str, layouts: Layouts) -> Execution:
        """Of layouts that are executed alike."""
        framework, cache = self._frameworks.get(operator, ""), self.workload.cache_bytes_per_element
        if not len(layouts):
            return execution_of(self.hardware, framework=framework, cache_bytes_per_element=cache)
        return execution_of(
            self.hardware,
            context=int(layouts.context[0]),
            expert=int(layouts.expert[0]),
            mode=layouts.mode_of(0),
            framework=framework,
            cache_bytes_per_element=cache,
        )

    def _seconds(self, rpeg: Rpeg, operator: Operator, layouts: Layouts, phase: LengthPhase | None) -> TermValues:
        def batch(settings: Any, model: Model | None) -> OperatorBatch:
            return self._batch(operator, model, layouts, phase, settings)

        return self._priced(Target.OPERATOR, batch, rpeg, operator, len(layouts))

    def _batch(
        self, operator: Operator, model: Model | None, layouts: Layouts, phase: LengthPhase | None, settings: Any
    ) -> OperatorBatch:
        generates = operator.role is Role.GENERATION
        share = 1.0 if phase is None or generates else phase.finishing
        return OperatorBatch(
            **self._common(operator, model, layouts),
            settings=settings,
            sequences=self.workload.sequences * share,
            prefill=generates and (phase is None or phase.index == 0),
            phases=self.workload.phases if phase is None else (phase,),
        )

    def _memory_batch(self, operator: Operator, model: Model | None, layouts: Layouts, settings: Any) -> MemoryBatch:
        common = self._common(operator, model, layouts)
        return MemoryBatch(**common, settings=settings, trainable=model is not None and model.trainable)

    def _memory(self, rpeg: Rpeg, operator: Operator, layouts: Layouts) -> TermValues:
        def batch(settings: Any, model: Model | None) -> MemoryBatch:
            return self._memory_batch(operator, model, layouts, settings)

        return self._priced(Target.MEMORY, batch, rpeg, operator, len(layouts))

    def _first_step(self, rpeg: Rpeg, operator: Operator, layouts: Layouts, memory: TermValues) -> Floats:
        """Bytes by term before the first optimizer step."""
        values = memory.values.copy()
        for i, a in enumerate(active for active in self.terms if active.term.target is Target.MEMORY):
            if a.term.first_step is None or operator.role is not Role.TRAINING:
                continue
            values[i] = 0.0
            for model in rpeg.models_of(operator.name) or (None,):
                batch = self._memory_batch(operator, model, layouts, a.settings)
                values[i] += _checked(a, a.term.first_step, batch, len(layouts), f"operator {operator.name!r}")
        return values

    def _priced(self, target: Target, batch: Any, rpeg: Rpeg, operator: Operator, count: int) -> TermValues:
        """The terms of an operator; of a fused one each term's own word on it, or else the sum over its models."""
        models = rpeg.models_of(operator.name) or (None,)
        what = f"operator {operator.name!r}"
        if len(models) == 1:
            return self._price(target, lambda settings: batch(settings, models[0]), count, what)
        active = [a for a in self.terms if a.term.target is target]
        values = np.zeros((len(active), count))
        for i, a in enumerate(active):
            parts = tuple(batch(a.settings, model) for model in models)
            if a.term.fused is not None:
                values[i] = _checked(a, a.term.fused, FusedBatch(parts), count, what)
            else:
                for part in parts:
                    values[i] = values[i] + _checked(a, a.term.function, part, count, what)
        return TermValues(tuple(a.term for a in active), values, _sum(values, range(len(active))))

    def _price(self, target: Target, batch_for: Any, count: int, what: str) -> TermValues:
        active = [a for a in self.terms if a.term.target is target]
        values = np.zeros((len(active), count))
        for i, a in enumerate(active):
            values[i] = _checked(a, a.term.function, batch_for(a.settings), count, what)
        return TermValues(tuple(a.term for a in active), values, _sum(values, range(len(active))))


def _checked(active: ActiveTerm, function: Any, batch: Any, count: int, what: str) -> Floats:
    source = f"{active.distribution} {active.version}"
    try:
        with np.errstate(all="raise", under="ignore"):
            result = np.asarray(function(batch), np.float64)
    except Exception as error:
        raise CostTermError(
            f"cost term {active.term.name!r} failed for {what}",
            facts=[f"distribution: {source}", f"{type(error).__name__}: {error}"],
            hint="leave it out of costs:, or report it to the distribution",
        ) from error
    if result.shape != (count,):
        problem = f"it returned shape {result.shape}, allowed: ({count},)"
    elif not np.all(np.isfinite(result)):
        problem = "it returned a number that is not finite"
    elif np.any(result < 0):
        problem = f"it returned {result.min():g}, allowed: numbers >= 0"
    else:
        return result
    raise CostTermError(
        f"cost term {active.term.name!r} gave an invalid result for {what}",
        facts=[f"distribution: {source}", problem],
        hint="leave it out of costs:, or report it to the distribution",
    )


def _joined(parts: Sequence[TermValues], place: Ints) -> TermValues:
    """Tables of the same terms side by side, with their columns in the order ``place``."""
    values = np.concatenate([part.values for part in parts], axis=1)[:, place]
    return TermValues(parts[0].terms, values, np.concatenate([part.total for part in parts])[place])


def _sum(values: Floats, rows: Sequence[int] | range) -> Floats:
    total = np.zeros(values.shape[1])
    for row in rows:  # a fixed order, so that sums are reproducible
        total = total + values[row]
    return total
