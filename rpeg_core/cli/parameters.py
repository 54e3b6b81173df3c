"""Parameter types that several commands share."""

from __future__ import annotations

import math
from typing import Any

import click

__all__ = ["TIME_LIMIT"]


class _FiniteSeconds(click.FloatRange):
    """A finite number above 0; click itself lets ``nan`` and ``inf`` pass."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        seconds = super().convert(value, param, ctx)
        if not math.isfinite(seconds):
            self.fail(f"{value} is not a finite number", param, ctx)
        return seconds


TIME_LIMIT = _FiniteSeconds(0, min_open=True)
"""A time limit."""
