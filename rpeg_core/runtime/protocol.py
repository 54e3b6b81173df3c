"""What the engine and the controller of a run say to each other: events in, instructions out.

Times are seconds on the controller's clock, virtual or real; the engine only compares them with each other. These
are values without behaviour: how they travel to workers is the backend's business.
"""

from __future__ import annotations

import attrs

from rpeg_core.passes.lower import Node
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation

__all__ = [
    "Artifact",
    "Cancel",
    "Dispatch",
    "Event",
    "Instruction",
    "NodeFinished",
    "Pause",
    "Proceed",
    "Release",
    "Stop",
    "Tick",
    "WorkerLost",
]


@attrs.frozen
class Artifact:
    """One container, or one length phase's part of it, on the GPUs where it was made or brought.

    Attributes:
        node: index of the node that made it over the run; negative for weights that are there from the start.
        container: what it is.
        allocation: GPUs that hold it.
        layout: how weights are split over them; for data, how their maker was; None for data that a transfer brought.
    """

    node: int
    container: str
    allocation: Allocation
    layout: Layout | None


@attrs.frozen
class NodeFinished:
    """All ranks of a dispatched node are done with it."""

    node: int
    time_s: float


@attrs.frozen
class WorkerLost:
    """The worker of GPU ``rank`` died or stopped answering; ``reason`` says how that was noticed."""

    rank: int
    reason: str
    time_s: float


@attrs.frozen
class Tick:
    """Time passed; lets the engine notice a node that runs longer than the limit."""

    time_s: float


@attrs.frozen
class Cancel:
    """The user wants the run to end: nothing more is dispatched, what runs finishes, then it stops."""

    reason: str
    time_s: float


@attrs.frozen
class Proceed:
    """The controller has done what it paused for."""

    time_s: float


@attrs.frozen
class Dispatch:
    """Run a node on all GPUs of ``held``, which it has to itself until it is reported finished.

    Attributes:
        node: what to run; ``node.models`` and ``node.version`` bind the weights that it uses or installs, and
            ``node.index`` names it in :class:`NodeFinished`.
        inputs: what it reads. A container of the dataset, or the weights of a frozen model, is not among them: they
            are no node's work.
        held: the operator's allocation; for a transfer its destination, then its source where that is another.
    """

    node: Node
    inputs: tuple[Artifact, ...]
    held: tuple[Allocation, ...]


@attrs.frozen
class Release:
    """Nothing will read the artifact any more."""

    artifact: Artifact


@attrs.frozen
class Pause:
    """All of steps ``0 .. step - 1`` is done and nothing runs, until :class:`Proceed`: time for a checkpoint."""

    step: int


@attrs.frozen
class Stop:
    """The run is over: every step is done, it was cancelled, or it ``failed``.

    ``facts`` are one line each, as in an RpegError.
    """

    reason: str
    failed: bool
    facts: tuple[str, ...] = ()


Event = NodeFinished | WorkerLost | Tick | Cancel | Proceed
Instruction = Dispatch | Release | Pause | Stop
