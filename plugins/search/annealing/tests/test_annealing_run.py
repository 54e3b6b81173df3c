"""Whole runs: optimum, reproducibility, budgets, cancelling, structures."""

from __future__ import annotations

import contextlib
import itertools
import threading
import time

import attrs
import numpy as np
import pytest
from rpeg_plugin_annealing import ANNEALING, Settings, account, rpeg_search_strategies, strategy
from rpeg_plugin_annealing.account import Account
from rpeg_plugin_annealing.directory import build_directories
from rpeg_plugin_annealing.islands import Islands, policy_of
from rpeg_plugin_annealing.polish import few_candidates
from rpeg_plugin_annealing.structure_search import StructureSearch

from rpeg_core.errors import UsageError
from rpeg_core.passes.score import Objective
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.search import Progress, SearchBudget
from rpeg_core.planning.starts import colocated, concurrent
from rpeg_core.settings import check_settings_class
from rpeg_core.testing.conformance import parametrize_checks
from rpeg_core.testing.toys import toy_ppo


def run(problem, *, seconds=None, evaluations=None, progress=None, proof_share=0.0, **settings):
    """A search with chains only, unless branch and bound has a share."""
    settings["proof_share"] = proof_share
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
    """A third as many evaluations as there are configurations, so that chains search; any of eight seeds."""
    problem = toys.mini(taus=(1,))
    everything = list(toys.everything(problem))
    best = max(e.tokens_per_s for _, e in everything if e.feasible)
    for seed in range(8):
        result = run(problem, evaluations=len(everything) // 3, seed=seed)
        assert result.evaluations <= len(everything) // 3
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
    first = run(toys.ppo(), evaluations=3000, seed=7)
    ticks = itertools.count()
    monkeypatch.setattr(account.time, "monotonic", lambda: next(ticks) * 0.37)
    second = run(toys.ppo(), evaluations=3000, seed=7)
    assert (first.best, first.evaluations, curve(first)) == (second.best, second.evaluations, curve(second))


def test_the_plan_does_not_depend_on_the_threads(toys) -> None:
    """Several rounds of islands, batches on several threads, polish and what comes after it."""
    found = []
    for threads in (1, 2, 3, 4):
        problem = toys.problem(*(toys.structure(toy_ppo(tau=tau), machine=(1, 4, 2)) for tau in (0, 1)))
        budget = SearchBudget(evaluations=60_000)
        result = strategy.run(problem, budget, Settings(seed=3, proof_share=0.1), Progress(), threads=threads)
        found.append((result.best, result.evaluations, result.nearest, curve(result)))
    assert found == found[:1] * 4
    assert found[0][1] == 60_000


def test_islands_differ(toys, watch) -> None:
    """Every island goes its own way, and how many there are changes the search."""
    problem = toys.ppo(taus=(1,))
    run(problem, evaluations=2000, polish=False, split_starts=False)
    known = watch.cached(problem.structures[0])
    assert len(known) == 4
    assert all(len(a & b) < 0.5 * len(a) for a, b in itertools.combinations(known, 2))


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
        {"local_move_probability": 0.0},
        {"islands": 3},
    ],
)
def test_every_switch_changes_the_search(toys, watch, switch) -> None:
    """Another sequence of evaluated configurations; what it does has a test of its own elsewhere."""

    def asked(**settings) -> tuple[list, list]:
        structure = toys.structure(toy_ppo(tau=1), machine=(1, 2, 2), prompts=32)
        options = {"stagnation": 2, "temperature_initial": 0.001, "split_starts": False, **settings}
        run(toys.problem(structure), evaluations=400, **options)
        return watch.rows(structure), watch.cached(structure)

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


def test_polish_reaches_memory(toys, fake_batches) -> None:
    """Only one configuration is feasible, the descent over the penalty finds it from six operators away."""
    structure = toys.structure(toy_ppo(), machine=(1, 2, 2), state={})
    target = (3, 5, 0, 2, 7, 1)

    def answer(choice):
        away = sum(a != b for a, b in zip(choice, target, strict=True))
        return toys.evaluation(10.0, peak_ratio=1.0 + 0.01 * away)

    fake_batches(answer)
    with polishing(toys, structure) as (search, of_run):
        assert search.polish((0,) * 6)
        assert of_run.incumbent.best.choice == target


