"""What core and a search strategy say to each other: budget, progress, incumbent, result."""

from __future__ import annotations

import time
from collections.abc import Callable

import attrs

from rpeg_core.passes.score import Evaluation, Objective

__all__ = ["Improvement", "Incumbent", "Progress", "SearchBudget", "SearchResult", "Solution"]


@attrs.frozen(kw_only=True)
class SearchBudget:
    """When to stop; whichever limit comes first. With only ``evaluations`` a seeded search is reproducible.

    Attributes:
        seconds: wall clock, None for no limit.
        evaluations: uncached evaluations, None for no limit.
    """

    seconds: float | None = None
    evaluations: int | None = None


@attrs.frozen
class Solution:
    """A configuration by indices: ``problem.structures[structure]`` and one candidate index per operator."""

    structure: int
    choice: tuple[int, ...]


@attrs.frozen(kw_only=True)
class Improvement:
    """One point of the convergence curve."""

    seconds: float
    evaluations: int
    value: float
    tokens_per_s: float


@attrs.frozen(kw_only=True)
class SearchResult:
    """What a strategy found.

    Attributes:
        best: the best feasible configuration, None when none was found.
        evaluation: of ``best``.
        nearest: the configuration with the smallest peak_ratio seen, for the report when nothing fits.
        evaluations: uncached evaluations spent.
        seconds: wall clock spent.
        improvements: the convergence curve, ascending.
        stopped: ``budget``, ``cancelled`` or ``finished`` (nothing left to try).
        gap: proven relative distance to the best possible score, None when unknown.
    """

    best: Solution | None
    evaluation: Evaluation | None
    nearest: Solution | None
    evaluations: int
    seconds: float
    improvements: tuple[Improvement, ...]
    stopped: str
    gap: float | None = None


class Progress:
    """How a running search reports, and how it is told to stop.

    ``report`` gets (share of the budget spent in 0..1, evaluations, incumbent) from time to time.
    """

    def __init__(self, report: Callable[[float, int, Incumbent], None] | None = None) -> None:
        self._report = report
        self.cancelled = False

    def cancel(self) -> None:
        """Ask the search to return the best configuration so far."""
        self.cancelled = True

    def update(self, spent: float, evaluations: int, incumbent: Incumbent) -> None:
        if self._report is not None:
            self._report(spent, evaluations, incumbent)


class Incumbent:
    """The best feasible configuration so far; also the least infeasible one.

    The efficiency objectives are relative to the best throughput so far, so the incumbent's value is recomputed when
    that throughput grows.
    """

    def __init__(self, objective: Objective) -> None:
        self.objective = objective
        self.best: Solution | None = None
        self.evaluation: Evaluation | None = None
        self.best_tokens_per_s = 0.0
        self.nearest: Solution | None = None
        self._nearest_ratio = float("inf")
        self._began = time.monotonic()
        self.improvements: list[Improvement] = []

    @property
    def value(self) -> float:
        """The incumbent's objective value, 0 when there is none."""
        return 0.0 if self.evaluation is None else self.objective.value(self.evaluation, self.best_tokens_per_s)

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self._began

    def offer(self, solution: Solution, evaluation: Evaluation, evaluations: int) -> bool:
        """Consider a configuration; True when it becomes the incumbent."""
        if evaluation.peak_ratio < self._nearest_ratio:
            self.nearest, self._nearest_ratio = solution, evaluation.peak_ratio
        if not evaluation.feasible:
            return False
        if evaluation.tokens_per_s > self.best_tokens_per_s:
            self.best_tokens_per_s = evaluation.tokens_per_s
        if self.objective.value(evaluation, self.best_tokens_per_s) <= self.value:
            return False
        self.best, self.evaluation = solution, evaluation
        self.improvements.append(
            Improvement(
                seconds=self.seconds,
                evaluations=evaluations,
                value=self.value,
                tokens_per_s=evaluation.tokens_per_s,
            )
        )
        return True

    def result(self, evaluations: int, stopped: str, gap: float | None = None) -> SearchResult:
        """Close the search."""
        return SearchResult(
            best=self.best,
            evaluation=self.evaluation,
            nearest=self.nearest,
            evaluations=evaluations,
            seconds=self.seconds,
            improvements=tuple(self.improvements),
            stopped=stopped,
            gap=gap,
        )
