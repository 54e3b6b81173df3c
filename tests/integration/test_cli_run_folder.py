"""``rpeg run --output``: files, steps as lines, resuming, stopping and failing, with a backend that trains nothing."""

from __future__ import annotations

import errno
import fcntl
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from rpeg_core.planning.plan import load_plan
from rpeg_core.runtime.trace import Trace

STEPS = 6

TOY = """
import contextlib, errno, json, os, signal, sys
import attrs
from rpeg_core import BackendSpec, hookimpl, setting
from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.trace import Stopped, Trace, TraceHeader
from rpeg_plugin_simulator import SIMULATOR, Settings as Simulated

requests = []

@attrs.frozen(kw_only=True)
class Settings:
    steps: int = setting(6, help="Steps.", minimum=1)
    stop_at: int = setting(-1, help="Press Ctrl-C at the end of this step.")
    signal: str = setting("SIGINT", help="Or send another signal.")
    fail: bool = setting(False, help="Fail at the end.")
    full: bool = setting(False, help="Find the disk full.")
    refuse: bool = setting(False, help="Refuse to begin.")
    begin: bool = setting(False, help="With refuse: write the trace of a run that began nothing.")

class Session(contextlib.AbstractContextManager):
    def __init__(self, plan, settings):
        self.inner, self.settings = SIMULATOR.open(plan, Simulated(steps=settings.steps)), settings

    def __exit__(self, *error):
        pass

    def run(self, request):
        requests.append(request)
        if self.settings.full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        if self.settings.refuse:
            if self.settings.begin:
                header = TraceHeader(plan="sha256:0", backend="toy", steps=6, clock="wall")
                Trace(header, (Stopped(0.0, "no data", 0),)).write(request.output / "trace.jsonl")
            raise BackendError("there is nothing left to do")
        request.status("starting 2 workers")

        def finished(step, metrics):
            found = {"step": step, **metrics, "actor_training/reward": step / 10, "kl": 0.5,
                     "seconds/actor_training": 0.25}
            if request.output is not None:
                with open(request.output / "metrics.jsonl", "a") as file:
                    file.write(json.dumps(found) + "\\n")
            request.step_finished(step, {key: value for key, value in found.items() if key != "step"})
            if step == self.settings.stop_at:
                os.kill(os.getpid(), getattr(signal, self.settings.signal))

        trace = self.inner.run(RunRequest(steps=request.steps, step_finished=finished, cancelled=request.cancelled))
        trace = Trace(attrs.evolve(trace.header, backend="toy", clock="wall", notes=()), trace.records)
        if request.output is not None:
            trace.write(request.output / "trace.jsonl")
        if self.settings.fail:
            raise ExecutionError("worker of rank 1 was lost", facts=["it was running actor_training@3"])
        return trace

@hookimpl
def rpeg_backends():
    yield BackendSpec(name="toy", summary="x", can=frozenset({"execute"}), probe=lambda: None, open=Session,
                      settings=Settings)
"""


@pytest.fixture
def run(rpeg: Callable[..., Any], experiment: Callable[..., Path], installed: Any) -> Callable[..., Any]:
    """Plan, install the backend ``toy``, and run the plan with it."""
    experiment()
    assert rpeg("plan", "experiment.yaml").code == 0
    module = installed.add("toy", "rpeg.backends", "toy", TOY)

    def ran(*arguments: object) -> Any:
        return rpeg("run", "plan.json", "--backend", "toy", *arguments)

    ran.module = module  # type: ignore[attr-defined]
    return ran


