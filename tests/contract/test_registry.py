"""The registry: lazy per kind, attributed, and exact about what cannot be used."""

from __future__ import annotations

import importlib.metadata
import sys

import pytest

from rpeg_core.errors import MissingPluginError, PluginError, UsageError

OBSERVER = """
from rpeg_core import Diagnostic, Severity, hookimpl

seen = []

@hookimpl
def rpeg_hardware():
    return []

@hookimpl
def rpeg_step_finished(step):
    seen.append(step)
    {body}

@hookimpl
def rpeg_check_plan(plan):
    {check}
"""


def names(records) -> list[str]:
    return [record.name for record in records]


@pytest.fixture
def no_core_metadata(monkeypatch) -> None:
    """As in a checkout that is not installed: the hint follows the naming convention."""

    def missing(name: str) -> list[str]:
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "requires", missing)


def test_only_the_kind_asked_for_is_imported(installed) -> None:
    hardware = installed.hardware("rpeg-plugin-x1", "x1")
    search = installed.search("rpeg-plugin-hop", "hop")
    registry = installed.registry()
    assert {hardware, search} & set(sys.modules) == set()
    registry.records("hardware")
    assert {hardware, search} & set(sys.modules) == {hardware}
    assert [str(info.status) for info in registry.plugins()] == ["ok", "available"]


