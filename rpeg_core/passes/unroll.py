"""Unroll: the steady-state graph over K steps becomes an acyclic graph of invocations (paper, A-F).

Rules that hold for every unrolled graph (checked by :func:`violations`):
U1 an invocation per operator and step; U2 a publication edge of model m into step k starts at step
``k - tau(m) - 1``; U3 training invocations of one model are ordered by step; U4 acyclic.
"""

from __future__ import annotations

import enum

import attrs
import networkx as nx

from rpeg_core.ir import Role, Rpeg, training_operator

__all__ = [
    "EdgeKind",
    "Invocation",
    "UnrolledEdge",
    "UnrolledGraph",
    "required_version",
    "unroll",
    "violations",
]


class EdgeKind(enum.Enum):
    DATA = "data"
    PUBLICATION = "publication"
    UPDATE_ORDER = "update order"  # (t_m, k - 1) -> (t_m, k)


@attrs.frozen(order=True)
class Invocation:
    """Operator ``operator`` in step ``step``."""

    operator: str
    step: int

    def __str__(self) -> str:
        return f"{self.operator}@{self.step}"


@attrs.frozen
class UnrolledEdge:
    source: Invocation
    target: Invocation
    kind: EdgeKind
    container: str


@attrs.frozen(kw_only=True)
class UnrolledGraph:
    """Invocations step by step, in operator order; edges in the order lowering visits them."""

    rpeg: Rpeg
    steps: int
    invocations: tuple[Invocation, ...]
    edges: tuple[UnrolledEdge, ...]


def required_version(rpeg: Rpeg, invocation: Invocation) -> int | None:
    """The version of its model that an invocation uses: ``max(0, k - tau)`` when serving, ``k`` when training.

    None for a function; 0 for a frozen model.
    """
    model = rpeg.model_of(invocation.operator)
    if model is None:
        return None
    if not model.trainable:
        return 0
    if rpeg.operator(invocation.operator).role is Role.TRAINING:
        return invocation.step
    return max(0, invocation.step - model.staleness)


def unroll(rpeg: Rpeg, steps: int) -> UnrolledGraph:
    """``G -> G_bar`` over ``steps`` steps (K_eval >= 1)."""
    invocations = tuple(Invocation(op.name, k) for k in range(steps) for op in rpeg.operators)
    edges = [
        UnrolledEdge(Invocation(e.source, k), Invocation(e.target, k), EdgeKind.DATA, e.container)
        for k in range(steps)
        for e in rpeg.data_edges
    ]
    for edge in rpeg.publication_edges:
        tau = rpeg.model(rpeg.container(edge.container).model).staleness
        edges.extend(
            UnrolledEdge(
                Invocation(edge.source, k - tau - 1),
                Invocation(edge.target, k),
                EdgeKind.PUBLICATION,
                edge.container,
            )
            for k in range(tau + 1, steps)
        )
    for op in rpeg.operators:
        if op.role is Role.TRAINING:
            for model in op.models:
                weights = next(name for name in op.outputs if rpeg.container(name).model == model)
                edges.extend(
                    UnrolledEdge(Invocation(op.name, k - 1), Invocation(op.name, k), EdgeKind.UPDATE_ORDER, weights)
                    for k in range(1, steps)
                )
    return UnrolledGraph(rpeg=rpeg, steps=steps, invocations=invocations, edges=tuple(edges))


def violations(graph: UnrolledGraph) -> list[str]:
    """All broken rules U1-U4, empty when there are none."""
    found = []
    expected = {Invocation(op.name, k) for k in range(graph.steps) for op in graph.rpeg.operators}
    if set(graph.invocations) != expected or len(graph.invocations) != len(expected):
        found.append("U1: the invocations are not one per operator and step")
    for edge in graph.edges:
        if edge.kind is EdgeKind.PUBLICATION:
            model = graph.rpeg.model(graph.rpeg.container(edge.container).model)
            if edge.source.step != edge.target.step - model.staleness - 1:
                found.append(
                    f"U2: {edge.source} -> {edge.target} with tau({model.name}) = {model.staleness}: "
                    f"the source step must be {edge.target.step - model.staleness - 1}"
                )
    ordered = {(e.source, e.target) for e in graph.edges if e.kind is EdgeKind.UPDATE_ORDER}
    for model in graph.rpeg.models:
        trainer = training_operator(graph.rpeg, model.name)
        for k in range(1, graph.steps if trainer else 0):
            if (Invocation(trainer, k - 1), Invocation(trainer, k)) not in ordered:
                found.append(f"U3: {trainer}@{k - 1} -> {trainer}@{k} is missing")
    view = nx.DiGraph()
    view.add_nodes_from(graph.invocations)
    view.add_edges_from((e.source, e.target) for e in graph.edges)
    if not nx.is_directed_acyclic_graph(view):
        found.append("U4: the unrolled graph has a cycle")
    return found