def test_the_folder_has_the_plan_the_trace_and_the_metrics(run: Callable[..., Any], rpeg: Callable[..., Any]) -> None:
    ran = run("--output", "out/deep")
    assert ran.code == 0
    folder = Path("out/deep")
    assert sorted(path.name for path in folder.iterdir()) == [
        "metrics.jsonl",
        "plan.json",
        "trace.jsonl",
        "trace.perfetto.json",
    ]
    assert load_plan(folder / "plan.json").digest == load_plan("plan.json").digest
    assert json.loads((folder / "trace.perfetto.json").read_text())["traceEvents"]
    assert "next: rpeg verify out/deep" in ran.out
    verified = rpeg("verify", "out/deep")
    assert (verified.code, verified.err) == (0, "")
    assert verified.out.startswith(
        f"{folder / 'trace.jsonl'}: what ran is what {folder / 'plan.json'} planned: 6 steps"
    )


def test_without_a_terminal_each_step_is_a_line(run: Callable[..., Any]) -> None:
    lines = run("--steps", 4).err.splitlines()
    assert lines[0] == "starting 2 workers"
    assert [line.split("  ")[:3] for line in lines[1:]] == [
        [f"step {step + 1} of 4", f"reward {step / 10:.4g}", "KL 0.5"] for step in range(4)
    ]
    assert all("tok/s" in line and "(predicted " in line for line in lines[1:])


def test_the_tables_set_the_first_step_apart_and_the_reward_is_drawn(run: Callable[..., Any]) -> None:
    ran = run()
    rows = {row[0]: row[1:] for row in ran.table("predicted and executed")}
    assert list(rows) == ["", "predicted", "executed", "executed / predicted", "first step"]
    assert rows["executed"][2] in {f"median of 5 steps, {verdict} the interval" for verdict in ("inside", "outside")}
    assert rows["first step"][2] == "not counted above"
    picture = ran.out.split("reward by step\n")[1].splitlines()
    assert picture[0].startswith("0.5 |")
    assert "final reward 0.3, mean of the last 5 steps; 0 in step 1" in ran.out


def test_json_is_one_document_with_every_step(run: Callable[..., Any]) -> None:
    ran = run("--json", "--output", "out")
    document = json.loads(ran.out)
    assert [(each["step"], each["actor_training/reward"]) for each in document["metrics"]] == [
        (step, step / 10) for step in range(STEPS)
    ]
    trace = Trace.read("out/trace.jsonl")
    ends = {node.node: (node.step, end) for node, _, end in trace.intervals()}
    first = max(end for step, end in ends.values() if step == 0)
    assert document["first_step_s"] == pytest.approx(first)
    assert (document["interrupted"], document["clock"]) == (None, "wall")


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_a_signal_shows_what_was_done_and_ends_with_130(
    run: Callable[..., Any], rpeg: Callable[..., Any], name: str
) -> None:
    ran = run("--set", "toy.stop_at=2", "--set", f"toy.signal={name}", "--steps", 50, "--output", "out")
    assert ran.code == 130
    assert "stopping when what runs is done" in ran.err
    assert ran.out.startswith("toy executed 3 of 50 steps of plan.json (wall time)\nstopped: interrupted\n")
    assert [row[0] for row in ran.table("time in one step")][1:]
    verified = rpeg("verify", "out")
    assert verified.code == 0
    assert "stopped (interrupted) with 3 of 50 steps complete" in verified.out


def test_a_run_stopped_in_its_first_step_has_no_tables(run: Callable[..., Any]) -> None:
    ran = run("--steps", 1, "--json")
    document = json.loads(ran.out)
    assert (document["steps"], document["first_step_s"]) == (1, None)


def test_a_run_that_fails_ends_with_5_and_says_where_to_look(run: Callable[..., Any]) -> None:
    ran = run("--set", "toy.fail=true", "--output", "out")
    assert (ran.code, ran.out) == (5, "")
    assert ran.err.endswith(
        "error[execution]: worker of rank 1 was lost\n  it was running actor_training@3\n  what was done is in out\n"
    )
    assert Path("out/trace.perfetto.json").exists()


