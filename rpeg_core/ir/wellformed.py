"""Well-formedness of an RPEG (paper, section A-B): every violation is reported, not just the first."""

from __future__ import annotations

import re
from collections import Counter

import networkx as nx

from rpeg_core.errors import GraphError
from rpeg_core.ir.graph import ContainerKind, Role, Rpeg

_NAME = re.compile(r"[\w.-]+")

__all__ = ["require_well_formed", "violations"]


def violations(graph: Rpeg) -> list[str]:
    """All broken rules of ``graph``, one sentence each, empty when it is well-formed.

    Rules: W0 names are well formed, unique and known; W1 interface consistency; W2 a trainable model has one training
    operator, which writes its weights, and publication edges start there, carry those weights and lead to every
    operator that serves the model, each of which comes before it in the step; W3 boundary consistency, and what is
    read was written earlier in the step; W4 ``(V, E_data)`` is acyclic.
    """
    found = _names(graph)
    if found:  # the other rules look names up
        return found
    cycle = _cycle(graph)
    return _interfaces(graph) + _publications(graph) + _boundary(graph) + (cycle or _order(graph))


def require_well_formed(graph: Rpeg) -> Rpeg:
    """``graph`` itself.

    Raises:
        GraphError: naming every violation.
    """
    found = violations(graph)
    if found:
        raise GraphError(
            f"the graph {graph.name!r} is not well-formed", facts=found, hint="correct the algorithm template"
        )
    return graph


def _names(graph: Rpeg) -> list[str]:
    found = []
    kinds = {
        "operator": [operator.name for operator in graph.operators],
        "container": [container.name for container in graph.containers],
        "model": [model.name for model in graph.models],
    }
    for kind, names in kinds.items():
        for name, count in sorted(Counter(names).items()):
            if count > 1:
                found.append(f"W0: {kind} {name!r} is declared {count} times")
        found.extend(
            f"W0: {kind} name {name!r} must be letters, digits, '_', '-' or '.'"
            for name in sorted(set(names))
            if not _NAME.fullmatch(name)
        )
    operators, containers, models = (set(names) for names in kinds.values())
    for container in graph.containers:
        if container.kind is ContainerKind.WEIGHTS and container.model not in models:
            found.append(f"W0: weights container {container.name!r} belongs to unknown model {container.model!r}")
        if container.elements < 0 or container.bytes_per_element < 0:
            found.append(f"W0: container {container.name!r} has a negative size")
    for operator in graph.operators:
        for model in operator.models:
            if model not in models:
                found.append(f"W0: operator {operator.name!r} invokes unknown model {model!r}")
        if operator.fused and (operator.role is not Role.TRAINING or operator.model != operator.fused[0].model):
            found.append(f"W0: operator {operator.name!r} is fused; it must train, and its model be the first's")
        names = [training.name for training in operator.fused]
        for name in sorted({name for name in names if names.count(name) > 1 or not _NAME.fullmatch(name)}):
            found.append(f"W0: operator {operator.name!r} fuses a training named {name!r}: not a name, or not unique")
        if operator.model is None and operator.role is not Role.INFERENCE:
            found.append(f"W0: operator {operator.name!r} has no model, so its role must be inference")
        if (operator.model is None) == (operator.seconds_per_sample is None):
            found.append(f"W0: operator {operator.name!r} must have a model or seconds_per_sample, and not both")
        if operator.seconds_per_sample is not None and not operator.seconds_per_sample >= 0:
            found.append(f"W0: operator {operator.name!r} has seconds_per_sample {operator.seconds_per_sample!r}")
        for name in sorted((operator.inputs | operator.outputs) - containers):
            found.append(f"W0: operator {operator.name!r} names unknown container {name!r}")
    for edge in (*graph.data_edges, *graph.publication_edges):
        for end in (edge.source, edge.target):
            if end not in operators:
                found.append(f"W0: edge {_show(edge)} names unknown operator {end!r}")
        if edge.container not in containers:
            found.append(f"W0: edge {_show(edge)} names unknown container {edge.container!r}")
    for name in sorted((graph.inputs | graph.outputs) - containers):
        found.append(f"W0: the boundary names unknown container {name!r}")
    for model in graph.models:
        if model.staleness < 0 or (model.staleness and not model.trainable):
            found.append(f"W0: model {model.name!r} has staleness {model.staleness}; a frozen model has 0")
    return found


def _interfaces(graph: Rpeg) -> list[str]:
    found = []
    for edge in (*graph.data_edges, *graph.publication_edges):
        if edge.container not in graph.operator(edge.source).outputs:
            found.append(f"W1: edge {_show(edge)}: {edge.source!r} does not write container {edge.container!r}")
        if edge.container not in graph.operator(edge.target).inputs:
            found.append(f"W1: edge {_show(edge)}: {edge.target!r} does not read container {edge.container!r}")
    for edge in graph.data_edges:
        if graph.container(edge.container).kind is not ContainerKind.DATA:
            found.append(f"W1: data edge {_show(edge)} carries weights; only publication edges do")
    return found


