"""The folder of a run, as ``rpeg run --output`` writes and ``rpeg verify`` reads it: plan, trace and metrics."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from rpeg_core.errors import PlanFileError, TraceFileError, UsageError
from rpeg_core.runtime.session import METRICS_FILE, PERFETTO_FILE, PLAN_FILE, TRACE_FILE
from rpeg_core.runtime.trace import Trace

if TYPE_CHECKING:
    from rpeg_core.planning.plan import Plan

__all__ = ["prepare", "read_metrics", "write_perfetto"]


def prepare(folder: Path, plan: Plan, *, resume: bool) -> None:
    """Make the folder and write the plan into it; of a run that is resumed, put the earlier trace aside.

    Raises:
        UsageError: it holds a run and shall not be resumed, or holds none and shall be.
        PlanFileError: it cannot be written, or belongs to another plan.
    """
    from rpeg_core.planning.plan import load_plan

    own, trace = folder / PLAN_FILE, folder / TRACE_FILE
    if resume and not own.is_file():
        raise UsageError(f"there is no run in {folder} to resume", facts=[f"it has no {PLAN_FILE}"])
    if not resume and trace.exists():
        raise UsageError(
            f"{folder} holds a run", facts=[f"it has {TRACE_FILE}"], hint="--resume goes on with it; or name another"
        )
    try:
        folder.mkdir(parents=True, exist_ok=True)
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
        if trace.exists():
            _put_aside(folder)
    except OSError as error:
        raise PlanFileError(f"cannot write {folder}", facts=[error.strerror or str(error)]) from error


def _put_aside(folder: Path) -> None:
    """``trace.jsonl`` becomes ``trace.1.jsonl``, the next one ``trace.2.jsonl``; a Perfetto trace goes with it."""
    number = 1
    while (folder / f"trace.{number}.jsonl").exists():
        number += 1
    (folder / TRACE_FILE).rename(folder / f"trace.{number}.jsonl")
    if (folder / PERFETTO_FILE).exists():
        (folder / PERFETTO_FILE).rename(folder / f"trace.{number}.perfetto.json")


def write_perfetto(folder: Path) -> Path | None:
    """Make the Perfetto trace of a run that failed from what its trace file has; None when that cannot be read."""
    try:
        trace = Trace.read(folder / TRACE_FILE)
        trace.write_chrome(folder / PERFETTO_FILE)
    except TraceFileError:
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
