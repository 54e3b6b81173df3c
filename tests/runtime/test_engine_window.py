"""The window against lowering the whole run, and the artifacts that it derives against the meaning of the graph."""

from __future__ import annotations

import attrs
import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.errors import GraphError
from rpeg_core.ir import ContainerKind, PublicationEdge, Role, RpegBuilder
from rpeg_core.passes.lower import ExecutableGraph, NodeKind, lower
from rpeg_core.passes.unroll import unroll
from rpeg_core.runtime.artifacts import ArtifactReads
from rpeg_core.runtime.window import Window
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import SKEWED, on, toy_mini, toy_model, toy_plan, toy_ppo, toy_workload

FEW = settings(max_examples=100, deadline=None)


def lowered(case: Configuration, steps: int, *, split: bool = True) -> ExecutableGraph:
    return lower(unroll(case.rpeg, steps), case.plan, case.workload, split_lengths=split)


def places(graph: ExecutableGraph) -> list[tuple[int, int]]:
    """(step, position in the step) of every node."""
    sizes = [0] * graph.steps
    found = []
    for node in graph.nodes:
        found.append((node.step, sizes[node.step]))
        sizes[node.step] += 1
    return found


@FEW
@given(configurations(), st.integers(1, 9), st.booleans())
def test_a_window_equals_the_lowered_graph_of_any_length(case: Configuration, steps: int, split: bool) -> None:
    window = Window(case.rpeg, case.plan, case.workload, split_lengths=split)
    graph = lowered(case, steps, split=split)
    place = places(graph)
    number = [window.index(*at) for at in place]
    expected = [attrs.evolve(node, index=i) for node, i in zip(graph.nodes, number, strict=True)]
    assert expected == [window.node(*at) for at in place]
    assert sorted((number[a], number[b]) for a, b in graph.edges) == sorted(
        edge for step in range(steps) for edge in window.edges(step)
    )


@FEW
@given(configurations(), st.integers(0, 9))
def test_indices_number_the_nodes_of_the_run_without_a_gap(case: Configuration, steps: int) -> None:
    window = Window(case.rpeg, case.plan, case.workload)
    place = [(step, p) for step in range(steps) for p in range(len(window.shape(step).nodes))]
    assert list(range(len(place))) == [window.index(*at) for at in place]
    assert place == [window.locate(index) for index in range(len(place))]


@FEW
@given(configurations())
def test_successors_and_readers_are_the_inverse_of_predecessors_and_reads(case: Configuration) -> None:
    window = Window(case.rpeg, case.plan, case.workload)
    steps = 2 * window.steady_step + 3
    back, on_, read, readers = set(), set(), set(), set()
    for k in range(steps):
        shape = window.shape(k)
        for p in range(len(shape.nodes)):
            back |= {((k - b, q), (k, p)) for b, q in shape.predecessors[p]}
            on_ |= {((k, p), (k + a, q)) for a, q in shape.successors[p] if k + a < steps}
            read |= {((k - b, q), c, (k, p)) for b, q, c in shape.reads[p] if q >= 0}
            for container, nodes in zip(shape.writes[p], shape.readers[p], strict=True):
                readers |= {((k, p), container, (k + a, q)) for a, q in nodes if k + a < steps}
    assert back == on_
    assert read == readers


@FEW
@given(configurations())
def test_order_within_a_step_puts_transfers_first_and_respects_precedence(case: Configuration) -> None:
    window = Window(case.rpeg, case.plan, case.workload)
    shape = window.shape(window.steady_step)
    assert sorted(shape.rank) == list(range(len(shape.nodes)))
    kinds = [shape.nodes[p].kind is NodeKind.OP for p in sorted(range(len(shape.rank)), key=shape.rank.__getitem__)]
    assert kinds == sorted(kinds)
    for p, before in enumerate(shape.predecessors):
        for back, q in before:
            if back == 0 and (shape.nodes[p].kind is NodeKind.OP) == (shape.nodes[q].kind is NodeKind.OP):
                assert shape.rank[q] < shape.rank[p]


# Artifacts


@FEW
@given(configurations(), st.integers(1, 5))
def test_what_a_node_reads_is_made_by_one_of_its_ancestors(case: Configuration, steps: int) -> None:
    graph = lowered(case, steps)
    reads = ArtifactReads(graph)
    view = nx.DiGraph(graph.edges)
    view.add_nodes_from(range(len(graph.nodes)))
    for node in graph.nodes:
        for maker, container in reads.by_node[node.index]:
            assert maker < 0 or maker in nx.ancestors(view, node.index)
            assert maker < 0 or container in reads.writes(graph.nodes[maker])


