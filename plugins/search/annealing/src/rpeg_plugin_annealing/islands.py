"""Islands: chains of one structure that run side by side and share their best plans now and then.

Their number is a setting and does not depend on the machine. Every island has its own cache, random numbers and
workspace, and a round is a fixed number of evaluations each; so a seed and an evaluation budget give the same plan on
one core and on many.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence

import attrs
import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.passes.score import Objective
from rpeg_core.planning.compiled import build_workspace, evaluate_choices
from rpeg_core.planning.problem import StructureProblem
from rpeg_plugin_annealing import chain_kernel as kernel
from rpeg_plugin_annealing.account import Account
from rpeg_plugin_annealing.neighbourhood import build_neighbourhood
from rpeg_plugin_annealing.settings import Settings

__all__ = ["Islands", "best_distinct", "new_island", "policy_of"]

ROUND = 2000
"""Evaluations of each island in a round; then what it found is booked."""

EXCHANGE = 10
"""Rounds between two exchanges of elites; more often, and all islands end in one corner **[choice]**."""

BATCH = 512
"""Choices that a thread evaluates between two looks at the clock, about 15 ms."""

CACHED_CONFIGURATIONS = 1 << 19
"""Of all islands of all structures together (about 70 MB); an island that has its share forgets all it knew."""

RESULT_FIELDS = 5


def policy_of(settings: Settings, objective: Objective) -> kernel.Policy:
    """Settings and objective for the kernel."""
    return kernel.Policy(
        kind=Objective.KINDS.index(objective.kind),
        floor=1.0 - objective.max_throughput_loss,
        proposals=settings.proposals,
        pair=settings.pair_move_probability if settings.pair_moves else 0.0,
        critical=settings.critical_path_probability if settings.critical_path_selection else 0.0,
        local=settings.local_move_probability,
        stagnation=settings.stagnation,
        temperature_initial=settings.temperature_initial,
        temperature_warm=settings.temperature_warm,
        cooling=settings.cooling_factor if settings.cooling == "geometric" else 1.0,
        temperature_min=settings.temperature_min,
        warm=settings.warm_restarts,
        soft=settings.soft_memory_penalty,
    )


@attrs.frozen
class Elite:
    """A feasible choice and its row of results."""

    choice: tuple[int, ...]
    result: Floats


def best_distinct(objective: Objective, found: Sequence[Elite], best_tokens_per_s: float, count: int) -> list[Elite]:
    """The ``count`` elites of the highest scores, best first; the first one of every score."""
    if not found:
        return []
    scores = kernel.scores(objective, np.array([elite.result for elite in found]), best_tokens_per_s)
    by_score: dict[float, Elite] = {}
    for score, elite in zip(scores.tolist(), found, strict=True):
        by_score.setdefault(score, elite)
    return [by_score[score] for score in sorted(by_score, reverse=True)[:count]]


class Islands:
    """The chains of one structure; :meth:`run` continues where an earlier call ended.

    Args:
        account: of the run.
        index, structure: the structure.
        allowed: candidates of each operator that may be used.
        settings, policy: of the run.
        cached: configurations that each island may remember.
    """

    def __init__(
        self,
        account: Account,
        index: int,
        structure: StructureProblem,
        allowed: Sequence[Ints],
        settings: Settings,
        policy: kernel.Policy,
        cached: int,
    ) -> None:
        self._account, self.index, self._policy, self._settings = account, index, policy, settings
        self._objective = account.incumbent.objective
        self._tables = structure.evaluator.tables
        self._hood = build_neighbourhood(structure, allowed)
        self._workspaces = [build_workspace(self._tables) for _ in range(max(settings.islands, account.threads))]
        slots = 1 << max(8, (2 * cached - 1).bit_length() - 1)
        self._islands = [
            new_island(len(allowed), settings, seed, slots)
            for seed in np.random.SeedSequence([settings.seed, index]).generate_state(settings.islands, np.uint64)
        ]
        self._stuck = [False] * settings.islands
        self._rounds = 0
        self._next = 0  # the island that gets the next start
        self.elites: list[Elite] = []

    def evaluate(self, choices: Ints) -> Floats:
        """Evaluate rows on all threads until the allowance ends; the result may have fewer rows."""
        account = self._account
        found = []
        first = 0
        while first < len(choices) and not account.over():
            part = choices[first : first + account.room(account.threads * BATCH)]
            results = np.empty((len(part), RESULT_FIELDS))
            bounds = range(0, len(part), BATCH)
            account.parallel(
                [
                    functools.partial(evaluate_choices, self._tables, part[b : b + BATCH], w, results[b : b + BATCH])
                    for b, w in zip(bounds, self._workspaces, strict=False)
                ]
            )
            account.evaluations += len(part)
            account.offer(self.index, part, results)
            self.welcome(part, results)
            found.append(results)
            first += len(part)
        return np.concatenate(found) if found else np.empty((0, RESULT_FIELDS))

    def welcome(self, choices: Ints, results: Floats) -> None:
        """Let evaluated choices become elites."""
        feasible = np.flatnonzero(results[:, 2] <= 1.0)
        if len(feasible):
            best = kernel.scores(self._objective, results[feasible], self._account.incumbent.best_tokens_per_s)
            rows = feasible[np.argsort(-best, kind="stable")[: 4 * self._settings.elites]]
            found = [Elite(tuple(choices[row].tolist()), results[row].copy()) for row in rows]
            self._keep([*self.elites, *found], share=True)

    def start_at(self, choices: Sequence[Sequence[int]]) -> None:
        """Give each choice to an island in turn, as the start of a chain."""
        for choice in choices:
            island = self._islands[self._next]
            starts = np.concatenate((island.starts, np.array([choice], np.int64)))
            island.counts[kernel.STARTS] = len(starts)
            self._islands[self._next] = island._replace(starts=starts)
            self._next = (self._next + 1) % len(self._islands)

    def run(self) -> bool:
        """Run rounds until the allowance ends; True when the islands find nothing new any more."""
        account = self._account
        while not account.over():
            working = [number for number, stuck in enumerate(self._stuck) if not stuck]
            if not working:
                return True
            room = account.room(ROUND * len(working))
            jobs = []
            for place, number in enumerate(working):
                own = (room + len(working) - 1 - place) // len(working)
                jobs.append(functools.partial(self._round, number, own))
            before = [int(self._islands[number].counts[kernel.EVALUATIONS]) for number in working]
            account.parallel(jobs)
            for number, earlier in zip(working, before, strict=True):
                island = self._islands[number]
                account.evaluations += int(island.counts[kernel.EVALUATIONS]) - earlier
            self._rounds += 1
            self._collect(exchange=self._rounds % EXCHANGE == 0)
        return all(self._stuck)

    def _collect(self, exchange: bool) -> None:
        """Book what the islands found, and at an exchange give all of them the best plans of all."""
        account = self._account
        found = list(self.elites)
        for island in self._islands:
            if np.isfinite(island.numbers[kernel.NEAREST]):
                account.offer(self.index, island.nearest[None], island.nearest_result[None])
            count = int(island.counts[kernel.ELITES])
            choices, results = island.elite_choices[:count], island.elite_results[:count]
            account.offer(self.index, choices, results)
            found += [Elite(tuple(c.tolist()), r.copy()) for c, r in zip(choices, results, strict=True)]
        self._keep(found, share=exchange)

    def _round(self, number: int, evaluations: int) -> None:
        island = self._islands[number]
        limit = island.counts[kernel.EVALUATIONS] + evaluations
        while True:
            status = kernel.run_island(
                self._tables, self._workspaces[number], self._hood, self._policy, island, limit, self._account.stop
            )
            if status != kernel.FULL:
                self._stuck[number] = status == kernel.STUCK
                return
            island.keys[:] = 0
            island.counts[kernel.CACHED] = 0

    def _keep(self, found: Sequence[Elite], share: bool) -> None:
        best_tokens_per_s = self._account.incumbent.best_tokens_per_s
        self.elites = best_distinct(self._objective, found, best_tokens_per_s, self._settings.elites)
        for island in self._islands:
            island.numbers[kernel.BEST_TOKENS] = best_tokens_per_s
            if not share:
                continue
            island.counts[kernel.ELITES] = len(self.elites)
            for row, elite in enumerate(self.elites):
                island.elite_choices[row], island.elite_results[row] = elite.choice, elite.result


def new_island(operators: int, settings: Settings, seed: np.uint64, slots: int) -> kernel.Island:
    """An island that knows nothing, with ``slots`` (a power of 2) for its cache; half of them can be used."""

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    return kernel.Island(
        random=np.array([seed], np.uint64),
        counts=ints(kernel.COUNTS),
        numbers=np.array([0.0, 0.0, np.inf]),
        choice=ints(operators),
        result=np.zeros(RESULT_FIELDS),
        critical=np.zeros(operators),
        proposals=ints(settings.proposals, operators),
        starts=ints(0, operators),
        elite_choices=ints(settings.elites, operators),
        elite_results=np.zeros((settings.elites, RESULT_FIELDS)),
        nearest=ints(operators),
        nearest_result=np.zeros(RESULT_FIELDS),
        keys=np.zeros((slots, operators), np.int32),
        values=np.zeros((slots, RESULT_FIELDS)),
    )
