"""The run: structures one after the other, then polish, within one budget (paper, A-J2i, Algorithm 7)."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

import numpy as np

from rpeg_core.errors import UsageError
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Progress, SearchBudget, SearchResult
from rpeg_plugin_annealing.chains import StructureSearch
from rpeg_plugin_annealing.directory import Directory, build_directories
from rpeg_plugin_annealing.ledger import AllowanceSpentError, Ledger
from rpeg_plugin_annealing.moves import Choice
from rpeg_plugin_annealing.polish import polish
from rpeg_plugin_annealing.settings import Settings

__all__ = ["run"]

LAST_SHARE = 0.02
"""What a polish leaves of the budget is searched again, unless it is less than this share."""


def run(problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress) -> SearchResult:
    """Search all structures that have candidates.

    Raises:
        UsageError: the budget has no limit.
    """
    if budget.seconds is None and budget.evaluations is None:
        raise UsageError(
            "annealing has no budget", facts=["allowed: seconds, evaluations, or both"], hint="set search.seconds"
        )
    return _Run(problem, budget, settings, progress).result()


class _Run:
    def __init__(
        self, problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress
    ) -> None:
        self.problem, self.budget, self.settings, self.progress = problem, budget, settings, progress
        self.random = Random(settings.seed)
        self.ledger = Ledger(problem, budget, progress)
        self.searches: dict[int, StructureSearch] = {}
        self.directories: dict[int, tuple[Directory, ...]] = {}
        self.elites: dict[tuple[str, ...], tuple[ExecutionPlan, ...]] = {}  # by operator names

    def result(self) -> SearchResult:
        indices = [i for i, structure in enumerate(self.problem.structures) if structure.empty_operator is None]
        finished = {
            index for position, index in enumerate(indices) if self.search(index, self.share(indices, position))
        }
        converged = not self.settings.polish or self.polish_and_resume(finished)
        if self.progress.cancelled:
            stopped = "cancelled"
        else:
            stopped = "finished" if converged and len(finished) == len(indices) else "budget"
        self.ledger.report()
        return self.ledger.incumbent.result(self.ledger.evaluations, stopped)

    def share(self, indices: list[int], position: int) -> SearchBudget:
        """Until when to search a structure: what remains before the polish, evenly split; evaluations are fixed."""
        kept = 1 - (self.settings.polish_share if self.settings.polish else 0)
        seconds, evaluations = self.budget.seconds, self.budget.evaluations
        if seconds is not None:
            now = self.ledger.seconds
            seconds = now + (kept * seconds - now) / (len(indices) - position)
        if evaluations is not None:
            own = max(1, int(kept * evaluations) // len(indices))
            evaluations = min(evaluations, self.ledger.evaluations + own)
        return SearchBudget(seconds=seconds, evaluations=evaluations)

    def search(self, index: int, until: SearchBudget) -> bool:
        """True when the structure is searched through."""
        finished = self.work(index, until, lambda: self.searching(index).run())
        search = self.searches.get(index)
        if search is not None and self.settings.warm_restarts:
            structure = self.problem.structures[index]
            self.elites[structure.operators] = tuple(structure.plan(choice) for choice in search.elites.choices)
        return finished

    def polish_and_resume(self, finished: set[int]) -> bool:
        """Polish the best plan; search its structure for half of what that leaves, polish again, and so on.

        True when nothing is left to try.
        """
        while True:
            goal = self.ledger.incumbent.best or self.ledger.incumbent.nearest
            if goal is None:
                return True
            directories = self.directories[goal.structure]
            if not self.work(
                goal.structure, self.budget, lambda c=goal.choice, d=directories: polish(self.ledger, d, c)
            ):
                return False
            if goal.structure in finished:
                return True
            left = 1 - self.ledger.spent()
            if left < LAST_SHARE:
                return False
            if self.search(goal.structure, self.later(left / 2)):
                finished.add(goal.structure)

    def later(self, share: float) -> SearchBudget:
        """Until when the next ``share`` of the budget lasts; at least one evaluation, so that all of it gets spent."""
        seconds, evaluations = self.budget.seconds, self.budget.evaluations
        return SearchBudget(
            seconds=None if seconds is None else self.ledger.seconds + share * seconds,
            evaluations=None if evaluations is None else self.ledger.evaluations + max(1, int(share * evaluations)),
        )

    def work(self, index: int, until: SearchBudget, job: Callable[[], object]) -> bool:
        """Do ``job`` on a structure; False when the allowance ends first."""
        self.ledger.allow(index, until)
        try:
            job()
        except AllowanceSpentError:
            return False
        return True

    def searching(self, index: int) -> StructureSearch:
        """The search of a structure, begun when first asked for."""
        if index not in self.searches:
            structure = self.problem.structures[index]
            self.directories[index] = self.build_directories(structure)
            self.searches[index] = StructureSearch(
                self.ledger,
                structure,
                self.directories[index],
                self.inherited(structure),
                self.settings,
                self.random,
            )
        return self.searches[index]

    def build_directories(self, structure: StructureProblem) -> tuple[Directory, ...]:
        """Staleness variants have the same candidates and share their directories."""
        for index, directories in self.directories.items():
            known = self.problem.structures[index]
            if known.operators == structure.operators and all(
                np.array_equal(a.layout, b.layout) and np.array_equal(a.start, b.start)
                for a, b in zip(known.candidates, structure.candidates, strict=True)
            ):
                return directories
        return build_directories(structure, microbatch_tuning=self.settings.microbatch_tuning)

    def inherited(self, structure: StructureProblem) -> list[Choice]:
        """Elite plans of structures with the same operators, as choices of this one."""
        found = []
        for plan in self.elites.get(structure.operators, ()):
            choice = [candidates.find(plan[candidates.operator]) for candidates in structure.candidates]
            if None not in choice:
                found.append(tuple(choice))
        return found
