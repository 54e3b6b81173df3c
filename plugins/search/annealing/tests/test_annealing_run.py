"""Whole runs: optimum, reproducibility, budgets, cancelling, structures."""

from __future__ import annotations

import itertools
import time

import attrs
import pytest
from rpeg_plugin_annealing import ANNEALING, Settings, rpeg_search_strategies
from rpeg_plugin_annealing.elites import Elites

from rpeg_core.errors import UsageError
from rpeg_core.passes.score import Objective
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.search import Progress, SearchBudget
from rpeg_core.planning.starts import colocated, concurrent
from rpeg_core.settings import check_settings_class
from rpeg_core.testing.conformance import parametrize_checks
from rpeg_core.testing.toys import toy_ppo


def run(problem, *, seconds=None, evaluations=None, progress=None, **settings):
    budget = SearchBudget(seconds=seconds, evaluations=evaluations)
    return ANNEALING.run(problem, budget, Settings(**settings), progress or Progress())


def curve(result):
    return [(point.evaluations, point.tokens_per_s) for point in result.improvements]


# What is found


@pytest.mark.parametrize(
    "objective",
    [
        Objective(),
        Objective(kind="cost_per_token", max_throughput_loss=0.6),
        Objective(kind="throughput_x_utilization", max_throughput_loss=0.2),
    ],
)
@pytest.mark.parametrize("state", [600.0, 900.0, 1700.0])
def test_the_optimum_of_a_small_problem(toys, objective: Objective, state: float) -> None:
    """All configurations are known in the end, so the best one is the best of all."""
    problem = toys.mini(state={("actor", "training"): state}, objective=objective)
    everything = [evaluation for _, evaluation in toys.everything(problem) if evaluation.feasible]
    fastest = max(evaluation.tokens_per_s for evaluation in everything)
    result = run(problem, evaluations=10_000)
    assert result.stopped == "finished"
    assert result.evaluation.feasible
    assert objective.value(result.evaluation, fastest) == max(objective.value(e, fastest) for e in everything)


