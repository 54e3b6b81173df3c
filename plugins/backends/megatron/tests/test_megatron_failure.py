"""Workers that die, fail, fall silent or hang: the run ends soon, says what happened, and leaves nothing behind."""

from __future__ import annotations

import json
import multiprocessing
import os
import re
import selectors
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_fake import FAKE, is_running, listening_ports, pids
from megatron_plans import at, experiment, make_plan
from rpeg_plugin_megatron.crew import Crew, _Member
from rpeg_plugin_megatron.messages import Alive
from rpeg_plugin_megatron.session import MegatronSession
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import ExecutionError
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.verify import verify_plan

TOGETHER_S = 15.0
"""From the loss of a worker to the end of the run."""


@pytest.fixture(scope="module")
def plan() -> Plan:
    """GRPO, data parallel on two GPUs."""
    return make_plan(experiment("grpo"), {"": at("0-1", dp=2)})


@pytest.fixture
def notes(tmp_path: Path) -> Path:
    folder = tmp_path / "notes"
    folder.mkdir()
    return folder


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def fail(plan: Plan, output: Path, **settings: Any) -> ExecutionError:
    """Run until it fails; the workers' notes are in ``notes``."""
    with (
        pytest.raises(ExecutionError) as caught,
        MegatronSession(plan, Settings(**settings), worker=FAKE) as session,
    ):
        session.run(RunRequest(steps=50, output=output))
    assert caught.value.exit_code is ExitCode.EXECUTION_FAILED
    return caught.value


def check_the_end(plan: Plan, output: Path, notes: Path, error: ExecutionError, steps_done: int) -> None:
    """Nothing is left, and the trace is valid as far as the run went."""
    assert len(pids(notes)) == 2
    assert not any(map(is_running, pids(notes)))
    assert listening_ports() == set()
    verdict = verify_plan(plan, output / "trace.jsonl")
    assert verdict.findings == ()
    assert (verdict.stopped, verdict.steps_complete) == (error.what, steps_done)
    assert len((output / "metrics.jsonl").read_text().splitlines()) == steps_done


@pytest.mark.parametrize("operator", ["actor_generation", "actor_training"])
def test_a_worker_killed_in_the_middle_of_its_work(
    plan: Plan, output: Path, notes: Path, monkeypatch: pytest.MonkeyPatch, operator: str
) -> None:
    orders = {"folder": str(notes), "at": {"rank": 1, "operator": operator, "step": 2, "do": "hang"}}
    monkeypatch.setenv("FAKE", json.dumps(orders))
    killed_s: list[float] = []

    def kill() -> None:
        while not (notes / "at-1").exists():
            time.sleep(0.02)
        os.kill(int((notes / "pid-1").read_text()), signal.SIGKILL)
        killed_s.append(time.monotonic())

    killer = threading.Thread(target=kill)
    killer.start()
    error = fail(plan, output)
    killer.join()
    assert time.monotonic() - killed_s[0] < TOGETHER_S
    assert error.what == "the worker of GPU 1 was lost: its process was killed by SIGKILL"
    text = "\n".join(error.facts)
    pid = pids(notes)[1]
    assert f"worker 1: fake, process {pid} on " in text
    assert f"it was running {operator}@2 (operator {operator}, step 2, GPUs 0-1)" in text
    assert "steps done: 2 of 50" in text
    assert f"last words of worker 1 ({output / 'logs' / 'worker-1.log'}):\n  " in text
    assert "about to hang" in text
    check_the_end(plan, output, notes, error, 2)


