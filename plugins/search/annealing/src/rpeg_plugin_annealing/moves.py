"""Move kernels: what a round proposes (paper, A-J2f).

*Single*: one operator, drawn by its time on the critical path or uniformly, gets new candidates. *Pair*: a donor,
drawn by its GPUs, shrinks to a part of its interval; a receiver that overlapped it gets a new candidate. A round keeps
its operators and draws up to K_x candidates for them.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from random import Random

from rpeg_plugin_annealing.directory import Directory
from rpeg_plugin_annealing.settings import Settings

__all__ = ["Choice", "Proposer", "weighted"]

Choice = tuple[int, ...]


def weighted(weights: Sequence[float], random: Random) -> int:
    """A position drawn in proportion to its weight; uniform when all weights are 0."""
    sums = list(itertools.accumulate(weights))
    if sums[-1] <= 0:
        return int(random.random() * len(sums))
    target = random.random() * sums[-1]
    return next((position for position, reached in enumerate(sums) if target < reached), len(sums) - 1)


class Proposer:
    """Draws the neighbours of a choice."""

    def __init__(self, directories: Sequence[Directory], settings: Settings, random: Random) -> None:
        self._directories = directories
        self._random = random
        self._proposals = settings.proposals
        self._pair = settings.pair_move_probability if settings.pair_moves else 0.0
        self._critical = settings.critical_path_probability if settings.critical_path_selection else 0.0

    def propose(self, choice: Choice, critical_seconds: Callable[[], Sequence[float]]) -> list[Choice]:
        """Up to K_x different neighbours of ``choice``.

        Args:
            choice: the current candidates.
            critical_seconds: gives each operator's seconds on the critical path; called when needed.
        """
        if self._random.random() < self._pair:
            pair = self._donor_and_receiver(choice)
            if pair is not None:
                return self._pair_moves(choice, *pair)
        return self._single_moves(choice, critical_seconds)

    def _single_moves(self, choice: Choice, critical_seconds: Callable[[], Sequence[float]]) -> list[Choice]:
        random = self._random
        if random.random() < self._critical:
            operator = weighted(critical_seconds(), random)
        else:
            operator = int(random.random() * len(choice))
        directory = self._directories[operator]
        before, after = choice[:operator], choice[operator + 1 :]
        found = {
            (*before, directory.sample(directory.everything, random), *after): None
            for _ in range(self._proposals)
        }
        found.pop(choice, None)
        return list(found)

    def _donor_and_receiver(self, choice: Choice) -> tuple[int, int] | None:
        """None when the donor cannot shrink or shares no GPU."""
        directories = self._directories
        donor = weighted([d.gpus[c] for d, c in zip(directories, choice, strict=True)], self._random)
        given = directories[donor]
        start, stop = given.start[choice[donor]], given.stop[choice[donor]]
        receivers = [
            operator
            for operator, (d, c) in enumerate(zip(directories, choice, strict=True))
            if operator != donor and d.start[c] < stop and start < d.stop[c]
        ]
        if not receivers or not len(given.shrinks(choice[donor])):
            return None
        return donor, receivers[int(self._random.random() * len(receivers))]

    def _pair_moves(self, choice: Choice, donor: int, receiver: int) -> list[Choice]:
        random, shrinking, growing = self._random, self._directories[donor], self._directories[receiver]
        smaller = shrinking.shrinks(choice[donor])
        found = {}
        for _ in range(self._proposals):
            proposal = list(choice)
            proposal[donor] = shrinking.sample(smaller, random)
            proposal[receiver] = growing.sample(growing.everything, random)
            found[tuple(proposal)] = None
        return list(found)
