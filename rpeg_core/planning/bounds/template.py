"""The precedences that every configuration in a box has, as a template of one step (numba).

Nodes are the operators, phase by phase where a split is certain, and those transfers of weights whose least duration is
known and not 0; each has its instance in every step. An operator's own number is its last phase. A *link* from u to v,
``shift`` steps later, is a system of inequalities between starts S and ends E:

* end-start ``S_v >= E_u + d``: a data edge with its transfer, whole or of a phase, a publication, the order of updates,
  Stage 3. ``d`` is the transfer's duration when both allocations are known, the least over the tiers when only their
  sizes are known and differ, else 0. Transfers of data get no node: they are short, and leaving out their load is a
  relaxation.
* start-start, end-end and start-end: a data edge that may be one between split operators. Phase q of v waits for the
  transfer of phase q of u, so v starts after the first phase of u, ends at least its last phase after u, and ends after
  the phases of u up to q and of v from q on, for each q. The smaller of this and the unsplit case counts.

A transfer of weights is a node, because it takes as long as an operator and reserves its destination: there it competes
with operators. It has a duration only when the box makes it certain: allocations known, no earlier transfer that could
have brought the same version, no redistribution that could.
"""

from __future__ import annotations

from rpeg_core.planning.bounds.state import (
    APART,
    LINKS,
    MEETS,
    MOST_PHASES,
    NODES,
    SPLIT,
    UNKNOWN,
    WHOLE_ONLY,
)
from rpeg_core.planning.bounds.tables import (
    EDGE_GENERATED,
    EDGE_SOURCE,
    EDGE_TABLE,
    EDGE_TARGET,
    FROM_TRAINING,
    MODEL,
    NONE,
    PAIRS_FIRST,
    PAIRS_STOP,
    PHASES,
    PUBLICATION_TABLE,
    RIVALS,
    ROW_FIRST,
    ROW_STOP,
    SIZE,
    SPLIT_WHOLE,
    SPLIT_WORK,
    STEPS_LATER,
    TO_SERVING,
    TRAINS,
    WHOLE,
    WORK,
)
from rpeg_core.planning.compiled.kernel import helper
from rpeg_core.planning.compiled.tables import PAIR_BEFORE, PAIR_MODEL, PAIR_SHADOW

__all__ = [
    "END_END",
    "END_START",
    "SHIFT",
    "SOURCE",
    "START_END",
    "START_START",
    "TARGET",
    "build_template",
]

# Columns of Scratch.links.
SOURCE, TARGET, SHIFT = range(3)

# Columns of Scratch.delays: of the target's start or end after the source's start or end; negative where there is none.
END_START, START_START, END_END, START_END = range(4)
NEVER = -1.0


