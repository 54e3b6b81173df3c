"""One rank's work: versions, memory over many steps, checkpoints, exports, and what a mistaken node is told."""

from __future__ import annotations

import hashlib
import statistics
import time
from pathlib import Path
from typing import Any

import attrs
import pytest
import torch
from megatron_plans import at, drive, experiment, make_plan, ranks_of, settings
from megatron_world import run_world
from rpeg_plugin_megatron.huggingface import reader
from rpeg_plugin_megatron.messages import Execute
from rpeg_plugin_megatron.worker import Worker
from safetensors.torch import load_file

from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.ir import Role
from rpeg_core.passes.lower import NodeKind
from rpeg_core.planning.assignment import Mode
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.engine import Engine
from rpeg_core.spec.execution import Recompute

PLACES = {
    "in place": {"": at("0")},
    "another layout": {"": at("0-1", dp=2), "actor_training": at("0-1", tp=2)},
    "elsewhere": {"": at("0"), "actor_training": at("1")},
    "partly elsewhere": {"": at("0-1", tp=2), "reward_function": at("0"), "actor_training": at("0")},
}


def started(rank: int, world: int, plan: Plan, **changes: Any) -> Worker:
    worker = Worker(rank, world, plan, settings(**changes))
    assert worker.setup() == "cpu"
    return worker


def fingerprint(tensors: Any) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().numpy().tobytes())
    return digest.hexdigest()


# Recomputation


def _kinds(rank: int, world: int, plan: Plan, setting: str) -> dict[str, tuple[str, str]]:
    """Model -> the classes of its first layer and of that layer's attention."""
    worker, found = started(rank, world, plan, recompute=setting), {}
    for (model, _), installation in worker.installations.items():
        layer = installation.shard.module.decoder.layers[0]
        found[model] = type(layer).__name__, type(layer.self_attention.core_attention).__name__
    worker.close()
    return found


@pytest.mark.parametrize(
    ("planned", "setting", "expected"),
    [
        (None, "none", ("TransformerLayer", "CoreAttention")),
        (None, "full", ("RecomputedLayer", "CoreAttention")),
        (Recompute.SELECTIVE, "full", ("TransformerLayer", "RecomputedAttention")),
        (Recompute.FULL, "none", ("RecomputedLayer", "CoreAttention")),
        (Recompute.NONE, "full", ("TransformerLayer", "CoreAttention")),
    ],
)
def test_a_training_recomputes_what_the_plan_says_and_else_what_the_setting_says(planned, setting, expected) -> None:
    training = attrs.evolve(at("0"), mode=Mode(recompute=planned))
    plan = make_plan(experiment("grpo"), {"": at("0"), "actor_training": training})
    (found,) = run_world(_kinds, 1, plan, setting)
    assert found == {"actor": expected, "reference": ("TransformerLayer", "CoreAttention")}


# Versions


def _used(rank: int, world: int, plan: Plan, steps: int) -> list[tuple[str, int, str]]:
    """(operator, step, fingerprint of the weights) of what serving operators used and training made on this rank."""
    worker = started(rank, world, plan)
    found = []
    run = worker._operators.run

    def watched(node: Any, groups: Any, inputs: Any, shard: Any, trainer: Any) -> Any:
        role = plan.rpeg.operator(node.operator).role
        if shard is not None and role is not Role.TRAINING and plan.rpeg.model(node.model).trainable:
            found.append((node.operator, node.step, fingerprint(view for _, view in shard.fragments)))
        result = run(node, groups, inputs, shard, trainer)
        if role is Role.TRAINING:
            found.append((node.operator, node.step, fingerprint(view for _, view in shard.fragments)))
        return result

    worker._operators.run = watched
    drive(worker, Engine(worker.window, steps))
    for installation in worker.installations.values():
        if installation.changes:
            assert installation.bytes == 0, "only the trainer's version is left"
            if installation.trained is None:
                assert all(parameter.numel() == 0 for parameter in installation.shard.module.parameters())
    worker.close()
    return found


@pytest.mark.parametrize("staleness", [0, 1, 2])
def test_generation_uses_the_version_that_the_graph_says(staleness: int) -> None:
    """On one worker generation and training share the weights, of which some versions must survive an update."""
    (found,) = run_world(_used, 1, make_plan(experiment("grpo"), PLACES["in place"], actor=staleness), 5)
    made = {step + 1: weights for operator, step, weights in found if operator == "actor_training"}
    assert len(set(made.values())) == 5
    for operator, step, weights in found:
        if operator == "actor_generation" and step > staleness:
            assert weights == made[step - staleness], f"step {step}"


