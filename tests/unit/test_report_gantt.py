"""Gantt charts of schedules that are drawn by hand."""

from __future__ import annotations

from io import StringIO

import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from rpeg_core.passes.evaluate import EvaluationOptions, evaluate
from rpeg_core.report.gantt import ascii_lines, chart, rich_lines
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.strategies import configurations
from rpeg_core.testing.toys import on, toy_book, toy_mini, toy_plan, toy_transfer_term

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)


def predicted(plan, *, tau: int = 0, steps: int = 2, transfer=None):
    graph = toy_mini(tau=tau)
    seconds = {("actor", "generation"): 4.0, ("actor", "training"): 2.0}
    book = toy_book(graph, MACHINE, seconds=seconds, transfer=transfer or toy_transfer_term(bytes_per_s=1e12))
    return evaluate(graph, plan, book, EvaluationOptions(steps=steps))


COLOCATED = toy_plan(actor_generation=on(0, 2), actor_training=on(0, 2))
APART = toy_plan(actor_generation=on(0, 2), actor_training=on(2, 4))


def test_one_after_the_other() -> None:
    """24 columns for 12 s: generation has 8, training 4."""
    assert ascii_lines(chart(predicted(COLOCATED)), width=35) == [
        "GPUs 0-1 |A0======B0==A1======B1==|",
        "GPUs 2-3 |                        |",
        "          0 s      6.00 s   12.0 s",
        "A  actor_generation",
        "B  actor_training",
    ]


def test_side_by_side_with_idle_time() -> None:
    """tau = 1: generation of step 1 runs beside training of step 0; 10 s in 30 columns, 3 columns a second."""
    lines = ascii_lines(chart(predicted(APART, tau=1)), width=41)
    assert lines[:2] == [
        "GPUs 0-1 |A0==========A1==========      |",
        "GPUs 2-3 |            B0====      B1====|",
    ]


def test_a_transfer_is_drawn_where_it_fills_a_column() -> None:
    """6400 bytes at 1600 bytes/s: 4 s of COMM between 4 s of generation and 2 s of training, 10 s a step."""
    prediction = predicted(APART, tau=1, steps=1, transfer=toy_transfer_term(bytes_per_s=1600))
    lines = ascii_lines(chart(prediction), width=41)
    assert lines[:2] == [
        "GPUs 0-1 |A0==========                  |",
        "GPUs 2-3 |            ~~~~~~~~~~~~B0====|",
    ]
    assert lines[-1] == "~  transfer (COMM), drawn where it fills a column"


def test_a_weight_redistribution_has_its_own_mark() -> None:
    plan = toy_plan(actor_generation=on(0, 2), actor_training=on(0, 2, data=1, tensor=2))
    prediction = predicted(plan, transfer=toy_transfer_term(bytes_per_s=40_000))
    lines = ascii_lines(chart(prediction), width=61)
    assert "#" in lines[0]
    assert lines[-1] == "#  weights to another layout (RESHARD), drawn where it fills a column"


def test_only_the_first_steps_are_shown() -> None:
    picture = chart(predicted(COLOCATED, steps=8), steps=3)
    assert picture.end_s == pytest.approx(18.0)
    assert picture.heading == "schedule of the first 3 steps of 8"
    assert ascii_lines(picture, width=47)[0] == "GPUs 0-1 |A0======B0==A1======B1==A2======B2==|"


def test_what_later_steps_already_do_is_cut_at_the_end() -> None:
    picture = chart(predicted(APART, tau=1, steps=4), steps=1)
    assert picture.end_s == pytest.approx(6.0)
    assert ascii_lines(picture, width=35)[0] == "GPUs 0-1 |A0==============A1======|"


def test_neighbours_that_do_the_same_are_one_row() -> None:
    plan = toy_plan(actor_generation=on(0, 4), actor_training=on(0, 2))
    assert [row.gpus for row in chart(predicted(plan)).rows] == ["0-1", "2-3"]
    plan = toy_plan(actor_generation=on(0, 4), actor_training=on(0, 4))
    assert [row.gpus for row in chart(predicted(plan)).rows] == ["0-3"]


def text_of(lines, width: int) -> list[str]:
    console = Console(file=StringIO(), width=width, force_terminal=True, color_system=None)
    console.print(*lines, sep="\n")
    return console.file.getvalue().splitlines()


@given(configurations(max_operators=5), st.integers(40, 160))
def test_every_row_is_as_wide_as_asked_and_covers_its_busy_time(configuration, width) -> None:
    seconds = {
        (model.name, role): 1.0 + i
        for i, model in enumerate(configuration.rpeg.models)
        for role in ("generation", "inference", "training")
    }
    c = configuration
    book = toy_book(c.rpeg, c.machine, c.workload, seconds=seconds, axes=c.axes)
    prediction = evaluate(configuration.rpeg, configuration.plan, book, EvaluationOptions(steps=2))
    picture = chart(prediction)
    count = len(picture.rows)
    plain = ascii_lines(picture, width=width)
    assert {len(line) for line in plain[:count]} == {width}
    assert len(plain[count]) <= width
    drawn = text_of(rich_lines(picture, width=width), width + 40)
    assert len({len(line) for line in drawn[:count]}) == 1
    for row in picture.rows:
        for first, second in zip(row.blocks, row.blocks[1:], strict=False):
            assert first.finish_s <= second.start_s
    assert sum(b.finish_s - b.start_s for b in picture.rows[0].blocks) == pytest.approx(prediction.schedule.busy_s[0])
