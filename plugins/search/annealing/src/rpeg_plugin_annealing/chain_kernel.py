"""The annealing chains of one island as numba functions, around the compiled evaluator.

:func:`run_island` continues where its last call ended: everything that it knows is in the arrays of an
:class:`Island`. It holds no lock of Python, so islands run on several cores at once.

A chain ends after ``stagnation`` rejections in a row (paper, A-J2g, A-J2h). A move to an equal score is made but counts
as a rejection **[choice]**: where an operator has slack many plans score the same, and a chain would wander among them
until the budget ends.

Random numbers are splitmix64 (Steele, Lea, Flood 2014): one 64-bit word of state, the same on every machine.
"""

from __future__ import annotations

import hashlib
import math
from pathlib import Path
from typing import NamedTuple

import numba
import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.passes.score import OOM_STEEPNESS, THROUGHPUT_FLOOR_FACTOR, Objective
from rpeg_core.planning.compiled import KERNEL_FINGERPRINT, critical_seconds, evaluate_choice
from rpeg_core.planning.compiled.kernel import jit
from rpeg_plugin_annealing.moves_kernel import draw, draw_lean, fraction, propose

__all__ = ["FULL", "INTERRUPTED", "SPENT", "STUCK", "Island", "Policy", "run_island", "scores"]

SPENT, FULL, STUCK, INTERRUPTED = range(4)
"""Why :func:`run_island` returned: no evaluations left, no room left in the cache, nothing new found, told to stop."""

FRUITLESS_HITS = 20_000
"""So many known configurations in a row, and an island counts as searched through."""

# Columns of results: the fields of Evaluation.
MAKESPAN, TOKENS, PEAK, UTILIZATION, USED = range(5)

# Entries of Island.counts.
EVALUATIONS, HITS, CACHED, STARTS, NEXT_START, ELITES, REJECTED, RUNNING, CRITICAL = range(9)
COUNTS = 9

# Entries of Island.numbers: best tokens/s of a feasible plan, temperature of the chain, smallest peak_ratio.
BEST_TOKENS, TEMPERATURE, NEAREST = range(3)


class Policy(NamedTuple):
    """Settings and objective, as numbers."""

    kind: int  # position in Objective.KINDS
    floor: float  # 1 - max_throughput_loss
    proposals: int
    pair: float
    critical: float
    local: float
    stagnation: int
    temperature_initial: float
    temperature_warm: float
    cooling: float  # factor per round, 1 when the temperature is constant
    temperature_min: float
    warm: bool
    soft: bool


class Island(NamedTuple):
    """What one island knows; arrays that :func:`run_island` changes."""

    random: np.ndarray  # uint64 (1,)
    counts: Ints
    numbers: Floats
    choice: Ints  # of the running chain
    result: Floats  # its evaluation
    critical: Floats  # its seconds on the critical path, valid when counts[CRITICAL]
    proposals: Ints  # (K_x, operators)
    starts: Ints  # (starts, operators): where the first chains start
    elite_choices: Ints
    elite_results: Floats
    nearest: Ints  # the choice with the smallest peak_ratio
    nearest_result: Floats
    keys: np.ndarray  # int32 (slots, operators): the cache, open addressing; candidate + 1, 0 in a free slot
    values: Floats  # (slots, 5)


@numba.njit(error_model="numpy")
def value(kind, floor, result, best_tokens):
    """:meth:`rpeg_core.passes.score.Objective.value` of a row of results."""
    tokens = result[TOKENS]
    if kind == 0:
        return tokens
    if tokens < floor * best_tokens:
        return tokens * THROUGHPUT_FLOOR_FACTOR
    if kind == 1:
        return tokens * result[UTILIZATION]
    return tokens / result[USED]


@numba.njit(error_model="numpy")
def penalized(kind, floor, result, best_tokens):
    """:meth:`rpeg_core.passes.score.Objective.penalized` of a row of results."""
    return value(kind, floor, result, best_tokens) * math.exp(-OOM_STEEPNESS * max(0.0, result[PEAK] - 1.0))


@jit
def _score_rows(kind, floor, results, best_tokens, out):
    for i in range(results.shape[0]):
        out[i] = penalized(kind, floor, results[i], best_tokens)


def scores(objective: Objective, results: Floats, best_tokens_per_s: float) -> Floats:
    """:meth:`rpeg_core.passes.score.Objective.penalized` of each row of results."""
    out = np.empty(len(results))
    kind, floor = Objective.KINDS.index(objective.kind), 1.0 - objective.max_throughput_loss
    _score_rows(kind, floor, np.ascontiguousarray(results), best_tokens_per_s, out)
    return out


@numba.njit(error_model="numpy")
def _slot(keys, choice):
    """Where the cache has a choice, or the free slot where it belongs."""
    mask = keys.shape[0] - 1
    mixed = np.uint64(0xCBF29CE484222325)
    for v in range(choice.shape[0]):
        mixed = (mixed ^ np.uint64(choice[v])) * np.uint64(0x9E3779B97F4A7C15)
        mixed = mixed ^ (mixed >> np.uint64(29))
    slot = np.int64(mixed >> np.uint64(2)) & mask
    while keys[slot, 0] > 0:
        same = True
        for v in range(choice.shape[0]):
            if keys[slot, v] != choice[v] + 1:
                same = False
                break
        if same:
            return slot
        slot = (slot + 1) & mask
    return slot


