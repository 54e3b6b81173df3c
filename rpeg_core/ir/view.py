"""An RPEG as a networkx graph, for drawing, checking and third-party analysis; never used while searching."""

from __future__ import annotations

import networkx as nx

from rpeg_core.ir.graph import Role, Rpeg

__all__ = ["data_order", "to_networkx", "training_operator"]


def to_networkx(graph: Rpeg) -> nx.MultiDiGraph:
    """Nodes are operator names (attributes ``role``, ``model``), edges carry ``kind``, ``container`` and ``bytes``."""
    view = nx.MultiDiGraph(name=graph.name)
    for operator in graph.operators:
        view.add_node(operator.name, role=operator.role.value, model=operator.model)
    for kind, edges in (("data", graph.data_edges), ("publication", graph.publication_edges)):
        for edge in edges:
            size = graph.container(edge.container).bytes
            view.add_edge(edge.source, edge.target, kind=kind, container=edge.container, bytes=size)
    return view


def data_order(graph: Rpeg) -> tuple[str, ...]:
    """Operators in topological order of the data edges; among the ready ones the graph's own order decides."""
    within = nx.MultiDiGraph()
    within.add_nodes_from(operator.name for operator in graph.operators)
    within.add_edges_from((edge.source, edge.target) for edge in graph.data_edges)
    return tuple(nx.lexicographical_topological_sort(within, key=graph.index))


def training_operator(graph: Rpeg, model: str) -> str | None:
    """The operator that trains ``model``, None for a frozen model."""
    return next((op.name for op in graph.operators if model in op.models and op.role is Role.TRAINING), None)
