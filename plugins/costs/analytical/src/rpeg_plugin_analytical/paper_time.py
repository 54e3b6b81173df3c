"""Time terms of the model ``paper``: the equations of the paper's appendix D as printed.

Where the paper is silent the choice is that of model.md, section 3; README.md lists all of them. The
architecture is the paper's baseline (multi-head attention, two feed-forward projections) whatever the
model really has.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import FusedBatch, OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.collectives import all_gather_s, all_reduce_s, reduce_scatter_s
from rpeg_plugin_analytical.microbatches import Pass, passes
from rpeg_plugin_analytical.roofline import gemm_utilization, roofline_s
from rpeg_plugin_analytical.shared import (
    OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER,
    boundary_s,
    fused_bubble_s,
    fused_messages_s,
    of_model,
)
from rpeg_plugin_analytical.work import TRAINING_FORWARDS, forward_flops, paper_counts, paper_layer_parameters

__all__ = [
    "data_parallel_s",
    "fused_pipeline_bubble_s",
    "fused_pipeline_parallel_s",
    "gemm_s",
    "non_gemm_s",
    "optimizer_s",
    "paper_parameters",
    "pipeline_bubble_s",
    "pipeline_parallel_s",
    "tensor_parallel_s",
]

Floats = NDArray[np.float64]


def paper_parameters(model: ModelSpec) -> int:
    """N_m = L W_layer + E + head: matrices only, embeddings never shared with the head (paper, D-H)."""
    embedding = model.vocab * model.hidden
    return model.layers * paper_layer_parameters(model) + embedding + model.head_flop_parameters


@of_model
def gemm_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``T_gemm = W / (P F_eff)``; generation: prefill and every decode phase with its own F_eff (D-A)."""
    forwards = TRAINING_FORWARDS if batch.role is Role.TRAINING else 1.0
    total_s = np.zeros(len(batch.layouts))
    for part in passes(batch, first_token_from_prefill=False, padded=True):
        total_s = total_s + part.steps * batch.layouts.microbatches * _microbatch_s(batch, model, part)
    return forwards * total_s


