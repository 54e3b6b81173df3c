"""PPO: the graphs against the paper's tables VII to IX, written out by hand for B=2, R=3, Lp=5, Lr=7."""

import attrs
import pytest
from rpeg_plugin_ppo import TEMPLATE, rpeg_algorithms
from rpeg_plugin_ppo.settings import Settings

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
# Per layer q, o: 2 * 8 * 8, k, v: 2 * 8 * 4, FFN: 3 * 8 * 16, two norms of 8; a final norm; embedding 32 * 8.
BODY = 2 * (128 + 64 + 384 + 16) + 8 + 256
LM, SCALAR = 256, 8

CRITIC = attrs.evolve(ACTOR, name="tiny-critic", head=Head.SCALAR)
MODELS = {"actor": ACTOR, "critic": CRITIC, "reward": CRITIC, "reference": ACTOR}
WORKLOAD = Workload(prompts=2, rollouts_per_prompt=3, prompt_tokens=5, response_tokens=7)
SEPARATE = Structure(staleness=(("actor", 1), ("critic", 0)))
SHARED = Structure(staleness=(("actor_critic", 1),), actor_critic_sharing=True)


def build(structure=SEPARATE, *, models=MODELS, workload=WORKLOAD, settings=None):
    return TEMPLATE.build(workload, models, structure, settings or Settings())


def interfaces(graph):
    return {op.name: (op.role.value, op.model, set(op.inputs), set(op.outputs)) for op in graph.operators}


def data_sizes(graph):
    return {c.name: (c.elements, c.bytes_per_element) for c in graph.containers if c.model is None}


def weights(graph):
    return {c.name: c.elements for c in graph.containers if c.model is not None}


def test_hook_returns_the_template():
    assert list(rpeg_algorithms()) == [TEMPLATE]
    assert [(role.name, role.trainable, role.head) for role in TEMPLATE.roles] == [
        ("actor", True, "lm"),
        ("critic", True, "scalar"),
        ("reward", False, "scalar"),
        ("reference", False, "lm"),
    ]


def test_separate_operators_in_order():
    expected = [
        "actor_generation",
        "reference_inference",
        "reward_inference",
        "critic_inference",
        "actor_training",
        "critic_training",
    ]
    assert expected == [op.name for op in build().operators]


def test_separate_interfaces_are_table_ix():
    signals = {"completions", "reference_logprobs", "rewards", "values"}
    assert {
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
        "reward_inference": ("inference", "reward", {"W_reward", "completions"}, {"rewards"}),
        "critic_inference": ("inference", "critic", {"W_critic", "completions"}, {"values"}),
        "actor_training": ("training", "actor", {"W_actor", "actor_logprobs", *signals}, {"W_actor"}),
        "critic_training": ("training", "critic", {"W_critic", *signals}, {"W_critic"}),
    } == interfaces(build())


def test_container_sizes_are_table_viii():
    assert data_sizes(build()) == {
        "prompts": (2 * 5, 2),
        "completions": (2 * 3 * (5 + 7), 2),
        "actor_logprobs": (2 * 3 * 7, 2),
        "reference_logprobs": (2 * 3 * 7, 2),
        "values": (2 * 3 * 7, 2),
        "rewards": (2 * 3, 2),
    }
    assert weights(build()) == {
        "W_actor": BODY + LM,
        "W_critic": BODY + SCALAR,
        "W_reward": BODY + SCALAR,
        "W_reference": BODY + LM,
    }


def test_every_container_has_the_working_precision():
    graph = build(workload=attrs.evolve(WORKLOAD, bytes_per_element=4))
    assert {4} == {container.bytes_per_element for container in graph.containers}


def test_separate_edges():
    graph = build()
    assert {
        DataEdge("actor_generation", "reference_inference", "completions"),
        DataEdge("actor_generation", "reward_inference", "completions"),
        DataEdge("actor_generation", "critic_inference", "completions"),
        DataEdge("reference_inference", "actor_training", "reference_logprobs"),
        DataEdge("reference_inference", "critic_training", "reference_logprobs"),
        DataEdge("reward_inference", "actor_training", "rewards"),
        DataEdge("reward_inference", "critic_training", "rewards"),
        DataEdge("critic_inference", "actor_training", "values"),
        DataEdge("critic_inference", "critic_training", "values"),
    } == set(graph.data_edges)
    assert len(graph.data_edges) == 9
    assert (
        PublicationEdge("actor_training", "actor_generation", "W_actor"),
        PublicationEdge("critic_training", "critic_inference", "W_critic"),
    ) == graph.publication_edges


def test_separate_boundary():
    graph = build()
    assert {"prompts", "W_actor", "W_critic", "W_reward", "W_reference"} == graph.inputs
    assert {"W_actor", "W_critic"} == graph.outputs
    assert violations(graph) == []


