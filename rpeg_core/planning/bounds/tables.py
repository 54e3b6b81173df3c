"""Flat arrays for the bounds: the candidates of a structure problem as *boxes*.

A box is a set of configurations: per operator a *group* of candidates and, when decided, a start. The groups of an
operator form a binary tree: all candidates; unions of allocation sizes; the candidates of one size (more exactly, on
one set of allocations); parts of their layouts, the faster and the slower half; a single layout. A relaxation sees the
least time, work and memory in a group. Rows are the layouts of all operators, one size after another; the candidates
of a layout are its starts.
"""

from __future__ import annotations

import hashlib
import itertools
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.planning.compiled import tables as compiled
from rpeg_core.spec.machine import DeviceSpace

if TYPE_CHECKING:
    from rpeg_core.planning.problem import StructureProblem

__all__ = ["BOUNDS_FINGERPRINT", "BoxTables", "build_box_tables"]

BOUNDS_FINGERPRINT = hashlib.sha256(
    compiled.KERNEL_FINGERPRINT.encode()
    + b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
"""Changes whenever this package, or the kernel that it builds on, does.

It names a dtype in :class:`BoxTables`, hence a part of the types that numba's cache on disk is looked up by: no
compiled function over them outlives a change of what it calls, in whatever file it is.
"""

NONE = -1

# Columns of BoxTables.operators.
TRAINS, MODEL, FEEDERS, PAIRS_FIRST, PAIRS_STOP, ROOT, TRAINABLE = range(7)
OPERATOR_COLUMNS = 7

# Columns of BoxTables.groups: a union of groups has no rows and no starts. All but single layouts have two parts.
FEWEST, MOST, SIZE, START_FIRST, START_STOP, ROW_FIRST, ROW_STOP, PART, OTHER_PART = range(9)
GROUP_COLUMNS = 9

# Columns of BoxTables.rows, .least and .most. SPLIT_WHOLE is the sum of the phases. The first four are
# times or GPU-seconds, of the whole and of the split operator.
WHOLE, SPLIT_WHOLE, WORK, SPLIT_WORK, TRAINING_STATE, WEIGHTS, TRANSIENT, PHASES = range(8)

# Columns of BoxTables.edges (data edges) and .publications.
EDGE_SOURCE, EDGE_TARGET, EDGE_GENERATED, EDGE_TABLE = range(4)
FROM_TRAINING, TO_SERVING, STEPS_LATER, RIVALS, PUBLICATION_TABLE = range(5)


class BoxTables(NamedTuple):
    """What a box is bounded against; a tuple of arrays for numba."""

    steps: int
    phases: int
    gpus: int
    usable_bytes: float
    operators: Ints
    order: Ints  # operators in topological order of the data edges
    copies: Ints  # models: kept to serve them
    users: Ints  # models: bit mask of the operators that invoke it
    groups: Ints
    rows: Floats  # (layouts, PHASES + phases)
    row_degrees: Ints
    least: Floats  # (groups, columns of rows): the least over the group or union
    most: Floats
    starts: Ints
    candidate_first: Ints  # rows: the candidates of a row are candidate[first + start position]
    candidate: Ints
    blocks: Ints  # sizes of nested aligned blocks, ascending, each a multiple of the one before
    swaps: Ints  # (groups, blocks): whether swapping two blocks maps the group's allocations to themselves
    edges: Ints
    edge_seconds: Floats
    edge_least: Floats  # (edges, sizes, sizes): over the tiers that can occur
    publications: Ints
    overlap_ranges: Ints
    overlaps: Ints
    overlap_seconds: Floats
    pairs: Ints  # as in compiled.tables
    reshard_seconds: Floats
    gpus_per_node: int
    gpus_per_rack: int
    fingerprint: np.ndarray  # empty; its dtype names BOUNDS_FINGERPRINT


def build_box_tables(
    problem: StructureProblem, evaluated: compiled.Tables, *, keep_dominated: bool = False
) -> BoxTables:
    """Tables of a problem in which every operator has a candidate.

    Args:
        problem: the structure problem.
        evaluated: its tables for the compiled evaluator; durations are taken from there.
        keep_dominated: keep the layouts that need at least as much of everything as another one on the same
            allocations. Relaxations are monotone in every cost, so that a bound holds without them; schedules are not.
    """
    machine, phases = problem.book.machine, evaluated.phases
    operators = np.full((len(problem.candidates), OPERATOR_COLUMNS), NONE, np.int64)
    _roles(operators, evaluated)
    blocks = _blocks(machine)
    groups = _Groups(blocks)
    rows, degrees, first, candidate = [], [], [], []
    for v, candidates in enumerate(problem.candidates):
        begin = evaluated.operators[v, compiled.FIRST_CANDIDATE]
        block = evaluated.candidates[begin : begin + len(candidates)]
        own = []
        for (size, places), members in sorted(_members(candidates.layout, candidates.start, block).items()):
            layouts = [(_row(evaluated, block[m[0]], size, phases), block[m[0], compiled.DEGREES], m) for m in members]
            layouts.sort(key=lambda item: item[0])
            kept = layouts if keep_dominated else _undominated(layouts, bool(operators[v, TRAINABLE]))
            size_index = int(block[members[0][0], compiled.SIZE])
            own.append(groups.add(size, size_index, places, len(rows), [layout[0] for layout in kept]))
            for costs, degree, indices in kept:
                rows.append(costs)
                degrees.append(degree)
                first.append(len(candidate))
                candidate.extend(indices)
        operators[v, ROOT] = groups.unite(own)
    return BoxTables(
        steps=evaluated.steps,
        phases=phases,
        gpus=evaluated.gpus,
        usable_bytes=evaluated.usable_bytes,
        operators=operators,
        order=evaluated.order,
        copies=np.ascontiguousarray(evaluated.models[:, compiled.COPIES]),
        users=np.array(
            [
                sum(1 << int(v) for v in evaluated.lists[m[compiled.USERS_FIRST] : m[compiled.USERS_STOP]])
                for m in evaluated.models
            ],
            np.int64,
        ).reshape(-1),
        groups=np.array(groups.rows, np.int64),
        rows=np.array(rows),
        row_degrees=np.array(degrees, np.int64),
        least=np.array(groups.least),
        most=np.array(groups.most),
        starts=np.array(groups.starts, np.int64),
        candidate_first=np.array(first, np.int64),
        candidate=np.array(candidate, np.int64),
        blocks=blocks,
        swaps=np.array(groups.swaps, np.int64),
        edges=_edges(evaluated),
        edge_seconds=evaluated.data_seconds,
        edge_least=_least_over_tiers(evaluated.data_seconds),
        publications=_publications(evaluated),
        overlap_ranges=evaluated.overlap_ranges,
        overlaps=evaluated.overlaps,
        overlap_seconds=evaluated.overlap_seconds,
        pairs=evaluated.pairs,
        reshard_seconds=evaluated.reshard_seconds,
        gpus_per_node=machine.gpus_per_node,
        gpus_per_rack=machine.gpus_per_rack,
        fingerprint=np.zeros(0, [(f"bounds_{BOUNDS_FINGERPRINT}", np.uint8)]),
    )


def _members(layout: Ints, start: Ints, block: np.ndarray) -> dict[tuple[int, tuple[int, ...]], list[list[int]]]:
    """(GPUs, starts) -> the layouts with exactly these, each as its candidates in the order of the starts."""
    found: dict[tuple[int, tuple[int, ...]], list[list[int]]] = {}
    for row in np.unique(layout):
        indices = np.flatnonzero(layout == row)
        indices = indices[np.argsort(start[indices], kind="stable")]
        size = int(block[indices[0], compiled.STOP] - block[indices[0], compiled.START])
        found.setdefault((size, tuple(start[indices].tolist())), []).append(indices.tolist())
    return found


_Layout = tuple[list[float], int, list[int]]


def _undominated(layouts: list[_Layout], degrees_matter: bool) -> list[_Layout]:
    """Without those that cost at least as much in every column as another one; ``layouts`` are sorted by cost.

    A relaxation sees degrees only where two operators of a trainable model have the same ones.
    """
    kept: list[_Layout] = []
    for costs, degree, indices in layouts:
        if not any(
            (other == degree or not degrees_matter) and all(a <= b for a, b in zip(less, costs, strict=True))
            for less, other, _ in kept
        ):
            kept.append((costs, degree, indices))
    return kept


def _row(evaluated: compiled.Tables, candidate: np.ndarray, size: int, phases: int) -> list[float]:
    costs = evaluated.costs[candidate[compiled.COSTS]]
    parts = costs[compiled.FIRST_PHASE :].tolist()
    whole = float(costs[compiled.WHOLE])
    if any(np.isnan(parts)) or phases < 2:  # never split
        parts = [whole] + [0.0] * (phases - 1)
    split = sum(parts)
    memory = (costs[compiled.TRAINING_STATE], costs[compiled.WEIGHTS], costs[compiled.TRANSIENT])
    return [whole, split, whole * size, split * size, *map(float, memory), *parts]


def _roles(operators: Ints, evaluated: compiled.Tables) -> None:
    for v, row in enumerate(evaluated.operators):
        feeders = evaluated.lists[row[compiled.FEEDERS_FIRST] : row[compiled.FEEDERS_STOP]]
        operators[v, TRAINS] = row[compiled.TRAINS]
        operators[v, MODEL] = row[compiled.MODEL]
        operators[v, FEEDERS] = sum(1 << int(u) for u in set(feeders.tolist()))
        operators[v, PAIRS_FIRST] = row[compiled.PAIRS_FIRST]
        operators[v, PAIRS_STOP] = row[compiled.PAIRS_STOP]
        model = row[compiled.MODEL]
        operators[v, TRAINABLE] = model != NONE and not evaluated.models[model, compiled.FROZEN]


def _edges(evaluated: compiled.Tables) -> Ints:
    rows = []
    for v, operator in enumerate(evaluated.operators):
        for e in range(operator[compiled.DATA_FIRST], operator[compiled.DATA_STOP]):
            edge = evaluated.data_edges[e]
            rows.append((edge[compiled.DATA_SOURCE], v, edge[compiled.DATA_GENERATED], e))
    return np.array(rows, np.int64).reshape(-1, 4)


def _publications(evaluated: compiled.Tables) -> Ints:
    rows = []
    for p, row in enumerate(evaluated.publications):
        rivals = evaluated.lists[row[compiled.RIVALS_FIRST] : row[compiled.RIVALS_STOP]]
        targets = sum(1 << int(evaluated.publications[r, compiled.PUBLICATION_TARGET]) for r in rivals)
        ends = row[compiled.PUBLICATION_SOURCE], row[compiled.PUBLICATION_TARGET]
        rows.append((*ends, row[compiled.SHIFT], targets, p))
    return np.array(rows, np.int64).reshape(-1, 5)


def _least_over_tiers(seconds: Floats) -> Floats:
    """Of the whole payload, by source and target size; 0 where no two allocations have these sizes."""
    whole = seconds[:, 0]
    return np.where(np.isnan(whole).all(axis=-1), 0.0, np.nanmin(np.where(np.isnan(whole), np.inf, whole), axis=-1))


def _blocks(machine: DeviceSpace) -> Ints:
    """1, halves of a node, a node, halves of a rack, a rack, halves of the cluster, the cluster."""
    sizes = [1]
    for whole in (machine.gpus_per_node, machine.gpus_per_rack, machine.gpus):
        while sizes[-1] < whole:
            ratio = whole // sizes[-1]
            sizes.append(sizes[-1] * next(d for d in range(2, ratio + 1) if ratio % d == 0))
    return np.array(sizes, np.int64)


class _Groups:
    """Groups and their unions, as rows of BoxTables.groups."""

    def __init__(self, blocks: Ints) -> None:
        self.blocks = blocks.tolist()
        self.rows: list[list[int]] = []
        self.starts: list[int] = []
        self.least: list[Floats] = []
        self.most: list[Floats] = []
        self.swaps: list[list[bool]] = []

    def add(self, gpus: int, size: int, places: tuple[int, ...], row: int, costs: list[list[float]]) -> int:
        """The group of layouts whose rows begin at ``row``, and its parts."""
        first = len(self.starts)
        self.starts.extend(places)
        columns = [gpus, gpus, size, first, first + len(places)]
        return self._halve(columns, _swaps(gpus, places, self.blocks), row, np.array(costs))

    def _halve(self, columns: list[int], swaps: list[bool], row: int, costs: Floats) -> int:
        parts = [NONE, NONE]
        if len(costs) > 1:
            middle = len(costs) // 2
            parts = [
                self._halve(columns, swaps, row, costs[:middle]),
                self._halve(columns, swaps, row + middle, costs[middle:]),
            ]
        return self._append([*columns, row, row + len(costs), *parts], costs.min(axis=0), costs.max(axis=0), swaps)

    def _append(self, columns: list[int], least: Floats, most: Floats, swaps: list[bool]) -> int:
        self.rows.append(columns)
        self.least.append(least)
        self.most.append(most)
        self.swaps.append(swaps)
        return len(self.rows) - 1

    def unite(self, members: list[int]) -> int:
        """The union of groups of ascending size, as a binary tree of unions.

        Groups that allow every swap are kept together, so that places stay interchangeable as long as possible.
        """
        if len(members) == 1:
            return members[0]
        free = [g for g in members if all(self.swaps[g])]
        parts = free, [g for g in members if g not in free]
        if not all(parts):
            middle = len(members) // 2
            parts = members[:middle], members[middle:]
        one, other = self.unite(parts[0]), self.unite(parts[1])
        fewest = min(self.rows[one][FEWEST], self.rows[other][FEWEST])
        most = max(self.rows[one][MOST], self.rows[other][MOST])
        return self._append(
            [fewest, most, NONE, 0, 0, 0, 0, one, other],
            np.minimum(self.least[one], self.least[other]),
            np.maximum(self.most[one], self.most[other]),
            [a and b for a, b in zip(self.swaps[one], self.swaps[other], strict=True)],
        )


def _swaps(gpus: int, places: tuple[int, ...], blocks: list[int]) -> list[bool]:
    """Whether two blocks of ``blocks[i]`` inside one of ``blocks[i + 1]`` may be swapped, by i.

    Either each allocation is made of whole larger blocks, or each lies in a smaller block and has its counterpart in
    every other one of the same larger block.
    """
    allowed = []
    starts, present = np.array(places), set(places)
    for small, large in itertools.pairwise(blocks):
        whole = gpus % large == 0 and bool((starts % large == 0).all())
        inside = bool((starts // small == (starts + gpus - 1) // small).all()) and all(
            place - place % large + place % small + other in present
            for place in places
            for other in range(0, large, small)
        )
        allowed.append(whole or inside)
    return [*allowed, True]
