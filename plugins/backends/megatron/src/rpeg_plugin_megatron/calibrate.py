"""``rpeg calibrate`` with this backend: starts the measuring processes and reads what they find. Imports no torch."""

from __future__ import annotations

import contextlib
import datetime
import importlib.metadata
import json
import os
import platform
import queue
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import IO, Any

from rpeg_core.calibration.measurements import (
    CalibrationRequest,
    GemmTime,
    Measurements,
    MessageTime,
    OperatorTime,
)
from rpeg_core.errors import BackendError
from rpeg_core.spec.software import Software
from rpeg_plugin_megatron import host
from rpeg_plugin_megatron.calibrate_points import points

__all__ = ["measure"]

SILENCE_S = 300.0
"""A measuring process that says nothing for so long hangs."""


def measure(request: CalibrationRequest) -> Measurements:
    """Measure this machine with one process per device, at most two.

    Raises:
        BackendError: a GPU is asked for and there is none; a process failed or hangs.
        KeyboardInterrupt: no process is left behind.
    """
    if request.device == "cuda" and not host.shown_gpus():
        raise BackendError("this machine shows no GPU", hint="--device cpu measures its cores")
    began = time.monotonic()
    cpu = request.device == "cpu" or (request.device == "auto" and not host.shown_gpus())
    devices = host.cores() if cpu else max(1, host.shown_gpus())
    ranks = min(2, devices)
    found = _Found()
    with (
        tempfile.TemporaryDirectory(prefix="rpeg-calibrate-") as folder,
        _processes(Path(folder), ranks, "cpu" if cpu else "cuda", quick=request.quick) as lines,
    ):
        request.progress(0.0, "starting")
        for line in lines:
            if "share" in line:
                request.progress(float(line["share"]), str(line["what"]))
            else:
                found.add(line)
    wanted = points(cpu=cpu, ranks=ranks, quick=request.quick)
    operators = tuple(
        OperatorTime(
            name=point.name,
            role=point.role,
            model=point.model,
            workload=point.workload,
            data=point.layout.data,
            pipeline=point.layout.pipeline,
            tensor=point.layout.tensor,
            microbatches=point.microbatches,
            seconds=found.operators[index],
        )
        for index, point in enumerate(wanted.operators)
    )
    return Measurements(
        device=_processor() if cpu else found.device,
        versions=f"torch {found.torch}, megatron-core {importlib.metadata.version('megatron-core')}",
        devices=devices,
        memory_bytes=_memory_bytes() // devices if cpu else found.memory_bytes,
        bytes_per_element=found.bytes_per_element,
        gemms=tuple(found.gemms),
        messages=tuple(_message_times(found.messages, ranks)),
        operators=operators,
        copy_bytes_per_s=found.copy_bytes_per_s,
        node_s=None,
        software=Software(
            backend="megatron",
            launches="synchronous" if cpu else "asynchronous",
            recompute="none",
            attention="unfused",
            scored="responses",
            gradient_bytes=4.0,
        ),
        seconds=round(time.monotonic() - began, 1),
        at=datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
    )


class _Found:
    """What the lines of rank 0 say."""

    def __init__(self) -> None:
        self.device, self.torch, self.bytes_per_element, self.memory_bytes = "", "", 0, 0
        self.gemms: list[GemmTime] = []
        self.messages: list[tuple[str, int, float]] = []
        self.operators: dict[int, float] = {}
        self.copy_bytes_per_s = 0.0

    def add(self, line: dict[str, Any]) -> None:
        if "gemm" in line:
            rows, columns, inner = line["gemm"]
            self.gemms.append(GemmTime(rows=rows, columns=columns, inner=inner, seconds=line["seconds"]))
        elif "copy" in line:
            self.copy_bytes_per_s = line["copy"]
        elif "operator" in line:
            self.operators[line["operator"]] = line["seconds"]
        elif "device" in line:
            self.device, self.torch = line["device"], line["torch"]
            self.bytes_per_element, self.memory_bytes = line["bytes_per_element"], line["memory_bytes"]
        else:
            for pattern in ("all_reduce", "p2p"):
                if pattern in line:
                    self.messages.append((pattern, line[pattern], line["seconds"]))


def _message_times(messages: list[tuple[str, int, float]], ranks: int) -> Iterator[MessageTime]:
    """Messages as records."""
    for pattern, size, seconds in messages:
        yield MessageTime(pattern=pattern, ranks=ranks, bytes=size, seconds=seconds)


@contextlib.contextmanager
def _processes(folder: Path, ranks: int, device: str, *, quick: bool) -> Iterator[Iterator[dict[str, Any]]]:
    """The lines of rank 0; all processes are ended when the context is left."""
    command = [sys.executable, "-W", "ignore", "-m", "rpeg_plugin_megatron.calibrate_main"]
    command += ["--ranks", str(ranks), "--store", str(folder / "store"), "--device", device]
    command += ["--quick"] if quick else []
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
        "PYTHONUNBUFFERED": "1",
        "OMP_NUM_THREADS": "1",
    }
    running: list[subprocess.Popen[str]] = []
    try:
        for rank in range(ranks):
            with (folder / f"rank-{rank}.log").open("w") as log:
                running.append(
                    subprocess.Popen(
                        [*command, "--rank", str(rank)],
                        env=environment,
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE if rank == 0 else log,
                        stderr=log,
                        text=True,
                        start_new_session=True,
                    )
                )
        yield _lines(running, folder)
    finally:
        for process in running:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


def _lines(running: list[subprocess.Popen[str]], folder: Path) -> Iterator[dict[str, Any]]:
    arrived: queue.Queue[str | None] = queue.Queue()
    output = running[0].stdout
    assert output is not None
    threading.Thread(target=_forward, args=(output, arrived), daemon=True).start()
    silent_since = time.monotonic()
    while True:
        try:
            line = arrived.get(timeout=1.0)
        except queue.Empty:
            for rank, process in enumerate(running):
                if process.poll() not in (None, 0):
                    raise _failure(rank, folder) from None
            if time.monotonic() - silent_since > SILENCE_S:
                raise BackendError(f"measuring stands still for {SILENCE_S:g} s") from None
            continue
        silent_since = time.monotonic()
        if line is None:
            break
        if line.startswith("{"):
            yield json.loads(line)
    for rank, process in enumerate(running):
        try:
            status = process.wait(timeout=30.0)
        except subprocess.TimeoutExpired:
            status = 1
        if status != 0:
            raise _failure(rank, folder)


def _forward(output: IO[str], arrived: queue.Queue[str | None]) -> None:
    for line in output:
        arrived.put(line)
    arrived.put(None)


def _failure(rank: int, folder: Path) -> BackendError:
    last = (folder / f"rank-{rank}.log").read_text(errors="replace").strip().splitlines()[-3:]
    return BackendError(f"measuring process {rank} failed", facts=last or ["it said nothing"])


def _memory_bytes() -> int:
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _processor() -> str:
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()
