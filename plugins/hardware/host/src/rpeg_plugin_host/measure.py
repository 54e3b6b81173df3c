"""Measures this machine with one process per device, all at once, since workers too run side by side."""

from __future__ import annotations

import datetime
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Mapping

import attrs
import numpy as np

from rpeg_plugin_host.fit import GemmFit, compute_bound, fit_gemm
from rpeg_plugin_host.kernels import ROWS, WEIGHTS
from rpeg_plugin_host.loopback import Links, measure_links

__all__ = ["Measurement", "measure"]

MOST_PROCESSES = 16
TIMEOUT_S = 180.0
THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "VECLIB_MAXIMUM_THREADS")


@attrs.frozen(kw_only=True)
class Measurement:
    """What was measured of one device; rates are those of a core while the others are busy too.

    Attributes:
        at: local time, ISO 8601.
        seconds: how long it took.
        processes: how many ran at once.
        gemm: the fit of the FP32 GEMM rate.
        copy_bytes_per_s: read plus written.
        layer_s: of the work in :data:`rpeg_plugin_host.kernels.LAYER`.
        links: of two processes over the loopback interface.
    """

    at: str
    seconds: float
    processes: int
    gemm: GemmFit
    copy_bytes_per_s: float
    layer_s: float
    links: Links


def measure(devices: int) -> Measurement:
    """Measure ``devices`` cores, at most :data:`MOST_PROCESSES` at once.

    Raises:
        RuntimeError: a process failed.
        TimeoutError: one took longer than TIMEOUT_S.
    """
    began = time.monotonic()
    environment = {**os.environ, **dict.fromkeys(THREADS, "1")}
    found = _kernels(min(devices, MOST_PROCESSES), environment)
    links = measure_links(environment)
    rates = np.mean([document["gemm_flops_per_s"] for document in found], axis=0)
    copy = statistics.fmean(document["copy_bytes_per_s"] for document in found)
    return Measurement(
        at=datetime.datetime.now().astimezone().isoformat(timespec="minutes"),
        seconds=round(time.monotonic() - began, 1),
        processes=len(found),
        gemm=_gemm(rates, copy),
        copy_bytes_per_s=copy,
        layer_s=statistics.fmean(document["layer_s"] for document in found),
        links=links,
    )


def _gemm(rates: np.ndarray, copy_bytes_per_s: float) -> GemmFit:
    """Fit rates of shape (rows, weights)."""
    m, shapes = np.array(ROWS, np.float64), np.array(WEIGHTS, np.float64)
    rows = np.repeat(m, len(shapes))
    inputs, outputs = np.tile(shapes[:, 0], len(m)), np.tile(shapes[:, 1], len(m))
    flops = rates.reshape(-1)
    kept = compute_bound(rows, inputs, outputs, flops, copy_bytes_per_s)
    if not kept.any():  # a machine that reads memory faster than it multiplies
        kept = np.ones(len(rows), bool)
    return fit_gemm(rows[kept], np.minimum(inputs, outputs)[kept], flops[kept])


def _kernels(count: int, environment: Mapping[str, str]) -> list[dict[str, object]]:
    command = [sys.executable, "-m", "rpeg_plugin_host.kernels"]
    running = [
        subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            env=dict(environment),
            text=True,
        )
        for _ in range(count)
    ]
    try:
        for process in running:
            assert process.stdout is not None
            process.stdout.readline()
        deadline = time.monotonic() + TIMEOUT_S
        for process in running:
            assert process.stdin is not None
            if process.poll() is None:
                process.stdin.write("\n")
                process.stdin.flush()
        return [_result(process, deadline) for process in running]
    finally:
        for process in running:
            process.kill()
            process.communicate()


def _result(process: subprocess.Popen[str], deadline: float) -> dict[str, object]:
    try:
        out, problem = process.communicate(timeout=max(0.1, deadline - time.monotonic()))
    except subprocess.TimeoutExpired:
        raise TimeoutError(f"measuring a core took longer than {TIMEOUT_S:g} s") from None
    if process.returncode != 0:
        last = (problem.strip().splitlines() or ["no message"])[-1]
        raise RuntimeError(f"the process that measures a core ended with {process.returncode}: {last}")
    document: dict[str, object] = json.loads(out)
    return document
