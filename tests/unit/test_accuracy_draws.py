"""Draws of errors: exact quantiles, independence, the same in every process."""

from __future__ import annotations

import math
import subprocess
import sys

import numpy as np
import pytest

from rpeg_core.accuracy.draws import DRAWS, Interval, standard_normal
from rpeg_core.spec.accuracy import TermError


def test_the_quantiles_of_one_error_are_those_of_the_normal_distribution() -> None:
    draws = standard_normal("a.term #0")
    for share, expected in ((0.05, -1.6449), (0.25, -0.6745), (0.5, 0.0), (0.95, 1.6449)):
        assert np.quantile(draws, share) == pytest.approx(expected, abs=3e-3)
    assert (draws.mean(), draws.std()) == pytest.approx((0.0, 1.0), abs=2e-3)


def test_different_errors_are_independent() -> None:
    names = [f"model.term{i} #0" for i in range(12)]
    correlations = np.corrcoef([standard_normal(name) for name in names])
    off = correlations[~np.eye(len(names), dtype=bool)]
    assert np.abs(off).max() < 4.0 / math.sqrt(DRAWS)  # four standard errors of a correlation of nothing


def test_draws_are_the_same_in_another_process() -> None:
    code = "from rpeg_core.accuracy.draws import standard_normal as s; print(repr(s('x #0')[:3].tolist()))"
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert out.strip() == repr(standard_normal("x #0")[:3].tolist())


def test_an_interval_holds_its_prediction() -> None:
    draws = 2.0 + np.linspace(0.0, 1.0, 101)
    assert Interval.of(draws, 2.5) == Interval(pytest.approx(2.05), pytest.approx(2.95))
    assert Interval.of(draws, 1.0) == Interval(1.0, pytest.approx(2.95))
    assert Interval.of(draws, 9.0) == Interval(pytest.approx(2.05), 9.0)


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"log_std": -0.1}, "log_std is -0.1; allowed: a finite number >= 0"),
        ({"log_std": float("nan")}, "log_std is nan; allowed: a finite number >= 0"),
        ({"log_std": 0.1, "log_bias": float("inf")}, "log_bias is inf; allowed: a finite number"),
        (
            {"log_std": 0.1, "ranges": {"gpus": (8.0, 1.0)}},
            "ranges.gpus is 8.0 to 1.0; allowed: the smaller number first",
        ),
    ],
)
def test_an_error_refuses_numbers_that_mean_nothing(values: dict, text: str) -> None:
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        TermError(rows=1, source="made up", **values)


def test_conditions_choose_an_error() -> None:
    error = TermError(log_std=0.1, rows=1, source="x", roles=("training",), mixture=False, named_framework=None)
    assert error.concerns("training", mixture=False, named_framework=True)
    assert not error.concerns("generation", mixture=False, named_framework=True)
    assert not error.concerns("training", mixture=True, named_framework=True)