def test_a_worker_that_raises_is_named_with_its_traceback(
    plan: Plan, output: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = {"folder": str(notes), "at": {"rank": 0, "operator": "actor_training", "step": 1, "do": "raise"}}
    monkeypatch.setenv("FAKE", json.dumps(orders))
    error = fail(plan, output)
    assert error.what == "the worker of GPU 0 was lost: ValueError: a made-up error"
    text = "\n".join(error.facts)
    assert "it was running actor_training@1" in text
    assert 'raise ValueError("a made-up error")' in text
    check_the_end(plan, output, notes, error, 1)


def test_a_worker_whose_words_are_unread_is_not_silent(plan: Plan, output: Path) -> None:
    """After a pause of the controller (Ctrl-Z and fg), a wait that ran out meanwhile reads nothing."""
    now = 0.0
    session = MegatronSession(plan, Settings(heartbeat_timeout_s=3.0), worker=FAKE)
    crew = Crew(session._crew(output)._launcher, plan, session._settings, FAKE, lambda: now)
    here, there = multiprocessing.Pipe()
    crew._members[0] = _Member(here, 1, "here", device="cpu")
    now = 20.0
    there.send(Alive(0))
    crew._look_around()
    assert not crew._lost
    here.recv()
    now = 40.0
    crew._selector.register(here, selectors.EVENT_READ, 0)
    crew._look_around()
    assert crew._lost[0].reason == "it has been silent for 40.0 s"


def test_a_frozen_worker_is_lost_when_it_has_been_silent_for_too_long(
    plan: Plan, output: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = {"folder": str(notes), "at": {"rank": 1, "operator": "actor_training", "step": 0, "do": "freeze"}}
    monkeypatch.setenv("FAKE", json.dumps(orders))
    error = fail(plan, output, heartbeat_timeout_s=3.0)
    assert time.time() - (notes / "at-1").stat().st_mtime < TOGETHER_S
    assert error.what.startswith("the worker of GPU 1 was lost: it has been silent for 3.")
    assert "it was running actor_training@0" in "\n".join(error.facts)
    check_the_end(plan, output, notes, error, 0)


def test_a_node_that_takes_too_long_is_shown_with_where_its_worker_is(
    plan: Plan, output: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = {"folder": str(notes), "at": {"rank": 1, "operator": "actor_generation", "step": 1, "do": "hang"}}
    monkeypatch.setenv("FAKE", json.dumps(orders))
    error = fail(plan, output, node_timeout_s=1.5)
    assert error.what.startswith(
        "actor_generation@1 (operator actor_generation, step 1, GPUs 0-1) has been running for"
    )
    assert error.facts[0] == "without a report: the workers of GPUs 1"
    text = "\n".join(error.facts)
    assert "the limit is 1.5 s" in text
    assert "in obey" in text  # the stack of the worker's main thread
    check_the_end(plan, output, notes, error, 1)


def test_a_worker_lost_while_a_checkpoint_is_written_leaves_no_complete_one(
    plan: Plan, output: Path, notes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders = {"folder": str(notes), "at": {"rank": 1, "operator": "checkpoint", "step": 4, "do": "exit"}}
    monkeypatch.setenv("FAKE", json.dumps(orders))
    error = fail(plan, output, checkpoint_every=2)
    assert error.what == (
        "the worker of GPU 1 was lost when it was to write the checkpoint: its process ended with exit status 3"
    )
    assert error.hint == "--resume goes on from the checkpoint after 2 steps"
    check_the_end(plan, output, notes, error, 4)
    assert sorted(path.name for path in (output / "checkpoints").iterdir()) == ["partial-00000004", "step-00000002"]


def wait_for(condition: Callable[[], bool], limit_s: float) -> None:
    deadline = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < deadline, "waited for too long"
        time.sleep(0.005)


def running_node(output: Path) -> tuple[str, int]:
    """(operator, step) of the operator that the trace so far shows running, if any."""
    found = ("", -1)
    path = output / "trace.jsonl"
    for line in path.read_text().splitlines()[-6:] if path.exists() else []:
        record = json.loads(line) if line.endswith("}") else {}
        if record.get("record") == "dispatch" and record["kind"] == "OP":
            found = (record["operator"], record["step"])
        elif record.get("record") == "end":
            found = ("", -1)
    return found


def children(pid: int) -> list[int]:
    return [int(text) for text in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def command(plan: Plan, folder: Path, steps: int) -> subprocess.Popen[str]:
    """``rpeg run`` with real workers."""
    plan.save(folder / "plan.json")
    arguments = ["run", "plan.json", "--backend", "megatron", "--output", "run", "--steps", str(steps)]
    return subprocess.Popen(
        [sys.executable, "-m", "rpeg_core", *arguments, "--set", "megatron.task=copy", "--set", "megatron.device=cpu"],
        cwd=folder,
        env={name: value for name, value in os.environ.items() if name != "FAKE"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture(scope="module")
def long_plan() -> Plan:
    """Operators that take a good part of a second each."""
    workload = {"prompts": 16, "rollouts_per_prompt": 4, "prompt_tokens": 6, "response_tokens": 60}
    document = experiment("grpo", workload={**workload, "bytes_per_element": 4})
    return make_plan(document, {"": at("0-1", dp=2)})


@pytest.mark.slow
@pytest.mark.parametrize("operator", ["actor_generation", "actor_training"])
def test_a_real_worker_killed_in_the_middle(long_plan: Plan, tmp_path: Path, operator: str) -> None:
    process = command(long_plan, tmp_path, 50)
    output = tmp_path / "run"
    wait_for(lambda: running_node(output)[0] == operator and running_node(output)[1] >= 1, 300.0)
    workers = children(process.pid)
    killed_s = time.monotonic()
    os.kill(workers[1], signal.SIGKILL)
    _, text = process.communicate(timeout=60)
    assert time.monotonic() - killed_s < TOGETHER_S
    assert process.returncode == ExitCode.EXECUTION_FAILED
    assert "error[execution]: the worker of GPU 1 was lost: its process was killed by SIGKILL" in text
    assert f"worker 1: cpu, process {workers[1]} on " in text
    assert re.search(rf"it was running {operator}@\d+ \(operator {operator}, step \d+, GPUs 0-1\)", text)
    assert not any(map(is_running, workers))
    verdict = verify_plan(long_plan, output / "trace.jsonl")
    assert verdict.findings == ()
    assert verdict.steps_complete >= 1


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_real_workers_after_the_current_nodes(
    long_plan: Plan, tmp_path: Path, number: signal.Signals
) -> None:
    process = command(long_plan, tmp_path, 50)
    output = tmp_path / "run"
    wait_for(lambda: running_node(output)[1] >= 1, 300.0)
    workers = children(process.pid)
    for pid in (process.pid, *(workers if number is signal.SIGINT else ())):  # a terminal sends Ctrl-C to all
        os.kill(pid, number)
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert not any(map(is_running, workers))
    verdict = verify_plan(long_plan, output / "trace.jsonl")
    assert verdict.findings == ()
    assert verdict.unfinished == ()
    assert verdict.stopped == "interrupted"


CONTROLLER = """
    import sys
    from pathlib import Path

    from rpeg_core.planning.plan import load_plan
    from rpeg_core.runtime.session import RunRequest
    from rpeg_plugin_megatron.session import MegatronSession
    from rpeg_plugin_megatron.settings import Settings

    plan, output = load_plan(sys.argv[1]), Path(sys.argv[2])
    with MegatronSession(plan, Settings(), worker=sys.argv[3]) as session:
        session.run(RunRequest(steps=50, output=output))
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_workers_end_when_their_controller_does(
    plan: Plan, output: Path, notes: Path, tmp_path: Path, number: signal.Signals
) -> None:
    """Killed, it can say nothing to them; interrupted, as by a second Ctrl-C, it ends them at once."""
    plan.save(tmp_path / "plan.json")
    orders = {"folder": str(notes), "at": {"rank": 1, "operator": "actor_training", "step": 1, "do": "hang"}}
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(CONTROLLER), tmp_path / "plan.json", output, FAKE],
        env={**os.environ, "FAKE": json.dumps(orders), "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stderr=subprocess.PIPE,
    )
    deadline = time.monotonic() + 60.0
    while not (notes / "at-1").exists() and time.monotonic() < deadline and process.poll() is None:
        time.sleep(0.05)
    workers = pids(notes)
    assert len(workers) == 2
    process.send_signal(number)
    process.communicate(timeout=90)
    deadline = time.monotonic() + 5.0
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not any(map(is_running, workers))
    verdict = verify_plan(plan, output / "trace.jsonl")
    if number is signal.SIGINT:
        assert verdict.findings == ()
        assert (verdict.stopped, verdict.steps_complete) == ("interrupted before what ran was finished", 1)
    else:  # what was written before is there, but for the end
        assert {finding.rule.name for finding in verdict.findings} == {"file", "nodes"}
        assert verdict.steps_complete == 1
