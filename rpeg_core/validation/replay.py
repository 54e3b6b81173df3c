"""Pricing cases with the terms that the planner uses, and the errors that result."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import attrs
import numpy as np

from rpeg_core.costing.batches import MemoryBatch, OperatorBatch
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
    """

    case: Case
    terms: Mapping[str, float]

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
    """Errors of a group of results: mean absolute and mean signed relative error, rank correlation (nan below 3)."""

    count: int
    mape: float
    bias: float
    spearman: float


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
        beside = max((parts[:1], parts[1:]), key=lambda group: sum(sum(part.values()) for part in group))
        parts = list(beside)
    found: dict[str, float] = {}
    for part in (*parts, dict(case.overheads)):
        for name, value in part.items():
            found[name] = found.get(name, 0.0) + value
    if sum(found.values()) <= 0:
        raise CostTermError(f"no cost term prices {case.id}", hint="name a cost model, e.g. --costs analytical")
    return Result(case=case, terms=dict(sorted(found.items(), key=lambda item: (-item[1], item[0]))))


def _part(
    case: Case, batch: OperatorBatch | MemoryBatch, times: float, terms: Sequence[tuple[CostTerm, object]]
) -> dict[str, float]:
    found: dict[str, float] = {}
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
    return found


def errors_of(results: Sequence[Result]) -> Errors:
    """The errors of a group; it has at least one result."""
    relative = np.array([result.error for result in results])
    return Errors(
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
