"""The evaluation of one choice as numba functions over :class:`Tables` and :class:`Workspace`.

Every number comes from the same floating-point operations in the same order as in the readable passes; fast-math is
off. What makes it fast:

* the horizon repeats one step, so lowering builds a *template* (slots, and edges with the number of steps they cross)
  instead of a graph;
* slots are made in topological order, so ranks need no sort;
* GPUs that no operator tells apart are one segment, and operators carry the time at which their GPUs are free.

The entry points are cached on disk. What they call is not: it is inside their machine code, and a cache of its own
would outlive a change of the columns it reads. When this package changes, :data:`KERNEL_FINGERPRINT`, which is part of
the types of :class:`Tables` and :class:`Workspace`, outdates every cached function over them, also in other modules.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numba
import numpy as np

from rpeg_core.planning.compiled.tables import (
    CHAIN_FIRST,
    CHAIN_LAST,
    COPIES,
    COSTS,
    CURSOR,
    DATA_FIRST,
    DATA_GENERATED,
    DATA_INDEX,
    DATA_SOURCE,
    DATA_STOP,
    DEGREES,
    EDGE_COUNT,
    FEEDERS_FIRST,
    FEEDERS_STOP,
    FIRST_CANDIDATE,
    FIRST_NODE,
    FIRST_PHASE,
    FIRST_RACK,
    FROM,
    IS_OP,
    KERNEL_FINGERPRINT,
    KIND,
    LABEL,
    LAST_NODE,
    LAST_RACK,
    MODEL,
    NONE,
    OPERATOR,
    PAIR_BEFORE,
    PAIR_INDEX,
    PAIR_MODEL,
    PAIR_SHADOW,
    PAIRS_FIRST,
    PAIRS_STOP,
    PUBLICATION_INDEX,
    PUBLICATION_SOURCE,
    PUBLICATION_TARGET,
    READY_NODE,
    READY_SLOT,
    RIVALS_FIRST,
    RIVALS_STOP,
    SCHEDULED_COUNT,
    SEGMENT_FIRST,
    SEGMENT_STOP,
    SHIFT,
    SINCE,
    SIZE,
    SLOT,
    SLOT_COUNT,
    SOURCE,
    SPLIT,
    START,
    STEPS_LATER,
    STOP,
    SUCCESSOR_OFFSET,
    SUCCESSOR_SLOT,
    SUCCESSORS_FIRST,
    TO,
    TRAINER,
    TRAINING_STATE,
    TRAINS,
    TRANSIENT,
    USERS_FIRST,
    USERS_STOP,
    WEIGHTS,
    WHOLE,
)

__all__ = ["KERNEL_FINGERPRINT", "critical_seconds", "evaluate_choice", "evaluate_choices", "jit"]

# How a pair of operators (Stage 3) or a publication (Stage 4) is lowered.
NOTHING, PRECEDE, MOVE, REDISTRIBUTE, INSTALLED = range(5)

# Labels order the nodes of one operator and step as lowering creates them: OP nodes, data transfers, redistributions,
# publications.
LABELS = 1 << 32  # of each kind
OP_LABEL, DATA_LABEL, PAIR_LABEL, PUBLICATION_LABEL = (kind * LABELS for kind in range(4))

SIGN_BIT = np.int64(-(2**63))


OPTIONS = {"nogil": True, "error_model": "numpy"}


def jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with a cache on disk, or for this process alone where no folder is writable."""
    try:
        return _repairing(numba.njit(cache=True, **OPTIONS)(function))
    except RuntimeError:  # numba found no place for its cache
        return numba.njit(**OPTIONS)(function)


def _repairing(dispatcher: Any) -> Any:
    """What a damaged file of the cache held is compiled and stored again; numba itself fails on it."""
    cache = dispatcher._cache
    load = cache.load_overload

    def load_overload(signature: Any, target: Any) -> Any:
        try:
            return load(signature, target)
        except Exception:  # of pickle and LLVM, of whatever kind the damage leads to
            cache.flush()
            return None

    cache.load_overload = load_overload
    return dispatcher


