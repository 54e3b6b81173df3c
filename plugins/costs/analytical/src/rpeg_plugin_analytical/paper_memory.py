"""Memory terms of the model ``paper``: model.md, section 4; the paper's D-H and D-I as printed."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import FusedBatch, Layouts, MemoryBatch
from rpeg_core.ir import Role
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_plugin_analytical.shared import (
    ADAM_STATE_BYTES_PER_PARAMETER,
    MASTER_WEIGHT_BYTES_PER_PARAMETER,
    checkpoint_interval,
    fused_checkpoints,
    live_microbatches,
    of_model,
)
from rpeg_plugin_analytical.work import paper_layer_parameters

__all__ = [
    "activations_bytes",
    "first_state_bytes",
    "fused_activations_bytes",
    "gradients_bytes",
    "kv_cache_bytes",
    "optimizer_state_bytes",
    "shard_parameters",
    "weights_bytes",
]

Floats = NDArray[np.float64]


def shard_parameters(model: ModelSpec, layouts: Layouts) -> Floats:
    """W_shard: parameters per GPU of the worst stage; embedding and head are whole on every TP rank (D-H)."""
    layers = model.layers / layouts.pipeline * paper_layer_parameters(model) / layouts.tensor
    embedding, head = model.vocab * model.hidden, model.head_flop_parameters
    return layers + np.where(layouts.pipeline == 1, embedding + head, max(embedding, head))


@of_model
def optimizer_state_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """M_opt = ``12 W_shard / Pd`` on training GPUs (D-H)."""
    if batch.role is not Role.TRAINING:
        return np.zeros(len(batch.layouts))
    return ADAM_STATE_BYTES_PER_PARAMETER * shard_parameters(model, batch.layouts) / batch.layouts.data


@of_model
def first_state_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Before the first update: ``4 W_shard / Pd``; the paper has no first step."""
    if batch.role is not Role.TRAINING:
        return np.zeros(len(batch.layouts))
    return MASTER_WEIGHT_BYTES_PER_PARAMETER * shard_parameters(model, batch.layouts) / batch.layouts.data


@of_model
def weights_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """M_w = ``W_shard s_b`` (D-H)."""
    return shard_parameters(model, batch.layouts) * batch.workload.bytes_per_element


@of_model
def gradients_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Training: ``W_shard s_b / Pd`` (D-H)."""
    if batch.role is not Role.TRAINING:
        return np.zeros(len(batch.layouts))
    return shard_parameters(model, batch.layouts) * batch.workload.bytes_per_element / batch.layouts.data


@of_model
def activations_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """M_act with checkpoints in training, M_actI otherwise; generation with l = Lp (D-I a, b)."""
    workload, layouts = batch.workload, batch.layouts
    generates = batch.role is Role.GENERATION
    length = workload.prompt_tokens if generates else workload.sequence_tokens
    microbatch_bytes = workload.bytes_per_element * batch.sequences_per_microbatch * length
    if batch.role is Role.TRAINING:
        return microbatch_bytes * live_microbatches(layouts) * _kept_width(batch, model)
    layer = _layer_width(model, layouts)
    head = model.hidden + (1 if model.head is Head.SCALAR else model.vocab)
    return microbatch_bytes * np.maximum(layer, head)


def fused_activations_bytes(batch: FusedBatch[MemoryBatch]) -> Floats:
    """Those of the microbatches in flight, of all models together **[choice]**."""
    first = batch.parts[0]
    microbatch_bytes = (
        first.workload.bytes_per_element * first.sequences_per_microbatch * first.workload.sequence_tokens
    )
    return fused_checkpoints(batch, [microbatch_bytes * _kept_width(part, part.model) for part in batch.parts])


def _kept_width(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Training: elements per token that one microbatch in flight holds."""
    stage_layers = model.layers // batch.layouts.pipeline
    interval = checkpoint_interval(stage_layers)
    checkpoints = -(-stage_layers // interval) * model.hidden
    return checkpoints + interval * _layer_width(model, batch.layouts)


def _layer_width(model: ModelSpec, layouts: Layouts) -> Floats:
    """M_buf, elements per token: ``max(2d + 6d/Pt, 2d + 2 d_ff/Pt)``."""
    return 2.0 * model.hidden + np.maximum(6.0 * model.hidden, 2.0 * model.ffn) / layouts.tensor


@of_model
def kv_cache_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Generation: ``2 s_b (B R / Pd) (Lp + Lr) (L/Pp) d/Pt``, multi-head attention (D-I c)."""
    workload, layouts = batch.workload, batch.layouts
    if batch.role is not Role.GENERATION:
        return np.zeros(len(layouts))
    tokens = workload.sequences / layouts.data * workload.sequence_tokens
    width = model.layers / layouts.pipeline * model.hidden / layouts.tensor
    return 2.0 * (batch.execution.cache_bytes_per_element or workload.bytes_per_element) * tokens * width
