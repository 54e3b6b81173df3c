"""What a report is made of: titled tables and free lines, drawn on a terminal or written plainly into a pipe."""

from __future__ import annotations

import io
import re
from typing import TYPE_CHECKING

import attrs

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Column", "Grid", "draw", "plain", "terminal_width"]

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


@attrs.frozen
class Column:
    """A heading; numbers are aligned ``right``; what is ``drawn`` (a bar) is left out in a pipe."""

    name: str
    right: bool = False
    drawn: bool = False


@attrs.frozen(kw_only=True)
class Grid:
    """A table of text. ``styles`` gives the rows that need one a rich style."""

    title: str
    columns: tuple[Column, ...]
    rows: tuple[tuple[str, ...], ...]
    styles: tuple[tuple[int, str], ...] = ()

    def rich(self) -> RenderableType:
        """The table for a terminal: nothing is cut, long cells are folded."""
        from rich.box import SIMPLE_HEAD
        from rich.table import Table
        from rich.text import Text

        table = Table(
            box=SIMPLE_HEAD, show_edge=False, pad_edge=False, title=Text(self.title, style="bold"), title_justify="left"
        )
        for column in self.columns:
            justify = "right" if column.right else "left"
            table.add_column(Text(column.name, style="bright_black"), justify=justify, overflow="fold")
        styles = dict(self.styles)
        for index, row in enumerate(self.rows):
            table.add_row(*(Text(plain(cell)) for cell in row), style=styles.get(index))
        return table

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
