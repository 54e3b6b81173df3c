"""What a report is made of: titled tables and free lines, drawn on a terminal or written plainly into a pipe."""

from __future__ import annotations

import enum
import io
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Column", "Grid", "Grouping", "draw", "plain", "terminal_width"]

COLUMN_GAP = 3
"""What rich puts between two columns of a table without edges."""

_NUMBER = r"(?:(?<=\d)[.-]|(?<![^ (])-)(?=\d)"
_LETTER = rf"(?:[^ _./-]|{_NUMBER})"
_PARTS = re.compile(rf" +|{_LETTER}*(?:(?!{_NUMBER})[_./-])+|{_LETTER}+")
"""Blanks, and what may stand in a line of its own: words, numbers, and parts of names with the separator after them."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@attrs.frozen
class Column:
    """A heading; numbers are aligned ``right``; what is ``drawn`` (a bar) is left out in a pipe."""

    name: str
    right: bool = False
    drawn: bool = False


class Grouping(enum.Enum):
    """How a terminal shows rows whose first cells are equal; a pipe shows them in full."""

    NONE = "none"
    HEADED = "headed"  # the first cell is a line of its own, the rows below are indented
    FIRST_ROW = "first row"  # the first row of a group stands for the group, its second cell gives way to the first


@attrs.frozen(kw_only=True)
class Grid:
    """A table of text. ``styles`` gives the rows that need one a rich style."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    styles: tuple[tuple[int, str], ...] = ()
    grouping: Grouping = Grouping.NONE

    def rich(self, width: int) -> RenderableType:
        """The table for a terminal: nothing is cut; bars are left out where there is no room.

        Long cells go on in the next line, at a blank or inside a name after one of ``_ . / -``; in the midst of a word
        only where the longest words of all columns do not fit side by side.
        """
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        columns, rows = self._grouped()
        natural = sum(
            max(len(cell) for cell in (column.name, *(row[index] for row, _ in rows))) + COLUMN_GAP
            for index, column in enumerate(columns)
        )
        kept = [index for index, column in enumerate(columns) if not column.drawn or natural <= width]
        table = Table(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, title=Text(self.title, style="bold"), title_justify="left"
        )
        shown = [[plain(row[index]) for index in kept] for row, _ in rows]
        names = [columns[index].name for index in kept]
        widths = _widths([names, *shown], width - COLUMN_GAP * (len(kept) - 1))
        for index, name, room in zip(kept, names, widths, strict=True):
            justify = "right" if columns[index].right else "left"
            heading = Text(_broken(name, room), style="bright_black")
            table.add_column(heading, justify=justify, overflow="fold", width=room)
        for cells, (_, style) in zip(shown, rows, strict=True):
            table.add_row(*(Text(_broken(cell, room)) for cell, room in zip(cells, widths, strict=True)), style=style)
        return table

    def _grouped(self) -> tuple[tuple[Column, ...], list[tuple[tuple[str, ...], str | None]]]:
        """Columns and styled rows as a terminal shows them."""
        styles = dict(self.styles)
        if self.grouping is Grouping.NONE:
            return self.columns, [(row, styles.get(index)) for index, row in enumerate(self.rows)]
        shown: list[tuple[tuple[str, ...], str | None]] = []
        group: str | None = None
        for index, (first, second, *rest) in enumerate(self.rows):
            if first != group and self.grouping is Grouping.HEADED:
                shown.append(((first, *("" for _ in rest)), "bold"))
            is_head = first != group and self.grouping is Grouping.FIRST_ROW
            shown.append(((first if is_head else f"  {second}", *rest), styles.get(index)))
            group = first
        return (attrs.evolve(self.columns[1], name=self.columns[0].name), *self.columns[2:]), shown

    def written(self) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
        """Headings and rows for a pipe."""
        kept = [index for index, column in enumerate(self.columns) if not column.drawn]
        rows = tuple(tuple(row[index] for index in kept) for row in self.rows)
        return tuple(self.columns[index].name for index in kept), rows


def _widths(rows: Sequence[Sequence[str]], room: int) -> list[int | None]:
    """How wide each column is so that all fit: the widest give way, down to their longest part.

    None, for whoever draws the table to decide, where even the parts do not fit.
    """
    columns = list(zip(*rows, strict=True))
    widths = [max([1, *map(len, cells)]) for cells in columns]
    parts = [[part for cell in cells for part in _PARTS.findall(cell) if part.strip()] for cells in columns]
    least = [max([1, *map(len, found)]) for found in parts]
    if sum(least) > room:
        return [None] * len(widths)
    for _ in range(max(0, sum(widths) - room)):
        widest = max(range(len(widths)), key=lambda i: (widths[i] > least[i], widths[i]))
        widths[widest] -= 1
    return list(widths)


def _broken(text: str, width: int | None) -> str:
    """``text`` in lines of at most ``width`` that end between its parts; indentation is kept in all of them."""
    if width is None or len(text) <= width:
        return text
    indent = text[: len(text) - len(text.lstrip(" "))]
    lines = [indent]
    for part in _PARTS.findall(text[len(indent) :]):
        if len(lines[-1].rstrip(" ")) > len(indent) and len(lines[-1]) + len(part.rstrip(" ")) > width:
            lines.append(indent)
            part = part.lstrip(" ")
        lines[-1] += part
    return "\n".join(line.rstrip(" ") for line in lines)


def plain(text: object) -> str:
    """``text`` without control characters."""
    return _CONTROL.sub(" ", str(text))


def draw(renderable: RenderableType, *, width: int | None = None) -> str:
    """A rich renderable as terminal text with colours (none when ``NO_COLOR`` is set); no trailing blanks."""
    from rich.console import Console

    target = io.StringIO()
    Console(file=target, force_terminal=True, width=width or terminal_width(), highlight=False).print(renderable)
    return "\n".join(line.rstrip() for line in target.getvalue().splitlines())


def terminal_width() -> int:
    """Columns of the terminal, 80 when unknown."""
    import shutil

    return shutil.get_terminal_size((80, 24)).columns
