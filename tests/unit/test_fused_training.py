"""One invocation that trains two models, level by level: graph, lowering, costs and memory, by hand."""

import attrs
import numpy as np
import pytest

from rpeg_core.costing.memory import device_memory
from rpeg_core.errors import GraphError
from rpeg_core.ir import RpegBuilder, Training, from_text, to_text, training_operator, violations
from rpeg_core.passes.lower import NodeKind, lower
from rpeg_core.passes.unroll import unroll
from rpeg_core.planning.candidates import legal_layouts
from rpeg_core.records import CostTerm, Target
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import on, toy_book, toy_memory_terms, toy_model, toy_plan, toy_ppo, toy_workload

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
TOGETHER = toy_plan(
    actor_generation=on(0, 2, tensor=2),
    reference_inference=on(2),
    reward_inference=on(3),
    critic_inference=on(0, 2),
    fused_training=on(0, 2, pipeline=2, microbatches=2),
)


def test_the_graph_has_one_operator_that_trains_and_publishes_both_models():
    graph = toy_ppo(fused=True)
    operator = graph.operator("fused_training")
    assert operator.models == ("actor", "critic")
    assert operator.trainings == (Training("actor_training", "actor"), Training("critic_training", "critic"))
    assert operator.outputs == {"W_actor", "W_critic"}
    assert [training_operator(graph, model) for model in ("actor", "critic")] == ["fused_training"] * 2
    assert [(e.source, e.container, e.target) for e in graph.publication_edges] == [
        ("fused_training", "W_actor", "actor_generation"),
        ("fused_training", "W_critic", "critic_inference"),
    ]
    line = "training fused_training model=actor fused=actor_training:actor,critic_training:critic reads="
    assert line in to_text(graph)
    assert from_text(to_text(graph)) == graph


def test_each_model_is_trained_once():
    b = RpegBuilder("twice")
    for name in ("a", "b"):
        b.model(name, toy_model(name), trainable=name == "a")
    b.data("rows", elements=1, bytes_per_element=1)
    b.training("own", "a", reads=["rows"])
    b.fused_training("both", {"x": "a", "x2": "b"}, reads=["rows"])
    with pytest.raises(GraphError) as caught:
        b.build()
    assert "W2: 'own' and 'both' both train 'a'" in str(caught.value)
    assert "W2: 'both' trains 'b', which is declared frozen" in str(caught.value)


def test_a_publication_carries_the_weights_of_the_model_that_it_serves():
    graph = toy_ppo(fused=True)
    first, second = graph.publication_edges
    crossed = attrs.evolve(graph, publication_edges=(first, attrs.evolve(second, container="W_actor")))
    assert any("does not invoke model 'actor'" in found for found in violations(crossed))


def test_both_models_are_redistributed_and_bound_to_the_version_of_the_step():
    graph = lower(unroll(toy_ppo(fused=True), 2), TOGETHER, toy_workload())
    trained = [node for node in graph.nodes if node.operator == "fused_training" and node.kind is NodeKind.OP]
    assert [(node.models, node.version) for node in trained] == [(("actor", "critic"), 0), (("actor", "critic"), 1)]
    moved = [(n.operator, n.model, n.step, n.version) for n in graph.nodes if n.kind is NodeKind.RESHARD]
    # Within a step each model goes from its serving layout to training's, and after it back.
    assert sorted(moved) == [
        ("actor_generation", "actor", 1, 1),
        ("critic_inference", "critic", 1, 1),
        ("fused_training", "actor", 0, 0),
        ("fused_training", "actor", 1, 1),
        ("fused_training", "critic", 0, 0),
        ("fused_training", "critic", 1, 1),
    ]


def test_each_model_has_its_own_staleness():
    graph = lower(unroll(toy_ppo(tau=1, critic_tau=0, fused=True), 3), TOGETHER, toy_workload())
    used = {(n.operator, n.step): n.version for n in graph.nodes if n.kind is NodeKind.OP}
    assert [used["actor_generation", k] for k in range(3)] == [0, 0, 1]
    assert [used["critic_inference", k] for k in range(3)] == [0, 1, 2]
    assert [used["fused_training", k] for k in range(3)] == [0, 1, 2]


SECONDS = {("actor", "training"): 4.0, ("critic", "training"): 3.0}


def test_a_term_without_a_word_on_fusion_adds_up_over_the_models():
    book = toy_book(toy_ppo(fused=True), MACHINE, seconds=SECONDS)
    assert set(book.operators["fused_training"].whole.total) == {7.0}


def test_a_term_may_price_the_interleaved_schedule():
    term = CostTerm(
        name="toy.overlap",
        summary="the longer of them",
        target=Target.OPERATOR,
        quantity="work",
        function=lambda batch: np.full(len(batch.layouts), SECONDS.get((batch.model.name, batch.role.value), 0.0)),
        fused=lambda batch: np.full(len(batch.layouts), max(SECONDS[p.model.name, "training"] for p in batch.parts)),
    )
    fused, apart = (toy_book(toy_ppo(fused=f), MACHINE, extra=[term]).operators for f in (True, False))
    assert set(fused["fused_training"].whole.total) == {4.0}
    assert set(apart["actor_training"].whole.total) == {4.0}
    assert set(apart["critic_training"].whole.total) == {3.0}


def test_the_training_state_of_both_models_stays_on_the_gpus():
    terms = toy_memory_terms(
        training_state={("actor", "training"): 800.0, ("critic", "training"): 400.0},
        weights={("actor", "training"): 80.0, ("critic", "training"): 40.0, ("critic", "inference"): 40.0},
        transient={("actor", "training"): 20.0, ("critic", "training"): 60.0},
    )
    graph = toy_ppo(fused=True)
    memory = device_memory(graph, TOGETHER, toy_book(graph, MACHINE, memory=terms))
    assert memory.peak.peak_bytes == (800 + 400) / 2 + (80 + 40) / 2 + (20 + 60) / 2
    assert memory.peak.moment == "fused_training"


def test_legal_layouts_are_legal_for_both_models():
    workload = toy_workload()
    one, other = (attrs.evolve(toy_model("m"), layers=layers) for layers in (4, 3))  # pp=2 needs an even number
    both = set(legal_layouts(MACHINE, workload, one, [other]))
    assert both == set(legal_layouts(MACHINE, workload, one)) & set(legal_layouts(MACHINE, workload, other))
    assert both < set(legal_layouts(MACHINE, workload, one))
