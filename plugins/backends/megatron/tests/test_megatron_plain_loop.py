"""The oracle itself: its parameters, its generation, and that the examples' hyperparameters learn."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs
import plain_loop
import pytest
import torch
import yaml
from megatron_plans import TINY, at, experiment, make_plan, settings
from rpeg_plugin_megatron.initial import initial_tensor, random_reader
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.structures import Structure
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.models import Head, ModelSpec

EXAMPLES = Path(__file__).parents[4] / "examples"

LLAMA = ModelSpec(name="tiny", family="llama", head_dim=8, **TINY)
SPECS = {
    "llama": LLAMA,
    "tied": attrs.evolve(LLAMA, tied_embeddings=True),
    "biases": attrs.evolve(LLAMA, qkv_bias=True, output_bias=True, ffn_bias=True),
    "qwen2": attrs.evolve(LLAMA, family="qwen2", qkv_bias=True),
    "qwen3": attrs.evolve(LLAMA, family="qwen3", qk_norm=True),
    "critic": attrs.evolve(LLAMA, head=Head.SCALAR),
    "actor and critic": attrs.evolve(LLAMA, head=Head.LM_AND_SCALAR),
}


@pytest.mark.parametrize("spec", SPECS.values(), ids=SPECS)
def test_its_parameters_are_those_that_the_model_counts(spec: ModelSpec) -> None:
    model = plain_loop.PlainModel(spec, random_reader(3))
    weights = model.export()
    assert sum(value.numel() for value in weights.values()) == spec.total_parameters
    assert sum(value.numel() for value in model.parameters()) == spec.total_parameters
    for name, value in weights.items():
        assert torch.equal(value, initial_tensor(name, tuple(value.shape), 3)), name


def test_greedy_responses_are_those_of_transformers() -> None:
    plan = make_plan(experiment("grpo"), {"": at("0")})
    job = plain_loop.job_of(plan, settings(temperature=0.0))
    found = plain_loop.run(job, 1, keep_rows=True)
    model = plain_loop.PlainModel(plan.rpeg.model("actor").spec, job.weights("actor"))
    sequences, rollouts = found.rows[0]["completions"], plan.workload.rollouts_per_prompt
    for prompt, row in zip(job.data.dataset.batch(0, 0, 8).prompts, sequences[::rollouts], strict=True):
        tokens = prompt[prompt != 0].long()[None]
        made = model.body.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            max_new_tokens=plan.workload.response_tokens,
            do_sample=False,
            eos_token_id=list(job.data.tokenizer.end_ids),
            pad_token_id=job.data.tokenizer.pad_id,
        )[0, tokens.shape[1] :]
        assert row[plan.workload.prompt_tokens :].tolist()[: len(made)] == made.tolist()


def test_log_probabilities_of_generation_are_the_teacher_forced_ones() -> None:
    """The reference repeats the actor, so that in the first step both have the same weights."""
    plan = make_plan(experiment("grpo"), {"": at("0")})
    found = plain_loop.run(plain_loop.job_of(plan, settings(temperature=0.7)), 1, keep_rows=True)
    rows = found.rows[0]
    torch.testing.assert_close(rows["actor_logprobs"], rows["reference_logprobs"], rtol=1e-5, atol=1e-5)
    assert found.metrics[0]["actor_training"]["kl"] < 1e-6


@pytest.mark.parametrize("kl_penalty", ["loss", "reward"])
@pytest.mark.parametrize("shared", [False, True])
def test_ppo_runs_with_all_its_options(shared: bool, kl_penalty: str) -> None:
    values = {
        "learning_rate": 1e-3,
        "epochs": 2,
        "minibatches": 2,
        "entropy_coefficient": 0.01,
        "kl_penalty": kl_penalty,
    }
    document = experiment("ppo", settings={"ppo": values})
    planner = Planner(parse_experiment(document), Registry())
    graph = planner.graph(Structure(staleness=(), actor_critic_sharing=shared))
    plan = attrs.evolve(make_plan(document, {"": at("0")}), rpeg=graph)
    metrics = plain_loop.run(plain_loop.job_of(plan, settings()), 2).metrics
    trained = ("actor_critic_training",) if shared else ("actor_training", "critic_training")
    names = {name for operator in trained for name in metrics[1][operator]}
    assert names >= {"reward", "kl", "policy_loss", "value_loss", "entropy", "grad_norm", "loss"}
    # The second pass meets a policy that has moved.
    assert abs(metrics[0][trained[0]]["policy_change"]) > 1e-6


def example(name: str) -> tuple[Plan, Settings]:
    """A plan of an example, wherever it would run, and the backend's settings."""
    document = yaml.safe_load((EXAMPLES / f"{name}.yaml").read_text())
    chosen = settings(**document["settings"].pop("megatron"))
    document["cluster"] = {"hardware": "h100", "gpus_per_node": 4}
    return make_plan(document, {"": at("0")}), chosen


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "metric", "least"),
    [("grpo-copy-digits", "reward", 0.8), ("ppo-copy-digits", "reward", 0.8), ("dpo-toy", "accuracy", 0.95)],
)
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_the_examples_learn(name: str, metric: str, least: float, seed: int) -> None:
    plan, chosen = example(name)
    job = plain_loop.job_of(plan, attrs.evolve(chosen, seed=seed))
    curve: list[float] = []

    def goes_on(step: int, metrics: Any) -> bool:
        curve.append(metrics["actor_training"][metric])
        return sum(curve[-5:]) / 5 < least

    plain_loop.run(job, chosen.steps, after_step=goes_on)
    assert curve[0] < 0.7
    assert sum(curve[-5:]) / 5 >= least, curve[-5:]
