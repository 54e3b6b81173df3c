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
    """Disjoint candidates for the operators of a group with the smallest longest time, of equals the smallest sum.

    Only each operator's fastest layout per number of GPUs matters: candidates of one size have the same aligned
    starts. Sizes are tried best first, and placed largest first at the lowest starts that leave room for the others.
    """
    fastest = [_fastest_by_size(problem, index) for index in group]
    if any(not options for options in fastest):
        return None
    combinations = []
    for sizes in itertools.product(*(sorted(options) for options in fastest)):
        if sum(sizes) <= problem.book.machine.gpus:
            seconds = [options[size][0] for options, size in zip(fastest, sizes, strict=True)]
            combinations.append((max(seconds), sum(seconds), sizes))
    combinations.sort()
    for *_, sizes in combinations:
        placed = _place(problem, group, [options[size][1] for options, size in zip(fastest, sizes, strict=True)])
        if placed is not None:
            return placed
    return None


def _fastest_by_size(problem: StructureProblem, index: int) -> dict[int, tuple[float, int]]:
    """GPUs -> (seconds, row of the fastest layout) over the operator's candidates."""
    candidates, seconds = problem.candidates[index], problem.seconds(index)
    # Sorted by time, the first candidate of a size is its fastest.
    sizes, first = np.unique(candidates.stop - candidates.start, return_index=True)
    return {
        int(size): (float(seconds[position]), int(candidates.layout[position]))
        for size, position in zip(sizes, first, strict=True)
    }


def _place(problem: StructureProblem, group: tuple[int, ...], rows: list[int]) -> tuple[int, ...] | None:
    """Candidates of the given layouts that share no GPU, by backtracking; None when there are none.

    First fit alone is not enough: 4 and 3 nodes fit a rack of 8 only with the 3 first, as starts are aligned.
    """
    options = []
    for index, row in zip(group, rows, strict=True):
        candidates = problem.candidates[index]
        of_row = np.flatnonzero(candidates.layout == row)
        of_row = of_row[np.argsort(candidates.start[of_row], kind="stable")]
        options.append([(int(candidates.start[c]), int(candidates.stop[c]), int(c)) for c in of_row])
    largest_first = sorted(range(len(group)), key=lambda p: options[p][0][0] - options[p][0][1])

    def extend(left: list[int], taken: list[tuple[int, int]]) -> dict[int, int] | None:
        if not left:
            return {}
        for start, stop, candidate in options[left[0]]:
            if all(stop <= other_start or other_stop <= start for other_start, other_stop in taken):
                rest = extend(left[1:], [*taken, (start, stop)])
                if rest is not None:
                    return {left[0]: candidate, **rest}
        return None

    placed = extend(largest_first, [])
    return None if placed is None else tuple(placed[position] for position in range(len(group)))
