"""Splits of the cluster against their definition, and what they are good for."""

from __future__ import annotations

import itertools

import pytest
from rpeg_plugin_annealing import ANNEALING, Settings
from rpeg_plugin_annealing.directory import build_directories
from rpeg_plugin_annealing.islands import Islands
from rpeg_plugin_annealing.seeds import MOST_SPLITS, Split, baseline_starts, splits, splits_of_parts

from rpeg_core.planning.search import Progress, SearchBudget
from rpeg_core.planning.starts import colocated, concurrent
from rpeg_core.spec.machine import Allocation
from rpeg_core.testing.toys import toy_ppo


@pytest.fixture
def ppo(toys):
    """Six operators on 4 nodes of 2 GPUs, nothing too large."""
    return toys.structure(toy_ppo(), machine=(1, 4, 2), state={})


def allocations(structure, choice) -> list[Allocation]:
    return [c.assignment(i).allocation for c, i in zip(structure.candidates, choice, strict=True)]


def fastest(structure, operator: int, start: int, stop: int) -> int | None:
    candidates = structure.candidates[operator]
    inside = [
        (float(structure.seconds(operator)[c]), c)
        for c in range(len(candidates))
        if start <= candidates.start[c] and candidates.stop[c] <= stop
    ]
    return min(inside)[1] if inside else None


def test_splits_are_all_distributions_over_two_parts(ppo) -> None:
    directories = build_directories(ppo, microbatch_tuning=True)
    found = splits(directories, 8)
    assert len(found) == len({split.choice for split in found})
    expected = set()
    for cut in (1, 2, 4, 6, 7):  # 1, 2, 4 GPUs on the one or the other side
        sides = [(fastest(ppo, op, 0, cut), fastest(ppo, op, cut, 8)) for op in range(6)]
        expected.update(itertools.product(*sides))
    assert {split.choice for split in found} == expected
    assert found[0].bounds == (0, 4, 8)  # the most even first
    for split in found:
        for where in allocations(ppo, split.choice):
            assert any(a <= where.start and where.stop <= b for a, b in itertools.pairwise(split.bounds))


def test_parts_are_cut_again_and_the_rest_stays(ppo) -> None:
    directories = build_directories(ppo, microbatch_tuning=True)
    left, right = ([fastest(ppo, op, *part) for op in range(6)] for part in ((0, 4), (4, 8)))
    split = Split((left[0], *right[1:5], left[5]), (0, 4, 8))
    found = splits_of_parts(directories, split)
    for finer in found:
        assert len(finer.bounds) == 4
        new = (set(finer.bounds) - {0, 4, 8}).pop()
        staying = (1, 2, 3, 4) if new < 4 else (0, 5)
        assert all(finer.choice[operator] == split.choice[operator] for operator in staying)
        for operator in set(range(6)) - set(staying):
            where = allocations(ppo, finer.choice)[operator]
            assert where.stop <= new or where.start >= new
    quarter = (fastest(ppo, 0, 0, 2), *right[1:5], fastest(ppo, 5, 2, 4))
    assert quarter in {finer.choice for finer in found}


def test_a_lonely_operator_is_not_cut(ppo) -> None:
    directories = build_directories(ppo, microbatch_tuning=True)
    choice = (fastest(ppo, 0, 0, 4), *(fastest(ppo, op, 4, 8) for op in range(1, 6)))
    found = splits_of_parts(directories, Split(choice, (0, 4, 8)))
    assert found
    assert all(min(set(split.bounds) - {0, 4, 8}) > 4 for split in found)


def test_splits_are_limited(toys) -> None:
    structure = toys.structure(toy_ppo(), machine=(2, 8, 8), prompts=128, state={})
    assert len(splits(build_directories(structure, microbatch_tuning=True), 128)) <= MOST_SPLITS


def starts_of(toys, structure, monkeypatch, **settings) -> list[tuple[int, ...]]:
    """Where the first chains start, in order."""
    found: list[tuple[int, ...]] = []
    monkeypatch.setattr(Islands, "start_at", lambda self, choices: found.extend(choices))
    chosen = Settings(polish=False, proof_share=0.0, **settings)
    ANNEALING.run(toys.problem(structure), SearchBudget(evaluations=3000), chosen, Progress())
    return found


def test_chains_start_from_a_split_in_three(toys, ppo, monkeypatch, fake_batches) -> None:
    """Apart from it and the split in two that leads there, all plans score alike."""
    target = [Allocation(0, 2), *[Allocation(4, 8)] * 4, Allocation(2, 4)]
    halves = [Allocation(0, 4), *[Allocation(4, 8)] * 4, Allocation(0, 4)]

    def answer(choice):
        places = allocations(ppo, choice)
        return toys.evaluation(100.0 if places == target else 2.0 if places == halves else 1.0)

    fake_batches(answer)
    found = starts_of(toys, ppo, monkeypatch)
    assert found[0] == concurrent(ppo)
    assert allocations(ppo, found[1]) == target
    assert allocations(ppo, found[2]) == halves
    assert starts_of(toys, ppo, monkeypatch, split_starts=False) == [concurrent(ppo)]


def test_infeasible_splits_are_starts_too(toys, ppo, monkeypatch, fake_batches) -> None:
    """With nothing feasible among the seeds, the least penalized splits lead the chains."""
    fake_batches(lambda choice: toys.evaluation(1.0, peak_ratio=1.5 + 0.01 * (sum(choice) % 7)))
    found = starts_of(toys, ppo, monkeypatch)
    assert [sum(choice) % 7 for choice in found[1:]] == [0, 1, 2]


def test_the_first_chain_starts_from_the_concurrent_baseline(toys, ppo, monkeypatch, watch) -> None:
    found = starts_of(toys, ppo, monkeypatch)
    assert found[0] == concurrent(ppo)
    assert watch.rows(ppo)[:2] == [concurrent(ppo), colocated(ppo)]
    rank = {choice: ppo.evaluator.evaluate(choice).tokens_per_s for choice in watch.rows(ppo)}
    assert rank[found[1]] == max(rank[choice] for choice in watch.rows(ppo)[2:])


def test_starts_are_within_the_directories(toys) -> None:
    """With fixed microbatches the baselines are computed among the candidates that have them."""
    structure = toys.structure(toy_ppo(), machine=(1, 2, 4), prompts=64, state={})
    directories = build_directories(structure, microbatch_tuning=False)
    for start in baseline_starts(structure, directories):
        assert all(c in directory for c, directory in zip(start, directories, strict=True))
    assert baseline_starts(structure, build_directories(structure, microbatch_tuning=True)) == (
        concurrent(structure),
        colocated(structure),
    )


def test_one_gpu_has_no_concurrent_baseline(toys) -> None:
    """The operators of a group cannot be disjoint."""
    structure = toys.structure(toy_ppo(), machine=(1, 1, 1), state={})
    assert concurrent(structure) is None
    directories = build_directories(structure, microbatch_tuning=True)
    assert baseline_starts(structure, directories) == (colocated(structure),)
