"""Which points of a sweep are worth considering: the Pareto frontier, and the knee of a curve.

The knee is Kneedle's (Satopää, Albrecht, Irwin, Raghavan, *Finding a "Kneedle" in a Haystack*, ICDCSW 2011): scale both
axes of the curve to [0, 1]; the knee is where the scaled value exceeds the scaled x by most: farthest from the chord
between the ends of a rising curve. The curves of a sweep are short and free of noise, so there is no smoothing and
S = 0; in place of the sensitivity a curve that bulges over its chord by less than ``LEAST_BULGE`` counts as straight.
"""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["LEAST_BULGE", "frontier", "knee"]

LEAST_BULGE = 0.05
"""Share of the value's range by which a curve must exceed its chord to have a knee."""


def frontier(points: Sequence[tuple[float, float]]) -> tuple[bool, ...]:
    """Of points (cost, value): which no other beats, being as cheap and as valuable and better in one of the two."""
    return tuple(
        not any(
            other[0] <= point[0] and other[1] >= point[1] and (other[0] < point[0] or other[1] > point[1])
            for other in points
        )
        for point in points
    )


def knee(curve: Sequence[tuple[float, float]]) -> int | None:
    """Index of the knee of a curve (x, value), x ascending; None for fewer than three points or when none is one."""
    if len(curve) < 3:
        return None
    first, last = curve[0][0], curve[-1][0]
    low, high = min(y for _, y in curve), max(y for _, y in curve)
    if first == last or low == high:
        return None
    above = [(y - low) / (high - low) - (x - first) / (last - first) for x, y in curve]
    best = max(range(len(curve)), key=lambda i: above[i])
    return best if best > 0 and above[best] >= LEAST_BULGE else None
