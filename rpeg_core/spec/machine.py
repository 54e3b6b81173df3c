"""The machine: device space, allocations as intervals, link tiers, hardware profiles.

A cluster is ``racks x nodes_per_rack x gpus_per_node`` GPUs with one flat index, racks outermost
(paper, section A-C). Every legal allocation is a contiguous interval of that index (model.md, section 1).
"""

from __future__ import annotations

import enum
import math
from collections.abc import Callable, Mapping

import attrs

from rpeg_core.errors import ExperimentError
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.software import Software

__all__ = [
    "Allocation",
    "AlphaBeta",
    "AttentionEfficiency",
    "Device",
    "DeviceSpace",
    "GemmEfficiency",
    "HardwareProfile",
    "LinkTier",
    "MeasuredHardware",
    "Tier",
    "is_profile_file",
]


MOST_GPUS = 65_536
"""Beyond this the candidates of an operator, some thirty for each GPU, no longer fit in memory."""


def is_profile_file(name: str) -> bool:
    """Whether what ``cluster.hardware`` says is the path of a file, not the name of a profile."""
    return name.endswith((".yaml", ".yml", ".json")) or "/" in name


class Tier(enum.IntEnum):
    """How far apart communicating GPUs are; larger is slower (paper, section V-A1)."""

    INTRA_NODE = 0
    INTER_NODE = 1
    INTER_RACK = 2


