"""Move kernels as numba functions: what a round proposes (paper, A-J2f).

*Single*: one operator, drawn by its time on the critical path or uniformly, gets new candidates. *Pair*: a donor,
drawn by its GPUs, shrinks to a part of its interval; a receiver that overlapped it gets a new candidate. A round keeps
its operators and draws up to K_x candidates for them.

Candidates are drawn as a variant first, all alike, then as one of its starts: drawing candidates all alike would favour
small allocations, which have the most starts. Nothing here is cached on disk: the caller compiles it in.
"""

from __future__ import annotations

import numba
import numpy as np

from rpeg_plugin_annealing.neighbourhood import (
    BEGIN,
    END,
    FIRST_ROW,
    LEAN_FIRST,
    LEAN_STOP,
    MEMBER_FIRST,
    POSITION,
    SIZE,
    SPAN,
    SPAN_FIRST,
    SPAN_STOP,
    SPAN_VARIANT_FIRST,
    SPAN_VARIANT_STOP,
    START_FIRST,
    START_STOP,
    VARIANT,
    VARIANT_FIRST,
    VARIANT_STOP,
)

inlined = numba.njit(inline="always")
"""For helpers that cost less than a call."""

__all__ = ["draw", "draw_lean", "fraction", "propose", "weighted"]


