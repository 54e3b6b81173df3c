"""The conformance checks: bundled plugins pass; those of records, hardware and backends find what they should."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest

from rpeg_core import (
    AlphaBeta,
    BackendSpec,
    Device,
    GemmEfficiency,
    HardwareProfile,
    LinkTier,
    Registry,
    setting,
)
from rpeg_core.cli.show import numbers
from rpeg_core.errors import BackendError
from rpeg_core.plugins.kinds import KINDS
from rpeg_core.testing.conformance import (
    CheckFailedError,
    CheckSkippedError,
    Outcome,
    checks_for,
    conformance,
    parametrize_checks,
)

REPOSITORY = Path(__file__).parents[2]
OURS = {f"rpeg-plugin-{path.parent.name}" for path in REPOSITORY.glob("plugins/*/*/pyproject.toml")}


def installed_records() -> list[Any]:
    registry = Registry(disabled=frozenset())
    loaded = [record for kind in KINDS for record in registry.records(kind.name)]
    return [record.record for record in loaded if record.distribution in OURS]


@parametrize_checks(installed_records())
def test_bundled_plugins_conform(check: Callable[[], None]) -> None:
    check()


def failure(record: Any, name: str) -> str:
    """The message of a check that must fail."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # what the plugin raised counts too
        dict(checks_for(record))[name]()
    return str(caught.value)


def failed(record: Any) -> set[str]:
    return {result.check for result in conformance(record) if result.outcome is Outcome.FAILED}


# All kinds


@attrs.frozen(kw_only=True)
class RoundedSettings:
    width: float = setting(0.1, help="Read as text it is another number.")

    def __attrs_post_init__(self) -> None:
        object.__setattr__(self, "width", self.width + 1)


def test_something_else_than_a_record_is_a_type_error() -> None:
    with pytest.raises(TypeError, match="str is no record of a plugin; allowed: AlgorithmTemplate, HardwareProfile"):
        conformance("gh200")


def test_what_loading_refuses_fails_the_check_of_the_record() -> None:
    record = attrs.evolve(profile(), name="Acme One", summary="two\nlines")
    assert failed(record) == {"record"}
    assert failure(record, "record") == (
        "HardwareProfile 'Acme One': name must be lower-case letters, digits, '.', '_' and '-'; "
        "HardwareProfile 'Acme One': summary must be one line of text"
    )


def test_a_default_that_is_read_otherwise_from_the_command_line_fails() -> None:
    record = export(lambda plan, settings: {"a": ""}, settings=RoundedSettings)
    assert failure(record, "settings") == "the default of width is 1.1, as text it is read as 2.1"


def test_no_settings_class_fails() -> None:
    assert "it must be an attrs class" in failure(export(lambda plan, settings: {"a": ""}, settings=dict), "settings")


# Hardware


def profile(**changes: Any) -> HardwareProfile:
    def tier(latency_s: float, bandwidth_bytes_per_s: float) -> LinkTier:
        link = AlphaBeta(latency_s, bandwidth_bytes_per_s)
        return LinkTier(collective=link, p2p=link)

    values = {
        "name": "acme",
        "summary": "Acme One.",
        "gpus_per_node": 8,
        "device": Device(memory_bytes=8 * 10**10, memory_bandwidth_bytes_per_s=2e12, peak_flops_per_s=3e14),
        "tiers": (tier(1e-6, 3e11), tier(2e-6, 2e10), tier(3e-6, 1e10)),
        "efficiency": GemmEfficiency(gamma_m_rows=100.0, gamma_k_columns=0.0),
        "non_gemm_layer_s": 1e-4,
        "non_gemm_reference_batch": 8,
    }
    record = HardwareProfile(**{**values, **changes})
    return attrs.evolve(record, sources={path: "a data sheet" for path, _ in numbers(record)})


def test_a_complete_profile_conforms() -> None:
    assert failed(profile()) == set()


@pytest.mark.parametrize("source", ["", "  ", None])
def test_a_number_without_source_fails(source: str | None) -> None:
    record = profile()
    record = attrs.evolve(record, sources={**record.sources, "tiers.inter_rack.p2p.latency_s": source})
    assert failed(record) == {"sources"}
    assert failure(record, "sources") == "tiers.inter_rack.p2p.latency_s has no source"


