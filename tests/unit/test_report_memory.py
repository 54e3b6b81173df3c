"""Memory tables and the sentence that says why something does not fit."""

from __future__ import annotations

import re

from rpeg_core.costing.memory import DeviceMemory, MemoryItem, Phase, SegmentMemory
from rpeg_core.report.memory import largest_terms, memory_details, memory_overview, out_of_memory
from rpeg_core.report.page import Column, Grid, Grouping, draw
from rpeg_core.spec.machine import Allocation


def item(operator: str, quantity: str, gigabytes: float, *, persistent: bool) -> MemoryItem:
    return MemoryItem(model="actor", operator=operator, quantity=quantity, bytes=gigabytes * 1e9, persistent=persistent)


CROWDED = SegmentMemory(
    gpus=Allocation(0, 16),
    peak_bytes=100e9,
    moment="actor_training",
    phase=Phase.PASSES,
    items=(
        item("actor_training", "weights", 5, persistent=False),
        item("actor_training", "optimizer state", 60, persistent=True),
        item("actor_training", "activations", 20, persistent=False),
        item("actor_training", "gradients", 15, persistent=False),
    ),
)
IDLE = SegmentMemory(gpus=Allocation(16, 17), peak_bytes=0.0, moment=None, items=())
MEMORY = DeviceMemory(segments=(CROWDED, IDLE))


def test_the_largest_terms_name_the_model_of_what_stays_and_the_operator_of_what_does_not() -> None:
    assert largest_terms(CROWDED) == (
        "actor optimizer state 60.0 GB, actor_training activations 20.0 GB, actor_training gradients 15.0 GB, "
        "others 5.0 GB"
    )
    assert largest_terms(CROWDED, 4).endswith("actor_training weights 5.0 GB")


def test_out_of_memory_names_gpus_need_and_moment() -> None:
    assert out_of_memory(MEMORY, 90e9).startswith(
        "GPUs 0-15 need 100.0 GB of 90.0 GB while actor_training computes gradients: actor optimizer state 60.0 GB, "
    )
    alone = DeviceMemory(segments=(SegmentMemory(gpus=Allocation(3, 4), peak_bytes=2e9, moment="x", items=()),))
    assert out_of_memory(alone, 1e9).startswith("GPU 3 needs 2.0 GB of 1.0 GB while x runs")


def test_the_overview_marks_what_does_not_fit() -> None:
    grid = memory_overview(MEMORY, 90e9)
    assert grid.written() == (
        ("GPUs", "peak", "usable", "share", "while"),
        (
            ("0-15", "100.0 GB", "90.0 GB", "111%", "actor_training computes gradients"),
            ("16", "0.0 GB", "90.0 GB", "0%", "idle"),
        ),
    )
    assert grid.styles == ((0, "bold red"),)


def test_the_details_begin_each_group_with_its_peak() -> None:
    rows = memory_details(MEMORY, 90e9).rows
    assert [row[2] for row in rows] == ["peak", "weights", "optimizer state", "activations", "gradients", "peak"]
    assert rows[0] == ("GPUs 0-15", "", "peak", "while actor_training computes gradients", "100.0 GB", "111%")
    assert rows[1] == ("GPUs 0-15", "actor_training", "weights", "while running", "5.0 GB", "5.6%")
    assert rows[2] == ("GPUs 0-15", "actor", "optimizer state", "always", "60.0 GB", "67%")
    assert rows[5][3] == "idle"


def test_the_details_of_other_operators_are_left_out() -> None:
    assert memory_details(MEMORY, 90e9, ["actor_generation"]).rows == ()


def test_markup_and_control_characters_of_plugins_stay_text() -> None:
    grid = Grid(title="a [bold]title", columns=(Column("x [red]"),), rows=(("[blink]cell\x1b[31m\x07",),))
    text = draw(grid.rich(60), width=60)
    assert "a [bold]title" in text
    assert "x [red]" in text
    assert "[blink]cell [31m " in text or "[blink]cell [31m" in text
    assert "\x07" not in text


def test_long_cells_are_folded_not_cut() -> None:
    grid = Grid(title="t", columns=(Column("x"),), rows=(("word" * 40,),))
    text = draw(grid.rich(30), width=30)
    assert text.replace("\n", "").count("word") >= 35
    assert "…" not in text


ROWS = (("a", "total", "1"), ("a", "x", "2"), ("b", "y", "3"))
COLUMNS = (Column("group"), Column("term"), Column("value", right=True))


def lines(grid: Grid) -> list[str]:
    text = re.sub(r"\x1b\[[0-9;]*m", "", draw(grid.rich(40), width=40))
    return [line.rstrip() for line in text.splitlines()]


def test_groups_with_a_heading() -> None:
    grid = Grid(title="t", columns=COLUMNS, rows=ROWS, grouping=Grouping.HEADED)
    assert [line.split() for line in lines(grid)[3:]] == [["a"], ["total", "1"], ["x", "2"], ["b"], ["y", "3"]]
    assert lines(grid)[4].startswith("  total")


def test_groups_whose_first_row_is_the_heading() -> None:
    grid = Grid(title="t", columns=COLUMNS, rows=ROWS, grouping=Grouping.FIRST_ROW)
    assert [line.split() for line in lines(grid)[3:]] == [["a", "1"], ["x", "2"], ["b", "3"]]


def test_a_pipe_has_every_cell() -> None:
    grid = Grid(title="t", columns=COLUMNS, rows=ROWS, grouping=Grouping.HEADED)
    assert grid.written() == (("group", "term", "value"), ROWS)


def test_bars_give_way_where_there_is_no_room() -> None:
    grid = Grid(title="t", columns=(Column("x"), Column("bar", drawn=True)), rows=(("a" * 20, "█" * 20),))
    assert "█" in draw(grid.rich(46), width=46)
    assert "█" not in draw(grid.rich(45), width=45)