@helper
def build_template(t, group, start, w):
    """Nodes and links of the box that ``w`` describes, into the second part of ``w``."""
    operators, groups, publications = t.operators, t.groups, t.publications
    counts, links, delays, least, split, sequence = w.counts, w.links, w.delays, w.least, w.split, w.sequence
    n = operators.shape[0]
    counts[LINKS] = 0
    counts[NODES] = n
    for v in range(n):
        whole, parts, work, split_work = least[v, WHOLE], least[v, SPLIT_WHOLE], least[v, WORK], least[v, SPLIT_WORK]
        if split[v] == SPLIT:
            whole, work = parts, split_work
        elif split[v] == UNKNOWN:
            whole, work = min(whole, parts), min(work, split_work)
        _node(w.seconds, w.work, w.runs_on, w.since, v, v, whole, work / t.gpus, 0)
        w.first[v] = v
        if split[v] == SPLIT and t.phases <= MOST_PHASES:
            w.first[v] = counts[NODES]
            counts[NODES] += t.phases - 1
            for q in range(t.phases):
                node = v if q == t.phases - 1 else w.first[v] + q
                seconds = least[v, PHASES + q]
                share = seconds * w.fewest[v] / t.gpus
                _node(w.seconds, w.work, w.runs_on, w.since, node, v, seconds, share, 0)
                if q > 0:
                    _precede(links, delays, counts, w.first[v] + q - 1, node, 0, 0.0)
        if operators[v, TRAINS]:
            _precede(links, delays, counts, v, v, 1, 0.0)
    place = 0
    for p in range(publications.shape[0]):
        u, v, shift = publications[p, FROM_TRAINING], publications[p, TO_SERVING], publications[p, STEPS_LATER]
        u_start, u_stop, v_start, v_stop = start[u], start[u] + w.fewest[u], start[v], start[v] + w.fewest[v]
        seconds = 0.0
        if (
            u_start != NONE
            and v_start != NONE
            and _brings(operators, t.pairs, start, w.fewest, w.most, publications[p], v)
        ):
            size = groups[group[v], SIZE]
            tier = _tier(t.gpus_per_node, t.gpus_per_rack, min(u_start, v_start), max(u_stop, v_stop))
            if u_start != v_start or u_stop != v_stop:
                shared = max(0, min(u_stop, v_stop) - max(u_start, v_start))
                found = t.overlap_ranges[publications[p, PUBLICATION_TABLE], groups[group[u], SIZE], size]
                for i in range(found[0], found[1]):
                    if t.overlaps[i] == shared:
                        seconds = t.overlap_seconds[i, tier]
            elif _other_degrees(groups, t.row_degrees, group[u], group[v]):
                seconds = t.reshard_seconds[operators[v, MODEL], size, tier]
        if seconds > 0.0:
            node = counts[NODES]
            counts[NODES] = node + 1
            sequence[place] = node
            place += 1
            _node(w.seconds, w.work, w.runs_on, w.since, node, v, seconds, seconds * w.fewest[v] / t.gpus, shift)
            _precede(links, delays, counts, u, node, shift, 0.0)
            _precede(links, delays, counts, node, w.first[v], 0, 0.0)
        else:
            _precede(links, delays, counts, u, w.first[v], shift, 0.0)
    for v in t.order:
        for i in range(operators[v, PAIRS_FIRST], operators[v, PAIRS_STOP]):
            u = t.pairs[i, PAIR_BEFORE]
            if not (t.pairs[i, PAIR_SHADOW] and w.meet[u, v] != MEETS):
                same = _same(start, w.fewest, w.most, u, v)
                if same == APART:
                    _precede(links, delays, counts, u, w.first[v], 0, 0.0)
                # With staleness a trainer keeps its own weights.
                own = t.pairs[i, PAIR_SHADOW] and operators[v, TRAINS]
                if same == MEETS and not own and _other_degrees(groups, t.row_degrees, group[u], group[v]):
                    tier = _tier(t.gpus_per_node, t.gpus_per_rack, start[v], start[v] + w.fewest[v])
                    seconds = t.reshard_seconds[t.pairs[i, PAIR_MODEL], groups[group[v], SIZE], tier]
                    node = counts[NODES]
                    counts[NODES] = node + 1
                    sequence[place] = node
                    place += 1
                    _node(w.seconds, w.work, w.runs_on, w.since, node, v, seconds, seconds * w.fewest[v] / t.gpus, 0)
                    _precede(links, delays, counts, u, node, 0, 0.0)
                    _precede(links, delays, counts, node, w.first[v], 0, 0.0)
        if w.first[v] != v:
            for q in range(t.phases - 1):
                sequence[place] = w.first[v] + q
                place += 1
        sequence[place] = v
        place += 1
    for e in range(t.edges.shape[0]):
        u, v, table = t.edges[e, EDGE_SOURCE], t.edges[e, EDGE_TARGET], t.edges[e, EDGE_TABLE]
        a, b = groups[group[u], SIZE], groups[group[v], SIZE]
        placed = start[u] != NONE and start[v] != NONE
        tier = 0
        if placed:
            first, stop = min(start[u], start[v]), max(start[u] + w.fewest[u], start[v] + w.fewest[v])
            tier = _tier(t.gpus_per_node, t.gpus_per_rack, first, stop)
        phased = WHOLE_ONLY
        if t.edges[e, EDGE_GENERATED] and split[u] != WHOLE_ONLY and split[v] != WHOLE_ONLY:
            phased = SPLIT if split[u] == SPLIT and split[v] == SPLIT else UNKNOWN
        if phased == SPLIT and t.phases <= MOST_PHASES:
            for q in range(t.phases):
                last = q == t.phases - 1
                before, after = u if last else w.first[u] + q, v if last else w.first[v] + q
                _precede(links, delays, counts, before, after, 0, t.edge_seconds[table, 1 + q, a, b, tier])
        elif phased != WHOLE_ONLY:
            moved = t.edge_seconds[table, 1:, a, b, tier]
            maybe = phased == UNKNOWN
            _precede_by_phases(links, delays, counts, u, v, w.first, least[u], least[v], moved, placed, maybe)
        else:
            delay = 0.0
            if _same(start, w.fewest, w.most, u, v) == APART:
                if placed:
                    delay = t.edge_seconds[table, 0, a, b, tier]
                elif a != NONE and b != NONE:
                    delay = t.edge_least[table, a, b]
            _precede(links, delays, counts, u, w.first[v], 0, delay)


