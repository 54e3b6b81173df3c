"""How a check says no."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

__all__ = ["CheckFailedError", "CheckSkippedError", "RecordCheck", "require"]

RecordCheck = tuple[str, Callable[[Any], None]]
"""Name of a check, and the function that takes the record and raises when it fails."""


class CheckFailedError(AssertionError):
    """The record breaks the contract of its kind."""


class CheckSkippedError(Exception):
    """The check cannot be made here, and why."""


def require(problems: Sequence[str]) -> None:
    """Nothing when ``problems`` is empty.

    Raises:
        CheckFailedError: naming the first few problems.
    """
    shown = 5
    if problems:
        more = [f"and {len(problems) - shown} more"] if len(problems) > shown else []
        raise CheckFailedError("; ".join([*problems[:shown], *more]))
