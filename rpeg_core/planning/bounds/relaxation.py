"""A makespan that no configuration in a box can beat (numba).

What holds for every schedule that respects durations, precedences and exclusive reservation holds for the greedy one.
So every bound here is one of *any* schedule, for every plan in the box. Three relaxations are combined:

*Machines.* Give every node x a load ``p_x`` such that at no time more than 1 of load is processed per second. Then
nodes that all start at or after r, and after whose ends at least q seconds pass, need ``r + sum p_x + q`` in total.
Machines are

* cliques, sets of operators that share a GPU in every plan of the box: they run one at a time; the load is the
  duration. Intervals that meet pairwise have a common point. Two operators surely meet when their places say so, or
  when together they need more GPUs than there are. An operator alone is a clique: its K steps run one after another.
* the cluster: GPU-seconds divided by the number of GPUs.

*Heads and tails.* The head of a node is a time before which it cannot start, its tail the time that must pass after its
end. Heads follow the links of the template; moreover, the ancestors of a node that end before it starts are a set as
above, with q = 0 and every r that is one of their heads: the node starts after ``r + sum p_x``. Nodes are visited in
topological order, so that heads build on each other and chains over many steps, through loads, come out as long as they
are: this is the critical cycle over the staleness window. Tails are the same backwards. That the maximum over r and q
includes every threshold makes it the maximum over all subsets; so bounds only grow when a cost does (monotone), and the
least cost of a box bounds each of its plans.

*Idle GPUs.* Before the first operators have ended, the others cannot run: GPUs on which none of the early ones may be
are idle. The same holds at the end. The cluster needs its work plus both, over the number of GPUs. The two windows
are cut so that they do not overlap within the makespan that is already certain.

Rounding: sums here and in the evaluator run in different orders. Both add nonnegative numbers, a few hundred at most,
with relative errors below 1e-13; the result is lowered by 1e-12.
"""

from __future__ import annotations

import numpy as np

from rpeg_core.planning.bounds.state import BINDING, CLIQUES, LINKS, NODES, describe
from rpeg_core.planning.bounds.tables import NONE
from rpeg_core.planning.bounds.template import (
    END_END,
    END_START,
    SHIFT,
    SOURCE,
    START_END,
    START_START,
    TARGET,
    build_template,
)
from rpeg_core.planning.compiled.kernel import helper, jit

__all__ = ["BY_CHAIN", "BY_IDLE", "least_makespan"]

SAFETY = 1.0 - 1e-12

# Entry BINDING of Scratch.counts: a clique, the number of cliques for the cluster, or one of these.
BY_CHAIN, BY_IDLE = -1, -2

EVERYBODY = (1 << 62) - 1


@jit
def least_makespan(t, group, start, w):
    """Seconds that every feasible plan in the box takes at least; infinite when none is feasible.

    Args:
        t: tables.
        group, start: the box, see :func:`rpeg_core.planning.bounds.state.describe`.
        w: scratch; keeps what was found, and in ``counts[BINDING]`` which relaxation decides.
    """
    if not describe(t, group, start, w):
        return np.inf
    build_template(t, group, start, w)
    nodes, links, sequence = w.counts[NODES], w.links[: w.counts[LINKS]], w.sequence[: w.counts[NODES]]
    cliques = w.cliques[: w.counts[CLIQUES]]
    _ancestors(t.steps, sequence, links, w.delays, w.ended, w.ends_before, w.starts_after)
    _heads(
        sequence,
        links,
        w.delays,
        w.since,
        w.runs_on,
        w.seconds,
        w.work,
        w.ends_before,
        cliques,
        w.load,
        w.sorted_nodes,
        w.head,
        w.done,
    )
    count = _tails(
        sequence,
        links,
        w.delays,
        w.since,
        w.runs_on,
        w.seconds,
        w.work,
        w.starts_after,
        cliques,
        w.load,
        w.sorted_nodes,
        w.tail,
        w.left,
    )
    makespan, binding = _longest_chain(nodes, w.since, w.head, w.done, w.tail, w.left), BY_CHAIN
    for m in range(len(cliques) + 1):
        members = cliques[m] if m < len(cliques) else EVERYBODY
        loads = w.seconds if m < len(cliques) else w.work
        load = _machine(
            nodes, w.sorted_nodes[:count], members, loads, w.runs_on, w.head, w.left, w.sorted_heads, w.sorted_loads
        )
        # Chains go through loads: where a machine says the same, it is the simpler reason.
        if load > makespan or (load >= makespan * SAFETY and binding == BY_CHAIN):
            binding = m
        makespan = max(makespan, load)
    idle = _work_and_idle(
        t.gpus,
        t.steps,
        nodes,
        makespan,
        w.since,
        w.runs_on,
        w.work,
        w.head,
        w.left,
        start,
        w.fewest,
        w.most,
        w.sorted_heads,
        w.sorted_loads,
    )
    if idle > makespan:
        makespan, binding = idle, BY_IDLE
    w.counts[BINDING] = binding
    return makespan * SAFETY


