"""Polish: a deterministic descent from the best plan (paper, A-J2j).

One operator after the other gets its best candidate. Then, an addition to the paper **[choice]**, two operators at a
time get the best candidates on intervals between the ends that the plan has: exchanging two operators needs both at
once. The descent ends when neither improves anything.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import numpy as np

from rpeg_core.costing.batches import Ints
from rpeg_core.planning.problem import StructureProblem
from rpeg_plugin_annealing.account import Account
from rpeg_plugin_annealing.chain_kernel import scores
from rpeg_plugin_annealing.directory import Choice, Directory
from rpeg_plugin_annealing.islands import Islands

__all__ = ["few_candidates", "polish"]

PER_INTERVAL = 3
"""Candidates of an operator on an interval that pairs try: the fastest, then the next ones with less memory; also those
with the degrees of the model's other operators, which need no redistribution of its weights."""

PER_OPERATOR = 45
"""Candidates of an operator that pairs try; those on intervals of the plan come first."""


def polish(
    account: Account,
    islands: Islands,
    structure: StructureProblem,
    directories: Sequence[Directory],
    choice: Choice,
) -> bool:
    """Descend until nothing improves; False when the allowance ends first.

    A feasible plan is better than any infeasible one; among infeasible ones the penalized score decides, so that the
    descent also leads into memory. What is found is in the incumbent.
    """
    incumbent = account.incumbent
    blocks = [(v,) for v in range(len(choice))] + list(itertools.combinations(range(len(choice)), 2))
    current = islands.evaluate(np.array([choice]))
    unchanged = place = 0
    while len(current) and unchanged < len(blocks):
        block = blocks[place]
        neighbours = _neighbours(structure, directories, choice, block)
        results = islands.evaluate(neighbours)
        cut_short = len(results) < len(neighbours)
        choices = np.concatenate((np.array([choice]), neighbours[: len(results)]))
        results = np.concatenate((current, results))
        rank = scores(incumbent.objective, results, incumbent.best_tokens_per_s)
        best = int(np.lexsort((-np.arange(len(rank)), rank, results[:, 2] <= 1.0))[-1])
        unchanged = unchanged + 1 if best == 0 else 1
        choice, current = tuple(choices[best].tolist()), results[best : best + 1]
        if cut_short:
            return False
        # Back to single operators after a pair has improved the plan.
        place = 0 if best != 0 and len(block) == 2 else (place + 1) % len(blocks)
    return len(current) > 0


def _neighbours(
    structure: StructureProblem, directories: Sequence[Directory], choice: Choice, block: tuple[int, ...]
) -> Ints:
    """All combinations of the block's candidates, with the rest of ``choice``."""
    if len(block) == 1:
        options = [directories[block[0]].indices]
    else:
        options = [np.array(few_candidates(structure, directories, choice, v), np.int64) for v in block]
    grid = np.stack(np.meshgrid(*options, indexing="ij"), axis=-1).reshape(-1, len(block))
    rows = np.repeat(np.array([choice]), len(grid), axis=0)
    rows[:, list(block)] = grid
    return rows


def few_candidates(structure: StructureProblem, directories: Sequence[Directory], choice: Choice, v: int) -> list[int]:
    """The candidate itself and good ones on intervals between the ends that the plan has."""
    used = [(d.start[c], d.stop[c]) for d, c in zip(directories, choice, strict=True)]
    ends = sorted({0, structure.book.machine.gpus, *itertools.chain(*used)})
    partners = {_degrees(structure, u, choice[u]) for u in range(len(choice)) if _same_model(structure, u, v)}
    found = dict.fromkeys([choice[v]])
    for start, stop in dict.fromkeys((*used, *itertools.combinations(ends, 2))):
        there = directories[v].on(start, stop)
        found.update(dict.fromkeys(itertools.islice(_good(structure, v, there), PER_INTERVAL)))
        for degrees in partners:
            found.update(dict.fromkeys([c for c in there if _degrees(structure, v, c) == degrees][:1]))
    return list(found)[:PER_OPERATOR]


def _good(structure: StructureProblem, v: int, candidates: Sequence[int]) -> Iterator[int]:
    """Of candidates, fastest first, those that no faster one with as little memory dominates."""
    memory = structure.book.operators[structure.candidates[v].operator].isolated
    least = float("inf")
    for candidate in candidates:
        needed = float(memory[structure.candidates[v].layout[candidate]])
        if needed < least:
            least = needed
            yield candidate


def _same_model(structure: StructureProblem, u: int, v: int) -> bool:
    one, other = (structure.rpeg.operators[w].models for w in (u, v))
    return u != v and not set(one).isdisjoint(other)


def _degrees(structure: StructureProblem, v: int, candidate: int) -> tuple[int, ...]:
    """What two operators on the same GPUs must have in common to need no redistribution; GPUs first."""
    candidates = structure.candidates[v]
    layout = candidates.layouts.layout(candidates.layout[candidate])
    return layout.gpus, *layout.weights