@helper
def _same(start, fewest, most, u, v):
    """Whether two operators have the same allocation: MEETS when surely, APART when surely not."""
    if start[u] != NONE and start[v] != NONE:
        return MEETS if start[u] == start[v] and fewest[u] == fewest[v] else APART
    return APART if most[u] < fewest[v] or most[v] < fewest[u] else UNKNOWN


@helper
def _brings(operators, pairs, start, fewest, most, publication, v):
    """Whether a publication to v surely makes a transfer of its own, unless degrees and allocation are the same."""
    for o in range(operators.shape[0]):
        if publication[RIVALS] >> o & 1 and _same(start, fewest, most, o, v) != APART:
            return False
    for i in range(operators[v, PAIRS_FIRST], operators[v, PAIRS_STOP]):
        if _same(start, fewest, most, pairs[i, PAIR_BEFORE], v) != APART:
            return False
    return True


@helper
def _other_degrees(groups, row_degrees, one, other):
    """Whether the layouts of two operators are known and have different degrees."""
    first, second = groups[one, ROW_FIRST], groups[other, ROW_FIRST]
    if groups[one, ROW_STOP] - first != 1 or groups[other, ROW_STOP] - second != 1:
        return False
    return row_degrees[first] != row_degrees[second]


@helper
def _tier(gpus_per_node, gpus_per_rack, first, stop):
    if first // gpus_per_node == (stop - 1) // gpus_per_node:
        return 0
    return 1 if first // gpus_per_rack == (stop - 1) // gpus_per_rack else 2


@helper
def _node(seconds, work, runs_on, since, node, v, duration, share, first_step):
    seconds[node] = duration
    work[node] = share
    runs_on[node] = v
    since[node] = first_step


@helper
def _precede(links, delays, counts, u, v, shift, delay):
    i = counts[LINKS]
    counts[LINKS] = i + 1
    links[i, SOURCE] = u
    links[i, TARGET] = v
    links[i, SHIFT] = shift
    delays[i, END_START] = delay
    delays[i, START_START] = NEVER
    delays[i, END_END] = NEVER
    delays[i, START_END] = NEVER


@helper
def _precede_by_phases(links, delays, counts, u, v, head, before, after, moved, placed, maybe):
    """Link two operators phase by phase; ``before`` and ``after`` are their least costs, ``moved`` the transfers."""
    last = len(moved) - 1
    rest = 0.0
    for q in range(last + 1):
        rest += after[PHASES + q]
    done, through = 0.0, 0.0
    for q in range(last + 1):
        done += before[PHASES + q]
        through = max(through, done + rest + (moved[q] if placed else 0.0))
        rest -= after[PHASES + q]
    first = before[PHASES] + (moved[0] if placed else 0.0)
    final = after[PHASES + last] + (moved[last] if placed else 0.0)
    if maybe:
        first, final = min(first, before[WHOLE]), min(final, after[WHOLE])
        through = min(through, min(before[WHOLE], before[SPLIT_WHOLE]) + min(after[WHOLE], after[SPLIT_WHOLE]))
    i = counts[LINKS]
    _precede(links, delays, counts, head[u], head[v], 0, NEVER)
    _precede(links, delays, counts, u, v, 0, NEVER)
    _precede(links, delays, counts, head[u], v, 0, NEVER)
    delays[i, START_START] = first
    delays[i + 1, END_END] = final
    delays[i + 2, START_END] = through
