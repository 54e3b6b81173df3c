"""A schedule as a Gantt chart in text: one row per group of GPUs that always work together.

On a terminal a block is coloured by operator and bears its letter and step; in a pipe the same chart is plain
ASCII: ``A0====B0==`` is operator A of step 0, then operator B. Transfers are ``~`` (COMM) and ``#`` (RESHARD).
A cell shows what holds its GPUs for the largest part of its time.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

import attrs

from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.lower import NodeKind
from rpeg_core.report import words

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Block", "Chart", "Row", "ascii_lines", "chart", "rich_lines"]

LETTERS = "ABCDEFGHIJKLMNOPQRSTUVWXYZ"
COLOURS = (
    ("#7cc4ff", "#4f9bd8"),
    ("#ffb454", "#d98a2b"),
    ("#7bd88f", "#4fb066"),
    ("#d0a8ff", "#a97fdc"),
    ("#f5e05e", "#cbb63a"),
    ("#ff8f87", "#d9645c"),
    ("#6fe3d6", "#43b5a9"),
    ("#c8c8c8", "#9a9a9a"),
)
"""Of an operator in even and in odd steps, so that neighbouring blocks stay apart."""

TRANSFER_CELL = {NodeKind.COMM: "~", NodeKind.RESHARD: "#"}
MIN_COLUMNS = 24


@attrs.frozen(kw_only=True)
class Block:
    """GPUs held from ``start_s`` to ``finish_s`` by an operator (its index) or a transfer for it."""

    start_s: float
    finish_s: float
    kind: NodeKind
    operator: int
    step: int


@attrs.frozen(kw_only=True)
class Row:
    """GPUs with the same blocks; ``gpus`` is e.g. ``0-15``."""

    gpus: str
    blocks: tuple[Block, ...]


@attrs.frozen(kw_only=True)
class Chart:
    """The first ``steps`` of ``horizon_steps`` steps, up to ``end_s``."""

    operators: tuple[str, ...]
    rows: tuple[Row, ...]
    end_s: float
    steps: int
    horizon_steps: int

    @property
    def heading(self) -> str:
        return f"schedule of the first {words.plural(self.steps, 'step')} of {self.horizon_steps}"


def chart(prediction: Prediction, *, steps: int = 3) -> Chart:
    """The chart of a prediction's first ``steps`` steps; what later steps already do by then is drawn too."""
    graph, result = prediction.graph, prediction.schedule
    steps = min(steps, graph.steps)
    end = max(result.finish_s[n.index] for n in graph.nodes if n.step < steps)
    index = {op.name: i for i, op in enumerate(graph.rpeg.operators)}
    blocks: list[list[Block]] = [[] for _ in range(result.segments.count)]
    for i in result.order:
        node = graph.nodes[i]
        if result.start_s[i] >= end or result.finish_s[i] == result.start_s[i]:
            continue
        block = Block(
            start_s=result.start_s[i],
            finish_s=min(result.finish_s[i], end),
            kind=node.kind,
            operator=index[node.operator],
            step=node.step,
        )
        for segment in result.segments.within(node.allocation):
            blocks[segment].append(block)
    return Chart(
        operators=tuple(index),
        rows=tuple(_merged(result.segments.bounds, blocks)),
        end_s=end,
        steps=steps,
        horizon_steps=graph.steps,
    )


def _merged(bounds: tuple[int, ...], blocks: list[list[Block]]) -> Iterator[Row]:
    """Neighbouring segments with equal blocks are one row."""
    first = 0
    for segment in range(1, len(blocks) + 1):
        if segment == len(blocks) or blocks[segment] != blocks[first]:
            start, last = bounds[first], bounds[segment] - 1
            yield Row(gpus=str(start) if start == last else f"{start}-{last}", blocks=tuple(blocks[first]))
            first = segment


@attrs.frozen(kw_only=True)
class _Run:
    """Neighbouring cells of one block; ``block`` None is idle."""

    cells: int
    block: Block | None

    @property
    def label(self) -> str:
        """Letter and step, cut to the run's width."""
        return "" if self.block is None else f"{LETTERS[self.block.operator % 26]}{self.block.step}"[: self.cells]


