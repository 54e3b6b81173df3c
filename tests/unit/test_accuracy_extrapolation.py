"""Where a plan leaves what was measured, against ranges written by hand."""

from __future__ import annotations

import pytest

from rpeg_core.accuracy.extrapolation import Extrapolation, extrapolations
from rpeg_core.accuracy.features import FEATURES, features
from rpeg_core.ir import Role
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import on, toy_book, toy_mini, toy_model, toy_workload

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)


def batches(operator: str):
    book = toy_book(toy_mini(model=toy_model("actor", layers=4, parameters=20_000)), MACHINE, toy_workload())
    assignment = on(0, 4, tensor=2)
    return book.batches(operator, book.row(assignment, operator))


def error(**given) -> TermError:
    return TermError(log_std=0.1, rows=5, source="made up", **given)


def test_features_are_those_of_the_layout() -> None:
    """16 sequences of 100 + 100 tokens over two replicas of tp 2."""
    (batch,) = batches("actor_training")
    assert batch.role is Role.TRAINING
    assert features(batch) == {
        "gpus": 4.0,
        "data": 2.0,
        "pipeline": 1.0,
        "tensor": 2.0,
        "layers": 4.0,
        "hidden": 8.0,
        "parameters": 20_000.0,
        "sequence_tokens": 200.0,
        "microbatch_tokens": 8 * 200.0,
    }
    assert features(batches("actor_generation")[0])["replica_sequences"] == 8.0
    assert set(features(batch)) | set(features(batches("actor_generation")[0])) == set(FEATURES)


def test_inside_the_ranges_nothing_is_said() -> None:
    ranges = {"gpus": (4.0, 4.0), "layers": (1.0, 100.0)}
    assert extrapolations([(batches("actor_training"), (error(ranges=ranges),))]) == ()


@pytest.mark.parametrize(("low", "high"), [(8.0, 1536.0), (1.0, 3.0)])
def test_below_and_above_the_range_is_outside(low: float, high: float) -> None:
    found = extrapolations([(batches("actor_training"), (error(ranges={"gpus": (low, high)}),))])
    assert found == (Extrapolation(role="training", feature="gpus", value=4.0, measured=(low, high)),)


def test_terms_measured_on_less_narrow_the_range() -> None:
    terms = (error(ranges={"layers": (1.0, 100.0)}), error(ranges={"layers": (8.0, 64.0)}))
    assert extrapolations([(batches("actor_training"), terms)]) == (
        Extrapolation(role="training", feature="layers", value=4.0, measured=(8.0, 64.0)),
    )


def test_hardware_that_nobody_measured_is_named() -> None:
    found = extrapolations([(batches("actor_training"), (error(hardware=("h100",)),))])
    assert found == (Extrapolation(role="training", feature="hardware", value="toy", measured=("h100",)),)
    assert extrapolations([(batches("actor_training"), (error(hardware=("toy",)),))]) == ()


def test_a_precision_that_nobody_measured_is_named() -> None:
    found = extrapolations([(batches("actor_training"), (error(precisions=("fp8", "nvfp4")),))])
    assert found == (Extrapolation(role="training", feature="precision", value="bf16", measured=("fp8", "nvfp4")),)
    assert extrapolations([(batches("actor_training"), (error(precisions=("bf16",)),))]) == ()


def test_a_role_is_told_once_with_its_farthest_operator() -> None:
    book = toy_book(toy_mini(), MACHINE, toy_workload())
    near, far = (book.batches("actor_training", book.row(a, "actor_training")) for a in (on(0, 2), on(0, 1)))
    terms = (error(ranges={"gpus": (8.0, 64.0)}),)
    (found,) = extrapolations([(near, terms), (far, terms)])
    assert found.value == 1.0
