"""From a planner to a plan that holds: search, baselines, and the check against the readable evaluator.

Policy. The chosen strategy runs first, then every installed strategy that is a baseline. The best feasible
configuration wins, whoever found it, so that a plan is at least as good as each baseline. Where none found one, the
descent to the least memory has the last word before the answer is no.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import attrs

from rpeg_core.errors import PluginError, RpegError
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.score import Evaluation, Objective
from rpeg_core.planning.bounds import gap, problem_bound
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Progress, SearchResult, Solution
from rpeg_core.plugins.registry import Registry

__all__ = ["BASELINE", "LEAST_MEMORY", "Contender", "Outcome", "contend", "only_choice", "solve"]

BASELINE = "baseline"
"""The guarantee of strategies that every plan is compared with."""

LEAST_MEMORY = "least-memory"
"""Who found a plan that only the descent to the least memory found."""

LEAST_MEMORY_SECONDS = 5.0


@attrs.frozen(kw_only=True)
class Contender:
    """What one strategy came up with.

    Attributes:
        name: of the strategy.
        result: of its search, None for the descent to the least memory.
        solution: the best feasible configuration, else the one closest to fitting, else None.
        prediction: of ``solution`` by the readable evaluator.
    """

    name: str
    result: SearchResult | None
    solution: Solution | None
    prediction: Prediction | None

    @property
    def feasible(self) -> bool:
        return self.prediction is not None and self.prediction.evaluation.feasible


@attrs.frozen(kw_only=True)
class Outcome:
    """The chosen strategy's contribution first, then the baselines'.

    Attributes:
        problem: what was searched.
        contenders: one per strategy that ran.
        winner: the best feasible one, None when nothing fits.
        gap: how far the winner is below the best possible plan under the model at most, as a share of that; None when
            nothing fits or the objective has no bound.
        limit: what keeps plans from being faster, in words.
    """

    problem: Problem
    contenders: tuple[Contender, ...]
    winner: Contender | None
    gap: float | None = None
    limit: str = ""

    @property
    def chosen(self) -> Contender:
        """The strategy that the user asked for."""
        return self.contenders[0]

    @property
    def baselines(self) -> tuple[Contender, ...]:
        return tuple(contender for contender in self.contenders[1:] if contender.name != LEAST_MEMORY)

    @property
    def nearest(self) -> Contender | None:
        """The contender with the smallest peak, for the report when nothing fits."""
        return closest(self.contenders)

    def structure(self, contender: Contender) -> StructureProblem:
        """The structure of a contender's solution."""
        return self.problem.structures[contender.solution.structure]


def solve(
    planner: Planner,
    problem: Problem,
    registry: Registry,
    progress: Progress,
    *,
    strategy: str | None = None,
    baselines: bool = True,
) -> Outcome:
    """Search ``problem`` and compare with the baselines.

    Args:
        planner: gives strategies, their settings and the budget.
        problem: of the planner.
        registry: names the baselines.
        progress: of the chosen strategy; cancelling it ends the search with the best so far.
        strategy: None is the experiment's.
        baselines: False leaves them out.

    Raises:
        MissingPluginError, PluginError: the strategy is not there, failed, or returned what the readable evaluator
            does not confirm.
    """
    name = strategy or planner.experiment.search.strategy
    others = [loaded.name for loaded in registry.records("search") if loaded.record.guarantee == BASELINE]
    contenders = [contend(planner, problem, name, progress)]
    if baselines:
        contenders += [contend(planner, problem, other, Progress()) for other in others if other != name]
    winner = best(problem.objective, contenders)
    if winner is None:
        contenders.append(_least_memory(problem))
        winner = best(problem.objective, contenders)
    if winner is None:
        return Outcome(problem=problem, contenders=tuple(contenders), winner=None)
    proven = [c.result.gap for c in contenders if c is winner and c.result is not None and c.result.gap is not None]
    reached = winner.prediction.evaluation.tokens_per_s
    bound = problem_bound(problem, known_tokens_per_s=reached)
    return Outcome(
        problem=problem,
        contenders=tuple(contenders),
        winner=winner,
        gap=min([*proven, *(g for g in [gap(reached, bound)] if g is not None)], default=None),
        limit=bound.reason,
    )


