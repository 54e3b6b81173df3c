"""The precedences that every configuration in a box has, as a template of one step (numba).

Nodes are the operators and those transfers of weights whose least duration is known and not 0; each has its instance in
every step. A *link* from u to v, ``shift`` steps later, is a system of inequalities between starts S and ends E:

* end-start ``S_v >= E_u + d``: a data edge with its transfer, a publication, the order of updates, Stage 3. ``d`` is
  the transfer's duration when both allocations are known, the least over the tiers when only their sizes are known
  and differ, else 0. Transfers of data get no node: they are short, and leaving out their load is a relaxation.
* start-start, end-end and start-end: a data edge between two split operators. Phase q of v waits for the transfer of
  phase q of u, so v starts after the first phase of u, ends at least its last phase after u, and ends after the
  phases of u up to q and of v from q on, for each q. When it is open whether they are split, the smaller of both
  cases counts.

A transfer of weights is a node, because it takes as long as an operator and reserves its destination: there it competes
with operators. It has a duration only when the box makes it certain: allocations known, no earlier transfer that could
have brought the same version, no redistribution that could.
"""

from __future__ import annotations

from rpeg_core.planning.bounds.compilation import jit
from rpeg_core.planning.bounds.state import (
    APART,
    LINKS,
    MEETS,
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
    NONE,
    PAIR_BEFORE,
    PAIR_SHADOW,
    PART,
    PHASES,
    PUBLICATION_TABLE,
    RIVALS,
    SIZE,
    SPLIT_WHOLE,
    SPLIT_WORK,
    STEPS_LATER,
    TO_SERVING,
    TRAINS,
    WHOLE,
    WORK,
)

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


@jit
def _same(w, start, u, v):
    """MEETS: same allocation; APART: different ones."""
    if start[u] != NONE and start[v] != NONE:
        return MEETS if start[u] == start[v] and w.fewest[u] == w.fewest[v] else APART
    if w.most[u] < w.fewest[v] or w.most[v] < w.fewest[u]:
        return APART
    return UNKNOWN


@jit
def _tier(t, w, start, u, v):
    low = min(start[u], start[v])
    high = max(start[u] + w.fewest[u], start[v] + w.fewest[v]) - 1
    if low // t.gpus_per_node == high // t.gpus_per_node:
        return 0
    return 1 if low // t.gpus_per_rack == high // t.gpus_per_rack else 2


@jit
def _link(w, u, v, shift, end_start, start_start, end_end, start_end):
    i = w.counts[LINKS]
    w.links[i, SOURCE] = u
    w.links[i, TARGET] = v
    w.links[i, SHIFT] = shift
    w.delays[i, END_START] = end_start
    w.delays[i, START_START] = start_start
    w.delays[i, END_END] = end_end
    w.delays[i, START_END] = start_end
    w.counts[LINKS] = i + 1


@jit
def _transfer(t, w, v, seconds, since):
    i = w.counts[NODES]
    w.seconds[i] = seconds
    w.work[i] = seconds * w.fewest[v] / t.gpus
    w.runs_on[i] = v
    w.since[i] = since
    w.counts[NODES] = i + 1
    return i


@jit
def build_template(t, group, start, row, w):
    n = t.operators.shape[0]
    w.counts[LINKS] = 0
    w.counts[NODES] = n
    for v in range(n):
        whole, split = w.least[v, WHOLE], w.least[v, SPLIT_WHOLE]
        work, split_work = w.least[v, WORK], w.least[v, SPLIT_WORK]
        known = w.split[v]
        w.seconds[v] = whole if known == WHOLE_ONLY else split if known == SPLIT else min(whole, split)
        area = work if known == WHOLE_ONLY else split_work if known == SPLIT else min(work, split_work)
        w.work[v] = area / t.gpus
        w.runs_on[v] = v
        w.since[v] = 0
        if t.operators[v, TRAINS]:
            _link(w, v, v, 1, 0.0, NEVER, NEVER, NEVER)
    for p in range(t.publications.shape[0]):
        u, v, shift = t.publications[p, FROM_TRAINING], t.publications[p, TO_SERVING], t.publications[p, STEPS_LATER]
        seconds = _publication_seconds(t, w, group, start, row, p, u, v)
        if seconds > 0.0:
            node = _transfer(t, w, v, seconds, shift)
            _link(w, u, node, shift, 0.0, NEVER, NEVER, NEVER)
            _link(w, node, v, 0, 0.0, NEVER, NEVER, NEVER)
        else:
            _link(w, u, v, shift, 0.0, NEVER, NEVER, NEVER)
    place = 0
    for node in range(n, w.counts[NODES]):
        w.sequence[place] = node
        place += 1
    for v in t.order:
        u = t.operators[v, PAIR_BEFORE]
        if u != NONE and not (t.operators[v, PAIR_SHADOW] and w.meet[u, v] != MEETS):
            same = _same(w, start, u, v)
            if same == APART:
                _link(w, u, v, 0, 0.0, NEVER, NEVER, NEVER)
            elif same == MEETS and row[u] != NONE and row[v] != NONE and t.row_degrees[row[u]] != t.row_degrees[row[v]]:
                seconds = t.reshard_seconds[v, t.groups[group[v], SIZE], _tier(t, w, start, v, v)]
                node = _transfer(t, w, v, seconds, 0)
                w.sequence[place] = node
                place += 1
                _link(w, u, node, 0, 0.0, NEVER, NEVER, NEVER)
                _link(w, node, v, 0, 0.0, NEVER, NEVER, NEVER)
        w.sequence[place] = v
        place += 1
    for e in range(t.edges.shape[0]):
        _data_link(t, group, start, w, e)


