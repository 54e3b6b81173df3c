"""Starts against brute force: the concurrent partition over all disjoint placements, the colocated choice by hand."""

from __future__ import annotations

import itertools
from collections.abc import Mapping

import numpy as np
import pytest

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.problem import StructureProblem, build_structure
from rpeg_core.planning.starts import colocated, concurrent, independent_groups
from rpeg_core.planning.structures import Structure
from rpeg_core.records import CostTerm, Target
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.testing.toys import (
    active,
    toy_hardware,
    toy_memory_terms,
    toy_mini,
    toy_ppo,
    toy_transfer_term,
    toy_workload,
)

GENERATION, REFERENCE, REWARD, CRITIC, TRAIN_ACTOR, TRAIN_CRITIC = range(6)
WORK = {
    ("actor", "generation"): 24.0,
    ("reference", "inference"): 6.0,
    ("reward", "inference"): 3.0,
    ("critic", "inference"): 6.5,
    ("actor", "training"): 20.0,
    ("critic", "training"): 11.0,
}


def scaling_term(work: Mapping[tuple[str, str], float], *, overhead_s: float = 0.1) -> CostTerm:
    """``work / GPUs + overhead * (Pp + Pt)``: more GPUs are faster, data parallelism is the cheapest way."""

    def function(batch: OperatorBatch) -> np.ndarray:
        seconds = work.get((batch.model.name, batch.role.value), 0.0) / batch.layouts.gpus
        return seconds + overhead_s * (batch.layouts.pipeline + batch.layouts.tensor)

    return CostTerm(name="toy.scaling", summary="scales", target=Target.OPERATOR, quantity="work", function=function)


def structure(
    machine: tuple[int, int, int],
    *,
    prompts: int,
    work: Mapping[tuple[str, str], float] = WORK,
    rpeg=None,
    memory=(),
    pins: Mapping[str, Pin] | None = None,
    overhead_s: float = 0.1,
) -> StructureProblem:
    racks, nodes, gpus = machine
    return build_structure(
        structure=Structure(staleness=(("actor", 0), ("critic", 0))),
        rpeg=rpeg or toy_ppo(),
        machine=DeviceSpace(racks=racks, nodes_per_rack=nodes, gpus_per_node=gpus),
        hardware=toy_hardware(),
        workload=toy_workload(prompts=prompts),
        terms=[active(t) for t in (scaling_term(work, overhead_s=overhead_s), toy_transfer_term(), *memory)],
        options=EvaluationOptions(steps=2),
        pins=pins,
    )


def disjoint(allocations: list[Allocation]) -> bool:
    return all(a.disjoint(b) for a, b in itertools.combinations(allocations, 2))


def shortest_partition(problem: StructureProblem, group: tuple[int, ...]) -> tuple[float, float] | None:
    """(longest, summed) seconds of the best disjoint placement, over every tuple of candidates of the group."""
    best = None
    options = [
        [
            (float(problem.seconds(i)[c]), int(problem.candidates[i].start[c]), int(problem.candidates[i].stop[c]))
            for c in range(len(problem.candidates[i]))
        ]
        for i in group
    ]
    for placed in itertools.product(*options):
        if all(a[2] <= b[1] or b[2] <= a[1] for a, b in itertools.combinations(placed, 2)):
            value = max(p[0] for p in placed), sum(p[0] for p in placed)
            best = value if best is None or value < best else best
    return best


def test_groups_of_ppo() -> None:
    assert independent_groups(toy_ppo()) == (
        (GENERATION,),
        (REFERENCE, REWARD, CRITIC),
        (TRAIN_ACTOR, TRAIN_CRITIC),
    )


