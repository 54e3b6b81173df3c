"""What core and a search strategy say to each other: budget, progress, incumbent, result."""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.passes.score import Evaluation, Objective

__all__ = ["Improvement", "Incumbent", "Progress", "SearchBudget", "SearchResult", "Solution", "evaluation_of"]


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
        self._cancelled = False
        self._preparing: int | None = None  # the thread that does

    @property
    def cancelled(self) -> bool:
        """Whether the search shall return the best configuration so far."""
        return self._cancelled

    def cancel(self) -> None:
        """Ask the search to return the best configuration so far.

        Raises:
            KeyboardInterrupt: called, by a signal, in the thread that is :meth:`preparing`.
        """
        self._cancelled = True
        if self._preparing == threading.get_ident():
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def preparing(self) -> Iterator[None]:
        """While kernels are compiled there is no configuration yet that a cancelled search could return."""
        self._preparing = threading.get_ident()
        try:
            yield
        finally:
            self._preparing = None

    def part(self, share: float) -> Progress:
        """The progress of a first part of the search, which may spend ``share`` of the budget."""
        return _Part(self, share)

    def update(self, spent: float, evaluations: int, incumbent: Incumbent) -> None:
        if self._report is not None:
            self._report(spent, evaluations, incumbent)


class _Part(Progress):
    def __init__(self, whole: Progress, share: float) -> None:
        super().__init__(lambda spent, evaluations, incumbent: whole.update(share * spent, evaluations, incumbent))
        self._whole = whole

    @property
    def cancelled(self) -> bool:
        return self._cancelled or self._whole.cancelled


def evaluation_of(row: Floats) -> Evaluation:
    """A row of a compiled evaluator's results, whose columns are the fields of Evaluation."""
    makespan, tokens_per_s, peak_ratio, utilization, used = row.tolist()
    return Evaluation(
        makespan_s=makespan,
        tokens_per_s=tokens_per_s,
        peak_ratio=peak_ratio,
        utilization=utilization,
        used_gpus=int(used),
    )


class Incumbent:
    """The best feasible configuration so far; also the least infeasible one.

    The efficiency objectives are relative to the best throughput so far: when that grows, a faster plan that was worth
    less than the incumbent can be worth more. So plans are kept that no other one beats in throughput and in worth.
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
        self._kept: list[tuple[Solution, Evaluation]] = []

    @property
    def value(self) -> float:
        """The incumbent's objective value, 0 when there is none."""
        return 0.0 if self.evaluation is None else self.objective.value(self.evaluation, self.best_tokens_per_s)

    @property
    def seconds(self) -> float:
        """Since the search began."""
        return time.monotonic() - self._began

    def offer(self, solution: Solution, evaluation: Evaluation, evaluations: int) -> bool:
        """Consider a configuration; True when the incumbent changes."""
        if evaluation.peak_ratio < self._nearest_ratio:
            self.nearest, self._nearest_ratio = solution, evaluation.peak_ratio
        if not evaluation.feasible or any(self._as_good(kept, evaluation) for _, kept in self._kept):
            return False
        self._kept = [(s, kept) for s, kept in self._kept if not self._as_good(evaluation, kept)]
        self._kept.append((solution, evaluation))
        self.best_tokens_per_s = max(self.best_tokens_per_s, evaluation.tokens_per_s)
        best, found = max(self._kept, key=lambda pair: self.objective.value(pair[1], self.best_tokens_per_s))
        if best == self.best:
            return False
        self.best, self.evaluation = best, found
        self.improvements.append(
            Improvement(
                seconds=self.seconds,
                evaluations=evaluations,
                value=self.value,
                tokens_per_s=found.tokens_per_s,
            )
        )
        return True

    def offer_rows(self, structure: int, choices: Ints, results: Floats, evaluations: int) -> bool:
        """Consider evaluated choices of a structure, rows as :func:`evaluation_of` takes them; as :meth:`offer`."""
        if not len(results):
            return False
        tokens, ratios = results[:, 1], results[:, 2]
        feasible = np.flatnonzero(ratios <= 1.0)
        rows = [int(np.argmin(ratios))]
        if len(feasible) and self.objective.kind == "throughput":
            rows.append(int(feasible[np.argmax(tokens[feasible])]))
        elif len(feasible):
            best = -np.inf
            for row in feasible[np.argsort(-tokens[feasible], kind="stable")].tolist():  # faster ones must be beaten
                worth = self._worth(evaluation_of(results[row]))
                if worth > best:
                    best = worth
                    rows.append(row)
        changed = False
        for row in rows:
            solution = Solution(structure, tuple(choices[row].tolist()))
            changed |= self.offer(solution, evaluation_of(results[row]), evaluations)
        return changed

    def _worth(self, evaluation: Evaluation) -> float:
        """What it is worth when it is fast enough."""
        return self.objective.value(evaluation, 0.0)

    def _as_good(self, one: Evaluation, other: Evaluation) -> bool:
        """Whether ``one`` is as good as ``other``, however fast the best plan is."""
        return one.tokens_per_s >= other.tokens_per_s and self._worth(one) >= self._worth(other)

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
