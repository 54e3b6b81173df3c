"""Annealing of one structure: chains of rounds, each chain started from a baseline, an elite plan or at random.

A chain ends after ``stagnation`` rejections in a row (paper, A-J2g, A-J2h). A move to an equal score is made but counts
as a rejection **[choice]**: where an operator has slack many plans score the same, and a chain would wander among them
until the budget ends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from random import Random

import numpy as np

from rpeg_core.passes.score import Evaluation
from rpeg_core.planning.problem import StructureProblem
from rpeg_core.planning.search import Incumbent
from rpeg_plugin_annealing.directory import Directory
from rpeg_plugin_annealing.elites import Elites
from rpeg_plugin_annealing.ledger import Ledger
from rpeg_plugin_annealing.moves import Choice, Proposer
from rpeg_plugin_annealing.seeds import Split, baseline_starts, splits, splits_of_parts
from rpeg_plugin_annealing.settings import Settings

__all__ = ["Score", "StructureSearch", "accepts"]

LOW_MEMORY_SHARE = 0.1
"""Without any feasible plan a chain starts from candidates in the smallest tenth by memory **[choice]**."""

SPLITS_CUT_AGAIN = 4
"""Splits in two whose parts are cut again."""

FRUITLESS_HITS = 20_000
"""So many known configurations in a row, and a structure counts as searched through."""


def accepts(current: float, proposed: float, temperature: float, random: Random) -> bool:
    """``min(1, exp((s' - s) / (|s| t)))`` (equations 8 and 9); scores are never negative."""
    if proposed >= current:
        return True
    return random.random() < math.exp((proposed - current) / (current * temperature))


class Score:
    """The penalized objective value of an evaluation (equation 5), relative to the best throughput so far."""

    def __init__(self, incumbent: Incumbent) -> None:
        self._incumbent = incumbent

    def __call__(self, evaluation: Evaluation) -> float:
        return self._incumbent.objective.penalized(evaluation, self._incumbent.best_tokens_per_s)


class StructureSearch:
    """The chains of one structure; :meth:`run` continues where an earlier call was interrupted.

    Args:
        ledger: evaluates, for the structure that it was last allowed to work on.
        structure: the structure.
        directories: what may be chosen.
        inherited: plans of structures with the same operators, as choices of this one.
        settings, random: of the run.
    """

    def __init__(
        self,
        ledger: Ledger,
        structure: StructureProblem,
        directories: Sequence[Directory],
        inherited: Sequence[Choice],
        settings: Settings,
        random: Random,
    ) -> None:
        self._ledger, self._structure, self._directories = ledger, structure, directories
        self._settings, self._random = settings, random
        self._score = Score(ledger.incumbent)
        self._proposer = Proposer(directories, settings, random)
        self._inherited = tuple(inherited)
        self._configurations = math.prod(len(directory) for directory in directories)
        self._first: Iterator[Choice] = self._first_starts()
        self.elites = Elites(settings.elites, self._score)

    def run(self) -> None:
        """Run chains until the structure is searched through.

        Raises:
            AllowanceSpentError: the allowance ended first.
        """
        while not self._searched_through():
            self._chain(*self._start())

    def _searched_through(self) -> bool:
        return self._ledger.known() >= self._configurations or self._ledger.hits >= FRUITLESS_HITS

    def _first_starts(self) -> Iterator[Choice]:
        """The concurrent baseline, then the best splits. Other baselines and inherited plans are tried as elites."""
        baselines = baseline_starts(self._structure, self._directories)
        for choice in (*baselines, *self._inherited):
            self._evaluate(choice)
        yield baselines[0] if baselines else self._low_memory_choice()
        if self._settings.split_starts:
            yield from self._best_splits()

    def _best_splits(self) -> list[Choice]:
        """Splits in two, and splits of the parts of the best ones, down to three parts."""
        halves = self._best_of(splits(self._directories, self._structure.book.machine.gpus), SPLITS_CUT_AGAIN)
        finer = [split for half in halves for split in splits_of_parts(self._directories, half)]
        return [split.choice for split in self._best_of([*halves, *finer], self._settings.elites)]

    def _best_of(self, candidates: Sequence[Split], count: int) -> list[Split]:
        """The ``count`` best ones of different score: mirrored plans score the same and are the same."""
        scored: dict[float, Split] = {}
        for split in candidates:
            scored.setdefault(self._score(self._evaluate(split.choice)), split)
        return [scored[score] for score in sorted(scored, reverse=True)[:count]]

    def _start(self) -> tuple[Choice, float]:
        """Where the next chain starts, and its temperature."""
        settings, random = self._settings, self._random
        first = next(self._first, None)
        if first is not None:
            return first, settings.temperature_initial
        if not settings.warm_restarts:
            anywhere = tuple(d.sample(d.everything, random) for d in self._directories)
            return anywhere, settings.temperature_initial
        if not len(self.elites):
            return self._low_memory_choice(), settings.temperature_initial
        self.elites.rescore()
        return self.elites.draw(random), settings.temperature_warm

    def _low_memory_choice(self) -> Choice:
        choice = []
        for candidates, directory in zip(self._structure.candidates, self._directories, strict=True):
            indices = np.array(directory.indices)
            memory = self._structure.book.operators[candidates.operator].isolated[candidates.layout[indices]]
            smallest = indices[np.argsort(memory, kind="stable")]
            among = max(1, int(len(smallest) * LOW_MEMORY_SHARE))
            choice.append(int(smallest[int(self._random.random() * among)]))
        return tuple(choice)

    def _chain(self, choice: Choice, temperature: float) -> None:
        settings, score = self._settings, self._score
        current = self._evaluate(choice)
        critical: list[float] = []

        def critical_seconds() -> list[float]:
            if not critical:
                critical.extend(self._ledger.critical_seconds(choice))
            return critical

        rejected = 0
        while rejected < settings.stagnation and not self._searched_through():
            best = self._best(self._proposer.propose(choice, critical_seconds))
            rejected += 1
            if best is not None:
                before, after = score(current), score(best[1])
                if accepts(before, after, temperature, self._random):
                    choice, current = best
                    critical.clear()
                    rejected = rejected if after == before else 0
            if settings.cooling == "geometric":
                temperature = max(settings.temperature_min, temperature * settings.cooling_factor)

    def _best(self, proposals: Sequence[Choice]) -> tuple[Choice, Evaluation] | None:
        """The proposal with the highest score, the first of equals; None when none may be taken."""
        evaluated = [(choice, self._evaluate(choice)) for choice in proposals]
        if not self._settings.soft_memory_penalty:
            evaluated = [item for item in evaluated if item[1].feasible]
        return max(evaluated, key=lambda item: self._score(item[1]), default=None)

    def _evaluate(self, choice: Choice) -> Evaluation:
        evaluation = self._ledger.evaluate(choice)
        self.elites.offer(choice, evaluation)
        return evaluation
