"""Numbers as people read them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpeg_core.report import words


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0 s"),
        (1, "1.00 s"),
        (12.345, "12.3 s"),
        (99.96, "100 s"),
        (1234.5, "1,234 s"),
        (0.9999, "1.00 s"),
        (0.0456, "45.6 ms"),
        (7.89e-6, "7.89 µs"),
        (1e-9, "0.00 µs"),
    ],
)
def test_seconds(value, text) -> None:
    assert words.seconds(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0, "0 B"), (512, "512 B"), (1.5e3, "1.50 kB"), (16.06e9, "16.1 GB"), (2.5e12, "2.50 TB")]
)
def test_sizes(value, text) -> None:
    assert words.size(value) == text


@pytest.mark.parametrize(
    ("share", "text"), [(0, "0%"), (0.001, "0.1%"), (0.0994, "9.9%"), (0.5, "50%"), (1.234, "123%")]
)
def test_percent(share, text) -> None:
    assert words.percent(share) == text


@pytest.mark.parametrize(
    ("parts", "text"), [([], ""), (["a"], "a"), (["a", "b"], "a and b"), (["a", "b", "c"], "a, b and c")]
)
def test_listing(parts, text) -> None:
    assert words.listing(parts) == text


def test_the_rest() -> None:
    assert words.gigabytes(91.8e9) == "91.8 GB"
    assert words.tokens_per_s(88617.4) == "88,617 tok/s"
    assert words.tokens_per_s(0.1234) == "0.12 tok/s"
    assert words.times(1.2) == "×1.20"
    assert (words.plural(1, "GPU"), words.plural(1024, "GPU")) == ("1 GPU", "1,024 GPUs")


@given(st.floats(0, 3), st.integers(1, 40))
def test_a_bar_is_as_long_as_asked_and_shows_what_is_there(share, width) -> None:
    bar = words.bar(share, width)
    filled = bar.count("█")
    assert len(bar) == width
    assert bar == "█" * filled + "░" * (width - filled)
    assert (filled == 0) == (share == 0)
    assert abs(filled - min(share, 1) * width) <= 1
