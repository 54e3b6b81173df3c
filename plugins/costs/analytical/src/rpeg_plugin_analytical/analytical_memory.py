"""Memory terms of the model ``analytical``: the paper's D-H and D-I with the model's real architecture."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import FusedBatch, MemoryBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_plugin_analytical import training_memory
from rpeg_plugin_analytical.kernels import input_bytes
from rpeg_plugin_analytical.shards import copies, held_parameters, kv_width_per_rank, stage_layer_parameters
from rpeg_plugin_analytical.shared import (
    ADAM_STATE_BYTES_PER_PARAMETER,
    MASTER_WEIGHT_BYTES_PER_PARAMETER,
    checkpoint_interval,
    fused_checkpoints,
    live_microbatches,
    of_model,
)

__all__ = [
    "activations_bytes",
    "first_state_bytes",
    "fused_activations_bytes",
    "fused_logits_bytes",
    "gradients_bytes",
    "kv_cache_bytes",
    "logits_bytes",
    "optimizer_state_bytes",
    "reserve_bytes",
    "weights_bytes",
]

Floats = NDArray[np.float64]

FP32_BYTES = 4


@of_model
def optimizer_state_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Training GPUs: ``12 W_shard / (Pd Pc)``, experts over their own copies."""
    if _of_framework(batch):
        return training_memory.state_bytes(batch, model)
    if batch.role is not Role.TRAINING:
        return np.zeros(len(batch.layouts))
    return _divided(batch, model, ADAM_STATE_BYTES_PER_PARAMETER)


@of_model
def first_state_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """The optimizer's state before its first update: ``4 W_shard / (Pd Pc)``, the FP32 weights."""
    if _of_framework(batch):
        return training_memory.first_state_bytes(batch, model)
    if batch.role is not Role.TRAINING:
        return np.zeros(len(batch.layouts))
    return _divided(batch, model, MASTER_WEIGHT_BYTES_PER_PARAMETER)


@of_model
def weights_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """``W_shard s_b``; of a mixture all experts that are not on other ranks.

    Served layers are kept in the precision of their products; a training keeps 16 bits and quantizes as it goes.
    """
    if _of_framework(batch):
        return training_memory.weight_bytes(batch, model)
    element, precision = batch.workload.bytes_per_element, batch.execution.precision
    held = held_parameters(model, batch.layouts, batch.execution.expert)
    if batch.role is Role.TRAINING or precision is Precision.BF16:
        return held * element
    layers = stage_layer_parameters(model, batch.layouts, batch.execution.expert)
    return (held - layers) * element + layers * input_bytes(precision, element)


@of_model
def gradients_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Training: ``W_shard s_b / (Pd Pc)``."""
    if _of_framework(batch):
        return training_memory.gradient_bytes(batch, model)
    if batch.role is not Role.TRAINING:
        return np.zeros(len(batch.layouts))
    return _divided(batch, model, batch.workload.bytes_per_element)


def _divided(batch: MemoryBatch, model: ModelSpec, element_bytes: float) -> Floats:
    """``W_shard`` elements, each divided over the GPUs that hold the same ones."""
    total = np.zeros(len(batch.layouts))
    for elements, ranks in copies(batch, model):
        total = total + element_bytes * elements / ranks
    return total


@of_model
def activations_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Checkpoints and the working buffer of layers; the head's output is ``analytical.logits``.

    Training with full recomputation: ``s_b b_loc l (min(mb, Pp) ceil((L/Pp)/c) d + c M_layer)``: checkpoints of every
    microbatch in flight, and one segment of c layers of the one microbatch whose backward runs. Otherwise each of the
    L/Pp layers keeps what its backward pass reads (:func:`training_memory.layer_width`), and one works. Context
    parallelism divides l, sequence parallelism the parts of d that no tensor rank divides.
    """
    if _of_framework(batch):
        return training_memory.activation_bytes(batch, model)
    checkpoints = np.zeros(len(batch.layouts))
    if batch.role is Role.TRAINING:
        checkpoints = live_microbatches(batch.layouts) * _kept_width(batch, model)
    return _microbatch_bytes(batch) * checkpoints + _buffer_bytes(batch, model)


def fused_activations_bytes(batch: FusedBatch[MemoryBatch]) -> Floats:
    """Checkpoints of the microbatches in flight, of all models together, and the largest segment at work."""
    kept = [_microbatch_bytes(part) * _kept_width(part, part.model) for part in batch.parts]
    buffers = [_buffer_bytes(part, part.model) for part in batch.parts]
    return fused_checkpoints(batch, kept) + np.max(np.array(buffers), axis=0)


def fused_logits_bytes(batch: FusedBatch[MemoryBatch]) -> Floats:
    """One microbatch's: the last stage runs its backward pass before the next forward pass."""
    return np.max(np.array([logits_bytes(part) for part in batch.parts]), axis=0)


