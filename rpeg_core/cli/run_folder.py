"""The folder of a run, as ``rpeg run --output`` writes and ``rpeg verify`` reads it: plan, trace and metrics."""

from __future__ import annotations

import contextlib
import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rpeg_core.errors import PlanFileError, TraceFileError, UsageError
from rpeg_core.runtime.session import METRICS_FILE, PERFETTO_FILE, PLAN_FILE, TRACE_FILE
from rpeg_core.runtime.trace import Trace

if TYPE_CHECKING:
    from rpeg_core.planning.plan import Plan

__all__ = ["held", "read_metrics", "write_perfetto"]

_NOTHING_RAN = frozenset({"header", "stop", "close"})
"""Records of a run that ended before its first node."""


@contextlib.contextmanager
def held(folder: Path | None, plan: Plan, *, resume: bool) -> Iterator[None]:
    """The folder made and the plan in it, for one run at a time; of a run that is resumed, the trace put aside.

    A run that ended before its first node, e.g. for a mistake in its data, leaves nothing: its folder is taken again.
    When no trace is written in here, the earlier one is put back.

    Raises:
        UsageError: it holds a run and shall not be resumed, holds none and shall be, or a run is under way in it.
        PlanFileError: it cannot be written, or belongs to another plan.
    """
    if folder is None:
        yield
        return
    if resume and not (folder / PLAN_FILE).is_file():
        raise UsageError(f"there is no run in {folder} to resume", facts=[f"it has no {PLAN_FILE}"])
    with contextlib.ExitStack() as stack:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            stack.enter_context(_locked(folder))
            aside = _prepare(folder, plan, resume=resume)
        except OSError as error:
            raise PlanFileError(f"cannot write {folder}", facts=[error.strerror or str(error)]) from error
        try:
            yield
        finally:
            if not (folder / TRACE_FILE).exists():
                for there, before in aside.items():
                    there.rename(before)


@contextlib.contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """The folder, locked until its process ends at the latest; not where the file system has no locks.

    Raises:
        UsageError: another process has it.
    """
    number = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(number, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(number)
        raise UsageError(
            f"a run is under way in {folder}", hint="wait until it ends, or name another folder"
        ) from error
    except OSError:
        pass
    try:
        yield
    finally:
        os.close(number)


def _prepare(folder: Path, plan: Plan, *, resume: bool) -> dict[Path, Path]:
    """Check what is in the folder and write the plan; the files that were put aside and their names before."""
    from rpeg_core.planning.plan import load_plan

    own, trace = folder / PLAN_FILE, folder / TRACE_FILE
    if not resume and trace.exists():
        if (folder / "trace.1.jsonl").exists() or not _nothing_ran(trace):
            raise UsageError(
                f"{folder} holds a run",
                facts=[f"it has {TRACE_FILE}"],
                hint="--resume goes on with it; or name another",
            )
        own.unlink(missing_ok=True)
        trace.unlink()
    if own.exists():
        there = load_plan(own)
        if there.digest != plan.digest:
            raise PlanFileError(
                f"{own} is another plan",
                facts=[f"it is {there.digest}", f"this is {plan.digest}"],
                hint="name another folder",
            )
    else:
        plan.save(own)
    return _put_aside(folder) if trace.exists() else {}


def _nothing_ran(trace: Path) -> bool:
    """Whether the run that wrote a trace dispatched nothing; False of a file that is no trace."""
    with trace.open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            try:
                if json.loads(line)["record"] not in _NOTHING_RAN:
                    return False
            except (ValueError, KeyError, TypeError):
                return False
    return True


def _put_aside(folder: Path) -> dict[Path, Path]:
    """``trace.jsonl`` becomes ``trace.1.jsonl``, the next one ``trace.2.jsonl``; a Perfetto trace goes with it."""
    number = 1
    while (folder / f"trace.{number}.jsonl").exists():
        number += 1
    names = {
        folder / f"trace.{number}.jsonl": folder / TRACE_FILE,
        folder / f"trace.{number}.perfetto.json": folder / PERFETTO_FILE,
    }
    aside = {there: before for there, before in names.items() if before.exists()}
    for there, before in aside.items():
        before.rename(there)
    return aside


def write_perfetto(folder: Path) -> Path | None:
    """Make the Perfetto trace of a run that failed from what its trace file has; None when that cannot be done."""
    try:
        trace = Trace.read(folder / TRACE_FILE)
        trace.write_chrome(folder / PERFETTO_FILE)
    except (TraceFileError, OSError):  # the disk may be full
        return None
    return folder / PERFETTO_FILE


def read_metrics(folder: Path) -> dict[int, Mapping[str, float]]:
    """Step -> metrics of ``metrics.jsonl``, the steps before a resumption too; empty when there is no such file.

    JSON has no word for a number that is not finite; null is read as NaN.

    Raises:
        TraceFileError: a line is not a JSON object with a step.
    """
    path = folder / METRICS_FILE
    if not path.is_file():
        return {}
    found: dict[int, Mapping[str, float]] = {}
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        try:
            values = json.loads(line)
            step = int(values.pop("step"))
            found[step] = {name: math.nan if value is None else float(value) for name, value in values.items()}
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            problem = f"{type(error).__name__}: {error}"
            raise TraceFileError(f"line {number} of {path} is not the metrics of a step", facts=[problem]) from error
    return dict(sorted(found.items()))
