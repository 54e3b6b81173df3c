"""Work that memory bandwidth limits: norms, residuals, rotary embeddings, activations, casts, logits."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Precision
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_plugin_analytical.frameworks import used_by
from rpeg_plugin_analytical.kernels import stream_s
from rpeg_plugin_analytical.linear import local_tokens
from rpeg_plugin_analytical.microbatches import Pass
from rpeg_plugin_analytical.shards import kv_width_per_rank

__all__ = ["RESIDUAL_PASSES", "head_seconds", "layer_seconds"]

Floats = NDArray[np.float64]

RESIDUAL_PASSES = 10.0
"""Elements moved per hidden element and layer: two norms (one read, one write each) and two residual additions (two
reads, one write each). Tensor parallelism divides them only with sequence parallelism."""

BACKWARD_PASSES = 2.0
"""Traffic of the backward pass over the forward one: gradients are read and written beside the saved values."""

ADAPTER_PASSES = 2.0
"""Low-rank adapters, per element of the adapted products' inputs or outputs: the input is read once more, the output
read and written again to add the adapter's part (half of the elements each, and a third pass for scaling)."""

CAST_BYTES = 4.0
"""Quantizing one element for an FP8 GEMM: read 2 bytes, write it once and, for the weight gradient, transposed."""

LOSS_BYTES = 16.0
"""Vocabulary-parallel cross entropy per logit: 2 bytes and 4 in FP32 written and read, and the gradient back
(megatron/core/tensor_parallel/cross_entropy.py)."""


def layer_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """One microbatch in one mean layer: ``passes * bytes / BW_mem``; decode 0, it is launches there."""
    if part.decode:
        return np.zeros(len(batch.layouts))
    execution, used = batch.execution, used_by(batch)
    tokens, tensor = local_tokens(batch, part), batch.layouts.tensor.astype(float)
    residual = RESIDUAL_PASSES * model.hidden / (tensor if execution.sequence_parallel else 1.0)
    heads = (model.attention_width + 2.0 * kv_width_per_rank(model, batch.layouts.tensor) * tensor) / tensor
    projections = 3.0 if model.gated_ffn else 2.0
    inner = 2.0 * heads + projections * model.active_ffn_width / tensor
    elements = residual + inner
    if model.moe is not None:
        sparse = 1.0 - model.moe.dense_layers / model.layers
        copies = sparse * model.moe.active_experts * model.hidden / tensor
        elements = elements + used.expert_passes / used.pointwise_passes * copies
    if execution.frozen_base:
        adapted = model.hidden + heads + (projections - 1.0) * model.active_ffn_width / tensor
        elements = elements + ADAPTER_PASSES * adapted
    moved = used.pointwise_passes * elements * batch.workload.bytes_per_element
    passes = 1.0
    if batch.role is Role.TRAINING:
        passes = 1.0 + execution.recompute.pointwise + BACKWARD_PASSES
    total = passes * moved
    if execution.precision is not Precision.BF16:
        inputs = 2.0 * model.hidden + (heads + model.active_ffn_width / tensor)
        outputs = inputs if batch.role is Role.TRAINING else 0.0
        total = total + used.cast_passes * CAST_BYTES * (inputs * (1.0 + execution.recompute.linear) + outputs)
    return stream_s(batch.hardware, tokens * total)


def head_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """The loss over ``V/Pt`` logits of every scored token in training and inference; sampling over V in generation."""
    used = used_by(batch)
    if model.head is Head.SCALAR or (batch.role is Role.GENERATION and used.sampling_passes == 0.0):
        return np.zeros(len(batch.layouts))
    if batch.role is Role.GENERATION:
        return stream_s(batch.hardware, used.sampling_passes * LOSS_BYTES * part.head_tokens * model.vocab)
    logits = part.head_tokens / batch.execution.context * model.vocab / batch.layouts.tensor
    share = 1.0 if batch.role is Role.TRAINING else 0.5
    return stream_s(batch.hardware, used.logit_passes * share * LOSS_BYTES * logits)
