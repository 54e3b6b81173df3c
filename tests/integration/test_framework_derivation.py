"""The fitted coefficients follow from the shipped tables (benchmarks/derive_frameworks.py)."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
SCRIPT = REPOSITORY / "benchmarks" / "derive_frameworks.py"
SLACK = 1.5


@pytest.fixture(scope="module")
def script():
    spec = importlib.util.spec_from_file_location("derive_frameworks", SCRIPT)
    module = importlib.util.module_from_spec(spec)
    sys.modules["derive_frameworks"] = module
    spec.loader.exec_module(module)
    return module


@pytest.mark.slow
def test_shipped_numbers_follow_from_the_tables():
    command = [sys.executable, str(SCRIPT), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.slow
def test_errors_hold_on_sources_that_were_not_fitted(script):
    """Five folds by source: within 1.5 times the targets."""
    profiles = script._profiles()
    data = REPOSITORY / "benchmarks" / "measured"
    cases = [
        *script.training_cases(data / "training.csv", profiles).cases,
        *script.generation_cases(data / "generation.csv", profiles).cases,
    ]
    values = script.shipped(profiles)
    model = script.linearized(values, cases, script.PARAMETERS)
    predicted = script.cross_validated(cases, model)
    for kind, grades, target in (
        ("training-16bit", "A", 0.06),
        ("training-8bit", "A", 0.12),
        ("training-moe", "AB", 0.15),
        ("generation-tpot", "A", 0.12),
        ("generation-static", "A", 0.12),
    ):
        rows = [i for i, case in enumerate(cases) if case.kind == kind and case.grade in grades]
        errors = [abs(predicted[i] / cases[i].measured - 1) for i in rows]
        assert np.mean(errors) <= SLACK * target, kind


@pytest.mark.slow
def test_peak_memory_holds_on_sources_that_were_not_fitted(script):
    cases = script.memory_cases(REPOSITORY / "benchmarks" / "measured" / "training.csv", script._profiles()).cases
    _, inside, outside = script.memory_fit(cases)
    assert inside <= 0.10
    assert outside <= SLACK * 0.10


@pytest.mark.slow
def test_steps_hold_on_sources_that_were_not_fitted(script):
    cases = script.rl_cases(REPOSITORY / "benchmarks" / "measured" / "rl_step.csv", script._profiles()).cases
    steps = [case for case in cases if case.grade == "A"]
    errors = []
    for source in {case.source for case in steps}:
        share = script._share_of([case for case in steps if case.source != source])
        errors += [(1 + share) / (1 + script.loop_share([case])) - 1 for case in steps if case.source == source]
    assert np.mean(np.abs(errors)) <= SLACK * 0.15


def test_a_source_is_in_one_fold_and_folds_are_of_equal_size(script):
    sources = ["a"] * 10 + ["b"] * 6 + ["c"] * 5 + ["d"] * 5 + ["e"] * 4 + ["f"] * 3
    fold = script.folds(sources)
    assert {s: len(set(fold[[i for i, x in enumerate(sources) if x == s]])) for s in set(sources)} == dict.fromkeys(
        set(sources), 1
    )
    assert np.bincount(fold).max() <= 10


def test_the_linear_fit_finds_the_parameters_of_a_linear_model(script):
    rng = np.random.default_rng(0)
    truth = np.array([0.3, 0.8])
    slopes = rng.uniform(1, 5, (40, 2))
    parameters = [script.Parameter("framework", ("x",), name, 0.5, 0.0, 1.0) for name in ("a", "b")]
    model = script.Total(base=2.0 + slopes @ np.array([0.5, 0.5]), slopes=slopes, at=np.array([0.5, 0.5]))
    found = script.minimized(model, 2.0 + slopes @ truth, np.ones(40), parameters)
    assert found == pytest.approx(truth, abs=0.02)
