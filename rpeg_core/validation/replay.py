"""Pricing cases with the terms that the planner uses, and the errors that result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from rpeg_core.accuracy.draws import DRAWS, Interval
from rpeg_core.accuracy.selection import error_of_step, error_of_term
from rpeg_core.accuracy.spread import Timed, factors
from rpeg_core.costing.batches import Floats, MemoryBatch, OperatorBatch
from rpeg_core.errors import CostTermError
from rpeg_core.plugins.registry import Registry
from rpeg_core.records import CostTerm, Target
from rpeg_core.validation.cases import Case

__all__ = ["Errors", "Result", "errors_of", "operator_terms", "replayed", "spearman"]


@attrs.frozen(kw_only=True)
class Result:
    """One case with its prediction.

    Attributes:
        case: the run.
        terms: predicted seconds (bytes for memory) by the quantity of the term, largest first.
        interval: of the seconds, None for memory and where too much was never validated.
    """

    case: Case
    terms: Mapping[str, float]
    interval: Interval | None = None

    @property
    def predicted(self) -> float:
        """Seconds, or bytes for memory."""
        return sum(self.terms.values())

    @property
    def error(self) -> float:
        """Signed relative error, ``predicted / measured - 1``."""
        return self.predicted / self.case.measured - 1.0

    @property
    def dominant(self) -> tuple[str, float]:
        """The largest term and its share of the prediction."""
        name, value = next(iter(self.terms.items()))
        return name, value / self.predicted


@attrs.frozen(kw_only=True)
class Errors:
    """Errors of a group of results: mean absolute and mean signed relative error, rank correlation (nan below 3).

    ``inside`` is the share of measurements that lie in their intervals, nan where no result has one.
    """

    count: int
    mape: float
    bias: float
    spearman: float
    inside: float


def operator_terms(registry: Registry, names: Sequence[str]) -> tuple[tuple[CostTerm, object], ...]:
    """The operator and memory terms of cost models, with default settings."""
    return tuple((loaded.record, loaded.record.settings()) for loaded in registry.cost_terms(tuple(names)))


def replayed(cases: Iterable[Case], terms: Sequence[tuple[CostTerm, object]]) -> tuple[Result, ...]:
    """Every case priced.

    Raises:
        CostTermError: a term fails, or no term prices what a case measures.
    """
    return tuple(_priced(case, terms) for case in cases)


def _priced(case: Case, terms: Sequence[tuple[CostTerm, object]]) -> Result:
    target = Target.MEMORY if case.kind == "memory" else Target.OPERATOR
    active = [(term, settings) for term, settings in terms if term.target is target]
    parts = [_part(case, batch, times, active) for batch, times in case.batches()]
    if case.apart:
        beside = max((parts[:1], parts[1:]), key=lambda group: sum(part.seconds for part in group))
        parts = list(beside)
    found: dict[str, float] = {}
    for part in (*(part.quantities for part in parts), dict(case.overheads)):
        for name, value in part.items():
            found[name] = found.get(name, 0.0) + value
    if sum(found.values()) <= 0:
        raise CostTermError(f"no cost term prices {case.id}", hint="name a cost model, e.g. --costs analytical")
    timed = _sum(parts, dict(case.overheads))
    if case.kind == "rl-step":
        timed = _of_step(case, timed, [term for term, _ in active])
    return Result(
        case=case,
        terms=dict(sorted(found.items(), key=lambda item: (-item[1], item[0]))),
        interval=None if target is Target.MEMORY else timed.interval,
    )


@attrs.frozen(eq=False)
class _Part:
    """One batch: values by quantity, draws of their sum, and the seconds of terms that were never validated."""

    quantities: dict[str, float]
    draws: Floats
    unknown: dict[str, float]

    @property
    def seconds(self) -> float:
        return sum(self.quantities.values())


def _sum(parts: Sequence[_Part], overheads: Mapping[str, float]) -> Timed:
    """The parts one after the other; overheads are facts of the row."""
    fixed = sum(overheads.values())
    seconds, draws = fixed + sum(part.seconds for part in parts), np.full(DRAWS, fixed)
    unknown: dict[str, float] = {}
    for part in parts:
        draws = draws + part.draws
        for name, value in part.unknown.items():
            unknown[name] = unknown.get(name, 0.0) + value / seconds
    return Timed(seconds=seconds, draws=draws, unknown=unknown)


def _of_step(case: Case, timed: Timed, terms: Sequence[CostTerm]) -> Timed:
    """With the errors that whole steps have beyond their operators."""
    setup, draws = case.setup, timed.draws
    roles = [batch.role for batch, _ in case.batches()]
    mixture, named = setup.model.moe is not None, setup.execution.framework != ""
    for chosen in error_of_step(terms, setup.hardware, roles, mixture=mixture, named=named):
        draws = draws * factors(chosen)
    return attrs.evolve(timed, draws=draws)


def _part(
    case: Case, batch: OperatorBatch | MemoryBatch, times: float, terms: Sequence[tuple[CostTerm, object]]
) -> _Part:
    found: dict[str, float] = {}
    unknown: dict[str, float] = {}
    draws = np.zeros(DRAWS)
    for term, settings in terms:
        if term.quantity in case.without:
            continue
        try:
            with np.errstate(all="raise", under="ignore"):
                value = float(term.function(attrs.evolve(batch, settings=settings))[0])
        except Exception as error:
            raise CostTermError(
                f"cost term {term.name!r} failed for {case.id}", facts=[f"{type(error).__name__}: {error}"]
            ) from error
        found[term.quantity] = found.get(term.quantity, 0.0) + times * value
        if isinstance(batch, OperatorBatch) and value > 0:
            chosen = error_of_term(term, batch)
            draws = draws + times * value * factors(chosen)
            if chosen is None:
                unknown[term.name] = times * value
    return _Part(found, draws, unknown)


def errors_of(results: Sequence[Result]) -> Errors:
    """The errors of a group; it has at least one result."""
    relative = np.array([result.error for result in results])
    held = [result.interval.holds(result.case.measured) for result in results if result.interval is not None]
    return Errors(
        inside=float(np.mean(held)) if held else float("nan"),
        count=len(results),
        mape=float(np.mean(np.abs(relative))),
        bias=float(np.mean(relative)),
        spearman=spearman([r.predicted for r in results], [r.case.measured for r in results]),
    )


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Spearman's rank correlation, equal values sharing their mean rank; nan for fewer than 3 or constant values."""
    if len(first) < 3:
        return float("nan")
    a, b = _ranks(first), _ranks(second)
    a, b = a - a.mean(), b - b.mean()
    norm = float(np.sqrt((a @ a) * (b @ b)))
    return float(a @ b) / norm if norm > 0 else float("nan")


def _ranks(values: Sequence[float]) -> np.ndarray:
    array = np.asarray(values, np.float64)
    _, inverse, counts = np.unique(array, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    return (last - (counts - 1) / 2.0)[inverse]
