"""Bounds: never below any evaluated plan, exact where the answer is known, and the parts of a box below the box."""

from __future__ import annotations

import itertools
import zlib

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpeg_core.costing.batches import Floats, MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.score import Objective
from rpeg_core.planning.bounds import Bound, certificate, gap, problem_bound, tree, upper_bound
from rpeg_core.planning.bounds.relaxation import least_makespan
from rpeg_core.planning.bounds.state import build_scratch
from rpeg_core.planning.bounds.tables import (
    NONE,
    OTHER_PART,
    PART,
    ROOT,
    ROW_FIRST,
    SIZE,
    START_FIRST,
    START_STOP,
    BoxTables,
    build_box_tables,
)
from rpeg_core.planning.compiled import CompiledEvaluator
from rpeg_core.planning.problem import Problem, ReadableEvaluator, StructureProblem, build_structure
from rpeg_core.planning.structures import Structure
from rpeg_core.records import CostTerm, MemoryKind, Target
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.strategies import axes_of_operators, machines, rpegs, workloads
from rpeg_core.testing.toys import (
    SKEWED,
    active,
    toy_hardware,
    toy_memory_terms,
    toy_mini,
    toy_ppo,
    toy_seconds_term,
    toy_transfer_term,
    toy_workload,
)

SLOW = settings(max_examples=120, deadline=None, suppress_health_check=list(HealthCheck))


def uneven_costs(seed: int, exponent: float, transfers: float) -> list:
    """Cost terms under which every layout differs; work grows with the GPUs when ``exponent`` is below 1."""

    def seconds(batch: OperatorBatch) -> Floats:
        what = (batch.role.value, batch.model and batch.model.name, batch.prefill, len(batch.phases), batch.sequences)
        random = np.random.default_rng([seed, zlib.crc32(repr(what).encode())])
        share = batch.sequences / batch.workload.sequences
        noise = random.uniform(0.7, 1.3, len(batch.layouts))
        return random.uniform(0.1, 3.0) * share * noise / batch.layouts.gpus**exponent

    def transfer(batch: TransferBatch) -> Floats:
        narrow = np.minimum(batch.source_gpus, batch.destination_gpus)
        return transfers * (0.01 + batch.bytes / (1e4 * narrow)) * (1 + batch.tier) * (2.0 if batch.reshard else 1.0)

    def memory(kind: MemoryKind) -> CostTerm:
        full = {
            MemoryKind.TRAINING_STATE: 600.0,
            MemoryKind.WEIGHTS: 100.0,
            MemoryKind.GRADIENTS: 50.0,
            MemoryKind.TRANSIENT: 100.0,
        }[kind]

        def function(batch: MemoryBatch) -> Floats:
            layouts = batch.layouts
            return (batch.model is not None) * full / (np.sqrt(layouts.gpus) + layouts.tensor)

        name = f"uneven.{kind.name.lower()}"
        return CostTerm(
            name=name, summary="uneven", target=Target.MEMORY, quantity=kind.value, function=function, memory=kind
        )

    terms = [
        CostTerm(name="uneven.s", summary="uneven", target=Target.OPERATOR, quantity="work", function=seconds),
        CostTerm(name="uneven.t", summary="uneven", target=Target.TRANSFER, quantity="transfer", function=transfer),
        *map(memory, MemoryKind),
    ]
    return [active(term) for term in terms]


@st.composite
def structure_problems(draw: st.DrawFn, max_operators: int = 8, max_gpus: int = 32) -> StructureProblem:
    """Random graphs, machines, costs and axes; memory is scarce, tight or ample."""
    rpeg = draw(rpegs(max_operators=max_operators))
    return build_structure(
        structure=Structure(staleness=()),
        rpeg=rpeg,
        machine=draw(machines(max_gpus=max_gpus)),
        hardware=toy_hardware(memory_bytes=draw(st.sampled_from((300, 600, 100_000)))),
        workload=draw(workloads()),
        terms=uneven_costs(
            draw(st.integers(0, 10**6)), draw(st.sampled_from((0.0, 0.5, 0.9, 1.0))), draw(st.sampled_from((0, 0.1, 1)))
        ),
        options=EvaluationOptions(
            steps=draw(st.integers(1, 5)), split_lengths=draw(st.booleans()), reserve_source=draw(st.booleans())
        ),
        axes=draw(axes_of_operators(rpeg)),
    )


