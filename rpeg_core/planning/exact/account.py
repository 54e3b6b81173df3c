"""The account of a run: what was evaluated, what is left of the budget, the best plan so far."""

from __future__ import annotations

import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.planning.compiled import CompiledEvaluator
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Incumbent, Progress, SearchBudget

__all__ = ["MAKESPAN", "PEAK_RATIO", "Account"]

# Columns of CompiledEvaluator.evaluate_many.
MAKESPAN, PEAK_RATIO = 0, 2


class Account:
    """Evaluates for the search, within the budget.

    Args:
        problem, budget, progress: of the run; time counts since the incumbent's beginning.
        incumbent: takes what is found.
        most_boxes: sets of plans bounded at most.
    """

    def __init__(
        self, problem: Problem, budget: SearchBudget, progress: Progress, incumbent: Incumbent, most_boxes: float
    ) -> None:
        self.problem, self.budget, self.progress, self.incumbent = problem, budget, progress, incumbent
        self.boxes, self._most_boxes = 0, most_boxes
        self.evaluators = {
            index: _compiled(structure)
            for index, structure in enumerate(problem.structures)
            if structure.empty_operator is None
        }
        self.evaluations = 0

    @property
    def evaluations_left(self) -> float:
        return np.inf if self.budget.evaluations is None else self.budget.evaluations - self.evaluations

    @property
    def spent(self) -> float:
        """Share of the budget, of whichever limit is closer; 0 without limits."""
        shares = [self.boxes / self._most_boxes]
        if self.budget.seconds is not None:
            shares.append(self.incumbent.seconds / max(self.budget.seconds, 1e-9))
        if self.budget.evaluations is not None:
            shares.append(self.evaluations / max(self.budget.evaluations, 1))
        return max(shares)

    def goes_on(self, share: float = 1.0) -> bool:
        """Whether the run may continue, within a share of its budget."""
        return not self.progress.cancelled and self.spent < share

    def evaluate(self, structure: int, choices: Ints) -> Floats:
        """Evaluate choices of a structure, as many as the budget still allows; offer the best to the incumbent."""
        if len(choices) > self.evaluations_left:
            choices = choices[: int(self.evaluations_left)]
        results = self.evaluators[structure].evaluate_many(choices)
        self.evaluations += len(results)
        if self.incumbent.offer_rows(structure, choices, results, self.evaluations):
            self.report()
        return results

    def report(self) -> None:
        self.progress.update(min(1.0, self.spent), self.evaluations, self.incumbent)


def _compiled(structure: StructureProblem) -> CompiledEvaluator:
    evaluator = structure.evaluator
    return evaluator if isinstance(evaluator, CompiledEvaluator) else CompiledEvaluator(structure)
