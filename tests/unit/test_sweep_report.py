"""What a sweep's report marks, says and draws, from rows made by hand."""

from __future__ import annotations

import csv
import io
import xml.etree.ElementTree as ElementTree
from types import SimpleNamespace

import attrs
import pytest

from rpeg_core.accuracy.draws import Interval
from rpeg_core.accuracy.extrapolation import Extrapolation
from rpeg_core.accuracy.intervals import PlanIntervals
from rpeg_core.planning.structures import Structure
from rpeg_core.planning.sweep import Found, Point, Row
from rpeg_core.report.scatter import Line, Scatter, ascii_lines, number, rich_lines, svg, ticks
from rpeg_core.report.sweep import (
    analyse,
    csv_text,
    documents,
    interval_sentences,
    knee_sentences,
    label,
    table,
    without_plan,
)

INTERVALS = PlanIntervals(
    step_s=Interval(1.5, 4.875),
    tokens_per_s=Interval(600.0, 1300.0),
    operator_s={},
    unknown={},
    extrapolations=(
        Extrapolation(role="training", feature="gpus", value=2048.0, measured=(8.0, 1536.0)),
        Extrapolation(role="training", feature="hardware", value="x", measured=("y", "z")),
    ),
)

SPEEDS = {8: 10_000, 16: 18_000, 32: 26_000, 64: 30_000}


def row(gpus, tokens_per_s, hardware="gh200", price=None, structure=None, **point):
    values = {"hardware": hardware, "gpus": gpus, "prompts": 256, "response_tokens": 1024, **point}
    if tokens_per_s is None:
        return Row(point=Point(**values), why="too [bold] small")
    evaluation = SimpleNamespace(
        tokens_per_s=tokens_per_s, makespan_s=16.0, peak_ratio=0.5, used_gpus=gpus, utilization=0.9
    )
    memory = SimpleNamespace(peak=SimpleNamespace(peak_bytes=45.9e9))
    plan = Found(
        structure=structure or Structure(staleness=(("actor", 1), ("critic", 0)), actor_critic_sharing=True),
        assignments={},
        prediction=SimpleNamespace(evaluation=evaluation, memory=memory),
        steps=8,
        gap=0.03,
        limit="",
        intervals=INTERVALS,
    )
    return Row(point=Point(**values, price_per_gpu_hour=price), found=plan)


def remarks(analysis):
    return [cells[-1] for cells in table(analysis).rows]


def test_without_prices_hardware_is_not_compared() -> None:
    """At 64 GPUs h100 is slower than gh200 at 32, but a GPU hour of one is not one of the other."""
    rows = [row(8, 1000), row(16, 1500), row(8, 900, "h100"), row(16, 800, "h100")]
    assert analyse(rows).pareto == (True, True, True, False)


def test_with_prices_hardware_is_compared_by_what_a_token_costs() -> None:
    rows = [row(8, 1000, price=2.0), row(16, 1500, price=2.0), row(8, 1500, "h100", price=3.5)]
    assert analyse(rows).pareto == (True, False, True)
    assert not analyse([*rows, row(16, 1600, "h200")]).priced


def test_other_workloads_are_not_compared() -> None:
    rows = [row(8, 1000), row(16, 900), row(8, 2000, prompts=512), row(16, 2500, prompts=512), row(8, 9000, prompts=1)]
    assert analyse(rows).pareto == (True, False, True, True, None)


def test_the_knee_of_each_curve_is_marked_and_named() -> None:
    rows = [row(gpus, speed) for gpus, speed in SPEEDS.items()]
    rows += [row(gpus, 100 * gpus, "h100") for gpus in SPEEDS]
    analysis = analyse(rows)
    assert [knee.point.gpus for knee in analysis.knees] == [32]
    assert [text.endswith("knee") for text in remarks(analysis)] == [False, False, True, *[False] * 5]
    assert knee_sentences(analysis) == [
        "gh200: knee: 32 GPUs with 26,000 tok/s; up to there each GPU adds 500 tok/s, from there to 64 125",
        "h100: no knee: tok/s rise almost in a straight line with GPUs, or not at all",
    ]


def test_a_point_without_a_plan_is_a_row_with_its_reason() -> None:
    rows = [row(8, None), row(16, 1000), row(32, 1900)]
    analysis = analyse(rows)
    assert remarks(analysis) == ["does not fit", "Pareto", "Pareto"]
    assert without_plan(analysis).rows == (("8 GPUs", "does not fit", "too [bold] small"),)
    assert without_plan(analyse(rows[1:])) is None


