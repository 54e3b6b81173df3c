"""The questions that public cases ask, each answered by the part of RPEG that a user would ask.

A question gives an :class:`~case_questions.asker.Answer`: a verdict in a word or two, and the number behind it. A fact
that a source does not give is a list in the table: the question is then asked for every combination, and the verdict
counts only if it is always the same.
"""

from __future__ import annotations

from case_questions import memory, plans, runs, times
from case_questions.asker import Answer, Asker, Question

__all__ = ["QUESTIONS", "Answer", "Asker", "Question"]

QUESTIONS: dict[str, Question] = {
    "admits": memory.admits,
    "any plan": plans.any_plan,
    "asynchrony": times.asynchrony,
    "engine": memory.engine,
    "estimate": memory.estimate,
    "generation ratio": times.generation_ratio,
    "host": memory.host,
    "later step": memory.later_step,
    "legal": plans.legal,
    "objective": times.objective,
    "resume": runs.resume,
    "serial reward": times.serial_reward,
    "shared GPUs": plans.shared_gpus,
    "smaller": memory.smaller,
    "staleness": runs.staleness,
    "together": plans.together,
    "training": memory.training,
    "transfer": times.transfer,
}
"""What ``ask:`` may be."""