helper = numba.njit(**OPTIONS)
inlined = numba.njit(inline="always")
"""For helpers of the innermost loops, which cost less than a call."""


@jit
def evaluate_choices(t, choices, w, results):
    """Evaluate each row of ``choices``; ``results`` (n, 5) takes what :func:`evaluate_choice` returns."""
    for i in range(choices.shape[0]):
        makespan, tokens_per_s, peak_ratio, utilization, used = evaluate_choice(t, choices[i], w)
        results[i, 0] = makespan
        results[i, 1] = tokens_per_s
        results[i, 2] = peak_ratio
        results[i, 3] = utilization
        results[i, 4] = used


@jit
def evaluate_choice(t, choice, w):
    """``(makespan_s, tokens_per_s, peak_ratio, utilization, used_gpus)`` of one candidate index per operator."""
    segments = _place(t, choice, w)
    slots = _lower(t, w)
    _rank(t, w, slots)
    makespan = _schedule(t, w, slots, segments)
    peak = _peak(t, w, segments)
    busy, bounds, total = w.busy, w.bounds, 0.0
    for s in range(segments):
        total = total + busy[s] * (bounds[s + 1] - bounds[s])
    return (
        makespan,
        t.tokens / makespan,
        peak / t.usable_bytes,
        total / (t.gpus * makespan),
        _used(w, segments),
    )


# Placement


@helper
def _place(t, choice, w):
    """Look the candidates up; segments and neighbours of their allocations. Returns the number of segments."""
    candidates, operators = t.candidates, t.operators
    placed, bounds, disjoint, shares = w.placed, w.bounds, w.disjoint, w.shares
    n = operators.shape[0]
    bounds[0] = 0
    bounds[1] = t.gpus
    count = 2
    for v in range(n):
        row = operators[v, FIRST_CANDIDATE] + choice[v]
        for column in range(COSTS + 1):
            placed[v, column] = candidates[row, column]
        count = _insert(bounds, count, placed[v, START])
        count = _insert(bounds, count, placed[v, STOP])
    for v in range(n):
        start, stop = placed[v, START], placed[v, STOP]
        first = 0
        while bounds[first] < start:
            first += 1
        last = first + 1
        while bounds[last] < stop:
            last += 1
        placed[v, SEGMENT_FIRST] = first
        placed[v, SEGMENT_STOP] = last
        for u in range(n):
            apart = start >= placed[u, STOP] or stop <= placed[u, START]
            disjoint[v, u] = apart
            shares[v, u] = 0.0 if apart else 1.0
    return count - 1


@helper
def _insert(bounds, count, value):
    """Insert into the ascending first ``count`` entries unless present; returns the new count."""
    place = count
    while bounds[place - 1] > value:  # the first entry is 0, no value is less
        place -= 1
    if bounds[place - 1] == value:
        return count
    for i in range(count, place, -1):
        bounds[i] = bounds[i - 1]
    bounds[place] = value
    return count + 1


@helper
def _same_allocation(placed, u, v):
    return placed[u, START] == placed[v, START] and placed[u, STOP] == placed[v, STOP]


@helper
def _same_degrees(placed, u, v):
    return placed[u, DEGREES] == placed[v, DEGREES]


@helper
def _same_place(placed, u, v):
    return _same_allocation(placed, u, v) and _same_degrees(placed, u, v)


@helper
def _tier(placed, u, v):
    """The slowest tier that the allocations of two operators span together."""
    if min(placed[u, FIRST_NODE], placed[v, FIRST_NODE]) == max(placed[u, LAST_NODE], placed[v, LAST_NODE]):
        return 0
    if min(placed[u, FIRST_RACK], placed[v, FIRST_RACK]) == max(placed[u, LAST_RACK], placed[v, LAST_RACK]):
        return 1
    return 2


# Lowering to the template of one step


