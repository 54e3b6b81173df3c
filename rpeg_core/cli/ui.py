"""The console: the only module that writes to it.

Results go to stdout, progress and warnings to stderr. On a terminal tables are drawn by rich; in a pipe each
row is one line of tab-separated fields, complete. Text of plugins and users is never read as markup, and
control characters in it never reach the terminal.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, TextIO

from rpeg_core.errors import OutputError

if TYPE_CHECKING:
    from rich.console import Console

__all__ = [
    "escape",
    "forget_closed_terminals",
    "has_colour",
    "is_terminal",
    "is_terminal_for_progress",
    "live",
    "print_error",
    "print_fields",
    "print_json",
    "print_note",
    "print_table",
    "print_text",
    "print_warning",
    "progress",
    "terminals",
]

SCHEMA = 1
"""The schema number of JSON documents that name no other."""

_CONTROL = re.compile(r"[\x00-\x1f\x7f-\x9f]")


def is_terminal(stream: TextIO | None = None) -> bool:
    """Whether ``stream`` (default: stdout) is a terminal."""
    stream = sys.stdout if stream is None else stream
    return stream is not None and stream.isatty()  # None when the descriptor was closed


def is_terminal_for_progress() -> bool:
    """Whether stderr is a terminal, where progress is drawn."""
    return sys.stderr is not None and is_terminal(sys.stderr)


def has_colour() -> bool:
    """Whether stdout is a terminal that shows colours; https://no-color.org switches them off."""
    return is_terminal() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def escape(text: object) -> str:
    """``text`` for use inside rich markup."""
    from rich.markup import escape as escape_markup

    return escape_markup(_CONTROL.sub(" ", str(text)))


def print_text(text: str) -> None:
    """A result in plain text on stdout."""
    _write(sys.stdout, text)


def print_json(document: Mapping[str, object], *, schema: int = SCHEMA) -> None:
    """One document on stdout; ``schema`` becomes its first key."""
    _write(sys.stdout, json.dumps({"schema": schema, **document}, indent=2, allow_nan=False))


def print_table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """A table on stdout, the header first."""
    if not is_terminal():
        lines = [[_cell(value) for value in row] for row in (columns, *rows)]
        _write(sys.stdout, "\n".join("\t".join(line) for line in lines))
        return
    from rich.box import SIMPLE_HEAD
    from rich.table import Table
    from rich.text import Text

    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for index, column in enumerate(columns):
        numeric = all(_is_number(row[index]) for row in rows) and bool(rows)
        table.add_column(column, justify="right" if numeric else "left", overflow="fold")
    for row in rows:
        table.add_row(*(Text(_cell(value)) for value in row))
    _console().print(table)


def print_fields(fields: Mapping[str, object]) -> None:
    """Names and values on stdout, one pair a line."""
    width = max(map(len, fields), default=0) if is_terminal() else 0
    separator = "  " if is_terminal() else "\t"
    _write(
        sys.stdout,
        "\n".join(f"{name:<{width}}{separator}{_cell(value)}" for name, value in fields.items()),
    )


def print_note(text: str) -> None:
    """Something helpful on stderr."""
    _write(sys.stderr, text, result=False)


def print_warning(text: str) -> None:
    """One line on stderr, prefixed with ``warning:``."""
    _write(sys.stderr, f"warning: {_CONTROL.sub(' ', text)}", result=False)


def print_error(text: str) -> None:
    """The text of an error on stderr."""
    _write(sys.stderr, "\n".join(_CONTROL.sub(" ", line) for line in text.splitlines()), result=False)


@contextlib.contextmanager
def progress(description: str) -> Iterator[Callable[[str], None]]:
    """A line on stderr, on a terminal only: ``description``, then the text given last to what is yielded."""
    if not is_terminal_for_progress():
        yield lambda text: None
        return
    with _console(stderr=True).status(escape(description)) as status:
        yield lambda text: status.update(escape(f"{description}  {text}"))


@contextlib.contextmanager
def live() -> Iterator[Callable[[Sequence[str]], None]]:
    """Some lines on stderr, on a terminal only, that what is yielded replaces; they are gone at the end."""
    if not is_terminal_for_progress():
        yield lambda lines: None
        return
    from rich.live import Live
    from rich.text import Text

    with Live(console=_console(stderr=True), transient=True, refresh_per_second=8) as shown:
        yield lambda lines: shown.update(Text("\n".join(_CONTROL.sub(" ", line) for line in lines)))


@functools.cache
def _console(*, stderr: bool = False) -> Console:
    from rich.console import Console

    return Console(stderr=stderr, highlight=False)


def _write(stream: TextIO | None, text: str, *, result: bool = True) -> None:
    """Write a line and flush it; ``result`` is false for notes on stderr, which are lost where they cannot be written.

    Raises:
        OutputError: standard output is closed, or its file cannot take it.
        BrokenPipeError: the reader of standard output went away.
    """
    if stream is None:
        if result:
            raise OutputError("standard output is closed")
        return
    try:
        stream.write(text + "\n")
        stream.flush()
    except BrokenPipeError:
        if result:
            raise
    except OSError as error:
        if result:
            raise OutputError(
                "cannot write the result to standard output", facts=[error.strerror or str(error)]
            ) from error


def terminals() -> tuple[int, ...]:
    """The descriptors of standard output and error that are terminals."""
    return tuple(number for number in (1, 2) if os.isatty(number))


def forget_closed_terminals(numbers: Sequence[int]) -> None:
    """Let what is written to terminals that were closed go to nowhere, so that a command can end in good order."""
    for number in numbers:
        if not os.isatty(number):  # says no once the other end is gone
            with contextlib.suppress(OSError):
                os.dup2(os.open(os.devnull, os.O_WRONLY), number)


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _cell(value: object) -> str:
    if value is None:
        return ""
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, float):
        return f"{value:.12g}"
    if isinstance(value, tuple | list):
        return ", ".join(_cell(item) for item in value)
    return _CONTROL.sub(" ", str(value))
