"""Every synchronous plan of an experiment computes what the plain single-process loop computes."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import plain_loop
import pytest
import torch
from megatron_plans import Ran, at, experiment, make_plan, ranks_of, run_plan, settings, transfers
from megatron_world import run_world
from rpeg_plugin_megatron.dataset import Limits, open_data
from rpeg_plugin_megatron.huggingface import reader
from rpeg_plugin_megatron.installations import first_weights
from rpeg_plugin_megatron.session import open_session
from rpeg_plugin_megatron.settings import Sampling
from rpeg_plugin_megatron.shards import Fragment

from rpeg_core.planning.assignment import Assignment, Mode
from rpeg_core.planning.plan import Plan
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.semantics import load_semantics
from rpeg_core.runtime.session import TRACE_FILE, RunRequest
from rpeg_core.runtime.verify import verify_plan
from rpeg_core.runtime.window import Window
from rpeg_core.settings import build_settings
from rpeg_core.spec.execution import Recompute

STEPS = 5
TOLERANCE = 1e-4
"""Relative, of losses, log-probabilities and weights, in fp32 over STEPS steps."""

SMALL = 1e-2
"""Metrics near zero are means of numbers of order 1, positive and negative, and are compared absolutely below this."""

GRPO: dict[str, dict[str, Assignment]] = {
    "one worker": {"": at("0")},
    "dp2": {"": at("0-1", dp=2)},
    "tp2": {"": at("0-1", tp=2), "reward_function": at("0-1", dp=2)},
    "pp2 with microbatches": {"": at("0-1", pp=2, mb=2), "reward_function": at("0")},
    "tp2 x dp2": {"": at("0-3", dp=2, tp=2), "reward_function": at("0-3", dp=4)},
    "tp2 x pp2": {"": at("0-3", pp=2, tp=2, mb=4), "reward_function": at("2-3", dp=2)},
    "generation and training on disjoint workers": {
        "": at("0"),
        "actor_generation": at("0-1", dp=2),
        "actor_training": at("2-3", tp=2),
    },
    "another layout for every invocation on the same workers": {
        "actor_generation": at("0-3", dp=4),
        "reference_inference": at("0-3", pp=2, tp=2, mb=2),
        "reward_function": at("0-3", dp=4),
        "actor_training": at("0-3", dp=2, tp=2),
    },
    "attention computed again in the backward pass": {
        "": at("0"),
        "actor_training": attrs.evolve(at("0"), mode=Mode(recompute=Recompute.SELECTIVE)),
    },
    "layers computed again in the backward pass": {
        "": at("0-1", dp=2),
        "actor_training": attrs.evolve(at("0-1", tp=2), mode=Mode(recompute=Recompute.FULL)),
    },
    "training on a part of generation's workers": {
        "actor_generation": at("0-3", dp=4),
        "reference_inference": at("0-1", dp=2),
        "reward_function": at("3"),
        "actor_training": at("2-3", pp=2, mb=2),
    },
    "generation on a part of training's workers": {
        "actor_generation": at("2-3", tp=2),
        "reference_inference": at("0-1", tp=2),
        "reward_function": at("0"),
        "actor_training": at("0-3", dp=2, pp=2, mb=2),
    },
    "reference on its own worker": {
        "": at("0-1", dp=2),
        "reference_inference": at("2"),
    },
}

PHASED: dict[str, dict[str, Assignment]] = {
    "whole batches assessed as they finish": {
        "actor_generation": at("0-1", dp=2),
        "reference_inference": at("2"),
        "reward_function": at("2"),
        "actor_training": at("2-3", tp=2),
    },
    "assessed in another layout, trained with generation": {
        "actor_generation": at("0-1", pp=2, mb=2),
        "reference_inference": at("2-3", dp=2),
        "reward_function": at("0"),
        "actor_training": at("0-1", dp=2),
    },
}
"""Some assessment runs on GPUs of its own, so that it is split into length phases with generation."""

LENGTHS = [[0.25, 2], [0.5, 4], [1.0, 6]]
"""Shares of the responses and the tokens after which they are expected to be finished."""

PPO: dict[str, dict[str, Assignment]] = {
    "dp2": {"": at("0-1", dp=2)},
    "tp2": {"": at("0-1", tp=2)},
    "pp2 with microbatches": {"": at("0-1", pp=2, mb=2)},
    "tp2 x dp2": {"": at("0-3", dp=2, tp=2)},
    "every model on its own worker": {
        "actor_generation": at("0"),
        "reference_inference": at("1"),
        "reward_inference": at("2"),
        "critic_inference": at("3"),
        "actor_training": at("0"),
        "critic_training": at("3"),
    },
    "generation and training on disjoint workers": {
        "actor_generation": at("0"),
        "reference_inference": at("0"),
        "reward_inference": at("0"),
        "critic_inference": at("1"),
        "actor_training": at("2-3", tp=2),
        "critic_training": at("1"),
    },
    "another layout for every invocation on the same workers": {
        "actor_generation": at("0-1", dp=2),
        "reference_inference": at("0-1", tp=2),
        "reward_inference": at("0-1", pp=2, mb=4),
        "critic_inference": at("0-1", tp=2),
        "actor_training": at("0-1", tp=2),
        "critic_training": at("0-1", pp=2, mb=2),
    },
    "partial overlap both ways": {
        "actor_generation": at("0-3", dp=4),
        "reference_inference": at("2-3", dp=2),
        "reward_inference": at("0"),
        "critic_inference": at("0-1", tp=2),
        "actor_training": at("0-1", dp=2),
        "critic_training": at("0-3", dp=2, tp=2),
    },
}

SHARED: dict[str, dict[str, Assignment]] = {
    "tp2": {"": at("0-1", tp=2)},
    "another layout for every invocation on the same workers": {
        "": at("0-1", dp=2),
        "actor_critic_inference": at("0-1", tp=2),
        "actor_critic_training": at("0-1", pp=2, mb=2),
    },
    "values from other workers": {
        "": at("0-1", dp=2),
        "actor_critic_inference": at("2"),
        "actor_critic_training": at("2-3", tp=2),
    },
}
"""PPO whose actor and critic share a backbone."""

DPO: dict[str, dict[str, Assignment]] = {
    "tp2 and dp2": {"": at("0-1", tp=2), "reference_inference": at("0-1", dp=2)},
    "training elsewhere": {"": at("0"), "actor_training": at("2-3", pp=2, mb=2)},
}


def plain(plan: Plan, steps: int = STEPS) -> plain_loop.Outcome:
    """The plain loop on the plan's experiment."""
    chosen, workload = settings(), plan.workload
    template = Registry().get("algorithm", plan.experiment.algorithm).record
    semantics = load_semantics(template)
    job = plain_loop.Job(
        graph=plan.rpeg,
        semantics=semantics,
        settings=build_settings(
            template.settings, plan.experiment.settings.get(template.name, {}), where=template.name
        ),
        workload=workload,
        data=open_data(
            data=None,
            task=chosen.task,
            tokenizer=chosen.tokenizer,
            chat_template=False,
            reward=None,
            seed=chosen.seed,
            prompts=workload.prompts,
            limits=Limits(prompt_tokens=workload.prompt_tokens, response_tokens=workload.response_tokens),
            pairs=template.name == "dpo",
            base_dir=None,
        ),
        weights=lambda model: first_weights(plan.experiment, model, plan.rpeg.model(model).spec, chosen.seed),
        sampling=Sampling(),
        seed=chosen.seed,
    )
    return plain_loop.run(job, steps, keep_rows=True)


