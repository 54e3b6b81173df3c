"""The run: structures share one budget, the best plan is polished (paper, A-J2i, Algorithm 7).

*Allocation* **[choice]**: the paper splits the time evenly over the structures. By default only the first 30 % are;
then the structures are ranked by the value of their best plan, and each gets half as much as the one before it.
"""

from __future__ import annotations

import math

import numpy as np

from rpeg_core.errors import UsageError
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.bounds import can_split
from rpeg_core.planning.exact import Proof, prove
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Progress, SearchBudget, SearchResult, Solution
from rpeg_plugin_annealing.account import Account, cores
from rpeg_plugin_annealing.directory import Choice, Directory, build_directories
from rpeg_plugin_annealing.islands import CACHED_CONFIGURATIONS, Islands, policy_of
from rpeg_plugin_annealing.settings import Settings
from rpeg_plugin_annealing.structure_search import StructureSearch

__all__ = ["prepare", "run"]

PROOF_S, SHORT_SHARE = 1.6, 0.8
"""Branch and bound has so many seconds, within such a share of the budget, whatever ``proof_share`` is: PPO 7B on two
nodes of four takes 1.4 s of one core to prove, and chains miss that optimum (benchmarks/paper/optimum.py)."""

FIRST_PASS = 0.3
"""Share of the chains' budget that all structures have in equal parts when it is then given to the promising ones."""

BOX = 3
"""Evaluations that take as long as the bound of one set of plans."""

LAST_SHARE = 0.02
"""What a polish leaves of the budget is searched again, unless it is less than this share."""


def run(
    problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress, *, threads: int | None = None
) -> SearchResult:
    """Search all structures that have candidates.

    Args:
        problem, budget, settings, progress: of the run.
        threads: that search at once; all cores when None. The plan of an evaluation budget does not depend on it.

    Raises:
        UsageError: the budget has no limit.
        CostTermError: a cost term fails, or all give 0 seconds.
    """
    if budget.seconds is None and budget.evaluations is None:
        raise UsageError(
            "annealing has no budget", facts=["allowed: seconds, evaluations, or both"], hint="set search.seconds"
        )
    with Account(problem, budget, progress, min(threads or cores(), settings.islands)) as account:
        return _Run(problem, budget, settings, progress, account).result()


def prepare(problem: Problem) -> None:
    """Compile or load the kernels: a proof of one evaluation, two more of the first structure that has candidates."""
    settings, budget = Settings(split_starts=False), SearchBudget(evaluations=2)
    with Account(problem, SearchBudget(evaluations=1), Progress(), 1) as account:
        _Run(problem, SearchBudget(evaluations=1), settings, Progress(), account).prove(1.0)
    with Account(problem, budget, Progress(), 1) as account:
        run = _Run(problem, budget, settings, Progress(), account)
        for index in run.indices[:1]:
            account.allow(budget)
            islands = run.islands(index)
            islands.evaluate(np.zeros((1, len(problem.structures[index].candidates)), np.int64))
            islands.run()


