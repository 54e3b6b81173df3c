"""Time terms of the model ``analytical``: the paper's equations with the model's real architecture.

What differs from ``paper`` is listed in README.md, each point with its reason.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import FusedBatch, OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from rpeg_plugin_analytical.microbatches import passes
from rpeg_plugin_analytical.shards import shard_parameters
from rpeg_plugin_analytical.shared import (
    OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER,
    boundary_s,
    fused_bubble_s,
    fused_messages_s,
    of_model,
)
from rpeg_plugin_analytical.stages import HEAD_TRAINING_FORWARDS, stage_seconds
from rpeg_plugin_analytical.work import TRAINING_FORWARDS

__all__ = [
    "data_parallel_s",
    "fused_pipeline_bubble_s",
    "fused_pipeline_parallel_s",
    "gemm_s",
    "non_gemm_s",
    "optimizer_s",
    "pipeline_bubble_s",
    "pipeline_parallel_s",
    "tensor_parallel_s",
]

Floats = NDArray[np.float64]

NON_GEMM_PASSES = 10.0
"""Elements moved per hidden element and layer that tensor parallelism does not divide: two norms (one
read, one write each) and two residual additions (two reads, one write each). The hardware profiles derive
c_ng from the same count."""


@of_model
def gemm_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``T_gemm``: the mean stage's work, layers and head, over all microbatches and token steps."""
    layouts = batch.layouts
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        stage = stage_seconds(batch, model, part)
        mean_s = stage.layers_s + stage.head_s / layouts.pipeline
        total_s = total_s + part.steps * layouts.microbatches * mean_s
    return total_s


@of_model
def pipeline_bubble_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Fill and drain, ``(Pp - 1) t_mean``, and waiting for the last stage, ``(n - 1) (t_max - t_mean)``.

    n microbatches through stages of t_1 .. t_Pp seconds take ``sum(t) + (n - 1) max(t)``; this is that
    less the ``n t_mean`` of T_gemm, and ``T_gemm (Pp - 1)/mb`` when the stages are equal (D-C). In decode
    the pipeline stays full from one token step to the next, n = steps * mb: serving engines keep Pp
    batches in flight (``max_concurrent_batches`` of vllm), and P5 gives mb >= Pp. Each length phase fills
    it once.
    """
    layouts = batch.layouts
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        stage = stage_seconds(batch, model, part)
        mean_s = stage.layers_s + stage.head_s / layouts.pipeline
        wait_s = stage.head_s * (1.0 - 1.0 / layouts.pipeline)
        slots = part.steps * layouts.microbatches
        total_s = total_s + (slots - 1) * wait_s + (layouts.pipeline - 1) * mean_s
    return total_s


def fused_pipeline_bubble_s(batch: FusedBatch[OperatorBatch]) -> Floats:
    """The length of the interleaved schedule less the T_gemm of all models.

    A forward pass is a quarter of a microbatch's time in the layers, which are recomputed, and a third in the head.
    """
    forward_s, backward_s = [], []
    for part in batch.parts:
        (whole,) = passes(part, first_token_from_prefill=True)
        stage = stage_seconds(part, part.model, whole)
        layers_s, head_s = stage.layers_s / TRAINING_FORWARDS, stage.head_s / HEAD_TRAINING_FORWARDS
        forward_s.append((layers_s, layers_s + head_s))
        backward_s.append((stage.layers_s - layers_s, stage.layers_s + stage.head_s - layers_s - head_s))
    return fused_bubble_s(batch, forward_s, backward_s, sum(gemm_s(part) for part in batch.parts))


@of_model
def tensor_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """2 AllReduces per layer and forward pass of each microbatch, 6 per layer in training (D-D a).

    Decode too runs microbatch by microbatch, the second of the paper's readings, as T_gemm does.
    """
    layouts = batch.layouts
    per_layer = 6.0 if batch.role is Role.TRAINING else 2.0
    token_bytes = model.hidden * batch.workload.bytes_per_element
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        reduce_s = all_reduce_s(part.tokens * token_bytes, layouts.tensor, batch.tp_links)
        total_s = total_s + part.steps * layouts.microbatches * reduce_s
    return per_layer * model.layers / layouts.pipeline * total_s


@of_model
def pipeline_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``n + Pp - 2`` messages of one microbatch, in training ``mb + 2 Pp - 3`` (D-D b), n as above."""
    layouts = batch.layouts
    fill = 2 * layouts.pipeline - 3 if batch.role is Role.TRAINING else layouts.pipeline - 2
    token_bytes = model.hidden * batch.workload.bytes_per_element / layouts.tensor
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        messages = part.steps * layouts.microbatches + fill
        total_s = total_s + messages * boundary_s(batch, part.tokens * token_bytes)
    return total_s


def fused_pipeline_parallel_s(batch: FusedBatch[OperatorBatch]) -> Floats:
    """``mb`` messages of each model, and once ``2 Pp - 3`` of the model whose messages take longest."""
    messages_s = []
    for part in batch.parts:
        (whole,) = passes(part, first_token_from_prefill=True)
        token_bytes = part.model.hidden * part.workload.bytes_per_element / part.layouts.tensor
        messages_s.append(boundary_s(part, whole.tokens * token_bytes))
    return fused_messages_s(batch, messages_s)


@of_model
def data_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Training: ReduceScatter and AllGather of the largest stage's ``W_shard s_b`` over Pd (D-D c)."""
    layouts = batch.layouts
    if batch.role is not Role.TRAINING:
        return np.zeros(len(layouts))
    shard_bytes = shard_parameters(model, layouts) * batch.workload.bytes_per_element
    links = batch.dp_links
    return reduce_scatter_s(shard_bytes, layouts.data, links) + all_gather_s(shard_bytes, layouts.data, links)


@of_model
def non_gemm_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``L/Pp (1 - 1/Pt) 10 tokens d s_b / BW_mem``, 4 times in training; decode 0 (D-E).

    The paper's c_ng at the node's own width and length instead of those it was calibrated at.
    """
    layouts = batch.layouts
    forwards = TRAINING_FORWARDS if batch.role is Role.TRAINING else 1.0
    tokens = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        if not part.decode:
            tokens = tokens + layouts.microbatches * part.tokens
    layer_bytes = NON_GEMM_PASSES * tokens * model.hidden * batch.workload.bytes_per_element
    layer_s = layer_bytes / batch.hardware.device.memory_bandwidth_bytes_per_s
    return forwards * model.layers / layouts.pipeline * (1.0 - 1.0 / layouts.tensor) * layer_s


@of_model
def optimizer_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Training: ``18 W_shard / (Pd BW_mem)``, the stage that holds most (D-F)."""
    layouts = batch.layouts
    if batch.role is not Role.TRAINING:
        return np.zeros(len(layouts))
    traffic_bytes = OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER * shard_parameters(model, layouts) / layouts.data
    return traffic_bytes / batch.hardware.device.memory_bandwidth_bytes_per_s
