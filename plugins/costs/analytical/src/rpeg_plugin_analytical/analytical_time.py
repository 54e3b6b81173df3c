"""Time terms of the model ``analytical``: one physical effect each, the paper's equations as the 3D subset.

What differs from ``paper`` is listed in README.md, each point with its reason.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import FusedBatch, Links, OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Sharding
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical import attention, exchange, launches, linear, pointwise
from rpeg_plugin_analytical.collectives import all_gather_s, reduce_scatter_s
from rpeg_plugin_analytical.frameworks import used_by
from rpeg_plugin_analytical.microbatches import Pass, passes
from rpeg_plugin_analytical.shards import copies
from rpeg_plugin_analytical.shared import (
    OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER,
    boundary_s,
    fused_bubble_s,
    fused_messages_s,
    of_model,
)
from rpeg_plugin_analytical.stages import stage_seconds

__all__ = [
    "attention_s",
    "context_parallel_s",
    "data_parallel_s",
    "expert_parallel_s",
    "fused_pipeline_bubble_s",
    "fused_pipeline_parallel_s",
    "gemm_s",
    "loop_overhead_s",
    "non_gemm_s",
    "optimizer_s",
    "pipeline_bubble_s",
    "pipeline_parallel_s",
    "step_overhead_s",
    "stragglers_s",
    "tensor_parallel_s",
]

Floats = NDArray[np.float64]

FIXED_CAPACITY_LAUNCHES = 0.5
"""Launch time of a mixture layer whose experts have a fixed capacity over that of one that waits for token counts:
Qwen3-30B-A3B on eight B200, one layout, 14.5 s with and 28.2 s without dropping (Megatron-Bridge 25.09 and 25.11)."""

FORWARD_AND_BACKWARD = 3.0
"""Forward passes that a forward and a backward pass take together: gradients of inputs and of weights (D-A)."""

Effect = Callable[[OperatorBatch, ModelSpec, Pass], Floats]


def _all_microbatches(batch: OperatorBatch, model: ModelSpec, layer: Effect, last: Effect | None = None) -> Floats:
    """An effect of a layer and one of the last stage, on the mean stage, over all microbatches and token steps."""
    layouts = batch.layouts
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        stage_s = model.layers / layouts.pipeline * layer(batch, model, part)
        if last is not None:
            stage_s = stage_s + last(batch, model, part) / layouts.pipeline
        total_s = total_s + part.steps * layouts.microbatches * stage_s
    return total_s


@of_model
def gemm_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``T_gemm``: the mean stage's matrices, layers and head, over all microbatches and token steps."""
    return _all_microbatches(batch, model, linear.layer_seconds, linear.head_seconds)


@of_model
def attention_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Scores and values of the mean stage."""
    return _all_microbatches(batch, model, attention.layer_seconds)


@of_model
def non_gemm_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Norms, residuals, activations, casts and the loss at BW_mem; decode 0 (D-E)."""
    return _all_microbatches(batch, model, pointwise.layer_seconds, pointwise.head_seconds)


def fused_pipeline_bubble_s(batch: FusedBatch[OperatorBatch]) -> Floats:
    """The length of the interleaved schedule less what the mean stage does for all models.

    The backward pass of a layer or the head takes two forward passes, and one more where layers are recomputed.
    """
    layouts = batch.layouts
    forward_s, backward_s, work_s = [], [], np.zeros(len(layouts))
    for part in batch.parts:
        (whole,) = passes(part, first_token_from_prefill=True)
        stage = stage_seconds(part, part.model, whole)
        layers_s = stage.layers_s / (FORWARD_AND_BACKWARD + part.execution.recompute.linear)
        last_s = stage.last_s / FORWARD_AND_BACKWARD
        forward_s.append((layers_s, layers_s + last_s))
        backward_s.append((stage.layers_s - layers_s, stage.layers_s - layers_s + stage.last_s - last_s))
        work_s = work_s + layouts.microbatches * (stage.layers_s + stage.last_s / layouts.pipeline)
    return fused_bubble_s(batch, forward_s, backward_s, work_s)


@of_model
def tensor_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """2 AllReduces per layer and forward pass of each microbatch, 6 per layer in training (D-D a).

    Decode too runs microbatch by microbatch, the second of the paper's readings, as T_gemm does.
    """
    return _all_microbatches(batch, model, exchange.tensor_layer_seconds)


