"""The trees of all structures: the set of plans with the least bound is split, small ones are evaluated."""

from __future__ import annotations

import attrs
import numpy as np

from rpeg_core.costing.batches import Ints
from rpeg_core.passes.score import Objective
from rpeg_core.planning.bounds import tree
from rpeg_core.planning.bounds.state import Scratch, build_scratch
from rpeg_core.planning.bounds.tables import FEWEST, ROOT, ROW_FIRST, ROW_STOP, START_FIRST, BoxTables, build_box_tables
from rpeg_core.planning.exact.account import MAKESPAN, PEAK_RATIO, Account
from rpeg_core.planning.exact.descent import descend

__all__ = ["RELATIVE_PRECISION", "Forest", "Goal"]

RELATIVE_PRECISION = 2e-12
"""A plan counts as better only when its makespan is shorter by more than this share, which sums in another order can
make of equal plans. Without it every plan that ties with the best one would have to be evaluated."""

BOXES_AT_ONCE = 500
"""Boxes bounded between two looks at the clock: some 30 ms."""


DESCENT_SHARE = 0.2
"""Of the evaluations; the plans that the tree comes upon first have good bounds, but are not the best around."""


@attrs.frozen
class Goal:
    """What counts as better.

    Attributes:
        objective: what is maximised.
        best_tokens_per_s: the best throughput, to which the allowed loss of other objectives refers.
    """

    objective: Objective
    best_tokens_per_s: float = 0.0

    def cutoff(self, tokens: float, fewest_gpus: int, account: Account) -> float:
        """Plans with this makespan or a longer one are no better than the incumbent.

        Utilization is at most 1 and a plan uses at least ``fewest_gpus``: so its throughput must exceed the
        incumbent's value, times those GPUs for the objective per GPU.
        """
        incumbent = account.incumbent
        if self.objective.kind == "throughput":
            needed = incumbent.best_tokens_per_s
        else:
            allowed = (1.0 - self.objective.max_throughput_loss) * self.best_tokens_per_s
            value = incumbent.value * (fewest_gpus if self.objective.kind == "cost_per_token" else 1)
            needed = max(value, allowed * (1.0 - 1e-9))
        return tokens / needed * (1.0 - RELATIVE_PRECISION) if needed > 0.0 else np.inf


@attrs.define
class _Tree:
    """The open boxes of one structure."""

    tables: BoxTables
    scratch: Scratch
    frontier: tree.Frontier
    fewest_gpus: int
    makespan: float = 0.0  # the least bound of the open boxes, infinite when there are none

    @classmethod
    def build(cls, account: Account, index: int, open_boxes: int) -> _Tree:
        tables = build_box_tables(
            account.problem.structures[index], account.evaluators[index].tables, keep_dominated=True
        )
        scratch = build_scratch(tables)
        return cls(
            tables=tables,
            scratch=scratch,
            frontier=tree.build_frontier(tables, scratch, open_boxes + len(tables.starts)),
            fewest_gpus=int(tables.groups[tables.operators[:, ROOT], FEWEST].max()),
        )

    def take(self) -> Ints:
        """Remove the box on top; its plans as choices."""
        t, operators = self.tables, len(self.tables.operators)
        group, start = np.empty(operators, np.int64), np.empty(operators, np.int64)
        tree.pop(self.frontier, group, start)
        columns = []
        for g, place in zip(t.groups[group], start, strict=True):
            offset = int(np.flatnonzero(t.starts[g[START_FIRST] :] == place)[0])
            columns.append(t.candidate[t.candidate_first[g[ROW_FIRST] : g[ROW_STOP]] + offset])
        return np.stack([axis.ravel() for axis in np.meshgrid(*columns, indexing="ij")], axis=1)


class Forest:
    """One tree per structure; the most promising one is worked on.

    Args:
        account: of the run.
        open_boxes: boxes that a tree keeps open at most; a full tree ends the search.
        evaluated_at_once: boxes of so many plans or fewer are evaluated instead of split.
    """

    def __init__(self, account: Account, open_boxes: int, evaluated_at_once: int) -> None:
        self._account, self._evaluated_at_once = account, evaluated_at_once
        options, workload = account.problem.options, account.problem.workload
        self._descents = 0  # evaluations spent on them
        self._tokens = float(options.steps * workload.tokens_per_step)
        self._open_boxes = open_boxes
        self._trees: dict[int, _Tree] = {}
        for index in list(account.evaluators)[:1]:  # compiles, or loads what was compiled
            one = self._tree(index)
            tree.grow(one.tables, one.frontier, one.scratch, np.inf, 0, 1)
            everything = tree.build_frontier(one.tables, one.scratch, 1)
            tree.pop(everything, np.empty_like(everything.branch_order), np.empty_like(everything.branch_order))

    def limit_tokens_per_s(self) -> float:
        """No plan is faster, unless it is the incumbent."""
        least = min(map(self._makespan, self._account.evaluators), default=np.inf)
        return self._tokens / least if least > 0.0 else np.inf

    def search(self, goal: Goal, share: float) -> bool:
        """Work until every plan is evaluated or excluded; False when the share of the budget is spent before."""
        while True:
            index = min(self._account.evaluators, key=self._makespan, default=None)
            if index is None or self._makespan(index) == np.inf:
                return True
            if not self._account.goes_on(share) or not self._advance(index, self._tree(index), goal, share):
                return False
            self._account.report()

    def _tree(self, index: int) -> _Tree:
        """The tree of a structure, built when it is first worked on: for a thousand GPUs that takes 0.1 s."""
        if index not in self._trees:
            self._trees[index] = _Tree.build(self._account, index, self._open_boxes)
        return self._trees[index]

    def _makespan(self, index: int) -> float:
        """No plan of the structure that is still to be considered is faster."""
        return self._trees[index].makespan if index in self._trees else 0.0

    def _improve(self, index: int, choice: Ints, share: float) -> None:
        """Descend from a plan that the tree came upon, as long as descents have their share of the evaluations."""
        before = self._account.evaluations
        if self._descents <= DESCENT_SHARE * before:
            descend(self._account, index, choice.tolist(), share)
            self._descents += self._account.evaluations - before

    def _advance(self, index: int, chosen: _Tree, goal: Goal, share: float) -> bool:
        """Split and evaluate for some 30 ms; False when the tree is full."""
        frontier, bounded = chosen.frontier, tree.BOUNDED
        stop = frontier.counts[bounded] + BOXES_AT_ONCE
        while frontier.counts[bounded] < stop and self._account.goes_on(share):
            cutoff = goal.cutoff(self._tokens, chosen.fewest_gpus, self._account)
            plans = int(min(self._evaluated_at_once, self._account.evaluations_left))
            before = int(frontier.counts[bounded])
            chosen.makespan, small = tree.grow(
                chosen.tables, frontier, chosen.scratch, cutoff, int(stop - before), plans
            )
            self._account.boxes += int(frontier.counts[bounded]) - before
            if not small:
                return chosen.makespan == np.inf or frontier.counts[bounded] >= stop
            choices = chosen.take()
            results = self._account.evaluate(index, choices)
            stop -= len(choices)  # an evaluation takes about as long as a bound
            feasible = np.flatnonzero(results[:, PEAK_RATIO] <= 1.0)
            if len(feasible):
                self._improve(index, choices[feasible[np.argmin(results[feasible, MAKESPAN])]], share)
        return True