def only_choice(problem: Problem) -> Solution | None:
    """The best structure when pins leave one configuration of each; None when there is something to search.

    Where none fits it is the one with the smallest peak.
    """
    if any(len(candidates) != 1 for structure in problem.structures for candidates in structure.candidates):
        return None
    solutions = [Solution(i, (0,) * len(s.candidates)) for i, s in enumerate(problem.structures)]
    contenders = [
        Contender(name="", result=None, solution=solution, prediction=predict(problem, solution))
        for solution in solutions
    ]
    winner = best(problem.objective, contenders) or closest(contenders)
    return None if winner is None else winner.solution


def closest(contenders: Sequence[Contender]) -> Contender | None:
    """The contender with the smallest peak."""
    known = [contender for contender in contenders if contender.prediction is not None]
    return min(known, key=lambda contender: contender.prediction.evaluation.peak_ratio, default=None)


def _least_memory(problem: Problem) -> Contender:
    found = least_memory(problem, any_size=True, deadline=time.monotonic() + LEAST_MEMORY_SECONDS)
    prediction = None if found is None else predict(problem, found)
    return Contender(name=LEAST_MEMORY, result=None, solution=found, prediction=prediction)


def best(objective: Objective, contenders: list[Contender]) -> Contender | None:
    """The feasible contender of the highest value, the first of equals."""
    feasible = [contender for contender in contenders if contender.feasible]
    top = max((contender.prediction.evaluation.tokens_per_s for contender in feasible), default=0.0)
    return max(feasible, key=lambda c: objective.value(c.prediction.evaluation, top), default=None)


def predict(problem: Problem, solution: Solution) -> Prediction:
    """The readable evaluator's word on a solution."""
    structure = problem.structures[solution.structure]
    return structure.predict(structure.plan(solution.choice))


def contend(planner: Planner, problem: Problem, name: str, progress: Progress) -> Contender:
    """Run one strategy and check its result.

    Raises:
        PluginError: it raised, returned no result, or an evaluation that the readable evaluator does not confirm.
    """
    result = _guarded(name, lambda: planner.search(problem, progress, name))
    if not isinstance(result, SearchResult):
        raise _broken(name, f"it returned {type(result).__name__}, not SearchResult")
    solution = result.best or result.nearest
    if solution is None:
        return Contender(name=name, result=result, solution=None, prediction=None)
    if not _exists(problem, solution):
        raise _broken(name, f"{solution} is not in the search space")
    prediction = predict(problem, solution)
    if result.best is not None:
        _confirm(name, result.evaluation, prediction.evaluation)
    return Contender(name=name, result=result, solution=solution, prediction=prediction)


def _exists(problem: Problem, solution: Solution) -> bool:
    if not 0 <= solution.structure < len(problem.structures):
        return False
    candidates = problem.structures[solution.structure].candidates
    return len(candidates) == len(solution.choice) and all(
        0 <= index < len(choices) for index, choices in zip(solution.choice, candidates, strict=True)
    )


def _guarded(name: str, run: Callable[[], SearchResult]) -> SearchResult:
    try:
        return run()
    except RpegError:
        raise
    except Exception as error:
        raise _broken(name, f"{type(error).__name__}: {error}") from error


def _confirm(name: str, claimed: Evaluation | None, readable: Evaluation) -> None:
    if claimed == readable and readable.feasible:
        return
    raise PluginError(
        f"search strategy {name!r} returned a plan that the readable evaluator does not confirm",
        facts=[f"claimed: {claimed}", f"readable evaluator: {readable}"],
        hint=f"report it with this experiment to the authors of {name!r}",
    )


def _broken(name: str, what: str) -> PluginError:
    return PluginError(f"search strategy {name!r} failed", facts=[what], hint=f"report it to the authors of {name!r}")
