"""The measured errors of cost terms follow from the shipped tables, and the intervals made of them hold."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "derive_errors.py"


@pytest.fixture(scope="module")
def script():
    sys.path.insert(0, str(SCRIPT.parent))
    try:
        spec = importlib.util.spec_from_file_location("derive_errors", SCRIPT)
        module = importlib.util.module_from_spec(spec)
        sys.modules["derive_errors"] = module
        spec.loader.exec_module(module)
    finally:
        sys.path.remove(str(SCRIPT.parent))
    return module


class FromSource:
    """A row of which only the source matters."""

    def __init__(self, source: str) -> None:
        self.source = source


def drawn(script, bias, std, *, rows=3000, seed=0):
    """Rows of one source each, whose terms err as told."""
    rng = np.random.default_rng(seed)
    shares = rng.dirichlet(np.full(len(bias), 0.7), rows)
    errors = bias + std * rng.standard_normal((rows, len(bias)))
    cases = tuple(FromSource(f"source {i}") for i in range(rows))
    return script.Rows(cases, (shares * errors).sum(axis=1), shares)


def test_the_fit_finds_the_errors_that_rows_were_drawn_with(script) -> None:
    bias, std = np.array([0.1, -0.2, 0.4]), np.array([0.05, 0.2, 0.4])
    fit = script.fitted(drawn(script, bias, std))
    assert fit.bias == pytest.approx(bias, abs=0.03)
    assert fit.std == pytest.approx(std, rel=0.1, abs=0.01)


def test_a_source_counts_once_however_many_rows_it_has(script) -> None:
    one = drawn(script, np.array([0.0, 0.3]), np.array([0.1, 0.1]), rows=12)
    copied = script.Rows(
        (*one.cases, *(one.cases[0] for _ in range(50))),
        np.concatenate([one.log_errors, np.full(50, one.log_errors[0])]),
        np.concatenate([one.shares, np.tile(one.shares[0], (50, 1))]),
    )
    assert script.fitted(copied).bias == pytest.approx(script.fitted(one).bias)
    assert script.fitted(copied).std == pytest.approx(script.fitted(one).std)


def test_deviations_are_scaled_until_held_out_rows_are_inside(script) -> None:
    """Sources that err together: five rows each with an error of the source. A fit of single rows would be too sure."""
    rng = np.random.default_rng(3)
    shares = rng.dirichlet(np.ones(2), 60)
    of_source = np.repeat(rng.standard_t(2, 12), 5) * 0.1
    cases = tuple(FromSource(f"source {i // 5}") for i in range(60))
    rows = script.Rows(cases, of_source + 0.02 * rng.standard_normal(60), shares)
    fit = script.calibrated(rows)
    assert fit.factor > 1.0
    mean, deviation = script.held_out(rows, fit.factor)
    inside = np.abs(rows.log_errors - mean) <= script.WITHIN * deviation * (1 + 1e-9)
    assert np.average(inside, weights=rows.weights) >= 0.9


def test_the_error_of_steps_is_what_operators_do_not_explain(script) -> None:
    """Four steps: mean 0.5; variance with n - 1 is 0.02/3, of the next step 5/4 of it, less the operators' 0.004."""
    bias, std = script.step_error(np.array([0.4, 0.5, 0.5, 0.6]), np.full(4, np.sqrt(0.004)))
    assert (bias, std) == pytest.approx((0.5, np.sqrt(0.02 / 3 * 5 / 4 - 0.004)))
    assert script.step_error(np.array([0.4, 0.6]), np.full(2, 1.0)) == pytest.approx((0.5, 0.0))


@pytest.mark.slow
def test_shipped_numbers_follow_from_the_tables() -> None:
    command = [sys.executable, str(SCRIPT), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_ninety_percent_intervals_hold_about_ninety_percent_of_held_out_rows(script) -> None:
    """By the code that prints intervals; a source is held out whole, so that its rows stand or fall together."""
    coverage = script.derive(REPOSITORY / "benchmarks" / "measured").coverage
    assert set(coverage) == {
        f"{coefficients} {what}"
        for coefficients in ("own", "named")
        for what in ("training", "training of mixtures", "generation")
    }
    for name, inside in coverage.items():
        assert 0.85 <= inside <= 0.97, name