def test_a_folder_with_a_run_is_kept_unless_it_is_resumed(run: Callable[..., Any]) -> None:
    assert run("--output", "out").code == 0
    again = run("--output", "out")
    assert (again.code, again.out) == (2, "")
    assert "error[usage]: out holds a run\n  it has trace.jsonl\nhint: --resume goes on with it" in again.err
    before = Path("out/trace.jsonl").read_text()
    assert run("--output", "out", "--resume").code == 0
    assert Path("out/trace.1.jsonl").read_text() == before
    assert run("--output", "out", "--resume").code == 0
    assert Path("out/trace.2.jsonl").exists()
    assert Path("out/trace.2.perfetto.json").exists()


def test_there_must_be_something_to_resume(run: Callable[..., Any]) -> None:
    assert "--resume needs the folder of the run\nhint: --output DIR" in run("--resume").err
    ran = run("--resume", "--output", "missing")
    assert (ran.code, Path("missing").exists()) == (2, False)
    assert "there is no run in missing to resume" in ran.err


def test_the_folder_of_another_plan_is_refused(
    run: Callable[..., Any], rpeg: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    assert run("--output", "out").code == 0
    Path("out/trace.jsonl").unlink()
    shutil.copy("plan.json", "first.json")
    experiment(workload={"prompts": 128})
    assert rpeg("plan", "experiment.yaml").code == 0
    ran = run("--output", "out")
    assert ran.code == 4
    assert "error[plan-file]: out/plan.json is another plan" in ran.err


def test_a_folder_that_cannot_be_made_is_refused_before_the_run(run: Callable[..., Any]) -> None:
    Path("file").write_text("")
    ran = run("--output", "file/out")
    assert (ran.code, ran.out) == (4, "")
    assert "error[plan-file]: cannot write file/out" in ran.err


def test_a_resumption_that_is_refused_leaves_the_run_as_it_was(
    run: Callable[..., Any], rpeg: Callable[..., Any]
) -> None:
    assert run("--output", "out").code == 0
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    refused = run("--output", "out", "--resume", "--set", "toy.refuse=true")
    assert "there is nothing left to do" in refused.err
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
    assert rpeg("verify", "out").code == 0


def test_the_folder_of_a_run_that_began_nothing_is_taken_again(
    run: Callable[..., Any], rpeg: Callable[..., Any], experiment: Callable[..., Path]
) -> None:
    nothing = ("--set", "toy.refuse=true", "--set", "toy.begin=true")
    assert run("--output", "out", *nothing).code != 0
    experiment(workload={"prompts": 128})
    assert rpeg("plan", "experiment.yaml").code == 0
    assert run("--output", "out").code == 0
    assert load_plan("out/plan.json").digest == load_plan("plan.json").digest
    assert not Path("out/trace.1.jsonl").exists()
    assert run("--output", "out", "--resume", *nothing).code != 0
    assert "out holds a run" in run("--output", "out").err


def test_two_runs_do_not_share_a_folder(run: Callable[..., Any]) -> None:
    assert run("--output", "out").code == 0
    number = os.open("out", os.O_RDONLY)
    fcntl.flock(number, fcntl.LOCK_EX)
    before = {path: path.read_bytes() for path in Path("out").iterdir()}
    refused = run("--output", "out", "--resume")
    os.close(number)
    assert (refused.code, refused.out) == (2, "")
    assert "error[usage]: a run is under way in out" in refused.err
    assert {path: path.read_bytes() for path in Path("out").iterdir()} == before
    assert run("--output", "out", "--resume").code == 0


def test_a_full_disk_is_a_run_that_failed(run: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    ran = run("--output", "out", "--set", "toy.full=true")
    assert (ran.code, ran.out) == (5, "")
    assert ran.err.endswith(
        "error[execution]: the run cannot go on: No space left on device\n  what was done is in out\n"
    )

    def full(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(Trace, "write_chrome", full)
    ran = run("--output", "two", "--set", "toy.fail=true")
    assert (ran.code, ran.err.count("worker of rank 1 was lost")) == (5, 1)