def toy_problem(graph, gpus: int, seconds, *, steps: int = 4, lengths=(), memory=(), memory_bytes=1000, comm=1e15):
    return build_structure(
        structure=Structure(staleness=()),
        rpeg=graph,
        machine=DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=gpus),
        hardware=toy_hardware(memory_bytes=memory_bytes),
        workload=toy_workload(response_lengths=lengths),
        terms=[active(t) for t in (toy_seconds_term(seconds), toy_transfer_term(bytes_per_s=comm), *memory)],
        options=EvaluationOptions(steps=steps),
    )


def random_choices(problem: StructureProblem, random: np.random.Generator, count: int) -> list[list[int]]:
    """Random choices; in half of them operators like to share an allocation."""
    found = []
    for _ in range(count):
        choice = [int(random.integers(len(c))) for c in problem.candidates]
        if random.random() < 0.5:
            place = problem.candidates[0].assignment(choice[0]).allocation
            for v, candidates in enumerate(problem.candidates):
                there = np.flatnonzero((candidates.start == place.start) & (candidates.stop == place.stop))
                if len(there) and random.random() < 0.6:
                    choice[v] = int(random.choice(there))
        found.append(choice)
    return found


def ways(t: BoxTables, operator: int, candidate: int) -> tuple[list[int], int]:
    """The groups that hold a candidate, from all candidates down to its layout alone, and its start."""

    def descend(group: int) -> tuple[list[int], int] | None:
        if t.groups[group, PART] != NONE:
            inside = descend(t.groups[group, PART]) or descend(t.groups[group, OTHER_PART])
            return inside and ([group, *inside[0]], inside[1])
        first, stop, row = t.groups[group, START_FIRST], t.groups[group, START_STOP], t.groups[group, ROW_FIRST]
        own = t.candidate[t.candidate_first[row] : t.candidate_first[row] + stop - first].tolist()
        return ([group], int(t.starts[first + own.index(candidate)])) if candidate in own else None

    found = descend(int(t.operators[operator, ROOT]))
    assert found is not None
    return found


@SLOW
@given(structure_problems(), st.integers(0, 2**32), st.sampled_from((1, 30, 1000)))
def test_no_feasible_plan_is_better_than_the_bound(problem, seed, boxes):
    bound = upper_bound(problem, boxes=boxes)
    if problem.empty_operator is not None:
        assert bound.tokens_per_s == 0.0
        return
    compiled, readable = CompiledEvaluator(problem), ReadableEvaluator(problem)
    for position, choice in enumerate(random_choices(problem, np.random.default_rng(seed), 60)):
        evaluation = (readable if position < 3 else compiled).evaluate(choice)
        assert not evaluation.feasible or evaluation.tokens_per_s <= bound.tokens_per_s


@SLOW
@given(structure_problems(), st.integers(0, 2**32))
def test_every_box_around_a_feasible_plan_is_bounded_by_its_makespan(problem, seed):
    if problem.empty_operator is not None:
        return
    random, evaluator = np.random.default_rng(seed), CompiledEvaluator(problem)
    t = build_box_tables(problem, evaluator.tables, keep_dominated=True)
    w = build_scratch(t)
    for choice in random_choices(problem, random, 30):
        evaluation = evaluator.evaluate(choice)
        if not evaluation.feasible:
            continue
        found = [ways(t, v, candidate) for v, candidate in enumerate(choice)]
        outer = 0.0
        for known in range(4):  # nothing, some of it, places, everything
            group, start = np.full(len(choice), NONE), np.full(len(choice), NONE)
            for v, (groups, place) in enumerate(found):
                depth = (0, int(random.integers(len(groups))), int(random.integers(len(groups))), -1)[known]
                group[v] = groups[depth]
                sized = t.groups[groups[depth], SIZE] != NONE
                if sized and (known == 3 or (known > 0 and random.random() < 0.7)):
                    start[v] = place
            makespan = least_makespan(t, group, start, w)
            assert makespan <= evaluation.makespan_s
            if known in (0, 3):
                assert outer <= makespan * (1 + 1e-9)
                outer = makespan


