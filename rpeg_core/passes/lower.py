"""Lower: unrolled graph and execution plan become a graph of OP, COMM and RESHARD nodes (paper, A-G, Algorithm 4).

Choices where the paper is silent:

* "Downstream inference" of a generation is an inference operator reached by one data edge.
* Such an inference operator is split when it is disjoint from every generation operator that feeds it. Its other
  inputs arrive before its first sub-node; its outputs leave after its last. Rows move phase by phase on the data edges
  from generation to such an inference only: a generation that reads another one's rows waits for all of them.
* "An equal installation" is a Stage 4 transfer that brings the same version of a model to the same allocation in the
  same layout: a second consumer waits for it instead of getting its own. A Stage 3 RESHARD counts for its own target:
  serving operators of one model use the same version.
* "The same layout" of a model's weights is :attr:`Layout.weights`: what each GPU holds of them.
* With staleness a trainer keeps its own weights, which are newer than the served ones: Stage 3 brings it nothing, also
  where both use the same GPUs in different layouts.
* A transfer belongs to its consumer: it carries that operator's name and step for tie-breaking.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable

import attrs

from rpeg_core.ir import Role, Rpeg, data_order
from rpeg_core.passes.unroll import EdgeKind, Invocation, UnrolledEdge, UnrolledGraph, required_version
from rpeg_core.planning.assignment import Assignment, ExecutionPlan, Layout, Mode
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.workload import LengthPhase, Workload

__all__ = ["ExecutableGraph", "Node", "NodeKind", "lower", "split_operators"]


class NodeKind(enum.Enum):
    OP = "OP"
    COMM = "COMM"
    RESHARD = "RESHARD"


@attrs.frozen(kw_only=True)
class Node:
    """A schedulable unit.

    Attributes:
        index: position in the graph, creation order.
        kind: OP, COMM or RESHARD.
        operator: the operator that runs, or for a transfer the operator that waits for it.
        step: RL step of that operator.
        phase: 0-based length phase of a sub-node, None for a whole operator or transfer.
        allocation: GPUs of the operator; destination of a transfer.
        source: GPUs that a COMM reads from; equals ``allocation`` for RESHARD, None for OP.
        layout: degrees of the operator; of the destination for weights; None for data transfers.
        microbatches: of the operator, 0 for transfers.
        mode: how the operator is executed; the default for transfers.
        container: what a transfer carries.
        payload_bytes: bytes of a transfer, 0 for OP.
        model: invoked or carried model, None for data transfers and functions; the first of a fused operator.
        version: version of ``model`` that is used or installed.
        also: the further models of a fused operator, all used in ``version``: step k trains version k of each.
    """

    index: int
    kind: NodeKind
    operator: str
    step: int
    phase: int | None = None
    allocation: Allocation
    source: Allocation | None = None
    layout: Layout | None = None
    microbatches: int = 0
    mode: Mode = attrs.field(factory=Mode)
    container: str | None = None
    payload_bytes: float = 0.0
    model: str | None = None
    version: int | None = None
    also: tuple[str, ...] = ()

    @property
    def models(self) -> tuple[str, ...]:
        """All models that are used or installed in ``version``."""
        return (() if self.model is None else (self.model,)) + self.also

    @property
    def label(self) -> str:
        """A readable name, unique in the graph: ``actor_generation@2.1``, ``COMM rewards->actor_training@0#7``."""
        place = f"{self.operator}@{self.step}" + ("" if self.phase is None else f".{self.phase}")
        return place if self.kind is NodeKind.OP else f"{self.kind.value} {self.container}->{place}#{self.index}"


@attrs.frozen(kw_only=True)
class ExecutableGraph:
    """``G_hat``: nodes by index and precedence edges (source index, target index), without duplicates."""

    rpeg: Rpeg
    steps: int
    nodes: tuple[Node, ...]
    edges: tuple[tuple[int, int], ...]

    def predecessors(self) -> tuple[tuple[int, ...], ...]:
        """For each node its predecessors, ascending."""
        return _adjacency(len(self.nodes), ((target, source) for source, target in self.edges))

    def successors(self) -> tuple[tuple[int, ...], ...]:
        """For each node its successors, ascending."""
        return _adjacency(len(self.nodes), self.edges)


