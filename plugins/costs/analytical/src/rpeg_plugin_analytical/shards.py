"""Parameters per GPU in the model ``analytical``: the real matrices, cut as Megatron-LM cuts them.

* Attention heads, feed-forward widths and the vocabulary (embedding and LM head) are divided over Pt.
* K and V projections are divided down to one KV head per rank and replicated beyond; the down-projections
  of latent attention are replicated (``parallel_mode='duplicated'`` in
  megatron/core/transformer/multi_latent_attention.py).
* Norms, biases, learned positions and scalar heads are replicated.
* Tied embeddings are stored once when one stage holds both, else on the first and on the last stage.
* With Pp > 1 every stage has L/Pp mean layers: which of them are dense is not told apart.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import Ints, Layouts, MemoryBatch, OperatorBatch
from rpeg_core.spec.models import Head, ModelSpec

__all__ = [
    "copies",
    "distinct_experts",
    "expert_parameters",
    "expert_tensor",
    "held_parameters",
    "kv_width_per_rank",
    "layer_parameters_per_rank",
    "routed_parameters",
    "shard_parameters",
    "stage_layer_parameters",
]

Floats = NDArray[np.float64]


def kv_width_per_rank(model: ModelSpec, tensor: Ints) -> Floats:
    """Width of K on one rank: at least one KV head."""
    return model.head_dim * np.ceil(model.kv_heads / tensor)


def layer_parameters_per_rank(model: ModelSpec, tensor: Ints) -> Floats:
    """Matrix elements of one mean layer on one tensor-parallel rank."""
    latent = model.latent_attention
    if latent is not None:
        whole = model.hidden * (latent.cached_elements + (latent.q_lora_rank or 0))
        return (model.layer_parameters - whole) / tensor + whole
    divided = model.layer_parameters - 2 * model.hidden * model.kv_width
    return divided / tensor + 2.0 * model.hidden * kv_width_per_rank(model, tensor)


def routed_parameters(model: ModelSpec, experts: float | Floats) -> Floats:
    """Matrix elements of ``experts`` routed experts in one mean layer; 0 without a mixture of experts."""
    if model.moe is None:
        return np.zeros(np.shape(experts))
    projections = 3 if model.gated_ffn else 2
    sparse_share = (model.layers - model.moe.dense_layers) / model.layers
    return np.asarray(experts, np.float64) * projections * model.hidden * model.moe.expert_ffn * sparse_share


def distinct_experts(experts: int, active: int, tokens: Floats) -> Floats:
    """Experts that ``tokens`` tokens meet when each picks ``active`` evenly: ``E (1 - (1 - k/E)^tokens)``."""
    return experts * (1.0 - np.power(1.0 - active / experts, tokens))


def shard_parameters(model: ModelSpec, layouts: Layouts) -> Floats:
    """W_shard: parameters per GPU of the stage that holds most; all of the model's on a single GPU."""
    pipeline, tensor = layouts.pipeline, layouts.tensor
    layers = model.layers / pipeline * layer_parameters_per_rank(model, tensor)
    vocabulary = model.vocab * model.hidden / tensor
    first = vocabulary + model.learned_positions * model.hidden
    last = np.where(pipeline == 1, 0.0 if model.tied_embeddings else vocabulary, vocabulary)
    if model.head is Head.SCALAR:
        last = np.zeros(len(layouts))
    if model.head is not Head.LM:
        last = last + model.hidden
    boundary = np.where(pipeline == 1, first + last, np.maximum(first, last))
    return layers + model.small_parameters / pipeline + boundary


def expert_parameters(model: ModelSpec, layouts: Layouts) -> Floats:
    """Parameters of all routed experts of one stage, not divided."""
    if model.moe is None:
        return np.zeros(len(layouts))
    return model.layers / layouts.pipeline * routed_parameters(model, float(model.moe.experts))


def held_parameters(model: ModelSpec, layouts: Layouts, expert: int) -> Floats:
    """W_shard where ``expert`` ranks share the experts of a layer; :func:`shard_parameters` for one."""
    shard = shard_parameters(model, layouts)
    if model.moe is None or expert == 1:
        return shard
    experts = expert_parameters(model, layouts)
    return shard - experts / layouts.tensor + experts / expert


def stage_layer_parameters(model: ModelSpec, layouts: Layouts, expert: int) -> Floats:
    """The part of :func:`held_parameters` in the layers' matrices."""
    layers = model.layers / layouts.pipeline * layer_parameters_per_rank(model, layouts.tensor)
    if model.moe is None or expert == 1:
        return layers
    experts = expert_parameters(model, layouts)
    return layers - experts / layouts.tensor + experts / expert


def expert_tensor(batch: OperatorBatch | MemoryBatch) -> Floats:
    """Tensor-parallel degree of the experts."""
    chosen = batch.execution.expert_tensor
    if chosen is None:
        chosen = 1 if batch.execution.expert > 1 else 0
    return np.where(chosen > 0, np.minimum(max(chosen, 1), batch.layouts.tensor), batch.layouts.tensor).astype(float)


def copies(batch: OperatorBatch | MemoryBatch, model: ModelSpec) -> tuple[tuple[Floats, Floats], ...]:
    """(elements on a GPU, GPUs that hold the same ones) of the parts of W_shard: the data-parallel groups.

    Context ranks hold the same weights; an expert spread over Pe ranks has Pe / Pt times fewer copies than the rest.
    """
    layouts, execution = batch.layouts, batch.execution
    ranks = (layouts.data * execution.context).astype(float)
    if execution.shard_ranks:
        ranks = np.minimum(ranks, execution.shard_ranks)
    if model.moe is None or execution.expert == 1:
        return ((shard_parameters(model, layouts), ranks),)
    experts = expert_parameters(model, layouts)
    of_experts = np.maximum(1.0, ranks * layouts.tensor / (execution.expert * expert_tensor(batch)))
    shared = shard_parameters(model, layouts) - experts / layouts.tensor
    return ((shared, ranks), (experts / execution.expert, of_experts))
