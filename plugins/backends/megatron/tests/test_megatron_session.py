"""The session with workers that only pretend to work: files, metrics, the trace, cancelling, external workers."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from megatron_fake import FAKE, is_running, listening_ports, pids
from megatron_plans import at, experiment, make_plan
from rpeg_plugin_megatron.session import MegatronSession
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.errors import BackendError, DataError, ExecutionError
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.trace import Stopped, Trace, Transferred
from rpeg_core.runtime.verify import verify_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    """GRPO: the actor generates on GPU 0, all else is on GPU 1, so that data and weights travel."""
    return make_plan(experiment("grpo"), {"actor_generation": at("0"), "": at("1")})


@pytest.fixture
def orders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Any:
    """``orders(seconds=..., at=...)``: what the fake workers do; returns the folder of their notes."""
    notes = tmp_path / "notes"
    notes.mkdir()

    def give(**what: Any) -> Path:
        monkeypatch.setenv("FAKE", json.dumps({"folder": str(notes), **what}))
        return notes

    give()
    return give


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def run(plan: Plan, request: RunRequest, **settings: Any) -> Trace:
    with MegatronSession(plan, Settings(**settings), worker=FAKE) as session:
        return session.run(request)


def test_a_run_leaves_a_verified_trace_metrics_and_exports_and_no_process(
    plan: Plan, orders: Any, output: Path
) -> None:
    notes = orders()
    told: list[tuple[int, Mapping[str, float]]] = []
    words: list[str] = []
    request = RunRequest(steps=3, output=output, step_finished=lambda *step: told.append(step), status=words.append)
    trace = run(plan, request, threads_per_worker=3)

    assert Trace.read(output / "trace.jsonl") == trace
    verdict = verify_plan(plan, output / "trace.jsonl")
    assert verdict.findings == ()
    assert verdict.complete
    assert (trace.header.backend, trace.header.clock, trace.header.steps, trace.steps) == ("megatron", "wall", 3, 3)
    moved = [record for record in trace.records if isinstance(record, Transferred)]
    assert all(record.wire_bytes >= record.bytes > 0 for record in moved)

    assert [step for step, _ in told] == [0, 1, 2]
    losses = [metrics["actor_training/loss"] for _, metrics in told]
    assert losses == pytest.approx([0.9, 0.9 * 0.95, 0.9 * 0.95 * (1 - 0.1 / 3)])
    for _, metrics in told:
        assert metrics["actor_training/rank_max"] == 1.0
        assert metrics["tokens_per_s"] == pytest.approx(plan.workload.tokens_per_step / metrics["seconds"])
        assert metrics["seconds/actor_generation"] > 0.0
        assert metrics["transfer_seconds/reference_inference"] > 0.0
    assert [m["time_s"] for _, m in told] == pytest.approx(
        [sum(m["seconds"] for _, m in told[: k + 1]) for k in range(3)]
    )
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    assert lines == [{"step": step, **metrics} for step, metrics in told]

    assert words[0].startswith("starting 2 workers")
    assert words[1:] == ["running", "writing actor"]
    assert json.loads((output / "actor" / "weights.json").read_text()) == 1.0  # rank 0 never trained
    log = (output / "logs" / "worker-1.log").read_text()
    assert "threads 3, key False" in log
    assert "holds 1 artifacts" in log  # the weights that result
    assert not any(map(is_running, pids(notes)))
    assert listening_ports() == set()


def test_tensorboard_reads_the_events(plan: Plan, orders: Any, output: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(plan, RunRequest(steps=2, output=output))
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    assert [(e.step, round(e.value, 5)) for e in events.Scalars("actor_training/loss")] == [(0, 0.9), (1, 0.855)]


def test_without_a_folder_nothing_is_written_and_the_setting_gives_the_steps(
    plan: Plan, orders: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    orders()
    monkeypatch.chdir(tmp_path)
    trace = run(plan, RunRequest(), steps=2)
    assert trace.steps == 2
    trace.write(tmp_path / "trace.jsonl")
    assert verify_plan(plan, tmp_path / "trace.jsonl").complete
    assert {path.name for path in tmp_path.iterdir()} == {"notes", "trace.jsonl"}


def test_a_cancelled_run_finishes_its_nodes_and_stops(plan: Plan, orders: Any, output: Path) -> None:
    notes = orders(at={"rank": 0, "operator": "actor_generation", "step": 2, "do": "linger"})
    trace = run(plan, RunRequest(steps=100, output=output, cancelled=(notes / "at-0").exists))
    assert isinstance(trace.records[-1], Stopped)
    assert (trace.records[-1].reason, trace.records[-1].steps_done) == ("interrupted", 2)
    verdict = verify_plan(plan, output / "trace.jsonl")
    assert verdict.findings == ()
    assert (verdict.stopped, verdict.steps_complete, verdict.unfinished) == ("interrupted", 2, ())
    assert not (output / "actor").exists()
    assert not any(map(is_running, pids(notes)))


def test_a_run_cancelled_before_the_workers_are_ready_has_an_empty_trace(plan: Plan, orders: Any, output: Path) -> None:
    notes = orders(at={"rank": 1, "operator": "setup", "do": "hang"})
    trace = run(plan, RunRequest(output=output, cancelled=(notes / "at-1").exists))
    assert [type(record) for record in trace.records] == [Stopped]
    assert trace.steps == 0
    assert verify_plan(plan, output / "trace.jsonl").accepted
    assert not any(map(is_running, pids(notes)))


# Set-up that fails


def test_what_a_worker_refuses_on_purpose_is_what_the_user_reads(plan: Plan, orders: Any, output: Path) -> None:
    notes = orders(at={"rank": 1, "operator": "setup", "do": "refuse"})
    with pytest.raises(DataError, match=r"line 3 of prompts\.jsonl has no prompt") as caught:
        run(plan, RunRequest(output=output))
    assert caught.value.hint == "add one"
    assert verify_plan(plan, output / "trace.jsonl").stopped == "line 3 of prompts.jsonl has no prompt"
    assert not any(map(is_running, pids(notes)))


@pytest.mark.parametrize(
    ("do", "reason", "fact"),
    [
        ("raise", "ValueError: a made-up error", "raise ValueError"),
        ("exit", "its process ended with exit status 3", "about to exit"),
    ],
)
def test_a_worker_that_fails_in_its_setup(
    plan: Plan, orders: Any, output: Path, do: str, reason: str, fact: str
) -> None:
    notes = orders(at={"rank": 1, "operator": "setup", "do": do})
    with pytest.raises(ExecutionError) as caught:
        run(plan, RunRequest(output=output))
    assert caught.value.what == f"worker 1 failed while it was set up: {reason}"
    assert fact in "\n".join(caught.value.facts)
    assert verify_plan(plan, output / "trace.jsonl").stopped == caught.value.what
    assert not any(map(is_running, pids(notes)))


def test_workers_that_are_not_ready_in_time(plan: Plan, orders: Any, output: Path) -> None:
    notes = orders(at={"rank": 0, "operator": "setup", "do": "hang"})
    with pytest.raises(ExecutionError, match=r"workers 0 of 2 were not ready within 4 s") as caught:
        run(plan, RunRequest(output=output), setup_timeout_s=4.0)
    assert "about to hang" in "\n".join(caught.value.facts)
    assert not any(map(is_running, pids(notes)))


# External workers


KEY = "a key of more than sixteen characters"


def external(rank: int, port: int, **variables: str) -> subprocess.Popen[bytes]:
    clean = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "RPEG_AUTHKEY")}
    return subprocess.Popen(
        [sys.executable, "-m", "rpeg_plugin_megatron.worker_main"],
        env={
            **clean,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
            "RPEG_CONTROLLER": f"127.0.0.1:{port}",
            "RPEG_AUTHKEY": KEY,
            **variables,
        },
        stderr=subprocess.PIPE,
    )


def test_workers_that_somebody_else_starts(
    plan: Plan, orders: Any, output: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One as torchrun would start it, one as srun; a third with a wrong key is turned away and disturbs nothing."""
    orders()
    monkeypatch.setenv("RPEG_AUTHKEY", KEY)
    started: list[subprocess.Popen[bytes]] = []

    def status(text: str) -> None:
        if text.startswith("starting"):
            port = int(text.rpartition(":")[2].rstrip(")"))
            caller.append(threading.Thread(target=call, args=(port,)))
            caller[0].start()

    def call(port: int) -> None:
        """The stranger first: once both workers are there nobody listens any more."""
        started.append(external(0, port, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0", RPEG_AUTHKEY="x" * 20))
        started[0].wait(timeout=90)
        started.append(external(0, port, RANK="0", WORLD_SIZE="2", LOCAL_RANK="0"))
        started.append(external(1, port, SLURM_PROCID="1", SLURM_NTASKS="2", SLURM_LOCALID="1"))

    caller: list[threading.Thread] = []
    trace = run(plan, RunRequest(steps=2, output=output, status=status), launcher="external")
    caller[0].join()
    assert trace.steps == 2
    assert verify_plan(plan, output / "trace.jsonl").complete
    outcomes = [process.communicate(timeout=90)[1].decode() for process in started]
    assert [process.returncode for process in started] == [3, 0, 0]
    assert "has another key" in outcomes[0]


@pytest.mark.slow
def test_real_workers_under_torchrun(output: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same losses as from the local launcher, exactly; torch's rendezvous is torchrun's."""
    plan = make_plan(experiment("grpo"), {"actor_generation": at("0"), "": at("0-1", dp=2)})
    settings = {"task": "copy", "device": "cpu"}
    losses: dict[str, list[float]] = {"external": [], "local": []}
    monkeypatch.setenv("RPEG_AUTHKEY", KEY)
    started: list[subprocess.Popen[bytes]] = []

    def status(text: str) -> None:
        if text.startswith("starting"):
            port = text.rpartition(":")[2].rstrip(")")
            command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
            started.append(
                subprocess.Popen(
                    [*command, "-m", "rpeg_plugin_megatron.worker_main"],
                    env={**os.environ, "RPEG_CONTROLLER": f"127.0.0.1:{port}", "GLOO_SOCKET_IFNAME": "lo"},
                )
            )

    for launcher, told in losses.items():
        request = RunRequest(
            steps=3,
            step_finished=lambda step, metrics, told=told: told.append(metrics["actor_training/loss"]),
            status=status if launcher == "external" else lambda text: None,
        )
        with MegatronSession(plan, Settings(launcher=launcher, **settings)) as session:
            trace = session.run(request)
        trace.write(output / "trace.jsonl")
        assert verify_plan(plan, output / "trace.jsonl").complete
    assert losses["local"] == losses["external"]
    assert len(losses["local"]) == 3
    assert started[0].wait(30) == 0


def test_external_workers_need_a_key(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RPEG_AUTHKEY", raising=False)
    with pytest.raises(BackendError, match="RPEG_AUTHKEY is not set"):
        run(plan, RunRequest(), launcher="external")
    monkeypatch.setenv("RPEG_AUTHKEY", "short")
    with pytest.raises(BackendError, match="RPEG_AUTHKEY has 5 characters"):
        run(plan, RunRequest(), launcher="external")
    monkeypatch.setenv("RPEG_AUTHKEY", KEY)
    with pytest.raises(BackendError, match=r"megatron.listen is '7'"):
        run(plan, RunRequest(), launcher="external", listen="7")


def test_a_worker_without_its_environment_says_what_is_missing() -> None:
    process = external(0, 1, RANK="zero", WORLD_SIZE="2", LOCAL_RANK="0")
    _, text = process.communicate(timeout=90)
    assert process.returncode == 3
    assert "RANK is 'zero'" in text.decode()
