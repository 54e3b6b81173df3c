"""The compiled evaluator as an object: the interface that search uses, around the kernel."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs
import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.passes.score import Evaluation
from rpeg_core.planning.compiled import kernel
from rpeg_core.planning.compiled.tables import LABEL, SCHEDULED_COUNT, SLOT_COUNT, build_tables, build_workspace

if TYPE_CHECKING:
    from rpeg_core.planning.problem import StructureProblem

__all__ = ["RESULT_FIELDS", "CompiledEvaluator", "CompiledSchedule"]

RESULT_FIELDS = ("makespan_s", "tokens_per_s", "peak_ratio", "utilization", "used_gpus")
"""Columns of :meth:`CompiledEvaluator.evaluate_many`, the fields of Evaluation."""


@attrs.frozen(kw_only=True, eq=False)
class CompiledSchedule:
    """The schedule of one choice; nodes are numbered as the readable lowering numbers them."""

    start_s: Floats
    finish_s: Floats
    order: Ints


class CompiledEvaluator:
    """Evaluates choices of one structure in microseconds, uncached.

    Not for use by two threads at once: they share a workspace. ``tables`` and ``workspace`` are what
    :func:`rpeg_core.planning.compiled.evaluate_choice` takes, for searches that loop inside numba.

    Raises:
        CostTermError: a cost term fails for a transfer.
    """

    def __init__(self, problem: StructureProblem) -> None:
        self._problem = problem
        self.tables = build_tables(problem)
        self.workspace = build_workspace(self.tables)
        self._counts = [len(c) for c in problem.candidates]
        self._choice = np.zeros((1, len(self._counts)), np.int64)
        self._result = np.zeros((1, len(RESULT_FIELDS)))

    def evaluate(self, choice: Sequence[int]) -> Evaluation:
        """Evaluate one candidate index per operator, in the graph's operator order. Raises as :meth:`evaluate_many`."""
        if len(choice) != len(self._counts) or not all(map(_within, choice, self._counts)):
            raise IndexError(f"choice {tuple(choice)!r} names a candidate that does not exist")
        self._choice[0] = choice
        kernel.evaluate_choices(self.tables, self._choice, self.workspace, self._result)
        makespan, tokens_per_s, peak_ratio, utilization, used = self._result[0].tolist()
        if makespan <= 0.0:
            self._explain(choice)
        return Evaluation(
            makespan_s=makespan,
            tokens_per_s=tokens_per_s,
            peak_ratio=peak_ratio,
            utilization=utilization,
            used_gpus=int(used),
        )

    def evaluate_many(self, choices: Ints) -> Floats:
        """Evaluate the rows of ``choices``, shape (n, operators); the result has shape (n, ``RESULT_FIELDS``).

        Raises:
            IndexError: a choice names a candidate that does not exist.
            CostTermError: the cost terms give every operator 0 seconds.
        """
        choices = np.ascontiguousarray(choices, np.int64)
        if choices.ndim != 2 or choices.shape[1] != len(self._counts):
            raise IndexError(f"choices have shape {choices.shape}, allowed: (n, {len(self._counts)})")
        if ((choices < 0) | (choices >= self._counts)).any():
            raise IndexError("a choice names a candidate that does not exist")
        results = np.empty((len(choices), len(RESULT_FIELDS)))
        kernel.evaluate_choices(self.tables, choices, self.workspace, results)
        for choice in choices[results[:, 0] <= 0.0]:
            self._explain(choice)
        return results

    def critical_seconds(self, choice: Sequence[int]) -> Floats:
        """Seconds that each operator contributes to the critical path of the schedule, shape (operators,)."""
        self.evaluate(choice)
        total = np.zeros(len(self._counts))
        kernel.critical_seconds(self.workspace, total)
        return total

    def schedule_of(self, choice: Sequence[int]) -> CompiledSchedule:
        """The whole schedule of a choice, for comparison with the readable one."""
        self.evaluate(choice)
        w = self.workspace
        slots = w.counts[SLOT_COUNT]
        sequence = w.sequence[: w.counts[SCHEDULED_COUNT]]
        step, slot = np.divmod(sequence, slots)
        kind, label = np.divmod(w.slots[slot, LABEL], kernel.LABELS)
        # Lowering makes operators and data transfers step by step, the other transfers edge by edge.
        by_step = kind < 2
        creation = np.lexsort((np.where(by_step, label, step), np.where(by_step, step, label), kind))
        created = sequence[creation]
        number = np.empty(len(sequence), np.int64)
        number[creation] = np.arange(len(sequence))
        return CompiledSchedule(start_s=w.start[created], finish_s=w.finish[created], order=number)

    def _explain(self, choice: Sequence[int]) -> None:
        """Have the readable evaluator say what is wrong with a choice that takes no time."""
        self._problem.predict(self._problem.plan(choice))


def _within(index: int, count: int) -> bool:
    return 0 <= index < count