def _adjacency(count: int, pairs: Iterable[tuple[int, int]]) -> tuple[tuple[int, ...], ...]:
    found: list[list[int]] = [[] for _ in range(count)]
    for key, value in pairs:
        found[key].append(value)
    return tuple(tuple(sorted(values)) for values in found)


def split_operators(rpeg: Rpeg, plan: ExecutionPlan, phases: tuple[LengthPhase, ...]) -> frozenset[str]:
    """The operators that Stage 1 splits into length phases; empty with a single phase."""
    if len(phases) < 2:
        return frozenset()
    feeders: dict[str, list[str]] = {}
    for edge in rpeg.data_edges:
        pair = rpeg.operator(edge.source), rpeg.operator(edge.target)
        if pair[0].role is Role.GENERATION and pair[1].role is Role.INFERENCE:
            feeders.setdefault(edge.target, []).append(edge.source)
    split: set[str] = set()
    for inference, generations in feeders.items():
        here = plan[inference].allocation
        if all(here.disjoint(plan[generation].allocation) for generation in generations):
            split.update((inference, *generations))
    return frozenset(split)


def lower(
    graph: UnrolledGraph, plan: ExecutionPlan, workload: Workload, *, split_lengths: bool = True
) -> ExecutableGraph:
    """``(G_bar, P) -> G_hat`` in the four stages of Algorithm 4.

    Args:
        graph: the unrolled graph.
        plan: an assignment for every operator.
        workload: gives the length phases.
        split_lengths: False disables Stage 1 splitting (ablation A1).
    """
    lowering = _Lowering(graph, plan, workload, split_lengths)
    lowering.instantiate_operators()
    lowering.insert_data_transfers()
    lowering.redistribute_within_step()
    lowering.publish_across_steps()
    return lowering.result()


