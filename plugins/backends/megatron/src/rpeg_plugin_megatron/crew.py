"""The workers of a run as the controller sees them: messages to them, messages from them, and which of them are lost.

A worker is lost when its process ends, its connection breaks, it says that it failed, or it is silent for longer than
``heartbeat_timeout_s`` after it was ready. Nothing here waits without a limit.
"""

from __future__ import annotations

import selectors
import time
from collections.abc import Callable, Iterable, Sequence
from multiprocessing.connection import Connection

import attrs

from rpeg_core.errors import ExecutionError, RpegError
from rpeg_core.planning.plan import Plan
from rpeg_plugin_megatron.launcher import Launcher
from rpeg_plugin_megatron.links import Listener
from rpeg_plugin_megatron.messages import (
    Alive,
    Failed,
    FromWorker,
    Hello,
    Ready,
    Rendezvous,
    Setup,
    Shutdown,
    ToWorker,
)
from rpeg_plugin_megatron.settings import Settings

__all__ = ["Crew", "Lost"]

LINES_SHOWN = 15
"""Lines of a lost worker's output that an error shows."""

END_S = 10.0
"""How long workers may take to end when they are told to."""

LATE_S = 0.5
"""How long to wait, when a worker is lost, for what explains it: its exit status, or the failure of another."""

POLL_S = 0.2
"""How often to look at what does not wake the controller: ended processes, silence, Ctrl-C."""


@attrs.frozen
class Lost:
    """A worker is gone; ``lines`` are its last words, if it had any, and ``error`` what it raised on purpose."""

    rank: int
    reason: str
    lines: tuple[str, ...] = ()
    error: RpegError | None = None


@attrs.define
class _Member:
    """A worker that called."""

    connection: Connection
    pid: int
    host: str
    device: str | None = None  # until it is ready
    heard_s: float = 0.0


