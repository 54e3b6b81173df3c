"""What controller and workers say to each other.

Values only; they travel pickled over :mod:`multiprocessing.connection`, which needs the run's key. The first words of
a worker are :class:`Hello`; it is answered with :class:`Setup`. After :class:`Ready` a worker does what it is told in
the order in which it is told, and answers every :class:`Execute` with :class:`Done`, every :class:`Checkpoint`,
:class:`Restore` and :class:`Export` with :class:`Saved`, or with :class:`Failed`, after which it ends.
:class:`Alive` may come at any time. A worker whose connection closes ends by itself.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from rpeg_core.errors import RpegError
from rpeg_core.passes.lower import Node
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.lengths import Response
from rpeg_core.runtime.protocol import Artifact
from rpeg_plugin_megatron.settings import Settings

__all__ = [
    "Alive",
    "Checkpoint",
    "Done",
    "Drop",
    "Execute",
    "Export",
    "Failed",
    "FromWorker",
    "Hello",
    "Measured",
    "Ready",
    "Rendezvous",
    "Restore",
    "Saved",
    "Setup",
    "Shutdown",
    "ToWorker",
]


@attrs.frozen(kw_only=True)
class Setup:
    """Become rank ``rank`` of ``world`` and build everything that the plan needs.

    Attributes:
        rank: global rank, the device of the plan with that index.
        world: number of ranks.
        plan: what will run.
        settings: of the backend.
        worker: dotted name ``package.module:Class`` of the class that does the work.
    """

    rank: int
    world: int
    plan: Plan
    settings: Settings
    worker: str


@attrs.frozen
class Rendezvous:
    """Where torch's key-value store listens; rank 0 says it to the controller, the controller to all other ranks."""

    host: str
    port: int


@attrs.frozen
class Execute:
    """Run a node together with the other ranks that hold it; ``inputs`` is what it reads, as in a ``Dispatch``."""

    node: Node
    inputs: tuple[Artifact, ...]


@attrs.frozen
class Drop:
    """Nothing will read these artifacts any more; a rank that does not hold one passes over it."""

    artifacts: tuple[Artifact, ...]


@attrs.frozen
class Checkpoint:
    """Write everything that this rank needs to go on at the start of RL step ``step`` into the folder."""

    folder: str
    step: int


@attrs.frozen
class Restore:
    """Take back what :class:`Checkpoint` wrote into the folder, instead of the initial weights."""

    folder: str


@attrs.frozen
class Export:
    """Write the newest weights of a model as a Hugging Face folder, together with the other ranks that hold it."""

    folder: str
    model: str


@attrs.frozen
class Shutdown:
    """Leave the process groups and end."""


@attrs.frozen(kw_only=True)
class Hello:
    """A worker process is there.

    Attributes:
        rank: that it was started as.
        pid: of the process.
        host: name of its machine.
    """

    rank: int
    pid: int
    host: str


@attrs.frozen
class Ready:
    """The rank is set up; ``device`` says what it runs on, e.g. ``cpu`` or ``cuda:0 NVIDIA H200``."""

    rank: int
    device: str


@attrs.frozen
class Alive:
    """The rank's process still runs; from a thread of its own, also during long work."""

    rank: int


@attrs.frozen(kw_only=True)
class Done:
    """The rank's part of a node is done.

    Attributes:
        rank: who says it.
        node: index of the node over the run.
        seconds: of work on this rank, waiting for others included.
        bytes: unique payload of the container that a transfer first delivered to this rank; summed over the ranks, all
            that arrived (see :func:`rpeg_plugin_megatron.metrics.charged_bytes`).
        wire_bytes: really sent by this rank to other ranks.
        metrics: name -> value, e.g. ``loss``; of the whole batch, or a mean over this replica's share of it.
    """

    rank: int
    node: int
    seconds: float
    bytes: int = 0
    wire_bytes: int = 0
    metrics: Mapping[str, float] = attrs.field(factory=dict)


@attrs.frozen(kw_only=True)
class Measured(Done):
    """A worker that measures the lengths of responses generated some: those of its replica, from its first rank."""

    responses: tuple[Response, ...]


@attrs.frozen
class Saved:
    """A checkpoint, restore or export of this rank is complete and on disk; ``folder`` is the one that was named."""

    rank: int
    folder: str


@attrs.frozen(kw_only=True)
class Failed:
    """The rank cannot go on.

    Attributes:
        rank: who says it.
        node: index of the node that it was at, None outside of nodes.
        lines: what happened, one line each, the most important first; the traceback after that.
        error: the error itself, when it is one that RPEG raises on purpose.
    """

    rank: int
    node: int | None
    lines: tuple[str, ...]
    error: RpegError | None = None


ToWorker = Setup | Rendezvous | Execute | Drop | Checkpoint | Restore | Export | Shutdown
FromWorker = Hello | Rendezvous | Ready | Alive | Done | Saved | Failed