@FEW
@given(configurations(), st.integers(1, 5))
def test_an_operator_reads_every_container_of_its_interface_that_a_node_makes(case: Configuration, steps: int) -> None:
    graph = lowered(case, steps)
    reads = ArtifactReads(graph)
    data = {c.name for c in case.rpeg.containers if c.kind is ContainerKind.DATA}
    for node in graph.nodes:
        containers = {container for _, container in reads.by_node[node.index]}
        if node.kind is NodeKind.OP:
            assert case.rpeg.operator(node.operator).inputs & data - case.rpeg.inputs == containers & data
        else:
            assert containers <= {node.container}


@FEW
@given(configurations(), st.integers(1, 7))
def test_the_weights_that_an_operator_reads_are_of_the_version_it_is_bound_to(case: Configuration, steps: int) -> None:
    graph = lowered(case, steps)
    reads = ArtifactReads(graph)

    def versions(index: int, container: str) -> set[int]:
        """Followed back to the training or the initial weights that they come from."""
        if index < 0:
            return {0}
        node = graph.nodes[index]
        if node.kind is NodeKind.OP and case.rpeg.operator(node.operator).role is Role.TRAINING:
            return {node.step + 1}
        return set().union(*(versions(*made) for made in reads.by_node[index] if made[1] == container))

    for node in graph.nodes:
        for model in case.rpeg.models_of(node.operator):
            if node.kind is not NodeKind.OP or not model.trainable:
                continue
            found = [versions(*made) for made in reads.by_node[node.index] if made[1] == f"W_{model.name}"]
            if case.rpeg.operator(node.operator).role is Role.TRAINING:
                assert max(set().union(*found)) == node.version == node.step
            else:
                assert set().union(*found) == {node.version} == {max(0, node.step - model.staleness)}


def test_completions_reach_training_from_the_generation_that_made_them() -> None:
    """PPO has no edge from generation to training (model.md, section 1), yet training reads the completions."""
    plan = toy_plan(
        actor_generation=on(0, 2),
        reference_inference=on(2),
        reward_inference=on(3),
        critic_inference=on(2),
        actor_training=on(0, 2),
        critic_training=on(2, 4),
    )
    window = Window(toy_ppo(), plan, toy_workload(response_lengths=SKEWED))
    shape = window.shape(5)
    training = next(p for p, node in enumerate(shape.nodes) if node.label == "actor_training@1")
    made = [shape.nodes[p].label for back, p, c in shape.reads[training] if c == "completions"]
    assert made == ["actor_generation@1.0", "actor_generation@1.1", "actor_generation@1.2"]


def test_initial_weights_are_one_artifact_for_each_place_and_layout() -> None:
    plan = toy_plan(actor_generation=on(0, 2, tensor=2), actor_training=on(0, 2))
    window = Window(toy_mini(tau=1), plan, toy_workload())
    assert [(a.node, a.container, a.layout.tensor) for a in window.initial] == [(-1, "W_actor", 2), (-2, "W_actor", 1)]
    window = Window(toy_mini(tau=0), plan, toy_workload())  # without staleness training gets those of generation
    assert [(a.node, a.container, a.layout.tensor) for a in window.initial] == [(-1, "W_actor", 2)]
    same = Window(toy_mini(tau=1), toy_plan(actor_generation=on(0, 2), actor_training=on(2, 4)), toy_workload())
    assert [(a.node, str(a.allocation)) for a in same.initial] == [(-1, "0-1"), (-2, "2-3")]


def test_a_graph_that_does_not_repeat_is_refused() -> None:
    """Weights published to an operator of a frozen model: its version never changes, so they arrive only once."""
    b = RpegBuilder("odd")
    b.model("actor", toy_model("actor"), trainable=True)
    b.model("judge", toy_model("judge"), trainable=False)
    b.data("prompts", elements=1, bytes_per_element=2)
    b.data("scores", elements=1, bytes_per_element=2)
    b.inference("judging", "judge", reads=["prompts", "W_actor"], writes=["scores"])
    b.training("training", "actor", reads=["scores"])
    b.connect("judging", "scores", "training")
    graph = b.build()
    odd = attrs.evolve(graph, publication_edges=(PublicationEdge("training", "judging", "W_actor"),))
    with pytest.raises(GraphError, match="does not repeat from step 1 on"):
        Window(odd, toy_plan(judging=on(0), training=on(1)), toy_workload())
