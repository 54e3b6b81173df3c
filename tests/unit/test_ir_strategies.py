"""The shared hypothesis strategies keep what their docstrings promise, and reach the cases that matter."""

from collections import Counter

import networkx as nx
import pytest
from hypothesis import Phase, find, given, settings

from rpeg_core.ir import Role, data_order
from rpeg_core.planning.candidates import illegal_assignment
from rpeg_core.testing.strategies import configurations, machines, rpegs, workloads

LIMIT = settings(max_examples=2000, phases=(Phase.generate,), database=None)


@given(rpegs())
def test_graphs_make_sense(graph):
    within = nx.MultiDiGraph((edge.source, edge.target) for edge in graph.data_edges)
    within.add_nodes_from(operator.name for operator in graph.operators)
    published = {(edge.source, edge.target) for edge in graph.publication_edges}
    writer = {name: op.name for op in graph.operators for name in op.outputs if op.role is not Role.TRAINING}
    assert 2 <= len(graph.operators) <= 8
    assert {name for op in graph.operators for name in op.models} == {model.name for model in graph.models}
    trained = Counter(name for op in graph.operators if op.role is Role.TRAINING for name in op.models)
    assert trained == dict.fromkeys(graph.staleness, 1)
    for training in graph.operators:
        if training.role is Role.TRAINING:
            served = {op.name for op in graph.operators if op.model in training.models} - {training.name}
            assert {target for source, target in published if source == training.name} == served
            assert served <= nx.ancestors(within, training.name)
    for operator in graph.operators:
        written = {writer[name] for name in operator.inputs if name in writer}
        assert written <= nx.ancestors(within, operator.name)


@given(configurations())
def test_plans_are_legal(configuration):
    c = configuration
    assert set(c.plan) == {operator.name for operator in c.rpeg.operators}
    for name, assignment in c.plan.items():
        for model in c.rpeg.models_of(name) or (None,):
            assert illegal_assignment(c.machine, c.workload, model and model.spec, assignment) is None


def served_twice(graph):
    return any(
        count > 1
        for model, count in Counter(op.model for op in graph.operators if op.role is not Role.TRAINING).items()
        if model in graph.staleness
    )


def not_in_data_order(graph):
    return data_order(graph) != tuple(operator.name for operator in graph.operators)


def reads_beyond_its_edges(graph):
    arriving = {(edge.target, edge.container) for edge in graph.data_edges}
    return any((op.name, name) not in arriving for op in graph.operators for name in op.inputs - graph.inputs)


def parallel_edges(graph):
    return max(Counter((e.source, e.target) for e in graph.data_edges).values(), default=0) > 1


GRAPH_CASES = {
    "eight operators": lambda graph: len(graph.operators) == 8,
    "a fused training": lambda graph: any(op.fused for op in graph.operators),
    "three trainable models": lambda graph: len(graph.staleness) == 3,
    "function": lambda graph: any(op.model is None for op in graph.operators),
    "mixed staleness": lambda graph: len(set(graph.staleness.values())) > 1,
    "served twice": served_twice,
    "not in data order": not_in_data_order,
    "reads beyond its edges": reads_beyond_its_edges,
    "parallel edges": parallel_edges,
}


@pytest.mark.parametrize("case", GRAPH_CASES.values(), ids=GRAPH_CASES)
def test_graphs_reach(case):
    assert case(find(rpegs(), case, settings=LIMIT))


def same_place_other_layout(configuration):
    seen = {}
    return any(seen.setdefault(a.allocation, a.layout) != a.layout for a in configuration.plan.values())


def other_layout_same_weights(configuration):
    seen = {}
    first = {a: seen.setdefault((a.allocation, a.layout.weights), a) for a in configuration.plan.values()}
    return any(a.layout != other.layout for a, other in first.items())


def overlapping_places(configuration):
    places = {a.allocation for a in configuration.plan.values()}
    return any(a != b and not a.disjoint(b) for a in places for b in places)


PLAN_CASES = {
    "same place, other layout": same_place_other_layout,
    "overlap": overlapping_places,
    "pipeline": lambda c: any(a.layout.pipeline > 1 for a in c.plan.values()),
    "context parallelism over nodes": lambda c: any(a.layout.stage > c.machine.gpus_per_node for a in c.plan.values()),
    "expert parallelism over replicas": lambda c: any(a.layout.expert > a.layout.stage for a in c.plan.values()),
    "other layout, same weights": other_layout_same_weights,
    "modes": lambda c: len({a.mode for a in c.plan.values()}) > 2,
    "several racks": lambda c: any(a.allocation.size > c.machine.gpus_per_rack for a in c.plan.values()),
}


@pytest.mark.parametrize("case", PLAN_CASES.values(), ids=PLAN_CASES)
def test_plans_reach(case):
    assert case(find(configurations(), case, settings=LIMIT))


def test_machines_and_workloads_reach_their_ends():
    assert find(machines(), lambda m: m.gpus == 32, settings=LIMIT).gpus == 32
    assert len(find(workloads(), lambda w: len(w.phases) == 4, settings=LIMIT).response_lengths) == 4
    assert find(machines(max_gpus=4), lambda m: m.gpus == 4, settings=LIMIT).gpus == 4
