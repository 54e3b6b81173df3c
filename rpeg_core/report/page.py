"""What a report is made of: titled tables and free lines, drawn on a terminal or written plainly into a pipe."""

from __future__ import annotations

import enum
import io
import re
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Column", "Grid", "Grouping", "draw", "plain", "terminal_width"]

COLUMN_GAP = 3
"""What rich puts between two columns of a table without edges."""

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
        """The table for a terminal: nothing is cut, long cells are folded; bars are left out where there is no room."""
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
        for index in kept:
            column = columns[index]
            justify = "right" if column.right else "left"
            table.add_column(Text(column.name, style="bright_black"), justify=justify, overflow="fold")
        for row, style in rows:
            table.add_row(*(Text(plain(row[index])) for index in kept), style=style)
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