@helper
def _ancestors(steps, sequence, links, delays, ended, ends_before, starts_after):
    """Which nodes surely end before another one starts, by the number of steps between them.

    A path of links proves it. It may begin in any step: every node on it exists when the first one does.
    """
    starts_after[:] = 0
    for k in range(steps):
        for y in sequence:
            starts, ends = 0, 0
            for e in range(links.shape[0]):
                u, j = links[e, SOURCE], k - links[e, SHIFT]
                if links[e, TARGET] == y and j >= 0:
                    if delays[e, END_START] >= 0.0:
                        starts |= ended[u, j]
                    if delays[e, START_START] >= 0.0:
                        starts |= ends_before[u, j]
                    if delays[e, END_END] >= 0.0:
                        ends |= ended[u, j]
            ends_before[y, k] = starts
            ended[y, k] = starts | ends | (1 << y if k == 0 else 0)
            for x in sequence:
                if starts >> x & 1:
                    starts_after[x, k] |= 1 << y


@helper
def _heads(
    sequence, links, delays, since, runs_on, seconds, work, ends_before, cliques, load, sorted_nodes, heads, done
):
    """Earliest starts and ends, step by step; ``sorted_nodes`` holds the visited nodes by ascending head."""
    steps, nodes, count = heads.shape[0], len(sequence), 0
    for k in range(steps):
        for y in sequence:
            if k < since[y]:
                continue
            head, end = 0.0, 0.0
            for e in range(links.shape[0]):
                u, j = links[e, SOURCE], k - links[e, SHIFT]
                if links[e, TARGET] == y and j >= since[u]:
                    if delays[e, END_START] >= 0.0:
                        head = max(head, done[j, u] + delays[e, END_START])
                    if delays[e, START_START] >= 0.0:
                        head = max(head, heads[j, u] + delays[e, START_START])
                    if delays[e, END_END] >= 0.0:
                        end = max(end, done[j, u] + delays[e, END_END])
                    if delays[e, START_END] >= 0.0:
                        end = max(end, heads[j, u] + delays[e, START_END])
            load[:] = 0.0
            for s in range(count - 1, -1, -1):
                j = sorted_nodes[s] // nodes
                x = sorted_nodes[s] - j * nodes
                if ends_before[y, k - j] >> x & 1:
                    head = max(head, heads[j, x] + _add(load, cliques, runs_on[x], seconds[x], work[x]))
            heads[k, y] = head
            done[k, y] = max(end, head + seconds[y])
            _insert(sorted_nodes, count, nodes, heads, k, y)
            count += 1


@helper
def _tails(
    sequence, links, delays, since, runs_on, seconds, work, starts_after, cliques, load, sorted_nodes, tails, left
):
    """Least time from starts and ends to the end of the horizon; ``sorted_nodes`` ascends by the latter.

    Returns the number of nodes in the horizon.
    """
    steps, nodes, count = left.shape[0], len(sequence), 0
    for k in range(steps - 1, -1, -1):
        for i in range(nodes - 1, -1, -1):
            x = sequence[i]
            if k < since[x]:
                continue
            after, tail = 0.0, 0.0
            for e in range(links.shape[0]):
                v, j = links[e, TARGET], k + links[e, SHIFT]
                if links[e, SOURCE] == x and since[v] <= j < steps:
                    if delays[e, END_START] >= 0.0:
                        after = max(after, tails[j, v] + delays[e, END_START])
                    if delays[e, START_START] >= 0.0:
                        tail = max(tail, tails[j, v] + delays[e, START_START])
                    if delays[e, END_END] >= 0.0:
                        after = max(after, left[j, v] + delays[e, END_END])
                    if delays[e, START_END] >= 0.0:
                        tail = max(tail, left[j, v] + delays[e, START_END])
            load[:] = 0.0
            for s in range(count - 1, -1, -1):
                j = sorted_nodes[s] // nodes
                y = sorted_nodes[s] - j * nodes
                if starts_after[x, j - k] >> y & 1:
                    after = max(after, left[j, y] + _add(load, cliques, runs_on[y], seconds[y], work[y]))
            left[k, x] = after
            tails[k, x] = max(tail, after + seconds[x])
            _insert(sorted_nodes, count, nodes, left, k, x)
            count += 1
    return count