@numba.njit(error_model="numpy")
def fraction(random):
    """A number in [0, 1): the upper 53 bits of the next splitmix64 output."""
    state = random[0] + np.uint64(0x9E3779B97F4A7C15)
    random[0] = state
    mixed = (state ^ (state >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed = mixed ^ (mixed >> np.uint64(31))
    return float(np.int64(mixed >> np.uint64(11))) * 2.0**-53


@numba.njit(error_model="numpy")
def weighted(weights, random):
    """A position drawn in proportion to its weight; uniform when all weights are 0."""
    total = 0.0
    for i in range(weights.shape[0]):
        total += weights[i]
    target = fraction(random)
    if total <= 0.0:
        return int(target * weights.shape[0])
    target *= total
    reached = 0.0
    for i in range(weights.shape[0]):
        reached += weights[i]
        if target < reached:
            return i
    return weights.shape[0] - 1


@numba.njit(error_model="numpy")
def draw(hood, v, random):
    """A candidate of operator ``v``."""
    first, stop = hood.operators[v, VARIANT_FIRST], hood.operators[v, VARIANT_STOP]
    variant = first + int(fraction(random) * (stop - first))
    span = hood.variants[variant, SPAN]
    count = hood.spans[span, START_STOP] - hood.spans[span, START_FIRST]
    return hood.members[hood.variants[variant, MEMBER_FIRST] + int(fraction(random) * count)]


@numba.njit(error_model="numpy")
def draw_lean(hood, v, random):
    """A candidate of operator ``v`` with little memory."""
    first, stop = hood.operators[v, LEAN_FIRST], hood.operators[v, LEAN_STOP]
    return hood.lean[first + int(fraction(random) * (stop - first))]


@numba.njit(error_model="numpy")
def propose(hood, policy, choice, critical, proposals, random):
    """Write up to K_x different neighbours of ``choice`` to ``proposals``; returns their number."""
    if fraction(random) < policy.pair:
        donor, receiver = _donor_and_receiver(hood, choice, random)
        if donor >= 0:
            return _pair_moves(hood, choice, donor, receiver, proposals, random)
    by_time = fraction(random) < policy.critical
    v = weighted(critical, random) if by_time else int(fraction(random) * choice.shape[0])
    count = 0
    for _ in range(proposals.shape[0]):
        proposal = proposals[count]
        proposal[:] = choice
        if fraction(random) < policy.local:
            proposal[v] = _local(hood, choice, v, random)
        else:
            proposal[v] = draw(hood, v, random)
        count += proposal[v] != choice[v] and _is_new(proposals, count)
    return count


@numba.njit(error_model="numpy")
def _is_new(proposals, count):
    """Whether row ``count`` differs from all rows before it."""
    for i in range(count):
        same = True
        for v in range(proposals.shape[1]):
            if proposals[i, v] != proposals[count, v]:
                same = False
                break
        if same:
            return False
    return True


@inlined
def _interval(hood, choice, v):
    row = hood.operators[v, FIRST_ROW] + choice[v]
    return hood.places[row, BEGIN], hood.places[row, END]


# Pairs


@numba.njit(error_model="numpy")
def _donor_and_receiver(hood, choice, random):
    """(-1, -1) when the donor cannot shrink or shares no GPU."""
    n = choice.shape[0]
    total = 0
    for v in range(n):
        start, stop = _interval(hood, choice, v)
        total += stop - start
    target = fraction(random) * total
    donor, reached = n - 1, 0
    for v in range(n):
        start, stop = _interval(hood, choice, v)
        reached += stop - start
        if target < reached:
            donor = v
            break
    start, stop = _interval(hood, choice, donor)
    receivers = 0
    for v in range(n):
        other, end = _interval(hood, choice, v)
        receivers += v != donor and other < stop and start < end
    if receivers == 0 or _smaller(hood, donor, start, stop) == 0:
        return -1, -1
    skip = int(fraction(random) * receivers)
    for v in range(n):
        other, end = _interval(hood, choice, v)
        if v != donor and other < stop and start < end:
            if skip == 0:
                return donor, v
            skip -= 1
    return -1, -1


@numba.njit(error_model="numpy")
def _smaller(hood, v, start, stop):
    """How many variants on fewer GPUs fit among ``start .. stop - 1``."""
    count = 0
    for span in range(hood.operators[v, SPAN_FIRST], hood.operators[v, SPAN_STOP]):
        if hood.spans[span, SIZE] >= stop - start:
            continue
        low, high = _positions(hood, span, start, stop)
        if high > low:
            count += hood.spans[span, SPAN_VARIANT_STOP] - hood.spans[span, SPAN_VARIANT_FIRST]
    return count


@numba.njit(error_model="numpy")
def _positions(hood, span, start, stop):
    """The positions ``low .. high - 1`` whose intervals lie in ``start .. stop - 1``."""
    first, end = hood.spans[span, START_FIRST], hood.spans[span, START_STOP]
    low = _ascending(hood.starts, first, end, start)
    high = _ascending(hood.starts, low, end, stop - hood.spans[span, SIZE] + 1)
    return low - first, high - first


@numba.njit(error_model="numpy")
def _ascending(values, low, high, bound):
    """The first index in ``low .. high`` from which on values are at least ``bound``."""
    while low < high:
        middle = (low + high) // 2
        if values[middle] < bound:
            low = middle + 1
        else:
            high = middle
    return low


@numba.njit(error_model="numpy")
def _shrink(hood, v, start, stop, random):
    """A variant on fewer GPUs, at one of its places inside ``start .. stop - 1``; there must be one."""
    skip = int(fraction(random) * _smaller(hood, v, start, stop))
    for span in range(hood.operators[v, SPAN_FIRST], hood.operators[v, SPAN_STOP]):
        if hood.spans[span, SIZE] >= stop - start:
            continue
        low, high = _positions(hood, span, start, stop)
        if high > low:
            variant = hood.spans[span, SPAN_VARIANT_FIRST] + skip
            if variant < hood.spans[span, SPAN_VARIANT_STOP]:
                return hood.members[hood.variants[variant, MEMBER_FIRST] + low + int(fraction(random) * (high - low))]
            skip = variant - hood.spans[span, SPAN_VARIANT_STOP]
    return -1


@numba.njit(error_model="numpy")
def _pair_moves(hood, choice, donor, receiver, proposals, random):
    start, stop = _interval(hood, choice, donor)
    count = 0
    for _ in range(proposals.shape[0]):
        proposal = proposals[count]
        proposal[:] = choice
        proposal[donor] = _shrink(hood, donor, start, stop, random)
        proposal[receiver] = draw(hood, receiver, random)
        count += _is_new(proposals, count)
    return count


# Local moves


@numba.njit(error_model="numpy")
def _local(hood, choice, v, random):
    """Keep something of the candidate: another start, another variant, half or twice the GPUs, another's place."""
    row = hood.operators[v, FIRST_ROW] + choice[v]
    variant, position = hood.places[row, VARIANT], hood.places[row, POSITION]
    span = hood.variants[variant, SPAN]
    start, stop = _interval(hood, choice, v)
    kind = int(fraction(random) * 4.0)
    if kind == 0:
        count = hood.spans[span, START_STOP] - hood.spans[span, START_FIRST]
        return hood.members[hood.variants[variant, MEMBER_FIRST] + int(fraction(random) * count)]
    if kind == 1:
        return hood.members[hood.variants[_fast(hood, span, random), MEMBER_FIRST] + position]
    if kind == 2:
        first, last = hood.operators[v, SPAN_FIRST], hood.operators[v, SPAN_STOP]
        target = span
        for _ in range(4):
            target = first + int(fraction(random) * (last - first))
            size = hood.spans[target, SIZE]
            if size != stop - start and size <= 2 * (stop - start) and 2 * size >= stop - start:
                break
        size = hood.spans[target, SIZE]
        low, high = hood.spans[target, START_FIRST], hood.spans[target, START_STOP]
        # Aligned with the start or with the end of the present interval.
        wanted = start if fraction(random) < 0.5 else stop - size
        place = min(_ascending(hood.starts, low, high, wanted), high - 1)
        return hood.members[hood.variants[_fast(hood, target, random), MEMBER_FIRST] + place - low]
    u = int(fraction(random) * choice.shape[0])
    other, end = _interval(hood, choice, u)
    for target in range(hood.operators[v, SPAN_FIRST], hood.operators[v, SPAN_STOP]):
        if hood.spans[target, SIZE] == end - other:
            low, high = hood.spans[target, START_FIRST], hood.spans[target, START_STOP]
            place = _ascending(hood.starts, low, high, other)
            if place < high and hood.starts[place] == other:
                return hood.members[hood.variants[_fast(hood, target, random), MEMBER_FIRST] + place - low]
    return choice[v]


@numba.njit(error_model="numpy")
def _fast(hood, span, random):
    """A variant of the span; the fast ones, which come first, more often."""
    first, last = hood.spans[span, SPAN_VARIANT_FIRST], hood.spans[span, SPAN_VARIANT_STOP]
    u = fraction(random)
    return first + int(u * u * (last - first))
