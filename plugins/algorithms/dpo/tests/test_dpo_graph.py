"""DPO: the graph written out by hand for 2 pairs, Lp=5, Lr=7."""

import attrs
import pytest
from rpeg_plugin_dpo import TEMPLATE, rpeg_algorithms

from rpeg_core.errors import ExperimentError
from rpeg_core.ir import DataEdge, PublicationEdge, violations
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload

POLICY = ModelSpec(
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
WORKLOAD = Workload(prompts=2, rollouts_per_prompt=2, prompt_tokens=5, response_tokens=7)


def build(workload=WORKLOAD):
    models = {"actor": POLICY, "reference": POLICY}
    return TEMPLATE.build(workload, models, Structure(staleness=(("actor", 1),)), TEMPLATE.settings())


def test_hook_returns_the_template():
    assert list(rpeg_algorithms()) == [TEMPLATE]
    assert [(role.name, role.trainable, role.head) for role in TEMPLATE.roles] == [
        ("actor", True, "lm"),
        ("reference", False, "lm"),
    ]


def test_operators_and_interfaces():
    graph = build()
    expected = {
        "actor_inference": ("inference", "actor", {"W_actor", "pairs"}, {"actor_logprobs"}),
        "reference_inference": ("inference", "reference", {"W_reference", "pairs"}, {"reference_logprobs"}),
        "actor_training": (
            "training",
            "actor",
            {"W_actor", "pairs", "actor_logprobs", "reference_logprobs"},
            {"W_actor"},
        ),
    }
    assert expected == {op.name: (op.role.value, op.model, set(op.inputs), set(op.outputs)) for op in graph.operators}
    assert list(expected) == [op.name for op in graph.operators]


def test_container_sizes():
    assert {c.name: (c.elements, c.bytes_per_element) for c in build().containers if c.model is None} == {
        "pairs": (2 * 2 * (5 + 7), 2),
        "actor_logprobs": (2 * 2 * 7, 2),
        "reference_logprobs": (2 * 2 * 7, 2),
    }


def test_edges_and_boundary():
    graph = build()
    assert (
        DataEdge("actor_inference", "actor_training", "actor_logprobs"),
        DataEdge("reference_inference", "actor_training", "reference_logprobs"),
    ) == graph.data_edges
    assert (PublicationEdge("actor_training", "actor_inference", "W_actor"),) == graph.publication_edges
    assert {"pairs", "W_actor", "W_reference"} == graph.inputs
    assert {"W_actor"} == graph.outputs
    assert graph.staleness == {"actor": 1}
    assert violations(graph) == []


@pytest.mark.parametrize("rollouts", [1, 3])
def test_a_pair_has_two_responses(rollouts):
    with pytest.raises(ExperimentError) as caught:
        build(attrs.evolve(WORKLOAD, rollouts_per_prompt=rollouts))
    assert str(caught.value) == (
        f"error[experiment]: workload.rollouts_per_prompt is {rollouts}\n"
        "  allowed for dpo: 2, the chosen and the rejected response of a pair\n"
        "hint: set workload.rollouts_per_prompt: 2"
    )
