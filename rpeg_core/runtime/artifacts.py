"""Which artifacts the nodes of an executable graph read; lowering leaves this implicit in its bare edges.

A node reads

* over a data or publication edge, what the producer made, or the transfer in between;
* a container of ``I(v)`` without an edge of its own (it "reaches training transitively", model.md section 1) from the
  data ancestors that wrote it, wherever they ran;
* every part of a length-split operator's output; where phase transfers connect two split operators, each sub-node its
  own part. What the first sub-node of an operator reads whole, the later ones read too;
* the initial weights (version 0) of a trainable model, when no node brought it a version.

A Stage 3 RESHARD from a serving operator reads the weights that this operator reads.
"""

from __future__ import annotations

import functools
import graphlib
from collections.abc import Iterable

from rpeg_core.ir import ContainerKind, DataEdge, PublicationEdge, Role
from rpeg_core.passes.lower import ExecutableGraph, Node, NodeKind
from rpeg_core.planning.assignment import Layout
from rpeg_core.runtime.protocol import Artifact
from rpeg_core.spec.machine import Allocation

__all__ = ["ArtifactReads", "Made"]

Made = tuple[int, str]
"""(index of the node that makes it, container); initial weights have an index of their own below 0."""


class ArtifactReads:
    """The artifacts read in one lowered graph.

    Attributes:
        initial: the initial weights; ``initial[i]`` has the index ``-1 - i``.
        by_node: what each node reads, in a fixed order.
    """

    def __init__(self, graph: ExecutableGraph) -> None:
        self._graph, self._rpeg = graph, graph.rpeg
        self._predecessors = graph.predecessors()
        self._chains: dict[tuple[str, int], list[int]] = {}
        for node in graph.nodes:
            if node.kind is NodeKind.OP:
                self._chains.setdefault((node.operator, node.step), []).append(node.index)
        self._initial: dict[tuple[str, Allocation, Layout | None], Artifact] = {}
        self._reads: list[dict[Made, None]] = [{} for _ in graph.nodes]  # ordered sets
        for index in graphlib.TopologicalSorter(dict(enumerate(self._predecessors))).static_order():
            self._visit(graph.nodes[index])
        self.by_node: tuple[tuple[Made, ...], ...] = tuple(map(tuple, self._reads))
        self.initial = tuple(self._initial.values())

    def writes(self, node: Node) -> tuple[str, ...]:
        """The containers that a node makes, sorted."""
        if node.kind is not NodeKind.OP:
            return (node.container,)
        return tuple(sorted(self._rpeg.operator(node.operator).outputs))

    def _visit(self, node: Node) -> None:
        found = self._reads[node.index]
        for index in self._predecessors[node.index]:
            for container in self._carried(self._graph.nodes[index], node):
                found.update(dict.fromkeys(self._makers(self._graph.nodes[index], node, container)))
        if node.kind is not NodeKind.OP:
            return
        found.update(dict.fromkeys(self._without_edge(node)))
        head = self._chains[node.operator, node.step][0]
        if node.index == head:
            found.update(dict.fromkeys(self._initial_weights(node)))
        else:
            found.update(dict.fromkeys(made for made in self._reads[head] if not self._is_one_part(made, node)))

    def _carried(self, before: Node, after: Node) -> tuple[str, ...]:
        """The containers that an edge of the executable graph brings; none when it only orders."""
        if before.kind is not NodeKind.OP:
            return (before.container,)
        if after.kind is not NodeKind.OP:
            return (after.container,)
        if before.step == after.step:
            here = before.operator != after.operator and before.allocation == after.allocation
            return self._between(self._rpeg.data_edges, before, after) if here else ()
        if before.operator == after.operator:
            return tuple(map(self._weights, before.models))
        in_place = before.allocation == after.allocation and before.layout.weights == after.layout.weights
        return self._between(self._rpeg.publication_edges, before, after) if in_place else ()

    def _makers(self, before: Node, after: Node, container: str) -> Iterable[Made]:
        """Who made what ``after`` gets from ``before``."""
        one_part = after.kind is not NodeKind.OP and after.phase is not None
        if before.kind is not NodeKind.OP or one_part:
            return [(before.index, container)]
        if container in self.writes(before):
            return [(part, container) for part in self._chains[before.operator, before.step]]
        return [made for made in self._reads[before.index] if made[1] == container]

    def _without_edge(self, node: Node) -> Iterable[Made]:
        over_edges = {edge.container for edge in self._rpeg.data_edges if edge.target == node.operator}
        for container in sorted(self._rpeg.operator(node.operator).inputs - over_edges):
            if self._rpeg.container(container).kind is ContainerKind.DATA:
                for ancestor in self._ancestors(node.operator):
                    if container in self._rpeg.operator(ancestor).outputs:
                        parts = self._chains[ancestor, node.step]
                        by_part = self._feeds_by_part(ancestor, node)
                        yield from ((part, container) for part in ([parts[node.phase]] if by_part else parts))

    def _initial_weights(self, node: Node) -> Iterable[Made]:
        for model in self._rpeg.models_of(node.operator) if node.version == 0 else ():
            container = self._weights(model.name)
            if model.trainable and all(other != container for _, other in self._reads[node.index]):
                key = (container, node.allocation, node.layout)
                artifact = self._initial.setdefault(key, Artifact(-1 - len(self._initial), *key))
                yield artifact.node, container

    def _is_one_part(self, made: Made, reader: Node) -> bool:
        """Whether only one sub-node of the reader's chain reads it."""
        if made[0] < 0:
            return False
        maker = self._graph.nodes[made[0]]
        if maker.kind is NodeKind.OP:
            return self._feeds_by_part(maker.operator, reader)
        return maker.phase is not None

    def _feeds_by_part(self, maker: str, reader: Node) -> bool:
        """Whether phase transfers connect two split operators (Stage 1), so that one part is there before the next."""
        return (
            reader.phase is not None
            and self._rpeg.operator(reader.operator).role is Role.INFERENCE
            and self._rpeg.operator(maker).role is Role.GENERATION
            and len(self._chains[maker, reader.step]) > 1
            and maker in self._parents.get(reader.operator, ())
        )

    def _ancestors(self, operator: str) -> list[str]:
        found: set[str] = set()
        waiting = [operator]
        while waiting:
            new = self._parents.get(waiting.pop(), frozenset()) - found
            found |= new
            waiting.extend(new)
        return sorted(found, key=self._rpeg.index)

    @functools.cached_property
    def _parents(self) -> dict[str, frozenset[str]]:
        targets = {edge.target for edge in self._rpeg.data_edges}
        edges = self._rpeg.data_edges
        return {name: frozenset(edge.source for edge in edges if edge.target == name) for name in targets}

    def _weights(self, model: str | None) -> str:
        return next(c.name for c in self._rpeg.containers if c.model == model and c.kind is ContainerKind.WEIGHTS)

    @staticmethod
    def _between(edges: Iterable[DataEdge | PublicationEdge], before: Node, after: Node) -> tuple[str, ...]:
        ends = (before.operator, after.operator)
        return tuple(edge.container for edge in edges if (edge.source, edge.target) == ends)
