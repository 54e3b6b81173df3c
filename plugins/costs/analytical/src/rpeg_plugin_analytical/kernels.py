"""Seconds of single kernels on one GPU: GEMMs by shape and precision, attention, memory-bound work."""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpeg_core.spec.execution import Precision
from rpeg_core.spec.machine import HardwareProfile
from rpeg_plugin_analytical.roofline import gemm_utilization

__all__ = ["attention_flops_per_s", "gemm_flops_per_s", "gemm_seconds", "input_bytes", "stream_s"]

Floats = NDArray[np.float64]


def gemm_flops_per_s(hardware: HardwareProfile, precision: Precision = Precision.BF16, *, sustained: bool) -> float:
    """F_peak of a precision; a GPU without FP8 or FP4 GEMMs runs them as 16-bit ones.

    Args:
        hardware: the profile.
        precision: of the inputs.
        sustained: whether kernels follow each other for seconds, so that the power limit lowers the clock.
    """
    device = hardware.device
    flops = device.peak_flops_per_s
    if precision in (Precision.FP8, Precision.MXFP8):
        flops *= device.fp8_speedup or 1.0
    elif precision is Precision.NVFP4:
        flops *= device.fp4_speedup or device.fp8_speedup or 1.0
    return flops * (device.sustained_share or 1.0 if sustained else 1.0)


def input_bytes(precision: Precision, bytes_per_element: int) -> float:
    """Bytes of a GEMM's input element; block scales of MXFP8 (1/32) and NVFP4 (1/16 byte) included."""
    return {Precision.FP8: 1.0, Precision.MXFP8: 1.0 + 1 / 32, Precision.NVFP4: 0.5 + 1 / 16}.get(
        precision, float(bytes_per_element)
    )


def gemm_seconds(
    hardware: HardwareProfile,
    rows: ArrayLike,
    columns: ArrayLike,
    inner: ArrayLike,
    *,
    flops_per_s: float,
    element_bytes: float = 2.0,
    extra_bytes: ArrayLike = 0.0,
    stream_share: float = 1.0,
) -> Floats:
    """``max(2 m n k / (F eta(m, min(n, k))), bytes / BW)`` of a GEMM m x k by k x n (paper, D-A a to c)."""
    m, n, k = (np.asarray(x, np.float64) for x in (rows, columns, inner))
    utilization = gemm_utilization(m, np.minimum(n, k), hardware.efficiency)
    moved = element_bytes * (m * k + k * n) + 2.0 * m * n + np.asarray(extra_bytes)
    compute_s = 2.0 * m * n * k / (flops_per_s * utilization)
    return np.maximum(compute_s, moved / (stream_share * hardware.device.memory_bandwidth_bytes_per_s))


def attention_flops_per_s(hardware: HardwareProfile, tokens: ArrayLike, width: ArrayLike) -> Floats:
    """FLOP/s of fused causal attention over ``tokens`` positions; without a curve, that of the GEMMs."""
    curve = hardware.attention
    if curve is None:
        rows = np.asarray(tokens, np.float64)
        return hardware.device.peak_flops_per_s * gemm_utilization(rows, width, hardware.efficiency)
    length = np.asarray(tokens, np.float64)
    return curve.flops_per_s * length / (length + curve.gamma_tokens)


def stream_s(hardware: HardwareProfile, moved_bytes: ArrayLike) -> Floats:
    """``bytes / BW_mem``."""
    return np.asarray(moved_bytes, np.float64) / hardware.device.memory_bandwidth_bytes_per_s
