"""Which contender wins, and when there is nothing to search."""

from __future__ import annotations

import attrs
import pytest

from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.score import Objective
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.problem import Problem, build_structure
from rpeg_core.planning.search import Solution
from rpeg_core.planning.solve import Contender, best, closest, only_choice, predict
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import active, on, toy_hardware, toy_mini, toy_seconds_term, toy_workload

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
SECONDS = {("actor", "generation"): 4.0, ("actor", "training"): 2.0}


def problem(pins, taus=(0,)) -> Problem:
    workload, options = toy_workload(), EvaluationOptions(steps=4)
    structures = tuple(
        build_structure(
            structure=Structure(staleness=(("actor", tau),)),
            rpeg=toy_mini(tau=tau),
            machine=MACHINE,
            hardware=toy_hardware(),
            workload=workload,
            terms=[active(toy_seconds_term(SECONDS))],
            options=options,
            pins=pins,
        )
        for tau in taus
    )
    return Problem(
        workload=workload,
        machine=MACHINE,
        hardware=toy_hardware(),
        objective=Objective(),
        options=options,
        structures=structures,
    )


APART = {"actor_generation": Pin.of(on(0, 2)), "actor_training": Pin.of(on(2, 4))}


def test_a_complete_pin_leaves_one_configuration_per_structure_and_the_best_counts() -> None:
    """Apart, staleness 1 overlaps 4 s and 2 s, so that it beats staleness 0."""
    assert only_choice(problem(APART, taus=(0, 1))) == Solution(1, (0, 0))
    assert only_choice(problem(APART, taus=(1, 0))) == Solution(0, (0, 0))


@pytest.mark.parametrize("pins", [{}, {"actor_generation": APART["actor_generation"]}])
def test_otherwise_there_is_something_to_search(pins) -> None:
    assert only_choice(problem(pins)) is None


def contender(name: str, **values: float) -> Contender:
    made = problem(APART)
    prediction = predict(made, Solution(0, (0, 0)))
    evaluation = attrs.evolve(prediction.evaluation, **values)
    return Contender(
        name=name,
        result=None,
        solution=Solution(0, (0, 0)),
        prediction=attrs.evolve(prediction, evaluation=evaluation),
    )


FAST = {"tokens_per_s": 100.0, "utilization": 0.5, "used_gpus": 4, "peak_ratio": 0.9}
THRIFTY = {"tokens_per_s": 95.0, "utilization": 0.9, "used_gpus": 2, "peak_ratio": 0.5}
SLOW = {"tokens_per_s": 50.0, "utilization": 1.0, "used_gpus": 1, "peak_ratio": 0.1}
TOO_LARGE = {"tokens_per_s": 999.0, "utilization": 1.0, "used_gpus": 1, "peak_ratio": 1.01}
NOTHING = Contender(name="nothing", result=None, solution=None, prediction=None)


@pytest.mark.parametrize(
    ("kind", "expected"),
    [("throughput", "fast"), ("throughput_x_utilization", "thrifty"), ("cost_per_token", "thrifty")],
)
def test_the_best_feasible_contender_wins_whatever_the_order(kind, expected) -> None:
    field = [contender("fast", **FAST), contender("thrifty", **THRIFTY), contender("slow", **SLOW)]
    field += [contender("too large", **TOO_LARGE), NOTHING]
    for order in (field, field[::-1]):
        assert best(Objective(kind=kind), order).name == expected


def test_of_equals_the_first_wins() -> None:
    assert best(Objective(), [contender("a", **FAST), contender("b", **FAST)]).name == "a"


def test_nobody_wins_when_nothing_fits_and_the_closest_is_known() -> None:
    field = [NOTHING, contender("far", **{**TOO_LARGE, "peak_ratio": 3.0}), contender("near", **TOO_LARGE)]
    assert best(Objective(), field) is None
    assert closest(field).name == "near"
    assert closest([NOTHING]) is None