class Crew:
    """All workers of a run, by rank.

    Args:
        launcher: starts them.
        plan, settings, worker: what they are told, see :class:`Setup`.
        clock: monotonic, in seconds.
    """

    def __init__(
        self, launcher: Launcher, plan: Plan, settings: Settings, worker: str, clock: Callable[[], float]
    ) -> None:
        self._launcher, self._plan, self._settings, self._worker = launcher, plan, settings, worker
        self._clock = clock
        self.world = max(a.allocation.stop for a in plan.assignments.values())
        self._members: dict[int, _Member] = {}
        self._lost: dict[int, Lost] = {}
        self._selector = selectors.DefaultSelector()
        self._rendezvous: Rendezvous | None = None
        self._looked_s = -POLL_S

    def start(self, cancelled: Callable[[], bool], status: Callable[[str], None]) -> bool:
        """Start the workers and wait until they are ready; False when the user cancelled.

        Raises:
            ExecutionError: one was lost, or they were not ready in time.
            RpegError: what one of them raised on purpose.
            BackendError: nobody can listen at the address.
        """
        deadline = self._clock() + self._settings.setup_timeout_s
        limit_s = self._settings.heartbeat_timeout_s
        listener = Listener(self._launcher.listen, self._launcher.key, send_limit_s=limit_s)
        try:
            self._selector.register(listener, selectors.EVENT_READ)
            host, port = listener.address
            status(f"starting {self.world} workers (controller at {host}:{port})")
            self._launcher.start(listener.address, self.world)
            while sum(member.device is not None for member in self._members.values()) < self.world:
                if cancelled():
                    return False
                for key, _ in self._selector.select(POLL_S):
                    if key.fileobj is listener:
                        self._welcome(listener.accept())
                self._take_in(self.receive(0.0))
                if self._clock() > deadline:
                    raise self._late()
        finally:
            self._selector.unregister(listener)
            listener.close()
        return True

    def device(self, rank: int) -> str:
        """Words for where a worker runs: its device and process."""
        member = self._members.get(rank)
        if member is None:
            return "not started"
        return f"{member.device or 'not ready'}, process {member.pid} on {member.host}"

    def send(self, ranks: Iterable[int], message: ToWorker) -> None:
        """Give workers a message; one that cannot take it is lost, which :meth:`receive` will say."""
        for rank in ranks:
            if rank in self._members and rank not in self._lost:
                try:
                    self._members[rank].connection.send(message)
                except OSError as error:
                    self._lose(Lost(rank, f"it takes no messages: {error.strerror or error}"))

    def receive(self, timeout_s: float = POLL_S) -> list[FromWorker | Lost]:
        """What workers said since the last call, waiting for it for a bounded time; signs of life left out.

        Lost workers come last, each time, the likeliest cause first.
        """
        found: list[FromWorker | Lost] = []
        known = len(self._lost)
        for key, _ in self._selector.select(0.0 if self._lost else timeout_s):
            if isinstance(key.data, int):
                self._read(key.data, found)
        if len(self._lost) == known:
            self._look_around()
        if len(self._lost) > known:
            self._explain(found)
        return [*found, *sorted(self._lost.values(), key=lambda lost: bool(lost.lines))]

    def last_words(self, rank: int, lines: Sequence[str] = ()) -> list[str]:
        """What a worker said or printed last, for messages: ``lines``, or the end of its log."""
        log = self._launcher.log(rank)
        where = "" if log is None else f" ({log})"
        found = lines or self._launcher.last_lines(rank, LINES_SHOWN)
        return [f"last words of worker {rank}{where}:", *(f"  {line}" for line in found)] if found else []

    def dump_stacks(self) -> None:
        """Have local workers print where they are, and give them a moment to do it."""
        self._launcher.dump_stacks()
        time.sleep(LATE_S)

    def dismiss(self) -> None:
        """Tell all to end, wait for that, and end those that do not."""
        self.send(range(self.world), Shutdown())
        self._launcher.wait(END_S)
        self.close()

    def close(self) -> None:
        """End all at once; may be called more than once."""
        self._launcher.kill()
        for member in self._members.values():
            member.connection.close()
        self._members.clear()
        self._selector.close()
        self._selector = selectors.DefaultSelector()

    # Start

    def _welcome(self, connection: Connection | None) -> None:
        if connection is None:
            return
        try:
            hello = connection.recv()
        except (OSError, EOFError):
            connection.close()
            return
        if not isinstance(hello, Hello) or hello.rank in self._members or hello.rank >= self.world:
            connection.close()
            return
        self._members[hello.rank] = _Member(connection, hello.pid, hello.host)
        self._selector.register(connection, selectors.EVENT_READ, hello.rank)
        setup = Setup(rank=hello.rank, world=self.world, plan=self._plan, settings=self._settings, worker=self._worker)
        self.send([hello.rank], setup)
        if self._rendezvous is not None:
            self.send([hello.rank], self._rendezvous)

    def _take_in(self, messages: Iterable[FromWorker | Lost]) -> None:
        for message in messages:
            match message:
                case Rendezvous():
                    self._rendezvous = message
                    self.send([rank for rank in self._members if rank != 0], message)
                case Ready(rank, device):
                    self._members[rank].device = device
                    self._members[rank].heard_s = self._clock()
                case Lost():
                    raise self._failure(message)

    def _late(self) -> ExecutionError:
        waiting = [rank for rank in range(self.world) if rank not in self._members or not self._members[rank].device]
        rank = waiting[0]
        return ExecutionError(
            f"workers {', '.join(map(str, waiting))} of {self.world} were not ready"
            f" within {self._settings.setup_timeout_s:g} s",
            facts=[f"worker {rank}: {self.device(rank)}", *self.last_words(rank)],
            hint="raise megatron.setup_timeout_s if they only needed more time",
        )

    def _failure(self, lost: Lost) -> RpegError:
        if lost.error is not None:
            return lost.error
        return ExecutionError(
            f"worker {lost.rank} failed while it was set up: {lost.reason}",
            facts=[f"worker {lost.rank}: {self.device(lost.rank)}", *self.last_words(lost.rank, lost.lines)],
        )

    # Loss

    def _read(self, rank: int, found: list[FromWorker | Lost]) -> None:
        """All messages that have arrived from a worker."""
        member = self._members[rank]
        try:
            while member.connection.poll():
                message = member.connection.recv()
                member.heard_s = self._clock()
                if isinstance(message, Failed):
                    self._lose(Lost(rank, message.lines[0], message.lines, message.error))
                elif not isinstance(message, Alive):
                    found.append(message)
        except (OSError, EOFError):
            self._lose(Lost(rank, "its connection broke"))

    def _look_around(self) -> None:
        """Processes that ended, and workers that have been silent for too long."""
        now, limit_s = self._clock(), self._settings.heartbeat_timeout_s
        if now - self._looked_s < POLL_S:
            return
        self._looked_s = now
        for rank, words in self._launcher.ended().items():
            self._lose(Lost(rank, words))
        for rank, member in self._members.items():
            silent = member.device is not None and now - member.heard_s > limit_s
            if silent and not member.connection.poll():  # unread words: it was this process that paused
                self._lose(Lost(rank, f"it has been silent for {now - member.heard_s:.1f} s"))

    def _lose(self, lost: Lost) -> None:
        if lost.rank not in self._lost:
            self._lost[lost.rank] = lost
            if lost.rank in self._members:
                self._selector.unregister(self._members[lost.rank].connection)

    def _explain(self, found: list[FromWorker | Lost]) -> None:
        """Wait a moment: a broken connection becomes an exit status, and others may have failed for the same cause."""
        deadline = self._clock() + LATE_S
        while self._clock() < deadline:
            for key, _ in self._selector.select(LATE_S / 10):
                if isinstance(key.data, int):
                    self._read(key.data, found)
        for rank, words in self._launcher.ended().items():
            if rank in self._lost and not self._lost[rank].lines:
                self._lost[rank] = Lost(rank, words)