@pytest.fixture(scope="module")
def oracle() -> Any:
    """The plain loop's outcome by algorithm, run once."""
    found: dict[str, plain_loop.Outcome] = {}

    def of(algorithm: str) -> plain_loop.Outcome:
        if algorithm not in found:
            found[algorithm] = plain(make_plan(document(algorithm), {"": at("0")}))
        return found[algorithm]

    return of


def relative(found: np.ndarray, expected: np.ndarray) -> float:
    """The largest difference, relative to the largest expected value."""
    if found.size == expected.size == 0:  # what a length phase without a row made
        return 0.0
    return float(np.abs(found - expected).max() / max(np.abs(expected).max(), 1e-12))


def whole_weights(results: list[Ran], model: str, shapes: Mapping[str, tuple[int, ...]]) -> dict[str, np.ndarray]:
    """The trained weights of a model, put together from the boxes of all ranks, which agree where they overlap."""
    found = {name: np.full(shape, np.nan, dtype=np.float32) for name, shape in shapes.items()}
    for result in results:
        for name, start, stop, values in result.weights.get(model, ()):
            box = tuple(slice(a, b) for a, b in zip(start, stop, strict=True))
            known = found[name][box]
            assert np.isnan(known).all() or np.array_equal(known, values), f"replicas of {name} differ"
            found[name][box] = values
    return found


def check(plan: Plan, results: list[Ran], expected: plain_loop.Outcome) -> dict[str, float]:
    """The largest relative differences of a run's rows, metrics and weights from the plain loop's."""
    worst = {"rows": 0.0, "metrics": 0.0, "weights": 0.0}
    for step in range(len(expected.rows)):
        for container, wanted in expected.rows[step].items():
            if container in plan.rpeg.inputs:
                continue
            seen = np.zeros(len(wanted), dtype=bool)
            for result in results:
                for numbers, values in result.rows.get((step, container), ()):
                    seen[numbers] = True
                    if wanted.dtype == torch.int32:
                        assert np.array_equal(values, wanted[numbers]), f"{container} of step {step}"
                    else:
                        worst["rows"] = max(worst["rows"], relative(values, wanted[numbers].numpy()))
            assert seen.all(), f"rows of {container} of step {step} were not made"
        for operator, metrics in expected.metrics[step].items():
            answers = [done for result in results for label, done in result.done if label == f"{operator}@{step}"]
            assert answers, operator
            for answer in answers:
                assert set(answer.metrics) == set(metrics)
                for name, value in metrics.items():
                    difference = abs(answer.metrics[name] - value) / max(abs(value), SMALL)
                    worst["metrics"] = max(worst["metrics"], difference)
    for model in expected.models:
        if plan.rpeg.model(model).trainable:
            wanted = {name: tensor.numpy() for name, tensor in expected.weights(model).items()}
            found = whole_weights(results, model, {name: value.shape for name, value in wanted.items()})
            for name, value in wanted.items():
                worst["weights"] = max(worst["weights"], relative(found[name], value))
    return worst