def test_a_source_of_nothing_fails() -> None:
    record = profile()
    record = attrs.evolve(record, sources={**record.sources, "device.memory_byte": "a typing error"})
    assert failure(record, "sources") == "the source 'device.memory_byte' belongs to no number"


def test_a_farther_tier_that_is_faster_fails() -> None:
    near, far = LinkTier(collective=AlphaBeta(2e-6, 1e11), p2p=AlphaBeta(1e-6, 1e10)), profile().tiers[0]
    record = profile(tiers=(near, far, far))
    assert failed(record) == {"tiers"}
    message = failure(record, "tiers")
    assert (
        "tiers.inter_node.collective.latency_s is below that of tiers.intra_node.collective: 1e-06 < 2e-06" in message
    )
    assert "tiers.inter_node.p2p.bandwidth_bytes_per_s is above that of tiers.intra_node.p2p" in message
    assert "p2p.latency_s" not in message


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"gpus_per_node": 0}, "gpus_per_node is 0; allowed: a finite number > 0"),
        ({"gpus_per_node": 7.5}, "gpus_per_node is 7.5; allowed: a whole number"),
        ({"non_gemm_layer_s": -1.0}, "non_gemm_layer_s is -1.0; allowed: a finite number >= 0"),
        ({"price_per_gpu_hour": float("nan")}, "price_per_gpu_hour is nan; allowed: a finite number > 0"),
    ],
)
def test_an_impossible_quantity_fails(changes: dict[str, Any], message: str) -> None:
    assert failed(profile(**changes)) == {"quantities"}
    assert failure(profile(**changes), "quantities") == message


def test_a_profile_without_costs_fails() -> None:
    assert failed(profile(default_costs=())) == {"default-costs"}
    assert failed(profile(default_costs="analytical")) == {"default-costs"}


# Backends


def probe() -> str | None:
    return None


def export(render: Callable[..., Any], **changes: Any) -> BackendSpec:
    values = {"name": "acme", "summary": "An export.", "can": frozenset({"export"}), "probe": probe}
    return BackendSpec(**{**values, "render": render, **changes})


def refuse(plan: Any, settings: Any) -> Any:
    raise BackendError("models.actor is a toy")


def test_an_export_conforms() -> None:
    assert failed(export(lambda plan, settings: {"conf/plan.json": json.dumps(plan.document())})) == set()


@pytest.mark.parametrize("answer", [False, "", 3])
def test_a_probe_that_answers_neither_text_nor_none_fails(answer: object) -> None:
    record = export(lambda plan, settings: {"a": ""}, probe=lambda: answer)
    assert failure(record, "probe") == f"probe() returned {answer!r}; allowed: text or None"


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({}, "render returned {}; allowed: file name -> text, at least one"),
        (["a"], "render returned ['a']; allowed: file name -> text, at least one"),
        ({"a": b""}, "the content of 'a' is bytes, not text"),
        ({"/etc/a": ""}, "the file name '/etc/a' is not a relative path inside the output folder"),
        ({"a/../../b": ""}, "the file name 'a/../../b' is not a relative path inside the output folder"),
    ],
)
def test_an_export_that_is_not_files_of_text_fails(files: Any, message: str) -> None:
    assert failure(export(lambda plan, settings: files), "render") == message


def test_an_export_that_differs_each_time_fails() -> None:
    counter = itertools.count()
    record = export(lambda plan, settings: {"a": str(next(counter))})
    assert failure(record, "render") == "rendering a plan twice gives different files"


def test_an_export_that_refuses_the_sample_is_skipped() -> None:
    with pytest.raises(CheckSkippedError, match=r"it refuses the sample plan: models\.actor is a toy"):
        dict(checks_for(export(refuse)))["render"]()


