"""The ledger: evaluates choices, remembers them, counts what was spent and ends the work when it is time.

Only uncached evaluations count. With an evaluation budget alone nothing here depends on the clock, so a seed gives the
same search on every machine.
"""

from __future__ import annotations

import math
import time

from rpeg_core.passes.score import Evaluation
from rpeg_core.planning.problem import Evaluator, Problem
from rpeg_core.planning.search import Incumbent, Progress, SearchBudget, Solution
from rpeg_plugin_annealing.moves import Choice

__all__ = ["AllowanceSpentError", "Ledger"]

CACHED_CONFIGURATIONS = 1_000_000
"""The cache is emptied beyond this (about 400 MB), so that hours of search do not exhaust the host."""

REPORTS_PER_S = 10


class AllowanceSpentError(Exception):
    """Raised out of the work in progress: the current allowance is spent or the user cancelled."""


class Ledger:
    """Books evaluations of one run against allowances.

    Attributes:
        incumbent: what was found.
        structure: index of the structure that is worked on.
        evaluations: uncached ones, of the whole run.
        hits: configurations known already, since the last unknown one of the current allowance.
    """

    def __init__(self, problem: Problem, budget: SearchBudget, progress: Progress) -> None:
        self.incumbent = Incumbent(problem.objective)
        self.evaluations = 0
        self._problem, self._budget, self._progress = problem, budget, progress
        self._began = time.monotonic()
        self._next_report = self._began
        self._caches: dict[int, dict[Choice, Evaluation]] = {}
        self._cached = 0

    @property
    def seconds(self) -> float:
        """Wall clock since the run began."""
        return time.monotonic() - self._began

    def allow(self, structure: int, until: SearchBudget) -> None:
        """Work on ``structure`` until the run, counted from its beginning, has spent ``until``."""
        self.structure = structure
        self.hits = 0
        self._evaluator: Evaluator = self._problem.structures[structure].evaluator
        self._cache = self._caches.setdefault(structure, {})
        self._deadline = math.inf if until.seconds is None else self._began + until.seconds
        self._limit = math.inf if until.evaluations is None else until.evaluations

    def evaluate(self, choice: Choice) -> Evaluation:
        """Evaluate a configuration of the current structure.

        Raises:
            AllowanceSpentError: before evaluating, when time or evaluations are used up or the user cancelled.
        """
        now = time.monotonic()
        if self._progress.cancelled or now >= self._deadline:
            raise AllowanceSpentError
        if now >= self._next_report:
            self._next_report = now + 1 / REPORTS_PER_S
            self.report()
        known = self._cache.get(choice)
        if known is not None:
            self.hits += 1
            return known
        if self.evaluations >= self._limit:
            raise AllowanceSpentError
        self.hits = 0
        evaluation = self._evaluator.evaluate(choice)
        self.evaluations += 1
        self._remember(choice, evaluation)
        self.incumbent.offer(Solution(self.structure, choice), evaluation, self.evaluations)
        return evaluation

    def critical_seconds(self, choice: Choice) -> list[float]:
        """Seconds of each operator on the critical path."""
        return self._evaluator.critical_seconds(choice).tolist()

    def known(self) -> int:
        """Configurations of the current structure in the cache."""
        return len(self._cache)

    def spent(self) -> float:
        """Share of the budget that is spent, 0..1; the larger share when it has two limits."""
        shares = [0.0]
        if self._budget.seconds:
            shares.append(self.seconds / self._budget.seconds)
        if self._budget.evaluations:
            shares.append(self.evaluations / self._budget.evaluations)
        return min(1.0, max(shares))

    def report(self) -> None:
        """Tell the progress where the run stands."""
        self._progress.update(self.spent(), self.evaluations, self.incumbent)

    def _remember(self, choice: Choice, evaluation: Evaluation) -> None:
        if self._cached >= CACHED_CONFIGURATIONS:
            for cache in self._caches.values():
                cache.clear()
            self._cached = 0
        self._cache[choice] = evaluation
        self._cached += 1
