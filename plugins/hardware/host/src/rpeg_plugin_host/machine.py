"""What this machine has: cores and memory that this process may use, and the name of its processor."""

from __future__ import annotations

import math
import os
import platform
from collections.abc import Iterator
from pathlib import Path

__all__ = ["cores", "memory_bytes", "processor"]

ROOT = Path("/")


def cores(root: Path = ROOT) -> int:
    """Logical cores that the scheduler may give this process, at most what its control group pays for.

    Args:
        root: where ``/sys`` and ``/proc`` are.
    """
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quotas = [quota for folder in _groups(root) if (quota := _quota(folder)) is not None]
    return max(1, min([allowed, *(math.ceil(quota) for quota in quotas)]))


def memory_bytes(root: Path = ROOT) -> int:
    """Physical memory in bytes, at most the limit of the control group."""
    limits = [
        int(text)
        for folder in _groups(root)
        for name in ("memory.max", "memory/memory.limit_in_bytes")
        if (text := _text(folder / name)).isdigit()
    ]
    return min([os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), *limits])


def processor(root: Path = ROOT) -> str:
    """Name of the processor as the system knows it, e.g. ``Intel(R) Xeon(R) Platinum 8481C CPU``."""
    for line in _text(root / "proc" / "cpuinfo").splitlines():
        name, _, value = line.partition(":")
        if name.strip() == "model name" and value.strip():
            return value.strip()
    return platform.processor() or platform.machine() or "unknown processor"


def _groups(root: Path) -> Iterator[Path]:
    """Folders that may limit this process: its control group and those above it."""
    base = root / "sys" / "fs" / "cgroup"
    own = [line.partition("::")[2] for line in _text(root / "proc" / "self" / "cgroup").splitlines() if "::" in line]
    folder = base / own[0].lstrip("/") if own and ".." not in own[0] else base
    yield folder
    while folder != base:
        folder = folder.parent
        yield folder


def _quota(folder: Path) -> float | None:
    """Cores' worth of time that a control group may use, None without a limit."""
    quota, _, period = _text(folder / "cpu.max").partition(" ")
    if not (quota.isdigit() and period.isdigit()):
        quota, period = _text(folder / "cpu" / "cpu.cfs_quota_us"), _text(folder / "cpu" / "cpu.cfs_period_us")
    return int(quota) / int(period) if quota.isdigit() and period.isdigit() and int(period) else None


def _text(path: Path) -> str:
    """The content, empty when there is no such file on this system."""
    try:
        return path.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return ""