@SLOW
@given(structure_problems(max_operators=3, max_gpus=8))
def test_branching_finds_the_least_bound_over_all_plans(problem):
    """Interchangeable places and dominated layouts are left out without loss."""
    if problem.empty_operator is not None or np.prod([len(c) for c in problem.candidates]) > 4000:
        return
    evaluated = CompiledEvaluator(problem).tables
    t = build_box_tables(problem, evaluated, keep_dominated=True)
    w = build_scratch(t)
    places = [[ways(t, v, c) for c in range(len(candidates))] for v, candidates in enumerate(problem.candidates)]
    least = np.inf
    for plan in itertools.product(*places):
        group, start = (np.array(x) for x in zip(*((groups[-1], place) for groups, place in plan), strict=True))
        least = min(least, least_makespan(t, group, start, w))
    small = build_box_tables(problem, evaluated)
    frontier = tree.build_frontier(small, w, 100_000)
    makespan, decided = tree.grow(small, frontier, w, np.inf, 50_000, 1)
    assert decided == np.isfinite(least)
    assert makespan == pytest.approx(least, rel=1e-9)


def test_one_gpu_runs_everything_in_turn():
    problem = toy_problem(toy_mini(tau=1), 1, {("actor", "generation"): 4.0, ("actor", "training"): 2.0})
    bound = upper_bound(problem)
    assert bound.makespan_s == pytest.approx(4 * 6.0, rel=1e-9)
    assert bound.tokens_per_s == pytest.approx(4 * 3200 / 24.0, rel=1e-9)
    assert bound.reason == "actor_generation and actor_training share GPUs, where they run one after another"


def test_staleness_lets_generation_and_training_overlap():
    """More GPUs do not help here: with tau 1 the best is generation in every step and one training at the end."""
    seconds = {("actor", "generation"): 4.0, ("actor", "training"): 2.0}
    synchronous = toy_problem(toy_mini(tau=0), 2, seconds)
    assert upper_bound(synchronous).makespan_s == pytest.approx(24.0, rel=1e-9)
    asynchronous = toy_problem(toy_mini(tau=1), 2, seconds)
    assert upper_bound(asynchronous).makespan_s == pytest.approx(4 * 4.0 + 2.0, rel=1e-6)


def test_a_split_inference_overlaps_with_its_generation():
    """Phases of 0.25, 0.25 and 0.5 of 8 s; the last quarter of 4 s of inference follows the end of generation."""
    seconds = {("actor", "generation"): 8.0, ("reward", "inference"): 4.0}
    problem = toy_problem(toy_ppo(), 4, seconds, steps=1, lengths=SKEWED)
    assert upper_bound(problem).makespan_s == pytest.approx(9.0, rel=1e-6)


def test_a_dominated_layout_that_saves_a_redistribution_counts():
    """On all 4 GPUs: the fastest layouts differ, and a RESHARD between them would take longer than either."""
    speed = {("generation", 1): 1.0, ("generation", 4): 1.02, ("training", 4): 1.0, ("training", 1): 1.05}

    def seconds(batch: OperatorBatch) -> Floats:
        here = [speed.get((batch.role.value, int(tp)), 2.0) for tp in batch.layouts.tensor]
        return np.array(here) * (4 / batch.layouts.gpus)

    term = CostTerm(name="degrees", summary="by tp", target=Target.OPERATOR, quantity="work", function=seconds)
    problem = build_structure(
        structure=Structure(staleness=()),
        rpeg=toy_mini(tau=0),
        machine=DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4),
        hardware=toy_hardware(),
        workload=toy_workload(),
        terms=[active(term), active(toy_transfer_term(bytes_per_s=4000.0))],
        options=EvaluationOptions(steps=1),
    )
    evaluator = CompiledEvaluator(problem)
    plans = itertools.product(*(range(len(c)) for c in problem.candidates))
    assert max(evaluator.evaluate(plan).tokens_per_s for plan in plans) == pytest.approx(3200 / 2.02, rel=1e-9)
    assert upper_bound(problem).makespan_s == pytest.approx(2.02, rel=1e-9)