def _kept_width(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Elements per token of what a microbatch keeps on one stage for its backward pass."""
    stage_layers = model.layers // batch.layouts.pipeline
    if batch.execution.recompute is not Recompute.FULL:
        return stage_layers * training_memory.kept_width(batch, model)
    kept = -(-stage_layers // checkpoint_interval(stage_layers))
    return kept * _undivided(batch, model)


def _undivided(batch: MemoryBatch, model: ModelSpec) -> Floats | int:
    """d, that sequence parallelism divides and tensor parallelism alone does not."""
    return model.hidden / batch.layouts.tensor if batch.execution.sequence_parallel else model.hidden


@of_model
def logits_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """What the LM head's output needs beyond the layer buffer, which is free while the head works.

    Training and inference: ``b_loc l V/Pt`` logits in the working precision and in FP32, of which the
    loss or the log-probabilities are computed (VocabParallelCrossEntropy of
    megatron/core/tensor_parallel/cross_entropy.py casts with ``.float()`` and then works in place).
    Generation: a row of V for each sequence of a microbatch, not divided by Pt, because a sampler gathers
    them (``LogitsProcessor._gather_logits`` of vllm).
    """
    if _of_framework(batch):
        return training_memory.logit_bytes(batch, model)
    if model.head is Head.SCALAR:
        return np.zeros(len(batch.layouts))
    workload, layouts = batch.workload, batch.layouts
    if batch.role is Role.GENERATION:
        logits = batch.sequences_per_microbatch * model.vocab
    else:
        tokens = batch.sequences_per_microbatch * workload.sequence_tokens / batch.execution.context
        logits = tokens * model.vocab / layouts.tensor
    needed_bytes = logits * (workload.bytes_per_element + FP32_BYTES)
    return np.maximum(0.0, needed_bytes - _buffer_bytes(batch, model))


@of_model
def kv_cache_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Generation: K and V of the tokens held at the fullest moment, ``tokens (L/Pp) kv_elements(Pt)`` of the cache's
    type.

    At the end of phase q the sequences still alive hold Lp + t_q tokens each; finished ones are freed.
    With a shared prefix the B prompts are held once each.
    """
    workload, layouts = batch.workload, batch.layouts
    if batch.role is not Role.GENERATION:
        return np.zeros(len(layouts))
    own_prompt = 0 if workload.shared_prefix else workload.prompt_tokens
    held = max(phase.alive * workload.sequences * (own_prompt + phase.last_token) for phase in workload.phases)
    if workload.shared_prefix:
        held = held + workload.prompts * workload.prompt_tokens
    per_token = model.layers / layouts.pipeline * model.kv_elements_per_token_per_layer(layouts.tensor)
    return held / layouts.data * per_token * (batch.execution.cache_bytes_per_element or workload.bytes_per_element)


@of_model
def reserve_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Fragmentation of a framework's training step; 0 in the plan's own subset, whose limit leaves a tenth free."""
    return training_memory.reserve_bytes(batch, model) if _of_framework(batch) else np.zeros(len(batch.layouts))


def _of_framework(batch: MemoryBatch) -> bool:
    return batch.role is Role.TRAINING and batch.execution.framework != ""


def _microbatch_bytes(batch: MemoryBatch) -> Floats:
    """Bytes of one element per token of a microbatch on a GPU: ``s_b b_loc l / Pc``, l = Lp for the prefill."""
    workload = batch.workload
    generates = batch.role is Role.GENERATION
    length = workload.prompt_tokens if generates else workload.sequence_tokens
    return workload.bytes_per_element * batch.sequences_per_microbatch * length / batch.execution.context


def _buffer_bytes(batch: MemoryBatch, model: ModelSpec) -> Floats:
    """Intermediates at work: the larger block of a layer; in training c whole layers, one when none is recomputed.

    For multi-head attention and d_ff = 4 d both blocks together are the ``s b h (10 + 24/t)`` bytes of
    Korthikanti et al. (arXiv:2205.05198, table 2, without the attention scores) less the two dropout
    masks, ``2 s b h``.
    """
    attention, feed_forward = _block_widths(batch, model)
    if batch.role is Role.TRAINING and batch.execution.recompute is not Recompute.FULL:
        return _microbatch_bytes(batch) * training_memory.layer_width(batch, model)
    if batch.role is Role.TRAINING:
        interval = checkpoint_interval(model.layers // batch.layouts.pipeline)
        return _microbatch_bytes(batch) * interval * (attention + feed_forward)
    return _microbatch_bytes(batch) * np.maximum(attention, feed_forward)


def _block_widths(batch: MemoryBatch, model: ModelSpec) -> tuple[Floats, Floats]:
    """Elements per token of the attention and the feed-forward block.

    Attention: input and norm; q, k, v and the heads' output. Feed-forward: input and norm; every projection
    into the width d_ff and, if gated, their product. The paper has 2d + 6d/Pt and 2d + 2 d_ff/Pt.
    """
    layouts = batch.layouts
    heads = 2.0 * model.attention_width / layouts.tensor + 2.0 * kv_width_per_rank(model, layouts.tensor)
    projections = 3.0 if model.gated_ffn else 2.0
    return (
        2.0 * _undivided(batch, model) + heads,
        2.0 * _undivided(batch, model) + projections * model.active_ffn_width / layouts.tensor,
    )
