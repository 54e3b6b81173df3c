"""Function rewards: named by a dotted path, called once per response.

A reward is ``function(prompt: str, response: str, row: Mapping) -> float``: the prompt's text as the model read it, the
response's text without its end token, and the row of the dataset with all its keys. No torch in this module.
"""

from __future__ import annotations

import importlib
import math
import re
import traceback
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rpeg_core.errors import ExecutionError, SettingsError

__all__ = ["Reward", "exact_match", "last_number", "load_reward", "matching_characters"]

_NUMBER = re.compile(r"[-+]?\d[\d,]*(?:\.\d+)?")
_LARGEST = 3.4028234e38  # of fp32, in which scores are kept
_SIGNATURE = "function(prompt: str, response: str, row: Mapping) -> float"


@attrs.frozen
class Reward:
    """A checked reward function.

    Attributes:
        path: ``package.module:name``.
        function: what it names.
    """

    path: str
    function: Callable[[str, str, Mapping[str, Any]], float]

    def problem(self, row: Mapping[str, Any]) -> str | None:
        """What a row lacks that a function of this module reads, in words; of other functions nothing is known."""
        if self.function not in (exact_match, last_number, matching_characters):
            return None
        if "answer" not in row:
            return f"has no key 'answer', only {', '.join(map(repr, row)) or 'none'}"
        try:
            if self.function is last_number:
                float(row["answer"])
        except (TypeError, ValueError):
            return f"has the answer {row['answer']!r}, which is not a number"
        return None

    def __call__(self, prompt: str, response: str, row: Mapping[str, Any]) -> float:
        """The score of one response.

        Raises:
            ExecutionError: the function raised, or did not return a finite number.
        """
        try:
            value = self.function(prompt, response, row)
        except (Exception, SystemExit) as error:  # the user's code may raise anything
            raise ExecutionError(
                f"reward {self.path} raised {type(error).__name__}: {error}",
                facts=[f"prompt: {prompt!r}", f"response: {response!r}", *_place(error)],
            ) from error
        try:
            number = float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not abs(number) <= _LARGEST:
            raise ExecutionError(
                f"reward {self.path} returned {value!r}",
                facts=[f"prompt: {prompt!r}", f"response: {response!r}", "allowed: a finite number (fp32)"],
            )
        return number


def load_reward(path: str) -> Reward:
    """The function at ``package.module:name``.

    Raises:
        SettingsError: the text has another form, the module cannot be imported, or it has no such function.
    """
    module_name, colon, name = path.partition(":")
    if not (colon and name and all(module_name.split("."))):
        raise SettingsError(
            f"megatron.reward is {path!r}", facts=["allowed: package.module:name", f"signature: {_SIGNATURE}"]
        )
    try:
        module = importlib.import_module(module_name)
    except ImportError as error:
        raise SettingsError(
            f"megatron.reward is {path!r}: {error}",
            facts=["allowed: package.module:name of an importable module"],
            hint="install the package, or add its folder to PYTHONPATH",
        ) from error
    except (Exception, SystemExit) as error:  # the user's module may raise anything
        raise SettingsError(
            f"megatron.reward is {path!r}: importing {module_name} raised {type(error).__name__}: {error}",
            facts=_place(error),
        ) from error
    function = getattr(module, name, None)
    if not callable(function):
        what = "has no such name" if function is None else "is not a function"
        raise SettingsError(
            f"megatron.reward is {path!r}: {module_name}.{name} {what}", facts=[f"signature: {_SIGNATURE}"]
        )
    return Reward(path, function)


def _place(error: BaseException) -> list[str]:
    """Where the user's code raised, when it was there."""
    frame = traceback.extract_tb(error.__traceback__)[-1]
    inside = frame.filename != __file__ and not frame.filename.startswith("<")
    return [f"at: {frame.filename}, line {frame.lineno}"] if inside else []


def exact_match(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """1 when the response, without blanks around it, is the row's ``answer``, else 0."""
    return float(response.strip() == str(row["answer"]).strip())


def matching_characters(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """The share of positions where response and the row's ``answer`` have the same character, in [0, 1].

    The longer of both counts, so that missing and surplus characters are wrong ones.
    """
    answer = str(row["answer"])
    same = sum(a == b for a, b in zip(answer, response, strict=False))
    return same / max(len(answer), len(response), 1)


def last_number(prompt: str, response: str, row: Mapping[str, Any]) -> float:
    """1 when the last number in the response equals the row's ``answer``, else 0; commas between digits are ignored."""
    numbers = _NUMBER.findall(response)
    return float(bool(numbers) and float(numbers[-1].replace(",", "")) == float(row["answer"]))
