"""The forms of a graph: text, dictionary and networkx view, over random graphs and by hand."""

import json

import attrs
import networkx as nx
import pytest
from hypothesis import given

from rpeg_core.errors import GraphError
from rpeg_core.ir import data_order, from_dict, from_text, to_dict, to_networkx, to_text, training_operator
from rpeg_core.testing.strategies import rpegs
from rpeg_core.testing.toys import toy_mini, toy_ppo

MINI_TEXT = """\
rpeg mini
model actor trainable staleness=1 spec=SPEC
weights W_actor elements=20000 bytes=2 model=actor
data prompts elements=1600 bytes=2
data completions elements=3200 bytes=2
generation actor_generation model=actor reads=W_actor,prompts writes=completions
training actor_training model=actor reads=W_actor,completions writes=W_actor
edge actor_generation -completions-> actor_training
publish actor_training -W_actor-> actor_generation
input W_actor
input prompts
output W_actor
"""


def mini_text():
    spec = json.dumps(toy_mini().models[0].spec.to_dict(), sort_keys=True, separators=(",", ":"))
    return MINI_TEXT.replace("SPEC", spec)


def test_text_of_the_smallest_graph():
    assert to_text(toy_mini(tau=1)) == mini_text()


@given(rpegs())
def test_text_round_trip(graph):
    text = to_text(graph)
    assert from_text(text) == graph
    assert to_text(from_text(text)) == text


@given(rpegs())
def test_json_round_trip(graph):
    document = json.loads(json.dumps(to_dict(graph)))
    assert from_dict(document) == graph
    assert to_dict(from_dict(document)) == document


@pytest.mark.parametrize(
    ("line", "fact"),
    [
        ("model actor trained staleness=1 spec={}", "'trained' is neither trainable nor frozen"),
        ("container prompts elements=1600 bytes=2", "unknown word 'container'"),
        ("data prompts elements=many bytes=2", "invalid literal for int() with base 10: 'many'"),
        ("data prompts elements=1600", "'bytes'"),
        ("edge actor_generation completions actor_training", "'NoneType' object has no attribute 'groups'"),
        ("generation actor_generation model=actor reads=prompts", "'writes'"),
    ],
)
def test_an_unreadable_line_is_named(line, fact):
    with pytest.raises(GraphError) as caught:
        from_text(f"rpeg broken\n{line}\n")
    assert str(caught.value) == f"error[graph]: line 2 of the graph text cannot be read: {line!r}\n  {fact}"


def test_an_unreadable_document_is_named():
    document = to_dict(toy_mini())
    del document["containers"][0]["kind"]
    with pytest.raises(GraphError, match="the graph document cannot be read: KeyError: 'kind'"):
        from_dict(document)


def test_view_has_every_operator_and_edge_with_its_bytes():
    view = to_networkx(toy_mini(tau=1))
    assert dict(view.nodes(data=True)) == {
        "actor_generation": {"role": "generation", "model": "actor"},
        "actor_training": {"role": "training", "model": "actor"},
    }
    assert list(view.edges(data=True)) == [
        ("actor_generation", "actor_training", {"kind": "data", "container": "completions", "bytes": 6400}),
        (
            "actor_training",
            "actor_generation",
            {"kind": "publication", "container": "W_actor", "bytes": 40000},
        ),
    ]


@given(rpegs())
def test_view_keeps_parallel_edges(graph):
    view = to_networkx(graph)
    assert list(view) == [operator.name for operator in graph.operators]
    assert view.number_of_edges() == len(graph.data_edges) + len(graph.publication_edges)
    data = [(u, v, k) for u, v, k, kind in view.edges(keys=True, data="kind") if kind == "data"]
    assert nx.is_directed_acyclic_graph(view.edge_subgraph(data))


def test_data_order_follows_edges_before_the_graphs_order():
    graph = toy_ppo()
    generation, reference, reward, critic, actor_training, critic_training = graph.operators
    mixed = attrs.evolve(graph, operators=(critic_training, reward, generation, critic, actor_training, reference))
    assert data_order(mixed) == (
        "actor_generation",
        "reward_inference",
        "critic_inference",
        "reference_inference",
        "critic_training",
        "actor_training",
    )


@given(rpegs())
def test_data_order_is_topological(graph):
    order = data_order(graph)
    assert sorted(order) == sorted(operator.name for operator in graph.operators)
    assert all(order.index(edge.source) < order.index(edge.target) for edge in graph.data_edges)


def test_training_operator():
    graph = toy_ppo()
    assert training_operator(graph, "critic") == "critic_training"
    assert training_operator(graph, "reward") is None
