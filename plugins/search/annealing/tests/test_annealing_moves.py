"""Move kernels, the candidate directory and the elite set."""

from __future__ import annotations

from collections import Counter
from random import Random

import numpy as np
import pytest
from rpeg_plugin_annealing import Settings
from rpeg_plugin_annealing.directory import Directory, build_directories
from rpeg_plugin_annealing.elites import Elites
from rpeg_plugin_annealing.moves import Proposer, weighted

from rpeg_core.ir import Role
from rpeg_core.planning.pins import Pin
from rpeg_core.testing.toys import toy_ppo

NO_TIME = (0.0,) * 6


@pytest.fixture
def ppo(toys):
    """Six operators on 2 racks of 2 nodes of 2 GPUs."""
    return toys.structure(toy_ppo(), machine=(2, 2, 2))


def changed(before, after) -> set[int]:
    return {operator for operator, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}


def proposals(structure, settings, choice, *, rounds=200, critical=NO_TIME):
    proposer = Proposer(build_directories(structure, microbatch_tuning=True), settings, Random(0))
    return [proposer.propose(choice, lambda: critical) for _ in range(rounds)]


# Sampling


def test_weighted_is_proportional() -> None:
    random = Random(0)
    counts = Counter(weighted([1.0, 0.0, 3.0], random) for _ in range(8000))
    assert counts[1] == 0
    assert counts[2] / counts[0] == pytest.approx(3.0, rel=0.1)


def test_weighted_without_weights_is_uniform() -> None:
    random = Random(0)
    counts = Counter(weighted([0.0, 0.0], random) for _ in range(4000))
    assert counts[0] == pytest.approx(2000, rel=0.1)


def test_layouts_are_drawn_alike_then_origins(ppo) -> None:
    """A layout of one GPU has 8 origins, one of 8 GPUs a single one; both come up equally often."""
    candidates, random = ppo.candidates[0], Random(0)
    directory = build_directories(ppo, microbatch_tuning=True)[0]
    drawn = Counter(directory.sample(directory.everything, random) for _ in range(40_000))
    assert set(drawn) == set(range(len(candidates)))
    by_layout: Counter[int] = Counter()
    for candidate, count in drawn.items():
        by_layout[int(candidates.layout[candidate])] += count
    expected = 40_000 / len(set(candidates.layout.tolist()))
    assert all(count == pytest.approx(expected, rel=0.15) for count in by_layout.values())
    origins = [count for c, count in drawn.items() if candidates.layout[c] == candidates.layout[0]]
    assert max(origins) / min(origins) < 1.5


def test_shrinks_are_the_smaller_candidates_inside(ppo) -> None:
    candidates = ppo.candidates[0]
    directory = build_directories(ppo, microbatch_tuning=True)[0]
    for candidate in range(len(candidates)):
        start, stop = int(candidates.start[candidate]), int(candidates.stop[candidate])
        expected = {
            other
            for other in range(len(candidates))
            if start <= candidates.start[other]
            and candidates.stop[other] <= stop
            and candidates.stop[other] - candidates.start[other] < stop - start
        }
        region = directory.shrinks(candidate)
        if expected:
            random = Random(0)
            assert {directory.sample(region, random) for _ in range(100 * len(expected))} == expected
        else:
            assert len(region) == 0


# A3


def test_fixed_microbatches(toys) -> None:
    """64 prompts: pipelines of 2 and 4 stages can have 2, 4, 8 ... microbatches; one count is left of them."""
    structure = toys.structure(prompts=64, state={})
    for operator, directory in zip(
        structure.rpeg.operators, build_directories(structure, microbatch_tuning=False), strict=True
    ):
        factor = 2 if operator.role is Role.TRAINING else 1
        candidates = structure.candidates[structure.rpeg.index(operator.name)]
        kept = [candidates.assignment(i) for i in directory.indices]
        assert {a.layout.pipeline for a in kept} == {1, 2, 4}
        for assignment in kept:
            stages = assignment.layout.pipeline
            assert assignment.microbatches == (1 if stages == 1 else factor * stages)
        everything = [candidates.assignment(i) for i in range(len(candidates))]
        assert {a for a in everything if a.layout.pipeline == 1} == {a for a in kept if a.layout.pipeline == 1}
        assert len(kept) < len(everything)


def test_pinned_microbatches_are_not_fixed_again(toys) -> None:
    structure = toys.structure(
        prompts=64, state={}, pins={"actor_training": Pin(pipeline=2, microbatches=8)}
    )
    directory = build_directories(structure, microbatch_tuning=False)[1]
    assert directory.indices == tuple(range(len(structure.candidates[1])))