def test_polish_takes_the_first_of_equals(toys, fake_batches) -> None:
    structure = toys.structure(toy_ppo(), machine=(1, 2, 2), state={})
    fake_batches(lambda choice: toys.evaluation(2.0 if any(choice) else 1.0))
    with polishing(toys, structure) as (search, of_run):
        assert search.polish((0,) * 6)
        assert of_run.incumbent.best.choice == (1, 0, 0, 0, 0, 0)


def test_polish_exchanges_two_operators(toys, fake_batches) -> None:
    """From two operators in each other's place, where every change of only one of them is worse."""
    structure = toys.structure(toy_ppo(), machine=(1, 2, 2), state={})
    left, right = (
        [int(np.flatnonzero((c.start == start) & (c.stop == start + 2))[0]) for c in structure.candidates]
        for start in (0, 2)
    )
    begin = (left[0], left[1], right[2], right[3], left[4], right[5])
    target = (left[0], right[1], left[2], right[3], left[4], right[5])
    worth = {begin: 5.0, target: 6.0}
    fake_batches(lambda choice: toys.evaluation(worth.get(choice, 1.0)))
    with polishing(toys, structure) as (search, of_run):
        assert search.polish(begin)
        assert of_run.incumbent.best.choice == target


def test_pairs_also_try_the_degrees_of_the_same_model(toys) -> None:
    """Which need no redistribution, however slow they are."""
    structure = toys.structure(toy_ppo(), machine=(1, 2, 2), state={}, prompts=64)
    directories = build_directories(structure, microbatch_tuning=True)
    generation, training = structure.candidates[0], structure.candidates[4]
    assert (generation.operator, training.operator) == ("actor_generation", "actor_training")
    slowest = max(directories[0].on(0, 4))
    choice = (slowest, *(int(d.indices[0]) for d in directories[1:]))
    wanted = generation.assignment(slowest).layout
    few = [training.assignment(c) for c in few_candidates(structure, directories, choice, 4)]
    assert any(a.layout == wanted and a.allocation.size == 4 for a in few)
    assert len(few) <= 45


@contextlib.contextmanager
def polishing(toys, structure):
    """A search that has not begun, with an allowance, and its account."""
    problem = toys.problem(structure)
    budget, settings = SearchBudget(evaluations=10_000), Settings()
    with Account(problem, budget, Progress(), 2) as of_run:
        of_run.allow(budget)
        directories = build_directories(structure, microbatch_tuning=True)
        allowed = [directory.indices for directory in directories]
        islands = Islands(of_run, 0, structure, allowed, settings, policy_of(settings, problem.objective), 1024)
        yield StructureSearch(of_run, structure, directories, islands, settings), of_run


# Budgets


@pytest.mark.parametrize("evaluations", [1, 2, 3, 10, 77, 1500, 9001])
def test_evaluations_are_never_exceeded(toys, watch, evaluations: int) -> None:
    problem = toys.ppo()
    result = run(problem, evaluations=evaluations)
    assert result.evaluations == sum(map(watch.count, problem.structures)) <= evaluations
    assert result.evaluations >= evaluations - 1
    assert result.best is not None


def test_structures_get_the_same_evaluations(toys, watch) -> None:
    problem = toys.ppo(taus=(0, 1, 2, 3))
    run(problem, evaluations=4000, polish=False, allocation="even")
    assert [watch.count(structure) for structure in problem.structures] == [1000] * 4


def test_promising_structures_get_more(toys, watch) -> None:
    """A first pass gives 300 to each, then the ranks get 4/7, 2/7 and 1/7 of the rest."""
    problem = toys.ppo(taus=(0, 1, 2))
    run(problem, evaluations=3000, polish=False)
    counts = sorted(watch.count(structure) for structure in problem.structures)
    assert counts == [pytest.approx(300 + 2100 * share, abs=2) for share in (1 / 7, 2 / 7, 4 / 7)]
    assert sum(counts) == 3000


def test_structures_get_the_same_time(toys, watch) -> None:
    problem = toys.ppo(taus=(0, 1, 2, 3))
    run(problem, seconds=1.2, polish=False, allocation="even")
    counts = [watch.count(structure) for structure in problem.structures]
    assert min(counts) > 0.3 * max(counts)


