"""What the trace has said of each node so far, for the steps that can still matter."""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from rpeg_core.passes.lower import Node
from rpeg_core.runtime.trace import Bound, Dispatched, Ended, Started, Transferred
from rpeg_core.runtime.window import StepShape, Window

__all__ = ["Ledger", "NodeRecord", "Traced"]

NodeRecord = Dispatched | Bound | Started | Transferred | Ended


@attrs.define(eq=False)
class Traced:
    """A node of the plan and the records of it: type -> (line, record); of several bindings the last.

    Attributes:
        bound: model -> line of its binding.
    """

    step: int
    position: int
    planned: Node
    shape: StepShape
    records: dict[type[NodeRecord], tuple[int, NodeRecord]] = attrs.field(factory=dict)
    bound: dict[str, int] = attrs.field(factory=dict)

    @property
    def label(self) -> str:
        return self.planned.label

    def repeats(self, record: NodeRecord) -> bool:
        """Whether there is such a record already; of bindings there may be one for each model of the plan."""
        if isinstance(record, Bound) and len(self.bound) < len(self.planned.models):
            return record.model in self.bound
        return type(record) in self.records

    def line(self, kind: type[NodeRecord]) -> int | None:
        """Line of a record, None when it has not come."""
        return self.records[kind][0] if kind in self.records else None


class Ledger:
    """The nodes of a traced run.

    Args:
        window: the planned graph.
        steps: RL steps that the trace claims, those before the first one included.
        first_step: where it claims to begin.

    Attributes:
        steps_complete: all nodes of the steps before this one ended, in this run or before it.
        nodes: nodes that ended.
    """

    def __init__(self, window: Window, steps: int, first_step: int = 0) -> None:
        self.window, self.steps, self.first_step = window, steps, first_step
        self.steps_complete, self.nodes = first_step, 0
        self._open: dict[int, dict[int, Traced]] = {}  # step -> position -> node; a step that was reached
        self._left: dict[int, int] = {}  # step -> nodes that did not end
        shapes = [window.shape(step) for step in range(window.steady_step + 1)]
        self._keep = max(
            (ref[0] for shape in shapes for refs in (*shape.predecessors, *shape.reads) for ref in refs), default=0
        )

    @property
    def oldest(self) -> int:
        """The oldest step that is kept; all nodes before it ended, and nothing to come looks back on them."""
        return max(self.first_step, self.steps_complete - self._keep)

    def node(self, index: int) -> Traced | None:
        """The node of that index; None when the plan has no such node, or its step was forgotten."""
        if index < 0:
            return None
        step, position = self.window.locate(index)
        if not self.oldest <= step < self.steps:
            return None
        if step not in self._open:
            self._open[step] = {}
            self._left[step] = len(self.window.shape(step).nodes)
        nodes = self._open[step]
        if position not in nodes:
            nodes[position] = Traced(step, position, self.window.node(step, position), self.window.shape(step))
        return nodes[position]

    def is_forgotten(self, index: int) -> bool:
        return index >= 0 and self.window.locate(index)[0] < self.oldest

    def at(self, step: int, position: int) -> Traced | None:
        """The node, None when no record of it has come or its step was forgotten."""
        return self._open.get(step, {}).get(position)

    def has_ended(self, step: int, position: int) -> bool:
        if step < self.oldest:
            return True
        traced = self.at(step, position)
        return traced is not None and Ended in traced.records

    def end(self, traced: Traced) -> range:
        """Note that a node ended; returns the steps that are forgotten for it."""
        self.nodes += 1
        self._left[traced.step] -= 1
        before = self.oldest
        while self._left.get(self.steps_complete) == 0:
            del self._left[self.steps_complete]
            self.steps_complete += 1
        forgotten = range(before, self.oldest)
        for step in forgotten:
            del self._open[step]
        return forgotten

    def not_ended(self) -> Iterator[tuple[int, int, Traced | None]]:
        """(step, position, node or None when nothing is known) of what did not end, in the steps that were reached."""
        for step in sorted(self._left):
            for position in range(len(self.window.shape(step).nodes)):
                if not self.has_ended(step, position):
                    yield step, position, self.at(step, position)

    def not_reached(self) -> Iterator[range]:
        """Ranges of steps of which the trace says nothing."""
        first = self.steps_complete
        for step in [*sorted(self._left), self.steps]:
            if first < step:
                yield range(first, step)
            first = step + 1