def test_a_backend_that_imports_its_framework_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("vllm.py").write_text("")
    tmp_path.joinpath("fake_heavy.py").write_text("import vllm\n\ndef probe():\n    return None\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    import fake_heavy

    record = export(lambda plan, settings: {"a": ""}, probe=fake_heavy.probe)
    assert failure(record, "light") == "importing fake_heavy imports vllm"


# The decorator and the command


def test_an_expected_failure_carries_its_reason() -> None:
    mark = parametrize_checks([profile(gpus_per_node=0)], expected_failures={"acme-quantities": "sold without GPUs"})
    (marked,) = [parameter for parameter in mark.args[1] if parameter.marks]
    assert (marked.id, marked.marks[0].kwargs) == ("acme-quantities", {"reason": "sold without GPUs", "strict": True})


def test_an_expected_failure_that_names_no_check_is_an_error() -> None:
    with pytest.raises(ValueError, match="expected_failures names no check: acme-colour"):
        parametrize_checks([profile()], expected_failures={"acme-colour": "grey"})


def test_a_skipped_check_skips_the_test() -> None:
    mark = parametrize_checks([export(refuse)])
    check = next(parameter.values[0] for parameter in mark.args[1] if parameter.id == "acme-render")
    with pytest.raises(pytest.skip.Exception, match="it refuses the sample plan"):
        check()


def test_system_exit_and_prints_of_a_plugin_end_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    def render(plan: Any, settings: Any) -> Any:
        print("hello")
        raise SystemExit(3)

    results = {result.check: result for result in conformance(export(render))}
    assert (results["render"].outcome, results["render"].message) == (Outcome.FAILED, "SystemExit: 3")
    assert capsys.readouterr().out == ""


def test_check_prints_every_check_and_ends_with_3_when_one_failed(installed: Any) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    installed.add("rpeg-plugin-gone", "rpeg.hardware", "gone", "import nowhere_to_be_found")
    done = installed.rpeg("check")
    found = [line.split("\t") for line in done.stdout.splitlines()]
    assert done.returncode == 3
    assert found[0] == ["record", "check", "outcome", "message"]
    assert [row[:3] for row in found[1:]] == [
        ["hardware:gone", "loads", "failed"],
        ["hardware:x1", "record", "passed"],
        ["hardware:x1", "settings", "passed"],
        ["hardware:x1", "sources", "failed"],
        ["hardware:x1", "quantities", "passed"],
        ["hardware:x1", "tiers", "passed"],
        ["hardware:x1", "default-costs", "passed"],
        ["hardware:x1", "errors", "passed"],
    ]
    assert found[1][3] == "import-failed: ModuleNotFoundError: No module named 'nowhere_to_be_found'"
    assert "gpus_per_node has no source" in found[4][3]
    assert "2 of 8 checks failed" in done.stderr


@pytest.mark.parametrize("target", ["rpeg-plugin-x1", "hardware:x1-80gb", "hardware:x1"])
def test_check_takes_a_distribution_a_record_or_a_plugin(installed: Any, target: str) -> None:
    installed.hardware("rpeg-plugin-x1", "x1", "x1-80gb")
    installed.hardware("rpeg-plugin-y1", "y1")
    document = json.loads(installed.rpeg("check", target, "--json").stdout)
    assert {row["record"] for row in document["checks"]} == {"hardware:x1-80gb"}
    assert (document["schema"], document["ok"]) == (1, False)


def test_check_of_a_cost_model_is_of_all_its_terms(installed: Any) -> None:
    installed.costs("rpeg-plugin-toy", "toys", "toy.a", "toy.b", "other.c")
    document = json.loads(installed.rpeg("check", "cost:toy", "--json").stdout)
    assert {row["record"] for row in document["checks"]} == {"cost:toy.a", "cost:toy.b"}


def test_check_of_something_that_is_not_installed_is_an_error(installed: Any) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    done = installed.rpeg("check", "hardware:x2")
    assert (done.returncode, done.stdout) == (3, "")
    assert done.stderr == (
        "error[missing-plugin]: no installed plugin is called 'hardware:x2'\n"
        "  allowed: a distribution, or KIND:NAME as `rpeg list-plugins` and `rpeg show KIND` print them\n"
        "hint: did you mean 'hardware:x1'?\n"
    )


def test_a_disabled_plugin_fails_only_when_it_is_asked_about(installed: Any) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    off = {"RPEG_DISABLE_PLUGINS": "x1"}
    done = installed.rpeg("check", env=off)
    assert (done.returncode, done.stdout.splitlines()[1:]) == (
        0,
        ["hardware:x1\tloads\tskipped\tdisabled: named in RPEG_DISABLE_PLUGINS"],
    )
    assert installed.rpeg("check", "hardware:x1", env=off).returncode == 3


def test_check_with_nothing_installed_says_how_to_get_plugins(installed: Any) -> None:
    done = installed.rpeg("check")
    assert (done.returncode, done.stdout) == (0, "")
    assert done.stderr == "no plugins are installed\nhint: pip install 'rpeg-core[all]'\n"


def test_failures_are_assertions_for_other_test_runners() -> None:
    assert issubclass(CheckFailedError, AssertionError)
