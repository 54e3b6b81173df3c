"""When nodes run, and that they do not get in each other's way (rules V7, V8, V9)."""

from __future__ import annotations

import attrs

from rpeg_core.runtime.trace import Bound, Dispatched, Ended, Record, Started, Stopped, Transferred
from rpeg_core.runtime.verify.check import Check
from rpeg_core.runtime.verify.findings import Findings
from rpeg_core.runtime.verify.ledger import Ledger, NodeRecord, Traced
from rpeg_core.runtime.verify.rules import EXCLUSIVE, ORDER, PREDECESSORS
from rpeg_core.spec.machine import Allocation

__all__ = ["Exclusivity", "Precedence", "Sequence"]

_SEQUENCE = (Dispatched, Bound, Started, Transferred, Ended)
_NAMES = {Dispatched: "dispatch", Bound: "bind", Started: "start", Transferred: "transfer", Ended: "end"}


class Sequence(Check):
    """V7 order."""

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        super().__init__(ledger, findings)
        self._latest: tuple[int | None, float] = (None, 0.0)
        self._stopped: int | None = None

    def record(self, line: int, record: Record) -> None:
        if self._stopped is not None:
            self.findings.add(ORDER, "a record follows the stop", line, self._stopped)
        if isinstance(record, Stopped):
            self._stopped = line
        if isinstance(record, Started):  # may be written late
            return
        before, time_s = self._latest
        if record.time_s < time_s:
            lines = (line,) if before is None else (line, before)
            self.findings.add(ORDER, f"the time goes back from {time_s!r} s to {record.time_s!r} s", *lines)
        else:
            self._latest = line, record.time_s

    def node(self, line: int, record: NodeRecord, traced: Traced) -> None:
        own = _SEQUENCE.index(type(record))
        for kind, (other_line, other) in traced.records.items():
            name, other_name = _NAMES[type(record)], _NAMES[kind]
            place = _SEQUENCE.index(kind)
            if place > own:
                self.broken(ORDER, traced, f"the {name} stands after the {other_name}", line, other_line)
            early, late = sorted(((own, record.time_s), (place, other.time_s)))
            if early[1] > late[1]:
                found = f"{name} at {record.time_s!r} s, {other_name} at {other.time_s!r} s"
                self.broken(ORDER, traced, found, line, other_line)


class Precedence(Check):
    """V8 predecessors."""

    def node(self, line: int, record: NodeRecord, traced: Traced) -> None:
        if not isinstance(record, Dispatched | Started):
            return
        for back, position in traced.shape.predecessors[traced.position]:
            step = traced.step - back
            if not self.ledger.has_ended(step, position):
                if isinstance(record, Dispatched):
                    label = self.window.node(step, position).label
                    self.broken(PREDECESSORS, traced, f"is dispatched before {label} ended", line)
                continue
            before = self.ledger.at(step, position)
            if before is None:
                continue
            end_line, end = before.records[Ended]
            if record.time_s < end.time_s:
                verb = "starts" if isinstance(record, Started) else "is dispatched"
                found = f"{verb} at {record.time_s!r} s, before {before.label} ended at {end.time_s!r} s"
                self.broken(PREDECESSORS, traced, found, line, end_line)


@attrs.frozen
class _Hold:
    """GPUs in the hands of a node, as the trace says, from a line on; or until a line and time."""

    gpus: Allocation
    label: str
    line: int
    end_s: float | None = None


class Exclusivity(Check):
    """V9 exclusivity."""

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        super().__init__(ledger, findings)
        self._held: dict[int, list[_Hold]] = {}  # index of a running node -> what it holds
        self._last: dict[Allocation, _Hold] = {}  # who left these GPUs last

    def node(self, line: int, record: NodeRecord, traced: Traced) -> None:
        match record:
            case Dispatched():
                self._take(line, record, traced)
            case Started():
                self._start(line, record, traced)
            case Ended():
                for hold in self._held.pop(record.node, ()):
                    self._last[hold.gpus] = attrs.evolve(hold, line=line, end_s=record.time_s)

    def _take(self, line: int, record: Dispatched, traced: Traced) -> None:
        if Ended in traced.records:  # out of order; rule V7 has it
            return
        places = {record.allocation, record.source or record.allocation}
        for others in self._held.values():
            for other in others:
                shared = [_common(place, other.gpus) for place in sorted(places) if not place.disjoint(other.gpus)]
                if shared:
                    found = f"is dispatched while {other.label} holds GPUs {' and '.join(map(str, shared))}"
                    self.broken(EXCLUSIVE, traced, found, line, other.line)
                    break
        self._held[record.node] = [_Hold(place, traced.label, line) for place in sorted(places)]

    def _start(self, line: int, record: Started, traced: Traced) -> None:
        for mine in self._held.get(record.node, ()):
            for other in self._last.values():
                if other.end_s is not None and record.time_s < other.end_s and not mine.gpus.disjoint(other.gpus):
                    found = (
                        f"starts at {record.time_s!r} s on GPUs {_common(mine.gpus, other.gpus)}, "
                        f"which {other.label} holds until {other.end_s!r} s"
                    )
                    self.broken(EXCLUSIVE, traced, found, line, other.line)


def _common(one: Allocation, other: Allocation) -> Allocation:
    return Allocation(max(one.start, other.start), min(one.stop, other.stop))