def test_a_record_knows_its_distribution_version_and_plugin(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1", "x1-40gb", "x1-80gb", version="0.1.3")
    loaded = installed.registry().get("hardware", "x1-80gb")
    assert (loaded.record.name, loaded.distribution, loaded.version, loaded.plugin) == (
        "x1-80gb",
        "rpeg-plugin-x1",
        "0.1.3",
        "hardware:x1",
    )


def test_records_are_sorted_by_name_across_plugins(installed) -> None:
    installed.hardware("rpeg-plugin-m", "m", "m2", "a1")
    installed.hardware("rpeg-plugin-b", "b", "z9", "b1")
    assert names(installed.registry().records("hardware")) == ["a1", "b1", "m2", "z9"]


def test_kinds_may_be_named_in_the_plural_and_unknown_ones_are_refused(installed) -> None:
    installed.costs("rpeg-plugin-toy", "toy", "toy.a")
    assert names(installed.registry().records("costs")) == ["toy.a"]
    with pytest.raises(UsageError) as caught:
        installed.registry().records("hardwar")
    assert str(caught.value) == (
        "error[usage]: 'hardwar' is not a kind of plugin\n"
        "  allowed: algorithm, hardware, cost, search, backend\n"
        "hint: did you mean 'hardware'?"
    )


@pytest.mark.usefixtures("no_core_metadata")
def test_a_missing_name_is_an_error_that_says_what_is_installed_and_what_to_install(installed) -> None:
    installed.hardware("rpeg-plugin-gh200", "gh200")
    with pytest.raises(MissingPluginError) as caught:
        installed.registry().get("hardware", "tpu")
    assert str(caught.value) == (
        "error[missing-plugin]: no installed plugin offers hardware 'tpu'\n"
        "  installed: gh200\n"
        "hint: pip install rpeg-plugin-tpu"
    )


@pytest.mark.usefixtures("no_core_metadata")
def test_with_no_plugin_at_all_the_error_says_so(installed) -> None:
    with pytest.raises(MissingPluginError) as caught:
        installed.registry().get("algorithm", "ppo")
    assert str(caught.value) == (
        "error[missing-plugin]: no installed plugin offers algorithm 'ppo'\n"
        "  installed: none\n"
        "hint: pip install rpeg-plugin-ppo"
    )


def test_a_misspelt_name_gets_a_suggestion(installed) -> None:
    installed.search("rpeg-plugin-annealing", "annealing")
    with pytest.raises(MissingPluginError) as caught:
        installed.registry().get("search", "anealing")
    assert str(caught.value) == (
        "error[missing-plugin]: no installed plugin offers search 'anealing'\n"
        "  installed: annealing\n"
        "hint: did you mean 'annealing'?"
    )


@pytest.mark.parametrize(
    ("name", "command"),
    [
        ("a100-80gb", "pip install rpeg-plugin-a100"),
        ("h200", "pip install rpeg-plugin-h200"),
        ("h2000", "pip install rpeg-plugin-h2000"),
    ],
)
def test_the_command_names_the_distribution_of_the_extra_that_has_the_record(
    installed, monkeypatch, name, command
) -> None:
    requirements = ["attrs>=23", 'rpeg-plugin-a100; extra == "all"', 'rpeg-plugin-h200 ; extra == "all"']
    monkeypatch.setattr(importlib.metadata, "requires", lambda name: requirements)
    with pytest.raises(MissingPluginError) as caught:
        installed.registry().get("hardware", name)
    assert caught.value.hint == command


@pytest.mark.usefixtures("no_core_metadata")
def test_plugins_that_are_not_used_are_facts_of_a_missing_name(installed) -> None:
    installed.add("rpeg-plugin-zap", "rpeg.hardware", "zap", "1/0\n")
    with pytest.raises(MissingPluginError) as caught:
        installed.registry().get("hardware", "gh200")
    assert str(caught.value) == (
        "error[missing-plugin]: no installed plugin offers hardware 'gh200'\n"
        "  installed: none\n"
        "  not used: hardware:zap (rpeg-plugin-zap 0.1.0): import-failed: "
        "ZeroDivisionError: division by zero\n"
        "hint: pip install rpeg-plugin-gh200"
    )


@pytest.mark.parametrize("name", ["zap", "zap-80gb"])
def test_naming_what_a_broken_plugin_offers_makes_its_failure_the_error(installed, name) -> None:
    module = installed.add("rpeg-plugin-zap", "rpeg.hardware", "zap", "1/0\n")
    with pytest.raises(PluginError) as caught:
        installed.registry().get("hardware", name)
    assert str(caught.value) == (
        f"error[plugin]: hardware {name!r} cannot be used\n"
        "  plugin: hardware:zap from rpeg-plugin-zap 0.1.0\n"
        "  status: import-failed\n"
        "  reason: ZeroDivisionError: division by zero\n"
        f"hint: python -c 'import {module}' shows where it fails"
    )


def test_naming_a_disabled_plugin_says_how_to_enable_it(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    with pytest.raises(PluginError) as caught:
        installed.registry(disabled=["x1"]).get("hardware", "x1")
    assert str(caught.value) == (
        "error[plugin]: hardware 'x1' cannot be used\n"
        "  plugin: hardware:x1 from rpeg-plugin-x1 0.1.0\n"
        "  status: disabled\n"
        "  reason: named in RPEG_DISABLE_PLUGINS\n"
        "hint: take it out of RPEG_DISABLE_PLUGINS"
    )


def test_naming_an_incompatible_plugin_says_what_to_upgrade(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1", requires=["rpeg-core>=9"])
    with pytest.raises(PluginError) as caught:
        installed.registry().get("hardware", "x1")
    assert str(caught.value) == (
        "error[plugin]: hardware 'x1' cannot be used\n"
        "  plugin: hardware:x1 from rpeg-plugin-x1 0.1.0\n"
        "  status: incompatible\n"
        "  reason: needs rpeg-core >=9, 0.1.0 is installed\n"
        "hint: pip install --upgrade rpeg-core rpeg-plugin-x1"
    )


def test_a_disabled_plugin_is_no_problem_but_an_entry_that_disables_nothing_is(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    registry = installed.registry(disabled=["hardware:x1", "x2"])
    assert registry.records("hardware") == ()
    assert registry.problems == ("RPEG_DISABLE_PLUGINS names 'x2', which is not installed",)


def test_the_variable_is_read_when_the_caller_disables_nothing(installed, monkeypatch) -> None:
    from rpeg_core.plugins.registry import Registry

    installed.hardware("rpeg-plugin-x1", "x1")
    monkeypatch.setenv("RPEG_DISABLE_PLUGINS", "x1")
    assert Registry(entry_points=installed.entry_points).records("hardware") == ()


def test_a_strict_registry_turns_every_failure_into_the_error(installed) -> None:
    installed.hardware("rpeg-plugin-good", "good")
    installed.add("rpeg-plugin-zap", "rpeg.hardware", "zap", "1/0\n")
    with pytest.raises(PluginError, match="plugin 'hardware:zap' cannot be used"):
        installed.registry(strict=True).get("hardware", "good")


def test_two_distributions_with_the_same_entry_point_are_both_unused_and_both_named(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    installed.hardware("other-x1", "x1", version="2.0")
    registry = installed.registry()
    with pytest.raises(PluginError) as caught:
        registry.get("hardware", "x1")
    assert str(caught.value) == (
        "error[plugin]: hardware 'x1' cannot be used\n"
        "  plugin: hardware:x1 from other-x1 2.0\n"
        "  status: duplicate\n"
        "  reason: hardware 'x1' is offered by other-x1 2.0 and rpeg-plugin-x1 0.1.0\n"
        "hint: pip uninstall one of them"
    )


def test_two_plugins_with_the_same_record_are_both_unused_and_both_named(installed) -> None:
    installed.hardware("rpeg-plugin-a", "a", "same", "only-a")
    installed.hardware("rpeg-plugin-b", "b", "same")
    installed.hardware("rpeg-plugin-c", "c")
    registry = installed.registry()
    assert names(registry.records("hardware")) == ["c"]
    message = "hardware 'same' is offered by rpeg-plugin-a 0.1.0 and rpeg-plugin-b 0.1.0"
    assert [(str(info.status), info.message) for info in registry.plugins()] == [
        ("duplicate", message),
        ("duplicate", message),
        ("ok", ""),
    ]
    for name in ("same", "only-a"):
        with pytest.raises(PluginError) as caught:
            registry.get("hardware", name)
        assert caught.value.facts[2] == f"reason: {message}"


def test_installing_a_package_that_adds_a_term_to_a_cost_model_of_another_changes_no_score(installed) -> None:
    installed.costs("rpeg-plugin-toy", "toy", "toy.a", "toy.b")
    installed.costs("intruder", "extra", "toy.c")
    with pytest.raises(PluginError) as caught:
        installed.registry().cost_terms(["toy"])
    assert caught.value.facts[2] == "reason: cost 'toy' is offered by intruder 0.1.0 and rpeg-plugin-toy 0.1.0"


def test_cost_terms_follow_the_selection_then_the_name_each_once(installed) -> None:
    installed.costs("rpeg-plugin-toy", "toy", "toy.b", "toy.a")
    installed.costs("rpeg-plugin-fix", "fix", "fix.z", "fix.y")
    registry = installed.registry()
    assert names(registry.cost_terms(["toy", "fix"])) == ["toy.a", "toy.b", "fix.y", "fix.z"]
    assert names(registry.cost_terms(["fix.z", "toy.b", "fix", "toy"])) == [
        "fix.z",
        "toy.b",
        "fix.y",
        "toy.a",
    ]
    assert registry.cost_terms([]) == ()


def test_an_unknown_term_of_a_known_model_gets_a_suggestion(installed) -> None:
    installed.costs("rpeg-plugin-toy", "toy", "toy.gemm")
    with pytest.raises(MissingPluginError) as caught:
        installed.registry().cost_terms(["toy", "toy.gem"])
    assert str(caught.value) == (
        "error[missing-plugin]: no installed plugin offers cost 'toy.gem'\n"
        "  installed: toy, toy.gemm\n"
        "hint: did you mean 'toy.gemm'?"
    )


def test_naming_a_term_of_a_broken_cost_plugin_makes_its_failure_the_error(installed) -> None:
    installed.add("rpeg-plugin-toy", "rpeg.costs", "toy", "1/0\n")
    with pytest.raises(PluginError, match=r"cost 'toy\.gemm' cannot be used"):
        installed.registry().cost_terms(["toy.gemm"])


def observer(installed, name: str, *, body: str = "pass", check: str = "return []"):
    module = installed.add(f"rpeg-plugin-{name}", "rpeg.hardware", name, OBSERVER.format(body=body, check=check))
    return lambda: sys.modules[module].seen


def test_an_exception_in_an_observer_is_reported_once_and_stops_nobody(installed) -> None:
    bad = observer(installed, "bad", body="raise SystemExit('no')")
    good = observer(installed, "good")
    registry = installed.registry()
    registry.load("hardware")
    for step in range(3):
        registry.observers("rpeg_step_finished", plan=None, step=step, metrics={})
    assert (bad(), good()) == ([0, 1, 2], [0, 1, 2])
    assert registry.problems == (
        "plugin hardware:bad (rpeg-plugin-bad 0.1.0): rpeg_step_finished() raised SystemExit: no",
    )


def test_observers_of_a_plugin_that_is_not_used_are_not_called(installed) -> None:
    first = observer(installed, "first")
    source = "\n@hookimpl\ndef rpeg_search_strategies():\n    return 3\n"
    observer(installed, "second")
    module = installed.add("rpeg-plugin-s", "rpeg.search", "s", OBSERVER.format(body="pass", check="pass") + source)
    registry = installed.registry()
    registry.load("hardware")
    registry.load("search")
    registry.observers("rpeg_step_finished", plan=None, step=7, metrics={})
    assert first() == [7]
    assert sys.modules[module].seen == []


def test_diagnostics_are_attributed_and_a_check_that_fails_is_a_problem(installed) -> None:
    warn = "yield Diagnostic(severity=Severity.WARNING, message='hm')"
    observer(installed, "a", check=warn)
    observer(installed, "b", check="raise ValueError('oops')")
    observer(installed, "c", check="return 'hm'")
    registry = installed.registry()
    registry.load("hardware")
    (found,) = registry.check_plan(object())
    assert (found.diagnostic.message, found.plugin, found.distribution, found.version) == (
        "hm",
        "hardware:a",
        "rpeg-plugin-a",
        "0.1.0",
    )
    assert registry.problems == (
        "plugin hardware:b (rpeg-plugin-b 0.1.0): rpeg_check_plan() raised ValueError: oops",
        "plugin hardware:c (rpeg-plugin-c 0.1.0): rpeg_check_plan() returned str, not Diagnostic records",
    )


def test_two_registries_share_nothing(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    one, other = installed.registry(), installed.registry(disabled=["x1"])
    assert (names(one.records("hardware")), names(other.records("hardware"))) == (["x1"], [])
    assert names(installed.registry().records("hardware")) == ["x1"]


def test_a_misspelt_name_gets_the_distribution_that_exists(installed):
    with pytest.raises(MissingPluginError) as raised:
        installed.registry().get("search", "anealing")
    assert str(raised.value).endswith("hint: pip install rpeg-plugin-annealing")