@pytest.mark.parametrize(
    ("machine", "prompts"),
    [((1, 2, 2), 16), ((1, 1, 4), 4), ((2, 1, 4), 8), ((1, 4, 1), 12), ((1, 8, 1), 12), ((1, 6, 1), 12)],
)
@pytest.mark.parametrize("inference", [(6.0, 3.0, 6.5), (1.0, 12.0, 1.0), (5.0, 5.0, 5.0), (9.0, 0.0, 4.0)])
def test_concurrent_is_the_best_disjoint_partition(
    machine: tuple[int, int, int], prompts: int, inference: tuple[float, float, float]
) -> None:
    models = ("reference", "reward", "critic")
    work = WORK | {(model, "inference"): s for model, s in zip(models, inference, strict=True)}
    problem = structure(machine, prompts=prompts, work=work)
    choice = concurrent(problem)
    for group in independent_groups(problem.rpeg):
        placed = [problem.candidates[i].assignment(choice[i]).allocation for i in group]
        seconds = [float(problem.seconds(i)[choice[i]]) for i in group]
        assert disjoint(placed)
        assert shortest_partition(problem, group) == pytest.approx((max(seconds), sum(seconds)), rel=1e-12)


def test_concurrent_places_3_and_4_nodes_in_a_rack_of_8() -> None:
    """4 first at its lowest start leaves no aligned start for 3; the other half does."""
    work = {("actor", "training"): 4.0, ("critic", "training"): 3.0, ("actor", "generation"): 1.0}
    pins = {"actor_training": Pin(data=4), "critic_training": Pin(data=3)}
    problem = structure((1, 8, 1), prompts=12, work=work, pins=pins)
    choice = concurrent(problem)
    allocations = [problem.candidates[i].assignment(choice[i]).allocation for i in (TRAIN_ACTOR, TRAIN_CRITIC)]
    assert allocations == [Allocation(4, 8), Allocation(0, 3)]


def test_concurrent_needs_disjoint_parts() -> None:
    """Two operators of one group on the only GPU, or both pinned to the same GPUs, have none."""
    assert concurrent(structure((1, 1, 1), prompts=4)) is None
    pinned = {name: Pin(allocation=Allocation(0, 2)) for name in ("actor_training", "critic_training")}
    assert concurrent(structure((1, 1, 4), prompts=8, pins=pinned)) is None


def test_no_start_without_candidates() -> None:
    """8000 bytes on 4 GPUs are 2000 each, 900 are usable."""
    too_large = toy_memory_terms(training_state={("actor", "training"): 8000.0})
    problem = structure((1, 1, 4), prompts=8, rpeg=toy_mini(), memory=too_large)
    assert problem.empty_operator == "actor_training"
    assert colocated(problem) is None
    assert concurrent(problem) is None


def test_colocated_is_the_fastest_layout_on_all_gpus() -> None:
    problem = structure((1, 2, 2), prompts=16)
    choice = colocated(problem)
    for index, candidate in enumerate(choice):
        assignments = [problem.candidates[index].assignment(c) for c in range(len(problem.candidates[index]))]
        seconds = problem.seconds(index)
        everywhere = [c for c, a in enumerate(assignments) if a.allocation == Allocation(0, 4)]
        assert candidate in everywhere
        assert seconds[candidate] == min(seconds[c] for c in everywhere)
        assert str(assignments[candidate].layout) == "dp4 pp1 tp1"


def test_colocated_takes_all_gpus_even_when_fewer_are_faster() -> None:
    """Without any work one GPU is the fastest, for its overhead."""
    problem = structure((1, 1, 4), prompts=2, work={})
    # dp 4 needs 4 prompts, and a microbatch of a pipeline 8 sequences: dp2 tp2 and tp4 are what is left.
    for index, candidate in enumerate(colocated(problem)):
        assignment = problem.candidates[index].assignment(candidate)
        assert assignment.allocation == Allocation(0, 4)
        assert str(assignment.layout) == "dp2 pp1 tp2"
        assert problem.seconds(index)[candidate] > problem.seconds(index).min()


def test_colocated_uses_the_most_gpus_that_an_operator_can() -> None:
    """6 prompts on 8 nodes of 1 GPU without pipelines: dp 6 at most."""
    problem = structure((1, 8, 1), prompts=6, pins={"reward_inference": Pin(pipeline=1)})
    assignment = problem.candidates[REWARD].assignment(colocated(problem)[REWARD])
    assert (assignment.allocation.size, str(assignment.layout)) == (6, "dp6 pp1 tp1")