def test_explicit_rollout_edges():
    added = set(build(settings=Settings(explicit_rollout_edges=True)).data_edges) - set(build().data_edges)
    assert {
        DataEdge("actor_generation", "actor_training", "completions"),
        DataEdge("actor_generation", "critic_training", "completions"),
        DataEdge("actor_generation", "actor_training", "actor_logprobs"),
    } == added


def test_staleness_is_per_model():
    assert build().staleness == {"actor": 1, "critic": 0}
    assert build(Structure(staleness=(("critic", 2),))).staleness == {"actor": 0, "critic": 2}


def test_shared_operators_and_interfaces():
    graph = build(SHARED)
    expected = {
        "actor_critic_generation": (
            "generation",
            "actor_critic",
            {"W_actor_critic", "prompts"},
            {"completions", "actor_logprobs"},
        ),
        "reference_inference": (
            "inference",
            "reference",
            {"W_reference", "completions"},
            {"reference_logprobs"},
        ),
        "reward_inference": ("inference", "reward", {"W_reward", "completions"}, {"rewards"}),
        "actor_critic_inference": (
            "inference",
            "actor_critic",
            {"W_actor_critic", "completions"},
            {"values"},
        ),
        "actor_critic_training": (
            "training",
            "actor_critic",
            {"W_actor_critic", "completions", "actor_logprobs", "reference_logprobs", "rewards", "values"},
            {"W_actor_critic"},
        ),
    }
    assert expected == interfaces(graph)
    assert list(expected) == [op.name for op in graph.operators]


def test_shared_edges_and_boundary():
    graph = build(SHARED)
    assert {
        DataEdge("actor_critic_generation", "reference_inference", "completions"),
        DataEdge("actor_critic_generation", "reward_inference", "completions"),
        DataEdge("actor_critic_generation", "actor_critic_inference", "completions"),
        DataEdge("reference_inference", "actor_critic_training", "reference_logprobs"),
        DataEdge("reward_inference", "actor_critic_training", "rewards"),
        DataEdge("actor_critic_inference", "actor_critic_training", "values"),
    } == set(graph.data_edges)
    assert len(graph.data_edges) == 6
    assert (
        PublicationEdge("actor_critic_training", "actor_critic_generation", "W_actor_critic"),
        PublicationEdge("actor_critic_training", "actor_critic_inference", "W_actor_critic"),
    ) == graph.publication_edges
    assert {"prompts", "W_actor_critic", "W_reward", "W_reference"} == graph.inputs
    assert {"W_actor_critic"} == graph.outputs


def test_shared_model_has_one_backbone_and_both_heads():
    graph = build(SHARED)
    assert Head.LM_AND_SCALAR is graph.model("actor_critic").spec.head
    assert weights(graph) == {
        "W_actor_critic": BODY + LM + SCALAR,
        "W_reward": BODY + SCALAR,
        "W_reference": BODY + LM,
    }
    assert graph.staleness == {"actor_critic": 1}


def test_shared_explicit_rollout_edges():
    added = set(build(SHARED, settings=Settings(explicit_rollout_edges=True)).data_edges)
    assert {
        DataEdge("actor_critic_generation", "actor_critic_training", "completions"),
        DataEdge("actor_critic_generation", "actor_critic_training", "actor_logprobs"),
    } == added - set(build(SHARED).data_edges)


def test_a_probe_structure_names_the_trainable_models():
    assert build(Structure(staleness=(), actor_critic_sharing=True)).staleness == {"actor_critic": 0}


def test_sharing_needs_one_architecture():
    critic = attrs.evolve(CRITIC, name="small", layers=1, source="elsewhere")
    with pytest.raises(ExperimentError) as caught:
        build(SHARED, models=MODELS | {"critic": critic})
    assert str(caught.value) == (
        "error[experiment]: structure.actor_critic_sharing is true, but models.actor (tiny) and "
        "models.critic (small) have different architectures\n"
        "  layers: actor 2, critic 1\n"
        "  allowed: one backbone, which may differ in its head only\n"
        "hint: set structure.actor_critic_sharing: [false]"
    )
    assert len(build(models=MODELS | {"critic": critic}).operators) == 6


def test_fusion_trains_actor_and_critic_in_one_operator():
    fused, apart = build(attrs.evolve(SEPARATE, fusion=True)), build()
    operator = fused.operators[-1]
    assert [op.name for op in fused.operators[:-1]] == [op.name for op in apart.operators[:-2]]
    assert (operator.name, operator.models) == ("fused_training", ("actor", "critic"))
    assert [training.name for training in operator.trainings] == [op.name for op in apart.operators[-2:]]
    assert operator.inputs == apart.operators[-2].inputs | apart.operators[-1].inputs
    assert operator.outputs == {"W_actor", "W_critic"}
    assert {(e.source, e.container, e.target) for e in fused.publication_edges} == {
        ("fused_training", "W_actor", "actor_generation"),
        ("fused_training", "W_critic", "critic_inference"),
    }
    assert fused.staleness == {"actor": 1, "critic": 0}
