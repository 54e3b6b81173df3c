"""What the processes of one node keep in host memory when a framework moves state off the GPUs.

Per parameter: the optimizer's FP32 weights and two moments (12 bytes), its FP32 gradients in pinned memory (4), a
sleeping trainer's weights and gradient buffers (2 and 4), and every further version of the weights (2). What is
divided over data parallelism exists once over all ranks; what mirrors a GPU exists once for each.

Checked against what Ray reported of runs that others made (tests/test_analytical_host_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import Layouts, MemoryBatch
from rpeg_core.ir import Role
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.shards import held_parameters
from rpeg_plugin_analytical.shared import ADAM_STATE_BYTES_PER_PARAMETER, of_model

__all__ = ["HostMemory", "Offloaded", "host_memory", "state_bytes"]

PINNED_GRADIENT_BYTES = 4.0
"""FP32 gradients that the update on the host reads: ``cpu_copy_map_grad`` of Megatron-LM
(megatron/core/optimizer/cpu_offloading/hybrid_optimizer.py, of the FP32 weights' type), DeepSpeed's ZeRO offload."""

BUFFER_GRADIENT_BYTES = 4.0
"""A trainer's gradient buffer with ``accumulate_allreduce_grads_in_fp32``."""

WEIGHT_BYTES = 2.0
"""Versions of the weights are kept in 16 bits."""

PROCESS_BYTES = 1.67e9
"""Resident memory of a worker that holds nothing: the idle reward and reference workers in the table that Ray printed
in OpenRLHF/OpenRLHF#171."""

OBJECT_STORE_SHARE = 0.3
OBJECT_STORE_BYTES = 200e9
"""Ray's object store: 30 % of the node's memory (docs.ray.io, "Memory Management"), at most 200 GB
(``DEFAULT_OBJECT_STORE_MAX_MEMORY_BYTES`` in ray/_private/ray_constants.py)."""


@attrs.frozen(kw_only=True)
class Offloaded:
    """What one trainer keeps in host memory.

    Attributes:
        model, data, pipeline, tensor, expert: its model and degrees; ``expert`` ranks share the experts of a layer.
        ranks: of its processes, those on this node.
        optimizer: FP32 weights, moments and gradients are on the host, and updated there.
        buffers: its weights and gradient buffers are mirrored while it sleeps. torch_memory_saver keeps the mirror when
            the trainer wakes up (csrc/core.cpp, ``resume``).
        versions: further versions of the weights: those to publish, the reference, an older policy.
    """

    model: ModelSpec
    data: int = 1
    pipeline: int = 1
    tensor: int = 1
    expert: int = 1
    ranks: int = 1
    optimizer: bool = False
    buffers: bool = False
    versions: int = 0

    def held(self) -> float:
        """Parameters that one rank mirrors."""
        return float(held_parameters(self.model, _layouts(self), self.expert)[0])

    def rank_bytes(self) -> dict[str, float]:
        """Bytes of one process by what they are."""
        shared = self.model.total_parameters / (self.data * self.pipeline * self.tensor)
        mirrored = self.held()
        return {
            "optimizer state": ADAM_STATE_BYTES_PER_PARAMETER * shared * self.optimizer,
            "pinned gradients": PINNED_GRADIENT_BYTES * shared * self.optimizer,
            "sleeping trainer": (WEIGHT_BYTES + BUFFER_GRADIENT_BYTES) * mirrored * self.buffers,
            "versions of the weights": WEIGHT_BYTES * mirrored * self.versions,
            "process": PROCESS_BYTES,
        }


@attrs.frozen(kw_only=True)
class HostMemory:
    """Bytes of one node: ``terms`` by what they are, ``limit`` what it has."""

    terms: dict[str, float]
    limit: float

    @property
    def needed(self) -> float:
        return sum(self.terms.values())

    @property
    def fits(self) -> bool:
        return self.needed <= self.limit


def host_memory(
    trainers: Sequence[Offloaded],
    memory_bytes: float,
    *,
    engine_processes: int = 0,
    engine_weights: float = 0.0,
    ray: bool = False,
) -> HostMemory:
    """What a node with ``memory_bytes`` of host memory has to hold.

    Args:
        trainers: whose processes run on the node.
        memory_bytes: of the node.
        engine_processes: workers of generation engines on the node.
        engine_weights: bytes that sleeping engines moved here (``EngineMemory.asleep``), all of the node's.
        ray: the framework runs on Ray, whose object store takes its part.
    """
    terms: dict[str, float] = {}
    for trainer in trainers:
        for name, value in trainer.rank_bytes().items():
            terms[name] = terms.get(name, 0.0) + trainer.ranks * value
    terms["process"] = terms.get("process", 0.0) + engine_processes * PROCESS_BYTES
    terms["sleeping engines"] = engine_weights
    if ray:
        terms["object store"] = min(OBJECT_STORE_SHARE * memory_bytes, OBJECT_STORE_BYTES)
    return HostMemory(terms={name: value for name, value in terms.items() if value > 0.0}, limit=memory_bytes)


@of_model
def state_bytes(batch: MemoryBatch, model: ModelSpec) -> NDArray[np.float64]:
    """Of a training's process with its optimizer on the host, 16 bytes per parameter over all ranks; else nothing."""
    if batch.role is not Role.TRAINING:
        return np.zeros(len(batch.layouts))
    per_parameter = ADAM_STATE_BYTES_PER_PARAMETER + PINNED_GRADIENT_BYTES
    return per_parameter * model.total_parameters / batch.layouts.gpus


def _layouts(trainer: Offloaded) -> Layouts:
    def one(value: int) -> np.ndarray:
        return np.array([value], np.int64)

    gpus = trainer.data * trainer.pipeline * trainer.tensor
    return Layouts(
        data=one(trainer.data),
        pipeline=one(trainer.pipeline),
        tensor=one(trainer.tensor),
        microbatches=one(1),
        gpus=one(gpus),
        data_tier=one(0),
        stage_tier=one(0),
        stages_per_node=one(1),
    )
