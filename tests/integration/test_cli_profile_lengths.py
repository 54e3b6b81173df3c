"""``rpeg profile-lengths``: what it measures, writes, says and refuses; the backend is a script."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpeg_core.spec.experiment import load_experiment

BACKEND = """
import attrs
from rpeg_core import BackendSpec, hookimpl, setting
from rpeg_core.runtime.lengths import Response


@attrs.frozen(kw_only=True)
class Settings:
    batches: int = setting(2, help="x")
    end: int = setting(400, help="x")
    stop_after: int = setting(100, help="x")


def profile(request, settings):
    import os, signal
    limit = request.experiment.workload.response_tokens
    for batch in range(settings.batches):
        if batch == settings.stop_after:
            os.kill(os.getpid(), signal.SIGINT)
        if request.cancelled():
            return
        size = request.responses // settings.batches
        lengths = [1 + (settings.end * i) // size for i in range(size)]
        request.measured([Response(min(n, limit), n > limit) for n in lengths])


@hookimpl
def rpeg_backends():
    yield BackendSpec(name="script", summary="x", can=frozenset({"execute"}), probe=lambda: None,
                      open=lambda plan, settings: None, profile=profile, settings=Settings)
    yield BackendSpec(name="deaf", summary="x", can=frozenset({"execute"}), probe=lambda: None,
                      open=lambda plan, settings: None)
"""


@pytest.fixture
def profile(rpeg: Callable[..., Any], experiment: Callable[..., Path], installed: Any) -> Callable[..., Any]:
    """``profile(*arguments)`` on an experiment of 1,000 tokens whose actor answers with 1 to 400."""
    installed.add("script", "rpeg.backends", "script", BACKEND)
    experiment(workload={"response_tokens": 1000})
    return lambda *arguments: rpeg("profile-lengths", "experiment.yaml", "--backend", "script", *arguments)


def test_the_file_is_what_the_experiment_reads(profile: Any, experiment: Callable[..., Path]) -> None:
    ran = profile("--prompts", 200)
    assert ran.code == 0, ran.err
    assert Path("lengths.csv").read_text() == "fraction,tokens\n0.5,197\n0.85,337\n1,1000\n"
    found = load_experiment(experiment(workload={"response_tokens": 1000, "response_lengths": "lengths.csv"}))
    assert [(q.fraction, q.tokens) for q in found.workload.response_lengths] == [(0.5, 197), (0.85, 337), (1.0, 1000)]


def test_numbers_and_histogram(profile: Any) -> None:
    lines = profile("--prompts", 200, "--quantiles", "0.25,0.75").out.splitlines()
    assert lines[:5] == [
        "responses\t200",
        "mean tokens\t199",
        "median tokens\t199",
        "longest\t397",
        "at the limit\t0.0% (0 at 1000 tokens)",
    ]
    bars = [line for line in lines if "#" in line]
    assert len(bars) == 12
    assert sum(int(bar.split()[-1]) for bar in bars) == 200
    assert lines[-2:] == [
        "written: lengths.csv",
        "next: workload.response_lengths: lengths.csv in experiment.yaml, then rpeg plan",
    ]
    assert Path("lengths.csv").read_text() == "fraction,tokens\n0.25,97\n0.75,297\n1,1000\n"


def test_json_has_everything(profile: Any) -> None:
    ran = profile("--json", "--prompts", 8, "-o", "other.csv", "--set", "script.end=4000")
    document = json.loads(ran.out)
    assert document["responses"] == 8
    assert (document["cut_share"], document["max_tokens"], document["limit_tokens"]) == (0.75, 1000, 1000)
    assert document["response_lengths"] == [[1.0, 1000]]
    assert document["lengths_file"] == "other.csv"
    assert sum(entry["responses"] for entry in document["histogram"]) == 8
    assert [line for line in ran.err.splitlines() if line.startswith("warning: ")] == [
        f"warning: {text}" for text in document["warnings"]
    ]
    assert any("75% of the responses have no end" in text for text in document["warnings"])
    assert any("names no weights" in text for text in document["warnings"])


def test_ctrl_c_keeps_what_was_measured(profile: Any) -> None:
    ran = profile("--prompts", 200, "--set", "script.stop_after=1")
    assert ran.code == 130
    assert ran.err.splitlines()[-1] == "interrupted: lengths.csv is of 100 of 200 responses"
    assert Path("lengths.csv").read_text().startswith("fraction,tokens\n0.5,197\n")


def test_ctrl_c_before_the_first_response_leaves_no_file(profile: Any) -> None:
    ran = profile("--set", "script.stop_after=0")
    assert (ran.code, ran.out) == (130, "")
    assert not Path("lengths.csv").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "text"),
    [
        (("--quantiles", "0.5,0.4"), 2, "'0.5,0.4' is not a list of increasing shares above 0 and up to 1"),
        (("--quantiles", "0,1"), 2, "is not a list of increasing shares"),
        (("--quantiles", "0.5,1.5"), 2, "is not a list of increasing shares"),
        (("--quantiles", "half"), 2, "is not a list of increasing shares"),
        (("--quantiles", "0.5,nan"), 2, "is not a list of increasing shares"),
        (("--prompts", "0"), 2, "0 is not in the range"),
        (("-o", "missing/lengths.csv"), 4, "cannot write missing/lengths.csv"),
        (("-o", "experiment.yaml"), 4, "it is the input"),
        (("--set", "annealing.seed=1"), 2, "does not belong to backend 'script'"),
        (("--backend", "deaf"), 3, "backend 'deaf' cannot measure lengths"),
    ],
)
def test_bad_input_is_one_error(profile: Any, arguments: tuple[str, ...], code: int, text: str) -> None:
    ran = profile(*arguments)
    assert (ran.code, ran.out) == (code, "")
    assert text in ran.err
    assert ran.err.count("error[") == 1
    assert not Path("lengths.csv").exists()


def test_an_algorithm_that_generates_nothing_is_refused(profile: Any, experiment: Callable[..., Path]) -> None:
    models = {"actor": {"config": "meta-llama/Llama-3.1-8B"}, "reference": {"same_as": "actor"}}
    path = experiment()
    path.write_text(
        json.dumps(
            {
                "algorithm": "dpo",
                "models": models,
                "workload": {"prompts": 8, "rollouts_per_prompt": 2, "prompt_tokens": 8, "response_tokens": 8},
                "cluster": {"hardware": "gh200"},
            }
        )
    )
    ran = profile()
    assert ran.code == 2
    assert "generates no responses" in ran.err


def test_several_backends_need_a_name(rpeg: Callable[..., Any], profile: Any) -> None:
    ran = rpeg("profile-lengths", "experiment.yaml")
    assert ran.code == 2
    assert "--backend is missing\n  allowed: megatron, script" in ran.err


def test_long_responses_without_lengths_are_warned_of_once(
    rpeg: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    experiment(workload={"response_tokens": 1024})
    ran = rpeg("plan", "experiment.yaml", "--json")
    warnings = json.loads(ran.out)["warnings"]
    assert len(warnings) == 1
    assert "`rpeg profile-lengths`" in warnings[0]
    assert ran.err.count("rpeg profile-lengths") == 1
    swept = rpeg("sweep", "experiment.yaml", "--response-tokens", "1024,2048", "--gpus", "32")
    assert swept.err.count("rpeg profile-lengths") == 1
    again = rpeg("predict", "plan.json", "--json")
    assert json.loads(again.out)["warnings"] == warnings
    assert again.err.count("rpeg profile-lengths") == 1


@pytest.mark.parametrize(
    "workload",
    [{"response_tokens": 1023}, {"response_tokens": 1024, "response_lengths": [[0.5, 300], [1.0, 1024]]}],
    ids=["short", "measured"],
)
def test_no_warning_where_lengths_are_known_or_matter_little(
    rpeg: Callable[..., Any], experiment: Callable[..., Path], workload: dict[str, Any]
) -> None:
    experiment(workload=workload)
    ran = rpeg("plan", "experiment.yaml", "--json")
    assert json.loads(ran.out)["warnings"] == []
    assert "profile-lengths" not in ran.err
