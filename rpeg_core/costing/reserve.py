"""What the memory that no plan may use is kept for: CUDA context, communication buffers, the rest for fragmentation.

The reserve itself, a tenth of the memory, is the paper's (IV-E) and not ours to spend. The two parts known from
measurements are subtracted from it here, so that a report can say how much is left for what the caching allocator
holds beyond the tensors. All three depend on driver and library versions; the figures are published measurements of
one machine each, and sized for one process per GPU.
"""

from __future__ import annotations

import attrs

from rpeg_core.ir import Role, Rpeg
from rpeg_core.passes.schedule import Segments
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.spec.machine import Allocation, HardwareProfile

__all__ = ["CUDA_CONTEXT_BYTES", "PAIR_COMMUNICATOR_BYTES", "RING_COMMUNICATOR_BYTES", "Reserve", "runtime_reserve"]

MIB = 2**20

CUDA_CONTEXT_BYTES = 543 * MIB
"""Of one process on one GPU: what nvidia-smi shows of a process that holds a context and nothing else in
github.com/pytorch/pytorch/issues/81257; about 300 MiB with lazily loaded kernels (issue 107667)."""

PAIR_COMMUNICATOR_BYTES = 544 * MIB
"""An NCCL communicator of two GPUs after its first AllReduce, on 4 A100 with NVLink
(github.com/NVIDIA/nccl/issues/964). Buffers of 4 MiB for each channel and connection (``DEFAULT_BUFFSIZE`` of
nccl/src/init.cc), so that it grows with the channels and hardly with the message."""

RING_COMMUNICATOR_BYTES = 688 * MIB
"""One of more than two GPUs; same measurement."""

SLOWEST_GPU_BYTES_PER_S = 2e11
"""A device below this memory bandwidth is a CPU core: an NVIDIA T4 has 320 GB/s (datasheet), a core some 10 GB/s."""


@attrs.frozen(kw_only=True)
class Reserve:
    """The reserve of the GPUs whose processes take part in the most communicators.

    Attributes:
        gpus: those GPUs.
        bytes: all of it.
        context_bytes: CUDA context.
        communicators: of one GPU: tensor, pipeline and data parallel groups of each place, and that of all GPUs.
        communication_bytes: their buffers.
    """

    gpus: Allocation
    bytes: float
    context_bytes: float
    communicators: int
    communication_bytes: float

    @property
    def rest_bytes(self) -> float:
        """What is left for fragmentation; below 0 where context and buffers need more than the reserve."""
        return self.bytes - self.context_bytes - self.communication_bytes


def runtime_reserve(rpeg: Rpeg, plan: ExecutionPlan, gpus: int, hardware: HardwareProfile) -> Reserve | None:
    """How the reserve of the busiest GPUs is spent; None on CPU cores, which have neither.

    Groups of a place (allocation and degrees) are shared by the operators there. Data-parallel groups communicate in
    training only.
    """
    if hardware.device.memory_bandwidth_bytes_per_s < SLOWEST_GPU_BYTES_PER_S:
        return None
    capacity = hardware.device.memory_bytes
    segments = Segments.of([plan[op.name].allocation for op in rpeg.operators], gpus)
    best: Reserve | None = None
    for s in range(segments.count):
        here = segments.allocation(s)
        sizes = _communicators(rpeg, plan, here, gpus)
        found = Reserve(
            gpus=here,
            bytes=capacity - usable_bytes(capacity),
            context_bytes=CUDA_CONTEXT_BYTES,
            communicators=len(sizes),
            communication_bytes=sum(PAIR_COMMUNICATOR_BYTES if n == 2 else RING_COMMUNICATOR_BYTES for n in sizes),
        )
        if best is None or found.communication_bytes > best.communication_bytes:
            best = found
    return best


def _communicators(rpeg: Rpeg, plan: ExecutionPlan, here: Allocation, gpus: int) -> list[int]:
    """Sizes of the communicators of a GPU in ``here``."""
    places: dict[tuple[object, object], bool] = {}  # place -> whether something trains there
    for op in rpeg.operators:
        assignment = plan[op.name]
        if not assignment.allocation.disjoint(here):
            place = (assignment.allocation, assignment.layout)
            places[place] = places.get(place, False) or op.role is Role.TRAINING
    sizes = [gpus] if gpus > 1 and places else []
    for (_, layout), trains in places.items():
        copies = layout.data * layout.context if trains else 1
        degrees = (layout.tensor, layout.pipeline, layout.context, layout.expert, copies)
        sizes += [degree for degree in degrees if degree > 1]
    return sizes
