"""Each node is there once and is what was planned (rules V4, V5, V6, V10)."""

from __future__ import annotations

import attrs

from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.runtime.protocol import Dispatch
from rpeg_core.runtime.trace import Bound, Dispatched, Ended, Started, Transferred, dispatch_records
from rpeg_core.runtime.verify.check import Check
from rpeg_core.runtime.verify.ledger import NodeRecord, Traced
from rpeg_core.runtime.verify.rules import BINDING, NODES, TRANSFERS, VERSIONS

__all__ = ["Bindings"]

_MEANINGS = {
    "allocation": "GPUs",
    "source": "source GPUs",
    "layout": "parallel degrees",
    "microbatches": "microbatches",
    "container": "container",
    "phase": "length phase",
}
"""Fields of a dispatch whose name is not the word for it."""

_FIELDS = tuple(field.name for field in attrs.fields(Dispatched) if field.name not in ("time_s", "node", "inputs"))
"""What the plan says of a dispatch; its inputs are rule V11's."""


class Bindings(Check):
    """V4 nodes, V5 binding, V6 versions, V10 transfers."""

    def node(self, line: int, record: NodeRecord, traced: Traced) -> None:
        match record:
            case Dispatched():
                self._dispatched(line, record, traced)
            case Bound():
                self._bound(line, record, traced)
            case Transferred():
                self._transferred(line, record, traced)
            case Ended():
                self._ended(line, traced)

    def finish(self, *, stopped: bool) -> None:
        if stopped:
            return
        for step, position, traced in self.ledger.not_ended():
            seen = "has no record" if traced is None else "did not end"
            lines = [] if traced is None else [line for line, _ in traced.records.values()]
            self.findings.add(NODES, seen, *lines, node=self.window.node(step, position).label)
        for steps in self.ledger.not_reached():
            which = f"step {steps[0]} has" if len(steps) == 1 else f"steps {steps[0]} to {steps[-1]} have"
            self.findings.add(NODES, f"{which} no record")

    def _dispatched(self, line: int, record: Dispatched, traced: Traced) -> None:
        rule = TRANSFERS if _moves(traced.planned) else BINDING
        planned = next(iter(dispatch_records(Dispatch(traced.planned, (), ()), 0.0)))
        for name in _FIELDS:
            value, expected = getattr(record, name), getattr(planned, name)
            if value != expected:
                what = _MEANINGS.get(name, name)
                self.broken(rule, traced, f"{what}: {_word(value)} in the trace, {_word(expected)} planned", line)

    def _bound(self, line: int, record: Bound, traced: Traced) -> None:
        planned = traced.planned
        if planned.version is None:
            self.broken(VERSIONS, traced, f"is bound to {record.model} {record.version}; it has no weights", line)
        elif record.model not in planned.models or record.version != planned.version:
            wanted = record.model if record.model in planned.models else planned.model
            found, expected = f"{record.model} {record.version}", f"{wanted} {planned.version}"
            self.broken(VERSIONS, traced, f"version {found} in the trace, {expected} planned", line)

    def _transferred(self, line: int, record: Transferred, traced: Traced) -> None:
        planned = traced.planned
        if not _moves(planned):
            self.broken(TRANSFERS, traced, "is an operator and transfers nothing", line)
        elif record.bytes != planned.payload_bytes:
            found, expected = f"{record.bytes:.17g}", f"{planned.payload_bytes:.17g}"
            self.broken(TRANSFERS, traced, f"{found} bytes in the trace, {expected} planned", line)
        elif record.wire_bytes is not None and record.wire_bytes < 0:
            self.broken(TRANSFERS, traced, f"{record.wire_bytes:.17g} bytes between workers; allowed: at least 0", line)

    def _ended(self, line: int, traced: Traced) -> None:
        for kind, name in ((Dispatched, "dispatch"), (Started, "start")):
            if kind not in traced.records:
                self.broken(NODES, traced, f"ended without a {name}", line)
        for model in traced.planned.models if traced.planned.version is not None else ():
            if model not in traced.bound and (traced.planned.also or not traced.bound):
                expected = f"{model} {traced.planned.version}"
                self.broken(VERSIONS, traced, f"ended without being bound to {expected}", line)
        if _moves(traced.planned) and Transferred not in traced.records:
            self.broken(TRANSFERS, traced, "ended without a record of what it moved", line)


def _moves(node: Node) -> bool:
    return node.kind is not NodeKind.OP


def _word(value: object) -> str:
    return "none" if value is None else str(value)
