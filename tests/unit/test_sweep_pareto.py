"""Frontier and knee against drawn cases and their definitions."""

from __future__ import annotations

import math

import hypothesis.strategies as st
import pytest
from hypothesis import assume, given

from rpeg_core.report.pareto import LEAST_BULGE, frontier, knee

values = st.integers(1, 6)


def test_the_frontier_of_a_drawn_case() -> None:
    """Speed upwards, cost to the right::

    5 .   .   .   d
    4 .   c   .   .
    3 .   .   .   e
    2 a   .   .   .
    1 b   .   .   .
      1   2   3   4
    """
    points = {"a": (1, 2), "b": (1, 1), "c": (2, 4), "d": (4, 5), "e": (4, 3)}
    marks = dict(zip(points, frontier(list(points.values())), strict=True))
    assert marks == {"a": True, "b": False, "c": True, "d": True, "e": False}


def test_equal_points_are_both_on_the_frontier() -> None:
    assert frontier([(1, 1), (1, 1)]) == (True, True)


@given(st.lists(st.tuples(values, values), min_size=1, max_size=8))
def test_a_point_is_off_the_frontier_exactly_when_one_on_it_beats_it(points) -> None:
    marks = frontier(points)
    best = [point for point, mark in zip(points, marks, strict=True) if mark]
    assert best
    for point, mark in zip(points, marks, strict=True):
        beaten = any(b != point and b[0] <= point[0] and b[1] >= point[1] for b in best)
        assert mark is not beaten


def test_the_knee_of_a_drawn_case() -> None:
    """Doubling GPUs: scaled x 0, 1/7, 3/7, 1; scaled tok/s 0, 0.4, 0.8, 1; above the diagonal 0, 0.257, 0.371, 0."""
    assert knee([(8, 10.0), (16, 18.0), (32, 26.0), (64, 30.0)]) == 2


def test_the_knee_of_kneedles_own_figure() -> None:
    """f(x) = -1/(x + 0.1) + 5 on [0, 1]: the paper finds the knee at x = 0.22, of these points 0.2 is the nearest."""
    curve = [(x / 10, -1 / (x / 10 + 0.1) + 5) for x in range(11)]
    assert curve[knee(curve)][0] == pytest.approx(0.2)


@pytest.mark.parametrize(
    "curve",
    [
        [],
        [(8, 1.0), (16, 1.9)],
        [(8, 1.0), (16, 2.0), (32, 4.0)],
        [(8, 1.0), (16, 2.02), (32, 4.0)],
        [(8, 3.0), (16, 3.0), (32, 3.0)],
        [(8, 1.0), (16, 1.1), (32, 4.0)],
        [(8, 3.0), (16, 2.0), (32, 1.0)],
    ],
    ids=["empty", "two points", "straight", "almost straight", "flat", "hollow", "falling"],
)
def test_no_knee(curve) -> None:
    assert knee(curve) is None


@given(st.lists(st.tuples(values, values), min_size=3, max_size=8))
def test_the_knee_is_farthest_from_the_chord(steps) -> None:
    """Measured as the distance to the line through the ends of the scaled curve, for any units of both axes."""
    x, y, curve = 0, 0, []
    for width, height in steps:
        x, y = x + width, y + height
        curve.append((x, y))
    found = knee(curve)
    assert found == knee([(64.0 * x, 1e3 * y) for x, y in curve])
    (x0, y0), (x1, y1) = curve[0], curve[-1]
    scaled = [((x - x0) / (x1 - x0), (y - y0) / (y1 - y0)) for x, y in curve]
    distances = [(y - x) / math.sqrt(2) for x, y in scaled]
    assume(min(abs(d * math.sqrt(2) - LEAST_BULGE) for d in distances) > 1e-9)
    if found is None:
        assert max(distances) * math.sqrt(2) < LEAST_BULGE
    else:
        assert distances[found] == pytest.approx(max(distances))
