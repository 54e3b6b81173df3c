"""The candidates of one operator that the search may use, for starts: the fastest one inside an interval."""

from __future__ import annotations

import numpy as np

from rpeg_core.costing.batches import Ints
from rpeg_core.ir import Role
from rpeg_core.planning.candidates import Candidates
from rpeg_core.planning.problem import StructureProblem

__all__ = ["Choice", "Directory", "build_directories", "default_microbatches"]

Choice = tuple[int, ...]
"""One candidate index per operator."""


class Directory:
    """The candidates of one operator that the search may use.

    Attributes:
        indices: candidate indices, ascending (fastest first).
        start, stop: by candidate index, plain ints, for all candidates of the operator.
        sizes: numbers of GPUs that there are candidates for, ascending.
    """

    def __init__(self, candidates: Candidates, indices: Ints) -> None:
        self.indices = indices
        self.start: list[int] = candidates.start.tolist()
        self.stop: list[int] = candidates.stop.tolist()
        self.sizes: tuple[int, ...] = tuple(np.unique((candidates.stop - candidates.start)[indices]).tolist())
        self._start, self._stop = candidates.start[indices], candidates.stop[indices]
        self._on: dict[tuple[int, int], tuple[int, ...]] = {}
        self._fastest: dict[tuple[int, int], int | None] = {}

    def __len__(self) -> int:
        return len(self.indices)

    def __contains__(self, candidate: int) -> bool:
        place = int(np.searchsorted(self.indices, candidate))
        return place < len(self.indices) and int(self.indices[place]) == candidate

    def fastest(self, start: int, stop: int) -> int | None:
        """The fastest candidate on GPUs ``start .. stop - 1``, None when there is none."""
        if (start, stop) not in self._fastest:
            inside = self.indices[(self._start >= start) & (self._stop <= stop)]
            self._fastest[start, stop] = int(inside[0]) if len(inside) else None
        return self._fastest[start, stop]

    def on(self, start: int, stop: int) -> tuple[int, ...]:
        """The candidates on exactly GPUs ``start .. stop - 1``, fastest first."""
        if (start, stop) not in self._on:
            there = (self._start == start) & (self._stop == stop)
            self._on[start, stop] = tuple(self.indices[there].tolist())
        return self._on[start, stop]


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
            np.arange(len(candidates)) if microbatch_tuning else default_microbatches(candidates, operator.role),
        )
        for operator, candidates in zip(structure.rpeg.operators, structure.candidates, strict=True)
    )
