"""From times of kernels and messages to the parameters of a profile, by least absolute relative errors."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.calibration.measurements import GemmTime, MessageTime
from rpeg_core.spec.machine import AlphaBeta, GemmEfficiency

__all__ = ["GemmFit", "LinkFit", "fit_gemms", "fit_link"]

Floats = NDArray[np.float64]

GRID = 41
ROUNDS = 4
GAMMAS = (1e-2, 1e4)
"""Range of both gammas, in rows and columns."""

REWEIGHTED = 20


@attrs.frozen(kw_only=True)
class GemmFit:
    """``seconds = launch + max(2 m n k / (F eta), bytes / BW)``, ``eta = m/(m + gamma_M) w/(w + gamma_K)`` (D-A c).

    Attributes:
        launch_s: what the smallest product takes; part of what a layer's host time is fitted to.
        median_error: median absolute relative error of all shapes.
        shapes: how many.
    """

    peak_flops_per_s: float
    efficiency: GemmEfficiency
    launch_s: float
    median_error: float
    shapes: int


@attrs.frozen(kw_only=True)
class LinkFit:
    """``alpha + M / bandwidth`` of one pattern."""

    link: AlphaBeta
    median_error: float
    sizes: int


def fit_gemms(times: Sequence[GemmTime], *, bytes_per_element: int, bandwidth_bytes_per_s: float) -> GemmFit:
    """Both gammas on a grid that is refined around the best point, the peak as a median."""
    m, n, k, seconds = (
        np.array([getattr(time, name) for time in times], np.float64)
        for name in ("rows", "columns", "inner", "seconds")
    )
    launch_s = 0.9 * float(seconds.min())
    moved_s = bytes_per_element * (m * k + k * n + m * n) / bandwidth_bytes_per_s
    kernel_s = seconds - launch_s
    kept = (kernel_s > launch_s) & (kernel_s > 1.5 * moved_s)
    if kept.sum() < 4:
        kept = kernel_s > 0
    rate, rows, width = (2.0 * m * n * k / kernel_s)[kept], m[kept], np.minimum(n, k)[kept]
    low, high = np.full(2, np.log(GAMMAS[0])), np.full(2, np.log(GAMMAS[1]))
    best = low
    for _ in range(ROUNDS):
        axes = [np.linspace(low[i], high[i], GRID) for i in range(2)]
        grid = np.stack(np.meshgrid(*axes, indexing="ij"), axis=-1).reshape(-1, 2)
        difference = np.log(rate)[None] - _log_eta(grid, rows, width)
        errors = np.abs(difference - np.median(difference, axis=1, keepdims=True)).sum(axis=1)
        best = grid[int(np.argmin(errors))]
        step = (high - low) / (GRID - 1)
        low, high = best - 2 * step, best + 2 * step
    peak = float(np.exp(np.median(np.log(rate) - _log_eta(best[None], rows, width)[0])))
    eta = np.exp(_log_eta(best[None], m, np.minimum(n, k))[0])
    fitted = launch_s + np.maximum(2.0 * m * n * k / (peak * eta), moved_s)
    return GemmFit(
        peak_flops_per_s=peak,
        efficiency=GemmEfficiency(gamma_m_rows=float(np.exp(best[0])), gamma_k_columns=float(np.exp(best[1]))),
        launch_s=launch_s,
        median_error=float(np.median(np.abs(fitted / seconds - 1.0))),
        shapes=len(times),
    )


def _log_eta(points: Floats, rows: Floats, width: Floats) -> Floats:
    gamma_m, gamma_k = np.exp(points[:, :1]), np.exp(points[:, 1:])
    return np.log(rows / (rows + gamma_m)) + np.log(width / (width + gamma_k))


def fit_link(times: Sequence[MessageTime]) -> LinkFit:
    """alpha and bandwidth of one pattern; an AllReduce of p ranks is ``2 (p-1) alpha + 2 (p-1)/p M/B``."""
    size, seconds, steps, share = [], [], [], []
    for time in times:
        ring = time.pattern == "all_reduce"
        size.append(float(time.bytes))
        seconds.append(time.seconds)
        steps.append(2.0 * (time.ranks - 1) if ring else 1.0)
        share.append(2.0 * (time.ranks - 1) / time.ranks if ring else 1.0)
    measured = np.array(seconds)
    features = np.stack([np.array(steps), np.array(share) * np.array(size)], axis=1) / measured[:, None]
    weights = np.ones(len(measured))
    found = np.zeros(2)
    for _ in range(REWEIGHTED):
        scaled = features * np.sqrt(weights)[:, None]
        scale = np.linalg.norm(scaled, axis=0)
        found = np.linalg.lstsq(scaled / scale, np.sqrt(weights), rcond=None)[0] / scale
        weights = 1.0 / np.maximum(np.abs(features @ found - 1.0), 1e-3)
    latency_s = max(float(found[0]), 1e-9)
    bandwidth = 1.0 / max(float(found[1]), 1e-15)
    errors = np.abs(features @ np.array([latency_s, 1.0 / bandwidth]) - 1.0)
    return LinkFit(link=AlphaBeta(latency_s, bandwidth), median_error=float(np.median(errors)), sizes=len(times))