def check_transfers(plan: Plan, results: list[Ran], steps: int = STEPS) -> None:
    """What was delivered is what lowering charges."""
    window = Window(plan.rpeg, plan.assignments, plan.workload, split_lengths=plan.options.split_lengths)
    measured = transfers(plan, results)
    planned = {
        node.label: node.payload_bytes
        for step in range(steps)
        for node in window.nodes(step)
        if node.container is not None
    }
    assert {label: charged for label, (charged, _) in measured.items()} == planned


def document(name: str) -> dict[str, Any]:
    """The experiment of an algorithm; ``ppo-ac`` is PPO with a shared backbone."""
    if name != "ppo-ac":
        return experiment(name)
    return experiment("ppo", structure={"actor_critic_sharing": [True]})


def check_plan(name: str, assignments: dict[str, Assignment], expected: plain_loop.Outcome, lengths: Any = ()) -> None:
    chosen = document(name)
    if lengths:
        chosen["workload"]["response_lengths"] = lengths
    plan = make_plan(chosen, assignments)
    results = run_world(run_plan, ranks_of(plan), plan, settings(), STEPS, True, timeout_s=300.0)
    worst = check(plan, results, expected)
    assert max(worst.values()) <= TOLERANCE, worst
    check_transfers(plan, results)
    trainers = sum(1 for op in plan.rpeg.operators for rank in range(ranks_of(plan)) if _trains(plan, op, rank))
    assert sum(result.artifacts for result in results) == trainers, "only the results are left"
    assert sum(result.kept_bytes for result in results) == 0


def _trains(plan: Plan, operator: Any, rank: int) -> bool:
    allocation = plan.assignments[operator.name].allocation
    return operator.role.value == "training" and allocation.start <= rank < allocation.stop


@pytest.mark.slow
@pytest.mark.parametrize("name", ["another layout for every invocation on the same workers", *list(PHASED)[:1]])
def test_a_session_runs_the_plan_and_its_trace_proves_it(name: str, oracle: Any, tmp_path: Path) -> None:
    """The whole way: controller, launcher, workers, trace, metrics, export."""
    chosen, expected = document("grpo"), oracle("grpo")
    if name in PHASED:
        chosen["workload"]["response_lengths"] = LENGTHS
    plan = make_plan(chosen, (GRPO | PHASED)[name])
    steps: dict[int, Mapping[str, float]] = {}
    request = RunRequest(steps=STEPS, output=tmp_path, step_finished=steps.__setitem__)
    with open_session(plan, settings()) as session:
        session.run(request)
    verdict = verify_plan(plan, tmp_path / TRACE_FILE)
    assert not verdict.findings, verdict.findings
    for step, metrics in enumerate(expected.metrics):
        for metric, value in metrics["actor_training"].items():
            found = steps[step][f"actor_training/{metric}"]
            assert abs(found - value) <= TOLERANCE * max(abs(value), SMALL), f"{metric} of step {step}"
    read = reader(tmp_path / "actor", plan.rpeg.model("actor").spec)
    for parameter, tensor in expected.weights("actor").items():
        whole = Fragment(parameter, tuple(tensor.shape), (0,) * tensor.dim(), tuple(tensor.shape))
        assert relative(read(whole).numpy(), tensor.numpy()) <= TOLERANCE, parameter


QUICK = ("another layout for every invocation on the same workers",)


def cases(plans: dict[str, dict[str, Assignment]]) -> list[Any]:
    return [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in plans]


@pytest.mark.parametrize("name", cases(GRPO))
def test_grpo(name: str, oracle: Any) -> None:
    check_plan("grpo", GRPO[name], oracle("grpo"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(PHASED))
def test_grpo_in_length_phases(name: str, oracle: Any) -> None:
    check_plan("grpo", PHASED[name], oracle("grpo"), LENGTHS)


@pytest.mark.parametrize("name", cases(PPO))
def test_ppo(name: str, oracle: Any) -> None:
    check_plan("ppo", PPO[name], oracle("ppo"))


@pytest.mark.slow
@pytest.mark.parametrize("name", list(SHARED))
def test_ppo_with_a_shared_backbone(name: str, oracle: Any) -> None:
    check_plan("ppo-ac", SHARED[name], oracle("ppo-ac"))


@pytest.mark.parametrize("name", cases(DPO))
def test_dpo(name: str, oracle: Any) -> None:
    check_plan("dpo", DPO[name], oracle("dpo"))
