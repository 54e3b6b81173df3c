"""GRPO: the graph written out by hand for B=2, R=3, Lp=5, Lr=7, with a reward model and with a function."""

import attrs
import pytest
from rpeg_plugin_grpo import TEMPLATE, rpeg_algorithms
from rpeg_plugin_grpo.settings import Settings

from rpeg_core.errors import ExperimentError
from rpeg_core.ir import DataEdge, PublicationEdge, violations
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.workload import Workload

ACTOR = ModelSpec(
    name="tiny",
    family="llama",
    layers=2,
    hidden=8,
    heads=2,
    kv_heads=1,
    head_dim=4,
    ffn=16,
    gated_ffn=True,
    vocab=32,
    tied_embeddings=False,
)
REWARD = attrs.evolve(ACTOR, name="tiny-reward", head=Head.SCALAR)
WITH_MODEL = {"actor": ACTOR, "reward": REWARD, "reference": ACTOR}
WITH_FUNCTION = {"actor": ACTOR, "reference": ACTOR}
FUNCTION = Settings(reward_seconds_per_sample=0.25)
WORKLOAD = Workload(prompts=2, rollouts_per_prompt=3, prompt_tokens=5, response_tokens=7)
STRUCTURE = Structure(staleness=(("actor", 1),))


def build(models, settings=None, *, workload=WORKLOAD):
    return TEMPLATE.build(workload, models, STRUCTURE, settings or Settings())


def interfaces(graph):
    return {op.name: (op.role.value, op.model, set(op.inputs), set(op.outputs)) for op in graph.operators}


def expected_interfaces(reward):
    return {
        "actor_generation": (
            "generation",
            "actor",
            {"W_actor", "prompts"},
            {"completions", "actor_logprobs"},
        ),
        "reference_inference": (
            "inference",
            "reference",
            {"W_reference", "completions"},
            {"reference_logprobs"},
        ),
        **reward,
        "actor_training": (
            "training",
            "actor",
            {"W_actor", "completions", "actor_logprobs", "reference_logprobs", "rewards"},
            {"W_actor"},
        ),
    }


def expected_edges(reward):
    return {
        DataEdge("actor_generation", "reference_inference", "completions"),
        DataEdge("actor_generation", reward, "completions"),
        DataEdge("reference_inference", "actor_training", "reference_logprobs"),
        DataEdge(reward, "actor_training", "rewards"),
    }


def test_hook_returns_the_template():
    assert list(rpeg_algorithms()) == [TEMPLATE]
    assert [(role.name, role.trainable, role.optional) for role in TEMPLATE.roles] == [
        ("actor", True, False),
        ("reward", False, True),
        ("reference", False, False),
    ]
    assert TEMPLATE.structures == ()


def test_reward_model():
    graph = build(WITH_MODEL)
    expected = expected_interfaces(
        {"reward_inference": ("inference", "reward", {"W_reward", "completions"}, {"rewards"})}
    )
    assert expected == interfaces(graph)
    assert list(expected) == [op.name for op in graph.operators]
    assert expected_edges("reward_inference") == set(graph.data_edges)
    assert len(graph.data_edges) == 4
    assert (PublicationEdge("actor_training", "actor_generation", "W_actor"),) == graph.publication_edges
    assert {"prompts", "W_actor", "W_reward", "W_reference"} == graph.inputs
    assert {"W_actor"} == graph.outputs
    assert graph.staleness == {"actor": 1}
    assert violations(graph) == []


def test_reward_function():
    graph = build(WITH_FUNCTION, FUNCTION)
    expected = expected_interfaces({"reward_function": ("inference", None, {"completions"}, {"rewards"})})
    assert expected == interfaces(graph)
    assert list(expected) == [op.name for op in graph.operators]
    assert graph.operator("reward_function").seconds_per_sample == 0.25
    assert expected_edges("reward_function") == set(graph.data_edges)
    assert {"prompts", "W_actor", "W_reference"} == graph.inputs
    assert [model.name for model in graph.models] == ["actor", "reference"]


def test_container_sizes():
    assert {c.name: (c.elements, c.bytes_per_element) for c in build(WITH_MODEL).containers if c.model is None} == {
        "prompts": (2 * 5, 2),
        "completions": (2 * 3 * (5 + 7), 2),
        "actor_logprobs": (2 * 3 * 7, 2),
        "reference_logprobs": (2 * 3 * 7, 2),
        "rewards": (2 * 3, 2),
    }


def test_explicit_rollout_edges():
    graph = build(WITH_MODEL, Settings(explicit_rollout_edges=True))
    assert {
        DataEdge("actor_generation", "actor_training", "completions"),
        DataEdge("actor_generation", "actor_training", "actor_logprobs"),
    } == set(graph.data_edges) - set(build(WITH_MODEL).data_edges)


def test_a_free_reward_function_is_allowed():
    free = build(WITH_FUNCTION, Settings(reward_seconds_per_sample=0.0))
    assert free.operator("reward_function").seconds_per_sample == 0.0


def test_a_group_has_at_least_two_rollouts():
    with pytest.raises(ExperimentError) as caught:
        build(WITH_MODEL, workload=attrs.evolve(WORKLOAD, rollouts_per_prompt=1))
    assert str(caught.value) == (
        "error[experiment]: workload.rollouts_per_prompt is 1\n"
        "  allowed for grpo: at least 2, advantages are relative to the prompt's other rollouts\n"
        "hint: set workload.rollouts_per_prompt, e.g. to 8"
    )


def test_the_cost_of_a_reward_function_must_be_stated():
    with pytest.raises(ExperimentError) as caught:
        build(WITH_FUNCTION)
    assert str(caught.value) == (
        "error[experiment]: models.reward is missing and settings.grpo.reward_seconds_per_sample is not set\n"
        "  allowed: a reward model, or a reward function whose cost is stated\n"
        "hint: add models.reward, or settings: {grpo: {reward_seconds_per_sample: SECONDS}}"
    )


def test_a_reward_model_and_a_function_exclude_each_other():
    with pytest.raises(ExperimentError) as caught:
        build(WITH_MODEL, FUNCTION)
    assert str(caught.value) == (
        "error[experiment]: models.reward is tiny-reward and settings.grpo.reward_seconds_per_sample "
        "is 0.25\n"
        "  allowed: a reward model or a reward function, not both\n"
        "hint: remove models.reward or settings.grpo.reward_seconds_per_sample"
    )
