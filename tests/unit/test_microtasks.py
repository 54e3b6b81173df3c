"""The schedule of a fused training: a drawn one, its length against a longest path, and what it can never do."""

from __future__ import annotations

import itertools

import networkx as nx
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.passes.microtasks import Microtask, interleaved_s, live_microbatches, microtasks

SHAPES = st.tuples(
    st.integers(1, 3), st.sampled_from((1, 2, 4, 6)), st.integers(1, 9)
)  # models, stages and microbatches, also fewer than stages


def text(stages):
    return [" ".join(map(str, stage)) for stage in stages]


def test_two_models_on_two_stages_as_drawn():
    assert text(microtasks(["a", "c"], 2, 2)) == [
        "F0 a F0 c B0 a F1 a B0 c F1 c B1 a B1 c",
        "F0 a B0 a F0 c B0 c F1 a B1 a F1 c B1 c",
    ]


def test_without_a_pipeline_every_backward_pass_follows_its_forward_pass():
    assert text(microtasks(["a", "c"], 1, 1)) == ["F0 a B0 a F0 c B0 c"]


def graph_of(stages, seconds):
    """Microtasks as nodes; an edge to the next one of the stage and to the one of the neighbour that needs it."""
    graph = nx.DiGraph()
    for place, stage in enumerate(stages):
        nodes = [(place, task) for task in stage]
        graph.add_nodes_from(nodes)
        edges = list(itertools.pairwise(nodes))
        for task in stage:
            other = place - 1 if task.backward else place + 1
            if 0 <= other < len(stages):
                edges.append(((place, task), (other, task)))
        graph.add_weighted_edges_from((u, v, seconds(*u)) for u, v in edges)
    graph.add_weighted_edges_from((node, "end", seconds(*node)) for node in list(graph))
    return graph


@settings(deadline=None)  # numba compiles
@given(SHAPES, st.data())
def test_the_length_is_that_of_the_longest_path(shape, data):
    models, pipeline, count = shape
    numbers = st.floats(0.01, 9.0)
    forward_s, backward_s = (
        np.array([[[data.draw(numbers)] for _ in range(2)] for _ in range(models)]) for _ in range(2)
    )
    names = [f"m{i}" for i in range(models)]

    def seconds(place, task):
        table = backward_s if task.backward else forward_s
        return float(table[names.index(task.training), int(place == pipeline - 1), 0])

    graph = graph_of(microtasks(names, pipeline, count), seconds)
    assert nx.is_directed_acyclic_graph(graph)  # no two stages ever wait for each other
    expected = nx.dag_longest_path_length(graph)
    assert interleaved_s(np.array([pipeline]), np.array([count]), forward_s, backward_s)[0] == pytest.approx(expected)


@given(SHAPES)
def test_every_stage_does_everything_once_and_holds_few_microbatches(shape):
    models, pipeline, count = shape
    names = [f"m{i}" for i in range(models)]
    everything = {Microtask(name, i, b) for name in names for i in range(count) for b in (False, True)}
    most = [0] * models
    for place, stage in enumerate(microtasks(names, pipeline, count)):
        assert len(stage) == len(everything)
        assert set(stage) == everything
        held: list[str] = []
        for task in stage:
            if task.backward:
                held.remove(task.training)
            else:
                held.append(task.training)
            assert len(held) <= pipeline - place
            if place == 0:
                most = [max(m, held.count(name)) for m, name in zip(most, names, strict=True)]
    assert max(live_microbatches(models, pipeline, count)) == max(most)
    assert sum(live_microbatches(models, pipeline, count)) == min(models * count, pipeline)


@pytest.mark.parametrize(("pipeline", "count"), [(1, 1), (2, 2), (4, 4), (4, 16)])
def test_equal_models_fill_and_drain_the_pipeline_once(pipeline, count):
    forward_s, backward_s = np.full((2, 2, 1), 1.0), np.full((2, 2, 1), 3.0)
    length = interleaved_s(np.array([pipeline]), np.array([count]), forward_s, backward_s)[0]
    assert length == 4.0 * (2 * count + pipeline - 1)
    assert length <= 2 * 4.0 * (count + pipeline - 1)  # one after the other