@pytest.mark.slow
@pytest.mark.parametrize("staleness", [0, 1])
def test_a_version_that_was_moved_is_the_one_that_was_made(staleness: int) -> None:
    plan = make_plan(experiment("grpo"), PLACES["elsewhere"], actor=staleness)
    served, trained = run_world(_used, 2, plan, 5)
    made = {step + 1: weights for _, step, weights in trained}
    used = {step: weights for _, step, weights in served}
    assert [used[step] for step in range(staleness + 1, 5)] == [
        made[step - staleness] for step in range(staleness + 1, 5)
    ]


@pytest.mark.slow
@pytest.mark.parametrize("where", ["another layout", "partly elsewhere"])
def test_stale_plans_run_in_every_placement(where: str) -> None:
    run_world(_used, 2, make_plan(experiment("grpo"), PLACES[where], actor=1), 5)


def _misbound(rank: int, world: int, plan: Plan) -> tuple[str, ...]:
    worker = started(rank, world, plan)
    nodes = {node.operator: node for node in worker.window.nodes(0) if node.kind is NodeKind.OP}
    generation = nodes["actor_generation"]
    _, position = worker.window.locate(generation.index)
    reads = worker.window.shape(0).reads[position]
    inputs = tuple(worker.window.artifact(0, maker, container) for _, maker, container in reads)
    messages = []
    for node, given in (
        (attrs.evolve(generation, version=3), inputs),
        (attrs.evolve(generation, version=3), ()),
        (attrs.evolve(nodes["actor_training"], version=1), ()),
    ):
        with pytest.raises(ExecutionError) as caught:
            worker._bind(node, given)
        messages.append("; ".join((caught.value.what, *caught.value.facts)))
    with pytest.raises(ExecutionError) as caught:
        worker.execute(Execute(nodes["reference_inference"], ()))
    messages.append(caught.value.what)
    return tuple(messages)


def test_a_version_or_an_artifact_that_is_not_here_is_an_error() -> None:
    ((other, absent, newer, rows),) = run_world(_misbound, 1, make_plan(experiment("grpo"), {"": at("0")}))
    assert other == "actor_generation@0 is bound to version 3 of model 'actor', found version 0; GPUs 0"
    assert absent == (
        "actor_generation@0 is bound to version 3 of model 'actor': version 3 of model 'actor' is not at devices 0 as "
        "dp1 pp1 tp1; this rank has versions: 0; GPUs 0"
    )
    assert newer == "actor_training@0 is bound to version 1 of model 'actor', found version 0; GPUs 0"
    assert rows == "rows of 'completions', made by node 0, should be at devices 0 as dp1 pp1 tp1"


def _refused(rank: int, world: int, plan: Plan) -> str:
    with pytest.raises(BackendError) as caught:
        started(rank, world, plan)
    return str(caught.value)


def test_a_plan_for_another_width_is_refused() -> None:
    document = experiment("grpo")
    document["workload"]["bytes_per_element"] = 2
    (message,) = run_world(_refused, 1, make_plan(document, {"": at("0")}))
    assert "the plan is for weights of 2 bytes, this worker computes with 4" in message


# Memory


def _kept(rank: int, world: int, plan: Plan, steps: int) -> dict[int, tuple[int, int, int]]:
    worker = started(rank, world, plan)
    found = {}

    def note(node: Any, answer: Any) -> None:
        kept = sum(item.bytes for item in worker.installations.values())
        artifacts, size, most = found.get(node.step, (0, 0, 0))
        found[node.step] = max(artifacts, len(worker.store)), max(size, worker.store.bytes), max(most, kept)

    drive(worker, Engine(worker.window, steps), note)
    worker.close()
    return found


@pytest.mark.parametrize(("name", "staleness"), [("in place", 1), pytest.param("elsewhere", 1, marks=pytest.mark.slow)])
def test_memory_does_not_grow_with_the_steps(name: str, staleness: int) -> None:
    plan = make_plan(experiment("grpo"), PLACES[name], actor=staleness)
    for found in run_world(_kept, ranks_of(plan), plan, 12):
        assert len({found[step] for step in range(4, 11)}) == 1, found


# Checkpoints


def _run_on(
    rank: int, world: int, plan: Plan, folder: str, steps: int, resume: int | None
) -> tuple[list[tuple[str, dict[str, float]]], dict[str, str]]:
    worker = started(rank, world, plan)
    first = 0
    if resume is not None:
        worker.restore(f"{folder}/{resume}")
        first = resume

    def pause(step: int) -> None:
        if resume is None:
            Path(folder, str(step)).mkdir(exist_ok=True)
            worker.checkpoint(f"{folder}/{step}", step)

    engine = Engine(worker.window, steps, first_step=first, pause_every=2)
    done = drive(worker, engine, on_pause=pause)
    weights = {
        f"{model} {place}": fingerprint(installation.views(installation.trained))
        for (model, place), installation in worker.installations.items()
        if installation.trained is not None
    }
    worker.close()
    return [(label, dict(answer.metrics)) for label, answer in done], weights


