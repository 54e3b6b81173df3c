"""The builder: what follows from declarations, and how it fails."""

import pytest

from rpeg_core.errors import GraphError
from rpeg_core.ir import (
    Container,
    ContainerKind,
    DataEdge,
    Operator,
    PublicationEdge,
    Role,
    RpegBuilder,
    weights_name,
)
from rpeg_core.testing.toys import toy_model

ACTOR = toy_model("tiny", parameters=20_000)


def declare(*, weight_bytes_per_element=2):
    """generation -completions-> judge -rewards-> training; ``lengths`` leaves the graph."""
    b = RpegBuilder("declared", weight_bytes_per_element=weight_bytes_per_element)
    b.model("actor", ACTOR, trainable=True, staleness=2)
    b.data("prompts", elements=10, bytes_per_element=4)
    b.data("completions", elements=30, bytes_per_element=4)
    b.data("lengths", elements=2, bytes_per_element=4)
    b.data("rewards", elements=2, bytes_per_element=2)
    b.generation("rollout", "actor", reads=["prompts"], writes=["completions", "lengths"])
    b.function("judge", reads=["completions"], writes=["rewards"], seconds_per_sample=0.5)
    b.training("learn", "actor", reads=["completions", "rewards"])
    b.connect("rollout", "completions", "judge", "learn")
    b.connect("judge", "rewards", "learn")
    b.publish("learn", "rollout")
    return b


def test_operators_read_and_write_their_weights():
    assert declare().build().operators == (
        Operator(
            name="rollout",
            role=Role.GENERATION,
            model="actor",
            inputs=frozenset({"W_actor", "prompts"}),
            outputs=frozenset({"completions", "lengths"}),
        ),
        Operator(
            name="judge",
            role=Role.INFERENCE,
            model=None,
            inputs=frozenset({"completions"}),
            outputs=frozenset({"rewards"}),
            seconds_per_sample=0.5,
        ),
        Operator(
            name="learn",
            role=Role.TRAINING,
            model="actor",
            inputs=frozenset({"W_actor", "completions", "rewards"}),
            outputs=frozenset({"W_actor"}),
        ),
    )


def test_a_model_brings_its_weights_container():
    assert declare(weight_bytes_per_element=4).build().container(weights_name("actor")) == Container(
        name="W_actor", kind=ContainerKind.WEIGHTS, elements=20_000, bytes_per_element=4, model="actor"
    )


def test_edges():
    graph = declare().build()
    assert graph.data_edges == (
        DataEdge("rollout", "judge", "completions"),
        DataEdge("rollout", "learn", "completions"),
        DataEdge("judge", "learn", "rewards"),
    )
    assert graph.publication_edges == (PublicationEdge("learn", "rollout", "W_actor"),)


def test_the_boundary_follows_from_what_is_read_and_written():
    graph = declare().build()
    assert graph.inputs == {"W_actor", "prompts"}
    assert graph.outputs == {"W_actor", "lengths"}


def test_lookup():
    graph = declare().build()
    assert graph.index("learn") == 2
    assert graph.model_of("rollout").spec == ACTOR
    assert graph.model_of("judge") is None
    assert graph.staleness == {"actor": 2}
    assert graph.container("completions").bytes == 120
    with pytest.raises(KeyError):
        graph.operator("rollouts")


def test_everything_wrong_is_reported_by_build():
    b = declare()
    b.connect("rollout", "rewards", "learn")
    b.connect("judge", "scores", "learn")
    b.publish("judge", "rollout")
    with pytest.raises(GraphError) as caught:
        b.build()
    assert caught.value.facts == (
        "W0: edge judge -scores-> learn names unknown container 'scores'",
        "W0: edge judge -W_judge-> rollout names unknown container 'W_judge'",
    )


def test_an_edge_the_operators_do_not_declare():
    b = declare()
    b.connect("rollout", "rewards", "learn")
    with pytest.raises(GraphError) as caught:
        b.build()
    assert caught.value.facts == ("W1: edge rollout -rewards-> learn: 'rollout' does not write container 'rewards'",)


def test_an_empty_graph_can_be_built():
    graph = RpegBuilder("empty").build()
    assert (graph.operators, graph.inputs, graph.outputs) == ((), frozenset(), frozenset())