@helper
def _lower(t, w):
    """Slots, their seconds and the edges between them, in ``w``; returns the number of slots."""
    w.counts[EDGE_COUNT] = 0
    _split(t, w)
    slots = _publish(t, w)
    slots = _instantiate(t, w, slots)
    _connect_publications(t, w)
    _group_by_source(w, slots)
    w.counts[SLOT_COUNT] = slots
    return slots


@helper
def _split(t, w):
    """Which operators become one node per length phase (Stage 1), and what each Stage 3 pair needs."""
    operators, lists, placed, disjoint = t.operators, t.lists, w.placed, w.disjoint
    pairs, redistributed = t.pairs, w.redistributed
    n = operators.shape[0]
    for v in range(n):
        placed[v, SPLIT] = 0
    for v in range(n):
        first, stop = operators[v, FEEDERS_FIRST], operators[v, FEEDERS_STOP]
        apart = t.phases > 1 and stop > first
        for i in range(first, stop):
            apart = apart and disjoint[v, lists[i]] != 0
        if apart:
            placed[v, SPLIT] = 1
            for i in range(first, stop):
                placed[lists[i], SPLIT] = 1
        for i in range(operators[v, PAIRS_FIRST], operators[v, PAIRS_STOP]):
            u = pairs[i, PAIR_BEFORE]
            if pairs[i, PAIR_SHADOW] and disjoint[u, v]:
                redistributed[i, KIND] = NOTHING
            elif not _same_allocation(placed, u, v):
                redistributed[i, KIND] = PRECEDE
            elif _same_degrees(placed, u, v):
                redistributed[i, KIND] = NOTHING
            else:  # with staleness a trainer keeps its own weights
                own = pairs[i, PAIR_SHADOW] and operators[v, TRAINS]
                redistributed[i, KIND] = PRECEDE if own else REDISTRIBUTE


@helper
def _publish(t, w):
    """Stage 4: decide every publication and make its transfer. They only wait for earlier steps, so they come first."""
    operators, publications, lists, reshard_seconds = t.operators, t.publications, t.lists, t.reshard_seconds
    placed, published, slots, slot_seconds = w.placed, w.published, w.slots, w.slot_seconds
    count = 0
    for p in range(publications.shape[0]):
        u, v = publications[p, PUBLICATION_SOURCE], publications[p, PUBLICATION_TARGET]
        kind, slot = MOVE, NONE
        if _redistributed(operators, w.redistributed, v):
            kind = PRECEDE  # Stage 3 brings this version
        else:
            for i in range(publications[p, RIVALS_FIRST], publications[p, RIVALS_STOP]):
                rival = lists[i]
                o = publications[rival, PUBLICATION_TARGET]
                made = published[rival, KIND] in (MOVE, REDISTRIBUTE)
                if made and _same_allocation(placed, o, v) and _same_degrees(placed, o, v):
                    kind, slot = INSTALLED, published[rival, SLOT]
            if kind == MOVE and _same_allocation(placed, u, v):
                kind = PRECEDE if _same_degrees(placed, u, v) else REDISTRIBUTE
        if kind in (MOVE, REDISTRIBUTE):
            if kind == MOVE:
                seconds = _publication_seconds(t.overlap_ranges, t.overlaps, t.overlap_seconds, placed, p, u, v)
                source = u if t.reserve_source else v
            else:
                seconds = reshard_seconds[operators[v, MODEL], placed[v, SIZE], _tier(placed, v, v)]
                source = v
            slot = count
            label = PUBLICATION_LABEL + publications[p, PUBLICATION_INDEX]
            count = _slot(slots, count, v, source, 0, publications[p, SHIFT], label)
            slot_seconds[slot] = seconds
        published[p, KIND] = kind
        published[p, SLOT] = slot
    return count


@helper
def _publication_seconds(ranges, overlaps, seconds, placed, p, u, v):
    shared = max(0, min(placed[u, STOP], placed[v, STOP]) - max(placed[u, START], placed[v, START]))
    a, b = placed[u, SIZE], placed[v, SIZE]
    for i in range(ranges[p, a, b, 0], ranges[p, a, b, 1]):
        if overlaps[i] == shared:
            return seconds[i, _tier(placed, u, v)]
    return np.nan