@of_model
def context_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Ring exchange of K and V."""
    return _all_microbatches(batch, model, exchange.context_layer_seconds)


@of_model
def expert_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Dispatch and combine of routed tokens."""
    return _all_microbatches(batch, model, exchange.expert_layer_seconds)


@of_model
def pipeline_bubble_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Fill and drain, ``(Pp - 1) t_mean / v``, and waiting for the last stage, ``(n - 1) (t_max - t_mean)``.

    n microbatches through stages of t_1 .. t_Pp seconds take ``sum(t) + (n - 1) max(t)``; this is that
    less the ``n t_mean`` of the other terms, and ``T_gemm (Pp - 1)/mb`` when the stages are equal (D-C). With v
    chunks per stage the pipeline fills v times as fast (Narayanan et al., arXiv:2104.04473, section 2.2). In decode
    the pipeline stays full from one token step to the next, n = steps * mb: serving engines keep Pp
    batches in flight (``max_concurrent_batches`` of vllm), and P5 gives mb >= Pp. Each length phase fills
    it once.
    """
    layouts = batch.layouts
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        stage = stage_seconds(batch, model, part)
        mean_s = stage.layers_s + stage.last_s / layouts.pipeline
        wait_s = stage.last_s * (1.0 - 1.0 / layouts.pipeline)
        slots = part.steps * layouts.microbatches
        fill_s = (layouts.pipeline - 1) * mean_s / batch.execution.virtual_stages
        total_s = total_s + (slots - 1) * wait_s + fill_s
    return total_s


def fused_pipeline_parallel_s(batch: FusedBatch[OperatorBatch]) -> Floats:
    """``mb`` messages of each model, and once ``2 Pp - 3`` of the model whose messages take longest."""
    messages_s = []
    for part in batch.parts:
        (whole,) = passes(part, first_token_from_prefill=True)
        token_bytes = part.model.hidden * part.workload.bytes_per_element / part.layouts.tensor / part.execution.context
        exposed = used_by(part).pipeline_exposed
        messages_s.append(exposed * boundary_s(part, whole.tokens * token_bytes))
    return fused_messages_s(batch, messages_s)


@of_model
def pipeline_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``v n + Pp - 2`` messages of one microbatch, in training ``v mb + 2 Pp - 3`` (D-D b), n as above."""
    layouts, execution = batch.layouts, batch.execution
    fill = 2 * layouts.pipeline - 3 if batch.role is Role.TRAINING else layouts.pipeline - 2
    token_bytes = model.hidden * batch.workload.bytes_per_element / layouts.tensor / execution.context
    exposed = used_by(batch).pipeline_exposed
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True):
        messages = part.steps * layouts.microbatches * execution.virtual_stages + fill
        total_s = total_s + messages * boundary_s(batch, part.tokens * token_bytes)
    return exposed * total_s


