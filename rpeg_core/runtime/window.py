"""The executable graph of a run of any length, folded into one shape per kind of step.

``lower(unroll(rpeg, K))`` repeats: from step ``max tau + 1`` on, every step has the same nodes, and the same edges from
itself and from earlier steps. A :class:`Window` lowers the first few steps once, keeps those before that point as they
are and the repeating one as a template, and answers for step 99,999 as for step 3. A node is named by its step and its
position in the step (the order in which lowering creates the nodes of one step), or by one index over the run.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

import attrs

from rpeg_core.errors import GraphError
from rpeg_core.ir import Rpeg
from rpeg_core.passes.lower import ExecutableGraph, Node, NodeKind, lower
from rpeg_core.passes.unroll import unroll
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.artifacts import ArtifactReads
from rpeg_core.runtime.protocol import Artifact
from rpeg_core.spec.workload import Workload

__all__ = ["NodeRef", "Read", "StepShape", "Window"]

NodeRef = tuple[int, int]
"""(distance in steps, position): back to a predecessor, or on to a successor."""

Read = tuple[int, int, str]
"""(steps back, position of the maker, container); the position of initial weights ``i`` is ``-1 - i``."""


@attrs.frozen(kw_only=True, eq=False)
class StepShape:
    """The nodes of one step and what connects them; every field has one entry per position.

    Attributes:
        nodes: as lowered, with the step and the versions of the step that the shape was taken from.
        predecessors: back to what must be done before; distance 0 is the same step.
        successors: on to what waits for it, in later steps too.
        vacating: back to the operators that must be done before a transfer may bring weights, beside its predecessors:
            those that serve the version whose room it takes. So a place keeps tau versions of a model with staleness
            tau, as memory is planned (:func:`rpeg_core.costing.memory.serving_copies`), and never one more.
        vacated: on to the transfers that wait for this operator in that way.
        reads: the artifacts that the node needs.
        writes: the containers that it makes.
        readers: for each container of ``writes``, on to the nodes that read it.
        rank: place in the order of execution within the step: transfers first, then topological.
        carried: for a transfer, how many steps earlier what it carries was made; 0 for an operator.
    """

    nodes: tuple[Node, ...]
    predecessors: tuple[tuple[NodeRef, ...], ...]
    successors: tuple[tuple[NodeRef, ...], ...]
    vacating: tuple[tuple[NodeRef, ...], ...]
    vacated: tuple[tuple[NodeRef, ...], ...]
    reads: tuple[tuple[Read, ...], ...]
    writes: tuple[tuple[str, ...], ...]
    readers: tuple[tuple[tuple[NodeRef, ...], ...], ...]
    rank: tuple[int, ...]
    carried: tuple[int, ...]


class Window:
    """Every step of the executable graph of one configuration.

    Args:
        rpeg: the graph.
        assignments: an assignment for every operator.
        workload: gives the length phases and the bytes of a weight element.
        split_lengths: as for :func:`rpeg_core.passes.lower.lower`.

    Attributes:
        steady_step: the first step that all later ones look like, ``max tau + 1``.
        depth: how many steps may be in progress at once, ``sum of (tau(m) + 1) + 1`` over the trainable models. Models
            that wait for each other, as in PPO, are never further apart, so that this holds nothing up that the graph
            lets run; it does hold back operators that wait for nothing, whose outputs would pile up.
        initial: the weights that are there from the start.

    Raises:
        GraphError: the executable graph does not repeat, or a step waits for a later one.
    """

    def __init__(
        self, rpeg: Rpeg, assignments: ExecutionPlan, workload: Workload, *, split_lengths: bool = True
    ) -> None:
        self.rpeg = rpeg
        self.steady_step = max(rpeg.staleness.values(), default=0) + 1
        self.depth = sum(tau + 1 for tau in rpeg.staleness.values()) + 1
        graph = lower(unroll(rpeg, self.steady_step + 2), assignments, workload, split_lengths=split_lengths)
        reads = ArtifactReads(graph)
        self.initial = reads.initial
        self._trainable = frozenset(rpeg.staleness)
        self._shapes = _shapes(graph, reads, self.steady_step, self._trainable)
        sizes = [len(shape.nodes) for shape in self._shapes]
        self._first_index = [sum(sizes[:step]) for step in range(len(sizes))]

    def shape(self, step: int) -> StepShape:
        """The shape of a step; the same object for all steps from ``steady_step`` on."""
        return self._shapes[min(step, self.steady_step)]

    def index(self, step: int, position: int) -> int:
        """The number of a node over the whole run, ascending by step."""
        if step < self.steady_step:
            return self._first_index[step] + position
        size = len(self._shapes[-1].nodes)
        return self._first_index[-1] + (step - self.steady_step) * size + position

    def locate(self, index: int) -> tuple[int, int]:
        """(step, position) of a node, the inverse of :meth:`index`."""
        if index < self._first_index[-1]:
            step = bisect.bisect_right(self._first_index, index) - 1
            return step, index - self._first_index[step]
        steps, position = divmod(index - self._first_index[-1], len(self._shapes[-1].nodes))
        return self.steady_step + steps, position

    def node(self, step: int, position: int) -> Node:
        """The node itself, its ``index`` counted over the run."""
        template = self.shape(step).nodes[position]
        version = template.version
        if version is not None and template.model in self._trainable:
            version += step - template.step
        return Node(
            index=self.index(step, position),
            kind=template.kind,
            operator=template.operator,
            step=step,
            phase=template.phase,
            allocation=template.allocation,
            source=template.source,
            layout=template.layout,
            microbatches=template.microbatches,
            mode=template.mode,
            container=template.container,
            payload_bytes=template.payload_bytes,
            model=template.model,
            version=version,
            also=template.also,
        )

    def nodes(self, step: int) -> Iterator[Node]:
        """The nodes of a step, by position."""
        return (self.node(step, position) for position in range(len(self.shape(step).nodes)))

    def edges(self, step: int) -> Iterator[tuple[int, int]]:
        """(index of a predecessor, index) for every edge into a step."""
        for position, before in enumerate(self.shape(step).predecessors):
            for back, other in before:
                yield self.index(step - back, other), self.index(step, position)

    def artifact(self, step: int, position: int, container: str) -> Artifact:
        """What the node at (step, position) makes; a negative position names initial weights."""
        if position < 0:
            return self.initial[-1 - position]
        maker = self.shape(step).nodes[position]
        return Artifact(self.index(step, position), container, maker.allocation, maker.layout)


@attrs.frozen(eq=False)
class _Step:
    """A step as lowered: what it is and what it waits for, not yet what waits for it."""

    nodes: tuple[Node, ...]
    predecessors: tuple[tuple[NodeRef, ...], ...]
    vacating: tuple[tuple[NodeRef, ...], ...]
    reads: tuple[tuple[Read, ...], ...]


def _repeats(later: _Step, earlier: _Step, trainable: frozenset[str]) -> bool:
    """Whether two steps are equal but for their number and the versions of trainable models."""

    def plain(node: Node) -> Node:
        moves = node.version is not None and node.model in trainable
        return attrs.evolve(node, index=0, step=0, version=node.version - node.step if moves else node.version)

    return (
        list(map(plain, later.nodes)) == list(map(plain, earlier.nodes))
        and later.predecessors == earlier.predecessors
        and later.vacating == earlier.vacating
        and later.reads == earlier.reads
    )


def _shapes(
    graph: ExecutableGraph, reads: ArtifactReads, steady: int, trainable: frozenset[str]
) -> tuple[StepShape, ...]:
    """The shapes of steps ``0 .. steady`` of a graph of at least ``steady + 2`` steps."""
    indices: list[list[int]] = [[] for _ in range(graph.steps)]
    place: list[NodeRef] = []  # (step, position) of every node
    for node in graph.nodes:
        place.append((node.step, len(indices[node.step])))
        indices[node.step].append(node.index)
    before = graph.predecessors()

    def back(step: int, index: int) -> NodeRef:
        earlier, position = place[index]
        if earlier > step:
            raise GraphError(
                f"step {step} of graph {graph.rpeg.name!r} waits for {graph.nodes[index].label} of a later step",
                hint="correct the algorithm template",
            )
        return step - earlier, position

    steps = [
        _Step(
            nodes=tuple(graph.nodes[i] for i in members),
            predecessors=tuple(tuple(back(k, p) for p in before[i]) for i in members),
            vacating=tuple(_vacating(graph, indices, graph.nodes[i]) for i in members),
            reads=tuple(tuple((0, p, c) if p < 0 else (*back(k, p), c) for p, c in reads.by_node[i]) for i in members),
        )
        for k, members in enumerate(indices)
    ]
    if not _repeats(steps[steady + 1], steps[steady], trainable):
        raise GraphError(
            f"the executable graph of {graph.rpeg.name!r} does not repeat from step {steady} on",
            facts=["each published model must be the model that the publication's target invokes"],
            hint="correct the algorithm template",
        )
    return tuple(_shape(steps[: steady + 1], k, reads) for k in range(steady + 1))


def _vacating(graph: ExecutableGraph, indices: list[list[int]], node: Node) -> tuple[NodeRef, ...]:
    """The operators of tau steps before that serve a transfer's model where the transfer brings it."""
    tau = graph.rpeg.staleness.get(node.model or "", 0)
    if node.kind is NodeKind.OP or tau == 0 or node.step < tau:
        return ()
    found = []
    for position, index in enumerate(indices[node.step - tau]):
        other = graph.nodes[index]
        here = (other.allocation, other.layout) == (node.allocation, node.layout)
        if here and other.kind is NodeKind.OP and node.model in other.models:
            found.append((tau, position))
    return tuple(found)


