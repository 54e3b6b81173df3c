"""Numbers as people read them: 91.8 GB, 12.6 s, 31,204 tok/s. One GB is 10^9 bytes."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

__all__ = [
    "bar",
    "count",
    "duration",
    "gigabytes",
    "listing",
    "percent",
    "plural",
    "seconds",
    "seconds_within",
    "size",
    "times",
    "tokens_per_s",
    "tokens_per_s_within",
]

_TIMES = ((1.0, "s"), (1e-3, "ms"), (1e-6, "µs"))
_SIZES = ((1e12, "TB"), (1e9, "GB"), (1e6, "MB"), (1e3, "kB"))


def seconds(value: float) -> str:
    """``1.23 s``, ``45.6 ms``, ``7.89 µs``; three significant digits, whole seconds from 100 on."""
    for unit, name in _TIMES:
        if value >= unit * 0.9995:
            return f"{_three(value / unit)} {name}"
    return "0 s" if value == 0 else f"{_three(value / 1e-6)} µs"


def seconds_within(value: float, low: float, high: float) -> str:
    """``3.99 s (3.5-4.6)``: a time and its interval in the same unit; two digits, rounded outwards."""
    text = seconds(value)
    unit = next((size for size, name in _TIMES if text.endswith(f" {name}")), 1.0)
    return f"{text} {_within(low / unit, high / unit)}"


def tokens_per_s_within(value: float, low: float, high: float) -> str:
    """``84,662 tok/s (46,000-85,000)``."""
    return f"{tokens_per_s(value)} {_within(low, high)}"


def _within(low: float, high: float) -> str:
    return f"({_two(low, math.floor)}-{_two(high, math.ceil)})"


def _two(value: float, rounded: Callable[[float], int]) -> str:
    """Two significant digits."""
    if value <= 0:
        return "0"
    digits = 1 - math.floor(math.log10(value))
    scaled = rounded(round(value * 10.0**digits, 6))  # what is a whole number but for the last bit stays one
    whole = scaled / 10.0**digits
    return f"{whole:,.0f}" if digits <= 0 else f"{whole:.{digits}f}"


def duration(value: float) -> str:
    """``0:07``, ``12:34``, ``1:02:03``: whole seconds as a clock shows them."""
    minutes, rest = divmod(round(value), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"


def size(value: float) -> str:
    """``78.2 GB``, ``1.57 MB``, ``512 B``; three significant digits."""
    for unit, name in _SIZES:
        if value >= unit * 0.9995:
            return f"{_three(value / unit)} {name}"
    return f"{value:.0f} B"


def gigabytes(value: float) -> str:
    """Always GB with one decimal, for numbers that are compared with each other: ``78.2 GB``."""
    return f"{value / 1e9:,.1f} GB"


def tokens_per_s(value: float) -> str:
    return f"{value:,.0f} tok/s" if value >= 10 else f"{value:.2g} tok/s"


def percent(share: float) -> str:
    return f"{100 * share:.0f}%" if share >= 0.0995 or share == 0 else f"{100 * share:.1f}%"


def times(ratio: float) -> str:
    """``×1.30``; two significant digits of what is below a tenth: ``×0.0041``."""
    return f"×{ratio:.2g}" if 0 < ratio < 0.0995 else f"×{ratio:.2f}"


def count(value: int) -> str:
    return f"{value:,}"


def plural(number: int, noun: str) -> str:
    """``1 GPU``, ``2 GPUs``."""
    return f"{number:,} {noun}" + ("" if number == 1 else "s")


def listing(parts: Sequence[str]) -> str:
    """``a``, ``a and b``, ``a, b and c``."""
    return " and ".join([", ".join(parts[:-1]), parts[-1]] if len(parts) > 1 else list(parts))


def bar(share: float, width: int) -> str:
    """A bar of ``width`` cells, filled for ``share`` (cut to 0..1); anything above 0 shows at least one cell."""
    filled = max(1, min(width, round(share * width))) if share > 0 else 0
    return "█" * filled + "░" * (width - filled)


def _three(value: float) -> str:
    if value >= 99.95:
        return f"{value:,.0f}"
    return f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
