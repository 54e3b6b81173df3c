"""Who starts the worker processes, and what is known of them: ``local`` starts them here, ``external`` waits for them.

Local workers run the same entry point as external ones, :mod:`rpeg_plugin_megatron.worker_main`, each in a session of
its own, so that Ctrl-C in a terminal does not reach them. What they print goes to one file each.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Protocol

from rpeg_core.errors import BackendError
from rpeg_plugin_megatron.links import Address, key_from_text, parse_address
from rpeg_plugin_megatron.settings import Settings

__all__ = ["External", "Launcher", "Local", "launcher_for"]

LOOPBACK = "127.0.0.1"

REAP_S = 5.0
"""How long the operating system may take to end a killed process."""


class Launcher(Protocol):
    """Where workers come from.

    Attributes:
        key: of the run.
        listen: where the controller is to listen.
    """

    key: bytes
    listen: Address

    def start(self, controller: Address, world: int) -> None:
        """Start the workers of all ranks, which call the controller at that address."""
        ...

    def ended(self) -> Mapping[int, str]:
        """Rank -> how its process ended, of those that did."""
        ...

    def log(self, rank: int) -> Path | None:
        """The file of what a worker prints; None when that is not here."""
        ...

    def last_lines(self, rank: int, count: int) -> tuple[str, ...]:
        """The last lines that a worker printed; empty when that is unknown here."""
        ...

    def dump_stacks(self) -> None:
        """Have the workers print where they are."""
        ...

    def wait(self, limit_s: float) -> None:
        """Wait until all processes have ended, at most so long."""
        ...

    def kill(self) -> None:
        """End what still runs, at once."""
        ...


def launcher_for(settings: Settings, logs: Path, environment: Mapping[str, str]) -> Launcher:
    """The launcher that the settings name.

    Args:
        settings: of the backend.
        logs: existing folder for what local workers print.
        environment: variables of this process.

    Raises:
        BackendError: external workers without a key, or an address that cannot be read.
    """
    if settings.launcher == "local":
        return Local(logs, environment)
    return External(parse_address(settings.listen, "megatron.listen"), environment)


class Local:
    """One process per rank on this machine."""

    def __init__(self, logs: Path, environment: Mapping[str, str]) -> None:
        self.key = secrets.token_hex(32).encode()
        self.listen: Address = (LOOPBACK, 0)
        self._logs, self._environment = logs, environment
        self._processes: dict[int, subprocess.Popen[bytes]] = {}

    def log(self, rank: int) -> Path:
        """Within the folder for logs."""
        return self._logs / f"worker-{rank}.log"

    def start(self, controller: Address, world: int) -> None:
        for rank in range(world):
            with self.log(rank).open("wb") as log:
                self._processes[rank] = subprocess.Popen(
                    [sys.executable, "-m", "rpeg_plugin_megatron.worker_main"],
                    env=self._variables(controller, rank, world),
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                    start_new_session=True,
                )

    def ended(self) -> Mapping[int, str]:
        found = {rank: process.poll() for rank, process in self._processes.items()}
        return {rank: _words(status) for rank, status in found.items() if status is not None}

    def last_lines(self, rank: int, count: int) -> tuple[str, ...]:
        try:
            text = self.log(rank).read_bytes()[-100_000:].decode(errors="replace")
        except OSError as error:
            return (f"{self.log(rank)} cannot be read: {error.strerror}",)
        return tuple(text.splitlines()[-count:])

    def dump_stacks(self) -> None:
        for process in self._processes.values():
            if process.poll() is None:
                process.send_signal(signal.SIGUSR1)

    def wait(self, limit_s: float) -> None:
        deadline = time.monotonic() + limit_s
        for process in self._processes.values():
            with contextlib.suppress(subprocess.TimeoutExpired):
                process.wait(max(0.0, deadline - time.monotonic()))

    def kill(self) -> None:
        running = [process for process in self._processes.values() if process.poll() is None]
        for process in running:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.killpg(process.pid, signal.SIGKILL)
        for process in running:
            process.wait(REAP_S)

    def _variables(self, controller: Address, rank: int, world: int) -> dict[str, str]:
        host, port = controller
        inherited = {name: value for name, value in self._environment.items() if name not in _OF_OTHER_LAUNCHERS}
        return {
            **inherited,
            "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),  # what can be imported here, can there
            "PYTHONUNBUFFERED": "1",
            "RPEG_CONTROLLER": f"{host}:{port}",
            "RPEG_AUTHKEY": self.key.decode(),
            "RPEG_LOCAL": "1",
            "RANK": str(rank),
            "WORLD_SIZE": str(world),
            "LOCAL_RANK": str(rank),
        }


_OF_OTHER_LAUNCHERS = frozenset({"MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_USE_AGENT_STORE"})
"""Variables of a torchrun job around this command; its workers are not ours."""


class External:
    """Workers that torchrun, srun or somebody else starts, on this or other machines."""

    def __init__(self, listen: Address, environment: Mapping[str, str]) -> None:
        if "RPEG_AUTHKEY" not in environment:
            raise BackendError(
                "RPEG_AUTHKEY is not set",
                facts=["external workers and the controller know each other by it"],
                hint="export RPEG_AUTHKEY=$(openssl rand -hex 32), here and for the workers",
            )
        self.key = key_from_text(environment["RPEG_AUTHKEY"], "RPEG_AUTHKEY")
        self.listen = listen

    def start(self, controller: Address, world: int) -> None:
        """Nothing; they come by themselves."""

    def ended(self) -> Mapping[int, str]:
        return {}

    def log(self, rank: int) -> Path | None:
        return None

    def last_lines(self, rank: int, count: int) -> tuple[str, ...]:
        return ()

    def dump_stacks(self) -> None:
        """Their stacks would go to where their launcher puts what they print; nobody here could read it."""

    def wait(self, limit_s: float) -> None:
        """They end when they are told to, or when the connection closes."""

    def kill(self) -> None:
        """They end when the connection closes."""


def _words(status: int) -> str:
    """How a process ended."""
    if status >= 0:
        return f"its process ended with exit status {status}"
    try:
        name = signal.Signals(-status).name
    except ValueError:
        name = f"signal {-status}"
    return f"its process was killed by {name}"