def test_the_table_shows_costs_only_where_all_are_known() -> None:
    names = [column.name for column in table(analyse([row(8, 1000, price=3.6), row(16, 1500, price=3.6)])).columns]
    assert names[:6] == ["GPUs", "tok/s", "per GPU", "step", "$/Mtok", "$/step"]
    cells = table(analyse([row(8, 1000, price=3.6), row(16, 1500, price=3.6)])).rows[0]
    assert cells == (
        "8",
        "1,000",
        "125",
        "2.00 s",
        "8.00",
        "0.016",
        "1/0 shared",
        "≤ 3.0%",
        "45.9 GB",
        "Pareto",
    )
    assert "$/Mtok" not in [column.name for column in table(analyse([row(8, 1000), row(16, 1500)])).columns]


def test_intervals_are_explained_once_and_extrapolation_is_said_where_it_happens() -> None:
    rows = [row(8, 1000), row(16, 1500), row(32, None)]
    rows[0] = attrs.evolve(
        rows[0], found=attrs.evolve(rows[0].found, intervals=attrs.evolve(INTERVALS, extrapolations=()))
    )
    assert interval_sentences(analyse(rows)) == [
        "step: 90% interval ×0.75 to ×2.44 of the time that is predicted, from the errors of measured runs "
        "(docs/validation.md); points share them and are surer beside each other",
        "16 GPUs: extrapolates: training at 2,048 GPUs, measured 8 to 1,536; on x, measured on y and z",
    ]


def test_the_csv_file_and_the_document_agree() -> None:
    analysis = analyse([row(8, None), row(16, 1000), row(32, 2000, price=1.5)])
    read = list(csv.DictReader(io.StringIO(csv_text(analysis))))
    assert "plan" not in read[0]
    for line, document in zip(read, documents(analysis), strict=True):
        for name, value in document.items():
            if name != "plan":
                assert line[name] == ("" if value is None else str(value))


def test_a_label_names_what_is_asked_for() -> None:
    point = row(8, 1000).point
    assert label(point, ["prompts", "gpus", "hardware"]) == "gh200, 8 GPUs, 256 prompts"


def picture(**options):
    lines = (
        Line(name="a", points=((8, 10_000), (16, 20_000), (32, 30_000), (64, 80_000)), knee=2),
        Line(name="b", points=((8, 20_000), (64, 20_000))),
    )
    return Scatter(x_name="GPUs", y_name="tok/s", lines=lines, x_ticks=(8, 16, 32, 64), **options)


def test_points_lie_where_their_logarithms_say() -> None:
    lines = ascii_lines(picture(proportional=True), width=52)
    start = lines[0].index("|") + 1
    columns = len(lines[16]) - start
    at = {
        (doublings_x, doublings_y): lines[15 - 5 * doublings_y][start + round(doublings_x / 3 * (columns - 1))]
        for doublings_x, doublings_y in [(0, 0), (1, 1), (3, 3), (0, 1), (3, 1)]
    }
    assert at == {(0, 0): "o", (1, 1): "o", (3, 3): "o", (0, 1): "x", (3, 1): "x"}
    assert sum(line.count("K") for line in lines[:16]) == 1
    assert [line[:6] for line in lines[:16] if "+" in line] == [" 50k +", " 20k +", " 10k +"]
    assert lines[-1] == " :  in proportion to the first point"
    assert max(map(len, lines)) <= 52


def test_the_picture_of_a_terminal_says_the_same() -> None:
    for options in ({}, {"proportional": True}):
        drawn = [text.plain for text in rich_lines(picture(**options), width=60)]
        marks = str.maketrans({"●": "o", "▲": "x", "│": "|", "─": "-", "┤": "+", "·": ".", "˙": ":"})
        assert [line.translate(marks) for line in drawn] == ascii_lines(picture(**options), width=60)


def test_one_point_twice_is_drawn_too() -> None:
    same = Scatter(x_name="$", y_name="tok/s", lines=(Line(name="", points=((0.2, 5.0), (0.2, 5.0))),))
    assert any("o" in line for line in ascii_lines(same, width=40))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [
        (10_000, 80_000, [10_000, 20_000, 50_000]),
        (0.15, 0.5, [0.15, 0.2, 0.25, 0.3, 0.4, 0.5]),
        (1.01, 1.02, [1.01, 1.02]),
    ],
)
def test_ticks_are_round(low, high, expected) -> None:
    assert ticks(low, high, 6) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("value", "text"), [(512, "512"), (12_000, "12k"), (1.5e6, "1.5M"), (0.25, "0.25"), (9500, "9500"), (1.25, "1.25")]
)
def test_numbers_of_axes_are_short(value, text) -> None:
    assert number(value) == text


def test_the_svg_picture_has_every_curve_and_is_reproducible() -> None:
    text = svg([picture(proportional=True), picture()])
    root = ElementTree.fromstring(text)
    words = ["".join(node.itertext()).strip() for node in root.iter("{http://www.w3.org/2000/svg}text")]
    assert [words.count(name) for name in ("a", "b", "knee", "GPUs", "tok/s")] == [2] * 5
    assert text == svg([picture(proportional=True), picture()])
