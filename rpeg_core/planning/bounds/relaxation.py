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

from rpeg_core.planning.bounds.compilation import jit
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

__all__ = ["BY_CHAIN", "BY_IDLE", "least_makespan"]

SAFETY = 1.0 - 1e-12

# Entry BINDING of Scratch.counts: a clique, the number of cliques for the cluster, or one of these.
BY_CHAIN, BY_IDLE = -1, -2


@jit
def least_makespan(t, group, start, row, w):
    """Seconds that every feasible plan in the box takes at least; infinite when none is feasible.

    Args:
        t: tables.
        group, start, row: the box, see :func:`rpeg_core.planning.bounds.state.describe`.
        w: scratch; keeps what was found, and in ``counts[BINDING]`` which relaxation decides.
    """
    if not describe(t, group, start, row, w):
        return np.inf
    build_template(t, group, start, row, w)
    _ancestors(t, w)
    _heads(t, w)
    _tails(t, w)
    return _combine(t, start, w) * SAFETY


@jit
def _ancestors(t, w):
    """Which nodes surely end before another one starts, by the number of steps between them.

    A path of links proves it. It may begin in any step: every node on it exists when the first one does.
    """
    nodes, links = w.counts[NODES], w.counts[LINKS]
    for y in range(nodes):
        for k in range(t.steps):
            w.starts_after[y, k] = 0
    for k in range(t.steps):
        for i in range(nodes):
            y = w.sequence[i]
            starts, ends = 0, 0
            for e in range(links):
                if w.links[e, TARGET] == y:
                    u, j = w.links[e, SOURCE], k - w.links[e, SHIFT]
                    if j >= 0:
                        if w.delays[e, END_START] >= 0.0:
                            starts |= w.ended[u, j]
                        if w.delays[e, START_START] >= 0.0:
                            starts |= w.ends_before[u, j]
                        if w.delays[e, END_END] >= 0.0:
                            ends |= w.ended[u, j]
            w.ends_before[y, k] = starts
            w.ended[y, k] = starts | ends | (1 << y if k == 0 else 0)
            for x in range(nodes):
                if starts >> x & 1:
                    w.starts_after[x, k] |= 1 << y


