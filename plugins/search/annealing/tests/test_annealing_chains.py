"""The compiled chains against a readable version of the same policy with the same random numbers."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest
from rpeg_plugin_annealing import Settings
from rpeg_plugin_annealing import chain_kernel as kernel
from rpeg_plugin_annealing.islands import new_island, policy_of
from rpeg_plugin_annealing.moves_kernel import draw, draw_lean, fraction, propose
from rpeg_plugin_annealing.neighbourhood import build_neighbourhood

from rpeg_core.passes.score import Evaluation, Objective
from rpeg_core.planning.starts import colocated, concurrent
from rpeg_core.testing.toys import toy_ppo

STATE = {("actor", "training"): 1300.0, ("critic", "training"): 700.0}  # about a third of the plans do not fit


@pytest.fixture(scope="module")
def ppo(toys):
    return toys.structure(toy_ppo(), machine=(1, 2, 4), state=STATE)


class Readable:
    """One island as the README describes it."""

    def __init__(self, structure, hood, settings, objective, seed, starts) -> None:
        self.structure, self.hood, self.settings, self.objective = structure, hood, settings, objective
        self.policy = policy_of(settings, objective)
        self.random = np.array([seed], np.uint64)
        self.starts = list(starts)
        self.known: dict[tuple[int, ...], Evaluation] = {}
        self.best_tokens_per_s = 0.0
        self.elites: list[tuple[tuple[int, ...], Evaluation]] = []

    def score(self, evaluation: Evaluation) -> float:
        return self.objective.penalized(evaluation, self.best_tokens_per_s)

    def run(self, evaluations: int) -> None:
        self.limit = evaluations
        try:
            while True:
                self.chain()
        except StopIteration:
            return

    def evaluate(self, choice: tuple[int, ...]) -> Evaluation:
        if choice not in self.known:
            if len(self.known) == self.limit:
                raise StopIteration
            evaluation = self.known[choice] = self.structure.evaluator.evaluate(choice)
            if evaluation.feasible:
                self.best_tokens_per_s = max(self.best_tokens_per_s, evaluation.tokens_per_s)
                self.offer(choice, evaluation)
        return self.known[choice]

    def offer(self, choice: tuple[int, ...], evaluation: Evaluation) -> None:
        """Up to K_elite in the order of arrival; a new one takes the place of the worst."""
        scores = [self.score(known) for _, known in self.elites]
        if self.score(evaluation) in scores:
            return
        if len(scores) < self.settings.elites:
            self.elites.append((choice, evaluation))
        elif self.score(evaluation) > min(scores):
            self.elites[scores.index(min(scores))] = choice, evaluation

    def start(self) -> tuple[tuple[int, ...], float]:
        settings, operators = self.settings, range(len(self.structure.candidates))
        if self.starts:
            return self.starts.pop(0), settings.temperature_initial
        if not settings.warm_restarts:
            return tuple(draw(self.hood, v, self.random) for v in operators), settings.temperature_initial
        if not self.elites:
            return tuple(draw_lean(self.hood, v, self.random) for v in operators), settings.temperature_initial
        return self.elites[int(fraction(self.random) * len(self.elites))][0], settings.temperature_warm

    def chain(self) -> None:
        settings = self.settings
        choice, temperature = self.start()
        current = self.evaluate(choice)
        rejected = 0
        while rejected < settings.stagnation:
            if len(self.known) == self.limit:
                raise StopIteration
            proposals = np.zeros((settings.proposals, len(choice)), np.int64)
            critical = self.structure.evaluator.critical_seconds(choice)
            count = propose(self.hood, self.policy, np.array(choice), critical, proposals, self.random)
            evaluated = [(tuple(row), self.evaluate(tuple(row))) for row in proposals[:count].tolist()]
            if not settings.soft_memory_penalty:
                evaluated = [item for item in evaluated if item[1].feasible]
            rejected += 1
            if evaluated:
                best = max(evaluated, key=lambda item: self.score(item[1]))
                before, after = self.score(current), self.score(best[1])
                if after >= before or fraction(self.random) < math.exp((after - before) / (before * temperature)):
                    rejected = rejected if after == before else 0
                    choice, current = best
            if settings.cooling == "geometric":
                temperature = max(settings.temperature_min, temperature * settings.cooling_factor)


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"pair_moves": False},
        {"warm_restarts": False},
        {"critical_path_selection": False},
        {"soft_memory_penalty": False},
        {"cooling": "geometric", "cooling_factor": 0.5, "temperature_min": 1e-3},
        {"local_move_probability": 0.0},
        {"proposals": 1, "stagnation": 3, "elites": 1},
        {"temperature_initial": 0.5, "temperature_warm": 2.0},
    ],
    ids=lambda options: ", ".join(f"{name}={value}" for name, value in options.items()) or "defaults",
)
@pytest.mark.parametrize("kind", Objective.KINDS)
def test_the_compiled_chains_are_the_readable_ones(ppo, options, kind: str) -> None:
    """Called in pieces, as between rounds; the same choices are evaluated and the same elites found."""
    settings, objective = Settings(**options), Objective(kind=kind, max_throughput_loss=0.3)
    hood = build_neighbourhood(ppo, [np.arange(len(c)) for c in ppo.candidates])
    starts = [concurrent(ppo), colocated(ppo)]
    island = new_island(6, settings, np.uint64(5), 4096)
    island = island._replace(starts=np.array(starts))
    island.counts[kernel.STARTS] = len(starts)
    policy, stop = policy_of(settings, objective), np.zeros(1, np.int64)
    evaluator = ppo.evaluator
    assert kernel.run_island(evaluator.tables, evaluator.workspace, hood, policy, island, 700, stop) == kernel.SPENT
    readable = Readable(ppo, hood, settings, objective, 5, starts)
    readable.run(700)
    rows = island.keys[:, 0] > 0
    assert {tuple(row) for row in (island.keys[rows] - 1).tolist()} == set(readable.known)
    for key, row in zip((island.keys[rows] - 1).tolist(), island.values[rows].tolist(), strict=True):
        assert tuple(row) == attrs.astuple(readable.known[tuple(key)])
    count = island.counts[kernel.ELITES]
    assert [tuple(row) for row in island.elite_choices[:count].tolist()] == [choice for choice, _ in readable.elites]
    nearest = min(evaluation.peak_ratio for evaluation in readable.known.values())
    assert island.numbers[kernel.NEAREST] == nearest == readable.known[tuple(island.nearest.tolist())].peak_ratio


def test_a_chain_continues_where_it_ended(ppo) -> None:
    """In one go, and in pieces that end between rounds."""
    settings = Settings(proposals=1)
    hood = build_neighbourhood(ppo, [np.arange(len(c)) for c in ppo.candidates])
    evaluator, policy, stop = ppo.evaluator, policy_of(settings, Objective()), np.zeros(1, np.int64)

    def run(*limits: int) -> kernel.Island:
        island = new_island(6, settings, np.uint64(9), 4096)
        for limit in limits:
            kernel.run_island(evaluator.tables, evaluator.workspace, hood, policy, island, limit, stop)
        return island

    whole, pieces = run(500), run(1, 2, 3, 100, 500)
    assert np.array_equal(whole.keys, pieces.keys)
    assert np.array_equal(whole.choice, pieces.choice)


@pytest.mark.parametrize("kind", Objective.KINDS)
@pytest.mark.parametrize("loss", [0.0, 0.1, 0.5])
def test_scores_are_those_of_the_objective(kind: str, loss: float) -> None:
    random = np.random.default_rng(0)
    objective = Objective(kind=kind, max_throughput_loss=loss)
    rows = random.uniform(0.2, 1.0, (200, 5)) * [1.0, 1000.0, 1.5, 1.0, 64.0]
    rows[:, 4] = np.ceil(rows[:, 4])
    best = float(rows[:, 1].max()) * 0.9
    expected = [
        objective.penalized(Evaluation(**dict(zip(FIELDS, row[:4].tolist(), strict=True)), used_gpus=int(row[4])), best)
        for row in rows
    ]
    assert kernel.scores(objective, rows, best).tolist() == pytest.approx(expected, rel=1e-14)


FIELDS = ("makespan_s", "tokens_per_s", "peak_ratio", "utilization")


def test_a_full_cache_is_reported(ppo) -> None:
    settings = Settings()
    hood = build_neighbourhood(ppo, [np.arange(len(c)) for c in ppo.candidates])
    island = new_island(6, settings, np.uint64(1), 256)
    evaluator, stop = ppo.evaluator, np.zeros(1, np.int64)
    policy = policy_of(settings, Objective())
    assert kernel.run_island(evaluator.tables, evaluator.workspace, hood, policy, island, 10_000, stop) == kernel.FULL
    assert 128 - 7 <= island.counts[kernel.CACHED] <= 128


def test_an_island_stops_when_told(ppo) -> None:
    settings = Settings()
    hood = build_neighbourhood(ppo, [np.arange(len(c)) for c in ppo.candidates])
    island = new_island(6, settings, np.uint64(1), 256)
    evaluator, stop = ppo.evaluator, np.ones(1, np.int64)
    policy = policy_of(settings, Objective())
    status = kernel.run_island(evaluator.tables, evaluator.workspace, hood, policy, island, 10_000, stop)
    assert (status, island.counts[kernel.EVALUATIONS]) == (kernel.INTERRUPTED, 0)
