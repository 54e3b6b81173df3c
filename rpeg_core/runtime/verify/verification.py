"""The verification: reads a trace once and asks every group of rules."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path

from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.trace import Bound, Closed, Ended, Line, Record, Released, Stopped, TraceHeader, read_lines
from rpeg_core.runtime.verify.artifacts import Artifacts
from rpeg_core.runtime.verify.bindings import Bindings
from rpeg_core.runtime.verify.check import Check
from rpeg_core.runtime.verify.findings import LIMIT, Findings, Verdict
from rpeg_core.runtime.verify.ledger import Ledger, NodeRecord
from rpeg_core.runtime.verify.order import Exclusivity, Precedence, Sequence
from rpeg_core.runtime.verify.rules import FILE, HEADER, NODES, SEAL
from rpeg_core.runtime.verify.versions import Publication
from rpeg_core.runtime.window import Window

__all__ = ["verify", "verify_plan"]

CLOCKS = ("virtual", "wall")

_CHECKS = (Bindings, Sequence, Precedence, Exclusivity, Artifacts, Publication)


def verify_plan(plan: Plan, trace: Path | str) -> Verdict:
    """Whether the trace in a file proves that what ran is what was planned.

    Raises:
        TraceFileError: the file cannot be read, is empty, or has another schema.
    """
    window = Window(plan.rpeg, plan.assignments, plan.workload, split_lengths=plan.options.split_lengths)
    return verify(read_lines(trace), window, plan.digest)


def verify(lines: Iterable[Line], window: Window, digest: str) -> Verdict:
    """Hold the lines of a trace against the executable graph of the plan with that digest."""
    findings = Findings()
    verification: _Verification | None = None
    header: TraceHeader | None = None
    last: Line | None = None
    for line in lines:
        _check_line(line, last, findings)
        last = line
        if isinstance(line.content, TraceHeader):
            header = line.content
            _check_header(header, digest, findings)
            verification = _Verification(window, header.steps, max(0, header.first_step), findings)
        elif verification is not None and line.content is not None and not isinstance(line.content, Closed):
            verification.take(line.number, line.content)
    number = 0 if last is None else last.number
    if last is None or not isinstance(last.content, Closed):
        findings.add(FILE, "the closing line is missing: the run was killed, or the file was cut", number)
    if verification is None:
        findings.add(FILE, "there is no header, so that nothing else can be judged", 1)
        return _verdict(None, None, findings, number)
    verification.finish()
    return _verdict(header, verification, findings, number)


class _Verification:
    """Hands records to the groups of rules."""

    def __init__(self, window: Window, steps: int, first_step: int, findings: Findings) -> None:
        self.ledger, self._findings = Ledger(window, steps, first_step), findings
        self._checks: list[Check] = [check(self.ledger, findings) for check in _CHECKS]
        self.stopped: Stopped | None = None

    def take(self, line: int, record: Record) -> None:
        for check in self._checks:
            check.record(line, record)
        if isinstance(record, Stopped):
            self.stopped = record
            if record.steps_done != self.ledger.steps_complete:
                found = f"says that {record.steps_done} steps are done; the trace has {self.ledger.steps_complete}"
                self._findings.add(NODES, found, line)
        elif isinstance(record, Released):
            for check in self._checks:
                check.release(line, record)
        else:
            self._take_node(line, record)

    def finish(self) -> None:
        for check in self._checks:
            check.finish(stopped=self.stopped is not None)

    def _take_node(self, line: int, record: NodeRecord) -> None:
        traced = self.ledger.node(record.node)
        kind = type(record)
        if traced is None:
            forgotten = self.ledger.is_forgotten(record.node)
            reason = "its step was complete before" if forgotten else "the plan has no such node in the traced steps"
            self._findings.add(NODES, f"node {record.node}: {reason}", line)
            return
        if traced.repeats(record):
            self._findings.add(NODES, "has this record twice", line, traced.records[kind][0], node=traced.label)
            return
        for check in self._checks:
            check.node(line, record, traced)
        traced.records[kind] = (line, record)
        if isinstance(record, Bound):
            traced.bound[record.model] = line
        if kind is Ended:
            for step in self.ledger.end(traced):
                for check in self._checks:
                    check.forget(step)


def _check_line(line: Line, before: Line | None, findings: Findings) -> None:
    if line.content is None:
        findings.add(FILE, f"is no record: {line.problem}", line.number)
    if before is not None and isinstance(before.content, Closed):
        findings.add(FILE, "stands after the closing line", line.number)
    if not line.intact:
        findings.add(SEAL, "does not follow from the lines before it; it or its neighbour was changed", line.number)


def _check_header(header: TraceHeader, digest: str, findings: Findings) -> None:
    if header.plan is None:
        findings.add(HEADER, f"names no plan; this one is {digest}", 1)
    elif header.plan != digest:
        findings.add(HEADER, f"names plan {header.plan}; this one is {digest}", 1)
    if header.clock not in CLOCKS:
        findings.add(HEADER, f"clock {header.clock!r}; allowed: {', '.join(CLOCKS)}", 1)
    if header.steps < 1:
        findings.add(HEADER, f"{header.steps} steps; allowed: at least 1", 1)
    elif not 0 <= header.first_step < header.steps:
        found = f"begins at step {header.first_step}; allowed: 0 to {header.steps - 1}"
        findings.add(HEADER, found, 1)


def _verdict(header: TraceHeader | None, verification: _Verification | None, findings: Findings, lines: int) -> Verdict:
    ledger = None if verification is None else verification.ledger
    stopped = None if verification is None else verification.stopped
    return Verdict(
        header=header,
        findings=findings.all,
        counts=findings.counts,
        steps_complete=0 if ledger is None else ledger.steps_complete,
        nodes=0 if ledger is None else ledger.nodes,
        unfinished=() if ledger is None else _unfinished(ledger),
        lines=lines,
        stopped=None if stopped is None else stopped.reason,
    )


def _unfinished(ledger: Ledger) -> tuple[str, ...]:
    running = (traced.label for _, _, traced in ledger.not_ended() if traced is not None)
    return tuple(itertools.islice(running, LIMIT))
