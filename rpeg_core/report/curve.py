"""A number by RL step as a small picture of characters."""

from __future__ import annotations

import itertools
import math
import statistics
from collections.abc import Sequence

__all__ = ["chart", "sparkline"]

LEVELS = " ▁▂▃▄▅▆▇█"


def sparkline(values: Sequence[float], *, width: int) -> str:
    """``▁▂▅█``: one character per value, or per mean of neighbours when there are more than ``width``.

    What is not finite is a blank.
    """
    return "".join(LEVELS[1 + round(share * 7)] if share >= 0 else " " for share in _shares(_columns(values, width)))


def chart(values: Sequence[float], *, first: int, width: int, height: int = 6, ascii_only: bool = False) -> list[str]:
    """Columns as high as the value, with the range at the left and the first and last step below.

    Args:
        values: one per step; those that are not finite are left out of the range and of the picture.
        first: number of the first step.
        width, height: of the picture in characters, the labels not counted.
        ascii_only: draw with ``#`` only.
    """
    columns = _columns(values, width)
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return []
    top, bottom = f"{max(finite):.3g}", f"{min(finite):.3g}"
    margin = max(len(top), len(bottom))
    shares = _shares(columns)
    lines = []
    for row in range(height, 0, -1):
        label = top if row == height else bottom if row == 1 else ""
        cells = "".join(_cell(share * height + 0.125 - (row - 1), ascii_only) for share in shares)
        lines.append(f"{label:>{margin}} |{cells}".rstrip())
    last = str(first + len(values) - 1)
    start = str(first) if len(columns) > len(last) + len(str(first)) else ""
    lines.append(f"{'':>{margin}}  {start}{last:>{max(len(last), len(columns) - len(start))}}")
    return lines


def _cell(filled: float, ascii_only: bool) -> str:
    if not math.isfinite(filled) or filled <= 0:
        return " "
    if ascii_only:
        return "#" if filled >= 0.125 else " "
    return LEVELS[max(0, min(8, round(filled * 8)))]


def _columns(values: Sequence[float], width: int) -> list[float]:
    """At most ``width`` means of neighbouring values."""
    count = min(len(values), max(1, width))
    bounds = [round(i * len(values) / count) for i in range(count + 1)] if count else []
    return [statistics.fmean(values[a:b]) for a, b in itertools.pairwise(bounds)]


def _shares(columns: Sequence[float]) -> list[float]:
    """Each value between the least (0) and the greatest (1); one half when all are equal, -1 where not finite."""
    finite = [value for value in columns if math.isfinite(value)]
    if not finite:
        return []
    low, high = min(finite), max(finite)
    if low == high:
        return [0.5 if math.isfinite(value) else -1.0 for value in columns]
    return [(value - low) / (high - low) if math.isfinite(value) else -1.0 for value in columns]
