"""What a framework's training step holds on one GPU, by recomputation and sharding.

Bytes of the stage that holds most. Layer activations are the tensors that a backward pass reads (Korthikanti et al.,
arXiv:2205.05198, section 4.1, without scores and dropout masks): the inputs of both norms and of both blocks (4 d), q,
k, v and the heads' output, and the feed-forward's intermediate tensors. For multi-head attention and d_ff = 4 d these
are its ``34 s b h`` less the two masks.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import MemoryBatch
from rpeg_core.spec.execution import Precision, Recompute, Sharding
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_plugin_analytical.frameworks import used_by
from rpeg_plugin_analytical.shards import copies, held_parameters, kv_width_per_rank, layer_parameters_per_rank

__all__ = [
    "activation_bytes",
    "first_state_bytes",
    "gradient_bytes",
    "kept_width",
    "layer_width",
    "logit_bytes",
    "reserve_bytes",
    "state_bytes",
    "weight_bytes",
]

Floats = NDArray[np.float64]

MOMENT_BYTES = 8.0
"""Two FP32 moments of Adam for each parameter."""

GATHERED_LAYERS = 2.0
"""Layers whose whole weights a fully sharded model holds at a time: the one at work and the one prefetched."""


def sharding_ranks(batch: MemoryBatch) -> Floats:
    """Ranks over which the optimizer's state, or all of the model, is divided."""
    execution, layouts = batch.execution, batch.layouts
    ranks = (layouts.data * execution.context).astype(float)
    if execution.sharding is Sharding.NONE:
        return np.ones(len(layouts))
    return np.minimum(ranks, execution.shard_ranks) if execution.shard_ranks else ranks


