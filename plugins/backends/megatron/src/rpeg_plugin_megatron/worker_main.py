"""The process of one rank: ``python -m rpeg_plugin_megatron.worker_main``, started by whatever launcher.

It reads from the environment

=================== ================================================================================================
RPEG_CONTROLLER     ``HOST:PORT`` where the controller listens
RPEG_AUTHKEY        the key of the run
RANK, WORLD_SIZE    global rank and number of ranks (torchrun), or SLURM_PROCID and SLURM_NTASKS
LOCAL_RANK          rank on this machine (torchrun), or SLURM_LOCALID
MASTER_ADDR, _PORT  torch's rendezvous, when the launcher provides one; else rank 0 opens it and the controller tells
RPEG_LOCAL          set by the launcher ``local``: everything stays on loopback
=================== ================================================================================================

Three threads: the main one works; one receives, so that the loss of the controller ends the process even in the midst
of a collective; one says every few seconds that the process lives. Errors of the work go to the controller as
:class:`Failed`; the process then waits to be ended, so that what the other ranks see is not the consequence.
"""

from __future__ import annotations

import contextlib
import datetime
import faulthandler
import importlib
import os
import queue
import signal
import socket
import sys
import threading
import time
import traceback
import warnings
from collections.abc import Mapping
from multiprocessing.connection import Connection
from typing import TYPE_CHECKING, Any

import attrs

from rpeg_core.errors import BackendError, RpegError
from rpeg_plugin_megatron.links import connect, key_from_text, parse_address
from rpeg_plugin_megatron.messages import (
    Alive,
    Checkpoint,
    Drop,
    Execute,
    Export,
    Failed,
    FromWorker,
    Hello,
    Ready,
    Rendezvous,
    Restore,
    Saved,
    Setup,
    Shutdown,
    ToWorker,
)

if TYPE_CHECKING:
    from torch.distributed import Store

__all__ = ["Environment", "main"]

CONNECT_S = 120.0
"""How long a worker waits for its controller to listen."""

END_S = 30.0
"""How long a worker that failed waits to be ended, and how long one may take to end that was told to."""

BEATS = 5
"""Signs of life within the time after which a silent worker is lost."""


@attrs.frozen(kw_only=True)
class Environment:
    """What a launcher tells a worker."""

    controller: tuple[str, int]
    key: bytes
    rank: int
    world: int
    local_rank: int
    local: bool
    has_rendezvous: bool

    @classmethod
    def read(cls, variables: Mapping[str, str]) -> Environment:
        """From environment variables.

        Raises:
            BackendError: one is missing or wrong.
        """

        def number(*names: str) -> int:
            for name in names:
                if name in variables:
                    if not variables[name].isdecimal():
                        raise BackendError(f"{name} is {variables[name]!r}", facts=["allowed: a number from 0"])
                    return int(variables[name])
            raise BackendError(
                f"{names[0]} is not set",
                facts=[f"looked for: {', '.join(names)}"],
                hint="start workers with torchrun, srun, or the launcher `local`",
            )

        for name in ("RPEG_CONTROLLER", "RPEG_AUTHKEY"):
            if name not in variables:
                raise BackendError(
                    f"{name} is not set", hint="the README of rpeg-plugin-megatron shows how to start external workers"
                )
        return cls(
            controller=parse_address(variables["RPEG_CONTROLLER"], "RPEG_CONTROLLER"),
            key=key_from_text(variables["RPEG_AUTHKEY"], "RPEG_AUTHKEY"),
            rank=number("RANK", "SLURM_PROCID"),
            world=number("WORLD_SIZE", "SLURM_NTASKS"),
            local_rank=number("LOCAL_RANK", "SLURM_LOCALID"),
            local="RPEG_LOCAL" in variables,
            has_rendezvous="MASTER_ADDR" in variables and "MASTER_PORT" in variables,
        )


class _Controller:
    """The worker's end of the connection; sending is for every thread."""

    def __init__(self, connection: Connection) -> None:
        self._connection, self._sending = connection, threading.Lock()
        self._received: queue.SimpleQueue[ToWorker] = queue.SimpleQueue()

    def send(self, message: FromWorker) -> None:
        with self._sending:
            self._connection.send(message)

    def receive(self) -> ToWorker:
        """The next message, in the order in which they were sent."""
        return self._received.get()

    def listen(self) -> None:
        """Thread: take in messages; end the process when there is nobody to send any, or when it does not end."""
        message: ToWorker | None = None
        while not isinstance(message, Shutdown):
            try:
                message = self._connection.recv()
            except (OSError, EOFError):
                print("the controller closed the connection", file=sys.stderr, flush=True)
                os._exit(1)
            self._received.put(message)
        time.sleep(END_S)
        print("the end took too long", file=sys.stderr, flush=True)
        os._exit(1)

    def live(self, rank: int, interval_s: float) -> None:
        """Thread: give a sign of life."""
        with contextlib.suppress(OSError):  # the other thread ends the process
            while True:
                self.send(Alive(rank))
                time.sleep(interval_s)


