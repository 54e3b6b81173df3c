"""Weights exist before they are used, and are fresh enough (rules V13, V14).

Judged by what the trace says happened, not by the edges of the planned graph: a version is made by the end of a
training step, and is where that ran or where a transfer that was bound to it ended.
"""

from __future__ import annotations

from rpeg_core.ir import training_operator
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.planning.assignment import Layout
from rpeg_core.runtime.trace import Bound, Dispatched, Ended
from rpeg_core.runtime.verify.check import Check
from rpeg_core.runtime.verify.findings import Findings
from rpeg_core.runtime.verify.ledger import Ledger, NodeRecord, Traced
from rpeg_core.runtime.verify.rules import PUBLISHED, STALENESS
from rpeg_core.spec.machine import Allocation

__all__ = ["Publication"]

_Place = tuple[Allocation, Layout | None]
_Held = tuple[Allocation, tuple[int, ...] | None]
"""GPUs, and what decides which part of a model each of them holds."""


class Publication(Check):
    """V13 published, V14 staleness."""

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        super().__init__(ledger, findings)
        self._staleness = dict(self.window.rpeg.staleness)
        self._trainers = {model: training_operator(self.window.rpeg, model) for model in self._staleness}
        self._places: dict[tuple[str, int], set[_Held]] = {}  # (model, version) -> where a transfer brought it

    def node(self, line: int, record: NodeRecord, traced: Traced) -> None:
        if isinstance(record, Bound) and record.model in self._staleness:
            self._age(line, record, traced)
            if record.version > 0:
                self._made(line, record, traced)
        elif isinstance(record, Ended) and traced.planned.kind is not NodeKind.OP and Bound in traced.records:
            bound = traced.records[Bound][1]
            self._places.setdefault((bound.model, bound.version), set()).add(_held(*_place(traced)))

    def forget(self, step: int) -> None:
        for model, tau in self._staleness.items():
            self._places.pop((model, step - tau), None)

    def _age(self, line: int, record: Bound, traced: Traced) -> None:
        trains = traced.planned.operator == self._trainers[record.model]
        allowed = 0 if trains else self._staleness[record.model]
        age = traced.step - record.version
        if not 0 <= age <= allowed:
            found = f"{record.model} {record.version} in step {traced.step}; allowed: {allowed} steps old at most"
            self.broken(STALENESS, traced, found, line)

    def _made(self, line: int, record: Bound, traced: Traced) -> None:
        what, step = f"{record.model} {record.version}", record.version - 1
        trainer = self._training(record.model, step) if step < self.ledger.steps else None
        if trainer is None or not self.ledger.has_ended(step, trainer[0]):
            self.broken(PUBLISHED, traced, f"uses {what}, but training step {step} has not ended", line)
            return
        place = _place(traced)
        trained = trainer[1].allocation, trainer[1].layout
        if traced.planned.kind is not NodeKind.OP or _held(*place) == _held(*trained):
            return
        if _held(*place) not in self._places.get((record.model, record.version), ()):
            found = f"uses {what}, which no transfer brought to GPUs {place[0]} in {place[1]}"
            self.broken(PUBLISHED, traced, found, line)

    def _training(self, model: str, step: int) -> tuple[int, Node] | None:
        """Position and node of a training step."""
        for position, node in enumerate(self.window.shape(step).nodes):
            if node.kind is NodeKind.OP and node.operator == self._trainers[model]:
                return position, node
        return None


def _place(traced: Traced) -> _Place:
    """Where it runs or brings weights, as the trace says if it says so."""
    said = traced.records[Dispatched][1] if Dispatched in traced.records else traced.planned
    return said.allocation, said.layout


def _held(allocation: Allocation, layout: Layout | None) -> _Held:
    return allocation, None if layout is None else layout.weights
