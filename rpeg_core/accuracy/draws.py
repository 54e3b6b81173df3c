"""Draws of errors, the same in every process, and intervals of what is computed from them.

Each error has its own :data:`DRAWS` standard normal numbers: one from each of as many equally likely slices, in an
order that depends on the error's name alone. So one error's quantiles are exact, different errors are independent, and
two plans that share an error share its draws: ratios between plans have intervals too.
"""

from __future__ import annotations

import functools
import statistics
import zlib

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = ["CONFIDENCE", "DRAWS", "Interval", "standard_normal"]

Floats = NDArray[np.float64]

CONFIDENCE = 0.9
"""Of every interval: the share of measurements that lie inside **[choice]**."""

DRAWS = 2000


@attrs.frozen
class Interval:
    """Where a measurement is expected with :data:`CONFIDENCE`; half of the rest lies on either side."""

    low: float
    high: float

    @classmethod
    def of(cls, draws: Floats, predicted: float) -> Interval:
        """The interval of draws, widened to hold the prediction: nobody expects what we do not predict."""
        tail = (1.0 - CONFIDENCE) / 2.0
        low, high = np.quantile(draws, (tail, 1.0 - tail))
        return cls(min(float(low), predicted), max(float(high), predicted))

    def holds(self, value: float) -> bool:
        return self.low <= value <= self.high


@functools.lru_cache(maxsize=256)
def standard_normal(name: str) -> Floats:
    """The draws of one error, shape (:data:`DRAWS`,), read-only."""
    found = _slices()[np.random.default_rng(zlib.crc32(name.encode())).permutation(DRAWS)]
    found.setflags(write=False)
    return found


@functools.cache
def _slices() -> Floats:
    normal = statistics.NormalDist()
    return np.array([normal.inv_cdf((i + 0.5) / DRAWS) for i in range(DRAWS)])