# Kernels


def test_single_moves_change_one_operator(ppo) -> None:
    choice = (0,) * 6
    rounds = proposals(ppo, Settings(pair_moves=False, proposals=6), choice)
    for round_ in rounds:
        assert 1 <= len(round_) <= 6
        assert choice not in round_
        assert len(set(round_)) == len(round_)
        assert len({operator for proposal in round_ for operator in changed(choice, proposal)}) == 1
    assert {min(changed(choice, round_[0])) for round_ in rounds} == set(range(6))


def test_pair_moves_shrink_a_donor_and_resample_a_receiver(ppo) -> None:
    candidates = ppo.candidates
    choice = tuple(
        int(np.flatnonzero((c.start == 0) & (c.stop == stop))[0])
        for c, stop in zip(candidates, (8, 4, 2, 2, 8, 8), strict=True)
    )
    rounds = proposals(ppo, Settings(pair_move_probability=1.0), choice)
    donors = Counter()
    for round_ in rounds:
        operators = {operator for proposal in round_ for operator in changed(choice, proposal)}
        assert len(operators) == 2
        shrunk = {
            operator
            for operator in operators
            if all(
                candidates[operator].start[p[operator]] >= candidates[operator].start[choice[operator]]
                and candidates[operator].stop[p[operator]] <= candidates[operator].stop[choice[operator]]
                and candidates[operator].stop[p[operator]] - candidates[operator].start[p[operator]]
                < candidates[operator].stop[choice[operator]] - candidates[operator].start[choice[operator]]
                for p in round_
            )
        }
        assert shrunk
        donors.update(shrunk)
    assert donors[0] + donors[4] + donors[5] > donors[1] + donors[2] + donors[3]


def test_disjoint_operators_make_no_pairs(ppo) -> None:
    """Each operator alone on its GPU or GPUs: no receiver, so the round is a single move."""
    choice = tuple(
        int(np.flatnonzero((c.start == index) & (c.stop == index + 1))[0])
        for index, c in enumerate(ppo.candidates)
    )
    for round_ in proposals(ppo, Settings(pair_move_probability=1.0), choice):
        assert all(len(changed(choice, proposal)) == 1 for proposal in round_)


def test_pair_moves_off(ppo) -> None:
    settings = Settings(pair_move_probability=1.0, pair_moves=False)
    assert all(len(changed((0,) * 6, p)) == 1 for round_ in proposals(ppo, settings, (0,) * 6) for p in round_)


@pytest.mark.parametrize(("on", "expected"), [(True, 0.6 + 0.4 / 6), (False, 1 / 6)])
def test_critical_path_selection(ppo, on: bool, expected: float) -> None:
    """All critical time is operator 3's: it is drawn with probability 0.6, and else like the others."""
    settings = Settings(pair_moves=False, critical_path_selection=on)
    rounds = proposals(ppo, settings, (0,) * 6, rounds=4000, critical=(0.0, 0.0, 0.0, 5.0, 0.0, 0.0))
    share = sum(3 in changed((0,) * 6, round_[0]) for round_ in rounds) / len(rounds)
    assert share == pytest.approx(expected, abs=0.03)


def test_one_candidate_each_proposes_nothing(toys) -> None:
    structure = toys.structure()
    only = [Directory(candidates, np.array([0])) for candidates in structure.candidates]
    proposer = Proposer(only, Settings(), Random(0))
    assert all(proposer.propose((0, 0), lambda: (1.0, 1.0)) == [] for _ in range(50))


# Elites


def test_elites_are_the_best_different_feasible_plans(toys) -> None:
    elites = Elites(3, lambda evaluation: evaluation.tokens_per_s)
    for number, tokens_per_s in enumerate((5.0, 9.0, 7.0, 6.0, 9.0)):  # the last mirrors number 1
        elites.offer((number,), toys.evaluation(tokens_per_s))
    elites.offer((8,), toys.evaluation(100.0, peak_ratio=1.01))
    assert elites.choices == ((1,), (2,), (3,))
    random = Random(0)
    assert {elites.draw(random) for _ in range(100)} == set(elites.choices)


def test_elites_rescore(toys) -> None:
    factor = [1.0]
    elites = Elites(2, lambda evaluation: evaluation.tokens_per_s * (factor[0] if evaluation.tokens_per_s > 8 else 1))
    elites.offer((0,), toys.evaluation(9.0))
    elites.offer((1,), toys.evaluation(5.0))
    factor[0] = 0.1
    elites.rescore()
    assert elites.choices == ((1,), (0,))
