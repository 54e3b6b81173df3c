"""Where the data of a step lie: what every transfer carries, and where every operator finds what it reads.

Lowering connects producers and consumers by bare edges, and some containers reach an operator "transitively": PPO's
training reads the completions, but the only edges into it come from the operators that assessed them. Here every such
container gets a way: it *rides* on the data transfers along one path of data edges from its maker to its reader,
the shortest one, and among those the one on whose transfers it rides already. The bytes of riders are not charged.

All of this follows from the executable graph alone. Each rank derives it for itself, so that the two ends of a transfer
agree without talking.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

import attrs

from rpeg_core.errors import ExecutionError
from rpeg_core.ir import ContainerKind, Role, Rpeg
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.window import StepShape, Window
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.workload import Workload
from rpeg_plugin_megatron.places import Place

__all__ = ["Cargo", "Flow", "Rows", "due_bytes", "part_rows"]


@attrs.frozen
class Rows:
    """The rows of a container that one or several nodes of a step made, at one place.

    Attributes:
        container: what they are.
        makers: positions in the step of the nodes that made them: one, or one for each length phase.
        place: whose replicas hold them.
        whole: True for all rows of the step, each replica with its own; False when what each maker made is kept by
            itself, as a *part* of the rows with their numbers.
        phases: of the makers when they are parts, else empty.
        replicas: for parts, the data-parallel degree of the generation that decides which row is in which part; else 0.
    """

    container: str
    makers: tuple[int, ...]
    place: Place
    whole: bool
    phases: tuple[int, ...] = ()
    replicas: int = 0


@attrs.frozen
class Cargo:
    """Rows that a transfer takes from ``source`` and leaves as ``target``; a rider is not charged."""

    source: Rows
    target: Rows
    rider: bool


@attrs.frozen(eq=False)
class _StepFlow:
    """The flow of one kind of step, by position."""

    cargo: tuple[tuple[Cargo, ...], ...]
    inputs: tuple[tuple[Rows, ...], ...]


class Flow:
    """The flow of data through all steps of a run.

    Args:
        window: the executable graph.
        assignments: where every operator runs.

    Raises:
        ExecutionError: an operator reads a container for which there is no way from its maker.
    """

    def __init__(self, window: Window, assignments: ExecutionPlan) -> None:
        self._window = window
        self._steps = tuple(
            _Step(window, window.shape(step), assignments).flow() for step in range(window.steady_step + 1)
        )

    def cargo(self, step: int, position: int) -> tuple[Cargo, ...]:
        """What the data transfer at a position carries, its own container first."""
        return self._steps[min(step, self._window.steady_step)].cargo[position]

    def inputs(self, step: int, position: int) -> tuple[Rows, ...]:
        """The rows that the operator at a position reads; those of the dataset are not among them."""
        return self._steps[min(step, self._window.steady_step)].inputs[position]

    def holders(self, step: int, position: int, container: str) -> tuple[Allocation, ...]:
        """The GPUs that hold rows which the node at a position makes, until they are released: its own, then others."""
        found = [self._window.shape(step).nodes[position].allocation]
        for cargo in itertools.chain.from_iterable(self._steps[min(step, self._window.steady_step)].cargo):
            if cargo.rider and cargo.target.container == container and position in cargo.target.makers:
                found.append(cargo.target.place.allocation)
        return tuple(dict.fromkeys(found))


class _Step:
    def __init__(self, window: Window, shape: StepShape, assignments: ExecutionPlan) -> None:
        self.rpeg, self.nodes, self.shape = window.rpeg, shape.nodes, shape
        self.places = {name: Place(a.allocation, a.layout) for name, a in assignments.items()}
        self.cargo: list[list[Cargo]] = [[] for _ in shape.nodes]
        self.hops = self._transfers()

    def flow(self) -> _StepFlow:
        for position, node in enumerate(self.nodes):
            if node.kind is NodeKind.COMM and node.model is None:
                (makers,) = self._data_reads(position).values()
                maker = self.nodes[makers[0]].operator
                source = self._rows(node.container, makers, self.places[maker])
                self.cargo[position].append(Cargo(source, self._brought(node, (position,)), rider=False))
        inputs = [
            tuple(self._input(node, container, makers) for container, makers in self._data_reads(position).items())
            if node.kind is NodeKind.OP
            else ()
            for position, node in enumerate(self.nodes)
        ]
        return _StepFlow(tuple(map(tuple, self.cargo)), tuple(inputs))

    def _data_reads(self, position: int) -> dict[str, tuple[int, ...]]:
        """Container -> positions of the nodes of this step whose outputs are read."""
        found: dict[str, list[int]] = {}
        for back, maker, container in self.shape.reads[position]:
            if self.rpeg.container(container).kind is ContainerKind.DATA:
                if back or maker < 0:
                    raise ExecutionError(f"{self.nodes[position].label} reads {container!r} of another step")
                found.setdefault(container, []).append(maker)
        return {container: tuple(makers) for container, makers in found.items()}

    def _transfers(self) -> dict[tuple[str, str], list[int]]:
        """(operator, operator) of a data edge -> its transfers, which have one phase each when both ends are split."""
        found: dict[tuple[str, str], list[int]] = {}
        for edge in self.rpeg.data_edges:
            for position, node in enumerate(self.nodes):
                if (
                    node.kind is NodeKind.COMM
                    and node.operator == edge.target
                    and node.container == edge.container
                    and node.source == self.places[edge.source].allocation
                ):
                    found.setdefault((edge.source, edge.target), []).append(position)
        return found

    def _brought(self, node: Node, makers: tuple[int, ...]) -> Rows:
        """What a transfer leaves for the operator that waits for it: a part for each phase, else whole rows."""
        return self._rows(node.container, makers, self.places[node.operator])

    def _rows(self, container: str, makers: Sequence[int], place: Place) -> Rows:
        """Rows as their makers left them: parts when they are nodes of a length phase."""
        phases = tuple(self.nodes[maker].phase for maker in makers)
        if None in phases:
            return Rows(container, tuple(makers), place, whole=True)
        replicas = self._degree(self.nodes[makers[0]].operator)
        return Rows(container, tuple(makers), place, whole=False, phases=phases, replicas=replicas)

    def _degree(self, operator: str) -> int:
        """Data-parallel degree of the generation that made, or whose phases feed, a split operator."""
        if self.rpeg.operator(operator).role is Role.GENERATION:
            return self.places[operator].layout.data
        feeders = [edge.source for edge in self.rpeg.data_edges if edge.target == operator]
        split = [name for name in feeders if self.rpeg.operator(name).role is Role.GENERATION]
        return self.places[split[0]].layout.data

    def _input(self, reader: Node, container: str, makers: tuple[int, ...]) -> Rows:
        maker = self.nodes[makers[0]]
        here = self.places[reader.operator]
        if maker.kind is not NodeKind.OP:
            return self._rows(container, makers, here)
        made = self._rows(container, makers, self.places[maker.operator])
        if maker.allocation == reader.allocation:
            return made
        return self._ride(made, maker.operator, reader.operator)

    def _ride(self, made: Rows, source: str, target: str) -> Rows:
        """Load rows on the transfers of the best path and say where they end up."""
        rows = made
        for hop in self._path(made, source, target):
            transfers = self._that_carry(made, hop)
            if not transfers:  # both ends have the same GPUs
                continue
            by_phase = self.nodes[transfers[0]].phase is not None and not rows.whole
            if by_phase:
                arrived = attrs.evolve(rows, place=self.places[hop[1]])
            else:
                arrived = Rows(rows.container, rows.makers, self.places[hop[1]], whole=True)
            for position in transfers:
                cargo = Cargo(rows, arrived, rider=True)
                if by_phase:
                    if self.nodes[position].phase not in rows.phases:
                        continue
                    part = rows.phases.index(self.nodes[position].phase)
                    cargo = Cargo(_only(rows, part), _only(arrived, part), rider=True)
                if cargo not in self.cargo[position]:
                    self.cargo[position].append(cargo)
            rows = arrived
        return rows

    def _that_carry(self, made: Rows, hop: tuple[str, str]) -> list[int]:
        """The transfers of a hop on which rows ride: each part on that of its phase, whole rows on the last."""
        transfers = self.hops.get(hop, [])
        return transfers if not made.whole else transfers[-1:]

    def _path(self, made: Rows, source: str, target: str) -> list[tuple[str, str]]:
        """The data edges to take: fewest new rides, then fewest edges, then the graph's own order."""
        waiting = [(0, 0, (self.rpeg.index(source),))]
        seen: set[int] = set()
        while waiting:
            rides, edges, path = heapq.heappop(waiting)
            at = self.rpeg.operators[path[-1]].name
            if at == target:
                names = [self.rpeg.operators[index].name for index in path]
                return list(itertools.pairwise(names))
            if path[-1] in seen:
                continue
            seen.add(path[-1])
            for after in self._after(at):
                new = 0
                if self.places[at].allocation != self.places[after].allocation:
                    new = 0 if self._rides(made, (at, after)) else 1
                heapq.heappush(waiting, (rides + new, edges + 1, (*path, self.rpeg.index(after))))
        raise ExecutionError(
            f"no data edges lead from {source!r} to {target!r}, which reads {made.container!r}",
            hint="correct the algorithm template",
        )

    def _after(self, operator: str) -> Iterator[str]:
        return iter(dict.fromkeys(edge.target for edge in self.rpeg.data_edges if edge.source == operator))

    def _rides(self, made: Rows, hop: tuple[str, str]) -> bool:
        return any(
            cargo.rider and cargo.source.container == made.container and set(cargo.source.makers) <= set(made.makers)
            for position in self._that_carry(made, hop)
            for cargo in self.cargo[position]
        )


def part_rows(workload: Workload, phase: int, replicas: int) -> int:
    """How many rows of each of ``replicas`` replicas finish in a length phase: the cumulative fractions, rounded.

    So all phases together have every row once, and each is within one row of its share; it may be none at all.
    """
    local = workload.sequences // replicas
    done = [0.0, *(1.0 - later.alive for later in workload.phases[1:]), 1.0]
    return round(done[phase + 1] * local) - round(done[phase] * local)


def due_bytes(node: Node, rpeg: Rpeg, assignments: ExecutionPlan, workload: Workload) -> int | None:
    """What the transfer of a length phase delivers: the bytes of its whole rows; None for any other node."""
    if node.phase is None or node.container is None:
        return None
    (replicas,) = {
        assignments[edge.source].layout.data
        for edge in rpeg.data_edges
        if edge.target == node.operator
        and edge.container == node.container
        and assignments[edge.source].allocation == node.source
    }
    rows = replicas * part_rows(workload, node.phase, replicas)
    return rows * (rpeg.container(node.container).bytes // workload.sequences)


def _only(rows: Rows, part: int) -> Rows:
    """One part of several."""
    return attrs.evolve(rows, makers=(rows.makers[part],), phases=(rows.phases[part],))
