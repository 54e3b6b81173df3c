"""Built-in tasks: prompts made from a seed, with one right answer each, and preference pairs over the same prompts.

They need no download and no pretrained weights: a small model learns them from random weights in minutes on a CPU. No
torch in this module.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import attrs
import numpy as np

from rpeg_core.errors import ExperimentError, SettingsError, suggest

__all__ = ["Example", "Task", "task_named", "task_names"]

_DIGITS = "0123456789"


@attrs.frozen
class Example:
    """One prompt and its answer.

    Attributes:
        prompt, answer: text over the task's alphabet.
        rejected: a wrong answer of the same length, for preference pairs.
    """

    prompt: str
    answer: str
    rejected: str


@attrs.frozen(kw_only=True)
class Task:
    """A family of prompts.

    Attributes:
        name: what the user writes.
        summary: one line.
        alphabet: every character that occurs.
        solve: from the symbols of a prompt to its answer.
        reward: the scoring function, ``package.module:name``.
    """

    name: str
    summary: str
    alphabet: str
    solve: Callable[[str], str]
    reward: str = "rpeg_plugin_megatron.rewards:matching_characters"

    def symbols(self, prompt_tokens: int, response_tokens: int) -> int:
        """The most digits of a prompt: one token is left for ``=`` and one for the end of the response.

        Raises:
            ExperimentError: the workload leaves no room for a digit.
        """
        most = min(prompt_tokens, response_tokens) - 1
        if most < 1:
            raise ExperimentError(
                f"task {self.name!r} does not fit {prompt_tokens} prompt and {response_tokens} response tokens",
                facts=["allowed: at least 2 of each: a digit and `=`, a digit and the end token"],
                hint="raise workload.prompt_tokens and workload.response_tokens",
            )
        return most

    def example(self, seed: int, step: int, prompt: int, symbols: int) -> Example:
        """The prompt with index ``prompt`` in the batch of an RL step; the same for the same arguments.

        Prompts have between half of ``symbols`` and ``symbols`` digits, so that rows of a batch differ in length.
        """
        random = np.random.default_rng([seed, step, prompt])
        count = int(random.integers((symbols + 1) // 2, symbols + 1))
        digits = "".join(_DIGITS[digit] for digit in random.integers(0, len(_DIGITS), count))
        answer = self.solve(digits)
        return Example(f"{digits}=", answer, _wrong(answer, random))


def _wrong(answer: str, random: np.random.Generator) -> str:
    """``answer`` with each digit replaced with probability 1/2, at least one of them."""
    replaced = random.random(len(answer)) < 0.5
    replaced[int(random.integers(len(answer)))] = True
    shifts = random.integers(1, len(_DIGITS), len(answer))
    return "".join(
        _DIGITS[(_DIGITS.index(digit) + int(shift)) % len(_DIGITS)] if replace else digit
        for digit, replace, shift in zip(answer, replaced, shifts, strict=True)
    )


_TASKS: Mapping[str, Task] = {
    task.name: task
    for task in (
        Task(name="copy", summary="Write the digits again.", alphabet=_DIGITS + "=", solve=lambda digits: digits),
        Task(
            name="reverse",
            summary="Write the digits from last to first.",
            alphabet=_DIGITS + "=",
            solve=lambda digits: digits[::-1],
        ),
        Task(
            name="sort",
            summary="Write the digits in ascending order.",
            alphabet=_DIGITS + "=",
            solve=lambda digits: "".join(sorted(digits)),
        ),
    )
}


def task_names() -> tuple[str, ...]:
    """Names of the built-in tasks, sorted."""
    return tuple(sorted(_TASKS))


def task_named(name: str) -> Task:
    """The built-in task of that name.

    Raises:
        SettingsError: there is none; the allowed names are given.
    """
    if name not in _TASKS:
        raise SettingsError(
            f"megatron.task is {name!r}",
            facts=[f"allowed: {', '.join(task_names())}"],
            hint=suggest(name, _TASKS),
        )
    return _TASKS[name]
