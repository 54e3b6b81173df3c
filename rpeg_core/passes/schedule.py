"""Schedule: greedy list scheduling of an executable graph with known durations (paper, A-H, Algorithm 5).

Policy. Repeatedly take the ready node with the smallest earliest start

    EST(v) = max(max finish of predecessors, max avail(d) over the GPUs v reserves).

Ties, in this order: COMM and RESHARD before OP; larger downstream rank; earlier operator in the graph's order; earlier
step; earlier node. ``rank(v) = T(v) + max rank of successors``; afterwards every sub-node of a length-split operator
takes the rank of the first one, so that unrelated work does not come between phases that share a KV cache.

Reserved GPUs: an OP its allocation, a transfer its destination, and its source too when ``reserve_source`` is set.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rpeg_core.passes.lower import ExecutableGraph, Node, NodeKind
from rpeg_core.spec.machine import Allocation

__all__ = ["Schedule", "Segments", "downstream_ranks", "reserved", "schedule", "violations"]


@attrs.frozen
class Segments:
    """The GPUs between neighbouring interval ends behave alike: ``bounds[i] .. bounds[i + 1] - 1`` is segment i.

    Costs of scheduling and memory then depend on the number of operators, not of GPUs.
    """

    bounds: tuple[int, ...]

    @classmethod
    def of(cls, allocations: Sequence[Allocation], gpus: int) -> Segments:
        """Segments of a cluster with ``gpus`` GPUs."""
        ends = {0, gpus}
        for allocation in allocations:
            ends.update((allocation.start, allocation.stop))
        return cls(tuple(sorted(ends)))

    @property
    def count(self) -> int:
        return len(self.bounds) - 1

    def allocation(self, segment: int) -> Allocation:
        return Allocation(self.bounds[segment], self.bounds[segment + 1])

    def within(self, allocation: Allocation) -> range:
        """Segments that make up ``allocation``, whose ends must be bounds."""
        return range(self.bounds.index(allocation.start), self.bounds.index(allocation.stop))


@attrs.frozen(kw_only=True)
class Schedule:
    """Start and finish of every node, by node index, in seconds; ``order`` is the order of selection."""

    start_s: tuple[float, ...]
    finish_s: tuple[float, ...]
    order: tuple[int, ...]
    makespan_s: float
    segments: Segments
    busy_s: tuple[float, ...]  # per segment, time during which its GPUs are reserved
    held: tuple[tuple[int, ...], ...]  # per node, the segments it reserves, ascending


def reserved(node: Node, *, reserve_source: bool) -> tuple[Allocation, ...]:
    """The allocations that a node holds while it runs."""
    if reserve_source and node.source is not None and node.source != node.allocation:
        return (node.allocation, node.source)
    return (node.allocation,)


def downstream_ranks(graph: ExecutableGraph, seconds: Sequence[float]) -> list[float]:
    """The priority of every node: seconds on the longest path to a sink, chains taking their head's (A-H1)."""
    successors = graph.successors()
    rank = [0.0] * len(graph.nodes)
    for index in reversed(_topological(graph)):
        rank[index] = seconds[index] + max((rank[after] for after in successors[index]), default=0.0)
    head: dict[tuple[str, int], float] = {}
    for node in graph.nodes:
        if node.kind is NodeKind.OP and node.phase is not None:
            rank[node.index] = head.setdefault((node.operator, node.step), rank[node.index])
    return rank


def schedule(graph: ExecutableGraph, seconds: Sequence[float], gpus: int, *, reserve_source: bool = False) -> Schedule:
    """The greedy schedule of ``graph`` on ``gpus`` GPUs.

    Args:
        graph: an executable graph.
        seconds: duration of every node, by index.
        gpus: size of the cluster.
        reserve_source: also hold the source GPUs of a transfer.
    """
    ends = [a for node in graph.nodes for a in (node.allocation, node.source) if a is not None]
    segments = Segments.of(ends, gpus)
    held = [
        tuple(sorted({s for a in reserved(node, reserve_source=reserve_source) for s in segments.within(a)}))
        for node in graph.nodes
    ]
    rank = downstream_ranks(graph, seconds)
    operator = {op.name: index for index, op in enumerate(graph.rpeg.operators)}
    successors = graph.successors()
    waiting = [len(before) for before in graph.predecessors()]
    available = [0.0] * segments.count
    busy = [0.0] * segments.count
    released = [0.0] * len(graph.nodes)  # max finish of predecessors
    start, finish, order = [0.0] * len(graph.nodes), [0.0] * len(graph.nodes), []
    ready = {index for index, count in enumerate(waiting) if count == 0}

    def priority(index: int) -> tuple[float, bool, float, int, int, int]:
        node = graph.nodes[index]
        earliest = max(released[index], *(available[s] for s in held[index]))
        return (earliest, node.kind is NodeKind.OP, -rank[index], operator[node.operator], node.step, index)

    while ready:
        chosen = min(ready, key=priority)
        ready.remove(chosen)
        start[chosen] = priority(chosen)[0]
        finish[chosen] = start[chosen] + seconds[chosen]
        order.append(chosen)
        for segment in held[chosen]:
            available[segment] = finish[chosen]
            busy[segment] += seconds[chosen]
        for after in successors[chosen]:
            released[after] = max(released[after], finish[chosen])
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.add(after)
    return Schedule(
        start_s=tuple(start),
        finish_s=tuple(finish),
        order=tuple(order),
        makespan_s=max(finish, default=0.0),
        segments=segments,
        busy_s=tuple(busy),
        held=tuple(held),
    )


def violations(
    graph: ExecutableGraph, seconds: Sequence[float], result: Schedule, *, reserve_source: bool = False
) -> list[str]:
    """All broken rules of Def. A.11: S1 duration, S2 precedence, S3 exclusive reservation."""
    found = []
    for node in graph.nodes:
        if result.finish_s[node.index] != result.start_s[node.index] + seconds[node.index]:
            found.append(f"S1: {node.label} does not last {seconds[node.index]} s")
    for before, after in graph.edges:
        if result.finish_s[before] > result.start_s[after]:
            found.append(f"S2: {graph.nodes[after].label} starts before {graph.nodes[before].label} ends")
    for a in graph.nodes:
        for b in graph.nodes[a.index + 1 :]:
            shared = any(
                not x.disjoint(y)
                for x in reserved(a, reserve_source=reserve_source)
                for y in reserved(b, reserve_source=reserve_source)
            )
            first, second = sorted((a.index, b.index), key=lambda i: (result.start_s[i], result.finish_s[i]))
            if shared and result.start_s[second] < result.finish_s[first] and seconds[first] and seconds[second]:
                found.append(f"S3: {a.label} and {b.label} hold the same GPUs at the same time")
    return found


def _topological(graph: ExecutableGraph) -> list[int]:
    successors = graph.successors()
    waiting = [len(before) for before in graph.predecessors()]
    ready = [index for index, count in enumerate(waiting) if count == 0]
    order = []
    while ready:
        index = ready.pop()
        order.append(index)
        for after in successors[index]:
            waiting[after] -= 1
            if waiting[after] == 0:
                ready.append(after)
    return order
