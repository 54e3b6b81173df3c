"""The descent to the least memory, against trying everything on a small cluster."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.costing.memory import device_memory
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.score import Objective
from rpeg_core.planning.footprint import least_memory, smallest_footprint
from rpeg_core.planning.problem import Problem, build_structure
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import (
    active,
    toy_hardware,
    toy_memory_terms,
    toy_mini,
    toy_seconds_term,
    toy_workload,
)

MACHINE = DeviceSpace(racks=1, nodes_per_rack=2, gpus_per_node=2)


def problem(*, training: float, weights: float, transient: float, capacity: int, taus=(0, 1)) -> Problem:
    hardware, workload, options = toy_hardware(memory_bytes=capacity), toy_workload(), EvaluationOptions(steps=2)
    roles = ("generation", "training")
    memory = toy_memory_terms(
        training_state={("actor", "training"): training},
        weights={("actor", role): weights for role in roles},
        transient={("actor", role): transient for role in roles},
    )
    structures = tuple(
        build_structure(
            structure=Structure(staleness=(("actor", tau),)),
            rpeg=toy_mini(tau=tau),
            machine=MACHINE,
            hardware=hardware,
            workload=workload,
            terms=[active(term) for term in (toy_seconds_term({}), *memory)],
            options=options,
        )
        for tau in taus
    )
    return Problem(
        workload=workload,
        machine=MACHINE,
        hardware=hardware,
        objective=Objective(),
        options=options,
        structures=structures,
    )


def peak(made: Problem, structure: int, choice) -> float:
    s = made.structures[structure]
    return device_memory(s.rpeg, s.plan(choice), s.book).peak.peak_bytes


def smallest(made: Problem) -> float:
    return min(
        peak(made, index, choice)
        for index, structure in enumerate(made.structures)
        for choice in itertools.product(*(range(len(candidates)) for candidates in structure.candidates))
    )


sizes = st.integers(0, 400).map(float)


@settings(max_examples=15, deadline=None)
@given(sizes, sizes, sizes)
def test_it_finds_the_least_peak_of_all_configurations(training, weights, transient) -> None:
    made = problem(training=training, weights=weights, transient=transient, capacity=10_000)
    found = least_memory(made, any_size=True)
    assert peak(made, found.structure, found.choice) == pytest.approx(smallest(made))


@pytest.mark.parametrize("capacity", [150, 180, 230, 400])
def test_a_configuration_fits_exactly_when_one_exists(capacity) -> None:
    made = problem(training=400.0, weights=200.0, transient=100.0, capacity=10_000)
    tight = problem(training=400.0, weights=200.0, transient=100.0, capacity=capacity)
    found = least_memory(tight)
    assert (found is not None) == (smallest(made) <= 0.9 * capacity)
    if found is not None:
        assert peak(tight, found.structure, found.choice) <= 0.9 * capacity


def test_no_candidate_at_all_is_none() -> None:
    made = problem(training=1000.0, weights=0.0, transient=0.0, capacity=100)
    assert made.structures[0].empty_operator == "actor_training"
    assert least_memory(made, any_size=True) is None
    column, costs = smallest_footprint(made.structures[0], "actor_training")
    assert costs.isolated[column] == 250.0  # 1000 bytes over four GPUs
    assert costs.layouts.layout(column).gpus == 4