def main() -> int:
    """Do what the controller says until it says to end; returns the exit status."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches every process; the controller decides
    faulthandler.enable()
    faulthandler.register(signal.SIGUSR1)  # the controller asks a node that takes too long where it is
    try:
        environment = Environment.read(os.environ)
        os.environ.pop("RPEG_AUTHKEY")
        connection = connect(environment.controller, environment.key, patience_s=CONNECT_S)
    except BackendError as error:
        print(error, file=sys.stderr)
        return int(error.exit_code)
    controller = _Controller(connection)
    controller.send(Hello(rank=environment.rank, pid=os.getpid(), host=socket.gethostname()))
    threading.Thread(target=controller.listen, name="receive", daemon=True).start()
    setup = controller.receive()
    assert isinstance(setup, Setup)
    beat = (environment.rank, setup.settings.heartbeat_timeout_s / BEATS)
    threading.Thread(target=controller.live, args=beat, name="live", daemon=True).start()
    status = _Process(environment, controller, setup).run()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # the threads of gloo and of this module need no farewell


class _Process:
    """The main thread's work."""

    def __init__(self, environment: Environment, controller: _Controller, setup: Setup) -> None:
        self.environment, self.controller, self.setup = environment, controller, setup
        self.rank = environment.rank
        self.worker: Any = None
        self.node: int | None = None

    def run(self) -> int:
        try:
            self._set_up()
            while self._do(self.controller.receive()):
                pass
        except Exception as error:  # whatever it is, the controller must hear of it
            traceback.print_exc()
            sys.stderr.flush()
            on_purpose = error if isinstance(error, RpegError) else None
            self.controller.send(Failed(rank=self.rank, node=self.node, lines=_lines(error), error=on_purpose))
            time.sleep(END_S)
            return 1
        return 0

    def _set_up(self) -> None:
        _prepare(self.environment, self.setup)
        module, _, name = self.setup.worker.partition(":")
        make = getattr(importlib.import_module(module), name)
        self.worker = make(self.rank, self.setup.world, self.setup.plan, self.setup.settings)
        device = self.worker.setup(self._store())
        self.controller.send(Ready(self.rank, device))

    def _store(self) -> Store | None:
        """Torch's key-value store: rank 0 takes a free port and says it. None when the launcher has one.

        A worker class that does without torch says ``uses_torch = False``.
        """
        if self.environment.has_rendezvous or not getattr(self.worker, "uses_torch", True):
            return None
        from torch.distributed import TCPStore

        limit = datetime.timedelta(seconds=self.setup.settings.setup_timeout_s)
        if self.rank == 0:
            host = "127.0.0.1" if self.environment.local else socket.gethostname()
            listening = socket.create_server(("127.0.0.1" if self.environment.local else "", 0))
            port = listening.getsockname()[1]
            store = TCPStore(
                host,
                port,
                is_master=True,
                timeout=limit,
                wait_for_workers=False,
                master_listen_fd=listening.detach(),
            )
            self.controller.send(Rendezvous(host, port))
            return store
        where = self.controller.receive()
        assert isinstance(where, Rendezvous)
        return TCPStore(where.host, where.port, is_master=False, timeout=limit, wait_for_workers=False)

    def _do(self, message: ToWorker) -> bool:
        """Carry out a message; False after the last."""
        match message:
            case Execute(node):
                self.node = node.index
                done = self.worker.execute(message)
                self.node = None
                self.controller.send(done)
            case Drop(artifacts):
                self.worker.drop(artifacts)
            case Checkpoint(folder, step):
                self.worker.checkpoint(folder, step)
                self.controller.send(Saved(self.rank, folder))
            case Restore(folder):
                self.worker.restore(folder)
                self.controller.send(Saved(self.rank, folder))
            case Export(folder, model):
                self.worker.export(folder, model)
                self.controller.send(Saved(self.rank, folder))
            case Shutdown():
                self.worker.close()
                return False
        return True


def _prepare(environment: Environment, setup: Setup) -> None:
    """Variables that torch, gloo and OpenMP read when they are loaded; no warnings of libraries to each other.

    Megatron-Core remarks at every start that optional packages are missing, torch that Megatron calls old names. What a
    worker printed last is part of an error message, and these would hide what matters.
    """
    for library in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=rf"{library}\.")
    threads = str(setup.settings.threads_per_worker)
    os.environ.update(
        RANK=str(environment.rank),
        WORLD_SIZE=str(environment.world),
        LOCAL_RANK=str(environment.local_rank),
        OMP_NUM_THREADS=threads,
        MKL_NUM_THREADS=threads,
    )
    if environment.local:
        loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), "lo")
        os.environ["GLOO_SOCKET_IFNAME"] = loopback


def _lines(error: Exception) -> tuple[str, ...]:
    """What happened, then, unless that was said on purpose, where; the log has that in any case."""
    if isinstance(error, RpegError):
        hint = () if error.hint is None else (f"hint: {error.hint}",)
        return (error.what, *error.facts, *hint)
    what = tuple("".join(traceback.format_exception_only(error)).strip().splitlines())
    frames = "".join(traceback.format_tb(error.__traceback__)).splitlines()
    return (*what, *frames)


if __name__ == "__main__":
    sys.exit(main())