@attrs.frozen(order=True)
class Allocation:
    """GPUs ``start .. stop - 1`` of the flat device index."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        """Number of GPUs."""
        return self.stop - self.start

    def overlap(self, other: Allocation) -> int:
        """Number of GPUs that both allocations hold."""
        return max(0, min(self.stop, other.stop) - max(self.start, other.start))

    def disjoint(self, other: Allocation) -> bool:
        """True when no GPU is in both."""
        return self.overlap(other) == 0

    def __str__(self) -> str:
        return str(self.start) if self.size == 1 else f"{self.start}-{self.stop - 1}"


@attrs.frozen(kw_only=True)
class DeviceSpace:
    """``D = [racks] x [nodes_per_rack] x [gpus_per_node]``.

    Raises:
        ExperimentError: a dimension is not a positive integer.
    """

    racks: int
    nodes_per_rack: int
    gpus_per_node: int

    def __attrs_post_init__(self) -> None:
        for name in ("racks", "nodes_per_rack", "gpus_per_node"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ExperimentError(f"cluster.{name} is {value!r}", facts=["allowed: an integer of at least 1"])
        if self.gpus > MOST_GPUS:
            raise ExperimentError(
                f"the cluster has {self.gpus:,} GPUs ({self})", facts=[f"allowed: at most {MOST_GPUS:,}"]
            )

    @property
    def gpus(self) -> int:
        """Number of GPUs in the cluster."""
        return self.racks * self.nodes_per_rack * self.gpus_per_node

    @property
    def gpus_per_rack(self) -> int:
        return self.nodes_per_rack * self.gpus_per_node

    def whole(self) -> Allocation:
        """Every GPU of the cluster."""
        return Allocation(0, self.gpus)

    def tier(self, start: int, stop: int) -> Tier:
        """The slowest tier spanned by GPUs ``start .. stop - 1``."""
        last = stop - 1
        if start // self.gpus_per_node == last // self.gpus_per_node:
            return Tier.INTRA_NODE
        if start // self.gpus_per_rack == last // self.gpus_per_rack:
            return Tier.INTER_NODE
        return Tier.INTER_RACK

    def tier_between(self, a: Allocation, b: Allocation) -> Tier:
        """The slowest tier spanned by the union of two allocations."""
        return self.tier(min(a.start, b.start), max(a.stop, b.stop))

    def __str__(self) -> str:
        return f"{self.racks}x{self.nodes_per_rack}x{self.gpus_per_node}"


@attrs.frozen
class AlphaBeta:
    """``T(M) = latency_s + M / bandwidth_bytes_per_s`` (paper, section V-A1: alpha and 1/beta)."""

    latency_s: float
    bandwidth_bytes_per_s: float

    def __attrs_post_init__(self) -> None:
        if not (self.latency_s >= 0 and math.isfinite(self.latency_s)):
            raise ValueError(f"latency_s is {self.latency_s!r}; allowed: a finite number >= 0")
        if not (self.bandwidth_bytes_per_s > 0 and math.isfinite(self.bandwidth_bytes_per_s)):
            raise ValueError(f"bandwidth_bytes_per_s is {self.bandwidth_bytes_per_s!r}; allowed: a finite number > 0")


@attrs.frozen(kw_only=True)
class LinkTier:
    """One communication tier; collectives and point-to-point are calibrated apart (paper, C-A2)."""

    collective: AlphaBeta
    p2p: AlphaBeta


@attrs.frozen(kw_only=True)
class Device:
    """One GPU.

    ``peak_flops_per_s`` is the *effective* dense 16-bit ceiling F_peak of the GEMM fit, not the datasheet
    value; ``memory_bandwidth_bytes_per_s`` is the achieved streaming rate BW_mem.

    Attributes:
        sustained_share: share of the short benchmarks' FLOP/s that a training step of seconds keeps: the clock
            falls when GEMMs run back to back at the power limit.
        clock_spread: relative standard deviation of the speed of GPUs of one kind under the power limit; a step
            waits for the slowest of N.
        fp8_speedup, fp4_speedup: F_peak of GEMMs with such inputs over the 16-bit one; None where the GPU has none
            or no measurement is known.
    """

    memory_bytes: int
    memory_bandwidth_bytes_per_s: float
    peak_flops_per_s: float
    sustained_share: float | None = None
    clock_spread: float | None = None
    fp8_speedup: float | None = None
    fp4_speedup: float | None = None


@attrs.frozen(kw_only=True)
class GemmEfficiency:
    """``eta = rows / (rows + gamma_m_rows) * width / (width + gamma_k_columns)`` (paper, D-A c)."""

    gamma_m_rows: float
    gamma_k_columns: float


@attrs.frozen(kw_only=True)
class AttentionEfficiency:
    """Fused causal attention over whole sequences: ``F = flops_per_s * l / (l + gamma_tokens)``."""

    flops_per_s: float
    gamma_tokens: float


@attrs.frozen(kw_only=True)
class HardwareProfile:
    """A GPU in its machine, as the cost terms see it.

    Attributes:
        name: what ``cluster.hardware`` names, e.g. ``a100-80gb``.
        summary: one line.
        gpus_per_node: GPUs of one node as the vendor or the platform builds it (the default of the cluster).
        device: the GPU.
        tiers: one entry per :class:`Tier`, fastest first.
        efficiency: GEMM shape efficiency.
        non_gemm_layer_s: c_ng, seconds of the TP-invariant non-GEMM work of one layer for
            ``non_gemm_reference_batch`` sequences (paper, D-E).
        non_gemm_reference_batch: B_cal.
        attention: fused attention; None: at F_peak and the GEMMs' efficiency.
        link_domain_gpus: GPUs that the intra-node links connect, when these are more than one node's.
        default_costs: cost models or single terms used when the experiment names none.
        sources: for every numeric field (dotted path) where the number comes from; complete by contract.
        price_per_gpu_hour: in US dollars when a source is known, else None.
        software: what the software that executes plans costs, for a profile that ``rpeg calibrate`` wrote.
        errors: how wrong operators priced with this profile were where they were measured, by role; they take the
            place of the cost terms' own errors, which other machines gave. Empty: nothing like this machine was ever
            measured, so that predicted times have no interval. None: the cost terms' errors count.

            .. versionadded:: 0.1
    """

    name: str
    summary: str
    gpus_per_node: int
    device: Device
    tiers: tuple[LinkTier, LinkTier, LinkTier]
    efficiency: GemmEfficiency
    non_gemm_layer_s: float
    non_gemm_reference_batch: int
    attention: AttentionEfficiency | None = None
    link_domain_gpus: int | None = None
    default_costs: tuple[str, ...] = ("analytical",)
    sources: Mapping[str, str] = attrs.field(factory=dict)
    price_per_gpu_hour: float | None = None
    software: Software | None = None
    errors: tuple[TermError, ...] | None = None


@attrs.frozen(kw_only=True)
class MeasuredHardware:
    """A profile whose numbers are found out on this machine, once somebody names it; listing it costs nothing.

    Attributes:
        name: of the profile.
        summary: one line.
        measure: ``measure(report) -> HardwareProfile`` of the same name; tells ``report`` in one line what takes its
            time, and keeps what it found where the next process finds it.
    """

    name: str
    summary: str
    measure: Callable[[Callable[[str], None]], HardwareProfile]