def _publications(graph: Rpeg) -> list[str]:
    found = []
    trainers: dict[str, str] = {}
    for operator in graph.operators:
        if operator.role is not Role.TRAINING:
            continue
        for model in operator.models:
            if not any(graph.container(name).model == model for name in operator.outputs):
                found.append(f"W2: training operator {operator.name!r} does not write the weights of {model!r}")
            if model in trainers:
                found.append(f"W2: {trainers[model]!r} and {operator.name!r} both train {model!r}")
            trainers.setdefault(model, operator.name)
            if not graph.model(model).trainable:
                found.append(f"W2: {operator.name!r} trains {model!r}, which is declared frozen")
    for edge in graph.publication_edges:
        source, container = graph.operator(edge.source), graph.container(edge.container)
        if graph.operator(edge.target).model not in source.models or (
            source.fused and graph.operator(edge.target).model != container.model
        ):
            found.append(
                f"W2: publication edge {_show(edge)}: {edge.target!r} does not invoke model "
                f"{container.model if source.fused else source.model!r}"
            )
        if source.role is not Role.TRAINING:
            found.append(f"W2: publication edge {_show(edge)}: {edge.source!r} is not a training operator")
        if container.kind is not ContainerKind.WEIGHTS or container.model not in source.models:
            found.append(
                f"W2: publication edge {_show(edge)}: container {edge.container!r} does not hold the weights of "
                f"model {' or '.join(map(repr, source.models)) or None}"
            )
    return found


def _boundary(graph: Rpeg) -> list[str]:
    found = []
    read = set().union(*(operator.inputs for operator in graph.operators))
    written = set().union(*(operator.outputs for operator in graph.operators))
    data = {container.name for container in graph.containers if container.kind is ContainerKind.DATA}
    weights = {container.name for container in graph.containers} - data
    for name in sorted(read & data - written - graph.inputs):
        found.append(f"W3: container {name!r} is read but nothing writes it and it is no graph input")
    for name in sorted(written & data - read - graph.outputs):
        found.append(f"W3: container {name!r} is written but nothing reads it and it is no graph output")
    for name in sorted(read & weights - graph.inputs):
        found.append(f"W3: weights {name!r} are read but are no graph input (their version 0)")
    for name in sorted(written & weights - graph.outputs):
        found.append(f"W3: weights {name!r} are written but are no graph output")
    for name in sorted(graph.inputs - read):
        found.append(f"W3: graph input {name!r} is read by no operator")
    for name in sorted(graph.outputs - written):
        found.append(f"W3: graph output {name!r} is written by no operator")
    return found


def _within_step(graph: Rpeg) -> nx.DiGraph:
    within = nx.DiGraph()
    within.add_nodes_from(operator.name for operator in graph.operators)
    within.add_edges_from((edge.source, edge.target) for edge in graph.data_edges)
    return within


def _cycle(graph: Rpeg) -> list[str]:
    within = _within_step(graph)
    if nx.is_directed_acyclic_graph(within):
        return []
    cycle = [source for source, *_ in nx.find_cycle(within)]
    return [f"W4: data edges form a cycle: {' -> '.join([*cycle, cycle[0]])}"]


def _order(graph: Rpeg) -> list[str]:
    """What must happen earlier in the same step, needs the data edges to be acyclic."""
    within, found = _within_step(graph), []
    before = {operator.name: nx.ancestors(within, operator.name) for operator in graph.operators}
    for operator in graph.operators:
        for name in sorted(operator.inputs):
            makers = [other.name for other in graph.operators if name in other.outputs]
            if graph.container(name).kind is ContainerKind.DATA and makers and not before[operator.name] & set(makers):
                found.append(
                    f"W3: {operator.name!r} reads container {name!r}, but no data edges lead to it from {makers[0]!r}"
                )
    for trainer in (operator for operator in graph.operators if operator.role is Role.TRAINING):
        published = {edge.target for edge in graph.publication_edges if edge.source == trainer.name}
        for operator in graph.operators:
            if operator.model not in trainer.models or operator.role is Role.TRAINING:
                continue
            if operator.name not in before[trainer.name]:
                path = f"no data edges lead from it to {trainer.name!r}"
                found.append(f"W2: {operator.name!r} serves {operator.model!r} but {path}")
            if operator.name not in published:
                found.append(f"W2: {trainer.name!r} does not publish its weights to {operator.name!r}")
    return found


def _show(edge: object) -> str:
    return f"{edge.source} -{edge.container}-> {edge.target}"  # type: ignore[attr-defined]
