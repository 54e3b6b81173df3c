"""``F_peak, gamma_M, gamma_K`` of ``F m/(m + gamma_M) w/(w + gamma_K)``, w the lesser of inputs and outputs (D-A c)."""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = ["GemmFit", "compute_bound", "fit_gemm"]

Floats = NDArray[np.float64]

GRID = 41
ROUNDS = 4
WIDEST = (1e-2, 1e4)
"""Range of both gammas, in rows and columns."""


@attrs.frozen(kw_only=True)
class GemmFit:
    """The parameters, the median relative error of the fit and the number of shapes."""

    peak_flops_per_s: float
    gamma_m_rows: float
    gamma_k_columns: float
    median_error: float
    shapes: int


def compute_bound(
    rows: Floats, inputs: Floats, outputs: Floats, flops_per_s: Floats, bandwidth_bytes_per_s: float
) -> NDArray[np.bool_]:
    """Which shapes have more FLOPs per byte of fp32 than the machine has at its best rate; arrays of shape (n,)."""
    moved_bytes = 4.0 * (rows * inputs + inputs * outputs + rows * outputs)
    intensity = 2.0 * rows * inputs * outputs / moved_bytes
    return intensity > float(np.max(flops_per_s)) / bandwidth_bytes_per_s


def fit_gemm(rows: Floats, width: Floats, flops_per_s: Floats) -> GemmFit:
    """Least absolute errors of log FLOP/s on a grid of both gammas that is refined around the best point.

    Args:
        rows, width, flops_per_s: m, w and the measured rate of each shape, arrays of shape (n,), n >= 1.
    """
    low, high = np.full(2, np.log(WIDEST[0])), np.full(2, np.log(WIDEST[1]))
    best = low
    for _ in range(ROUNDS):
        axes = [np.linspace(low[i], high[i], GRID) for i in range(2)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
        residuals = _residuals(grid, rows, width, flops_per_s)
        best = grid[int(np.argmin(np.abs(residuals).sum(axis=1)))]
        step = (high - low) / (GRID - 1)
        low, high = best - 2 * step, best + 2 * step
    eta = _log_eta(best[None], rows, width)[0]
    log_peak = float(np.median(np.log(flops_per_s) - eta))
    errors = np.abs(np.expm1(eta + log_peak - np.log(flops_per_s)))
    return GemmFit(
        peak_flops_per_s=float(np.exp(log_peak)),
        gamma_m_rows=float(np.exp(best[0])),
        gamma_k_columns=float(np.exp(best[1])),
        median_error=float(np.median(errors)),
        shapes=len(rows),
    )


def _residuals(grid: Floats, rows: Floats, width: Floats, flops_per_s: Floats) -> Floats:
    """log measured - log fitted, with the best peak for each point of the grid; shape (points, n)."""
    difference = np.log(flops_per_s)[None] - _log_eta(grid, rows, width)
    return difference - np.median(difference, axis=1, keepdims=True)


def _log_eta(grid: Floats, rows: Floats, width: Floats) -> Floats:
    gamma_m, gamma_k = np.exp(grid[:, :1]), np.exp(grid[:, 1:])
    return np.log(rows / (rows + gamma_m)) + np.log(width / (width + gamma_k))
