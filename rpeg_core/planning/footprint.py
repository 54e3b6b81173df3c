"""The configuration with the least peak memory: whether anything fits at all, and what would be needed.

Coordinate descent: one operator at a time takes the candidate that lowers the peak most, until a full pass brings
nothing. On each allocation only the candidates with the least memory of one kind are tried, so that a pass costs
thousands of evaluations of memory and none of the schedule. Deterministic, and a heuristic: it may miss a plan that
fits, and never claims one that does not.
"""

from __future__ import annotations

import time

import numpy as np

from rpeg_core.costing.book import OperatorCosts
from rpeg_core.costing.memory import DeviceMemory, device_memory
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.candidates import Candidates
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Solution

__all__ = ["least_memory", "smallest_footprint"]

MAX_ALLOCATIONS = 64
"""Allocations tried per operator, the largest first: more GPUs hold less each."""

MAX_PASSES = 8


def least_memory(problem: Problem, *, any_size: bool = False, deadline: float | None = None) -> Solution | None:
    """A configuration that fits; with ``any_size`` the one of least peak memory, whether or not it fits.

    Args:
        problem: whose structures are tried, those with the least staleness first.
        any_size: look for the smallest peak instead of the first that fits.
        deadline: on the clock ``time.monotonic``; after it the best so far counts.

    Returns:
        None when nothing fits (or, with ``any_size``, when no structure has a candidate for every operator).
    """
    limit = usable_bytes(problem.hardware.device.memory_bytes)
    order = sorted(
        (i for i, s in enumerate(problem.structures) if s.empty_operator is None),
        key=lambda i: sum(tau for _, tau in problem.structures[i].structure.staleness),
    )
    found: tuple[float, Solution] | None = None
    for index in order:
        if deadline is not None and time.monotonic() > deadline and found is not None:
            break
        choice, peak = _descend(problem.structures[index], 0.0 if any_size else limit, deadline)
        if found is None or peak < found[0]:
            found = (peak, Solution(index, choice))
        if not any_size and peak <= limit:
            break
    return found[1] if found is not None and (any_size or found[0] <= limit) else None


def smallest_footprint(structure: StructureProblem, operator: str) -> tuple[int, OperatorCosts]:
    """The layout of ``operator`` that needs the least memory when it has the GPUs to itself: (column, tables)."""
    costs = structure.book.operators[operator]
    return int(np.argmin(costs.isolated)), costs


def _descend(structure: StructureProblem, enough: float, deadline: float | None) -> tuple[tuple[int, ...], float]:
    """The choice of a local minimum and its peak; stops at a peak of ``enough``."""
    options = [_smallest(candidates, structure) for candidates in structure.candidates]
    choice = [candidates[0] for candidates in options]
    best = _weight(structure, choice)
    for _ in range(MAX_PASSES):
        before = best
        for position, candidates in enumerate(options):
            for candidate in candidates:
                if best[0] <= enough or (deadline is not None and time.monotonic() > deadline):
                    return tuple(choice), best[0]
                trial = [*choice[:position], candidate, *choice[position + 1 :]]
                weight = _weight(structure, trial)
                if weight < best:
                    choice, best = trial, weight
        if best == before:
            break
    return tuple(choice), best[0]


def _weight(structure: StructureProblem, choice: list[int]) -> tuple[float, float]:
    """The peak; of equal peaks the one with less elsewhere counts as smaller, so that descent does not stall."""
    memory: DeviceMemory = device_memory(structure.rpeg, structure.plan(choice), structure.book)
    return memory.peak.peak_bytes, sum(s.gpus.size * s.peak_bytes**2 for s in memory.segments)


def _smallest(candidates: Candidates, structure: StructureProblem) -> list[int]:
    """Per allocation, the candidates that need the least in total and the least while running; largest first."""
    costs = structure.book.operators[candidates.operator]
    total, running = costs.isolated[candidates.layout], (costs.weights + costs.transient)[candidates.layout]
    places: dict[tuple[int, int], list[int]] = {}
    for index, place in enumerate(zip(candidates.start.tolist(), candidates.stop.tolist(), strict=True)):
        places.setdefault(place, []).append(index)
    kept: list[int] = []
    largest = sorted(places, key=lambda place: (place[0] - place[1], place[0]))[:MAX_ALLOCATIONS]
    for place in largest:
        here = np.array(places[place])
        kept.extend(dict.fromkeys(int(here[np.argmin(values[here])]) for values in (total, running)))
    return kept
