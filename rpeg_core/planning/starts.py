"""Simple plans that need no search: where the annealing starts and what reports compare with (paper, VI-B).

*Colocated*: every operator on all GPUs, each with its fastest layout that fits. *Concurrent*: operators are grouped
by depth in the data graph; the operators of a group are independent and get disjoint parts of the cluster, the
partition that ends the group earliest.
"""

from __future__ import annotations

import itertools

import numpy as np

from rpeg_core.ir import Rpeg, data_order
from rpeg_core.planning.problem import StructureProblem

__all__ = ["colocated", "concurrent", "independent_groups"]


def colocated(problem: StructureProblem) -> tuple[int, ...] | None:
    """The choice of the greedy baseline, None when an operator has no layout over all GPUs.

    An operator that cannot use all GPUs takes its fastest candidate over the most GPUs it can use.
    """
    choice = []
    for index, candidates in enumerate(problem.candidates):
        if len(candidates) == 0:
            return None
        sizes = candidates.stop - candidates.start
        widest = np.flatnonzero(sizes == sizes.max())
        choice.append(int(widest[np.argmin(problem.seconds(index)[widest])]))
    return tuple(choice)


def independent_groups(rpeg: Rpeg) -> tuple[tuple[int, ...], ...]:
    """Operator indices by depth in the data graph; no data dependency joins two operators of a group."""
    depth: dict[str, int] = {}
    for name in data_order(rpeg):
        before = [depth[edge.source] for edge in rpeg.data_edges if edge.target == name]
        depth[name] = 1 + max(before, default=-1)
    groups: dict[int, list[int]] = {}
    for index, operator in enumerate(rpeg.operators):
        groups.setdefault(depth[operator.name], []).append(index)
    return tuple(tuple(groups[level]) for level in sorted(groups))


def concurrent(problem: StructureProblem) -> tuple[int, ...] | None:
    """The choice of the concurrent baseline, None when a group has no disjoint placement."""
    choice = [-1] * len(problem.candidates)
    for group in independent_groups(problem.rpeg):
        placed = _partition(problem, group)
        if placed is None:
            return None
        for index, candidate in zip(group, placed, strict=True):
            choice[index] = candidate
    return tuple(choice)


def _partition(problem: StructureProblem, group: tuple[int, ...]) -> tuple[int, ...] | None:
    """Disjoint candidates for the operators of a group with the smallest longest time.

    Only each operator's fastest layout per number of GPUs matters. Sizes are tried best bound first, and placed
    largest first at the lowest free aligned start.
    """
    fastest = [_fastest_by_size(problem, index) for index in group]
    if any(not options for options in fastest):
        return None
    gpus = problem.book.machine.gpus
    combinations = sorted(
        (
            (max(options[size][0] for options, size in zip(fastest, sizes, strict=True)), sizes)
            for sizes in itertools.product(*(sorted(options) for options in fastest))
            if sum(sizes) <= gpus
        ),
    )
    for _, sizes in combinations:
        placed = _place(problem, group, [options[size][1] for options, size in zip(fastest, sizes, strict=True)])
        if placed is not None:
            return placed
    return None


def _fastest_by_size(problem: StructureProblem, index: int) -> dict[int, tuple[float, int]]:
    """GPUs -> (seconds, row of the fastest layout) over the operator's candidates."""
    candidates, seconds = problem.candidates[index], problem.seconds(index)
    found: dict[int, tuple[float, int]] = {}
    for position in range(len(candidates)):  # sorted by time, the first of a size is its fastest
        size = int(candidates.stop[position] - candidates.start[position])
        if size not in found:
            found[size] = (float(seconds[position]), int(candidates.layout[position]))
    return found


def _place(problem: StructureProblem, group: tuple[int, ...], rows: list[int]) -> tuple[int, ...] | None:
    free = np.ones(problem.book.machine.gpus, bool)
    placed: dict[int, int] = {}
    sizes = [int(problem.candidates[i].layouts.gpus[row]) for i, row in zip(group, rows, strict=True)]
    for position in sorted(range(len(group)), key=lambda p: -sizes[p]):
        candidates = problem.candidates[group[position]]
        options = np.flatnonzero(candidates.layout == rows[position])
        options = options[np.argsort(candidates.start[options], kind="stable")]
        for candidate in options:
            span = slice(int(candidates.start[candidate]), int(candidates.stop[candidate]))
            if free[span].all():
                free[span] = False
                placed[position] = int(candidate)
                break
        else:
            return None
    return tuple(placed[position] for position in range(len(group)))