@helper
def _redistributed(operators, redistributed, v):
    """Whether Stage 3 brings a serving operator the weights of its model."""
    for i in range(operators[v, PAIRS_FIRST], operators[v, PAIRS_STOP]):
        if redistributed[i, KIND] == REDISTRIBUTE:
            return True
    return False


@helper
def _connect_publications(t, w):
    publications, placed, published, edges, counts = t.publications, w.placed, w.published, w.edges, w.counts
    for p in range(publications.shape[0]):
        trained = placed[publications[p, PUBLICATION_SOURCE], CHAIN_LAST]
        first = placed[publications[p, PUBLICATION_TARGET], CHAIN_FIRST]
        kind, slot = published[p, KIND], published[p, SLOT]
        if kind == PRECEDE:
            _edge(edges, counts, trained, first, publications[p, SHIFT])
        else:
            if kind != INSTALLED:
                _edge(edges, counts, trained, slot, publications[p, SHIFT])
            _edge(edges, counts, slot, first, 0)


@helper
def _instantiate(t, w, count):
    """Stages 1 to 3, operator by operator: the transfers into it, its nodes, and their edges."""
    operators, data_edges, data_seconds, costs = t.operators, t.data_edges, t.data_seconds, t.costs
    placed, slots, slot_seconds, data_slot = w.placed, w.slots, w.slot_seconds, w.data_slot
    edges, counts, phases = w.edges, w.counts, t.phases
    pairs, redistributed = t.pairs, w.redistributed
    for v in t.order:
        first_edge, stop_edge = operators[v, DATA_FIRST], operators[v, DATA_STOP]
        for e in range(first_edge, stop_edge):
            u = data_edges[e, DATA_SOURCE]
            phased = data_edges[e, DATA_GENERATED] and placed[u, SPLIT] and placed[v, SPLIT]
            if not phased and _same_allocation(placed, u, v):
                data_slot[e] = NONE
                continue
            data_slot[e] = count
            a, b, tier = placed[u, SIZE], placed[v, SIZE], _tier(placed, u, v)
            source = u if t.reserve_source else v
            label = DATA_LABEL + data_edges[e, DATA_INDEX] * phases
            if phased:
                for q in range(phases):
                    _edge(edges, counts, placed[u, CHAIN_FIRST] + q, count, 0)
                    slot_seconds[count] = data_seconds[e, 1 + q, a, b, tier]
                    count = _slot(slots, count, v, source, 0, 0, label + q)
            else:
                _edge(edges, counts, placed[u, CHAIN_LAST], count, 0)
                slot_seconds[count] = data_seconds[e, 0, a, b, tier]
                count = _slot(slots, count, v, source, 0, 0, label)
        for i in range(operators[v, PAIRS_FIRST], operators[v, PAIRS_STOP]):
            if redistributed[i, KIND] == REDISTRIBUTE:
                redistributed[i, SLOT] = count
                slot_seconds[count] = t.reshard_seconds[pairs[i, PAIR_MODEL], placed[v, SIZE], _tier(placed, v, v)]
                count = _slot(slots, count, v, v, 0, 0, PAIR_LABEL + pairs[i, PAIR_INDEX])
        head, cost = count, placed[v, COSTS]
        placed[v, CHAIN_FIRST] = head
        if placed[v, SPLIT]:
            for q in range(phases):
                if q > 0:
                    _edge(edges, counts, count - 1, count, 0)
                slot_seconds[count] = costs[cost, FIRST_PHASE + q]
                count = _slot(slots, count, v, v, 1, 0, OP_LABEL + v * phases + q)
        else:
            slot_seconds[count] = costs[cost, WHOLE]
            count = _slot(slots, count, v, v, 1, 0, OP_LABEL + v * phases)
        placed[v, CHAIN_LAST] = count - 1
        for e in range(first_edge, stop_edge):
            u = data_edges[e, DATA_SOURCE]
            if data_slot[e] == NONE:
                _edge(edges, counts, placed[u, CHAIN_LAST], head, 0)
            elif data_edges[e, DATA_GENERATED] and placed[u, SPLIT] and placed[v, SPLIT]:
                for q in range(phases):
                    _edge(edges, counts, data_slot[e] + q, head + q, 0)
            else:
                _edge(edges, counts, data_slot[e], head, 0)
        for i in range(operators[v, PAIRS_FIRST], operators[v, PAIRS_STOP]):
            if redistributed[i, KIND] != NOTHING:
                before = placed[pairs[i, PAIR_BEFORE], CHAIN_LAST]
                if redistributed[i, KIND] == REDISTRIBUTE:
                    _edge(edges, counts, before, redistributed[i, SLOT], 0)
                    before = redistributed[i, SLOT]
                _edge(edges, counts, before, head, 0)
        if operators[v, TRAINS]:
            _edge(edges, counts, head, head, 1)  # updates of one optimizer are ordered
    return count


