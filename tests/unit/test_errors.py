"""The text of errors: one form, stable codes, documented exit codes."""

from __future__ import annotations

import pickle

import pytest

from rpeg_core import errors
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import RpegError, suggest

CODES = {
    "ExperimentError": ("experiment", 4),
    "UnknownKeyError": ("unknown-key", 4),
    "ModelConfigError": ("model-config", 4),
    "UnknownModelError": ("unknown-model", 4),
    "TopologyError": ("topology", 4),
    "GraphError": ("graph", 4),
    "PinError": ("pin", 4),
    "PlanFileError": ("plan-file", 4),
    "TraceFileError": ("trace-file", 4),
    "DataError": ("data", 4),
    "NoFeasiblePlanError": ("no-feasible-plan", 1),
    "UsageError": ("usage", 2),
    "SettingsError": ("settings", 2),
    "MissingPluginError": ("missing-plugin", 3),
    "PluginError": ("plugin", 3),
    "CostTermError": ("cost-term", 3),
    "BackendError": ("backend", 3),
    "ExecutionError": ("execution", 5),
    "OutputError": ("output", 74),
}


@pytest.mark.parametrize("name", sorted(CODES))
def test_each_class_prints_its_code_then_facts_then_hint(name: str) -> None:
    cls = getattr(errors, name)
    code, exit_code = CODES[name]
    error = cls("models.actor is 'x'", facts=["in: a.yaml", "allowed: y"], hint="say y")
    assert str(error) == (f"error[{code}]: models.actor is 'x'\n  in: a.yaml\n  allowed: y\nhint: say y")
    assert error.exit_code == exit_code


def test_every_subclass_has_its_own_code_and_is_in_the_table_above() -> None:
    classes = [value for value in vars(errors).values() if isinstance(value, type) and issubclass(value, RpegError)]
    assert {cls.__name__ for cls in classes} - {"RpegError"} == set(CODES)
    codes = [cls.code for cls in classes]
    assert sorted(set(codes)) == sorted(codes)


def test_without_facts_and_hint_the_text_is_one_line() -> None:
    assert str(errors.UsageError("nothing to do")) == "error[usage]: nothing to do"


def test_an_error_survives_pickling_with_all_its_parts() -> None:
    error = errors.PinError("pin.a", facts=["f"], hint="h")
    copy = pickle.loads(pickle.dumps(error))
    assert (type(copy), str(copy)) == (errors.PinError, str(error))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("anealing", "did you mean 'annealing'?"),
        ("GH200", "did you mean 'gh200'?"),
        ("zzz", None),
    ],
)
def test_suggest_names_the_closest_allowed_name(name: str, expected: str | None) -> None:
    assert suggest(name, ["gh200", "annealing"]) == expected


def test_exit_codes_are_the_documented_ones() -> None:
    assert {code.name: code.value for code in ExitCode} == {
        "DONE": 0,
        "NO": 1,
        "USAGE": 2,
        "PLUGIN": 3,
        "BAD_INPUT": 4,
        "EXECUTION_FAILED": 5,
        "INTERNAL": 70,
        "OUTPUT": 74,
        "INTERRUPTED": 130,
        "PIPE": 141,
    }
