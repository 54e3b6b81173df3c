"""The time axis of memory in words: what each operator holds, what the reserve is for, how full the cache is.

Everything here follows from a prediction; nothing is a figure that the search did not use or that is not below one.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import attrs

from rpeg_core.costing.book import CostBook
from rpeg_core.costing.kv_pool import ENGINE_FRACTION, KvPool, kv_pools
from rpeg_core.costing.memory import SegmentMemory
from rpeg_core.costing.moments import SegmentMoments, first_step_growth, memory_moments
from rpeg_core.costing.reserve import Reserve, runtime_reserve
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.score import RUNTIME_RESERVE, usable_bytes
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.report import words
from rpeg_core.report.memory import gpus, largest_terms
from rpeg_core.report.page import Column, Grid, Grouping

__all__ = ["MemoryReport", "moment_table", "notes", "peak_terms"]

NOTABLE_GROWTH = 0.01
"""Share of the peak by which it must grow after the first step to be worth a line."""


@attrs.frozen(kw_only=True)
class MemoryReport:
    """What the memory of a plan is made of.

    Attributes:
        segments: moments by GPUs.
        peaks: the peak of each of them.
        reserve: None on CPU cores.
        pools: one per generation with a cache.
        usable_bytes: of a GPU.
    """

    segments: tuple[SegmentMoments, ...]
    peaks: tuple[SegmentMemory, ...]
    reserve: Reserve | None
    pools: tuple[KvPool, ...]
    usable_bytes: float

    @classmethod
    def of(cls, prediction: Prediction, plan: ExecutionPlan, book: CostBook) -> MemoryReport:
        """From a prediction of ``plan`` with the costs of ``book``."""
        rpeg, capacity = prediction.graph.rpeg, book.hardware.device.memory_bytes
        segments = memory_moments(rpeg, plan, book)
        return cls(
            segments=segments,
            peaks=prediction.memory.segments,
            reserve=runtime_reserve(rpeg, plan, book.machine.gpus, book.hardware),
            pools=kv_pools(
                rpeg,
                plan,
                book.workload,
                segments,
                usable_bytes=usable_bytes(capacity),
                capacity_bytes=capacity,
            ),
            usable_bytes=usable_bytes(capacity),
        )

    def document(self) -> dict[str, Any]:
        """For ``--json``; bytes per GPU."""
        return {
            "moments": [
                {
                    "gpus": str(segment.gpus),
                    "operator": moment.operator,
                    "phase": moment.phase.value,
                    "bytes": moment.bytes,
                    "first_step_bytes": moment.first_step_bytes,
                    "terms": [attrs.asdict(item) for item in moment.items],
                }
                for segment in self.segments
                for moment in segment.moments
            ],
            "reserve": None
            if self.reserve is None
            else {
                "gpus": str(self.reserve.gpus),
                "bytes": self.reserve.bytes,
                "context_bytes": self.reserve.context_bytes,
                "communicators": self.reserve.communicators,
                "communication_bytes": self.reserve.communication_bytes,
                "rest_bytes": self.reserve.rest_bytes,
            },
            "kv_pools": [
                {
                    "operator": pool.operator,
                    "gpus": str(pool.gpus),
                    "sequences": pool.sequences,
                    "needed_bytes": pool.needed_bytes,
                    "room_bytes": pool.room_bytes,
                    "fits": pool.fits,
                    "engine_fraction": ENGINE_FRACTION,
                    "engine_bytes": pool.engine_bytes,
                    "engine_sequences": pool.engine_sequences,
                }
                for pool in self.pools
            ],
        }


def moment_table(report: MemoryReport) -> Grid:
    """One row per GPUs, operator and phase: bytes from the second step on, and in the first."""
    rows, styles = [], []
    for segment in report.segments:
        for moment in segment.moments:
            if moment is segment.peak:
                styles.append((len(rows), "bold red" if moment.bytes > report.usable_bytes else "bold"))
            rows.append(
                (
                    gpus(segment),
                    moment.operator,
                    moment.phase.value,
                    words.gigabytes(moment.first_step_bytes),
                    words.gigabytes(moment.bytes),
                    words.percent(moment.bytes / report.usable_bytes),
                )
            )
    return Grid(
        title="memory over a step",
        columns=(
            Column("GPUs"),
            Column("operator"),
            Column("moment"),
            Column("step 1", right=True),
            Column("later", right=True),
            Column("share", right=True),
        ),
        rows=tuple(rows),
        styles=tuple(styles),
        grouping=Grouping.HEADED,
    )


def peak_terms(report: MemoryReport) -> Iterator[str]:
    """``GPUs 0-15 at their peak: actor optimizer state 30.1 GB, ...``, a sentence for each group of GPUs."""
    for segment in report.peaks:
        if segment.moment is not None:
            whose = "their" if segment.gpus.size > 1 else "its"
            yield f"{gpus(segment)} at {whose} peak: {largest_terms(segment, len(segment.items))}"


def notes(report: MemoryReport) -> Iterator[str]:
    """What a user should know beside the table, a sentence each."""
    yield from _first_step(report)
    yield from _reserve(report.reserve)
    for pool in report.pools:
        yield _pool(pool)


def _first_step(report: MemoryReport) -> Iterator[str]:
    grown = first_step_growth(report.segments)
    if grown is None or grown.peak.bytes * (1 - NOTABLE_GROWTH) < grown.first_step_bytes:
        return
    yield (
        f"step 1 peaks at {words.gigabytes(grown.first_step_bytes)} on {gpus(grown)}, later steps at "
        f"{words.gigabytes(grown.peak.bytes)}: a one-step smoke test proves nothing"
    )


def _reserve(reserve: Reserve | None) -> Iterator[str]:
    if reserve is None:
        return
    parts = (
        f"CUDA context {words.gigabytes(reserve.context_bytes)}, buffers of "
        f"{words.plural(reserve.communicators, 'communicator')} {words.gigabytes(reserve.communication_bytes)}"
    )
    kept = f"reserved: {words.percent(RUNTIME_RESERVE)} of a GPU, {words.gigabytes(reserve.bytes)}"
    if reserve.rest_bytes >= 0:
        yield f"{kept}: {parts}, fragmentation {words.gigabytes(reserve.rest_bytes)} ({gpus(reserve)})"
    else:
        yield (
            f"{kept}, is less than the runtime needs on {gpus(reserve)}: {parts}; "
            f"plan with {words.gigabytes(-reserve.rest_bytes)} less memory per GPU (cluster.memory_gb)"
        )


def _pool(pool: KvPool) -> str:
    return (
        f"{pool.operator} on {gpus(pool)}: {words.plural(pool.sequences, 'sequence')} per replica need "
        f"{words.gigabytes(pool.needed_bytes)} of KV cache, {pool.fits:,} would fit; an engine's default "
        f"({ENGINE_FRACTION:g} of the GPU) makes a pool of {words.gigabytes(pool.engine_bytes)} for "
        f"{pool.engine_sequences:,} at once"
    )
