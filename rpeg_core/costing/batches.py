"""What a cost term sees: arrays over layouts or transfers, so that it is called once per problem, not per plan."""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.ir import Role
from rpeg_core.planning.assignment import Layout, Mode
from rpeg_core.spec.execution import Execution, Recompute
from rpeg_core.spec.frameworks import defaults_of
from rpeg_core.spec.machine import AlphaBeta, DeviceSpace, HardwareProfile, LinkTier
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import LengthPhase, Workload

__all__ = ["FusedBatch", "Layouts", "Links", "MemoryBatch", "OperatorBatch", "TransferBatch", "execution_of", "links"]

Ints = NDArray[np.int64]
Floats = NDArray[np.float64]
Part = TypeVar("Part", "OperatorBatch", "MemoryBatch")


@attrs.frozen(eq=False)
class Links:
    """alpha and 1/beta per element of a batch: ``T(M) = latency_s + M / bandwidth_bytes_per_s``."""

    latency_s: Floats
    bandwidth_bytes_per_s: Floats


def links(tiers: tuple[LinkTier, ...], tier: Ints, *, collective: bool) -> Links:
    """The link parameters of each element's tier, collective or point-to-point."""
    chosen: list[AlphaBeta] = [t.collective if collective else t.p2p for t in tiers]
    return Links(
        np.array([c.latency_s for c in chosen])[tier],
        np.array([c.bandwidth_bytes_per_s for c in chosen])[tier],
    )


@attrs.frozen(kw_only=True, eq=False)
class Layouts:
    """n legal (layout, microbatch) pairs of one operator, as int64 arrays of shape (n,).

    Attributes:
        data, pipeline, tensor, microbatches: Pd, Pp, Pt, mb.
        gpus: Pd * Pc * Pp * Pt.
        data_tier: tier that the whole allocation spans (data-parallel collectives).
        stage_tier: slowest tier that a pipeline replica spans.
        stages_per_node: s = min(Pp, Ng // (Pc Pt)), at least 1.
        context, expert: Pc and Pe; ones when left out.
        mode: index into ``modes``; zeros when left out.
        modes: the modes that occur.
    """

    data: Ints
    pipeline: Ints
    tensor: Ints
    microbatches: Ints
    gpus: Ints
    data_tier: Ints
    stage_tier: Ints
    stages_per_node: Ints
    context: Ints = attrs.field(default=attrs.Factory(lambda self: np.ones_like(self.data), takes_self=True))
    expert: Ints = attrs.field(default=attrs.Factory(lambda self: np.ones_like(self.data), takes_self=True))
    mode: Ints = attrs.field(default=attrs.Factory(lambda self: np.zeros_like(self.data), takes_self=True))
    modes: tuple[Mode, ...] = (Mode(),)

    def __len__(self) -> int:
        return len(self.data)

    def layout(self, index: int) -> Layout:
        """The layout of a row."""
        columns = (self.data, self.pipeline, self.tensor, self.context, self.expert)
        return Layout(*(int(column[index]) for column in columns))

    def mode_of(self, index: int) -> Mode:
        """The mode of a row."""
        return self.modes[self.mode[index]]

    def take(self, rows: Ints) -> Layouts:
        """The rows at ``rows``, in that order."""
        columns = {f.name: getattr(self, f.name)[rows] for f in attrs.fields(Layouts) if f.name != "modes"}
        return Layouts(**columns, modes=self.modes)

    def executed_alike(self) -> tuple[Ints, ...]:
        """Row numbers in groups that have Pc, Pe and the mode in common, what one :class:`Execution` says."""
        if not len(self):
            return (np.zeros(0, np.int64),)
        keys = np.stack([self.context, self.expert, self.mode])
        _, group = np.unique(keys, axis=1, return_inverse=True)
        return tuple(np.flatnonzero(group.reshape(-1) == g) for g in range(int(group.max()) + 1))


def execution_of(
    hardware: HardwareProfile,
    *,
    context: int = 1,
    expert: int = 1,
    mode: Mode | None = None,
    framework: str = "",
    cache_bytes_per_element: float | None = None,
) -> Execution:
    """What a plan says of one operator, completed for the cost terms.

    Where the plan is silent it is the paper's subset; of recomputation, without a named framework, what the software
    measured on the machine does; of sharding, what a named framework does.
    """
    mode, software = mode or Mode(), hardware.software
    recompute = mode.recompute
    if recompute is None:
        measured = software is not None and not framework
        recompute = Recompute(software.recompute) if measured else Recompute.FULL
    return Execution(
        framework=framework,
        precision=mode.precision,
        recompute=recompute,
        sequence_parallel=mode.sequence_parallel,
        context=context,
        expert=expert,
        sharding=defaults_of(framework).sharding,
        cache_bytes_per_element=cache_bytes_per_element,
    )