@helper
def _slot(slots, count, v, source, is_op, since, label):
    slots[count, OPERATOR] = v
    slots[count, SOURCE] = source
    slots[count, IS_OP] = is_op
    slots[count, SINCE] = since
    slots[count, LABEL] = label
    return count + 1


@helper
def _edge(edges, counts, source, target, steps_later):
    count = counts[EDGE_COUNT]
    edges[count, FROM] = source
    edges[count, TO] = target
    edges[count, STEPS_LATER] = steps_later
    counts[EDGE_COUNT] = count + 1


@helper
def _group_by_source(w, count):
    """Successors of each slot, from the list of edges."""
    slots, edges, successors, edge_count = w.slots, w.edges, w.successors, w.counts[EDGE_COUNT]
    for s in range(count + 1):
        slots[s, SUCCESSORS_FIRST] = 0
    for e in range(edge_count):
        slots[edges[e, FROM] + 1, SUCCESSORS_FIRST] += 1
    for s in range(count):
        slots[s + 1, SUCCESSORS_FIRST] += slots[s, SUCCESSORS_FIRST]
        slots[s, CURSOR] = slots[s, SUCCESSORS_FIRST]
    for e in range(edge_count):
        source, target = edges[e, FROM], edges[e, TO]
        place = slots[source, CURSOR]
        successors[place, SUCCESSOR_SLOT] = target
        successors[place, SUCCESSOR_OFFSET] = edges[e, STEPS_LATER] * count + target - source
        slots[source, CURSOR] = place + 1


# Scheduling


@helper
def _rank(t, w, count):
    """Downstream ranks, and the urgency by which ties in the earliest start are broken.

    Ranks are not negative, so their bit patterns order them; the sign bit puts every OP behind every transfer.
    """
    slots, slot_seconds, successors, placed = w.slots, w.slot_seconds, w.successors, w.placed
    rank, urgency = w.rank, w.urgency
    steps = t.steps
    beyond = rank.shape[0] - urgency.shape[0]  # at least as far as an edge reaches
    for node in range(steps * count, min(steps * count + beyond, rank.shape[0])):
        rank[node] = 0.0
    for k in range(steps - 1, -1, -1):
        for s in range(count - 1, -1, -1):
            node = k * count + s
            after = 0.0
            for i in range(slots[s, SUCCESSORS_FIRST], slots[s + 1, SUCCESSORS_FIRST]):
                after = max(after, rank[node + successors[i, SUCCESSOR_OFFSET]])
            rank[node] = slot_seconds[s] + after
    if t.phases > 1:
        for v in range(placed.shape[0]):
            head = placed[v, CHAIN_FIRST]
            for s in range(head + 1, placed[v, CHAIN_LAST] + 1):
                for k in range(steps):
                    rank[k * count + s] = rank[k * count + head]
    bits = rank.view(np.int64)
    for k in range(steps):
        for s in range(count):
            node = k * count + s
            urgency[node] = bits[node] + (SIGN_BIT if slots[s, IS_OP] else 0)


