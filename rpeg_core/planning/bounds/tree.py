"""Best-first branch and bound over boxes (numba).

The frontier is a set of boxes that together hold every feasible plan faster than a cutoff. The least bound in it is a
bound of all of them; branching replaces the box of that bound by parts, so that it can only grow. Operators are
decided one after another, the one with the most work first: first its number of GPUs, by halves, then its place, at
the end layouts. Placed operators settle who shares GPUs and who is split, which moves bounds more than anything else.

*Interchangeable places.* Inside a larger block of GPUs, swap two blocks of a level of nested aligned blocks (GPUs of a
node, nodes of a rack, racks, and halves of these). That keeps sizes, overlaps and the tiers that allocations span, so a
plan and its image have the same schedule and memory. When each undecided group is closed under the swap and each placed
operator contains both blocks or none of their GPUs, the box with a start and the one with its image have the same
values: one of them is enough.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.planning.bounds.relaxation import least_makespan
from rpeg_core.planning.bounds.state import NODES, Scratch
from rpeg_core.planning.bounds.tables import (
    FEWEST,
    NONE,
    OTHER_PART,
    PART,
    ROOT,
    ROW_FIRST,
    ROW_STOP,
    SIZE,
    START_FIRST,
    START_STOP,
    WHOLE,
    WORK,
    BoxTables,
)
from rpeg_core.planning.compiled.kernel import helper, jit

__all__ = ["BOUNDED", "OPEN", "Frontier", "build_frontier", "grow", "pop", "push", "top"]

# Entries of Frontier.counts.
OPEN, STORED, FREE, BOUNDED, WIDEST = range(5)

# Planes of Frontier.boxes.
GROUP, START, BRANCH = range(3)


class Frontier(NamedTuple):
    """The open boxes: a heap of (least makespan, slot), and by slot their operators' groups and starts,
    and the operator to branch on."""

    counts: Ints
    branch_order: Ints
    heap_makespan: Floats
    heap_slot: Ints
    free: Ints
    boxes: np.ndarray  # int32 (slots, 3, operators)


def build_frontier(t: BoxTables, w: Scratch, capacity: int) -> Frontier:
    """A frontier of one box, everything; empty when nothing fits. It never holds more than ``capacity`` boxes."""
    operators = len(t.operators)
    everything = t.operators[:, ROOT]
    widest = max(2, int((t.groups[:, START_STOP] - t.groups[:, START_FIRST]).max()))
    order = np.argsort(-t.least[everything, WORK], kind="stable")
    f = Frontier(
        counts=np.array([0, 0, 0, 0, widest]),
        branch_order=order,
        heap_makespan=np.zeros(capacity),
        heap_slot=np.zeros(capacity, np.int64),
        free=np.zeros(capacity, np.int64),
        boxes=np.empty((capacity, 3, operators), np.int32),  # takes memory only where it is used
    )
    everything = everything.copy()
    nothing = np.full(operators, NONE, np.int64)
    push(f, 0.0, everything, nothing, order[0])
    return f


def top(f: Frontier) -> np.ndarray:
    """Group and start of each operator in the box of least makespan, shape (2, operators)."""
    return f.boxes[f.heap_slot[0], :BRANCH]


@helper
def push(f, makespan, group, start, branch):
    if f.counts[FREE] > 0:
        f.counts[FREE] -= 1
        slot = f.free[f.counts[FREE]]
    else:
        slot = f.counts[STORED]
        f.counts[STORED] += 1
    for v in range(group.shape[0]):
        f.boxes[slot, GROUP, v] = group[v]
        f.boxes[slot, START, v] = start[v]
    f.boxes[slot, BRANCH, 0] = branch
    i = f.counts[OPEN]
    f.counts[OPEN] += 1
    while i > 0 and f.heap_makespan[(i - 1) // 2] > makespan:
        f.heap_makespan[i] = f.heap_makespan[(i - 1) // 2]
        f.heap_slot[i] = f.heap_slot[(i - 1) // 2]
        i = (i - 1) // 2
    f.heap_makespan[i] = makespan
    f.heap_slot[i] = slot


@jit
def pop(f, group, start):
    """Remove the box with the least makespan into the two arrays; returns its makespan."""
    makespan, slot = f.heap_makespan[0], f.heap_slot[0]
    f.free[f.counts[FREE]] = slot
    f.counts[FREE] += 1
    for v in range(group.shape[0]):
        group[v] = f.boxes[slot, GROUP, v]
        start[v] = f.boxes[slot, START, v]
    f.counts[OPEN] -= 1
    count = f.counts[OPEN]
    moved, moved_slot = f.heap_makespan[count], f.heap_slot[count]
    i = 0
    while 2 * i + 1 < count:
        child = 2 * i + 1
        if child + 1 < count and f.heap_makespan[child + 1] < f.heap_makespan[child]:
            child += 1
        if f.heap_makespan[child] >= moved:
            break
        f.heap_makespan[i] = f.heap_makespan[child]
        f.heap_slot[i] = f.heap_slot[child]
        i = child
    f.heap_makespan[i] = moved
    f.heap_slot[i] = moved_slot
    return makespan


@jit
def grow(t, f, w, cutoff, budget, plans):
    """Branch on the most promising box, again and again.

    Args:
        t, f, w: tables, frontier and scratch.
        cutoff: boxes that cannot be faster are dropped.
        budget: number of boxes to bound, approximately.
        plans: stop at a placed box of so many plans or fewer, counted by layouts.

    Returns:
        ``(least makespan over the frontier, whether it stopped at such a box, then on top)``; the makespan is
        infinite when the frontier is empty.
    """
    n = t.operators.shape[0]
    group, start = np.empty(n, np.int64), np.empty(n, np.int64)
    stop = f.counts[BOUNDED] + budget
    while f.counts[OPEN] > 0:
        if f.heap_makespan[0] >= cutoff:
            f.counts[OPEN] = 0
            break
        if f.counts[OPEN] + f.counts[WIDEST] >= f.heap_slot.shape[0]:
            _purge(f, cutoff)
        if f.counts[BOUNDED] >= stop or f.counts[OPEN] + f.counts[WIDEST] >= f.heap_slot.shape[0]:
            return f.heap_makespan[0], False
        slot = f.heap_slot[0]
        v = f.boxes[slot, BRANCH, 0]
        if f.boxes[slot, START, v] != NONE and _plans(t, f.boxes[slot, GROUP]) <= plans:
            return f.heap_makespan[0], True
        makespan = pop(f, group, start)
        g = group[v]
        if t.groups[g, SIZE] == NONE or start[v] != NONE:
            for part in (PART, OTHER_PART):
                group[v] = t.groups[g, part]
                _consider(t, f, w, makespan, group, start, cutoff)
            continue
        first = t.groups[g, START_FIRST]
        for i in range(first, t.groups[g, START_STOP]):
            fresh = True
            for j in range(first, i):
                if interchangeable(t, group, start, v, t.starts[j], t.starts[i]):
                    fresh = False
                    break
            if fresh:
                start[v] = t.starts[i]
                _consider(t, f, w, makespan, group, start, cutoff)
                start[v] = NONE
    return np.inf, False


@helper
def _purge(f, cutoff):
    """Drop the boxes that a lower cutoff has made useless."""
    kept = 0
    for i in range(f.counts[OPEN]):
        if f.heap_makespan[i] < cutoff:
            f.heap_makespan[kept] = f.heap_makespan[i]
            f.heap_slot[kept] = f.heap_slot[i]
            kept += 1
        else:
            f.free[f.counts[FREE]] = f.heap_slot[i]
            f.counts[FREE] += 1
    f.counts[OPEN] = kept
    order = np.argsort(f.heap_makespan[:kept])  # an ascending array is a heap
    f.heap_makespan[:kept] = f.heap_makespan[:kept][order]
    f.heap_slot[:kept] = f.heap_slot[:kept][order]


@helper
def _consider(t, f, w, parent, group, start, cutoff):
    """Bound a part of a box and keep it unless it is too slow; a bound of the whole holds for its parts too."""
    f.counts[BOUNDED] += 1
    makespan = max(parent, least_makespan(t, group, start, w))
    if makespan < cutoff:
        push(f, makespan, group, start, _branch(t, f, group, start, w))


@helper
def _branch(t, f, group, start, w):
    """The operator to branch on in the box that was bounded last.

    The first one without a place; else the one whose layouts can lengthen the schedule most: their range of times over
    all steps, less the time by which the operator could be later.
    """
    for v in f.branch_order:
        if start[v] == NONE:
            return v
    nodes, longest = w.counts[NODES], 0.0
    through = w.load
    through[:] = 0.0
    for x in range(nodes):
        for k in range(w.since[x], t.steps):
            through[w.runs_on[x]] = max(through[w.runs_on[x]], w.done[k, x] + w.left[k, x])
            longest = max(longest, w.done[k, x] + w.left[k, x])
    chosen, most = f.branch_order[0], -np.inf
    for v in f.branch_order:
        g = group[v]
        if t.groups[g, PART] != NONE:
            score = t.steps * (t.most[g, WHOLE] - t.least[g, WHOLE]) - (longest - through[v])
            if score > most:
                chosen, most = v, score
    return chosen


@helper
def _plans(t, group):
    """Combinations of layouts in a placed box."""
    count = 1
    for g in group:
        count *= t.groups[g, ROW_STOP] - t.groups[g, ROW_FIRST]
    return count


@helper
def interchangeable(t, group, start, v, one, other):
    """Whether a swap of two blocks of GPUs maps start ``one`` of v to ``other`` and every other box to itself."""
    n = t.operators.shape[0]
    level = 0
    while one // t.blocks[level + 1] != other // t.blocks[level + 1]:
        level += 1
    small = t.blocks[level]
    if t.groups[group[v], FEWEST] > small or one % small != other % small:
        return False
    first, second = one - one % small, other - other % small
    for u in range(n):
        if start[u] == NONE:
            if not t.swaps[group[u], level]:
                return False
        else:
            stop = start[u] + t.groups[group[u], FEWEST]
            touches = (start[u] < first + small and stop > first) or (start[u] < second + small and stop > second)
            holds = start[u] <= min(first, second) and stop >= max(first, second) + small
            if touches and not holds:
                return False
    return True