@jit
def _publication_seconds(t, w, group, start, row, p, u, v):
    """Least seconds of the transfer of a publication, 0 where it may be a mere precedence."""
    same = _same(w, start, u, v)
    if start[u] == NONE or start[v] == NONE:
        return 0.0
    for o in range(t.operators.shape[0]):
        if t.publications[p, RIVALS] >> o & 1 and _same(w, start, o, v) != APART:
            return 0.0
    before = t.operators[v, PAIR_BEFORE]
    if before != NONE and _same(w, start, before, v) != APART:
        return 0.0
    table = t.publications[p, PUBLICATION_TABLE]
    a, b = t.groups[group[u], SIZE], t.groups[group[v], SIZE]
    if same == MEETS:
        if row[u] == NONE or row[v] == NONE or t.row_degrees[row[u]] == t.row_degrees[row[v]]:
            return 0.0
        return t.reshard_seconds[v, b, _tier(t, w, start, v, v)]
    shared = max(0, min(start[u] + w.fewest[u], start[v] + w.fewest[v]) - max(start[u], start[v]))
    for i in range(t.overlap_ranges[table, a, b, 0], t.overlap_ranges[table, a, b, 1]):
        if t.overlaps[i] == shared:
            return t.overlap_seconds[i, _tier(t, w, start, u, v)]
    return 0.0


@jit
def _data_link(t, group, start, w, e):
    u, v, table = t.edges[e, EDGE_SOURCE], t.edges[e, EDGE_TARGET], t.edges[e, EDGE_TABLE]
    placed = start[u] != NONE and start[v] != NONE
    same = _same(w, start, u, v)
    delay = 0.0
    if placed and same == APART:
        a, b = t.groups[group[u], SIZE], t.groups[group[v], SIZE]
        delay = t.edge_seconds[table, 0, a, b, _tier(t, w, start, u, v)]
    elif same == APART and t.groups[group[u], PART] == NONE and t.groups[group[v], PART] == NONE:
        delay = t.edge_least[table, t.groups[group[u], SIZE], t.groups[group[v], SIZE]]
    phased = WHOLE_ONLY
    if t.edges[e, EDGE_GENERATED] and w.split[u] != WHOLE_ONLY and w.split[v] != WHOLE_ONLY:
        phased = SPLIT if w.split[u] == SPLIT and w.split[v] == SPLIT else UNKNOWN
    if phased == WHOLE_ONLY:
        _link(w, u, v, 0, delay, NEVER, NEVER, NEVER)
        return
    q = t.phases
    # Through the transfer of each phase: phases of u up to it, then those of v from it on.
    first, last, through = 0.0, 0.0, 0.0
    rest = 0.0
    for i in range(q):
        rest += w.least[v, PHASES + i]
    done = 0.0
    for i in range(q):
        moved = 0.0
        if placed:
            a, b = t.groups[group[u], SIZE], t.groups[group[v], SIZE]
            moved = t.edge_seconds[table, 1 + i, a, b, _tier(t, w, start, u, v)]
        done += w.least[u, PHASES + i]
        through = max(through, done + moved + rest)
        rest -= w.least[v, PHASES + i]
        if i == 0:
            first = done + moved
        if i == q - 1:
            last = moved + w.least[v, PHASES + i]
    if phased == UNKNOWN:
        first = min(first, w.least[u, WHOLE])
        last = min(last, w.least[v, WHOLE])
        whole_u = min(w.least[u, WHOLE], w.least[u, SPLIT_WHOLE])
        whole_v = min(w.least[v, WHOLE], w.least[v, SPLIT_WHOLE])
        through = min(through, whole_u + whole_v)
    _link(w, u, v, 0, NEVER, first, last, through)
