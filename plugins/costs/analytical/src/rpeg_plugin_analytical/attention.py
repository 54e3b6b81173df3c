"""Attention: scores and values, ``4 d_attn context`` FLOPs per token and layer."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.frameworks import used_by
from rpeg_plugin_analytical.kernels import attention_flops_per_s, stream_s
from rpeg_plugin_analytical.microbatches import Pass
from rpeg_plugin_analytical.roofline import roofline_s
from rpeg_plugin_analytical.work import decode_counts, model_counts

__all__ = ["layer_seconds"]

Floats = NDArray[np.float64]

BACKWARD_FLOPS = 2.5
"""FLOPs of the backward pass over those of the forward pass: five matrix products, scores recomputed on chip,
against two (FlashAttention-2, arXiv:2307.08691, section 3.1.2)."""


def layer_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """One microbatch in one layer; decode reads the cached K and V, at BW_mem nearly always."""
    return _decode(batch, model, part) if part.decode else _sequences(batch, model, part)


def _decode(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    tensor = batch.layouts.tensor
    flops = 4.0 * part.tokens * decode_counts(model).attention_width * part.context / tensor
    element = batch.execution.cache_bytes_per_element or batch.workload.bytes_per_element
    per_token = model.kv_elements_per_token_per_layer(tensor) * element
    used = used_by(batch)
    per_token = per_token * used.cache_passes
    if model.latent_attention is None:
        reuse = used.grouped_reads
        per_token = per_token * (1.0 + reuse * (model.heads / model.kv_heads - 1.0))
    return roofline_s(flops, part.tokens * part.context * per_token, 1.0, batch.hardware.device)


def _sequences(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """Fused: at the table's FLOP/s. Unfused: all l x l scores, causal or not, go through memory."""
    layouts, execution, used = batch.layouts, batch.execution, used_by(batch)
    width = model_counts(model).attention_width / layouts.tensor
    flops = 4.0 * part.tokens * width * part.context / execution.context
    training = batch.role is Role.TRAINING
    speed = attention_flops_per_s(batch.hardware, 2.0 * part.context, width) * used.attention_share
    backward = BACKWARD_FLOPS / used.backward_attention_share
    memory_s = np.zeros(len(layouts))
    if not used.fused_attention:
        flops, backward = 2.0 * flops, 2.0
        scores = part.tokens * 2.0 * part.context * model.heads / layouts.tensor / execution.context
        memory_s = stream_s(batch.hardware, used.score_bytes * scores)
    forward_s = flops / speed + memory_s
    if not training:
        return forward_s
    return forward_s * (1.0 + execution.recompute.attention) + flops / speed * backward + 2.0 * memory_s
