"""The proof: a first plan by descent, then the most promising set of plans of all structures, again and again.

What is left out without an evaluation, and why the optimum *of the greedy schedule's score* survives it:

* A set of plans whose bound is not below the cutoff. The bound holds for every schedule of every feasible plan in the
  set, so for the greedy one. The cutoff is the makespan of the best plan less a rounding error.
* All but one of interchangeable places (``rpeg_core.planning.bounds.tree``): their plans have the same schedules.

Nothing else. In particular a layout that is slower and larger than another one on the same GPUs is kept: list
scheduling has anomalies (Graham), so that a longer duration can end in a shorter schedule.

Other objectives are searched in two passes: first throughput, then the objective among the plans whose throughput is
within the allowed loss of the best.
"""

from __future__ import annotations

import math

import attrs

from rpeg_core.passes.score import Objective
from rpeg_core.planning.exact.account import Account
from rpeg_core.planning.exact.descent import first_plans
from rpeg_core.planning.exact.forest import Forest, Goal
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.search import Incumbent, Progress, SearchBudget

__all__ = ["EVALUATED_AT_ONCE", "OPEN_BOXES", "Proof", "prove"]

OPEN_BOXES = 1_000_000
"""Sets of plans that a structure keeps open at most, about 100 bytes each."""

EVALUATED_AT_ONCE = 128

THROUGHPUT_SHARE = 0.5
"""Of the budget, for the first pass of another objective."""


@attrs.frozen(kw_only=True)
class Proof:
    """What is known about the incumbent.

    Attributes:
        complete: no plan is better.
        limit_tokens_per_s: no plan is faster unless it is the incumbent; None when that says nothing about the
            objective.
        evaluations: uncached evaluations spent.
    """

    complete: bool
    limit_tokens_per_s: float | None
    evaluations: int

    def gap(self, incumbent: Incumbent) -> float | None:
        """How far the incumbent can be below the best plan at most; None when unknown or without an incumbent."""
        if incumbent.best is None:
            return None
        if self.complete:
            return 0.0
        if self.limit_tokens_per_s is None:
            return None
        return max(0.0, 1.0 - incumbent.best_tokens_per_s / self.limit_tokens_per_s)


def prove(
    problem: Problem,
    budget: SearchBudget,
    progress: Progress,
    incumbent: Incumbent,
    *,
    most_boxes: float = math.inf,
    open_boxes: int = OPEN_BOXES,
    evaluated_at_once: int = EVALUATED_AT_ONCE,
) -> Proof:
    """Branch and bound over all structures that have candidates, each small enough (``bounds.can_split``).

    Args:
        problem: what is searched.
        budget: without limits it ends with the optimum; seconds count since the beginning of ``incumbent``.
        progress: reports, and cancels.
        incumbent: takes what is found; what it has already cuts the search short.
        most_boxes: sets of plans bounded at most, for a result that depends on counts only.
        open_boxes: sets of plans kept open at most; when they are full the search ends.
        evaluated_at_once: sets of so many plans or fewer are evaluated instead of split.

    Raises:
        CostTermError: a cost term fails, or all give 0 seconds.
    """
    account = Account(problem, budget, progress, incumbent, most_boxes)
    forest = Forest(account, open_boxes, evaluated_at_once)
    throughput = problem.objective.kind == "throughput"
    if not progress.cancelled:
        first_plans(account)
    complete = forest.search(Goal(Objective()), 1.0 if throughput else THROUGHPUT_SHARE)
    limit: float | None = forest.limit_tokens_per_s()
    if not throughput and account.evaluators:
        goal = Goal(problem.objective, incumbent.best_tokens_per_s)
        complete = Forest(account, open_boxes, evaluated_at_once).search(goal, 1.0) and complete
        limit = None
    account.report()
    return Proof(complete=complete, limit_tokens_per_s=limit, evaluations=account.evaluations)