@numba.njit(error_model="numpy")
def _offer(kind, floor, best_tokens, choice, result, choices, results, count):
    """A feasible plan enters the elites, kept in no order, when it is good and its score new; returns their number.

    Of equal scores only the first is kept: on a homogeneous cluster most of them are one plan, moved or mirrored.
    """
    score = value(kind, floor, result, best_tokens)
    worst, worst_score = count, score
    for i in range(count):
        known = value(kind, floor, results[i], best_tokens)
        if known == score:
            return count
        if known < worst_score:
            worst, worst_score = i, known
    if count < choices.shape[0]:
        worst = count
        count += 1
    if worst < choices.shape[0]:
        choices[worst] = choice
        results[worst] = result
    return count


def _fingerprint() -> str:
    """Changes whenever the code or the arrays that :func:`run_island` is made of do."""
    own = [Path(__file__).with_name(name).read_bytes() for name in ("moves_kernel.py", "neighbourhood.py")]
    return hashlib.sha256(KERNEL_FINGERPRINT.encode() + b"".join(own)).hexdigest()


def _build(version: int):
    """The island runner; ``version`` is a part of it, so that it is compiled again when the evaluator changes."""

    @jit
    def run_island(t, w, hood, policy, island, limit, stop):
        """Run chains until ``counts[EVALUATIONS]`` is ``limit`` or ``stop[0]`` is set; returns why it ended."""
        counts, numbers, choice, proposals = island.counts, island.numbers, island.choice, island.proposals
        kind, floor, random = policy.kind, policy.floor, island.random
        room = island.keys.shape[0] // 2
        new = np.empty(choice.shape[0], np.int64)
        while True:
            if counts[EVALUATIONS] >= limit:
                return SPENT
            if counts[CACHED] + proposals.shape[0] + 1 > room:
                return FULL
            if counts[HITS] >= FRUITLESS_HITS:
                return STUCK
            if stop[0] != 0 or version == 0:
                return INTERRUPTED
            if not counts[RUNNING]:
                numbers[TEMPERATURE] = policy.temperature_initial
                if counts[NEXT_START] < counts[STARTS]:
                    choice[:] = island.starts[counts[NEXT_START]]
                    counts[NEXT_START] += 1
                elif policy.warm and counts[ELITES] > 0:
                    choice[:] = island.elite_choices[int(fraction(random) * counts[ELITES])]
                    numbers[TEMPERATURE] = policy.temperature_warm
                else:
                    for v in range(choice.shape[0]):
                        choice[v] = draw_lean(hood, v, random) if policy.warm else draw(hood, v, random)
                proposed = 1
                proposals[0] = choice
            else:
                if not counts[CRITICAL] and policy.critical > 0.0:
                    evaluate_choice(t, choice, w)
                    island.critical[:] = 0.0
                    critical_seconds(w, island.critical)
                    counts[CRITICAL] = 1
                proposed = propose(hood, policy, choice, island.critical, proposals, random)
            best, best_score = -1, -1.0
            for i in range(proposed):
                new[:] = proposals[i]
                slot = _slot(island.keys, new)
                if island.keys[slot, 0] > 0:
                    counts[HITS] += 1
                else:
                    if counts[EVALUATIONS] >= limit:
                        return SPENT  # the round is drawn again later
                    makespan, tokens, peak, utilization, used = evaluate_choice(t, new, w)
                    result = island.values[slot]
                    result[MAKESPAN] = makespan
                    result[TOKENS] = tokens
                    result[PEAK] = peak
                    result[UTILIZATION] = utilization
                    result[USED] = used
                    for v in range(new.shape[0]):
                        island.keys[slot, v] = new[v] + 1
                    counts[CACHED] += 1
                    counts[EVALUATIONS] += 1
                    counts[HITS] = 0
                    if peak < numbers[NEAREST]:
                        numbers[NEAREST] = peak
                        island.nearest[:] = new
                        island.nearest_result[:] = result
                    if peak <= 1.0:
                        numbers[BEST_TOKENS] = max(numbers[BEST_TOKENS], tokens)
                        counts[ELITES] = _offer(
                            kind,
                            floor,
                            numbers[BEST_TOKENS],
                            new,
                            result,
                            island.elite_choices,
                            island.elite_results,
                            counts[ELITES],
                        )
                if policy.soft or island.values[slot, PEAK] <= 1.0 or not counts[RUNNING]:
                    score = penalized(kind, floor, island.values[slot], numbers[BEST_TOKENS])
                    if score > best_score:
                        best, best_score = slot, score
            if not counts[RUNNING]:
                island.result[:] = island.values[best]
                counts[RUNNING], counts[REJECTED], counts[CRITICAL] = 1, 0, 0
                continue
            counts[REJECTED] += 1
            if best >= 0:
                before = penalized(kind, floor, island.result, numbers[BEST_TOKENS])
                loss = best_score - before
                if loss >= 0.0 or fraction(random) < math.exp(loss / (before * numbers[TEMPERATURE])):
                    for v in range(choice.shape[0]):
                        choice[v] = island.keys[best, v] - 1
                    island.result[:] = island.values[best]
                    counts[CRITICAL] = 0
                    if loss != 0.0:
                        counts[REJECTED] = 0
            if policy.cooling != 1.0:
                numbers[TEMPERATURE] = max(policy.temperature_min, numbers[TEMPERATURE] * policy.cooling)
            if counts[REJECTED] >= policy.stagnation:
                counts[RUNNING] = 0

    return run_island


run_island = _build(int(_fingerprint()[:15], 16) | 1)