def _runs(row: Row, end_s: float, columns: int) -> Iterator[_Run]:
    cell_s = end_s / columns
    held: list[Block | None] = []
    for column in range(columns):
        start, stop = column * cell_s, (column + 1) * cell_s
        shares = [(min(b.finish_s, stop) - max(b.start_s, start), b) for b in row.blocks]
        busy = [(share, block) for share, block in shares if share > 0]
        idle = cell_s - sum(share for share, _ in busy)
        share, block = max(busy, key=lambda item: item[0], default=(0.0, None))
        held.append(block if share > idle else None)
    start = 0
    for column in range(1, columns + 1):
        if column == columns or held[column] is not held[start]:
            yield _Run(cells=column - start, block=held[start])
            start = column


def ascii_lines(picture: Chart, *, width: int) -> list[str]:
    """The chart in plain ASCII, ``width`` columns wide."""
    label, columns = _columns(picture, width)
    lines = []
    for row in picture.rows:
        cells = "".join(_ascii(run) for run in _runs(row, picture.end_s, columns))
        lines.append(f"{_name(row):<{label}} |{cells}|")
    lines.append(_axis(picture, label + 1, columns))
    lines.extend(f"{LETTERS[i % 26]}  {name}" for i, name in enumerate(picture.operators))
    lines.extend(f"{mark}  {meaning}" for mark, meaning in _transfers(picture))
    return lines


def _ascii(run: _Run) -> str:
    if run.block is None:
        return " " * run.cells
    if run.block.kind is not NodeKind.OP:
        return TRANSFER_CELL[run.block.kind] * run.cells
    return run.label.ljust(run.cells, "=")


def rich_lines(picture: Chart, *, width: int) -> list[Text]:
    """The chart for a terminal, ``width`` columns wide."""
    from rich.text import Text

    label, columns = _columns(picture, width)
    lines = []
    for row in picture.rows:
        line = Text(f"{_name(row):<{label}} ")
        for run in _runs(row, picture.end_s, columns):
            if run.block is None:
                line.append("·" * run.cells, style="bright_black")
            elif run.block.kind is not NodeKind.OP:
                line.append(TRANSFER_CELL[run.block.kind] * run.cells, style=_colour(run.block.operator))
            else:
                colour = _colour(run.block.operator, run.block.step)
                line.append(run.label.ljust(run.cells), style=f"black on {colour}")
        lines.append(line)
    lines.append(Text(_axis(picture, label, columns), style="bright_black"))
    legend = Text()
    for i, name in enumerate(picture.operators):
        entry = Text.assemble((f" {LETTERS[i % 26]} ", f"black on {_colour(i)}"), f" {name}   ")
        if legend and len(legend.plain.rsplit("\n")[-1]) + len(entry) > width:
            legend.append("\n")
        legend.append_text(entry)
    lines.append(legend)
    lines.extend(Text(f" {mark}  {meaning}", style="bright_black") for mark, meaning in _transfers(picture))
    return lines


def _name(row: Row) -> str:
    return f"GPU {row.gpus}" if row.gpus.isdigit() else f"GPUs {row.gpus}"


def _colour(operator: int, step: int = 0) -> str:
    return COLOURS[operator % len(COLOURS)][step % 2]


def _columns(picture: Chart, width: int) -> tuple[int, int]:
    label = max(len(_name(row)) for row in picture.rows)
    return label, max(MIN_COLUMNS, width - label - 3)


def _axis(picture: Chart, label: int, columns: int) -> str:
    """``0 s`` under the first cell, the middle in the middle, the end under the last."""
    middle, end = words.seconds(picture.end_s / 2), words.seconds(picture.end_s)
    room = columns - len("0 s") - len(middle) - len(end)
    left = max(1, columns // 2 - len(middle) // 2 - len("0 s"))
    return " " * (label + 1) + "0 s" + " " * left + middle + " " * max(1, room - left) + end


def _transfers(picture: Chart) -> list[tuple[str, str]]:
    kinds = {block.kind for row in picture.rows for block in row.blocks}
    names = {NodeKind.COMM: "transfer (COMM)", NodeKind.RESHARD: "weights to another layout (RESHARD)"}
    return [
        (TRANSFER_CELL[kind], f"{name}, drawn where it fills a column") for kind, name in names.items() if kind in kinds
    ]
