"""Move kernels and what they choose from."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from rpeg_plugin_annealing import Settings
from rpeg_plugin_annealing.directory import build_directories
from rpeg_plugin_annealing.islands import policy_of
from rpeg_plugin_annealing.moves_kernel import draw, draw_lean, fraction, propose, weighted
from rpeg_plugin_annealing.neighbourhood import FIRST_ROW, POSITION, VARIANT, build_neighbourhood

from rpeg_core.ir import Role
from rpeg_core.passes.score import Objective
from rpeg_core.planning.pins import Pin
from rpeg_core.testing.toys import toy_ppo

NO_TIME = (0.0,) * 6


@pytest.fixture(scope="module")
def ppo(toys):
    """Six operators on 2 racks of 2 nodes of 2 GPUs."""
    return toys.structure(toy_ppo(), machine=(2, 2, 2))


def changed(before, after) -> set[int]:
    return {operator for operator, (a, b) in enumerate(zip(before, after, strict=True)) if a != b}


def seeded(seed: int = 0) -> np.ndarray:
    return np.array([seed], np.uint64)


def everything(structure):
    return build_neighbourhood(structure, [np.arange(len(c)) for c in structure.candidates])


def proposals(structure, settings, choice, *, rounds=200, critical=NO_TIME, hood=None):
    hood, policy, random = hood or everything(structure), policy_of(settings, Objective()), seeded()
    rows = np.zeros((settings.proposals, len(choice)), np.int64)
    found = []
    for _ in range(rounds):
        count = propose(hood, policy, np.array(choice), np.array(critical), rows, random)
        found.append([tuple(row) for row in rows[:count].tolist()])
    return found


# Sampling


def test_random_numbers_are_splitmix64() -> None:
    """The first outputs for seed 1234567 that its authors' C code prints, their upper 53 bits."""
    random = seeded(1234567)
    for output in (6457827717110365317, 3203168211198807973, 9817491932198370423):
        assert fraction(random) == (output >> 11) * 2.0**-53


def test_weighted_is_proportional() -> None:
    random = seeded()
    counts = Counter(weighted(np.array([1.0, 0.0, 3.0]), random) for _ in range(8000))
    assert counts[1] == 0
    assert counts[2] / counts[0] == pytest.approx(3.0, rel=0.1)


def test_weighted_without_weights_is_uniform() -> None:
    random = seeded()
    counts = Counter(weighted(np.array([0.0, 0.0]), random) for _ in range(4000))
    assert counts[0] == pytest.approx(2000, rel=0.1)


def test_layouts_are_drawn_alike_then_origins(ppo) -> None:
    """A layout of one GPU has 8 origins, one of 8 GPUs a single one; both come up equally often."""
    candidates, random, hood = ppo.candidates[2], seeded(), everything(ppo)
    drawn = Counter(draw(hood, 2, random) for _ in range(40_000))
    assert set(drawn) == set(range(len(candidates)))
    by_layout: Counter[int] = Counter()
    for candidate, count in drawn.items():
        by_layout[int(candidates.layout[candidate])] += count
    expected = 40_000 / len(set(candidates.layout.tolist()))
    assert all(count == pytest.approx(expected, rel=0.15) for count in by_layout.values())
    origins = [count for c, count in drawn.items() if candidates.layout[c] == candidates.layout[0]]
    assert max(origins) / min(origins) < 1.5


def test_lean_candidates_are_the_tenth_with_the_least_memory(ppo) -> None:
    hood, random = everything(ppo), seeded()
    for v, candidates in enumerate(ppo.candidates):
        memory = ppo.book.operators[candidates.operator].isolated[candidates.layout]
        drawn = {draw_lean(hood, v, random) for _ in range(400)}
        assert len(drawn) == max(1, len(candidates) // 10)
        assert max(memory[list(drawn)]) <= np.sort(memory)[len(drawn) - 1]


def test_only_allowed_candidates_are_drawn(ppo) -> None:
    allowed = [np.arange(len(c))[::3] for c in ppo.candidates]
    hood = build_neighbourhood(ppo, allowed)
    choice = tuple(int(a[0]) for a in allowed)
    for critical in (False, True):
        for round_ in proposals(ppo, Settings(local_move_probability=0.5 * critical), choice, hood=hood):
            assert all(c in a for proposal in round_ for c, a in zip(proposal, allowed, strict=True))


# A3


def test_fixed_microbatches(toys) -> None:
    """64 prompts: pipelines of 2 and 4 stages can have 2, 4, 8 ... microbatches; one count is left of them."""
    structure = toys.structure(prompts=64, state={})
    for operator, directory in zip(
        structure.rpeg.operators, build_directories(structure, microbatch_tuning=False), strict=True
    ):
        factor = 2 if operator.role is Role.TRAINING else 1
        candidates = structure.candidates[structure.rpeg.index(operator.name)]
        kept = [candidates.assignment(i) for i in directory.indices.tolist()]
        assert {a.layout.pipeline for a in kept} == {1, 2, 4}
        for assignment in kept:
            stages = assignment.layout.pipeline
            assert assignment.microbatches == (1 if stages == 1 else factor * stages)
        everything = [candidates.assignment(i) for i in range(len(candidates))]
        assert {a for a in everything if a.layout.pipeline == 1} == {a for a in kept if a.layout.pipeline == 1}
        assert len(kept) < len(everything)


def test_pinned_microbatches_are_not_fixed_again(toys) -> None:
    structure = toys.structure(prompts=64, state={}, pins={"actor_training": Pin(pipeline=2, microbatches=8)})
    directory = build_directories(structure, microbatch_tuning=False)[1]
    assert directory.indices.tolist() == list(range(len(structure.candidates[1])))


# Kernels


def test_single_moves_change_one_operator(ppo) -> None:
    choice = (0,) * 6
    rounds = proposals(ppo, Settings(pair_moves=False, proposals=6, local_move_probability=0.0), choice)
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
        int(np.flatnonzero((c.start == index) & (c.stop == index + 1))[0]) for index, c in enumerate(ppo.candidates)
    )
    for round_ in proposals(ppo, Settings(pair_move_probability=1.0), choice):
        assert all(len(changed(choice, proposal)) == 1 for proposal in round_)


