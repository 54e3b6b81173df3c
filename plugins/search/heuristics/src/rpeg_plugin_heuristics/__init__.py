"""The two baselines of the paper (VI-B) as search strategies: no search, one plan per structure, the best one wins.

A baseline that does not fit has ``best`` None and the least infeasible of its plans as ``nearest``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import attrs

from rpeg_core import SearchStrategy, hookimpl, setting
from rpeg_core.errors import SettingsError
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Incumbent, Progress, SearchBudget, SearchResult, Solution
from rpeg_core.planning.starts import colocated, concurrent

__all__ = ["CONCURRENT", "GREEDY", "Settings", "rpeg_search_strategies"]

Start = Callable[[StructureProblem], tuple[int, ...] | None]


@attrs.frozen(kw_only=True)
class Settings:
    """Which structures a baseline is computed for."""

    structures: Literal["all", "synchronous"] = setting(
        "all", help="The experiment's structures that are tried: all, or only those with staleness 0."
    )


def _run(start: Start, problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress) -> SearchResult:
    """Evaluate ``start`` for every structure; a handful of evaluations, so the budget is not needed."""
    incumbent = Incumbent(problem.objective)
    chosen = [
        index
        for index, structure in enumerate(problem.structures)
        if settings.structures == "all" or not any(tau for _, tau in structure.structure.staleness)
    ]
    if not chosen:
        raise SettingsError(
            "structures is 'synchronous', but the experiment has no structure with staleness 0",
            hint="add 0 to structure.staleness, or set structures to 'all'",
        )
    evaluations = 0
    for position, index in enumerate(chosen):
        if progress.cancelled:
            return incumbent.result(evaluations, "cancelled")
        structure = problem.structures[index]
        choice = start(structure)
        if choice is not None:
            evaluations += 1
            incumbent.offer(Solution(index, choice), structure.evaluator.evaluate(choice), evaluations)
        progress.update((position + 1) / len(chosen), evaluations, incumbent)
    return incumbent.result(evaluations, "finished")


def _greedy(problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress) -> SearchResult:
    return _run(colocated, problem, budget, settings, progress)


def _concurrent(problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress) -> SearchResult:
    return _run(concurrent, problem, budget, settings, progress)


GREEDY = SearchStrategy(
    name="greedy",
    summary="Baseline: every operator on all GPUs with its fastest layout, one after another.",
    guarantee="baseline",
    run=_greedy,
    settings=Settings,
)

CONCURRENT = SearchStrategy(
    name="concurrent",
    summary="Baseline: independent operators on disjoint parts of the cluster, the fastest partition.",
    guarantee="baseline",
    run=_concurrent,
    settings=Settings,
)


@hookimpl
def rpeg_search_strategies() -> tuple[SearchStrategy, ...]:
    """The strategies of this distribution."""
    return GREEDY, CONCURRENT
