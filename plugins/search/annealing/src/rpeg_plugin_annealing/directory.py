"""The candidate directory of one operator: uniform sampling of (layout, microbatches), then of an aligned origin.

Sampling candidates themselves uniformly would favour small allocations, which have the most origins.
"""

from __future__ import annotations

from random import Random

import attrs
import numpy as np

from rpeg_core.costing.batches import Ints
from rpeg_core.ir import Role
from rpeg_core.planning.candidates import Candidates
from rpeg_core.planning.problem import StructureProblem

__all__ = ["Directory", "Region", "build_directories", "default_microbatches"]


@attrs.frozen(eq=False)
class Region:
    """Candidates inside an interval: for each of its layouts, ``count`` neighbours from ``first`` on."""

    first: Ints
    count: Ints

    def __len__(self) -> int:
        return len(self.first)


class Directory:
    """The candidates of one operator that the search may use.

    Attributes:
        indices: candidate indices, ascending (fastest first).
        start, stop, gpus: by candidate index, plain ints, for all candidates of the operator.
        sizes: numbers of GPUs that there are candidates for, ascending.
    """

    def __init__(self, candidates: Candidates, indices: Ints) -> None:
        self.indices: tuple[int, ...] = tuple(indices.tolist())
        self.start: list[int] = candidates.start.tolist()
        self.stop: list[int] = candidates.stop.tolist()
        self.gpus: list[int] = (candidates.stop - candidates.start).tolist()
        self.sizes: tuple[int, ...] = tuple(np.unique((candidates.stop - candidates.start)[indices]).tolist())
        grouped = indices[np.lexsort((candidates.start[indices], candidates.layout[indices]))]
        self._grouped = grouped
        self._layout = candidates.layout[grouped]
        self._start, self._stop = candidates.start[grouped], candidates.stop[grouped]
        self.everything = self._region(np.ones(len(grouped), bool))
        self._within: dict[tuple[int, int], Region] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def fastest(self, start: int, stop: int) -> int | None:
        """The fastest candidate on GPUs ``start .. stop - 1``, None when there is none."""
        inside = self._grouped[(self._start >= start) & (self._stop <= stop)]
        return int(inside.min()) if len(inside) else None

    def shrinks(self, candidate: int) -> Region:
        """The candidates on fewer GPUs, all among those of ``candidate``."""
        interval = self.start[candidate], self.stop[candidate]
        region = self._within.get(interval)
        if region is None:
            start, stop = interval
            inside = (self._start >= start) & (self._stop <= stop) & (self._stop - self._start < stop - start)
            region = self._within[interval] = self._region(inside)
        return region

    def sample(self, region: Region, random: Random) -> int:
        """A random layout of ``region``, at a random origin inside it."""
        row = int(random.random() * len(region.first))
        return int(self._grouped[int(region.first[row]) + int(random.random() * int(region.count[row]))])

    def _region(self, inside: np.ndarray) -> Region:
        # Grouped by layout and ascending in start, the members of one layout are neighbours.
        positions = np.flatnonzero(inside)
        _, first, count = np.unique(self._layout[positions], return_index=True, return_counts=True)
        return Region(positions[first], count)


def default_microbatches(candidates: Candidates, role: Role) -> Ints:
    """A3 off: the candidates with Pp microbatches (2 Pp for training; 1 without a pipeline).

    An operator that has none, because its microbatches are pinned, keeps all its candidates.
    """
    pipeline = candidates.layouts.pipeline
    wanted = np.where(pipeline == 1, 1, pipeline * (2 if role is Role.TRAINING else 1))
    kept = np.flatnonzero((candidates.layouts.microbatches == wanted)[candidates.layout])
    return kept if len(kept) else np.arange(len(candidates))


def build_directories(structure: StructureProblem, *, microbatch_tuning: bool) -> tuple[Directory, ...]:
    """One directory per operator, in graph order."""
    return tuple(
        Directory(
            candidates,
            np.arange(len(candidates))
            if microbatch_tuning
            else default_microbatches(candidates, operator.role),
        )
        for operator, candidates in zip(structure.rpeg.operators, structure.candidates, strict=True)
    )