def test_pair_moves_off(ppo) -> None:
    settings = Settings(pair_move_probability=1.0, pair_moves=False)
    assert all(len(changed((0,) * 6, p)) == 1 for round_ in proposals(ppo, settings, (0,) * 6) for p in round_)


@pytest.mark.parametrize(("on", "expected"), [(True, 0.6 + 0.4 / 6), (False, 1 / 6)])
def test_critical_path_selection(ppo, on: bool, expected: float) -> None:
    """All critical time is operator 3's: it is drawn with probability 0.6, and else like the others."""
    settings = Settings(pair_moves=False, critical_path_selection=on, local_move_probability=0.0)
    rounds = proposals(ppo, settings, (0,) * 6, rounds=4000, critical=(0.0, 0.0, 0.0, 5.0, 0.0, 0.0))
    share = sum(3 in changed((0,) * 6, round_[0]) for round_ in rounds) / len(rounds)
    assert share == pytest.approx(expected, abs=0.03)


def test_one_candidate_each_proposes_nothing(toys) -> None:
    structure = toys.structure()
    hood = build_neighbourhood(structure, [np.array([0])] * 2)
    assert all(r == [] for r in proposals(structure, Settings(), (0, 0), rounds=50, critical=(1.0, 1.0), hood=hood))


def test_shrunk_donors_are_all_smaller_candidates_inside(ppo) -> None:
    """For a donor that every operator overlaps; layouts are drawn alike."""
    donor = ppo.candidates[0]
    whole = [int(np.flatnonzero((c.start == 0) & (c.stop == 1))[0]) for c in ppo.candidates]
    for stop in (2, 4, 8):
        start = int(np.flatnonzero((donor.start == 0) & (donor.stop == stop))[0])
        choice = (start, *whole[1:])
        settings = Settings(pair_move_probability=1.0, proposals=12)
        found = Counter(
            proposal[0]
            for round_ in proposals(ppo, settings, choice, rounds=2500)
            for proposal in round_
            if len(changed(choice, proposal)) == 2 and proposal[0] != start
        )
        smaller = {i for i in range(len(donor)) if donor.stop[i] <= stop and donor.stop[i] - donor.start[i] < stop}
        assert smaller <= set(found)


# Local moves


def test_local_moves_keep_something(ppo) -> None:
    """The layout, the interval, about the size and one end, or they move to another operator's interval."""
    candidates = ppo.candidates
    choice = tuple(
        int(np.flatnonzero((c.start == begin) & (c.stop == end))[-1])
        for c, (begin, end) in zip(candidates, ((0, 4), (4, 8), (2, 4), (0, 2), (0, 8), (0, 8)), strict=True)
    )
    intervals = {(int(c.start[i]), int(c.stop[i])) for c, i in zip(candidates, choice, strict=True)}
    kinds = Counter()
    for round_ in proposals(ppo, Settings(pair_moves=False, local_move_probability=1.0), choice, rounds=2000):
        for proposal in round_:
            [v] = changed(choice, proposal)
            c, old, new = candidates[v], choice[v], proposal[v]
            size, before = int(c.stop[new] - c.start[new]), int(c.stop[old] - c.start[old])
            kept = {
                "layout": c.layout[new] == c.layout[old],
                "place": (c.start[new], c.stop[new]) == (c.start[old], c.stop[old]),
                "size": before / 2 <= size <= before * 2,
                "joined": (int(c.start[new]), int(c.stop[new])) in intervals,
            }
            kinds.update(name for name, holds in kept.items() if holds)
            kinds["other"] += not any(kept.values())
    assert min(kinds[name] for name in ("layout", "place", "size", "joined")) > 500
    assert kinds["other"] < 0.05 * sum(kinds.values())  # where no size within a factor of 2 was drawn


def test_fast_variants_come_first(ppo) -> None:
    hood = everything(ppo)
    for v, candidates in enumerate(ppo.candidates):
        seconds = ppo.seconds(v)
        rows = hood.places[hood.operators[v, FIRST_ROW] :][: len(candidates)]
        for i in range(len(candidates)):
            for j in range(len(candidates)):
                same = (candidates.start[i], candidates.stop[i]) == (candidates.start[j], candidates.stop[j])
                if same and seconds[i] < seconds[j]:
                    assert rows[i, VARIANT] < rows[j, VARIANT]
                    assert rows[i, POSITION] == rows[j, POSITION]
