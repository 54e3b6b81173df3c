"""Peak memory of every GPU against what it can use, in one line each or term by term."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from rpeg_core.costing.memory import DeviceMemory, MemoryItem, Phase, SegmentMemory
from rpeg_core.report import words
from rpeg_core.report.page import Column, Grid, Grouping
from rpeg_core.spec.machine import Allocation

__all__ = ["gpus", "largest_terms", "memory_details", "memory_overview", "moment", "out_of_memory"]

BAR_CELLS = 24
LARGEST_TERMS = 3


class _OnGpus(Protocol):
    @property
    def gpus(self) -> Allocation: ...


def moment(segment: SegmentMemory) -> str:
    """``actor_training computes gradients``, what happens at the peak; ``idle`` where nothing is placed."""
    return f"{segment.moment} {(segment.phase or Phase.RUN).value}" if segment.moment else "idle"


def gpus(segment: _OnGpus) -> str:
    """``GPU 3`` or ``GPUs 0-15``."""
    return ("GPU " if segment.gpus.size == 1 else "GPUs ") + str(segment.gpus)


def largest_terms(segment: SegmentMemory, count: int = LARGEST_TERMS) -> str:
    """``actor training state 80.3 GB, actor_training activations 20.1 GB, ... others 3.0 GB``."""
    items = sorted(segment.items, key=lambda item: -item.bytes)
    named = [f"{_owner(item)} {item.quantity} {words.gigabytes(item.bytes)}" for item in items[:count]]
    rest = sum(item.bytes for item in items[count:])
    return ", ".join([*named, *([f"others {words.gigabytes(rest)}"] if rest else [])])


def out_of_memory(memory: DeviceMemory, usable_bytes: float) -> str:
    """Which GPUs do not fit, and why: the one sentence of reports and errors."""
    peak = memory.peak
    need = "need" if peak.gpus.size > 1 else "needs"
    return (
        f"{gpus(peak)} {need} {words.gigabytes(peak.peak_bytes)} of {words.gigabytes(usable_bytes)}"
        f" while {moment(peak)}: {largest_terms(peak)}"
    )


def memory_overview(memory: DeviceMemory, usable_bytes: float) -> Grid:
    """One row per group of GPUs: bar, peak, usable, and the operator at the peak."""
    rows, styles = [], []
    for segment in memory.segments:
        share = segment.peak_bytes / usable_bytes
        if share > 1:
            styles.append((len(rows), "bold red"))
        rows.append(
            (
                str(segment.gpus),
                words.bar(share, BAR_CELLS),
                words.gigabytes(segment.peak_bytes),
                words.gigabytes(usable_bytes),
                words.percent(share),
                moment(segment),
            )
        )
    return Grid(
        title="peak memory per GPU",
        columns=(
            Column("GPUs"),
            Column("of the usable memory", drawn=True),
            Column("peak", right=True),
            Column("usable", right=True),
            Column("share", right=True),
            Column("while"),
        ),
        rows=tuple(rows),
        styles=tuple(styles),
    )


def memory_details(memory: DeviceMemory, usable_bytes: float, operators: Sequence[str] | None = None) -> Grid:
    """Every term of every group of GPUs; with ``operators`` only theirs."""
    rows, styles = [], []
    for segment in memory.segments:
        if operators is None:
            over = segment.peak_bytes > usable_bytes
            styles.append((len(rows), "bold red" if over else "bold"))
            when = f"while {moment(segment)}" if segment.moment else "idle"
            rows.append((gpus(segment), "", "peak", when, *_size(segment.peak_bytes, usable_bytes)))
        for item in segment.items:
            if operators is None or item.operator in operators:
                held = "always" if item.persistent else "while running"
                size = _size(item.bytes, usable_bytes)
                rows.append((gpus(segment), _owner(item), item.quantity, held, *size))
    return Grid(
        title=f"memory per GPU, by term; {words.gigabytes(usable_bytes)} usable",
        columns=(
            Column("GPUs"),
            Column("of"),
            Column("term"),
            Column("held"),
            Column("size", right=True),
            Column("share", right=True),
        ),
        rows=tuple(rows),
        styles=tuple(styles),
        grouping=Grouping.FIRST_ROW if operators is None else Grouping.HEADED,
    )


def _size(value: float, usable_bytes: float) -> tuple[str, str]:
    return words.gigabytes(value), words.percent(value / usable_bytes)


def _owner(item: MemoryItem) -> str:
    return item.model if item.persistent and item.model is not None else item.operator
