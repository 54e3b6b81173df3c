"""Alpha-beta times of collectives over ``ranks`` GPUs (model.md, section 3; paper, V-A1).

Every function takes bytes per GPU and the ranks of the group, arrays of shape (n,) or scalars, and returns
seconds. A group of one GPU sends nothing and costs nothing.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpeg_core.costing.batches import Links

__all__ = ["all_gather_s", "all_reduce_s", "all_to_all_s", "point_to_point_s", "reduce_scatter_s"]

Floats = NDArray[np.float64]


def all_reduce_s(payload_bytes: ArrayLike, ranks: ArrayLike, links: Links) -> Floats:
    """``2 (p-1) alpha + 2 (p-1)/p M beta``: a ring."""
    return 2.0 * reduce_scatter_s(payload_bytes, ranks, links)


def reduce_scatter_s(payload_bytes: ArrayLike, ranks: ArrayLike, links: Links) -> Floats:
    """``(p-1) alpha + (p-1)/p M beta``; M is the unreduced buffer of one GPU."""
    p = np.asarray(ranks, np.float64)
    return (p - 1.0) * links.latency_s + (p - 1.0) / p * np.asarray(payload_bytes) / links.bandwidth_bytes_per_s


def all_gather_s(payload_bytes: ArrayLike, ranks: ArrayLike, links: Links) -> Floats:
    """``(p-1) alpha + (p-1)/p M beta``; M is the gathered buffer of one GPU."""
    return reduce_scatter_s(payload_bytes, ranks, links)


def all_to_all_s(payload_bytes: ArrayLike, ranks: ArrayLike, links: Links) -> Floats:
    """``(p-1) alpha + M beta``; M is what one GPU sends."""
    p = np.asarray(ranks, np.float64)
    sent_bytes = np.where(p > 1.0, np.asarray(payload_bytes, np.float64), 0.0)
    return (p - 1.0) * links.latency_s + sent_bytes / links.bandwidth_bytes_per_s


def point_to_point_s(payload_bytes: ArrayLike, links: Links) -> Floats:
    """``alpha + M beta``."""
    return links.latency_s + np.asarray(payload_bytes, np.float64) / links.bandwidth_bytes_per_s
