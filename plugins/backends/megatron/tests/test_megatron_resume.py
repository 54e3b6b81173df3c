"""Runs that go on from a checkpoint: the same losses as without the interruption, and clear refusals."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from megatron_fake import FAKE
from megatron_plans import at, experiment, make_plan
from rpeg_plugin_megatron.session import WORKER, MegatronSession
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.trace import Dispatched, Trace
from rpeg_core.runtime.verify import verify_plan
from rpeg_core.spec.experiment import parse_experiment


@pytest.fixture(scope="module")
def plan() -> Plan:
    return make_plan(experiment("grpo"), {"actor_generation": at("0"), "": at("1")})


@pytest.fixture(scope="module")
def stale_plan() -> Plan:
    """The same, generation with weights that are one step old."""
    planner = Planner(parse_experiment(experiment("grpo", structure={"staleness": [1]})), Registry())
    problem = planner.problem().structures[0]
    places = {op.name: at("0" if op.name == "actor_generation" else "1") for op in problem.rpeg.operators}
    return planner.plan(problem, places, {})


@pytest.fixture
def output(tmp_path: Path) -> Path:
    folder = tmp_path / "run"
    folder.mkdir()
    return folder


def run(plan: Plan, output: Path, steps: int, *, resume: bool = False, worker: str = FAKE, **settings: Any) -> Trace:
    if resume:  # as the command does
        number = len(list(output.glob("trace.*.jsonl"))) + 1
        (output / "trace.jsonl").rename(output / f"trace.{number}.jsonl")
    values = {"checkpoint_every": 2, "task": "copy"} | settings
    with MegatronSession(plan, Settings(**values), worker=worker) as session:
        return session.run(RunRequest(steps=steps, output=output, resume=resume))


def losses(output: Path) -> list[tuple[int, float]]:
    lines = [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]
    return [(line["step"], line["actor_training/loss"]) for line in lines]


def checkpoints(output: Path) -> list[str]:
    return sorted(path.name for path in (output / "checkpoints").iterdir())


@pytest.mark.parametrize("name", ["plan", "stale_plan"])
def test_a_killed_run_goes_on_to_the_same_losses(
    name: str, output: Path, tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan = request.getfixturevalue(name)
    whole = tmp_path / "whole"
    whole.mkdir()
    run(plan, whole, 7)
    assert checkpoints(whole) == ["step-00000006", "step-00000007"]

    orders = {"at": {"rank": 1, "operator": "actor_training", "step": 5, "do": "exit"}}
    monkeypatch.setenv("FAKE", json.dumps(orders))
    with pytest.raises(ExecutionError, match="ended with exit status 3"):
        run(plan, output, 7)
    assert checkpoints(output) == ["step-00000002", "step-00000004"]
    assert losses(output)[-1][0] == 4

    monkeypatch.delenv("FAKE")
    trace = run(plan, output, 7, resume=True)
    assert losses(output) == losses(whole)
    assert json.loads((output / "actor" / "weights.json").read_text()) == json.loads(
        (whole / "actor" / "weights.json").read_text()
    )
    assert (trace.header.first_step, trace.header.steps, trace.steps) == (4, 7, 3)
    for file, complete in (("trace.jsonl", 7), ("trace.1.jsonl", 5)):
        verdict = verify_plan(plan, output / file)
        assert verdict.findings == ()
        assert verdict.steps_complete == complete
    plan.save(tmp_path / "plan.json")
    verify = [sys.executable, "-m", "rpeg_core", "verify", tmp_path / "plan.json", output / "trace.jsonl"]
    assert "planned: 3 steps after the first 4, " in subprocess.run(verify, capture_output=True, text=True).stdout
    both = [
        record.node
        for file in ("trace.1.jsonl", "trace.jsonl")
        for record in Trace.read(output / file).records
        if isinstance(record, Dispatched) and (file == "trace.jsonl" or record.step < 4)
    ]
    expected = [r.node for r in Trace.read(whole / "trace.jsonl").records if isinstance(r, Dispatched)]
    assert sorted(both) == sorted(expected)
    assert "holds 1 artifacts" in (output / "logs" / "worker-1.log").read_text()  # the weights that result
    assert checkpoints(output) == ["step-00000006", "step-00000007"]


def test_a_finished_run_can_be_continued_with_more_steps(plan: Plan, output: Path, tmp_path: Path) -> None:
    whole = tmp_path / "whole"
    whole.mkdir()
    run(plan, whole, 5)
    run(plan, output, 3)
    with pytest.raises(BackendError, match="is the checkpoint after 3 of 3 steps: there is nothing left to do"):
        run(plan, output, 3, resume=True)
    (output / "trace.1.jsonl").rename(output / "trace.jsonl")
    run(plan, output, 5, resume=True)
    assert losses(output) == losses(whole)


@pytest.mark.slow
@pytest.mark.parametrize(
    "places",
    [
        {"": at("0-1", dp=2)},
        {"actor_generation": at("0"), "actor_training": at("0-1", tp=2), "": at("1")},
    ],
    ids=["together", "apart"],
)
def test_real_workers_go_on_to_exactly_the_same_losses(places: dict[str, Any], output: Path, tmp_path: Path) -> None:
    plan = make_plan(experiment("grpo"), places)
    whole = tmp_path / "whole"
    whole.mkdir()
    run(plan, whole, 5, worker=WORKER, device="cpu")
    run(plan, output, 2, worker=WORKER, device="cpu")
    run(plan, output, 5, resume=True, worker=WORKER, device="cpu")
    expected, found = ([json.loads(x) for x in (f / "metrics.jsonl").read_text().splitlines()] for f in (whole, output))
    times = ("seconds", "time_s", "tokens_per_s")
    for before, after in zip(expected, found, strict=True):
        assert {k: v for k, v in before.items() if not any(word in k for word in times)} == {
            k: v for k, v in after.items() if not any(word in k for word in times)
        }
    assert {line["actor_training/loss"] for line in found} != {0.0}
    weights = [(folder / "actor" / "model.safetensors").read_bytes() for folder in (whole, output)]
    assert weights[0] == weights[1]
    for file in (whole / "trace.jsonl", output / "trace.jsonl", output / "trace.1.jsonl"):
        assert verify_plan(plan, file).complete


def test_tensorboard_shows_each_step_once(plan: Plan, output: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    run(plan, output, 3)
    shutil.rmtree(output / "checkpoints" / "step-00000003")
    run(plan, output, 4, resume=True)
    events = EventAccumulator(str(output / "tensorboard")).Reload()
    assert [event.step for event in events.Scalars("actor_training/loss")] == [0, 1, 2, 3]


# Refusals


def test_without_a_checkpoint_there_is_nothing_to_go_on_from(plan: Plan, output: Path) -> None:
    run(plan, output, 1, checkpoint_every=0)
    with pytest.raises(BackendError, match="holds no complete checkpoint") as caught:
        run(plan, output, 2, resume=True)
    assert caught.value.facts == ("a run writes them with --set megatron.checkpoint_every=N",)
    (output / "checkpoints" / "partial-00000002").mkdir(parents=True)
    (output / "checkpoints" / "step-00000002").mkdir()  # without meta.json
    with pytest.raises(BackendError, match="holds no complete checkpoint"), _session(plan) as session:
        session.run(RunRequest(steps=2, output=output, resume=True))


def _session(plan: Plan, **settings: Any) -> MegatronSession:
    return MegatronSession(plan, Settings(**{"checkpoint_every": 2, "task": "copy"} | settings), worker=FAKE)


def test_another_plan_other_settings_and_a_second_beginning_are_refused(
    plan: Plan, stale_plan: Plan, output: Path
) -> None:
    run(plan, output, 2)
    again = RunRequest(steps=4, output=output, resume=True)
    cases = [
        (stale_plan, {}, again, "belongs to another plan"),
        (plan, {"seed": 3, "task": "sort", "node_timeout_s": 9.0}, again, "was written with other settings"),
        (plan, {}, RunRequest(steps=4, output=output), "holds checkpoints of an earlier run, the last after 2 steps"),
    ]
    errors = []
    for other, settings, request, message in cases:
        with pytest.raises(BackendError, match=message) as caught, _session(other, **settings) as session:
            session.run(request)
        errors.append(caught.value)
    assert errors[0].facts == (f"it was written by {plan.digest}", f"this plan is {stale_plan.digest}")
    assert errors[1].facts == ("megatron.seed: 0 then, 3 now", "megatron.task: 'copy' then, 'sort' now")
    assert errors[2].hint == "go on from it with --resume, or choose another --output"
    meta = output / "checkpoints" / "step-00000002" / "meta.json"
    meta.write_text("{}")
    with pytest.raises(BackendError, match="is no description of a checkpoint"), _session(plan) as session:
        session.run(again)
    meta.write_text("{")
    with pytest.raises(BackendError, match="cannot be read"), _session(plan) as session:
        session.run(again)


def test_checkpoints_need_a_folder(plan: Plan) -> None:
    for request, settings in ((RunRequest(resume=True), {"checkpoint_every": 0}), (RunRequest(), {})):
        with (
            pytest.raises(BackendError, match="checkpoints need an output folder"),
            _session(plan, **settings) as session,
        ):
            session.run(request)


def test_a_worker_that_cannot_restore_ends_the_run(plan: Plan, output: Path) -> None:
    run(plan, output, 2)
    (output / "checkpoints" / "step-00000002" / "rank-1.json").unlink()
    with pytest.raises(ExecutionError, match=r"the worker of GPU 1 was lost when it was to restore the checkpoint"):
        run(plan, output, 4, resume=True)
    assert verify_plan(plan, output / "trace.jsonl").findings == ()
