"""Seconds of GEMM work on one GPU: the calibrated roofline (paper, D-A a to c).

``T = W_dev / F_eff`` with ``F_eff = min(F_peak * eta, I * BW_mem)`` and ``I = W_dev / bytes`` is
``max(W_dev / (F_peak * eta), bytes / BW_mem)``, the form used here: it needs no division by the work.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpeg_core.spec.machine import Device, GemmEfficiency

__all__ = ["gemm_utilization", "roofline_s"]

Floats = NDArray[np.float64]


def gemm_utilization(rows: ArrayLike, width: ArrayLike, efficiency: GemmEfficiency) -> Floats:
    """``eta = rows/(rows + gamma_M) * w/(w + gamma_K)``; rows = b_loc * l, w = min(d, d_ff)/Pt."""
    m, w = np.asarray(rows, np.float64), np.asarray(width, np.float64)
    return m / (m + efficiency.gamma_m_rows) * w / (w + efficiency.gamma_k_columns)


def roofline_s(flops: ArrayLike, moved_bytes: ArrayLike, utilization: ArrayLike, device: Device) -> Floats:
    """The longer of computing ``flops`` at ``utilization`` of F_peak and moving ``moved_bytes`` at BW_mem."""
    compute_s = np.asarray(flops, np.float64) / (device.peak_flops_per_s * np.asarray(utilization))
    return np.maximum(compute_s, np.asarray(moved_bytes, np.float64) / device.memory_bandwidth_bytes_per_s)