def test_the_optimum_without_knowing_everything(toys) -> None:
    """Half as many evaluations as there are configurations, any of eight seeds."""
    problem = toys.mini()
    everything = list(toys.everything(problem))
    best = max(e.tokens_per_s for _, e in everything if e.feasible)
    for seed in range(8):
        result = run(problem, evaluations=len(everything) // 2, seed=seed)
        assert result.evaluations <= len(everything) // 2
        assert result.evaluation.tokens_per_s == best


def test_the_result_is_what_its_solution_evaluates_to(toys) -> None:
    problem = toys.ppo()
    result = run(problem, evaluations=300)
    structure = problem.structures[result.best.structure]
    assert structure.evaluator.evaluate(result.best.choice) == result.evaluation
    assert result.evaluation.feasible
    values = [point.value for point in result.improvements]
    assert values == sorted(values)


def test_better_than_the_baselines(toys) -> None:
    problem = toys.ppo(taus=(1,), state={})
    structure = problem.structures[0]
    baselines = [structure.evaluator.evaluate(start(structure)) for start in (concurrent, colocated)]
    result = run(problem, evaluations=150)
    assert result.evaluation.tokens_per_s > max(baseline.tokens_per_s for baseline in baselines)


def test_nothing_feasible(toys) -> None:
    """The actor's state of 3200 bytes fits 4 GPUs of 900 only without generation's transients, which are there."""
    problem = toys.mini(state={("actor", "training"): 3200.0})
    everything = list(toys.everything(problem))
    result = run(problem, evaluations=10_000)
    if any(evaluation.feasible for _, evaluation in everything):
        pytest.fail("the problem has a feasible configuration")
    assert (result.best, result.evaluation, result.stopped) == (None, None, "finished")
    nearest = problem.structures[result.nearest.structure].evaluator.evaluate(result.nearest.choice)
    assert nearest.peak_ratio == min(evaluation.peak_ratio for _, evaluation in everything)


def test_the_hard_memory_rule_finds_feasible_plans_too(toys) -> None:
    problem = toys.mini(state={("actor", "training"): 1700.0})
    best = max(e.tokens_per_s for _, e in toys.everything(problem) if e.feasible)
    result = run(problem, evaluations=10_000, soft_memory_penalty=False)
    assert result.evaluation.tokens_per_s == best


# Reproducible


def test_a_seed_and_an_evaluation_budget_give_one_result(toys, monkeypatch) -> None:
    """Also when the clock runs differently, and on problems built anew."""
    first = run(toys.ppo(), evaluations=250, seed=7)
    ticks = iter(range(10**9))
    monkeypatch.setattr("rpeg_plugin_annealing.ledger.time.monotonic", lambda: next(ticks) * 0.37)
    second = run(toys.ppo(), evaluations=250, seed=7)
    assert (first.best, first.evaluations, curve(first)) == (second.best, second.evaluations, curve(second))


def test_seeds_differ(toys) -> None:
    assert len({tuple(curve(run(toys.ppo(), evaluations=200, seed=seed))) for seed in range(4)}) > 1


@pytest.mark.parametrize(
    "switch",
    [
        {"microbatch_tuning": False},
        {"pair_moves": False},
        {"warm_restarts": False},
        {"critical_path_selection": False},
        {"polish": False},
        {"soft_memory_penalty": False},
        {"cooling": "geometric", "cooling_factor": 1e-3},
        {"split_starts": True},
    ],
)
def test_every_switch_changes_the_search(toys, switch) -> None:
    """Another sequence of evaluated configurations; what it does has a test of its own elsewhere."""

    def asked(**settings) -> list[tuple[int, ...]]:
        structure = toys.structure(toy_ppo(tau=1), machine=(1, 2, 2), prompts=32)
        real = structure.evaluator
        evaluator = toys.fake(structure, real.evaluate)
        evaluator.critical_seconds = real.critical_seconds
        options = {"stagnation": 2, "temperature_initial": 0.001, "split_starts": False, **settings}
        run(toys.problem(structure), evaluations=200, **options)
        return evaluator.asked

    assert asked() == asked()
    assert asked(**switch) != asked()


# Polish


def test_polish_ends_in_a_coordinate_optimum(toys) -> None:
    """With enough budget no single operator can be improved; the annealing alone, cut short, could be."""
    problem = toys.ppo(taus=(1,))
    structure = problem.structures[0]

    def improvable(result) -> bool:
        choice = result.best.choice
        return any(
            e.feasible and e.tokens_per_s > result.evaluation.tokens_per_s
            for operator, candidates in enumerate(structure.candidates)
            for c in range(len(candidates))
            for e in [structure.evaluator.evaluate((*choice[:operator], c, *choice[operator + 1 :]))]
        )

    polished = run(problem, evaluations=300, polish_share=0.9)
    assert not improvable(polished)
    seeds = range(5)
    assert any(improvable(run(problem, evaluations=30, polish=False, seed=seed)) for seed in seeds)


def test_polish_reaches_memory(toys) -> None:
    """Only one configuration is feasible, the descent over the penalty finds it from two operators away."""
    structure = toys.structure(toy_ppo(), machine=(1, 2, 2), state={})
    target = (3, 5, 0, 2, 7, 1)

    def answer(choice):
        away = sum(a != b for a, b in zip(choice, target, strict=True))
        return toys.evaluation(10.0, peak_ratio=1.0 + 0.01 * away)

    toys.fake(structure, answer)
    result = run(toys.problem(structure), evaluations=400, polish_share=0.9)
    assert result.best.choice == target


# Budgets


@pytest.mark.parametrize("evaluations", [1, 2, 3, 10, 25, 41, 60, 77])
def test_evaluations_are_never_exceeded(toys, evaluations: int) -> None:
    problem = toys.ppo()
    evaluators = [toys.fake(s, s.evaluator.evaluate) for s in problem.structures]
    result = run(problem, evaluations=evaluations)
    assert result.evaluations == sum(len(evaluator.asked) for evaluator in evaluators) <= evaluations
    assert result.evaluations >= evaluations - 1
    assert result.best is not None


@pytest.mark.parametrize("evaluations", range(40, 80, 3))
def test_every_small_budget_ends(toys, evaluations: int) -> None:
    """Also when the polish leaves less than one evaluation's share of it, on a problem of 392 configurations."""
    assert run(toys.mini(), evaluations=evaluations).evaluations <= evaluations


def test_no_configuration_is_evaluated_twice(toys) -> None:
    problem = toys.ppo()
    evaluators = [toys.fake(s, s.evaluator.evaluate) for s in problem.structures]
    run(problem, evaluations=400)
    for evaluator in evaluators:
        assert len(evaluator.asked) == len(set(evaluator.asked)) > 0


def test_structures_get_the_same_evaluations(toys) -> None:
    problem = toys.ppo(taus=(0, 1, 2, 3))
    evaluators = [toys.fake(s, s.evaluator.evaluate) for s in problem.structures]
    run(problem, evaluations=400, polish=False)
    assert [len(evaluator.asked) for evaluator in evaluators] == [100] * 4


def test_structures_get_the_same_time(toys) -> None:
    problem = toys.ppo(taus=(0, 1, 2, 3))
    evaluators = [toys.fake(s, lambda choice: time.sleep(0.002) or toys.evaluation(1.0)) for s in problem.structures]
    run(problem, seconds=0.8, polish=False)
    counts = [len(evaluator.asked) for evaluator in evaluators]
    assert min(counts) > 0.5 * max(counts)


@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_seconds_are_kept(toys, seconds: float) -> None:
    problem = toys.ppo()
    for structure in problem.structures:  # compiling is not the search's time
        structure.evaluator.evaluate((0,) * 6)
    began = time.monotonic()
    result = run(problem, seconds=seconds)
    took = time.monotonic() - began
    assert took <= 1.05 * seconds + 0.1
    assert took >= 0.9 * seconds
    assert (result.stopped, result.best is not None) == ("budget", True)


def test_a_small_problem_ends_early(toys) -> None:
    began = time.monotonic()
    assert run(toys.mini(), seconds=30.0).stopped == "finished"
    assert time.monotonic() - began < 5.0


def test_a_pinned_problem_ends_early(toys) -> None:
    pins = {
        name: Pin(data=2, pipeline=1, tensor=1, microbatches=1) for name in ("actor_generation", "actor_training")
    }
    problem = toys.mini(pins=pins, state={})
    result = run(problem, seconds=30.0)
    assert result.stopped == "finished"
    assert result.evaluations == 8  # two starts each, two structures


def test_without_a_budget(toys) -> None:
    with pytest.raises(UsageError, match="annealing has no budget"):
        run(toys.mini())


# Cancelling and progress


def test_cancelling_returns_the_best_so_far(toys) -> None:
    problem = toys.ppo()
    progress = Progress()
    real = [structure.evaluator.evaluate for structure in problem.structures]
    seen = []

    def cancelling(choice):
        evaluation = real[0](choice)
        seen.append(evaluation)
        if len(seen) == 40:
            progress.cancel()
        return evaluation

    toys.fake(problem.structures[0], cancelling)
    began = time.monotonic()
    result = run(problem, seconds=60.0, progress=progress)
    assert time.monotonic() - began < 5.0
    assert (result.stopped, result.evaluations) == ("cancelled", 40)
    assert result.evaluation.tokens_per_s == max(e.tokens_per_s for e in seen if e.feasible)


def test_progress_is_reported_at_most_ten_times_a_second(toys) -> None:
    seen = []
    progress = Progress(lambda spent, evaluations, incumbent: seen.append((spent, evaluations, incumbent.value)))
    result = run(toys.ppo(), seconds=1.0, progress=progress)
    assert 5 <= len(seen) <= 12
    assert all(a <= b for a, b in itertools.pairwise(seen))
    assert seen[-1][0] == pytest.approx(1.0, abs=0.05)
    assert seen[-1][1:] == (result.evaluations, result.evaluation.tokens_per_s)


# Structures


def test_a_structure_without_candidates_is_skipped(toys) -> None:
    fits, too_large = toys.mini(taus=(0,)), toys.mini(taus=(1,), state={("actor", "training"): 8000.0})
    assert too_large.structures[0].empty_operator == "actor_training"
    result = run(toys.problem(*too_large.structures, *fits.structures), evaluations=10_000)
    assert result.best.structure == 1
    nothing = run(too_large, evaluations=10)
    assert (nothing.best, nothing.nearest, nothing.evaluations, nothing.stopped) == (None, None, 0, "finished")


def elites_among(structure, asked) -> tuple[tuple[int, ...], ...]:
    best = Elites(3, lambda evaluation: evaluation.tokens_per_s)
    for choice in list(asked):
        best.offer(choice, structure.evaluator.evaluate(choice))
    return best.choices


def test_elites_are_passed_on_to_other_staleness(toys) -> None:
    """The second structure is asked about the best plans of the first before it starts its chains."""
    problem = toys.ppo(taus=(0, 1))
    first, second = (toys.fake(s, s.evaluator.evaluate) for s in problem.structures)
    run(problem, evaluations=200, polish=False)
    assert set(elites_among(problem.structures[0], first.asked)) <= set(second.asked[:5])


def test_elites_are_found_by_what_they_are(toys) -> None:
    """The second structure has its candidates in another order."""
    first = toys.ppo(taus=(0,), state={}).structures[0]
    other = toys.ppo(taus=(1,), state={}).structures[0]
    turned = attrs.evolve(
        other, candidates=tuple(c.take(range(len(c) - 1, -1, -1)) for c in other.candidates)
    )
    problem = toys.problem(first, turned)
    asked = toys.fake(first, first.evaluator.evaluate).asked
    later = toys.fake(turned, turned.evaluator.evaluate).asked
    run(problem, evaluations=60, polish=False)
    plans = [turned.plan(choice) for choice in later[:5]]
    assert all(first.plan(choice) in plans for choice in elites_among(first, asked))


# The record


@parametrize_checks(rpeg_search_strategies())
def test_conforms(check) -> None:
    check()


def test_the_record() -> None:
    assert rpeg_search_strategies() == (ANNEALING,)
    assert (ANNEALING.name, ANNEALING.guarantee, ANNEALING.settings) == ("annealing", "heuristic", Settings)
    assert check_settings_class(Settings) == ()
    assert Settings().temperature_warm > Settings().temperature_initial
