"""Plans with staleness compute what a plain loop computes whose serving weights are explicitly delayed."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from megatron_plans import at, drive, experiment, make_plan, ranks_of, run_plan, settings
from megatron_world import run_world
from rpeg_plugin_megatron.session import open_session
from test_megatron_equivalence import SMALL, TOLERANCE, check, check_transfers, plain

from rpeg_core.costing.memory import serving_copies
from rpeg_core.planning.assignment import Assignment
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.session import TRACE_FILE, RunRequest
from rpeg_core.runtime.verify import verify_plan

STEPS = 6

DECOUPLED = {"objective": "decoupled", "minibatches": 2, "weight_cap": 1.05}
"""Several updates a step, so that behaviour, proximal and trained policy all differ; some weights exceed the cap."""

Case = tuple[str, dict[str, Assignment], dict[str, int], dict[str, Any]]
"""Algorithm, assignments, staleness, settings of the algorithm."""

APART: dict[str, Assignment] = {"": at("0"), "actor_generation": at("0-1", dp=2), "actor_training": at("2-3", tp=2)}
OTHER_LAYOUT: dict[str, Assignment] = {
    "actor_generation": at("0-1", dp=2),
    "reference_inference": at("0-1", tp=2),
    "reward_function": at("0"),
    "actor_training": at("0-1", pp=2, mb=2),
}
OVERLAPPING: dict[str, Assignment] = {
    "actor_generation": at("0-3", dp=4),
    "reference_inference": at("0-1", dp=2),
    "reward_function": at("3"),
    "actor_training": at("2-3", tp=2),
}
PPO_APART: dict[str, Assignment] = {
    "actor_generation": at("0"),
    "reference_inference": at("0"),
    "reward_inference": at("1"),
    "critic_inference": at("1"),
    "actor_training": at("2-3", dp=2),
    "critic_training": at("1"),
}

CASES: dict[str, Case] = {
    "apart, tau 1": ("grpo", APART, {"actor": 1}, {}),
    "apart, tau 2": ("grpo", APART, {"actor": 2}, {}),
    "one worker, tau 1": ("grpo", {"": at("0")}, {"actor": 1}, {}),
    "same layout, tau 2": ("grpo", {"": at("0-1", dp=2)}, {"actor": 2}, {}),
    "other layout on the same workers, tau 1": ("grpo", OTHER_LAYOUT, {"actor": 1}, {}),
    "other layout on the same workers, tau 2": ("grpo", OTHER_LAYOUT, {"actor": 2}, {}),
    "overlapping, tau 1": ("grpo", OVERLAPPING, {"actor": 1}, {}),
    "overlapping, tau 2": ("grpo", OVERLAPPING, {"actor": 2}, {}),
    "decoupled, tau 1": ("grpo", APART, {"actor": 1}, DECOUPLED),
    "decoupled in a pipeline, tau 2": ("grpo", OTHER_LAYOUT, {"actor": 2}, DECOUPLED | {"weight_beyond_cap": "drop"}),
    "actor 2, critic 0": ("ppo", PPO_APART, {"actor": 2, "critic": 0}, {}),
    "actor 1, critic 2": ("ppo", PPO_APART, {"actor": 1, "critic": 2}, DECOUPLED),
    "critic 1 on shared workers": ("ppo", {"": at("0-1", dp=2), "critic_training": at("0-1", tp=2)}, {"critic": 1}, {}),
    "shared backbone, tau 1": (
        "ppo-ac",
        {"": at("0-1", dp=2), "actor_critic_inference": at("2"), "actor_critic_training": at("2-3", tp=2)},
        {"actor_critic": 1},
        {},
    ),
}

QUICK = ("other layout on the same workers, tau 1", "decoupled, tau 1")


def plan_of(case: Case) -> Plan:
    """The plan of a case."""
    algorithm, assignments, staleness, changes = case
    name = "ppo" if algorithm == "ppo-ac" else algorithm
    document = experiment(name, **({"structure": {"actor_critic_sharing": [True]}} if name != algorithm else {}))
    document["settings"][name] |= changes
    return make_plan(document, assignments, **staleness)


@pytest.mark.parametrize("name", [pytest.param(n, marks=() if n in QUICK else pytest.mark.slow, id=n) for n in CASES])
def test_a_stale_plan_equals_the_loop_with_delayed_weights(name: str) -> None:
    plan = plan_of(CASES[name])
    expected = plain(plan, STEPS)
    results = run_world(run_plan, ranks_of(plan), plan, settings(), STEPS, True, timeout_s=300.0)
    worst = check(plan, results, expected)
    assert max(worst.values()) <= TOLERANCE, worst
    check_transfers(plan, results, STEPS)
    assert sum(result.kept_bytes for result in results) == 0, "all delayed versions are gone in the end"


def test_the_staleness_of_every_step_is_reported() -> None:
    plan = plan_of(("ppo", {"": at("0")}, {"actor": 2, "critic": 1}, {}))
    (ran,) = run_world(run_plan, 1, plan, settings(), 4)
    found = {label: answer.metrics["staleness"] for label, answer in ran.done if "staleness" in answer.metrics}
    assert found == {
        **{f"actor_training@{step}": float(min(step, 2)) for step in range(4)},
        **{f"critic_training@{step}": float(min(step, 1)) for step in range(4)},
    }


def edited(trace: Path, edit: Callable[[list[dict[str, Any]]], None]) -> Path:
    """The trace with other lines and a seal that fits them, beside it."""
    lines = [{k: v for k, v in json.loads(line).items() if k != "chain"} for line in trace.read_text().splitlines()]
    edit(lines)
    chain, out = "", []
    for line in lines:
        body = json.dumps(line)[:-1]
        chain = hashlib.sha256((chain + body).encode()).hexdigest()[:16]
        out.append(f'{body}, "chain": "{chain}"}}\n')
    path = trace.with_name("edited.jsonl")
    path.write_text("".join(out))
    return path


def one_step_too_stale(lines: list[dict[str, Any]]) -> None:
    generation = next(line["node"] for line in lines if line.get("label") == "actor_generation@3")
    bound = next(line for line in lines if line["record"] == "bind" and line["node"] == generation)
    bound["version"] -= 1


def no_publication(lines: list[dict[str, Any]]) -> None:
    moved = next(
        line["node"]
        for line in lines
        if line["record"] == "dispatch" and line["kind"] == "COMM" and line["container"] == "W_actor"
    )
    lines[:] = [line for line in lines if line.get("node") != moved]


@pytest.mark.slow
def test_the_trace_of_a_shared_backbone_proves_it(tmp_path: Path) -> None:
    plan = plan_of(CASES["shared backbone, tau 1"])
    with open_session(plan, settings()) as session:
        session.run(RunRequest(steps=4, output=tmp_path))
    verdict = verify_plan(plan, tmp_path / TRACE_FILE)
    assert verdict.complete, verdict.findings


@pytest.mark.slow
def test_a_stale_session_is_proved_by_its_trace_and_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    plan = plan_of(("ppo", PPO_APART, {"actor": 1, "critic": 2}, DECOUPLED))
    expected = plain(plan, STEPS)
    steps: dict[int, Any] = {}
    chosen = settings(checkpoint_every=2)
    for until, resume in ((4, False), (STEPS, True)):
        with open_session(plan, chosen) as session:
            session.run(RunRequest(steps=until, output=tmp_path, resume=resume, step_finished=steps.__setitem__))
        verdict = verify_plan(plan, tmp_path / TRACE_FILE)
        assert not verdict.findings, verdict.findings
        if not resume:
            for edit, rules in ((one_step_too_stale, {"V6", "V14"}), (no_publication, {"V4", "V13"})):
                broken = verify_plan(plan, edited(tmp_path / TRACE_FILE, edit))
                assert {rule.id for rule in broken.counts} >= rules, edit.__name__
            (tmp_path / TRACE_FILE).rename(tmp_path / "trace.1.jsonl")
    for step, operators in enumerate(expected.metrics):
        for operator, metrics in operators.items():
            for metric, value in metrics.items():
                found = steps[step][f"{operator}/{metric}"]
                assert abs(found - value) <= TOLERANCE * max(abs(value), SMALL), f"{operator}/{metric} of step {step}"


def _most_copies(rank: int, world: int, plan: Plan, steps: int, every: int | None) -> dict[str, float]:
    """Model -> the most copies of its weights that were in this rank's device memory beside the trainer's own.

    Counted by their storages after every node. Pauses are those of checkpoints.
    """
    from rpeg_plugin_megatron.worker import Worker

    worker = Worker(rank, world, plan, settings())
    worker.setup()
    most: dict[str, float] = {}

    def count(node: Any, answer: Any) -> None:
        for model in plan.rpeg.staleness:
            copies = 0.0
            for (name, _), item in worker.installations.items():
                if name == model:
                    storages = {t.untyped_storage().data_ptr() for version in item.copies for t in version}
                    copies += len(storages) / len(list(item.shard.module.parameters()))
            most[model] = max(most.get(model, 0.0), copies)

    drive(worker, Engine(worker.window, steps, pause_every=every), count)
    worker.close()
    return most


@pytest.mark.slow
@pytest.mark.parametrize(("tau", "every"), [(1, None), (2, None), (1, 2), (2, 3)])
@pytest.mark.parametrize("places", [APART, {"": at("0")}, OTHER_LAYOUT], ids=["apart", "one worker", "other layout"])
def test_a_worker_keeps_as_many_versions_as_the_memory_model_counts(
    places: dict[str, Assignment], tau: int, every: int | None
) -> None:
    """Between checkpoints, around them and at the end of the run."""
    plan = plan_of(("grpo", places, {"actor": tau}, {}))
    found = run_world(_most_copies, ranks_of(plan), plan, 8, every)
    serving = plan.assignments["actor_generation"].allocation
    for rank, most in enumerate(found):
        allowed = serving_copies(plan.rpeg, "actor") if serving.start <= rank < serving.stop else 0
        assert most["actor"] <= allowed
        assert most["actor"] == allowed or tau > 1, "the rule counts copies that are there"
