"""Measures one core: ``python -m rpeg_plugin_host.kernels``, one process per device, all at the same time.

The process says ``ready``, waits for a line so that all begin together, and prints its numbers as JSON. The parent sets
the number of BLAS threads to 1 before it starts it. Times are processor time, which other processes on the machine do
not stretch by taking the core away, and the best of several repetitions: what disturbs a measurement only makes it
longer.
"""

from __future__ import annotations

import json
import math
import sys
import time
from collections.abc import Callable

import numpy as np

__all__ = ["LAYER", "ROWS", "WEIGHTS", "main"]

ROWS = (1, 4, 16, 64, 256, 1024)
WEIGHTS = ((64, 64), (64, 256), (128, 512), (256, 256), (256, 1024), (512, 2048), (1024, 1024))
"""(inputs, outputs) of the weight matrices; with ROWS the shapes of GEMM that are timed."""

STREAM_BYTES = 64 * 2**20
"""Larger than the caches that a core has to itself."""

LAYER = (8, 128, 256)
"""Sequences, tokens of each and hidden width of the non-GEMM work of a layer."""

BATCHES = 5
BATCH_S = 0.008


def main() -> None:
    """Measure and print ``{"gemm_flops_per_s": [[...]], "copy_bytes_per_s": ..., "layer_s": ...}``."""
    rng = np.random.default_rng(0)
    print("ready", flush=True)
    sys.stdin.readline()
    document = {
        "gemm_flops_per_s": [[_gemm(rng, m, *weights) for weights in WEIGHTS] for m in ROWS],
        "copy_bytes_per_s": _copy(),
        "layer_s": _layer(rng),
    }
    print(json.dumps(document))


def _gemm(rng: np.random.Generator, rows: int, inputs: int, outputs: int) -> float:
    x = rng.standard_normal((rows, inputs)).astype(np.float32)
    w = rng.standard_normal((inputs, outputs)).astype(np.float32)
    out = np.empty((rows, outputs), np.float32)
    return 2.0 * rows * inputs * outputs / _seconds(lambda: np.matmul(x, w, out=out))


def _copy() -> float:
    """Bytes read and written per second."""
    source = np.ones(STREAM_BYTES // 4, np.float32)
    target = np.zeros_like(source)
    return 2.0 * STREAM_BYTES / _seconds(lambda: np.copyto(target, source))


def _layer(rng: np.random.Generator) -> float:
    """Two root-mean-square norms and two residual additions."""
    x = rng.standard_normal(LAYER).astype(np.float32)
    scale = np.ones(LAYER[-1], np.float32)

    def norm(value: np.ndarray) -> np.ndarray:
        return value / np.sqrt(np.mean(value * value, axis=-1, keepdims=True) + 1e-6) * scale

    return _seconds(lambda: norm(norm(x) + x) + x)


def _seconds(work: Callable[[], object]) -> float:
    start = time.process_time()
    work()
    repeats = max(1, math.ceil(BATCH_S / max(time.process_time() - start, 1e-7)))
    best = math.inf
    for _ in range(BATCHES):
        start = time.process_time()
        for _ in range(repeats):
            work()
        best = min(best, (time.process_time() - start) / repeats)
    return best


if __name__ == "__main__":
    main()
