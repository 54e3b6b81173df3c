"""What is certain about every configuration in a box: least costs, who shares GPUs, what is split, what fits.

All of it errs on one side: times, work and memory are the least over the box, overlap and disjointness are claimed only
when they hold for every configuration in it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.planning.bounds.tables import (
    FEEDERS,
    FEWEST,
    MODEL,
    MOST,
    NONE,
    ROW_FIRST,
    ROW_STOP,
    TRAINING_STATE,
    TRAINS,
    TRANSIENT,
    WEIGHTS,
    BoxTables,
)
from rpeg_core.planning.compiled.kernel import helper

__all__ = ["APART", "MEETS", "Scratch", "build_scratch", "describe"]

# Whether two operators share GPUs, and whether an operator is split into phases.
APART, MEETS, UNKNOWN = range(3)
WHOLE_ONLY, SPLIT = range(2)

MOST_PHASES = 4
"""With more, a split operator stays one node: bounds would cost too much."""

# Entries of Scratch.counts.
CLIQUES, NODES, LINKS, BINDING = range(4)


class Scratch(NamedTuple):
    """Scratch arrays of one thread."""

    counts: Ints
    least: Floats  # (operators, columns of BoxTables.rows)
    fewest: Ints  # operators: GPUs
    most: Ints
    meet: Ints  # (operators, operators)
    split: Ints  # operators
    cliques: Ints  # bit masks of operators that share a GPU
    fits: Ints  # rows of one group
    # The step template of relaxation.py
    seconds: Floats
    work: Floats
    runs_on: Ints
    since: Ints
    links: Ints
    delays: Floats
    first: Ints  # operators: the node of the first phase, the operator itself when it is not split
    sequence: Ints  # nodes in topological order within a step
    ended: Ints  # (nodes, steps): bit mask of the nodes that end so many steps before this one ends
    ends_before: Ints  # (nodes, steps): bit mask of the nodes that end so many steps before this one starts
    starts_after: Ints
    head: Floats  # (steps, nodes)
    done: Floats
    tail: Floats
    left: Floats
    sorted_nodes: Ints
    sorted_heads: Floats
    sorted_loads: Floats
    load: Floats


def build_scratch(t: BoxTables) -> Scratch:
    """Scratch arrays for a problem."""
    operators = len(t.operators)
    phases = min(t.phases, MOST_PHASES)
    nodes = (1 + phases) * operators + len(t.publications)
    links = max(3, phases) * len(t.edges) + (4 + phases) * operators + 2 * len(t.publications)
    rows = int(max(t.groups[:, ROW_STOP] - t.groups[:, ROW_FIRST]))

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    def floats(*shape: int) -> Floats:
        return np.zeros(shape, np.float64)

    return Scratch(
        counts=ints(4),
        least=floats(operators, t.rows.shape[1]),
        fewest=ints(operators),
        most=ints(operators),
        meet=ints(operators, operators),
        split=ints(operators),
        cliques=ints(operators),
        fits=ints(rows),
        seconds=floats(nodes),
        work=floats(nodes),
        runs_on=ints(nodes),
        since=ints(nodes),
        links=ints(links, 3),
        delays=floats(links, 4),
        first=ints(operators),
        sequence=ints(nodes),
        ended=ints(nodes, t.steps),
        ends_before=ints(nodes, t.steps),
        starts_after=ints(nodes, t.steps),
        head=floats(t.steps, nodes),
        done=floats(t.steps, nodes),
        tail=floats(t.steps, nodes),
        left=floats(t.steps, nodes),
        sorted_nodes=ints(t.steps * nodes),
        sorted_heads=floats(t.steps * nodes),
        sorted_loads=floats(t.steps * nodes),
        load=floats(operators + 1),
    )


@helper
def describe(t, group, start, w):
    """Fill the first part of ``w`` for a box; False when no configuration in it fits the memory.

    Args:
        t: tables.
        group, start: the box; a start is NONE when undecided, as it is for unions of sizes.
        w: scratch.
    """
    for v in range(t.operators.shape[0]):
        g = group[v]
        for c in range(w.least.shape[1]):
            w.least[v, c] = t.least[g, c]
        w.fewest[v] = t.groups[g, FEWEST]
        w.most[v] = t.groups[g, MOST]
    _meet(t, start, w)
    _split(t, w)
    _cliques(t, start, w)
    return _memory(t, group, w)


@helper
def _meet(t, start, w):
    """Two placed operators share GPUs or not; two that together need more GPUs than there are share some."""
    for v in range(t.operators.shape[0]):
        w.meet[v, v] = MEETS
        for u in range(v):
            if start[u] != NONE and start[v] != NONE:
                apart = start[u] + w.fewest[u] <= start[v] or start[v] + w.fewest[v] <= start[u]
                known = APART if apart else MEETS
            else:
                known = MEETS if w.fewest[u] + w.fewest[v] > t.gpus else UNKNOWN
            w.meet[u, v] = known
            w.meet[v, u] = known


@helper
def _split(t, w):
    """Stage 1 of lowering: an inference is split when it is apart from all its feeders, and they are with it."""
    operators = t.operators
    n = operators.shape[0]
    for v in range(n):
        w.split[v] = WHOLE_ONLY
    for v in range(n):
        if t.phases < 2 or operators[v, FEEDERS] == 0:
            continue
        known = SPLIT
        for u in range(n):
            if operators[v, FEEDERS] >> u & 1:
                if w.meet[u, v] == MEETS:
                    known = WHOLE_ONLY
                elif w.meet[u, v] == UNKNOWN and known == SPLIT:
                    known = UNKNOWN
        for u in range(n):
            if (operators[v, FEEDERS] >> u & 1 or u == v) and known != WHOLE_ONLY and w.split[u] != SPLIT:
                w.split[u] = known


@helper
def _cliques(t, start, w):
    """Sets of operators that share a GPU in every configuration of the box.

    Intervals that meet pairwise have a common point, so sets whose members surely meet pairwise are such sets.
    """
    n = t.operators.shape[0]
    count = 0
    for seed in range(n):
        clique = 1 << seed
        if start[seed] != NONE:
            for u in range(n):  # all at the seed's first GPU
                if start[u] != NONE and start[u] <= start[seed] < start[u] + w.fewest[u]:
                    clique |= 1 << u
        for placed in range(2):
            for u in range(n):
                if (start[u] != NONE) == (placed == 1) and not clique >> u & 1:
                    joins = True
                    for v in range(n):
                        joins = joins and (not clique >> v & 1 or w.meet[u, v] == MEETS)
                    if joins:
                        clique |= 1 << u
        known = False
        for i in range(count):
            known = known or w.cliques[i] | clique == w.cliques[i]
        if not known:
            kept = 0
            for i in range(count):  # without those inside the new one
                if w.cliques[i] | clique != clique:
                    w.cliques[kept] = w.cliques[i]
                    kept += 1
            w.cliques[kept] = clique
            count = kept + 1
    w.counts[CLIQUES] = count


@helper
def _memory(t, group, w):
    """Drop the rows of a group that cannot fit beside the least memory of the others in its cliques."""
    limit = t.usable_bytes * (1.0 + 1e-12)
    for i in range(w.counts[CLIQUES]):
        if _bytes(t, w, w.cliques[i], NONE, w.least[0]) > limit:
            return False
    for v in range(t.operators.shape[0]):
        g = group[v]
        first, stop = t.groups[g, ROW_FIRST], t.groups[g, ROW_STOP]
        if stop - first < 2:  # a union of sizes, or a single layout
            continue
        tight = False
        for i in range(w.counts[CLIQUES]):
            clique = w.cliques[i]
            if clique >> v & 1 and _bytes(t, w, clique, v, t.most[g]) > limit:
                if not tight:
                    tight = True
                    w.fits[: stop - first] = 1
                for r in range(first, stop):
                    if w.fits[r - first] and _bytes(t, w, clique, v, t.rows[r]) > limit:
                        w.fits[r - first] = 0
        if tight:
            found = False
            for r in range(first, stop):
                if w.fits[r - first]:
                    for c in range(w.least.shape[1]):
                        value = t.rows[r, c]
                        w.least[v, c] = min(w.least[v, c], value) if found else value
                    found = True
            if not found:
                return False
    return True


@helper
def _bytes(t, w, clique, changed, values):
    """Least peak of a GPU that holds ``clique``, with ``values`` for operator ``changed``.

    Model by model as in costing/memory.py.
    """
    persistent = 0.0
    resident = 0
    for m in range(t.users.shape[0]):
        here = t.users[m] & clique
        serves, weights = False, 0.0
        for v in range(t.operators.shape[0]):
            if here >> v & 1:
                own = values if v == changed else w.least[v]
                if t.operators[v, TRAINS]:
                    persistent += own[TRAINING_STATE]
                else:
                    serves = True
                    weights = max(weights, own[WEIGHTS])
        if serves and t.copies[m] > 0:
            persistent += t.copies[m] * weights
            resident |= 1 << m
    worst = 0.0
    for v in range(t.operators.shape[0]):
        if clique >> v & 1:
            own = values if v == changed else w.least[v]
            transient = own[TRANSIENT]
            model = t.operators[v, MODEL]
            if model != NONE and (t.operators[v, TRAINS] or not resident >> model & 1):
                transient += own[WEIGHTS]
            worst = max(worst, transient)
    return persistent + worst
