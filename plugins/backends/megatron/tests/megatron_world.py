"""A torch world of gloo processes for tests: `run_world(function, ranks, ...)`.

``function(rank, world, *arguments)`` must stand at the top level of a module; it runs in every process with the default
process group up, and what it returns comes back in rank order. The first exception of any process is raised here with
that process's traceback; when the time is over, all processes are killed.

The processes are forked from a server that has imported torch and Megatron once: these imports take seconds.
"""

from __future__ import annotations

import datetime
import importlib.util
import multiprocessing
import os
import pickle
import sys
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

__all__ = ["WorldError", "run_world"]

START_LIMIT_S = 300.0
"""Importing torch and Megatron takes 5 s of one core, on a busy machine much longer."""

PRELOADED = ["torch.distributed", "rpeg_plugin_megatron.model", "rpeg_plugin_megatron.train"]


class WorldError(AssertionError):
    """A process of the world failed, died or took too long."""


def run_world(
    function: Callable[..., Any], ranks: int, *arguments: Any, timeout_s: float = 90.0, threads: int = 1
) -> list[Any]:
    """Run ``function(rank, ranks, *arguments)`` in ``ranks`` processes; returns the results in rank order.

    Args:
        function: a top-level function of a test module (or of any module).
        ranks: number of processes.
        arguments: picklable, the same for all ranks.
        timeout_s: wall-clock limit from when all processes have started.
        threads: torch threads per process.

    Raises:
        WorldError: with the traceback of the first process that failed.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    module = sys.modules[function.__module__]
    where = (module.__name__, str(Path(module.__file__ or "").resolve()), function.__name__)
    payload = pickle.dumps(arguments)
    with tempfile.TemporaryDirectory(prefix="rpeg-world-") as folder:
        processes, connections = [], []
        for rank in range(ranks):
            ours, theirs = context.Pipe(duplex=False)
            settings = (rank, ranks, threads, f"{folder}/store", timeout_s)
            process = context.Process(target=_child, args=(theirs, where, payload, settings), daemon=True)
            process.start()
            theirs.close()
            processes.append(process)
            connections.append(ours)
        try:
            _collect(connections, START_LIMIT_S, "start")
            return _collect(connections, timeout_s, "finish")
        finally:
            for process in processes:
                process.join(timeout=5.0)
                if process.is_alive():
                    process.kill()
                    process.join()


def _collect(connections: list[Connection], limit_s: float, what: str) -> list[Any]:
    """The next message of every rank, in rank order."""
    deadline = time.monotonic() + limit_s
    results: dict[int, Any] = {}
    waiting = dict(zip(connections, range(len(connections)), strict=True))
    while waiting:
        ready = wait(list(waiting), timeout=max(0.0, deadline - time.monotonic()))
        if not ready:
            raise WorldError(f"ranks {sorted(waiting.values())} did not {what} within {limit_s:g} s")
        for connection in ready:
            rank = waiting.pop(connection)  # type: ignore[index]
            try:
                ok, value = pickle.loads(connection.recv_bytes())  # type: ignore[union-attr]
            except EOFError:
                raise WorldError(f"rank {rank} died without a word") from None
            if not ok:
                raise WorldError(f"rank {rank}:\n{value}")
            results[rank] = value
    return [results[rank] for rank in sorted(results)]


def _child(
    connection: Connection,
    where: tuple[str, str, str],
    payload: bytes,
    settings: tuple[int, int, int, str, float],
) -> None:
    rank, ranks, threads, store, timeout_s = settings
    try:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
        import torch
        import torch.distributed as dist

        torch.set_num_threads(threads)
        function = _load(*where)
        arguments = pickle.loads(payload)
        connection.send_bytes(pickle.dumps((True, None)))
        timeout = datetime.timedelta(seconds=timeout_s)
        dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=ranks, timeout=timeout)
        result = function(rank, ranks, *arguments)
        # By value: sent as an object, a tensor would be shared memory that ends with this process.
        connection.send_bytes(pickle.dumps((True, result)))
        dist.destroy_process_group()
    except BaseException:
        connection.send_bytes(pickle.dumps((False, traceback.format_exc())))
    finally:
        connection.close()


def _load(name: str, path: str, function: str) -> Callable[..., Any]:
    """The function from its file under the module name it has in the parent, which pickled values may refer to."""
    if name not in sys.modules:
        spec = importlib.util.spec_from_file_location(name, path)
        if spec is None or spec.loader is None:
            raise ImportError(f"cannot load {path}")
        module = importlib.util.module_from_spec(spec)
        sys.modules[name] = module
        spec.loader.exec_module(module)
    loaded: Callable[..., Any] = getattr(sys.modules[name], function)
    return loaded
