"""Unrolling against edges listed by hand, and against the formula on random graphs."""

from __future__ import annotations

from collections import Counter

import attrs
import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.ir import Role
from rpeg_core.passes.unroll import EdgeKind, Invocation, required_version, unroll, violations
from rpeg_core.testing.strategies import rpegs
from rpeg_core.testing.toys import toy_actor_critic, toy_mini, toy_ppo


def edges(graph, kind):
    return [f"{e.source} -{e.container}-> {e.target}" for e in graph.edges if e.kind is kind]


@pytest.mark.parametrize(
    ("tau", "expected"),
    [
        (
            0,  # step k uses the weights made in step k - 1
            [
                "actor_training@0 -W_actor-> actor_generation@1",
                "actor_training@1 -W_actor-> actor_generation@2",
                "actor_training@2 -W_actor-> actor_generation@3",
            ],
        ),
        (
            1,  # steps 0 and 1 use version 0
            [
                "actor_training@0 -W_actor-> actor_generation@2",
                "actor_training@1 -W_actor-> actor_generation@3",
            ],
        ),
        (2, ["actor_training@0 -W_actor-> actor_generation@3"]),
        (3, []),
        (7, []),
    ],
)
def test_publication_edges_of_four_steps(tau, expected):
    assert edges(unroll(toy_mini(tau=tau), 4), EdgeKind.PUBLICATION) == expected


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_updates_are_ordered_whatever_the_staleness(tau):
    assert edges(unroll(toy_mini(tau=tau), 4), EdgeKind.UPDATE_ORDER) == [
        "actor_training@0 -W_actor-> actor_training@1",
        "actor_training@1 -W_actor-> actor_training@2",
        "actor_training@2 -W_actor-> actor_training@3",
    ]


def test_data_edges_stay_within_their_step():
    assert edges(unroll(toy_mini(), 2), EdgeKind.DATA) == [
        "actor_generation@0 -completions-> actor_training@0",
        "actor_generation@1 -completions-> actor_training@1",
    ]


def test_each_model_has_its_own_staleness():
    graph = unroll(toy_ppo(tau=1, critic_tau=0), 3)
    assert edges(graph, EdgeKind.PUBLICATION) == [
        "actor_training@0 -W_actor-> actor_generation@2",
        "critic_training@0 -W_critic-> critic_inference@1",
        "critic_training@1 -W_critic-> critic_inference@2",
    ]
    assert edges(graph, EdgeKind.UPDATE_ORDER) == [
        "actor_training@0 -W_actor-> actor_training@1",
        "actor_training@1 -W_actor-> actor_training@2",
        "critic_training@0 -W_critic-> critic_training@1",
        "critic_training@1 -W_critic-> critic_training@2",
    ]


def test_every_consumer_of_a_shared_model_gets_its_publication():
    assert edges(unroll(toy_actor_critic(tau=1), 3), EdgeKind.PUBLICATION) == [
        "training@0 -W_shared-> generation@2",
        "training@0 -W_shared-> value_inference@2",
    ]


def test_one_step_has_no_edge_across_steps():
    graph = unroll(toy_ppo(), 1)
    assert {e.kind for e in graph.edges} == {EdgeKind.DATA}
    assert len(graph.edges) == 9
    assert len(graph.invocations) == 6


@pytest.mark.parametrize(
    ("operator", "versions"),
    [
        ("actor_generation", [0, 0, 0, 1]),  # tau = 2: max(0, k - 2)
        ("critic_inference", [0, 1, 2, 3]),  # tau = 0: k
        ("actor_training", [0, 1, 2, 3]),  # updates version k, whatever tau
        ("reference_inference", [0, 0, 0, 0]),  # frozen
    ],
)
def test_required_versions(operator, versions):
    graph = toy_ppo(tau=2, critic_tau=0)
    assert [required_version(graph, Invocation(operator, k)) for k in range(4)] == versions


def test_a_publication_carries_the_version_that_its_target_requires():
    # (t, j) turns version j into version j + 1
    for tau in (0, 1, 2):
        graph = unroll(toy_ppo(tau=tau), 5)
        for edge in graph.edges:
            if edge.kind is EdgeKind.PUBLICATION:
                assert required_version(graph.rpeg, edge.target) == edge.source.step + 1


@given(rpegs(), st.integers(1, 6))
@settings(max_examples=60, deadline=None)
def test_any_graph_unrolls_into_an_acyclic_graph_that_obeys_the_formula(rpeg, steps):
    graph = unroll(rpeg, steps)
    assert graph.invocations == tuple(Invocation(op.name, k) for k in range(steps) for op in rpeg.operators)
    assert violations(graph) == []
    view = nx.DiGraph((e.source, e.target) for e in graph.edges)
    assert nx.is_directed_acyclic_graph(view)

    expected = Counter()
    for edge in rpeg.data_edges:
        for k in range(steps):
            expected[edge.source, k, edge.target, k, "data"] += 1
    for edge in rpeg.publication_edges:
        tau = rpeg.staleness[rpeg.operator(edge.target).model]
        for k in range(steps):
            if k > tau:
                expected[edge.source, k - tau - 1, edge.target, k, "publication"] += 1
    for op in rpeg.operators:
        for k in range(1, steps):
            if op.role is Role.TRAINING:
                expected[op.name, k - 1, op.name, k, "update order"] += len(op.models)
    assert expected == Counter(
        (e.source.operator, e.source.step, e.target.operator, e.target.step, e.kind.value) for e in graph.edges
    )


def test_each_broken_rule_is_reported():
    graph = unroll(toy_mini(tau=1), 4)
    data = [e for e in graph.edges if e.kind is EdgeKind.DATA]
    publications = [e for e in graph.edges if e.kind is EdgeKind.PUBLICATION]
    ordered = [e for e in graph.edges if e.kind is EdgeKind.UPDATE_ORDER]

    def broken(*edges, invocations=graph.invocations):
        return violations(attrs.evolve(graph, edges=tuple(edges), invocations=invocations))

    assert broken(*data, *publications, *ordered) == []
    assert broken(*data, *publications, *ordered, invocations=graph.invocations[1:]) == [
        "U1: the invocations are not one per operator and step"
    ]
    early = attrs.evolve(publications[0], target=Invocation("actor_generation", 1))
    assert broken(*data, early, *ordered) == [
        "U2: actor_training@0 -> actor_generation@1 with tau(actor) = 1: the source step must be -1"
    ]
    assert broken(*data, *publications, *ordered[1:]) == ["U3: actor_training@0 -> actor_training@1 is missing"]
    back = attrs.evolve(data[0], source=data[0].target, target=data[0].source)
    assert broken(*data, back, *publications, *ordered) == ["U4: the unrolled graph has a cycle"]