@helper
def _schedule(t, w, count, segments):
    """Greedy list scheduling; returns the makespan.

    A reservation never ends before an older one on the same GPUs. So the latest end over the segments of an allocation
    is the latest over the operators that share GPUs with it, and those carry the time at which GPUs are free.
    """
    slots, slot_seconds, edges, successors, counts = w.slots, w.slot_seconds, w.edges, w.successors, w.counts
    waiting, released, ready, urgency = w.waiting, w.released, w.ready, w.urgency
    start, finish, sequence = w.start, w.finish, w.sequence
    available, busy, placed, shares = w.available, w.busy, w.placed, w.shares
    n = available.shape[0]
    steps = t.steps
    nodes = steps * count
    waiting[:nodes] = 0
    released[:nodes] = 0.0
    available[:] = 0.0
    busy[:segments] = 0.0
    for e in range(counts[EDGE_COUNT]):
        # An edge counts in the steps in which its source exists inside the horizon.
        for k in range(slots[edges[e, FROM], SINCE] + edges[e, STEPS_LATER], steps):
            waiting[k * count + edges[e, TO]] += 1
    waits = 0
    for k in range(steps):
        for s in range(count):
            if waiting[k * count + s] == 0 and k >= slots[s, SINCE]:
                waits = _enqueue(ready, urgency, slots, waits, k * count + s, s)
    makespan = 0.0
    scheduled = 0
    while waits > 0:
        chosen, begin = 0, np.inf
        for i in range(waits):
            s = ready[i, READY_SLOT]
            earliest = max(released[ready[i, READY_NODE]], available[slots[s, OPERATOR]])
            earliest = max(earliest, available[slots[s, SOURCE]])
            better = earliest < begin
            begin = earliest if better else begin
            chosen = i if better else chosen
        node, s = ready[chosen, READY_NODE], ready[chosen, READY_SLOT]
        waits -= 1
        for i in range(chosen, waits):
            ready[i, READY_NODE] = ready[i + 1, READY_NODE]
            ready[i, READY_SLOT] = ready[i + 1, READY_SLOT]
        end = begin + slot_seconds[s]
        start[node] = begin
        finish[node] = end
        sequence[scheduled] = node
        scheduled += 1
        makespan = max(makespan, end)
        v, u = slots[s, OPERATOR], slots[s, SOURCE]
        first, stop = placed[v, SEGMENT_FIRST], placed[v, SEGMENT_STOP]
        for i in range(first, stop):
            busy[i] += slot_seconds[s]
        for i in range(n):
            available[i] = max(available[i], end * shares[v, i])
        if u != v:
            for i in range(placed[u, SEGMENT_FIRST], placed[u, SEGMENT_STOP]):
                if i < first or i >= stop:
                    busy[i] += slot_seconds[s]
            for i in range(n):
                available[i] = max(available[i], end * shares[u, i])
        for i in range(slots[s, SUCCESSORS_FIRST], slots[s + 1, SUCCESSORS_FIRST]):
            after = node + successors[i, SUCCESSOR_OFFSET]
            if after < nodes:
                released[after] = max(released[after], end)
                waiting[after] -= 1
                if waiting[after] == 0:
                    waits = _enqueue(ready, urgency, slots, waits, after, successors[i, SUCCESSOR_SLOT])
    counts[SCHEDULED_COUNT] = scheduled
    return makespan


@inlined
def _enqueue(ready, urgency, slots, waits, node, s):
    """Insert a node into the ``waits`` ready ones; among those that can start equally early the first one wins."""
    place = waits
    while place > 0 and _precedes(urgency, slots, node, s, ready[place - 1, READY_NODE], ready[place - 1, READY_SLOT]):
        ready[place, READY_NODE] = ready[place - 1, READY_NODE]
        ready[place, READY_SLOT] = ready[place - 1, READY_SLOT]
        place -= 1
    ready[place, READY_NODE] = node
    ready[place, READY_SLOT] = s
    return waits + 1