class _Run:
    def __init__(
        self, problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress, account: Account
    ) -> None:
        self.problem, self.budget, self.settings, self.progress = problem, budget, settings, progress
        self.account = account
        self.indices = [i for i, structure in enumerate(problem.structures) if structure.empty_operator is None]
        self.searches: dict[int, StructureSearch] = {}
        self.directories: dict[int, tuple[Directory, ...]] = {}

    def result(self) -> SearchResult:
        account = self.account
        proof = self.prove(self.proof_share())
        stopped = "finished" if proof is not None and proof.complete else self.anneal()
        account.report()
        best = account.incumbent.best
        if best is not None:  # evaluated as any other caller does, which explains what cannot be
            self.problem.structures[best.structure].evaluator.evaluate(best.choice)
        gap = None if proof is None else proof.gap(account.incumbent)
        return account.incumbent.result(account.evaluations, stopped, gap)

    def proof_share(self) -> float:
        """That of the settings; of a short search more, since most proofs take a second or two."""
        share, seconds = self.settings.proof_share, self.budget.seconds
        return share if not share or seconds is None else max(share, min(SHORT_SHARE, PROOF_S / seconds))

    def prove(self, share: float) -> Proof | None:
        """Branch and bound with a share of the budget; None where it does not apply.

        Where chains may not choose microbatches (A3) there is none: it searches all candidates.
        """
        structures = [self.problem.structures[index] for index in self.indices]
        if not share or not self.settings.microbatch_tuning or not all(map(can_split, structures)):
            return None
        if self.progress.cancelled or not structures:
            return None
        budget = self.until(share, 1.0)
        boxes = math.inf if budget.evaluations is None else max(1, budget.evaluations // BOX)
        proof = prove(self.problem, budget, self.progress.part(share), self.account.incumbent, most_boxes=boxes)
        self.account.evaluations += proof.evaluations
        return proof

    def anneal(self) -> str:
        """Search all structures with chains, then polish; returns why it ended."""
        settings = self.settings
        kept = 1 - (settings.polish_share if settings.polish else 0.0)
        promising = settings.allocation == "promising" and len(self.indices) > 1
        self.search_all(dict.fromkeys(self.indices, 1.0), kept, FIRST_PASS if promising else 1.0)
        if promising:
            self.search_all(self.promise(), kept, 1.0)
        for search in self.searches.values():
            search.offer_again()
        converged = not settings.polish or self.polish_and_resume()
        if self.progress.cancelled:
            return "cancelled"
        finished = all(i in self.searches and self.searches[i].finished for i in self.indices)
        return "finished" if converged and finished else "budget"

    def search_all(self, weights: dict[int, float], share: float, part: float) -> None:
        """Search structures by their weights, for ``part`` of what is left of ``share`` of the budget."""
        left = sum(weights.values()) / part
        for index, weight in weights.items():
            self.account.allow(self.until(share, weight / left))
            self.search(index)
            left -= weight

    def promise(self) -> dict[int, float]:
        """Structures by their best plans, best first, with weights that halve."""
        incumbent = self.account.incumbent
        best = {i: s.best_score(incumbent.best_tokens_per_s) for i, s in self.searches.items()}
        ranked = sorted(self.indices, key=lambda i: -best.get(i, 0.0))
        return {index: 0.5**place for place, index in enumerate(ranked)}

    def search(self, index: int) -> None:
        """Search a structure until the allowance ends."""
        if not self.account.over():
            search = self.searching(index)
            search.run(self.inherited(index) if self.settings.warm_restarts else [])

    def polish_and_resume(self) -> bool:
        """Polish the best plan; search its structure for half of what that leaves, polish again, and so on.

        True when nothing is left to try.
        """
        account = self.account
        polished: set[Solution] = set()
        while True:
            goal = account.incumbent.best or account.incumbent.nearest
            if goal is None:
                return True
            search = self.searching(goal.structure)
            if search.finished:
                return True
            account.allow(self.budget)
            if goal not in polished and not search.polish(goal.choice):
                return False
            polished.add(goal)
            last = 1 - account.spent() < LAST_SHARE
            account.allow(self.budget if last else self.until(1.0, 0.5))
            self.search(goal.structure)
            if last:
                return False

    def until(self, share: float, part: float) -> SearchBudget:
        """When ``part`` of what is left of ``share`` of the budget is spent."""
        seconds, evaluations = self.budget.seconds, self.budget.evaluations
        if seconds is not None:
            now = self.account.seconds
            seconds = now + max(0.0, share * seconds - now) * part
        if evaluations is not None:
            now = self.account.evaluations
            evaluations = now + max(1, int((int(share * evaluations) - now) * part + 1e-9))
            evaluations = min(evaluations, self.budget.evaluations)
        return SearchBudget(seconds=seconds, evaluations=evaluations)

    def searching(self, index: int) -> StructureSearch:
        """The search of a structure, begun when first asked for."""
        if index not in self.searches:
            structure, islands = self.problem.structures[index], self.islands(index)
            self.searches[index] = StructureSearch(
                self.account, structure, self.directories[index], islands, self.settings
            )
        return self.searches[index]

    def islands(self, index: int) -> Islands:
        """New islands for a structure."""
        structure, settings = self.problem.structures[index], self.settings
        directories = self.directories[index] = self.build_directories(structure)
        return Islands(
            self.account,
            index,
            structure,
            [directory.indices for directory in directories],
            settings,
            policy_of(settings, self.problem.objective),
            max(1024, CACHED_CONFIGURATIONS // (len(self.indices) * settings.islands)),
        )

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

    def inherited(self, index: int) -> list[Choice]:
        """The incumbent, and elite plans of other structures with the same operators, as choices of this one."""
        structure, best = self.problem.structures[index], self.account.incumbent.best
        found: list[Choice] = [best.choice] if best is not None and best.structure == index else []
        for other in sorted(set(self.searches) - {index}):
            source = self.problem.structures[other]
            if source.operators != structure.operators:
                continue
            for elite in self.searches[other].elites:
                plan: ExecutionPlan = source.plan(elite)
                choice = [candidates.find(plan[candidates.operator]) for candidates in structure.candidates]
                if all(c is not None and c in d for c, d in zip(choice, self.directories[index], strict=True)):
                    found.append(tuple(choice))
        return found
