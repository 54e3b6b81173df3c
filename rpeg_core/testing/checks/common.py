"""What records of every kind have in common: name, summary, settings."""

from __future__ import annotations

from typing import Any

from rpeg_core.errors import RpegError
from rpeg_core.plugins.kinds import PluginKind
from rpeg_core.plugins.loading import check_record
from rpeg_core.records import NoSettings
from rpeg_core.settings import build_settings, check_settings_class, describe
from rpeg_core.testing.checks.outcome import require

__all__ = ["defaults", "record_rules", "settings_rules"]


def defaults(record: Any) -> Any:
    """The record's settings as when the user sets none."""
    return record.settings()


def record_rules(kind: PluginKind, record: Any) -> None:
    """What loading demands: a name, a summary of one line, fields of the right types."""
    require(check_record(kind, record))


def settings_rules(record: Any) -> None:
    """The settings class is one, and ``--set`` accepts every default as ``rpeg show`` prints it."""
    cls = getattr(record, "settings", NoSettings)
    require(check_settings_class(cls))
    problems = []
    for row in describe(cls):
        try:
            again = getattr(build_settings(cls, {row.name: _text(row.value)}, where=record.name), row.name)
        except RpegError as error:
            problems.append(f"the default of {row.name}, {row.value!r}, is refused as text: {error.what}")
            continue
        if again != row.value:
            problems.append(f"the default of {row.name} is {row.value!r}, as text it is read as {again!r}")
    require(problems)


def _text(value: object) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_text, value))
    return "null" if value is None else str(value)