@attrs.frozen(kw_only=True, eq=False)
class _LayoutBatch:
    role: Role
    model: ModelSpec | None
    seconds_per_sample: float | None
    workload: Workload
    machine: DeviceSpace
    hardware: HardwareProfile
    layouts: Layouts
    settings: Any
    execution: Execution = attrs.field(
        default=attrs.Factory(
            lambda self: execution_of(self.hardware, cache_bytes_per_element=self.workload.cache_bytes_per_element),
            takes_self=True,
        )
    )

    @property
    def tp_links(self) -> Links:
        """Collective parameters of tensor-parallel groups; those stay inside a node (P1)."""
        return links(self.hardware.tiers, np.zeros(len(self.layouts), np.int64), collective=True)

    @property
    def dp_links(self) -> Links:
        """Collective parameters of data-parallel groups: the tier of the whole allocation (paper, D-D c).

        A profile's network bandwidth is that of one GPU's adapter. A group with r ranks in each node, context ranks
        among them, runs its rings through r adapters at once, so beyond the node its bandwidth is r times that, at most
        the intra-node one **[choice]**.
        """
        base = links(self.hardware.tiers, self.layouts.data_tier, collective=True)
        gpus, context = self.machine.gpus_per_node, self.execution.context
        beside = np.clip(gpus // self.layouts.tensor, 1, context)  # of one stage, when a replica is more than a node
        per_node = np.maximum(beside, gpus // (self.layouts.pipeline * self.layouts.tensor))
        inside = self.hardware.tiers[0].collective.bandwidth_bytes_per_s
        widened = np.minimum(base.bandwidth_bytes_per_s * per_node, inside)
        return Links(base.latency_s, np.where(self.layouts.data_tier > 0, widened, base.bandwidth_bytes_per_s))

    @property
    def intra_node_p2p(self) -> Links:
        return links(self.hardware.tiers, np.zeros(len(self.layouts), np.int64), collective=False)

    @property
    def stage_p2p(self) -> Links:
        """Point-to-point parameters of the slowest tier that a pipeline crosses."""
        return links(self.hardware.tiers, self.layouts.stage_tier, collective=False)


@attrs.frozen(kw_only=True, eq=False)
class OperatorBatch(_LayoutBatch):
    """One OP node of one operator, for n layouts; a term returns seconds of shape (n,).

    Attributes:
        sequences: sequences that the node processes over all replicas (a split inference has its share).
        prefill: for generation, whether the node includes the prefill.
        phases: the length phases of the node's sequences, for generation those that it decodes: a phase's ``finishing``
            sequences have ``last_token`` response tokens. Empty outside generation: all have the workload's.
        settings: the term's own settings.
    """

    sequences: float
    prefill: bool
    phases: tuple[LengthPhase, ...]

    @property
    def sequences_per_microbatch(self) -> Floats:
        """b_loc = sequences / (Pd * mb)."""
        return self.sequences / (self.layouts.data * self.layouts.microbatches)

    @property
    def response_lengths(self) -> tuple[tuple[float, int], ...]:
        """(share of the node's sequences, their response tokens), outside generation; the shares add up to 1."""
        total = sum(phase.finishing for phase in self.phases)
        lengths = tuple((phase.finishing / total, phase.last_token) for phase in self.phases)
        return lengths or ((1.0, self.workload.response_tokens),)


@attrs.frozen(kw_only=True, eq=False)
class MemoryBatch(_LayoutBatch):
    """One operator, for n layouts; a term returns bytes per GPU of the worst pipeline stage, shape (n,).

    Attributes:
        trainable: whether the model is updated by the algorithm.
    """

    trainable: bool

    @property
    def sequences_per_microbatch(self) -> Floats:
        """b_loc = B * R / (Pd * mb)."""
        return self.workload.sequences / (self.layouts.data * self.layouts.microbatches)


@attrs.frozen(eq=False)
class FusedBatch(Generic[Part]):
    """The trainings that one fused operator interleaves, for the same n layouts, in the order of their microtasks.

    A term that does not add up over them has a function of its own for this, :attr:`CostTerm.fused`.
    """

    parts: tuple[Part, ...]

    @property
    def layouts(self) -> Layouts:
        return self.parts[0].layouts


@attrs.frozen(kw_only=True, eq=False)
class TransferBatch:
    """n transfers of one kind; a term returns seconds of shape (n,).

    Attributes:
        reshard: True for RESHARD (an exchange within ``destination_gpus``), False for COMM.
        bytes: payload, float64.
        source_gpus, destination_gpus: sizes of the two allocations, int64.
        tier: slowest tier that the union of the allocations spans, int64.
        hardware: the profile.
        settings: the term's own settings.
    """

    reshard: bool
    bytes: Floats
    source_gpus: Ints
    destination_gpus: Ints
    tier: Ints
    hardware: HardwareProfile
    settings: Any

    @property
    def p2p_links(self) -> Links:
        return links(self.hardware.tiers, self.tier, collective=False)

    @property
    def collective_links(self) -> Links:
        return links(self.hardware.tiers, self.tier, collective=True)