def _shape(steps: list[_Step], k: int, reads: ArtifactReads) -> StepShape:
    """The shape of step ``k``; the last of ``steps`` stands for all that follow."""
    step = steps[k]
    writes = tuple(reads.writes(node) for node in step.nodes)
    successors: list[list[NodeRef]] = [[] for _ in step.nodes]
    vacated: list[list[NodeRef]] = [[] for _ in step.nodes]
    readers: list[dict[str, list[NodeRef]]] = [{container: [] for container in made} for made in writes]
    for ahead in range(len(steps)):  # nothing reaches back further than to step 0
        later = steps[min(k + ahead, len(steps) - 1)]
        for position, (before, serving, inputs) in enumerate(
            zip(later.predecessors, later.vacating, later.reads, strict=True)
        ):
            for distance, other in before:
                if distance == ahead:
                    successors[other].append((ahead, position))
            for distance, other in serving:
                if distance == ahead:
                    vacated[other].append((ahead, position))
            for distance, other, container in inputs:
                if distance == ahead and other >= 0:
                    readers[other][container].append((ahead, position))
    return StepShape(
        nodes=step.nodes,
        predecessors=step.predecessors,
        successors=tuple(map(tuple, successors)),
        vacating=step.vacating,
        vacated=tuple(map(tuple, vacated)),
        reads=step.reads,
        writes=writes,
        readers=tuple(tuple(map(tuple, by_container.values())) for by_container in readers),
        rank=_ranks(step),
        carried=tuple(
            0 if node.kind is NodeKind.OP else max((distance for distance, _ in before), default=0)
            for node, before in zip(step.nodes, step.predecessors, strict=True)
        ),
    )


def _ranks(step: _Step) -> tuple[int, ...]:
    """Transfers before operators, each in topological order, among equals in the order of lowering."""
    waiting = [sum(1 for distance, _ in before if distance == 0) for before in step.predecessors]
    after: list[list[int]] = [[] for _ in step.nodes]
    for position, before in enumerate(step.predecessors):
        for distance, other in before:
            if distance == 0:
                after[other].append(position)
    ready = [position for position, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        position = heapq.heappop(ready)
        order.append(position)
        for other in after[position]:
            waiting[other] -= 1
            if waiting[other] == 0:
                heapq.heappush(ready, other)
    order.sort(key=lambda position: step.nodes[position].kind is NodeKind.OP)  # stable
    rank = [0] * len(order)
    for place, position in enumerate(order):
        rank[position] = place
    return tuple(rank)
