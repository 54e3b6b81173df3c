"""How many sequences a generation holds at once, and what an engine that sizes its own cache would hold.

An engine such as vLLM takes a fraction of the GPU's memory, loads the weights, measures the activations of a dummy
batch, and makes the rest its pool of KV blocks. Sequences that the pool cannot hold wait, or are preempted and computed
again. RPEG plans all sequences of a step at once; both numbers side by side say how far from preemption a plan is.
"""

from __future__ import annotations

import attrs

from rpeg_core.costing.memory import Phase
from rpeg_core.costing.moments import SegmentMoments
from rpeg_core.ir import Role, Rpeg
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.workload import Workload

__all__ = ["ENGINE_FRACTION", "KV_CACHE", "KvPool", "kv_pools"]

ENGINE_FRACTION = 0.92
"""Of a GPU's memory that an engine takes when nobody says: ``gpu_memory_utilization`` of vllm/config/cache.py.

It was 0.9 until it was raised in 0.22.
"""

KV_CACHE = "KV cache"
"""The quantity of cost terms that is the cache."""


@attrs.frozen(kw_only=True)
class KvPool:
    """The KV cache of a generation on the GPUs where the least is left for it.

    Attributes:
        operator: the generation.
        gpus: those GPUs.
        sequences: of one replica, all at once.
        needed_bytes: their cache per GPU, at the fullest moment.
        room_bytes: what is usable beside everything else that is there then.
        engine_bytes: what an engine's default fraction leaves beside the same; 0 when nothing.
    """

    operator: str
    gpus: Allocation
    sequences: int
    needed_bytes: float
    room_bytes: float
    engine_bytes: float

    @property
    def fits(self) -> int:
        """Sequences that the usable memory holds at once."""
        return self._of(self.room_bytes)

    @property
    def engine_sequences(self) -> int:
        """Sequences that an engine's default pool holds at once; the others of a replica wait or are preempted."""
        return self._of(self.engine_bytes)

    def _of(self, room_bytes: float) -> int:
        return int(max(0.0, room_bytes) * self.sequences / self.needed_bytes)


def kv_pools(
    rpeg: Rpeg,
    plan: ExecutionPlan,
    workload: Workload,
    segments: tuple[SegmentMoments, ...],
    *,
    usable_bytes: float,
    capacity_bytes: float,
) -> tuple[KvPool, ...]:
    """One for each generation whose cost terms price a cache."""
    found: list[KvPool] = []
    for op in rpeg.operators:
        if op.role is not Role.GENERATION:
            continue
        pools = []
        for segment in segments:
            for moment in segment.moments:
                cache = sum(item.bytes for item in moment.items if item.quantity == KV_CACHE)
                if (moment.operator, moment.phase) != (op.name, Phase.RUN) or not cache:
                    continue
                others = moment.bytes - cache
                pools.append(
                    KvPool(
                        operator=op.name,
                        gpus=segment.gpus,
                        sequences=workload.sequences // plan[op.name].layout.data,
                        needed_bytes=cache,
                        room_bytes=usable_bytes - others,
                        engine_bytes=max(0.0, ENGINE_FRACTION * capacity_bytes - others),
                    )
                )
        if pools:
            found.append(min(pools, key=lambda pool: pool.room_bytes))
    return tuple(found)
