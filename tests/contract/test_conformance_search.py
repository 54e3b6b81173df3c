"""The conformance checks of search strategies: a small one passes, and what can be wrong with it is found."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from typing import Any

import attrs
import pytest

from rpeg_core import SearchStrategy, setting
from rpeg_core.planning.search import Incumbent, Solution
from rpeg_core.testing.checks import search as search_checks
from rpeg_core.testing.conformance import Outcome, checks_for, conformance


def failure(record: Any, name: str) -> str:
    """The message of a check that must fail."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # what the plugin raised counts too
        dict(checks_for(record))[name]()
    return str(caught.value)


def failed(record: Any) -> set[str]:
    return {result.check for result in conformance(record) if result.outcome is Outcome.FAILED}


@attrs.frozen(kw_only=True)
class SearchSettings:
    seed: int = setting(0, help="Seed of the random choices.", minimum=0)


def configurations(problem: Any) -> list[Solution]:
    return [
        Solution(index, choice)
        for index, structure in enumerate(problem.structures)
        for choice in itertools.product(*(range(len(candidates)) for candidates in structure.candidates))
    ]


def shuffled(problem: Any, budget: Any, settings: Any, progress: Any, *, obeys: bool = True, rng: Any = None) -> Any:
    """Every configuration once, in random order, until the budget is spent."""
    incumbent, evaluations = Incumbent(problem.objective), 0
    everything = configurations(problem)
    (rng or random.Random(settings.seed)).shuffle(everything)
    for solution in everything:
        if progress.cancelled and obeys:
            return incumbent.result(evaluations, "cancelled")
        if budget.evaluations is not None and evaluations >= budget.evaluations and obeys:
            return incumbent.result(evaluations, "budget")
        if budget.seconds is not None and incumbent.seconds >= budget.seconds:
            return incumbent.result(evaluations, "budget")
        evaluations += 1
        evaluation = problem.structures[solution.structure].evaluator.evaluate(solution.choice)
        incumbent.offer(solution, evaluation, evaluations)
        progress.update(evaluations / len(everything), evaluations, incumbent)
    return incumbent.result(evaluations, "finished")


def strategy(run: Callable[..., Any] = shuffled, guarantee: str = "heuristic") -> SearchStrategy:
    return SearchStrategy(name="acme", summary="A search.", guarantee=guarantee, run=run, settings=SearchSettings)


def changed(**changes: Any) -> SearchStrategy:
    """The small strategy with some fields of its result replaced."""
    return strategy(lambda *arguments: attrs.evolve(shuffled(*arguments), **changes))


def test_a_small_strategy_conforms() -> None:
    assert failed(strategy()) == set()


def test_a_search_through_everything_may_promise_the_optimum() -> None:
    assert failed(strategy(guarantee="optimal")) == set()


def test_a_result_that_is_none_fails() -> None:
    assert failure(strategy(lambda *arguments: None), "feasible") == "run returned NoneType, not SearchResult"


def test_a_strategy_that_finds_nothing_fails() -> None:
    message = "objective throughput: every plan fits, and it found none"
    assert failure(changed(best=None, evaluation=None), "feasible") == message


def test_a_plan_outside_the_search_space_fails() -> None:
    assert "is not in the search space" in failure(changed(best=Solution(0, (0, 10_000))), "feasible")


def test_a_claim_that_the_readable_evaluator_denies_fails() -> None:
    def run(*arguments: Any) -> Any:
        result = shuffled(*arguments)
        if result.evaluation is None:
            return result
        faster = attrs.evolve(result.evaluation, tokens_per_s=2 * result.evaluation.tokens_per_s)
        return attrs.evolve(result, evaluation=faster)

    assert "the readable evaluator Evaluation(" in failure(strategy(run), "feasible")


def test_an_unknown_reason_to_stop_fails() -> None:
    assert failure(changed(stopped="done"), "feasible") == "stopped is 'done'; allowed: budget, cancelled, finished"


def test_a_best_plan_that_does_not_fit_fails() -> None:
    def run(problem: Any, budget: Any, settings: Any, progress: Any) -> Any:
        result = shuffled(problem, budget, settings, progress)
        for solution in configurations(problem):
            evaluation = problem.structures[solution.structure].evaluator.evaluate(solution.choice)
            if not evaluation.feasible:
                return attrs.evolve(result, best=solution, evaluation=evaluation)
        return result

    assert failure(strategy(run), "memory").startswith("its best plan does not fit: ")
    assert failure(strategy(run), "nothing-fits").startswith("no combination fits, and it calls Solution(")


def test_a_strategy_that_needs_candidates_fails() -> None:
    def run(problem: Any, budget: Any, settings: Any, progress: Any) -> Any:
        for structure in problem.structures:
            structure.evaluator.evaluate((0,) * len(structure.candidates))
        return shuffled(problem, budget, settings, progress)

    assert "IndexError" in {r.check: r.message for r in conformance(strategy(run))}["nothing-fits"]


def test_a_budget_that_is_ignored_fails() -> None:
    record = strategy(lambda *arguments: shuffled(*arguments, obeys=False))
    assert failure(record, "evaluations").startswith("25 evaluations allowed, ")
    assert failure(record, "cancelled").startswith("cancelled after 0 evaluations, it made ")


def test_evaluations_that_are_not_reported_fail() -> None:
    assert failure(changed(evaluations=1), "evaluations") == "25 configurations evaluated, 1 reported"


def test_the_global_random_state_fails() -> None:
    record = strategy(lambda *arguments: shuffled(*arguments, rng=random))
    assert failure(record, "repeatable").startswith("two searches with one seed differ: ")


def test_a_share_beyond_one_fails() -> None:
    def run(problem: Any, budget: Any, settings: Any, progress: Any) -> Any:
        progress.update(1.5, 0, Incumbent(problem.objective))
        return shuffled(problem, budget, settings, progress)

    assert failure(strategy(run), "progress") == "it reported a share of 1.5; allowed: 0..1"


def test_an_optimum_that_is_promised_and_missed_fails() -> None:
    def run(problem: Any, budget: Any, settings: Any, progress: Any) -> Any:
        return shuffled(problem, attrs.evolve(budget, evaluations=3), settings, progress)

    assert "trying everything finds " in failure(strategy(run, guarantee="optimal"), "optimal")


def test_a_search_that_does_not_end_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(problem: Any, budget: Any, settings: Any, progress: Any) -> Any:
        while not progress.cancelled:
            pass
        return shuffled(problem, budget, settings, progress)

    monkeypatch.setattr(search_checks, "LIMIT_S", 0.1)
    message = "with a budget of 60 evaluations it had not ended after 0.1 s"
    assert failure(strategy(run), "feasible") == message