@pytest.mark.parametrize("seconds", [0.2, 1.0])
def test_seconds_are_kept(toys, seconds: float) -> None:
    problem = toys.ppo()
    for structure in problem.structures:  # compiling is not the search's time
        structure.evaluator.evaluate((0,) * 6)
    run(problem, evaluations=1500)
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
    pins = {name: Pin(data=2, pipeline=1, tensor=1, microbatches=1) for name in ("actor_generation", "actor_training")}
    problem = toys.mini(pins=pins, state={})
    result = run(problem, seconds=30.0)
    assert result.stopped == "finished"
    assert result.evaluations == sum(len(list(toys.everything(toys.problem(s)))) for s in problem.structures)


def test_without_a_budget(toys) -> None:
    with pytest.raises(UsageError, match="annealing has no budget"):
        run(toys.mini())


def test_prepare_calls_every_kernel(toys, watch) -> None:
    """So that neither compiling nor loading them is part of a timed search."""
    empty = toys.mini(state={("actor", "training"): 8000.0}).structures[0]
    structure = toys.structure(toy_ppo(), machine=(1, 2, 4), state={})
    ANNEALING.prepare(toys.problem(empty, structure))
    assert len(watch.rows(structure)) == 1
    assert watch.count(structure) == 2
    ANNEALING.prepare(toys.problem(empty))


# Cancelling and progress


def test_cancelling_returns_the_best_so_far(toys, watch) -> None:
    problem = toys.ppo()
    progress = Progress()
    threading.Timer(0.4, progress.cancel).start()
    began = time.monotonic()
    result = run(problem, seconds=60.0, progress=progress)
    assert 0.4 <= time.monotonic() - began < 5.0
    assert result.stopped == "cancelled"
    assert result.evaluations == sum(map(watch.count, problem.structures))
    assert result.evaluation.feasible


def test_cancelled_before_it_begins(toys) -> None:
    progress = Progress()
    progress.cancel()
    result = run(toys.ppo(), seconds=60.0, progress=progress)
    assert (result.best, result.evaluations, result.stopped) == (None, 0, "cancelled")


def test_an_error_in_a_report_ends_the_search(toys) -> None:
    """It passes through, and no thread is left behind."""

    def report(spent, evaluations, incumbent):
        raise KeyboardInterrupt

    before = threading.active_count()
    with pytest.raises(KeyboardInterrupt):
        run(toys.ppo(), seconds=60.0, progress=Progress(report))
    assert threading.active_count() == before


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


def test_elites_are_passed_on_to_other_staleness(toys, watch) -> None:
    """The second structure is asked first about the best plans of the first; its candidates are in another order."""
    first = toys.ppo(taus=(0,), state={}).structures[0]
    other = toys.ppo(taus=(1,), state={}).structures[0]
    turned = attrs.evolve(other, candidates=tuple(c.take(np.arange(len(c) - 1, -1, -1)) for c in other.candidates))
    problem = toys.problem(first, turned)
    run(problem, evaluations=4000, polish=False, allocation="even")
    known = {*watch.rows(first), *itertools.chain(*watch.cached(first))}
    scores = sorted({first.evaluator.evaluate(choice).tokens_per_s for choice in known}, reverse=True)
    inherited = [turned.plan(choice) for choice in watch.rows(turned)[:3]]
    found = [first.predict(plan).evaluation.tokens_per_s for plan in inherited]
    assert found == scores[:3]


def test_cold_restarts_inherit_nothing(toys, watch) -> None:
    problem = toys.ppo(state={})
    run(problem, evaluations=4000, polish=False, warm_restarts=False)
    second = problem.structures[1]
    assert watch.rows(second)[:2] == [concurrent(second), colocated(second)]


# The record


@parametrize_checks(rpeg_search_strategies())
def test_conforms(check) -> None:
    check()


def test_the_record() -> None:
    assert rpeg_search_strategies() == (ANNEALING,)
    assert (ANNEALING.name, ANNEALING.guarantee, ANNEALING.settings) == ("annealing", "heuristic", Settings)
    assert check_settings_class(Settings) == ()
    assert Settings().temperature_warm > Settings().temperature_initial
