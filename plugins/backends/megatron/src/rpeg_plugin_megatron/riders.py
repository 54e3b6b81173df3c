"""Where data artifacts are, and what travels with a transfer besides its own container.

An operator may read a container without an edge of its own: it "reaches training transitively", as PPO's completions
reach actor training through the rewards and log-probs made of them. Lowering charges no transfer for it. So a data
transfer takes along, as a *rider*, every artifact of its step that

* the operator that it feeds, or one downstream of that in the data flow, reads from an operator elsewhere;
* the source has and the destination lacks.

Then it is there in time: each way from its maker to its reader is a chain of edges, on which every transfer takes it
along. A rider is named by its maker; when the transfer's own container is one, its rows are sent once and filed twice.
"""

from __future__ import annotations

import attrs

from rpeg_core.ir import ContainerKind, Rpeg
from rpeg_core.passes.lower import NodeKind
from rpeg_core.runtime.protocol import Artifact, Dispatch
from rpeg_core.runtime.window import StepShape, Window
from rpeg_core.spec.machine import Allocation

__all__ = ["Places"]


@attrs.frozen
class _Wanted:
    """Somebody on ``reader`` reads ``container`` of the operator node at ``maker`` without an edge of its own."""

    maker: int
    container: str
    reader: Allocation


class Places:
    """Keeps where the artifacts of a run are; what it keeps is bounded by what is live.

    Args:
        window: the executable graph.
    """

    def __init__(self, window: Window) -> None:
        self._window = window
        shapes = [window.shape(step) for step in range(window.steady_step + 1)]
        self._wanted = [_wanted(window.rpeg, shape) for shape in shapes]
        self._of: dict[tuple[int, str], set[Allocation]] = {}
        self._under_way: dict[int, tuple[Artifact, ...]] = {}

    def __len__(self) -> int:
        """How many artifacts are known."""
        return len(self._of)

    def riders(self, dispatch: Dispatch) -> tuple[Artifact, ...]:
        """What the dispatched node takes along, in a fixed order; it has arrived when the node is :meth:`finished`."""
        node = dispatch.node
        if node.kind is not NodeKind.COMM or node.model is not None:
            return ()
        _, position = self._window.locate(node.index)
        found = {}
        for wanted in self._wanted[min(node.step, self._window.steady_step)].get(position, ()):
            artifact = self._window.artifact(node.step, wanted.maker, wanted.container)
            at = self._of.get((artifact.node, artifact.container), ())
            if node.source in at and node.allocation not in at and wanted.reader not in at:
                found[artifact] = None
        if found:
            self._under_way[node.index] = tuple(found)
        return tuple(found)

    def finished(self, index: int) -> None:
        """A node is done: what it made and took along is there."""
        step, position = self._window.locate(index)
        shape = self._window.shape(step)
        here = shape.nodes[position].allocation
        for container in shape.writes[position]:
            self._of[index, container] = {here}
        for artifact in self._under_way.pop(index, ()):
            self._of[artifact.node, artifact.container].add(here)

    def released(self, artifact: Artifact) -> frozenset[Allocation]:
        """Forget an artifact; returns where it was."""
        return frozenset((artifact.allocation, *self._of.pop((artifact.node, artifact.container), ())))


def _wanted(rpeg: Rpeg, shape: StepShape) -> dict[int, tuple[_Wanted, ...]]:
    """Position of each data transfer -> what its destination, or somebody downstream of it, wants."""
    by_operator: dict[str, dict[_Wanted, None]] = {op.name: {} for op in rpeg.operators}
    for node, reads in zip(shape.nodes, shape.reads, strict=True):
        if node.kind is not NodeKind.OP:
            continue
        for back, maker, container in reads:
            if maker < 0 or back or rpeg.container(container).kind is not ContainerKind.DATA:
                continue
            made_by = shape.nodes[maker]
            if made_by.kind is NodeKind.OP and made_by.allocation != node.allocation:
                by_operator[node.operator][_Wanted(maker, container, node.allocation)] = None
    downstream = _downstream(rpeg)
    return {
        position: tuple(
            dict.fromkeys(w for name in (node.operator, *downstream[node.operator]) for w in by_operator[name])
        )
        for position, node in enumerate(shape.nodes)
        if node.kind is NodeKind.COMM and node.model is None
    }


def _downstream(rpeg: Rpeg) -> dict[str, tuple[str, ...]]:
    """Operator -> those that its outputs reach over data edges, in the order of the graph."""
    found = {}
    for operator in rpeg.operators:
        reached: set[str] = set()
        waiting = [operator.name]
        while waiting:
            source = waiting.pop()
            new = {edge.target for edge in rpeg.data_edges if edge.source == source} - reached
            reached |= new
            waiting.extend(new)
        found[operator.name] = tuple(sorted(reached, key=rpeg.index))
    return found
