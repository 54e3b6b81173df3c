"""The search of one structure: starts, then islands; small structures are tried out whole."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.planning.problem import StructureProblem
from rpeg_plugin_annealing.account import Account
from rpeg_plugin_annealing.chain_kernel import scores
from rpeg_plugin_annealing.directory import Choice, Directory
from rpeg_plugin_annealing.islands import Islands
from rpeg_plugin_annealing.polish import polish
from rpeg_plugin_annealing.seeds import Split, baseline_starts, splits, splits_of_parts
from rpeg_plugin_annealing.settings import Settings

__all__ = ["StructureSearch"]

SPLITS_CUT_AGAIN = 4
"""Splits in two whose parts are cut again."""

FEW = 20_000
"""A structure with so many configurations at most is tried out whole, when the allowance has room **[choice]**."""


class StructureSearch:
    """Searches one structure; :meth:`run` continues where an earlier call ended.

    Attributes:
        finished: nothing is left to try.
    """

    def __init__(
        self,
        account: Account,
        structure: StructureProblem,
        directories: Sequence[Directory],
        islands: Islands,
        settings: Settings,
    ) -> None:
        self.finished = False
        self._account, self._structure, self._directories = account, structure, directories
        self._islands, self._settings = islands, settings
        self._configurations = math.prod(len(directory) for directory in directories)
        self._begun = False
        self._everything: tuple[Ints, Floats] | None = None

    @property
    def elites(self) -> tuple[Choice, ...]:
        """The best plans of different score, best first."""
        return tuple(elite.choice for elite in self._islands.elites)

    def best_score(self, best_tokens_per_s: float) -> float:
        """The value of its best plan, 0 when there is none."""
        found = [elite.result for elite in self._islands.elites]
        objective = self._account.incumbent.objective
        return float(scores(objective, np.array(found), best_tokens_per_s).max()) if found else 0.0

    def offer_again(self) -> None:
        """Once all is known: the best throughput of all structures changes the values of efficiency objectives."""
        if self._everything is not None:
            self._account.offer(self._islands.index, *self._everything)

    def run(self, inherited: Sequence[Choice]) -> None:
        """Search until the allowance ends or nothing is left to try.

        Args:
            inherited: plans of structures with the same operators, as choices of this one.
        """
        if self.finished:
            return
        begun, self._begun = self._begun, True
        if not begun and self._configurations <= self._account.room(FEW):
            self._try_everything()
            return
        known = set(self.elites)
        self._evaluate([choice for choice in dict.fromkeys(inherited) if choice not in known])
        if not begun:
            self._islands.start_at(self._first_starts())
        self.finished = self._islands.run()

    def polish(self, choice: Choice) -> bool:
        """Descend from ``choice``, see :mod:`rpeg_plugin_annealing.polish`; False when the allowance ends first."""
        return polish(self._account, self._islands, self._structure, self._directories, choice)

    def _try_everything(self) -> None:
        counts = [len(directory) for directory in self._directories]
        numbers = np.unravel_index(np.arange(self._configurations), counts)
        choices = np.stack([d.indices[n] for d, n in zip(self._directories, numbers, strict=True)], axis=1)
        results = self._islands.evaluate(choices)
        if len(results) == len(choices):
            self.finished, self._everything = True, (choices, results)

    def _first_starts(self) -> list[Choice]:
        """The concurrent baseline and the best splits. The other baseline is tried as an elite."""
        baselines = baseline_starts(self._structure, self._directories)
        self._evaluate(baselines)
        return [*baselines[:1], *(self._best_splits() if self._settings.split_starts else ())]

    def _best_splits(self) -> list[Choice]:
        """Splits in two, and splits of the parts of the best ones, down to three parts."""
        count = self._settings.elites
        halves = self._best_of(splits(self._directories, self._structure.book.machine.gpus), SPLITS_CUT_AGAIN)
        finer = [split for _, half in halves for split in splits_of_parts(self._directories, half)]
        best = dict([*halves, *self._best_of(finer, count)])
        return [best[score].choice for score in sorted(best, reverse=True)[:count]]

    def _best_of(self, candidates: Sequence[Split], count: int) -> list[tuple[float, Split]]:
        """The ``count`` best ones of different score, with it: mirrored plans score the same and are the same."""
        results = self._evaluate([split.choice for split in candidates])
        incumbent = self._account.incumbent
        rank = scores(incumbent.objective, results, incumbent.best_tokens_per_s).tolist()
        scored: dict[float, Split] = {}
        for score, split in zip(rank, candidates, strict=False):
            scored.setdefault(score, split)
        return [(score, scored[score]) for score in sorted(scored, reverse=True)[:count]]

    def _evaluate(self, choices: Iterable[Choice]) -> Floats:
        rows = np.array([*choices], np.int64).reshape(-1, len(self._directories))
        return self._islands.evaluate(rows)
