"""Pictures of a number by step, against drawn cases."""

from __future__ import annotations

import math

from rpeg_core.report.curve import chart, sparkline


def test_a_sparkline_has_one_character_per_value_and_the_extremes_are_the_ends() -> None:
    assert sparkline([0, 7, 3.5], width=10) == "▁█▅"
    assert sparkline([1, 1], width=10) == "▅▅"
    assert sparkline([], width=10) == ""
    assert sparkline([0, math.nan, 1], width=10) == "▁ █"


def test_more_values_than_columns_are_averaged() -> None:
    assert sparkline([0, 0, 8, 8], width=2) == "▁█"
    assert len(sparkline(list(range(1000)), width=60)) == 60


def test_a_chart_is_drawn_with_its_range_and_its_steps() -> None:
    assert chart([0.0, 0.5, 1.0, 1.0], first=1, width=20, height=3, ascii_only=True) == [
        "1 |  ##",
        "  | ###",
        "0 |####",
        "   1  4",
    ]


def test_a_chart_without_a_finite_value_is_empty() -> None:
    assert chart([math.nan], first=0, width=10) == []
    assert chart([], first=0, width=10) == []