def _sharded(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """W_shard elements, each divided over the ranks that hold the same ones, as far as the framework divides."""
    total = np.zeros(len(batch.layouts))
    for elements, ranks in copies(batch, model):
        total = total + elements / (1.0 if batch.execution.sharding is Sharding.NONE else ranks)
    return total


def weight_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """16-bit weights; fully sharded: this rank's part in the framework's own precision, and gathered layers.

    In a pipeline a stage keeps its gathered weights, and its gradients whole, from the first microbatch to the last
    (torchtitan: ``reshard_after_forward`` is off with pipeline parallelism).
    """
    shard = held_parameters(model, batch.layouts, batch.execution.expert)
    if batch.execution.sharding is not Sharding.FULL:
        return 2.0 * shard
    used = used_by(batch)
    vocabulary = model.vocab * model.hidden / batch.layouts.tensor
    layer = layer_parameters_per_rank(model, batch.layouts.tensor)
    gathered = np.where(sharding_ranks(batch) > 1, np.maximum(GATHERED_LAYERS * layer, vocabulary), 0.0)
    gathered = np.where(batch.layouts.pipeline > 1, shard, gathered)
    return used.held_weight_bytes * _sharded(batch, model) + 2.0 * gathered


def gradient_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """The gradient buffer; 0 for adapters."""
    if batch.execution.frozen_base:
        return np.zeros(len(batch.layouts))
    held = held_parameters(model, batch.layouts, batch.execution.expert)
    if batch.execution.sharding is Sharding.FULL:
        held = np.where(batch.layouts.pipeline > 1, held, _sharded(batch, model))
    element = used_by(batch).held_gradient_bytes
    if batch.execution.precision is not Precision.BF16 or batch.execution.short_moments:
        element = min(element, 2.0)  # FP8 recipes reduce gradients in 16 bits (grad_reduce_in_fp32 is off)
    return element * held


def state_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Two moments, of FP32 unless the recipe says otherwise, and the FP32 weights where the weights are 16 bits wide.

    Of frameworks that keep something else, what they keep.
    """
    if batch.execution.frozen_base:
        return np.zeros(len(batch.layouts))
    kept = used_by(batch).held_state_bytes
    moments = MOMENT_BYTES / 2 if batch.execution.short_moments else MOMENT_BYTES
    each = moments + _master_bytes(batch) if kept is None else kept
    return each * _sharded(batch, model)


def first_state_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """The part of :func:`state_bytes` that is there before the first update: all but the moments."""
    if batch.execution.frozen_base:
        return np.zeros(len(batch.layouts))
    return _master_bytes(batch) * _sharded(batch, model)


def _master_bytes(batch: MemoryBatch) -> float:
    """FP32 weights beside the held ones; none where those are FP32 themselves, or where the framework keeps its own."""
    framework = used_by(batch)
    full = batch.execution.sharding is Sharding.FULL and framework.held_weight_bytes == 4.0
    return 0.0 if full or framework.held_state_bytes is not None else 4.0


def _tokens(batch: MemoryBatch) -> Floats:
    return batch.sequences_per_microbatch * batch.workload.sequence_tokens / batch.execution.context


def _layer_elements(batch: MemoryBatch, model: ModelSpec) -> tuple[Floats, Floats]:
    """(elements per token that TP divides only with sequence parallelism, those that it always divides)."""
    tensor = batch.layouts.tensor.astype(float)
    heads = 2.0 * model.attention_width + 2.0 * kv_width_per_rank(model, batch.layouts.tensor) * tensor
    projections = 3.0 if model.gated_ffn else 2.0
    inner = heads + projections * model.active_ffn_width
    outer = np.full(len(tensor), 4.0 * model.hidden)
    if batch.execution.precision is not Precision.BF16:
        # The four products' inputs are kept as quantized: half the bytes (Transformer Engine).
        outer = outer - model.hidden
        inner = inner - 0.5 * (model.attention_width + model.active_ffn_width)
    if model.moe is not None:
        # Each routed copy as dispatched, permuted and combined.
        inner = inner + 3.0 * model.moe.active_experts * model.hidden
    return outer, inner


def layer_width(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Elements per token that the backward pass of a layer reads, on one GPU."""
    outer, inner = _layer_elements(batch, model)
    tensor = batch.layouts.tensor.astype(float)
    return outer / (tensor if batch.execution.sequence_parallel else 1.0) + inner / tensor


def kept_width(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Elements per token that a layer keeps from its forward to its backward pass, on one GPU."""
    layer = layer_width(batch, model)
    divide = batch.layouts.tensor.astype(float) if batch.execution.sequence_parallel else 1.0
    kept: Floats = {
        Recompute.NONE: layer,
        Recompute.SELECTIVE: layer,
        Recompute.OPERATOR: 0.5 * layer,
        Recompute.FULL: model.hidden / divide + np.zeros(len(layer)),
    }[batch.execution.recompute]
    return kept


def activation_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Layers in flight by recomputation mode, and the layer whose backward pass runs.

    1F1B: the first stage holds ``min(mb, Pp)`` microbatches of L/Pp layers; with v chunks ``(1 + (Pp - 1)/(Pp v))``
    times as many (Korthikanti et al., section 4.2.3).
    """
    execution, layouts, used = batch.execution, batch.layouts, used_by(batch)
    kept = kept_width(batch, model)
    live = np.minimum(layouts.microbatches, layouts.pipeline).astype(float)
    pipeline = layouts.pipeline.astype(float)
    if execution.virtual_stages > 1:
        live = np.minimum(
            layouts.microbatches, pipeline * (1.0 + (pipeline - 1.0) / (pipeline * execution.virtual_stages))
        )
    working = used.layer_buffers * layer_width(batch, model)
    if execution.offloaded:
        kept = np.zeros(len(layouts))
    return 2.0 * _tokens(batch) * (live * model.layers / pipeline * kept + working)


def logit_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """``V/Pt`` logits of each token of a microbatch with what the loss keeps of them; 0 for losses in chunks."""
    if model.head is Head.SCALAR or batch.execution.chunked_loss:
        return np.zeros(len(batch.layouts))
    used = used_by(batch)
    return used.held_logit_bytes * _tokens(batch) * model.vocab / batch.layouts.tensor


def reserve_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """What the caching allocator holds beyond the tensors, of what it frees and takes again in every layer."""
    share = used_by(batch).reserved_share
    if share == 0.0:
        return np.zeros(len(batch.layouts))
    held = weight_bytes(batch, model) + gradient_bytes(batch, model) + state_bytes(batch, model)
    return share * (held + activation_bytes(batch, model) + logit_bytes(batch, model))