def _microbatch_s(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """Seconds of one forward microbatch: the roofline on W_dev, Omega_W and Omega_A."""
    layouts = batch.layouts
    bytes_per_element = batch.workload.bytes_per_element
    shards = layouts.pipeline * layouts.tensor
    # tokens are those of one replica and microbatch, so that W / (P mb) = flops / (Pp Pt)
    flops = forward_flops(paper_counts(model), tokens=part.tokens, context=part.context, head_tokens=part.head_tokens)
    weights_bytes = model.layers / shards * paper_layer_parameters(model) * bytes_per_element
    activation_bytes = 2.0 * part.tokens * model.hidden * model.layers / layouts.pipeline * bytes_per_element
    width = min(model.hidden, model.ffn) / layouts.tensor
    utilization = gemm_utilization(part.tokens, width, batch.hardware.efficiency)
    return roofline_s(flops / shards, weights_bytes + activation_bytes, utilization, batch.hardware.device)


@of_model
def pipeline_bubble_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``T_bubble = T_gemm (Pp - 1) / mb``, for generation too (D-C)."""
    return gemm_s(batch) * (batch.layouts.pipeline - 1) / batch.layouts.microbatches


def fused_pipeline_bubble_s(batch: FusedBatch[OperatorBatch]) -> Floats:
    """The length of the interleaved schedule less the T_gemm of all models.

    **[choice]** The paper prints no equation for fusion. A forward pass is a quarter of a microbatch's time.
    """
    work_s = [gemm_s(part) for part in batch.parts]
    microbatch_s = [seconds / batch.layouts.microbatches for seconds in work_s]
    forward_s = [(seconds / TRAINING_FORWARDS,) * 2 for seconds in microbatch_s]
    backward_s = [(seconds - seconds / TRAINING_FORWARDS,) * 2 for seconds in microbatch_s]
    return fused_bubble_s(batch, forward_s, backward_s, sum(work_s))


@of_model
def tensor_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """2 AllReduces per layer and forward pass, 6 per layer in training (D-D a).

    Of the paper's two readings of decode, the printed one: a step is one batch of all sequences of a replica.
    """
    layouts = batch.layouts
    per_layer = 6.0 if batch.role is Role.TRAINING else 2.0
    token_bytes = model.hidden * batch.workload.bytes_per_element
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True, padded=True):
        batches = np.ones(len(layouts)) if part.decode else layouts.microbatches
        tokens = part.tokens * layouts.microbatches / batches
        reduce_s = all_reduce_s(tokens * token_bytes, layouts.tensor, batch.tp_links)
        total_s = total_s + part.steps * batches * reduce_s
    return per_layer * model.layers / layouts.pipeline * total_s


@of_model
def pipeline_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``mb + Pp - 2`` messages of M_pp, in training ``mb + 2 Pp - 3`` (D-D b).

    **[choice]** Prefill as inference; each decode step, one batch of all sequences of a replica, crosses
    Pp - 1 boundaries.
    """
    layouts = batch.layouts
    fill = 2 * layouts.pipeline - 3 if batch.role is Role.TRAINING else layouts.pipeline - 2
    token_bytes = model.hidden * batch.workload.bytes_per_element / layouts.tensor
    total_s = np.zeros(len(layouts))
    for part in passes(batch, first_token_from_prefill=True, padded=True):
        if part.decode:
            tokens, messages = part.tokens * layouts.microbatches, part.steps * (layouts.pipeline - 1)
        else:
            tokens, messages = part.tokens, layouts.microbatches + fill
        total_s = total_s + messages * boundary_s(batch, tokens * token_bytes)
    return total_s


def fused_pipeline_parallel_s(batch: FusedBatch[OperatorBatch]) -> Floats:
    """``mb`` messages of each model, and once ``2 Pp - 3`` of the model whose messages take longest **[choice]**."""
    messages_s = []
    for part in batch.parts:
        (whole,) = passes(part, first_token_from_prefill=True, padded=True)
        token_bytes = part.model.hidden * part.workload.bytes_per_element / part.layouts.tensor
        messages_s.append(boundary_s(part, whole.tokens * token_bytes))
    return fused_messages_s(batch, messages_s)


@of_model
def data_parallel_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Training: ReduceScatter and AllGather of ``N_m s_b / (Pp Pt)`` over Pd (D-D c)."""
    layouts = batch.layouts
    if batch.role is not Role.TRAINING:
        return np.zeros(len(layouts))
    shards = layouts.pipeline * layouts.tensor
    shard_bytes = paper_parameters(model) * batch.workload.bytes_per_element / shards
    links = batch.dp_links
    return reduce_scatter_s(shard_bytes, layouts.data, links) + all_gather_s(shard_bytes, layouts.data, links)


@of_model
def non_gemm_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """``L/Pp c_ng (b_loc mb / B_cal) (1 - 1/Pt)``, 4 times in training, 0 in generation (D-E).

    **[choice]** The paper prints b_loc without mb; the whole local batch does not reward splitting it.
    """
    layouts, hardware = batch.layouts, batch.hardware
    if batch.role is Role.GENERATION:
        return np.zeros(len(layouts))
    forwards = TRAINING_FORWARDS if batch.role is Role.TRAINING else 1.0
    batches = batch.sequences / layouts.data / hardware.non_gemm_reference_batch
    layer_s = hardware.non_gemm_layer_s * batches * (1.0 - 1.0 / layouts.tensor)
    return forwards * model.layers / layouts.pipeline * layer_s


@of_model
def optimizer_s(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """Training: ``18 N_m / (P BW_mem)`` (D-F)."""
    layouts = batch.layouts
    if batch.role is not Role.TRAINING:
        return np.zeros(len(layouts))
    traffic_bytes = OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER * paper_parameters(model) / layouts.gpus
    return traffic_bytes / batch.hardware.device.memory_bandwidth_bytes_per_s
