"""Pins: GPU ranges, the document form, and which legal candidates are left."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpeg_core.errors import ExperimentError, PinError
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.planning.candidates import illegal_assignment, legal_candidates
from rpeg_core.planning.pins import Pin, parse_gpus
from rpeg_core.planning.problem import build_structure
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.testing.strategies import machines, workloads
from rpeg_core.testing.toys import active, toy_hardware, toy_mini, toy_model, toy_seconds_term, toy_workload


@pytest.mark.parametrize(
    ("text", "expected"),
    [("0-15", Allocation(0, 16)), ("3", Allocation(3, 4)), (3, Allocation(3, 4)), ("7-7", Allocation(7, 8))],
)
def test_gpus_are_a_range_or_a_number(text, expected) -> None:
    assert parse_gpus(text, "pin.a.gpus") == expected


@pytest.mark.parametrize("value", ["", "7-3", "0-", "-1", "0,1", " 0-1", "a", -1, True, 1.0, None, [0, 1]])
def test_anything_else_is_refused(value) -> None:
    with pytest.raises(ExperimentError) as caught:
        parse_gpus(value, "pin.a.gpus")
    assert str(caught.value) == (
        f"error[experiment]: pin.a.gpus is {value!r}\n"
        '  allowed: one contiguous range of GPU numbers, e.g. "0-15", or one number'
    )


@given(st.integers(0, 1000), st.integers(1, 1000))
def test_an_allocation_reads_as_it_is_written(start, size) -> None:
    allocation = Allocation(start, start + size)
    assert parse_gpus(str(allocation), "") == allocation


def test_a_pin_of_an_assignment_leaves_no_choice() -> None:
    pin = Pin.of(Assignment(Allocation(0, 8), Layout(2, 2, 2), 4))
    assert pin.document() == {"gpus": "0-7", "dp": 2, "pp": 2, "tp": 2, "microbatches": 4}
    assert str(pin) == "gpus=0-7, dp=2, pp=2, tp=2, microbatches=4"


def test_what_a_pin_leaves_open_is_not_in_its_document() -> None:
    assert Pin(tensor=2).document() == {"tp": 2}


def problem(machine: DeviceSpace, workload, pins, model=None):
    return build_structure(
        structure=Structure(staleness=(("actor", 0),)),
        rpeg=toy_mini(model=model),
        machine=machine,
        hardware=toy_hardware(),
        workload=workload,
        terms=[active(toy_seconds_term({}))],
        options=EvaluationOptions(steps=2),
        pins=pins,
    )


@given(machines(), workloads(), st.data())
def test_a_complete_pin_is_met_exactly_or_its_broken_rule_is_named(machine, workload, data) -> None:
    """The independent answer is ``illegal_assignment``."""
    number = st.integers(1, 9)
    layout = Layout(data.draw(number), data.draw(number), data.draw(number))
    start = data.draw(st.integers(0, machine.gpus))
    size = data.draw(st.sampled_from([layout.gpus, layout.gpus + 1]))
    assignment = Assignment(Allocation(start, start + size), layout, data.draw(number))
    model = toy_model("actor")
    reason = illegal_assignment(machine, workload, model, assignment)
    pins = {"actor_generation": Pin.of(assignment)}
    if reason is None:
        left = problem(machine, workload, pins, model).candidates[0]
        assert [left.assignment(i) for i in range(len(left))] == [assignment]
    else:
        with pytest.raises(PinError) as caught:
            problem(machine, workload, pins, model)
        assert caught.value.what == "pin.actor_generation cannot be met"
        assert caught.value.facts[0][:2] in {"P1", "P2", "P3", "P4", "P5", "P6", "P7", "P8"}


@given(machines(max_gpus=16), st.data())
def test_a_partial_pin_leaves_the_candidates_that_have_it(machine, data) -> None:
    workload, model = toy_workload(), toy_model("actor")
    every = legal_candidates("actor_generation", machine, workload, model)
    chosen = every.assignment(data.draw(st.integers(0, len(every) - 1)))
    full = Pin.of(chosen)
    kept = data.draw(st.sets(st.sampled_from(["allocation", "data", "pipeline", "tensor", "microbatches"])))
    pin = Pin(**{name: getattr(full, name) for name in kept})
    left = problem(machine, workload, {"actor_generation": pin}, model).candidates[0]

    def matches(assignment: Assignment) -> bool:
        own = Pin.of(assignment)
        return all(getattr(own, name) == getattr(pin, name) for name in kept)

    expected = {a for a in map(every.assignment, range(len(every))) if matches(a)}
    assert {left.assignment(i) for i in range(len(left))} == expected
