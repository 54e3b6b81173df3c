"""Score, penalty, objectives and utilization by hand."""

from __future__ import annotations

import math

import attrs
import pytest

from rpeg_core.errors import ExperimentError
from rpeg_core.passes.score import Evaluation, Objective, memory_penalty, usable_bytes

EVALUATION = Evaluation(makespan_s=10.0, tokens_per_s=1000.0, peak_ratio=0.5, utilization=0.75, used_gpus=4)


def test_a_tenth_of_the_memory_is_reserved():
    assert usable_bytes(1000) == 900


@pytest.mark.parametrize(
    ("ratio", "penalty"),
    [
        (0.0, 1.0),
        (1.0, 1.0),
        (1.01, math.exp(-0.4)),
        (1.1, math.exp(-4)),  # 10 % overflow: about 0.018, as the paper says
        (1.5, math.exp(-20)),
    ],
)
def test_memory_penalty(ratio, penalty):
    assert memory_penalty(ratio) == pytest.approx(penalty, rel=1e-12)


def test_the_penalty_of_a_tenth_is_the_published_number():
    assert round(memory_penalty(1.1), 3) == 0.018


def test_a_hopeless_overflow_is_worth_nothing_without_an_error():
    assert memory_penalty(1e6) == 0.0


@pytest.mark.parametrize(("ratio", "feasible"), [(0.999, True), (1.0, True), (1.0 + 1e-12, False), (2.0, False)])
def test_feasible_up_to_the_usable_memory(ratio, feasible):
    assert attrs.evolve(EVALUATION, peak_ratio=ratio).feasible is feasible


def test_throughput_ignores_the_best_so_far():
    assert Objective().value(EVALUATION, 1e9) == 1000.0


@pytest.mark.parametrize(
    ("kind", "best", "value"),
    [
        ("throughput_x_utilization", 1000.0, 750.0),
        ("throughput_x_utilization", 1111.0, 750.0),  # 0.9 * 1111 = 999.9
        ("throughput_x_utilization", 1112.0, 1e-9),  # 0.9 * 1112 = 1000.8: below the floor, 1000 * 1e-12
        ("throughput_x_utilization", 0.0, 750.0),  # nothing feasible so far
        ("cost_per_token", 1000.0, 250.0),  # 1000 / 4 GPUs
        ("cost_per_token", 1112.0, 1e-9),
    ],
)
def test_objectives_with_a_throughput_floor(kind, best, value):
    assert Objective(kind=kind).value(EVALUATION, best) == pytest.approx(value, rel=1e-12)


def test_the_floor_includes_its_end():
    # 1000 >= (1 - 0.5) * 2000
    objective = Objective(kind="throughput_x_utilization", max_throughput_loss=0.5)
    assert objective.value(EVALUATION, 2000.0) == 750.0
    assert objective.value(EVALUATION, 2000.1) == pytest.approx(1e-9)


def test_no_loss_allowed_means_only_the_best():
    objective = Objective(kind="cost_per_token", max_throughput_loss=0.0)
    assert objective.value(EVALUATION, 1000.0) == 250.0
    assert objective.value(EVALUATION, 1000.001) < 1e-6


@pytest.mark.parametrize(
    ("kind", "value"), [("throughput", 1000.0), ("throughput_x_utilization", 750.0), ("cost_per_token", 250.0)]
)
def test_the_penalty_multiplies_every_objective(kind, value):
    tight = attrs.evolve(EVALUATION, peak_ratio=1.1)
    assert Objective(kind=kind).penalized(tight, 0.0) == pytest.approx(value * math.exp(-4), rel=1e-12)
    assert Objective(kind=kind).penalized(EVALUATION, 0.0) == value


def test_unknown_objective():
    with pytest.raises(ExperimentError) as caught:
        Objective(kind="speed")
    assert str(caught.value) == (
        "error[experiment]: objective.kind is 'speed'\n  allowed: throughput, throughput_x_utilization, cost_per_token"
    )


@pytest.mark.parametrize("loss", [-0.1, 1.0, 2.0, float("nan")])
def test_loss_out_of_range(loss):
    with pytest.raises(ExperimentError) as caught:
        Objective(max_throughput_loss=loss)
    assert str(caught.value) == (
        f"error[experiment]: objective.max_throughput_loss is {loss!r}\n  allowed: a number in [0, 1)"
    )
