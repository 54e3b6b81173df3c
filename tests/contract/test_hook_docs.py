"""docs/hooks.md is what the hook specifications say, and their examples run as they stand."""

from __future__ import annotations

import importlib.util
import inspect
import re
import sys
import types
from pathlib import Path

import pytest

from rpeg_core import hookspecs
from rpeg_core.cli.show import numbers
from rpeg_core.diagnostics import Diagnostic
from rpeg_core.planning.structures import Structure
from rpeg_core.plugins.kinds import KINDS
from rpeg_core.plugins.loading import call_hook, check_record, new_manager
from rpeg_core.spec.public_models import public_model
from rpeg_core.spec.workload import Workload

PARTS = ["Called:", "Returns:", "On failure:", ".. versionadded::", "Example::"]

ARGUMENTS = {
    "rpeg_check_plan": {"plan": "a plan"},
    "rpeg_plan_ready": {"plan": "a plan"},
    "rpeg_run_started": {"plan": "a plan"},
    "rpeg_step_finished": {"plan": "a plan", "step": 3, "metrics": {"reward_mean": 0.5}},
    "rpeg_run_finished": {"plan": "a plan", "trace": "a trace"},
}

OBSERVED = {
    "rpeg_plan_ready": ("plans", ["a plan"]),
    "rpeg_run_started": ("started", ["a plan"]),
    "rpeg_step_finished": ("history", [(3, 0.5)]),
    "rpeg_run_finished": ("traces", ["a trace"]),
}


def _maker() -> types.ModuleType:
    path = Path(__file__).parents[2] / "docs" / "make_hooks.py"
    spec = importlib.util.spec_from_file_location("make_hooks", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


MAKER = _maker()
HOOKS = MAKER.hooks()
KIND_OF = {kind.hook: kind for kind in KINDS}


def run_example(hook: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """The example of a hook as a module."""
    _, _, source = inspect.getdoc(HOOKS[hook]).partition("Example::\n")
    module = types.ModuleType(f"example_of_{hook}")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(inspect.cleandoc(source), module.__name__, "exec"), module.__dict__)
    return module


def call_example(hook: str, module: types.ModuleType) -> list[object]:
    manager = new_manager()
    manager.register(module, hook)
    return [item for items in call_hook(manager, module, hook, **ARGUMENTS.get(hook, {})) for item in items]


def test_the_page_is_what_the_specifications_make() -> None:
    assert MAKER.PAGE.read_text(encoding="utf-8") == MAKER.render(), "run python docs/make_hooks.py"


def test_each_heading_is_the_signature_of_its_hook() -> None:
    headings = re.findall(r"^## `(.*)`$", MAKER.PAGE.read_text(encoding="utf-8"), flags=re.MULTILINE)
    assert headings == [MAKER.signature(name, hook) for name, hook in HOOKS.items()]
    assert "rpeg_step_finished(plan: Plan, step: int, metrics: Mapping[str, float]) -> None" in headings


def test_the_module_holds_hooks_and_nothing_else() -> None:
    functions = [name for name, value in vars(hookspecs).items() if inspect.isfunction(value)]
    assert functions == list(HOOKS)
    assert set(KIND_OF) | set(ARGUMENTS) == set(HOOKS)


@pytest.mark.parametrize("hook", HOOKS)
def test_each_docstring_has_the_same_parts_in_the_same_order(hook) -> None:
    text = inspect.getdoc(HOOKS[hook])
    places = [text.find(part) for part in PARTS]
    assert -1 not in places
    assert places == sorted(places)


@pytest.mark.parametrize("hook", sorted(KIND_OF))
def test_the_example_of_a_kind_returns_records_that_can_be_used(hook, monkeypatch) -> None:
    records = call_example(hook, run_example(hook, monkeypatch))
    assert len(records) == 1
    assert [check_record(KIND_OF[hook], record) for record in records] == [()]


@pytest.mark.parametrize("hook", sorted(OBSERVED))
def test_the_example_of_an_observer_observes(hook, monkeypatch) -> None:
    module = run_example(hook, monkeypatch)
    assert call_example(hook, module) == []
    name, expected = OBSERVED[hook]
    assert getattr(module, name) == expected


def test_the_example_of_a_check_returns_a_diagnostic(monkeypatch) -> None:
    (found,) = call_example("rpeg_check_plan", run_example("rpeg_check_plan", monkeypatch))
    assert isinstance(found, Diagnostic)


def test_the_example_algorithm_builds_a_well_formed_graph(monkeypatch) -> None:
    (template,) = call_example("rpeg_algorithms", run_example("rpeg_algorithms", monkeypatch))
    workload = Workload(prompts=8, prompt_tokens=16, response_tokens=16)
    structure = Structure(staleness=(("actor", 1),))
    graph = template.build(workload, {"actor": public_model("Qwen/Qwen3-8B")}, structure, None)
    assert [operator.name for operator in graph.operators] == ["actor_generation", "actor_training"]


def test_the_example_profile_has_a_source_for_every_number(monkeypatch) -> None:
    (profile,) = call_example("rpeg_hardware", run_example("rpeg_hardware", monkeypatch))
    assert {path for path, _ in numbers(profile)} == set(profile.sources)


def test_the_example_cost_term_prices_a_batch(monkeypatch) -> None:
    module = run_example("rpeg_cost_terms", monkeypatch)
    (term,) = call_example("rpeg_cost_terms", module)

    batch = types.SimpleNamespace(layouts=range(3), settings=module.Settings(launch_s=0.5))
    assert list(term.function(batch)) == [0.5, 0.5, 0.5]
