"""The account of a run: what was evaluated, what is left of the budget, the best plan so far."""

from __future__ import annotations

import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.passes.score import Evaluation
from rpeg_core.planning.compiled import CompiledEvaluator
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Incumbent, Progress, SearchBudget, SearchResult, Solution

__all__ = ["MAKESPAN", "PEAK_RATIO", "TOKENS_PER_S", "USED_GPUS", "UTILIZATION", "Account"]

# Columns of CompiledEvaluator.evaluate_many.
MAKESPAN, TOKENS_PER_S, PEAK_RATIO, UTILIZATION, USED_GPUS = range(5)


class Account:
    """Evaluates for the search, within the budget.

    Args:
        problem, budget, progress: of the run.
    """

    def __init__(self, problem: Problem, budget: SearchBudget, progress: Progress) -> None:
        self.problem, self.budget, self.progress = problem, budget, progress
        self.evaluators = {
            index: _compiled(structure)
            for index, structure in enumerate(problem.structures)
            if structure.empty_operator is None
        }
        self.evaluations = 0
        self.incumbent = Incumbent(problem.objective)

    def start_clock(self) -> None:
        """What came before, such as compiling, does not count."""
        self.incumbent = Incumbent(self.problem.objective)

    @property
    def evaluations_left(self) -> float:
        return np.inf if self.budget.evaluations is None else self.budget.evaluations - self.evaluations

    @property
    def spent(self) -> float:
        """Share of the budget, of whichever limit is closer; 0 without limits."""
        shares = [0.0]
        if self.budget.seconds is not None:
            shares.append(self.incumbent.seconds / max(self.budget.seconds, 1e-9))
        if self.budget.evaluations is not None:
            shares.append(self.evaluations / max(self.budget.evaluations, 1))
        return max(shares)

    @property
    def interruption(self) -> str:
        """Why the run ends early."""
        return "cancelled" if self.progress.cancelled else "budget"

    def goes_on(self, share: float = 1.0) -> bool:
        """Whether the run may continue, within a share of its budget."""
        return not self.progress.cancelled and self.spent < share

    def evaluate(self, structure: int, choices: Ints) -> Floats:
        """Evaluate choices of a structure, as many as the budget still allows; offer the best to the incumbent."""
        if len(choices) > self.evaluations_left:
            choices = choices[: int(self.evaluations_left)]
        results = self.evaluators[structure].evaluate_many(choices)
        self.evaluations += len(results)
        if len(results):
            self._offer(structure, choices, results)
        return results

    def report(self) -> None:
        self.progress.update(min(1.0, self.spent), self.evaluations, self.incumbent)

    def result(self, stopped: str, gap: float | None = None) -> SearchResult:
        self.report()
        return self.incumbent.result(self.evaluations, stopped, gap)

    def _offer(self, structure: int, choices: Ints, results: Floats) -> None:
        """The incumbent considers the fastest feasible plan, the best one for the objective, and the nearest."""
        feasible = np.flatnonzero(results[:, PEAK_RATIO] <= 1.0)
        offered = [int(np.argmin(results[:, PEAK_RATIO]))]
        if len(feasible):
            offered = [int(feasible[np.argmin(results[feasible, MAKESPAN])])]
            best = max(self.incumbent.best_tokens_per_s, float(results[offered[0], TOKENS_PER_S]))
            if self.problem.objective.kind != "throughput":
                values = [self.problem.objective.value(_evaluation(results[i]), best) for i in feasible]
                offered.append(int(feasible[int(np.argmax(values))]))
        for i in offered:
            solution = Solution(structure, tuple(int(c) for c in choices[i]))
            if self.incumbent.offer(solution, _evaluation(results[i]), self.evaluations):
                self.report()


def _compiled(structure: StructureProblem) -> CompiledEvaluator:
    evaluator = structure.evaluator
    return evaluator if isinstance(evaluator, CompiledEvaluator) else CompiledEvaluator(structure)


def _evaluation(row: Floats) -> Evaluation:
    return Evaluation(
        makespan_s=float(row[MAKESPAN]),
        tokens_per_s=float(row[TOKENS_PER_S]),
        peak_ratio=float(row[PEAK_RATIO]),
        utilization=float(row[UTILIZATION]),
        used_gpus=int(row[USED_GPUS]),
    )
