"""Polish: deterministic coordinate descent over all candidates (paper, A-J2j)."""

from __future__ import annotations

from collections.abc import Sequence

from rpeg_core.passes.score import Evaluation
from rpeg_plugin_annealing.chains import Score
from rpeg_plugin_annealing.directory import Directory
from rpeg_plugin_annealing.ledger import Ledger
from rpeg_plugin_annealing.moves import Choice

__all__ = ["polish"]


def polish(ledger: Ledger, directories: Sequence[Directory], choice: Choice) -> Choice:
    """Give one operator after the other its best candidate until a whole pass improves nothing.

    A feasible plan is better than any infeasible one; among infeasible ones the penalized score decides, so that the
    descent also leads into memory.

    Raises:
        AllowanceSpentError: what was found is in the incumbent.
    """
    score = Score(ledger.incumbent)

    def rank(evaluation: Evaluation) -> tuple[bool, float]:
        return evaluation.feasible, score(evaluation)

    current = ledger.evaluate(choice)
    unchanged = 0
    operator = 0
    while unchanged < len(choice):
        before, after = choice[:operator], choice[operator + 1 :]
        best, found = current, choice
        for candidate in directories[operator].indices:
            neighbour = (*before, candidate, *after)
            evaluation = ledger.evaluate(neighbour)
            if rank(evaluation) > rank(best):
                best, found = evaluation, neighbour
        unchanged = unchanged + 1 if found == choice else 1
        choice, current = found, best
        operator = (operator + 1) % len(choice)
    return choice
