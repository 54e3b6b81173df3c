"""Fused trainings: the microtask executor against Megatron's schedule, and fused plans against unfused ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import megatron_oracle as oracle
import pytest
import torch
from megatron_plans import at, drive, experiment, ranks_of, run_plan, settings
from megatron_world import run_world
from rpeg_plugin_megatron import fused
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.forward import Rows
from rpeg_plugin_megatron.fused import Links, Minibatch, update_fused
from rpeg_plugin_megatron.groups import Place, PlaceGroups, build_groups
from rpeg_plugin_megatron.initial import fill
from rpeg_plugin_megatron.model import build_shard
from rpeg_plugin_megatron.train import Trainer
from rpeg_plugin_megatron.worker import Worker

from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.structures import Structure
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.semantics import LossParts, ModelOutputs, OptimizerSettings
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.spec.models import Head, ModelSpec

PROMPT, RESPONSE, ROWS, STEPS = 6, 5, 8, 3
SETTINGS = OptimizerSettings(learning_rate=1e-3, warmup_steps=0, weight_decay=0.1, clip_norm=0.5, epsilon=1e-6)


@attrs.frozen
class Case:
    spec: ModelSpec
    weights: dict[str, torch.Tensor]
    tokens: torch.Tensor
    mask: torch.Tensor
    layout: Layout


def _case(layout: Layout, *, tied: bool) -> Case:
    model = oracle.hf_model("llama", layers=max(2, layout.pipeline), tied=tied)
    weights = oracle.parameters_of(model, {n: p.detach().clone() for n, p in model.named_parameters()})
    tokens, mask = oracle.rows(ROWS, PROMPT, RESPONSE)
    return Case(oracle.spec_of(model, Head.LM), weights, tokens, mask, layout)


def _trained(groups: PlaceGroups, case: Case, executor: str) -> list[tuple[float, float, list[torch.Tensor]]]:
    """Loss, gradient norm and this rank's weights after each of some updates, by Megatron's schedule or by ours."""
    shard = build_shard(case.spec, groups, device=choose_device("cpu"))
    fill(shard, oracle.reader_of(case.weights))
    trainer = Trainer(shard, SETTINGS)
    size = ROWS // case.layout.data
    first = groups.coordinates.dp * size
    batches = [Rows(case.tokens[part], case.mask[part], PROMPT) for part in torch.arange(first, first + size).chunk(4)]

    def loss(index: int, outputs: ModelOutputs) -> LossParts:
        value = outputs.logprobs[batches[index].response_mask].sum() / -ROWS
        return LossParts(loss=value, metrics={"index": torch.tensor(float(index))})

    links, found = Links(groups), []
    for _ in range(STEPS):
        if executor == "megatron":
            update = trainer.update(batches, loss)
        else:
            minibatch = Minibatch(trainer=trainer, batches=batches, loss=loss)
            update = update_fused({"only": minibatch}, links)["only"]
        views = [view.detach().clone() for _, view in shard.fragments]
        found.append((update.loss, update.gradient_norm, views))
    return found


def _both(rank: int, world: int, cases: list[Case]) -> list[Any]:
    results = []
    for case in cases:
        place = Place(Allocation(0, case.layout.gpus), case.layout)
        groups = build_groups([place], fused=[place]).get(place)
        results.append(groups and [_trained(groups, case, executor) for executor in ("megatron", "microtasks")])
    return results


def test_for_one_model_the_microtasks_give_what_megatrons_schedule_gives() -> None:
    cases = [
        _case(Layout(1, 1, 1), tied=False),
        _case(Layout(1, 2, 1), tied=False),
        _case(Layout(1, 2, 2), tied=True),
        _case(Layout(2, 2, 1), tied=True),
        _case(Layout(1, 4, 1), tied=True),
    ]
    by_rank = run_world(_both, 4, cases, timeout_s=300)
    for place, case in enumerate(cases):
        assert sum(results[place] is not None for results in by_rank) == case.layout.gpus
        for theirs, ours in (results[place] for results in by_rank if results[place] is not None):
            for (loss, norm, boxes), (own_loss, own_norm, own_boxes) in zip(theirs, ours, strict=True):
                assert own_loss == pytest.approx(loss, rel=1e-6)
                assert own_norm == pytest.approx(norm, rel=1e-6)
                for box, own in zip(boxes, own_boxes, strict=True):
                    torch.testing.assert_close(own, box, rtol=1e-6, atol=1e-7)


def _plan(
    assignments: dict[str, Assignment], *, fusion: bool, staleness: dict[str, int] | None = None, **values: Any
) -> Plan:
    document = experiment("ppo")
    document["settings"]["ppo"] |= values
    planner = Planner(parse_experiment(document), Registry())
    structure = Structure(staleness=tuple((staleness or {}).items()), fusion=fusion)
    graph = planner.graph(structure)
    full = {op.name: assignments.get(op.name, assignments[""]) for op in graph.operators}
    if "fused_training" in full:
        full["fused_training"] = assignments["training"]
    for name in {"actor_training", "critic_training"} & set(full):
        full[name] = assignments["training"]
    found = Plan(
        experiment=planner.experiment,
        structure=attrs.evolve(structure, staleness=tuple(graph.staleness.items())),
        rpeg=graph,
        assignments=full,
        machine=DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4),
        options=planner.options,
        prediction=None,
        plugins=(),
    )
    return planner.plan(planner.structure_problem(found), full, {})


PLANS = {
    "one GPU": {"": at("0"), "training": at("0")},
    "pp2": {"": at("0-1", pp=2, mb=4), "training": at("0-1", pp=2, mb=4)},
    "pp2, served dp2": {"": at("0-1", dp=2), "training": at("0-1", pp=2, mb=2)},
    "pp2 beside serving": {"": at("0-1", tp=2), "training": at("2-3", pp=2, mb=4)},
    "dp2 x pp2": {"": at("0-3", dp=4), "training": at("0-3", dp=2, pp=2, mb=2)},
}


@pytest.mark.parametrize("name", PLANS)
def test_losses_and_weights_equal_those_of_the_unfused_run(name: str) -> None:
    plans = [_plan(PLANS[name], fusion=fusion) for fusion in (False, True)]
    apart_by_rank, together_by_rank = (
        run_world(run_plan, ranks_of(plan), plan, settings(), 2, timeout_s=300) for plan in plans
    )
    assert any(map(_metrics, together_by_rank))
    for apart, together in zip(apart_by_rank, together_by_rank, strict=True):
        expected = _metrics(apart)
        found = _metrics(together)
        assert set(found) == set(expected)
        for key, value in expected.items():
            assert found[key] == pytest.approx(value, rel=1e-4, abs=1e-4), key
        assert set(together.weights) == set(apart.weights)
        for model, boxes in apart.weights.items():
            for (box, start, stop, values), (own, own_start, own_stop, mine) in zip(
                boxes, together.weights[model], strict=True
            ):
                assert (own, own_start, own_stop) == (box, start, stop)
                torch.testing.assert_close(torch.as_tensor(mine), torch.as_tensor(values), rtol=1e-4, atol=1e-5)


def _metrics(ran: Any) -> dict[tuple[str, str], float]:
    """(training and step, name) -> value on one rank, whichever operator did the training."""
    found = {}
    for label, done in ran.done:
        operator, _, step = label.partition("@")
        for name, value in done.metrics.items():
            training, _, last = name.rpartition("/")
            found[f"{training or operator}@{step}", last] = value
    return {key: value for key, value in found.items() if "training" in key[0]}


def test_epochs_and_minibatches_are_fused_one_by_one() -> None:
    changes = {"epochs": 2, "minibatches": 2}
    plans = [_plan(PLANS["pp2"], fusion=fusion, **changes) for fusion in (False, True)]
    expected, found = (_metrics(run_world(run_plan, 2, plan, settings(), 1, timeout_s=300)[0]) for plan in plans)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)


def test_stale_models_are_served_from_shadow_copies_of_a_fused_training() -> None:
    taus = {"actor": 1, "critic": 1}
    plans = [_plan(PLANS["pp2 beside serving"], fusion=f, staleness=taus) for f in (False, True)]
    expected, found = (_metrics(run_world(run_plan, 4, plan, settings(), 4, timeout_s=300)[2]) for plan in plans)
    assert found == pytest.approx(expected, rel=1e-4, abs=1e-4)
    assert {key[0] for key in found} >= {"actor_training@3", "critic_training@3"}


def _executed(rank: int, world: int, plan: Plan) -> list[str]:
    """The microtasks that this rank ran in a step."""
    done: list[str] = []

    def noting(name: str, letter: str) -> None:
        run = getattr(fused._Stage, name)

        def noted(stage: Any, index: int) -> None:
            scalar = stage._minibatch.trainer.shard.spec.head is Head.SCALAR
            done.append(f"{letter}{index} {'critic' if scalar else 'actor'}_training")
            run(stage, index)

        setattr(fused._Stage, name, noted)

    noting("forward", "F")
    noting("backward", "B")
    run_plan(rank, world, plan, settings(), 1)
    return done


def test_the_ranks_run_the_list_that_the_plan_states() -> None:
    plan = _plan(PLANS["pp2"], fusion=True)
    stated = plan.document()["microtasks"]["fused_training"]
    assert stated[1][:4] == ["F0 actor_training", "B0 actor_training", "F0 critic_training", "B0 critic_training"]
    assert run_world(_executed, 2, plan, timeout_s=300) == stated


def _run_on(rank: int, world: int, plan: Plan, folder: str, resume: int | None) -> Any:
    """Metrics by node and the weights of both models, of a run with checkpoints or of one that goes on from one."""
    worker = Worker(rank, world, plan, settings())
    worker.setup()
    if resume is not None:
        worker.restore(f"{folder}/{resume}")

    def pause(step: int) -> None:
        if resume is None:
            Path(folder, str(step)).mkdir(exist_ok=True)
            worker.checkpoint(f"{folder}/{step}", step)

    engine = Engine(worker.window, 3, first_step=resume or 0, pause_every=2)
    done = drive(worker, engine, on_pause=pause)
    weights = {
        model: [view.detach().clone() for view in installation.views(installation.trained)]
        for (model, _), installation in worker.installations.items()
        if installation.trained is not None
    }
    worker.close()
    return {label: dict(answer.metrics) for label, answer in done}, weights


@pytest.mark.slow
def test_a_fused_run_goes_on_from_a_checkpoint_with_both_optimizers(tmp_path: Path) -> None:
    plan = _plan(PLANS["pp2"], fusion=True)
    whole = run_world(_run_on, 2, plan, str(tmp_path), None, timeout_s=300)
    resumed = run_world(_run_on, 2, plan, str(tmp_path), 2, timeout_s=300)
    for (expected, weights), (done, again) in zip(whole, resumed, strict=True):
        assert set(weights) == {"actor", "critic"}
        for model, boxes in weights.items():
            assert all(torch.equal(box, other) for box, other in zip(boxes, again[model], strict=True))
        assert "fused_training@2" in done
        assert done == {label: expected[label] for label in done}
