"""Rows of measured tables, read strictly: a blank is unknown, and a row that cannot be used says why."""

from __future__ import annotations

import csv
import gzip
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TypeVar

import attrs

from rpeg_core.errors import ExperimentError, RpegError

__all__ = ["LARGEST_COUNT", "Row", "Unusable", "read_rows", "usable"]

LARGEST_COUNT = 2**31 - 1
"""Of a column of whole numbers: a product of two of them still is a 64-bit number."""


class Unusable(Exception):  # noqa: N818
    """A row that cannot be replayed; the text is the reason."""


@attrs.frozen
class Row:
    """One row: column name to text; blanks are kept as empty strings."""

    values: Mapping[str, str]

    def text(self, column: str, default: str | None = None) -> str:
        """The text of a column.

        Raises:
            Unusable: it is blank or missing and there is no default.
        """
        value = (self.values.get(column) or "").strip()
        if not value:
            if default is None:
                raise Unusable(f"{column} is not known")
            return default
        return value

    def number(self, column: str, default: float | None = None) -> float:
        """The number in a column; times, rates, sizes and lengths are all more than 0.

        Raises:
            Unusable: it is blank without a default, no finite number, or not more than 0.
        """
        found = self._finite(column, default)
        if found <= 0:
            raise Unusable(f"{column} is {found:g}; allowed: more than 0")
        return found

    def _finite(self, column: str, default: float | None) -> float:
        value = (self.values.get(column) or "").strip()
        if not value:
            if default is None:
                raise Unusable(f"{column} is not known")
            return default
        try:
            found = float(value)
        except ValueError:
            raise Unusable(f"{column} is {value!r}, not a number") from None
        if not math.isfinite(found):
            raise Unusable(f"{column} is {value!r}, not a finite number")
        return found

    def whole(self, column: str, default: int | None = None) -> int:
        """The whole number in a column: at least 1, or at least ``default`` where that is 0.

        Raises:
            Unusable: it is blank without a default, not whole, or out of range.
        """
        found = self._finite(column, None if default is None else float(default))
        if found != int(found):
            raise Unusable(f"{column} is {found:g}, not a whole number")
        least = 0 if default == 0 else 1
        if not least <= found <= LARGEST_COUNT:
            raise Unusable(f"{column} is {found:g}; allowed: {least} to {LARGEST_COUNT}")
        return int(found)

    def known(self, column: str) -> bool:
        """Whether the column holds anything."""
        return bool((self.values.get(column) or "").strip())


_Made = TypeVar("_Made")


def usable(make: Callable[[], _Made]) -> _Made:
    """What ``make`` makes of a row.

    Raises:
        Unusable: of a column; or the columns together are no cluster, workload or model that can be planned.
    """
    try:
        return make()
    except RpegError as error:
        raise Unusable("; ".join([error.what, *error.facts])) from error
    except ArithmeticError as error:
        raise Unusable(f"its numbers are out of range: {error}") from error


def read_rows(path: Path, required: tuple[str, ...]) -> list[Row]:
    """The rows of a CSV file, plain or gzipped.

    Raises:
        ExperimentError: it cannot be read, or has none of the required columns.
    """
    try:
        with gzip.open(path, "rt", newline="") if path.suffix == ".gz" else path.open(newline="") as file:
            reader = csv.DictReader(file)
            columns = tuple(reader.fieldnames or ())
            rows = [Row({k: v for k, v in row.items() if k is not None and isinstance(v, str)}) for row in reader]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise ExperimentError(f"{path} cannot be read as CSV", facts=[str(error)]) from error
    missing = [column for column in required if column not in columns]
    if missing:
        raise ExperimentError(
            f"{path} lacks columns",
            facts=[f"missing: {', '.join(missing)}", f"found: {', '.join(columns) or 'none'}"],
            hint="the columns are listed in docs/validation.md",
        )
    return rows
