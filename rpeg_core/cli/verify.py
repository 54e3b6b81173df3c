"""``rpeg verify``: whether a trace proves that what ran is what was planned."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpeg_core.cli import ui
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import UsageError

if TYPE_CHECKING:
    from rpeg_core.runtime.verify import Verdict

__all__ = ["command"]

UNFINISHED_SHOWN = 3


@click.command("verify")
@click.argument("plan", type=click.Path(path_type=Path), metavar="DIR|PLAN")
@click.argument("trace", type=click.Path(path_type=Path), required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(plan: Path, trace: Path | None, as_json: bool) -> int:
    """Check that TRACE, written by rpeg run --trace, is a run of PLAN: every node once, where, when and as planned.

    DIR is the folder of rpeg run --output, with both; TRACE then names another trace in it, e.g. trace.1.jsonl of a
    run that was resumed.

    Prints one line and ends with 0 when it is, also for a run that was stopped early, as far as it went. Else names
    every broken rule with the lines of the trace and ends with 1. docs/verification.md explains the rules.
    """
    from rpeg_core.planning.plan import load_plan
    from rpeg_core.runtime.verify import verify_plan

    plan, trace = _files(plan, trace)
    found = load_plan(plan)
    verdict = verify_plan(found, trace)
    if as_json:
        ui.print_json({"plan_file": str(plan), "trace_file": str(trace), "plan": found.digest, **_document(verdict)})
    elif verdict.accepted:
        ui.print_text(f"{trace}: what ran is what {plan} planned: {_extent(verdict)}")
    else:
        ui.print_text(f"{trace}: refused\n" + "\n".join(_reasons(verdict)))
    return ExitCode.DONE if verdict.accepted else ExitCode.NO


def _files(plan: Path, trace: Path | None) -> tuple[Path, Path]:
    """The plan and the trace that are meant.

    Raises:
        UsageError: a plan without a trace.
    """
    from rpeg_core.runtime.session import PLAN_FILE, TRACE_FILE

    if plan.is_dir():
        inside = plan / (TRACE_FILE if trace is None else trace)
        return plan / PLAN_FILE, trace if trace is not None and not inside.exists() else inside
    if trace is None:
        raise UsageError(
            f"{plan} is no folder of a run, so its trace must be named",
            hint=f"rpeg verify {plan} TRACE, or rpeg verify DIR after rpeg run --output DIR",
        )
    return plan, trace


def _extent(verdict: Verdict) -> str:
    from rpeg_core.report import words

    size = f"{words.plural(verdict.nodes, 'node')}, {words.plural(verdict.lines, 'record')}"
    if verdict.stopped is None or verdict.header is None:
        first = 0 if verdict.header is None else verdict.header.first_step
        after = f" after the first {first}" if first else ""
        return f"{words.plural(verdict.steps_complete - first, 'step')}{after}, {size}"
    steps = f"{verdict.steps_complete} of {words.plural(verdict.header.steps, 'step')} complete"
    shown = list(verdict.unfinished[:UNFINISHED_SHOWN])
    more = [] if len(shown) == len(verdict.unfinished) else ["others"]
    running = f"; not finished: {words.listing([*shown, *more])}" if shown else ""
    return f"stopped ({verdict.stopped}) with {steps}, {size}{running}"


def _reasons(verdict: Verdict) -> list[str]:
    lines: list[str] = []
    for rule, count in verdict.counts.items():
        shown = [finding for finding in verdict.findings if finding.rule is rule]
        lines += [str(rule), *(f"  {finding}" for finding in shown)]
        if count > len(shown):
            lines.append(f"  and {count - len(shown)} more")
    return lines


def _document(verdict: Verdict) -> dict[str, Any]:
    return {
        "accepted": verdict.accepted,
        "complete": verdict.complete,
        "stopped": verdict.stopped,
        "steps": None if verdict.header is None else verdict.header.steps,
        "first_step": None if verdict.header is None else verdict.header.first_step,
        "steps_complete": verdict.steps_complete,
        "nodes": verdict.nodes,
        "unfinished": list(verdict.unfinished),
        "lines": verdict.lines,
        "broken": {rule.id: count for rule, count in verdict.counts.items()},
        "findings": [
            {
                "rule": finding.rule.id,
                "name": finding.rule.name,
                "node": finding.node,
                "lines": list(finding.lines),
                "message": finding.message,
            }
            for finding in verdict.findings
        ],
    }