@helper
def _add(load, cliques, operator, seconds, work):
    """Add a node to the loads of its machines; returns the largest load among them."""
    cluster = len(cliques)
    load[cluster] += work
    largest = load[cluster]
    for m in range(cluster):
        if cliques[m] >> operator & 1:
            load[m] += seconds
            largest = max(largest, load[m])
    return largest


@helper
def _insert(sorted_nodes, count, nodes, key, k, x):
    """Insert a node into the first ``count`` entries, which ascend by ``key``."""
    place = count
    while place > 0 and key[sorted_nodes[place - 1] // nodes, sorted_nodes[place - 1] % nodes] > key[k, x]:
        sorted_nodes[place] = sorted_nodes[place - 1]
        place -= 1
    sorted_nodes[place] = k * nodes + x


@helper
def _longest_chain(nodes, since, head, done, tail, left):
    longest = 0.0
    for k in range(head.shape[0]):
        for x in range(nodes):
            if k >= since[x]:
                longest = max(longest, done[k, x] + left[k, x], head[k, x] + tail[k, x])
    return longest


@helper
def _machine(nodes, sorted_nodes, members, loads, runs_on, head, left, heads, sums):
    """The longest ``r + load + q`` of one machine over all thresholds (r, q).

    Nodes join by descending tail, which is how the pass of tails left them sorted; the loads of those present are
    summed by descending head. ``heads`` and ``sums`` are scratch.
    """
    kept, makespan = 0, 0.0
    for s in range(len(sorted_nodes) - 1, -1, -1):
        k = sorted_nodes[s] // nodes
        x = sorted_nodes[s] - k * nodes
        if not members >> runs_on[x] & 1:
            continue
        place = kept
        while place > 0 and heads[place - 1] > head[k, x]:
            heads[place] = heads[place - 1]
            sums[place] = sums[place - 1]
            place -= 1
        heads[place] = head[k, x]
        sums[place] = loads[x]
        kept += 1
        total, longest = 0.0, 0.0
        for i in range(kept - 1, -1, -1):
            total += sums[i]
            longest = max(longest, heads[i] + total)
        makespan = max(makespan, longest + left[k, x])
    return makespan


@helper
def _work_and_idle(gpus, steps, nodes, makespan, since, runs_on, work, head, left, start, fewest, most, release, after):
    """The cluster's work, and the GPU time that must stay unused at the beginning and at the end."""
    n = len(start)
    total, last = 0.0, 0.0
    release[:n] = np.inf
    after[:n] = np.inf
    for x in range(nodes):
        v = runs_on[x]
        for k in range(since[x], steps):
            total += work[x]
            release[v] = min(release[v], head[k, x])
            after[v] = min(after[v], left[k, x])
    for v in range(n):
        last = max(last, release[v])
    total += _unused(gpus, start, fewest, most, release, last)
    return total + _unused(gpus, start, fewest, most, after, max(0.0, makespan - last))


@helper
def _unused(gpus, start, fewest, most, times, limit):
    """Time until ``limit`` during which operators whose ``times`` are not reached leave GPUs unused, over the GPUs."""
    unused, now, ready = 0.0, 0.0, 0
    for _ in range(len(start)):
        following, chosen = np.inf, 0
        for v in range(len(start)):
            if not ready >> v & 1 and times[v] < following:
                following, chosen = times[v], v
        until = min(following, limit)
        if until > now:
            unused += (until - now) * (gpus - min(gpus, _covered(start, fewest, most, ready)))
            now = until
        ready |= 1 << chosen
    return unused / gpus


@helper
def _covered(start, fewest, most, operators):
    """Most GPUs that ``operators`` can hold together."""
    covered, reached, left = 0, 0, operators
    while left:
        chosen = NONE
        for v in range(len(start)):
            if left >> v & 1:
                if start[v] == NONE:
                    covered += most[v]
                    left &= ~(1 << v)
                elif chosen == NONE or start[v] < start[chosen]:
                    chosen = v
        if chosen != NONE:
            left &= ~(1 << chosen)
            stop = start[chosen] + fewest[chosen]
            covered += max(0, stop - max(start[chosen], reached))
            reached = max(reached, stop)
    return covered