class _Lowering:
    def __init__(self, graph: UnrolledGraph, plan: ExecutionPlan, workload: Workload, split_lengths: bool) -> None:
        self.graph, self.rpeg, self.plan = graph, graph.rpeg, plan
        self.phases = workload.phases
        self.split = split_operators(self.rpeg, plan, self.phases) if split_lengths else frozenset()
        self.nodes: list[Node] = []
        self.edges: dict[tuple[int, int], None] = {}
        self.chains: dict[Invocation, list[int]] = {}
        self.installed: dict[tuple[str, int, Allocation, tuple[int, ...]], int] = {}
        self.redistributed: set[tuple[Invocation, str]] = set()

    # Stage 1
    def instantiate_operators(self) -> None:
        for invocation in self.graph.invocations:
            chain = [
                self.add_operator(invocation, phase.index if invocation.operator in self.split else None)
                for phase in (self.phases if invocation.operator in self.split else self.phases[:1])
            ]
            for before, after in itertools.pairwise(chain):
                self.precede(before, after)
            self.chains[invocation] = chain

    # Stage 2, and the phase transfers of Stage 1
    def insert_data_transfers(self) -> None:
        for edge in self.graph.edges:
            if edge.kind is not EdgeKind.DATA:
                continue
            source, target = self.chains[edge.source], self.chains[edge.target]
            container = self.rpeg.container(edge.container)
            roles = [self.rpeg.operator(end.operator).role for end in (edge.source, edge.target)]
            if roles == [Role.GENERATION, Role.INFERENCE] and len(source) > 1 and len(target) > 1:
                for phase, before, after in zip(self.phases, source, target, strict=True):
                    self.communicate(edge, before, after, container.bytes * phase.finishing, phase.index)
            elif self.assignment(edge.source).allocation == self.assignment(edge.target).allocation:
                self.precede(source[-1], target[0])
            else:
                self.communicate(edge, source[-1], target[0], float(container.bytes))

    # Stage 3
    def redistribute_within_step(self) -> None:
        order = data_order(self.rpeg)
        for model in self.rpeg.models:
            if not model.trainable:
                continue
            owners = [name for name in order if model.name in self.rpeg.operator(name).models]
            for first, second in itertools.pairwise(owners):
                a, b = self.plan[first], self.plan[second]
                if model.staleness > 0 and a.allocation.disjoint(b.allocation):
                    continue  # shadow pair: each side keeps its own copy
                for step in range(self.graph.steps):
                    u, v = Invocation(first, step), Invocation(second, step)
                    own = model.staleness > 0 and self.rpeg.operator(second).role is Role.TRAINING
                    resharded = a.layout.weights != b.layout.weights
                    if a.allocation != b.allocation or (own and resharded):
                        self.precede(self.chains[u][-1], self.chains[v][0])
                    elif resharded:
                        self.reshard(u, v, model.name)
                        self.redistributed.add((v, model.name))

    # Stage 4
    def publish_across_steps(self) -> None:
        for edge in self.graph.edges:
            if edge.kind is EdgeKind.UPDATE_ORDER:
                self.precede(self.chains[edge.source][-1], self.chains[edge.target][0])
            elif edge.kind is EdgeKind.PUBLICATION:
                self.publish(edge)

    def publish(self, edge: UnrolledEdge) -> None:
        source, target = self.assignment(edge.source), self.assignment(edge.target)
        first = self.chains[edge.target][0]
        model = self.rpeg.container(edge.container).model
        key = (model, self.version(edge.target), target.allocation, target.layout.weights)
        if (edge.target, model) in self.redistributed:  # Stage 3 brings this version from an operator that has it
            self.precede(self.chains[edge.source][-1], first)
        elif key in self.installed:
            self.precede(self.installed[key], first)
        elif source.allocation != target.allocation:
            n_max = max(source.allocation.size, target.allocation.size)
            share = (n_max - source.allocation.overlap(target.allocation)) / n_max
            node = self.communicate(
                edge, self.chains[edge.source][-1], first, self.rpeg.container(edge.container).bytes * share
            )
            self.installed[key] = node
        elif source.layout.weights != target.layout.weights:
            self.installed[key] = self.reshard(edge.source, edge.target, model)
        else:
            self.precede(self.chains[edge.source][-1], first)

    def reshard(self, source: Invocation, target: Invocation, model: str) -> int:
        assignment = self.assignment(target)
        container = next(c for c in self.rpeg.containers if c.model == model)
        node = self.add(
            kind=NodeKind.RESHARD,
            operator=target.operator,
            step=target.step,
            allocation=assignment.allocation,
            source=assignment.allocation,
            layout=assignment.layout,
            container=container.name,
            payload_bytes=float(container.bytes),
            model=model,
            version=self.version(target),
        )
        self.precede(self.chains[source][-1], node)
        self.precede(node, self.chains[target][0])
        return node

    def communicate(self, edge: UnrolledEdge, before: int, after: int, payload: float, phase: int | None = None) -> int:
        target = self.assignment(edge.target)
        model = self.rpeg.container(edge.container).model
        node = self.add(
            kind=NodeKind.COMM,
            operator=edge.target.operator,
            step=edge.target.step,
            phase=phase,
            allocation=target.allocation,
            source=self.assignment(edge.source).allocation,
            layout=None if model is None else target.layout,
            container=edge.container,
            payload_bytes=payload,
            model=model,
            version=None if model is None else self.version(edge.target),
        )
        self.precede(before, node)
        self.precede(node, after)
        return node

    def add_operator(self, invocation: Invocation, phase: int | None) -> int:
        assignment, models = self.assignment(invocation), self.rpeg.operator(invocation.operator).models
        return self.add(
            kind=NodeKind.OP,
            operator=invocation.operator,
            step=invocation.step,
            phase=phase,
            allocation=assignment.allocation,
            layout=assignment.layout,
            microbatches=assignment.microbatches,
            mode=assignment.mode,
            model=models[0] if models else None,
            version=self.version(invocation),
            also=models[1:],
        )

    def add(self, **fields: object) -> int:
        node = Node(index=len(self.nodes), **fields)  # type: ignore[arg-type]
        self.nodes.append(node)
        return node.index

    def precede(self, before: int, after: int) -> None:
        self.edges[(before, after)] = None

    def assignment(self, invocation: Invocation) -> Assignment:
        return self.plan[invocation.operator]

    def version(self, invocation: Invocation) -> int | None:
        return required_version(self.rpeg, invocation)

    def result(self) -> ExecutableGraph:
        return ExecutableGraph(
            rpeg=self.rpeg, steps=self.graph.steps, nodes=tuple(self.nodes), edges=tuple(sorted(self.edges))
        )