def _data_parallel_links(batch: OperatorBatch) -> Links:
    """:attr:`OperatorBatch.dp_links`, for Megatron-LM's rank order too: its data-parallel neighbours share a node."""
    if not batch.execution.pipeline_outermost:
        return batch.dp_links
    layouts, near, far = batch.layouts, batch.hardware.tiers[0].collective, batch.hardware.tiers[1].collective
    domain = batch.hardware.link_domain_gpus or batch.machine.gpus_per_node
    inside = layouts.tensor * batch.execution.context
    per_node = np.maximum(1, domain // inside)
    far_bandwidth = np.minimum(far.bandwidth_bytes_per_s * per_node, near.bandwidth_bytes_per_s)
    local = layouts.data * inside <= domain
    return Links(
        np.where(local, near.latency_s, far.latency_s),
        np.where(local, near.bandwidth_bytes_per_s, far_bandwidth),
    )


@of_model
def data_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Training: ReduceScatter of gradients and AllGather of weights over Pd Pc, the largest stage (D-D c).

    With all of the model sharded, every microbatch gathers the weights twice and scatters the gradients once.
    Where a framework hides it, the last microbatch's backward and the first one's forward pass run beside it,
    with all of the model sharded every microbatch.
    """
    layouts, execution = batch.layouts, batch.execution
    if batch.role is not Role.TRAINING:
        return np.zeros(len(layouts))
    used = used_by(batch)
    gathered, scattered = np.zeros(len(layouts)), np.zeros(len(layouts))
    for elements, ranks in copies(batch, model):
        found = _data_parallel_links(batch)
        gathered = gathered + all_gather_s(elements * batch.workload.bytes_per_element, ranks, found)
        scattered = scattered + reduce_scatter_s(elements * used.gradient_bytes, ranks, found)
    scattered = scattered * (not execution.frozen_base)
    repeats = np.ones(len(layouts))
    if execution.sharding is Sharding.FULL:
        gathered, repeats = 2.0 * gathered, layouts.microbatches.astype(float)
    elif execution.frozen_base:
        gathered = np.zeros(len(layouts))
    total = gathered + scattered
    beside_s = np.zeros(len(layouts))
    if used.data_exposed < 1.0:
        (part,) = passes(batch, first_token_from_prefill=True)
        beside_s = stage_seconds(batch, model, part).layers_s
    return repeats * np.maximum(used.data_exposed * total, total - beside_s)


@of_model
def optimizer_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Training: ``18 W_shard / (Pd BW_mem)``, the stage that holds most (D-F); undivided without sharding."""
    layouts, execution = batch.layouts, batch.execution
    if batch.role is not Role.TRAINING or execution.frozen_base:
        return np.zeros(len(layouts))
    updated = np.zeros(len(layouts))
    for elements, ranks in copies(batch, model):
        updated = updated + elements / (1.0 if execution.sharding is Sharding.NONE else ranks)
    traffic_bytes = used_by(batch).optimizer_passes * OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER * updated
    return traffic_bytes / batch.hardware.device.memory_bandwidth_bytes_per_s


@of_model
def stragglers_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Training: ``sigma sqrt(2 ln N)`` of the compute, the expected lead of the slowest of N equal GPUs."""
    layouts = batch.layouts
    spread = batch.hardware.device.clock_spread
    if batch.role is not Role.TRAINING or spread is None:
        return np.zeros(len(layouts))
    (part,) = passes(batch, first_token_from_prefill=True)
    stage = stage_seconds(batch, model, part)
    compute_s = stage.linear_s + stage.attention_s + stage.last_s / layouts.pipeline
    return spread * np.sqrt(2.0 * np.log(layouts.gpus)) * layouts.microbatches * compute_s


@of_model
def loop_overhead_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """What a reinforcement-learning loop adds to its operators: replicas that wait for the slowest, weights that are
    handed over, data that moves between processes; a share of everything else."""
    share = used_by(batch).loop_share
    if share == 0.0:
        return np.zeros(len(batch.layouts))
    effects = (
        gemm_s,
        attention_s,
        non_gemm_s,
        tensor_parallel_s,
        context_parallel_s,
        expert_parallel_s,
        pipeline_bubble_s,
        pipeline_parallel_s,
        data_parallel_s,
        optimizer_s,
        stragglers_s,
        step_overhead_s,
    )
    total_s = np.zeros(len(batch.layouts))
    for effect in effects:
        total_s = total_s + effect(batch)
    return share * total_s


@of_model
def step_overhead_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Host time of a training step or of the token steps of an engine, and launches that kernels are too short to hide.

    Decode: per step a constant, a part per sequence, and per layer the floor of its many small kernels, which a
    CUDA graph launches without the host but which do not shrink with the batch.
    """
    layouts, used = batch.layouts, used_by(batch)
    total_s = np.full(len(layouts), used.node_s)
    for part in passes(batch, first_token_from_prefill=True):
        total_s = total_s + part.steps * layouts.microbatches * stage_seconds(batch, model, part).launch_s
    if batch.role is Role.INFERENCE:
        return total_s
    if batch.role is Role.GENERATION:
        for part in passes(batch, first_token_from_prefill=True):
            floor_s = used.decode_layer_s * model.layers / layouts.pipeline
            if part.decode:
                floor_s = floor_s + used.decode_step_s + used.decode_sequence_s * part.tokens
                floor_s = floor_s + launches.replica_step_seconds(batch)
            total_s = total_s + part.steps * layouts.microbatches * floor_s
        return total_s
    (part,) = passes(batch, first_token_from_prefill=True)
    sparse = 0.0 if model.moe is None else 1.0 - model.moe.dense_layers / model.layers
    expert_s = used.launch_expert_layer_s * (FIXED_CAPACITY_LAUNCHES if batch.execution.fixed_capacity else 1.0)
    layer_s = (1.0 - sparse) * used.launch_layer_s + sparse * expert_s
    launches_s = layer_s * model.layers / layouts.pipeline
    waiting_s = np.maximum(0.0, launches_s - stage_seconds(batch, model, part).layers_s)
    update_s = used.step_s + used.update_layer_s * model.layers / layouts.pipeline
    return total_s + update_s + layouts.microbatches * waiting_s