def test_memory_that_cannot_be_shared_takes_places_away():
    """Two trainings of 800 bytes do not fit one GPU of 900, so nothing runs on one GPU."""
    memory = toy_memory_terms(training_state={("actor", "training"): 800.0, ("critic", "training"): 800.0})
    seconds = {("actor", "training"): 3.0, ("critic", "training"): 3.0}
    alone = upper_bound(toy_problem(toy_ppo(), 1, seconds, memory=memory))
    assert (alone.tokens_per_s, alone.reason) == (0.0, "no plan fits the memory of the GPUs")
    assert upper_bound(toy_problem(toy_ppo(), 2, seconds, memory=memory)).makespan_s == pytest.approx(12.0, rel=1e-6)


def test_an_operator_that_fits_nowhere_is_named():
    memory = toy_memory_terms(training_state={("actor", "training"): 5000.0})
    bound = upper_bound(toy_problem(toy_ppo(), 2, {("actor", "training"): 3.0}, memory=memory))
    assert bound.tokens_per_s == 0.0
    assert bound.reason == "actor_training fits no GPU in any legal layout"


def test_more_boxes_never_loosen_the_bound():
    seconds = {
        (m, r): 1.0 + i for i, (m, r) in enumerate(itertools.product(("actor", "critic"), ("generation", "training")))
    }
    problem = toy_problem(toy_ppo(tau=1), 8, seconds)
    bounds = [upper_bound(problem, boxes=boxes).tokens_per_s for boxes in (1, 10, 100, 1000)]
    assert bounds == sorted(bounds, reverse=True)
    assert upper_bound(problem, boxes=100) == upper_bound(problem, boxes=100)


def test_a_known_plan_that_is_the_best_is_certified():
    problem = toy_problem(toy_mini(tau=1), 1, {("actor", "generation"): 4.0, ("actor", "training"): 2.0})
    best = 4 * 3200 / 24.0
    certified = upper_bound(problem, known_tokens_per_s=best)
    assert gap(best, certified) == pytest.approx(0.0, abs=1e-9)
    assert gap(best * 0.75, upper_bound(problem)) == pytest.approx(0.25, abs=1e-6)


def test_a_bound_of_a_problem_is_the_largest_of_its_structures():
    seconds = {("actor", "generation"): 4.0, ("actor", "training"): 2.0}
    structures = tuple(toy_problem(toy_mini(tau=tau), 2, seconds) for tau in (0, 1))
    first = structures[0]

    def problem(objective: Objective) -> Problem:
        return Problem(
            workload=first.book.workload,
            machine=first.book.machine,
            hardware=first.book.hardware,
            objective=objective,
            options=first.options,
            structures=structures,
        )

    bound = problem_bound(problem(Objective()))
    assert bound.structure == 1
    assert bound.makespan_s == pytest.approx(18.0, rel=1e-6)
    other = problem_bound(problem(Objective(kind="cost_per_token")))
    assert other.tokens_per_s is None
    assert other.reason == "bounds are for the objective throughput, not for cost_per_token"
    assert gap(1.0, other) is None


def test_graphs_too_large_for_bit_masks_get_the_bound_of_their_work(monkeypatch):
    problem = toy_problem(toy_mini(tau=1), 2, {("actor", "generation"): 4.0, ("actor", "training"): 2.0})
    monkeypatch.setattr(certificate, "MAX_NODES", 1)
    bound = upper_bound(problem)
    assert isinstance(bound, Bound)
    assert bound.makespan_s == pytest.approx(16.0, rel=1e-9)  # generation, which is no faster on two GPUs
