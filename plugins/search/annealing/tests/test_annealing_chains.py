"""Chains: acceptance, starts, restarts, hard memory, cooling."""

from __future__ import annotations

import itertools
import math
from random import Random

import attrs
import pytest
from rpeg_plugin_annealing import Settings
from rpeg_plugin_annealing.chains import StructureSearch, accepts
from rpeg_plugin_annealing.directory import build_directories
from rpeg_plugin_annealing.ledger import AllowanceSpentError, Ledger
from rpeg_plugin_annealing.seeds import baseline_starts

from rpeg_core.planning.search import Progress, SearchBudget
from rpeg_core.planning.starts import colocated, concurrent
from rpeg_core.testing.toys import toy_ppo


def search(toys, structure, settings, *, evaluations=300):
    """Search ``structure`` without splits until the evaluations are spent; returns the ledger."""
    settings = attrs.evolve(settings, split_starts=False)
    problem = toys.problem(structure)
    budget = SearchBudget(evaluations=evaluations)
    ledger = Ledger(problem, budget, Progress())
    ledger.allow(0, budget)
    directories = build_directories(structure, microbatch_tuning=settings.microbatch_tuning)
    with pytest.raises(AllowanceSpentError):
        StructureSearch(ledger, structure, directories, (), settings, Random(settings.seed)).run()
    return ledger


@pytest.fixture
def ppo(toys):
    return toys.structure(toy_ppo(), machine=(1, 2, 4), state={})


class Recorder(Random):
    """Counts draws."""

    drawn = 0

    def random(self) -> float:
        self.drawn += 1
        return super().random()


def test_improvements_are_always_accepted() -> None:
    random = Recorder(0)
    assert all(accepts(10.0, proposed, 1e-9, random) for proposed in (10.0, 10.1, 1e6))
    assert accepts(0.0, 0.0, 0.1, random)
    assert random.drawn == 0


@pytest.mark.parametrize(("current", "proposed"), [(100.0, 95.0), (1e-30, 0.95e-30)])
def test_worse_ones_are_accepted_by_relative_loss(current: float, proposed: float) -> None:
    """5 % worse at temperature 0.05: exp(-1), whatever the scale."""
    random = Random(0)
    share = sum(accepts(current, proposed, 0.05, random) for _ in range(20_000)) / 20_000
    assert share == pytest.approx(math.exp(-1), abs=0.01)


def test_the_first_chain_starts_from_the_concurrent_baseline(toys, ppo) -> None:
    """A score that only the baselines reach: the first round's proposals are neighbours of the concurrent one."""
    evaluator = toys.fake(ppo, lambda choice: toys.evaluation(1.0 / (1 + sum(choice))))
    search(toys, ppo, Settings(pair_moves=False), evaluations=8)
    start = concurrent(ppo)
    assert evaluator.asked[:2] == [start, colocated(ppo)]
    for asked in evaluator.asked[2:5]:
        assert sum(a != b for a, b in zip(asked, start, strict=True)) == 1


def test_starts_are_within_the_directories(toys) -> None:
    """With fixed microbatches the baselines are computed among the candidates that have them."""
    structure = toys.structure(toy_ppo(), machine=(1, 2, 4), prompts=64, state={})
    directories = build_directories(structure, microbatch_tuning=False)
    for start in baseline_starts(structure, directories):
        assert all(c in directory.indices for c, directory in zip(start, directories, strict=True))
    assert baseline_starts(structure, build_directories(structure, microbatch_tuning=True)) == (
        concurrent(structure),
        colocated(structure),
    )


def test_the_baselines_bound_the_result_from_below(toys, ppo) -> None:
    ledger = search(toys, ppo, Settings(), evaluations=2)
    best = max(ppo.evaluator.evaluate(start(ppo)).tokens_per_s for start in (concurrent, colocated))
    assert ledger.incumbent.value == best


def test_without_a_baseline_the_start_uses_little_memory(toys) -> None:
    """One GPU: the operators of a group cannot be disjoint; nothing is feasible in the fake."""
    structure = toys.structure(toy_ppo(), machine=(1, 1, 1), state={})
    assert concurrent(structure) is None
    evaluator = toys.fake(structure, lambda choice: toys.evaluation(1.0, peak_ratio=2.0))
    directories = build_directories(structure, microbatch_tuning=True)
    assert baseline_starts(structure, directories) == (colocated(structure),)
    problem = toys.problem(structure)
    ledger = Ledger(problem, SearchBudget(evaluations=50), Progress())
    ledger.allow(0, SearchBudget(evaluations=50))
    StructureSearch(ledger, structure, directories, (), Settings(), Random(0)).run()  # 1 configuration
    assert set(evaluator.asked) == {(0,) * 6}


