"""What the moves of a chain choose from, as flat arrays for the compiled chains.

A *span* is one number of GPUs that an operator can use, with its aligned starts; a *variant* is a (layout,
microbatches) of that size. Every variant of a span can begin at each of its starts, so a candidate is a variant and a
position among the starts. Variants of a span are sorted by time, fastest first.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from rpeg_core.costing.batches import Ints
from rpeg_core.planning.problem import StructureProblem

__all__ = ["Neighbourhood", "build_neighbourhood"]

LOW_MEMORY_SHARE = 0.1
"""Without any feasible plan a chain starts from candidates in the smallest tenth by memory **[choice]**."""

# Columns of Neighbourhood.operators. X_FIRST and X_STOP delimit rows of spans, variants and lean; candidate 0 of the
# operator is row FIRST_ROW of places.
SPAN_FIRST, SPAN_STOP, VARIANT_FIRST, VARIANT_STOP, LEAN_FIRST, LEAN_STOP, FIRST_ROW = range(7)

# Columns of Neighbourhood.spans: GPUs, rows of variants, entries of starts.
SIZE, SPAN_VARIANT_FIRST, SPAN_VARIANT_STOP, START_FIRST, START_STOP = range(5)

# Columns of Neighbourhood.variants: its span, and where its candidates begin in members, one per start.
SPAN, MEMBER_FIRST = range(2)

# Columns of Neighbourhood.places; variant and position are -1 when the candidate may not be used.
VARIANT, POSITION, BEGIN, END = range(4)


class Neighbourhood(NamedTuple):
    """The candidates that a search may use; a tuple, because that is how numba takes many arrays at once."""

    operators: Ints
    spans: Ints
    variants: Ints
    members: Ints  # candidate indices
    starts: Ints  # first GPUs, ascending within a span
    places: Ints  # by candidate, of all operators: its variant, position and interval
    lean: Ints  # candidates with the least memory


def build_neighbourhood(structure: StructureProblem, allowed: Sequence[Ints]) -> Neighbourhood:
    """The neighbourhood over the ``allowed`` candidate indices of each operator, in graph order."""
    operators = np.zeros((len(allowed), 7), np.int64)
    spans: list[tuple[int, ...]] = []
    variants: list[tuple[int, int]] = []
    members: list[Ints] = []
    starts: list[Ints] = []
    lean: list[Ints] = []
    places = np.full((sum(len(c) for c in structure.candidates), 4), -1, np.int64)
    first_row = member_count = start_count = lean_count = 0
    for v, (candidates, kept) in enumerate(zip(structure.candidates, allowed, strict=True)):
        operators[v, SPAN_FIRST], operators[v, VARIANT_FIRST] = len(spans), len(variants)
        operators[v, LEAN_FIRST], operators[v, FIRST_ROW] = lean_count, first_row
        own = places[first_row : first_row + len(candidates)]
        own[:, BEGIN], own[:, END] = candidates.start, candidates.stop
        for size, origins, rows in _spans(candidates, kept, structure.seconds(v)):
            first = len(variants)
            for row in rows:
                own[row, VARIANT], own[row, POSITION] = len(variants), np.arange(len(row))
                variants.append((len(spans), member_count))
                members.append(row)
                member_count += len(row)
            spans.append((size, first, len(variants), start_count, start_count + len(origins)))
            starts.append(origins)
            start_count += len(origins)
        memory = structure.book.operators[candidates.operator].isolated[candidates.layout[kept]]
        smallest = kept[np.argsort(memory, kind="stable")][: max(1, int(len(kept) * LOW_MEMORY_SHARE))]
        lean.append(smallest)
        lean_count += len(smallest)
        operators[v, SPAN_STOP], operators[v, VARIANT_STOP] = len(spans), len(variants)
        operators[v, LEAN_STOP] = lean_count
        first_row += len(candidates)
    return Neighbourhood(
        operators=operators,
        spans=np.array(spans, np.int64),
        variants=np.array(variants, np.int64),
        members=np.concatenate(members).astype(np.int64),
        starts=np.concatenate(starts).astype(np.int64),
        places=places,
        lean=np.concatenate(lean).astype(np.int64),
    )


def _spans(candidates, kept: Ints, seconds) -> list[tuple[int, Ints, list[Ints]]]:
    """(GPUs, starts, candidates of each variant in the order of the starts), ascending in GPUs."""
    grouped = kept[np.lexsort((candidates.start[kept], candidates.layout[kept]))]
    bounds = np.flatnonzero(np.diff(candidates.layout[grouped])) + 1
    found: dict[tuple[int, bytes], list[Ints]] = {}
    for rows in np.split(grouped, bounds):
        size = int(candidates.stop[rows[0]] - candidates.start[rows[0]])
        found.setdefault((size, candidates.start[rows].astype(np.int64).tobytes()), []).append(rows)
    return [
        (size, candidates.start[rows[0]].astype(np.int64), sorted(rows, key=lambda r: (seconds[r[0]], r[0])))
        for (size, _), rows in sorted(found.items())
    ]
