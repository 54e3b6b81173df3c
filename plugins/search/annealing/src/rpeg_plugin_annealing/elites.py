"""The elite set: the best feasible plans of a structure, where later chains start."""

from __future__ import annotations

from collections.abc import Callable
from random import Random

from rpeg_core.passes.score import Evaluation
from rpeg_plugin_annealing.moves import Choice

__all__ = ["Elites"]


class Elites:
    """Up to ``size`` feasible choices with the highest scores, all different.

    Of equal scores only the first is kept: on a homogeneous cluster most of them are one plan, moved or mirrored.

    Args:
        size: K_elite.
        score: of an evaluation; efficiency objectives lower it when the best throughput rises, see :meth:`rescore`.
    """

    def __init__(self, size: int, score: Callable[[Evaluation], float]) -> None:
        self._size, self._score = size, score
        self._plans: list[tuple[float, Choice, Evaluation]] = []

    def __len__(self) -> int:
        return len(self._plans)

    @property
    def choices(self) -> tuple[Choice, ...]:
        """Best first."""
        return tuple(choice for _, choice, _ in self._plans)

    def offer(self, choice: Choice, evaluation: Evaluation) -> None:
        """Consider a configuration; an infeasible one never enters."""
        if not evaluation.feasible:
            return
        score, plans = self._score(evaluation), self._plans
        if len(plans) == self._size and score <= plans[-1][0]:
            return
        if any(score == known for known, _, _ in plans):
            return
        plans.append((score, choice, evaluation))
        plans.sort(key=lambda plan: -plan[0])
        del plans[self._size :]

    def rescore(self) -> None:
        """Bring the scores up to date with the best throughput so far."""
        self._plans = [(self._score(evaluation), choice, evaluation) for _, choice, evaluation in self._plans]
        self._plans.sort(key=lambda plan: -plan[0])

    def draw(self, random: Random) -> Choice:
        """One of the plans, all alike; there must be one."""
        return self._plans[int(random.random() * len(self._plans))][1]