@pytest.mark.parametrize("warm", [True, False])
def test_warm_restarts(toys, ppo, warm: bool) -> None:
    """One plan is by far the best: warm chains stay within one move of it, cold ones start anywhere."""
    best = concurrent(ppo)
    evaluator = toys.fake(ppo, lambda choice: toys.evaluation(100.0 if choice == best else 1.0))
    settings = Settings(
        warm_restarts=warm, pair_moves=False, elites=1, temperature_initial=1e-6, temperature_warm=1e-5
    )
    search(toys, ppo, settings, evaluations=120)
    distances = [
        sum(a != b for a, b in zip(choice, best, strict=True)) for choice in evaluator.asked[2:]
    ]
    assert (max(distances) <= 1) is warm


def test_restarts_are_warmer(toys, ppo, monkeypatch) -> None:
    """The first chain runs at t_init, the others at t_warm."""
    temperatures = []

    def never(current, proposed, temperature, random):
        temperatures.append(temperature)
        return False

    monkeypatch.setattr("rpeg_plugin_annealing.chains.accepts", never)
    search(toys, ppo, Settings(temperature_initial=0.125, temperature_warm=0.5, stagnation=4))
    lengths = [(t, len(list(group))) for t, group in itertools.groupby(temperatures)]
    assert lengths[0] == (0.125, 4)
    assert {t for t, _ in lengths[1:]} == {0.5}


@pytest.mark.parametrize(
    ("cooling", "expected"), [("constant", [0.4] * 5), ("geometric", [0.4, 0.2, 0.1, 0.06, 0.06])]
)
def test_cooling(toys, ppo, monkeypatch, cooling: str, expected: list[float]) -> None:
    temperatures = []

    def never(current, proposed, temperature, random):
        temperatures.append(temperature)
        return False

    monkeypatch.setattr("rpeg_plugin_annealing.chains.accepts", never)
    settings = Settings(
        temperature_initial=0.4, cooling=cooling, cooling_factor=0.5, temperature_min=0.06, stagnation=5
    )
    search(toys, ppo, settings)
    assert temperatures[:5] == pytest.approx(expected)


@pytest.mark.parametrize("soft", [True, False])
def test_soft_memory_penalty(toys, ppo, soft: bool) -> None:
    """Infeasible plans are a little faster, and their penalty is small: the soft search walks into them."""
    feasible = concurrent(ppo)
    evaluator = toys.fake(
        ppo, lambda c: toys.evaluation(1.0) if c == feasible else toys.evaluation(3.0, peak_ratio=1.01)
    )
    search(toys, ppo, Settings(soft_memory_penalty=soft, pair_moves=False), evaluations=100)
    distances = [sum(a != b for a, b in zip(choice, feasible, strict=True)) for choice in evaluator.asked]
    assert (max(distances[2:]) > 1) is soft


def test_a_plateau_ends_a_chain(toys, ppo) -> None:
    """All plans score alike: a chain moves, but ends after ``stagnation`` rounds of up to K_x proposals."""
    evaluator = toys.fake(ppo, lambda choice: toys.evaluation(1.0))
    search(toys, ppo, Settings(stagnation=5, proposals=2, pair_moves=False), evaluations=400)
    start = concurrent(ppo)
    distances = [sum(a != b for a, b in zip(choice, start, strict=True)) for choice in evaluator.asked]
    assert 1 < max(distances) <= 5
    assert len(evaluator.asked) == 400


def test_critical_seconds_are_asked_once_per_state(toys, ppo) -> None:
    evaluator = toys.fake(ppo, lambda choice: toys.evaluation(1.0 if choice == concurrent(ppo) else 0.5))
    settings = Settings(critical_path_probability=1.0, pair_moves=False, temperature_initial=1e-6, stagnation=9999)
    search(toys, ppo, settings, evaluations=12)
    assert evaluator.critical_asked == 1