CHECKPOINTED = [
    pytest.param("grpo", {"": at("0")}, 0, id="one worker"),
    pytest.param("grpo", {"": at("0")}, 1, id="one worker, stale", marks=pytest.mark.slow),
    pytest.param("grpo", PLACES["elsewhere"], 1, id="elsewhere, stale", marks=pytest.mark.slow),
    pytest.param(
        "ppo",
        {"": at("0-1", dp=2), "actor_training": at("0-1", tp=2), "critic_training": at("0-1", pp=2, mb=2)},
        0,
        id="two layouts",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize(("algorithm", "assignments", "staleness"), CHECKPOINTED)
def test_a_run_goes_on_from_a_checkpoint_as_if_it_had_never_stopped(
    algorithm: str, assignments: Any, staleness: int, tmp_path: Path
) -> None:
    plan = make_plan(experiment(algorithm), assignments, **({"actor": staleness} if staleness else {}))
    whole = run_world(_run_on, ranks_of(plan), plan, str(tmp_path), 4, None)
    assert {path.name for path in (tmp_path / "2").iterdir()} == {f"rank-{rank}" for rank in range(ranks_of(plan))}
    resumed = run_world(_run_on, ranks_of(plan), plan, str(tmp_path), 4, 2)
    for (all_done, weights), (done, again) in zip(whole, resumed, strict=True):
        assert weights == again
        expected = dict(all_done)
        assert done
        assert {label: expected[label] for label, _ in done} == dict(done)


def _restored(rank: int, world: int, plan: Plan, folder: str) -> str:
    worker = started(rank, world, plan)
    with pytest.raises(BackendError) as caught:
        worker.restore(folder)
    return caught.value.what


def test_a_checkpoint_of_another_plan_is_refused(tmp_path: Path) -> None:
    run_world(_run_on, 1, make_plan(experiment("grpo"), {"": at("0")}), str(tmp_path), 3, None)
    document = experiment("grpo")
    document["settings"]["grpo"]["learning_rate"] = 1e-3
    other = make_plan(document, {"": at("0")})
    (message,) = run_world(_restored, 1, other, str(tmp_path / "2"))
    assert "belongs to another plan" in message
    (message,) = run_world(_restored, 1, other, str(tmp_path / "7"))
    assert "cannot read the checkpoint" in message


# Export


def _exported(rank: int, world: int, plan: Plan, folder: str) -> list[Any]:
    worker = started(rank, world, plan)
    drive(worker, Engine(worker.window, 2))
    for model in plan.rpeg.staleness:
        worker.export(f"{folder}/{model}", model)
    torch.distributed.barrier()
    read = {model: reader(Path(folder, model), plan.rpeg.model(model).spec) for model in plan.rpeg.staleness}
    differences = [
        (model, fragment.name)
        for (model, _), installation in worker.installations.items()
        if installation.trained is not None
        for fragment, view in zip(installation.fragments, installation.views(installation.trained), strict=True)
        if not torch.equal(read[model](fragment), view)
    ]
    worker.close()
    return differences


@pytest.mark.slow
def test_trained_models_are_exported_from_any_layout(tmp_path: Path) -> None:
    plan = make_plan(
        experiment("ppo"),
        {"": at("0-1", dp=2), "actor_training": at("0-3", dp=1, pp=2, tp=2, mb=2), "critic_training": at("2-3", tp=2)},
    )
    assert run_world(_exported, 4, plan, str(tmp_path)) == [[]] * 4
    assert sum(v.numel() for v in load_file(tmp_path / "actor" / "model.safetensors").values()) == (
        plan.rpeg.model("actor").spec.total_parameters
    )


# Overhead


def _overhead(rank: int, world: int, plan: Plan, steps: int) -> tuple[int, float]:
    """Nodes, and the median of a node's seconds in the worker without those in the operator itself."""
    worker = started(rank, world, plan)
    inside = [0.0]
    run, own = worker._operators.run, []

    def timed(*arguments: Any) -> Any:
        begun = time.perf_counter()
        result = run(*arguments)
        inside[0] = time.perf_counter() - begun
        return result

    worker._operators.run = timed
    drive(worker, Engine(worker.window, steps), lambda node, answer: own.append(answer.seconds - inside[0]))
    worker.close()
    return len(own), statistics.median(own)


@pytest.mark.slow
def test_a_worker_adds_little_to_an_operator() -> None:
    ((nodes, seconds),) = run_world(_overhead, 1, make_plan(experiment("grpo"), {"": at("0")}), 20)
    assert nodes == 80
    assert seconds < 0.5e-3