@jit
def _heads(t, w):
    """Earliest starts and ends, step by step; ``sorted_nodes`` holds the visited nodes by ascending head."""
    nodes, links, cliques = w.counts[NODES], w.counts[LINKS], w.counts[CLIQUES]
    count = 0
    for k in range(t.steps):
        for i in range(nodes):
            y = w.sequence[i]
            if k < w.since[y]:
                continue
            head, done = 0.0, 0.0
            for e in range(links):
                if w.links[e, TARGET] == y:
                    u, j = w.links[e, SOURCE], k - w.links[e, SHIFT]
                    if j >= w.since[u]:
                        if w.delays[e, END_START] >= 0.0:
                            head = max(head, w.done[j, u] + w.delays[e, END_START])
                        if w.delays[e, START_START] >= 0.0:
                            head = max(head, w.head[j, u] + w.delays[e, START_START])
                        if w.delays[e, END_END] >= 0.0:
                            done = max(done, w.done[j, u] + w.delays[e, END_END])
                        if w.delays[e, START_END] >= 0.0:
                            done = max(done, w.head[j, u] + w.delays[e, START_END])
            w.load[: cliques + 1] = 0.0
            for s in range(count - 1, -1, -1):
                j, x = w.sorted_nodes[s] // nodes, w.sorted_nodes[s] % nodes
                if w.ends_before[y, k - j] >> x & 1:
                    released = w.head[j, x]
                    for m in range(cliques):
                        if w.cliques[m] >> w.runs_on[x] & 1:
                            w.load[m] += w.seconds[x]
                            head = max(head, released + w.load[m])
                    w.load[cliques] += w.work[x]
                    head = max(head, released + w.load[cliques])
            w.head[k, y] = head
            w.done[k, y] = max(done, head + w.seconds[y])
            place = count
            while place > 0 and w.head[w.sorted_nodes[place - 1] // nodes, w.sorted_nodes[place - 1] % nodes] > head:
                w.sorted_nodes[place] = w.sorted_nodes[place - 1]
                place -= 1
            w.sorted_nodes[place] = k * nodes + y
            count += 1


@jit
def _tails(t, w):
    """Time from starts and ends to the end of the horizon; ``sorted_nodes`` holds all nodes by ascending tail."""
    nodes, links, cliques = w.counts[NODES], w.counts[LINKS], w.counts[CLIQUES]
    count = 0
    for k in range(t.steps - 1, -1, -1):
        for i in range(nodes - 1, -1, -1):
            x = w.sequence[i]
            if k < w.since[x]:
                continue
            left, tail = 0.0, 0.0
            for e in range(links):
                if w.links[e, SOURCE] == x:
                    v, j = w.links[e, TARGET], k + w.links[e, SHIFT]
                    if j < t.steps and j >= w.since[v]:
                        if w.delays[e, END_START] >= 0.0:
                            left = max(left, w.tail[j, v] + w.delays[e, END_START])
                        if w.delays[e, START_START] >= 0.0:
                            tail = max(tail, w.tail[j, v] + w.delays[e, START_START])
                        if w.delays[e, END_END] >= 0.0:
                            left = max(left, w.left[j, v] + w.delays[e, END_END])
                        if w.delays[e, START_END] >= 0.0:
                            tail = max(tail, w.left[j, v] + w.delays[e, START_END])
            w.load[: cliques + 1] = 0.0
            for s in range(count - 1, -1, -1):
                j, y = w.sorted_nodes[s] // nodes, w.sorted_nodes[s] % nodes
                if w.starts_after[x, j - k] >> y & 1:
                    after = w.left[j, y]
                    for m in range(cliques):
                        if w.cliques[m] >> w.runs_on[y] & 1:
                            w.load[m] += w.seconds[y]
                            left = max(left, after + w.load[m])
                    w.load[cliques] += w.work[y]
                    left = max(left, after + w.load[cliques])
            w.left[k, x] = left
            w.tail[k, x] = max(tail, left + w.seconds[x])
            place = count
            while place > 0 and w.left[w.sorted_nodes[place - 1] // nodes, w.sorted_nodes[place - 1] % nodes] > left:
                w.sorted_nodes[place] = w.sorted_nodes[place - 1]
                place -= 1
            w.sorted_nodes[place] = k * nodes + x
            count += 1


@jit
def _combine(t, start, w):
    """The longest of chains, machines and idle GPUs.

    For a machine every pair of thresholds (r, q) is tried: nodes join by descending tail, which is how the pass of
    tails left them sorted, and the loads of those present are summed by descending head.
    """
    nodes, cliques = w.counts[NODES], w.counts[CLIQUES]
    heads, loads = w.sorted_heads, w.sorted_loads
    makespan = 0.0
    w.counts[BINDING] = BY_CHAIN
    count = 0
    for k in range(t.steps):
        for y in range(nodes):
            if k >= w.since[y]:
                makespan = max(makespan, w.done[k, y] + w.left[k, y], w.head[k, y] + w.tail[k, y])
                count += 1
    for m in range(cliques + 1):
        kept = 0
        for s in range(count - 1, -1, -1):
            k, x = w.sorted_nodes[s] // nodes, w.sorted_nodes[s] % nodes
            if m < cliques and not w.cliques[m] >> w.runs_on[x] & 1:
                continue
            head, load = w.head[k, x], w.seconds[x] if m < cliques else w.work[x]
            place = kept
            while place > 0 and heads[place - 1] > head:
                heads[place] = heads[place - 1]
                loads[place] = loads[place - 1]
                place -= 1
            heads[place] = head
            loads[place] = load
            kept += 1
            total, longest = 0.0, 0.0
            for i in range(kept - 1, -1, -1):
                total += loads[i]
                longest = max(longest, heads[i] + total)
            total = longest + w.left[k, x]
            # Chains go through loads: where a machine says the same, it is the simpler reason.
            if total > makespan or (total >= makespan * SAFETY and w.counts[BINDING] == BY_CHAIN):
                w.counts[BINDING] = m
            makespan = max(makespan, total)
    idle = _idle(t, start, w, makespan)
    if idle > makespan:
        makespan = idle
        w.counts[BINDING] = BY_IDLE
    return makespan


@jit
def _idle(t, start, w, makespan):
    """Work plus what must stay idle at the beginning and at the end."""
    n, nodes = t.operators.shape[0], w.counts[NODES]
    total = 0.0
    release, after = w.sorted_heads, w.sorted_loads
    for v in range(n):
        release[v] = np.inf
        after[v] = np.inf
    for k in range(t.steps):
        for x in range(nodes):
            if k >= w.since[x]:
                total += w.work[x]
                v = w.runs_on[x]
                release[v] = min(release[v], w.head[k, x])
                after[v] = min(after[v], w.left[k, x])
    last = 0.0
    for v in range(n):
        last = max(last, release[v])
    idle = _unused(t, start, w, release, makespan)
    idle += _unused(t, start, w, after, max(0.0, makespan - last))
    return total + idle


@jit
def _unused(t, start, w, times, limit):
    """GPU-time over the number of GPUs, until ``limit``, of the GPUs that no operator may use before its time."""
    n = t.operators.shape[0]
    idle, now, mask = 0.0, 0.0, 0
    for _ in range(n):
        following = np.inf
        chosen = NONE
        for v in range(n):
            if not mask >> v & 1 and times[v] < following:
                following, chosen = times[v], v
        until = min(following, limit)
        if until > now:
            idle += (until - now) * (t.gpus - min(t.gpus, _covered(t, start, w, mask)))
            now = until
        mask |= 1 << chosen
    return idle / t.gpus


@jit
def _covered(t, start, w, mask):
    """Most GPUs that the operators in ``mask`` can hold."""
    n = t.operators.shape[0]
    covered, reached = 0, 0
    left = mask
    while left:
        chosen = NONE
        for v in range(n):
            if left >> v & 1:
                if start[v] == NONE:
                    covered += w.most[v]
                    left &= ~(1 << v)
                elif chosen == NONE or start[v] < start[chosen]:
                    chosen = v
        if chosen != NONE:
            left &= ~(1 << chosen)
            stop = start[chosen] + w.fewest[chosen]
            covered += max(0, stop - max(start[chosen], reached))
            reached = max(reached, stop)
    return covered
