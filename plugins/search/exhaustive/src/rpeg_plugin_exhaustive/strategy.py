"""The run: a first plan by descent, then the most promising set of plans of all structures, again and again.

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

from rpeg_core.errors import UsageError
from rpeg_core.passes.score import Objective
from rpeg_core.planning.bounds import can_split
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.search import Progress, SearchBudget, SearchResult
from rpeg_plugin_exhaustive.account import Account
from rpeg_plugin_exhaustive.descent import first_plans
from rpeg_plugin_exhaustive.forest import Forest, Goal
from rpeg_plugin_exhaustive.settings import Settings

__all__ = ["prepare", "run"]

THROUGHPUT_SHARE = 0.5
"""Of the budget, for the first pass of another objective."""


def run(problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress) -> SearchResult:
    """Search all structures that have candidates; without any limit until the optimum is proved.

    Raises:
        UsageError: a graph has too many operators for the proof.
    """
    for structure in problem.structures:
        if not can_split(structure):
            raise UsageError(
                f"exhaustive cannot prove plans of {structure.rpeg.name!r}",
                facts=[f"it has {len(structure.candidates)} operators, too many for the bounds"],
                hint="use --strategy annealing",
            )
    account = Account(problem, budget, progress)
    forest = Forest(account, settings)
    account.start_clock()
    throughput = problem.objective.kind == "throughput"
    if account.evaluators and account.goes_on():
        first_plans(account)
    proved = forest.search(Goal(Objective()), 1.0 if throughput else THROUGHPUT_SHARE)
    if throughput or not account.evaluators:
        return _finish(account, proved, forest.gap())
    goal = Goal(problem.objective, account.incumbent.best_tokens_per_s)
    proved = Forest(account, settings).search(goal, 1.0) and proved
    return _finish(account, proved, 0.0 if proved and account.incumbent.best is not None else None)


def prepare(problem: Problem) -> None:
    """Compile or load the kernels, by a search that is over at once. Raises as :func:`run`."""
    run(problem, SearchBudget(evaluations=1), Settings(), Progress())


def _finish(account: Account, proved: bool, gap: float | None) -> SearchResult:
    return account.result("finished" if proved else account.interruption, gap)
