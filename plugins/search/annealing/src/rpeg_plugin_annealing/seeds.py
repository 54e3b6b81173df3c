"""Plans that chains start from: the two baselines (paper, A-J2h) and splits of the cluster.

*Splits* are an addition to the paper **[choice]**: the cluster is cut in two, every operator gets its fastest candidate
inside one of the parts, and all ways to do so are evaluated; then the parts of the best ones are cut again. Plans of
this kind, generation apart from the rest for example, differ from the concurrent baseline in almost every operator;
chains do not get there one or two operators at a time, for every plan in between is worse.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

import attrs

from rpeg_core.planning import starts
from rpeg_core.planning.problem import StructureProblem
from rpeg_plugin_annealing.directory import Choice, Directory

__all__ = ["Split", "baseline_starts", "splits", "splits_of_parts"]

MOST_SPLITS = 1024
"""Splits in two that are evaluated per structure, the most even first; PPO on 64 and 128 GPUs has 500 to 700."""

MOST_SPLITS_OF_A_PART = 256


@attrs.frozen
class Split:
    """A choice and the bounds of the parts that its operators are in."""

    choice: Choice
    bounds: tuple[int, ...]


def baseline_starts(structure: StructureProblem, directories: Sequence[Directory]) -> tuple[Choice, ...]:
    """The concurrent and the colocated baseline within the directories, without those that do not exist."""
    allowed = [directory.indices for directory in directories]
    within = attrs.evolve(
        structure, candidates=tuple(c.take(kept) for c, kept in zip(structure.candidates, allowed, strict=True))
    )
    found = []
    for start in (starts.concurrent(within), starts.colocated(within)):
        if start is not None:
            found.append(tuple(int(kept[index]) for kept, index in zip(allowed, start, strict=True)))
    return tuple(found)


def splits(directories: Sequence[Directory], gpus: int) -> list[Split]:
    """Every operator in one of two parts of the cluster, with its fastest candidate there; all choices differ."""
    operators = range(len(directories))
    return _different(_cut(directories, operators, 0, gpus), (-1,) * len(directories), (0, gpus), MOST_SPLITS)


def splits_of_parts(directories: Sequence[Directory], split: Split) -> list[Split]:
    """One part of ``split`` cut in two and its operators distributed; the others stay."""
    found = []
    for start, stop in itertools.pairwise(split.bounds):
        inside = [
            operator
            for operator, (directory, candidate) in enumerate(zip(directories, split.choice, strict=True))
            if start <= directory.start[candidate] and directory.stop[candidate] <= stop
        ]
        if len(inside) > 1:
            cut = _cut(directories, inside, start, stop)
            found.extend(_different(cut, split.choice, split.bounds, MOST_SPLITS_OF_A_PART))
    return found


def _cut(
    directories: Sequence[Directory], operators: Sequence[int], start: int, stop: int
) -> Iterator[tuple[int, dict[int, int]]]:
    """Each cut of an interval, with each distribution of the operators: operator -> candidate."""
    sizes = {size for operator in operators for size in directories[operator].sizes if size < stop - start}
    cuts = {cut for size in sizes for cut in (start + size, stop - size)}
    for cut in sorted(cuts, key=lambda cut: (abs(2 * cut - start - stop), cut)):
        options = []
        for operator in operators:
            sides = (directories[operator].fastest(start, cut), directories[operator].fastest(cut, stop))
            options.append([candidate for candidate in sides if candidate is not None])
        for candidates in itertools.product(*options):
            yield cut, dict(zip(operators, candidates, strict=True))


def _different(
    cuts: Iterator[tuple[int, dict[int, int]]], choice: Choice, bounds: tuple[int, ...], most: int
) -> list[Split]:
    found: dict[Choice, Split] = {}
    for cut, placed in cuts:
        changed = tuple(placed.get(operator, candidate) for operator, candidate in enumerate(choice))
        found.setdefault(changed, Split(changed, tuple(sorted({*bounds, cut}))))
        if len(found) == most:
            break
    return list(found.values())
