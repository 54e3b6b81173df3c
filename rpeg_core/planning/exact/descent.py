"""Good plans early: the baselines, the fastest candidates, what the tree comes upon, one operator improved at a time.

Branch and bound drops what is slower than the best plan known, so a good one early saves most of the work.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from rpeg_core.costing.batches import Floats
from rpeg_core.planning.exact.account import MAKESPAN, PEAK_RATIO, Account
from rpeg_core.planning.problem import StructureProblem
from rpeg_core.planning.starts import colocated, concurrent

__all__ = ["descend", "first_plans"]

SHARE = 0.1
"""Of the budget, at most."""

MOST_CANDIDATES = 400
"""Of an operator, tried at a time: the fastest ones."""


def first_plans(account: Account) -> None:
    """Descend from each start of each structure."""
    for index in account.evaluators:
        structure = account.problem.structures[index]
        for start in _starts(structure):
            account.evaluate(index, np.array([start]))
            descend(account, index, start, SHARE)


def _starts(structure: StructureProblem) -> Iterator[Sequence[int]]:
    found = [colocated(structure), concurrent(structure), (0,) * len(structure.candidates)]
    yield from dict.fromkeys(start for start in found if start is not None)


def descend(account: Account, index: int, start: Sequence[int], share: float) -> None:
    """Coordinate descent within a share of the budget: each operator in turn takes its best candidate."""
    structure, choice, best = account.problem.structures[index], list(start), np.inf
    while True:
        before = best
        for v, candidates in enumerate(structure.candidates):
            if not account.goes_on(share):
                return
            tried = np.arange(min(len(candidates), MOST_CANDIDATES))
            choices = np.tile(choice, (len(tried), 1))
            choices[:, v] = tried
            results = account.evaluate(index, choices)
            if not len(results):
                return
            costs = _costs(results)
            if costs.min() < best:
                best = float(costs.min())
                choice[v] = int(tried[np.argmin(costs)])
        if best == before:
            return


def _costs(results: Floats) -> Floats:
    """To be minimised: the makespan of what fits, beyond all of them the excess of what does not."""
    excess = np.maximum(results[:, PEAK_RATIO] - 1.0, 0.0)
    return np.where(excess > 0.0, 1e30 * (1.0 + excess), results[:, MAKESPAN])
