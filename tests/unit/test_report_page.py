"""Tables on narrow terminals: what is cut where."""

from __future__ import annotations

import re
from collections import Counter

import pytest

from rpeg_core.report.page import Column, Grid, draw

COLUMNS = (Column("operator"), Column("GPUs"), Column("microbatches", right=True), Column("length phases"))
ROWS = (
    ("reference_inference", "0-15", "8", "12.3 s + 4.5 s"),
    ("  GEMM", "0-15", "8", ""),
)


def drawn(width: int, columns: tuple[Column, ...] = COLUMNS, rows: tuple[tuple[str, ...], ...] = ROWS) -> list[str]:
    text = re.sub(r"\x1b\[[0-9;]*m", "", draw(Grid(title="plan", columns=columns, rows=rows).rich(width), width=width))
    return [line.rstrip() for line in text.splitlines()]


def test_a_table_that_fits_has_one_line_for_each_row() -> None:
    assert drawn(60) == [
        "plan",
        "operator              GPUs   microbatches   length phases",
        "\u2500" * 58,
        "reference_inference   0-15              8   12.3 s + 4.5 s",
        "  GEMM                0-15              8",
    ]


def test_names_go_on_after_a_separator_and_text_at_a_blank() -> None:
    assert drawn(45) == [
        "plan",
        "                                   length",
        "operator     GPUs   microbatches   phases",
        "\u2500" * 45,
        "reference_   0-15              8   12.3 s +",
        "inference                          4.5 s",
        "  GEMM       0-15              8",
    ]


def test_nothing_is_cut_where_even_the_parts_do_not_fit() -> None:
    found = Counter("".join(drawn(30)[1:]))
    for cells in ([column.name for column in COLUMNS], *ROWS):
        found.subtract("".join(cells).replace(" ", ""))
    assert min(found.values()) >= 0
    assert set(found.elements()) <= {" ", "\u2500"}


@pytest.mark.parametrize("width", range(41, 60))
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    lines = drawn(width)
    assert max(map(len, lines)) <= width
    assert "reference_" in "".join(lines)


def test_numbers_stay_whole() -> None:
    """Separators stand between the parts of names; in numbers and ranges they are decimal points, dashes and signs."""
    cells = ("actor_generation", "140.3 GB", "2.51 s (320-14,000)", "-0.5%")
    columns = (Column("operator"), *(Column(name, right=True) for name in ("peak", "time", "change")))
    words = " ".join(drawn(46, columns, (cells,))[3:]).split()
    assert {"140.3", "GB", "2.51", "(320-14,000)", "-0.5%"} <= set(words)
