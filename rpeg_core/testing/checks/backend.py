"""Backends: light to import, honest about this machine, and an export that is files of text."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Mapping
from pathlib import PurePosixPath

from rpeg_core.errors import BackendError
from rpeg_core.records import BackendSpec
from rpeg_core.testing.checks.common import defaults
from rpeg_core.testing.checks.outcome import CheckFailedError, CheckSkippedError, RecordCheck, require
from rpeg_core.testing.checks.process import in_new_process
from rpeg_core.testing.checks.samples import sample_plan

__all__ = ["checks"]

HEAVY = ("torch", "megatron", "vllm", "ray", "transformers")


def probe(record: BackendSpec) -> None:
    """``probe()`` returns a reason as text, or None."""
    reason = record.probe()
    if reason is not None and (not isinstance(reason, str) or not reason.strip()):
        raise CheckFailedError(f"probe() returned {reason!r}; allowed: text or None")


def light(record: BackendSpec) -> None:
    """Importing its module imports no framework; ``open`` and ``render`` may."""
    imported = in_new_process(imported_by, record.probe.__module__)
    if imported:
        raise CheckFailedError(f"importing {record.probe.__module__} imports {imported}")


def imported_by(module: str) -> str:
    """The frameworks that importing ``module`` imports."""
    before = set(sys.modules)
    try:
        importlib.import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            sys.exit(f"cannot import: {error}")
        raise
    return ", ".join(name for name in HEAVY if name in sys.modules and name not in before)


def render(record: BackendSpec) -> None:
    """An export maps names of files to their text, the same each time."""
    try:
        once, twice = (record.render(sample_plan(), defaults(record)) for _ in range(2))
    except BackendError as error:
        raise CheckSkippedError(f"it refuses the sample plan: {error.what}") from error
    if not isinstance(once, Mapping) or not once:
        raise CheckFailedError(f"render returned {once!r}; allowed: file name -> text, at least one")
    require([found for item in once.items() if (found := _file_problem(item)) is not None])
    if dict(once) != dict(twice):
        raise CheckFailedError("rendering a plan twice gives different files")


def _file_problem(item: tuple[object, object]) -> str | None:
    name, text = item
    if not isinstance(name, str) or not name or PurePosixPath(name).is_absolute() or ".." in PurePosixPath(name).parts:
        return f"the file name {name!r} is not a relative path inside the output folder"
    return None if isinstance(text, str) else f"the content of {name!r} is {type(text).__name__}, not text"


def checks(record: BackendSpec) -> tuple[RecordCheck, ...]:
    """The checks that apply to what ``record`` can do."""
    common: tuple[RecordCheck, ...] = (("probe", probe), ("light", light))
    return (*common, ("render", render)) if "export" in record.can else common
