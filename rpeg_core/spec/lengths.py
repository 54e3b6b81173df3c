"""``workload.response_lengths``: pairs in the experiment file, or a CSV file of them."""

from __future__ import annotations

import csv
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from rpeg_core.errors import ExperimentError
from rpeg_core.spec.sections import Section
from rpeg_core.spec.workload import LengthQuantile

__all__ = ["read_lengths"]

KEY = "response_lengths"
COLUMNS = ("fraction", "tokens")
ALLOWED = "allowed: a list of [fraction, tokens] pairs, or a CSV file with the columns fraction,tokens"


def read_lengths(section: Section, base_dir: Path) -> tuple[LengthQuantile, ...]:
    """The quantiles that ``section`` names; none when it names none.

    Raises:
        ExperimentError: the file cannot be read, there is no pair, or one of them is no pair of numbers.
    """
    value, where = section.get(KEY), section.key(KEY)
    if value is None:
        return ()
    if isinstance(value, str):
        path = base_dir / Path(value).expanduser()
        rows = [(f"{where}: line {line} of {path}", row) for line, row in _csv_rows(path, where)]
    elif isinstance(value, Sequence):
        rows = [(f"{where}[{i}]", row) for i, row in enumerate(value)]
    else:
        raise ExperimentError(f"{where} is {value!r}", facts=[ALLOWED])
    if not rows:
        raise ExperimentError(f"{where} has no pair", facts=[ALLOWED], hint=f"remove {where} for a single length")
    return tuple(_quantile(row, place) for place, row in rows)


def _quantile(row: object, place: str) -> LengthQuantile:
    try:
        fraction, tokens = row  # type: ignore[misc]
        if isinstance(tokens, float) or isinstance(fraction, bool) or isinstance(tokens, bool):
            raise ValueError
        return LengthQuantile(float(fraction), int(tokens))
    except (TypeError, ValueError):
        raise ExperimentError(f"{place} is {row!r}", facts=[ALLOWED]) from None


def _csv_rows(path: Path, where: str) -> Iterator[tuple[int, tuple[Any, Any]]]:
    """(line, (fraction, tokens)) of a CSV file, as spreadsheets write it: with a byte-order mark, with ``;``."""
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        reason = getattr(error, "strerror", None) or f"{type(error).__name__}: {error}"
        hint = None
        if isinstance(error, FileNotFoundError):
            hint = f"`rpeg profile-lengths` writes such a file; leave {where} out until then"
        raise ExperimentError(f"{where}: cannot read {path}", facts=[reason, ALLOWED], hint=hint) from error
    lines = text.splitlines()
    semicolons = bool(lines) and ";" in lines[0]
    reader = csv.DictReader(lines, delimiter=";" if semicolons else ",")
    names = {(name or "").strip().lower(): name for name in reader.fieldnames or ()}
    missing = [column for column in COLUMNS if column not in names]
    if missing:
        found = ", ".join(repr(name) for name in reader.fieldnames or ()) or "nothing"
        raise ExperimentError(
            f"{where}: {path} has no column {missing[0]!r}", facts=[f"its first line names: {found}", ALLOWED]
        )
    for row in reader:
        fraction, tokens = (row[names[column]] for column in COLUMNS)
        if semicolons and fraction is not None:
            fraction = fraction.replace(",", ".")  # where a semicolon separates fields, a comma separates decimals
        yield reader.line_num, (fraction, tokens)