@inlined
def _precedes(urgency, slots, a, s, b, r):
    """Whether node ``a`` of slot ``s`` comes before ``b`` of ``r`` when both can start equally early."""
    if urgency[a] != urgency[b]:
        return urgency[a] > urgency[b]
    if slots[s, OPERATOR] != slots[r, OPERATOR]:
        return slots[s, OPERATOR] < slots[r, OPERATOR]
    if a - s != b - r:  # the steps, times the number of slots
        return a - s < b - r
    return slots[s, LABEL] < slots[r, LABEL]


# Memory and use of the cluster


@helper
def _peak(t, w, segments):
    """Peak bytes of the fullest GPU."""
    operators, models, lists, costs = t.operators, t.models, t.lists, t.costs
    placed, resident = w.placed, w.resident
    peak = 0.0
    for s in range(segments):
        persistent = 0.0
        for m in range(models.shape[0]):
            resident[m] = 0
            serves, weights = False, 0.0
            for i in range(models[m, USERS_FIRST], models[m, USERS_STOP]):
                v = lists[i]
                if _on(placed, v, s):
                    if operators[v, TRAINS]:
                        persistent = persistent + costs[placed[v, COSTS], TRAINING_STATE]
                    else:
                        serves = True
                        weights = max(weights, costs[placed[v, COSTS], WEIGHTS])
            if serves and models[m, COPIES] > 0:
                resident[m] = 1
                persistent = persistent + models[m, COPIES] * weights
        worst = 0.0
        for v in range(operators.shape[0]):
            if _on(placed, v, s):
                transient = costs[placed[v, COSTS], TRANSIENT]
                if operators[v, TRAINS] or operators[v, MODEL] == NONE or not resident[operators[v, MODEL]]:
                    transient = transient + costs[placed[v, COSTS], WEIGHTS]
                worst = max(worst, transient)
                if not operators[v, TRAINS] and operators[v, MODEL] != NONE:  # where new weights arrive
                    trainer = models[operators[v, MODEL], TRAINER]
                    if trainer != NONE and _on(placed, trainer, s) and not _same_place(placed, trainer, v):
                        both = costs[placed[trainer, COSTS], WEIGHTS] + costs[placed[v, COSTS], WEIGHTS]
                        worst = max(worst, both)
        peak = max(peak, persistent + worst)
    return peak


@helper
def _on(placed, v, segment):
    return placed[v, SEGMENT_FIRST] <= segment < placed[v, SEGMENT_STOP]


@helper
def _used(w, segments):
    """GPUs that some operator is placed on."""
    placed, bounds = w.placed, w.bounds
    used = 0
    for s in range(segments):
        for v in range(placed.shape[0]):
            if _on(placed, v, s):
                used += bounds[s + 1] - bounds[s]
                break
    return used


# Critical path


@jit
def critical_seconds(w, total):
    """Walk back over the schedule in the workspace; adds to ``total`` the seconds of each operator on the way."""
    slots, slot_seconds, finish, sequence, count = w.slots, w.slot_seconds, w.finish, w.sequence, w.counts[SLOT_COUNT]
    place = 0
    for i in range(1, w.counts[SCHEDULED_COUNT]):
        if finish[sequence[i]] >= finish[sequence[place]]:
            place = i
    while place >= 0:
        node = sequence[place]
        s = node % count
        if slots[s, IS_OP]:
            total[slots[s, OPERATOR]] += slot_seconds[s]
        place -= 1
        while place >= 0 and not _blocks(w, count, sequence[place], node):
            place -= 1


@helper
def _blocks(w, count, other, node):
    """Whether ``other``, scheduled before ``node``, ends when it starts and made it wait."""
    if w.finish[other] != w.start[node]:
        return False
    slots, successors, disjoint = w.slots, w.successors, w.disjoint
    s, r = other % count, node % count
    for v in (slots[s, OPERATOR], slots[s, SOURCE]):
        if not (disjoint[v, slots[r, OPERATOR]] and disjoint[v, slots[r, SOURCE]]):
            return True
    for i in range(slots[s, SUCCESSORS_FIRST], slots[s + 1, SUCCESSORS_FIRST]):
        if other + successors[i, SUCCESSOR_OFFSET] == node:
            return True
    return False
