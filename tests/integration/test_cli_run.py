"""``rpeg run``: what it prints, writes and refuses."""

from __future__ import annotations

import json
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpeg_core.errors import MissingPluginError
from rpeg_core.planning import recheck
from rpeg_core.planning.plan import load_plan
from rpeg_core.runtime.trace import Trace

STEPS = 5


@pytest.fixture
def plan(rpeg: Callable[..., Any], experiment: Callable[..., Path]) -> str:
    experiment(structure={"staleness": [1]})
    assert rpeg("plan", "experiment.yaml").code == 0
    return "plan.json"


def test_the_comparison_the_work_and_the_causes(rpeg: Callable[..., Any], plan: str) -> None:
    ran = rpeg("run", plan, "--steps", STEPS, "--set", "simulator.noise=0.3")
    assert ran.code == 0
    assert ran.out.startswith(f"simulator executed {STEPS} steps of plan.json (virtual time)\n")
    assert [row[0] for row in ran.table("predicted and executed")[1:]] == [
        "predicted",
        "executed",
        "executed / predicted",
    ]
    operators = {row[0]: row[1] for row in ran.table("time in one step")[1:]}
    assert operators == {name: str(a.allocation) for name, a in load_plan(plan).assignments.items()}
    assert "\na step takes " in ran.out
    assert "\nnoise and sampled lengths: " in ran.out


def test_json_and_the_trace_files_say_the_same(rpeg: Callable[..., Any], plan: str) -> None:
    ran = rpeg("run", plan, "--backend", "simulator", "--steps", STEPS, "--trace", "run.jsonl", "--json")
    document, trace = json.loads(ran.out), Trace.read("run.jsonl")
    assert (document["steps"], document["plan"]) == (STEPS, load_plan(plan).digest)
    assert document["makespan_s"] == trace.makespan_s
    assert document["tokens_per_s"] == pytest.approx(STEPS * 256 * 1512 / trace.makespan_s)
    assert document["predicted_step_s"] == load_plan(plan).prediction.step_s
    assert document["step_s"] == pytest.approx(document["predicted_step_s"], rel=0.5)
    assert document["operators"]["actor_training"]["busy_s_per_step"] == trace.busy_s()["actor_training"][0] / STEPS
    bars = [e for e in json.loads(Path(document["perfetto_file"]).read_text())["traceEvents"] if e["ph"] == "X"]
    assert {bar["args"]["node"] for bar in bars} == {node.node for node, _, _ in trace.intervals()}


def test_intervals_that_somebody_wrote_into_the_file_are_not_shown(rpeg: Callable[..., Any], plan: str) -> None:
    document = json.loads(Path(plan).read_text())
    own = document["intervals"]
    assert own["step_s"] is not None
    names = list(own["operator_s"])
    forged = own | {"step_s": [0.001, 0.002], "operator_s": {name: [0.001, 0.002] for name in names}}
    Path(plan).write_text(json.dumps(document | {"intervals": forged}))
    ran = rpeg("run", plan, "--steps", STEPS, "--json")
    assert (ran.code, json.loads(ran.out)["intervals"]) == (0, own)


def test_intervals_of_a_plan_that_cannot_be_evaluated_again_are_left_out(
    rpeg: Callable[..., Any], plan: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def missing(*_: Any) -> Any:
        raise MissingPluginError("no cost model")

    monkeypatch.setattr(recheck, "recheck", missing)
    assert json.loads(rpeg("run", plan, "--steps", STEPS, "--json").out)["intervals"] is None


def test_settings_come_from_the_experiment_then_the_command(
    rpeg: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    experiment(settings={"simulator": {"steps": 3}})
    assert rpeg("plan", "experiment.yaml").code == 0
    assert json.loads(rpeg("run", "plan.json", "--json").out)["steps"] == 3
    assert json.loads(rpeg("run", "plan.json", "--json", "--set", "simulator.steps=4").out)["steps"] == 4


def test_a_setting_of_something_else_is_refused(rpeg: Callable[..., Any], plan: str) -> None:
    ran = rpeg("run", plan, "--set", "annealing.seed=1")
    assert (ran.code, ran.out) == (2, "")
    assert ran.err == textwrap.dedent("""\
        error[usage]: --set annealing.seed=1 does not belong to backend 'simulator'
          allowed: simulator.KEY=VALUE; all else was settled when the plan was made
        """)


def test_an_unknown_backend_is_named_with_the_installed_ones(rpeg: Callable[..., Any], plan: str) -> None:
    ran = rpeg("run", plan, "--backend", "simulater")
    assert ran.code == 3
    assert "did you mean 'simulator'?" in ran.err


def test_a_trace_that_cannot_be_written_is_refused_before_the_run(rpeg: Callable[..., Any], plan: str) -> None:
    ran = rpeg("run", plan, "--trace", "missing/run.jsonl")
    assert (ran.code, ran.out) == (4, "")
    assert "cannot write missing/run.jsonl" in ran.err


BACKEND = """
from rpeg_core import BackendSpec, Diagnostic, Severity, hookimpl

seen = []

@hookimpl
def rpeg_backends():
    does = lambda plan, settings: None
    yield BackendSpec(name="toy", summary="x", can=frozenset({{{can!r}}}), probe=lambda: {probe!r},
                      **{{{{"execute": "open", "export": "render"}}[{can!r}]: does}})

@hookimpl
def rpeg_check_plan(plan):
    yield Diagnostic(severity=Severity.{severity}, message="no such kernel")

@hookimpl
def rpeg_run_started(plan):
    seen.append("started")

@hookimpl
def rpeg_step_finished(step, metrics):
    seen.append((step, metrics["time_s"]))

@hookimpl
def rpeg_run_finished(trace):
    seen.append(trace.makespan_s)
"""


@pytest.mark.parametrize(
    ("can", "probe", "severity", "expected"),
    [
        ("export", None, "WARNING", "error[backend]: backend 'toy' cannot execute a plan\n  it can: export\n"),
        ("execute", "no GPU", "WARNING", "error[backend]: backend 'toy' cannot be used on this machine\n  no GPU\n"),
        ("execute", None, "ERROR", "error[backend]: the plan cannot be run\n  backend:toy: no such kernel\n"),
    ],
    ids=["exports only", "wrong machine", "error remark"],
)
def test_backends_and_checks_that_refuse(
    rpeg: Callable[..., Any], plan: str, installed: Any, can: str, probe: str | None, severity: str, expected: str
) -> None:
    installed.add("toy", "rpeg.backends", "toy", BACKEND.format(can=can, probe=probe, severity=severity))
    ran = rpeg("run", plan, "--backend", "toy")
    assert ran.code == 3
    assert expected in ran.err


def test_observers_are_told_and_remarks_are_shown(rpeg: Callable[..., Any], plan: str, installed: Any) -> None:
    source = BACKEND.format(can="export", probe=None, severity="WARNING")
    module = installed.add("toy", "rpeg.backends", "toy", source)
    ran = rpeg("run", plan, "--steps", STEPS, "--json")
    assert ran.code == 0
    assert "no such kernel" in ran.err
    first, *steps, last = sys.modules[module].seen
    assert (first, last) == ("started", json.loads(ran.out)["makespan_s"])
    assert [step for step, _ in steps] == list(range(STEPS))
    assert steps[-1][1] == last
