"""Seconds that one microbatch spends in a pipeline stage, in the model ``analytical``.

Three kernels run one after another, so their rooflines add up: the matrices of the layers, attention, and
on the last stage the head. The paper takes one roofline over the whole work (D-A b).
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.microbatches import Pass
from rpeg_plugin_analytical.roofline import gemm_utilization, roofline_s
from rpeg_plugin_analytical.shards import distinct_experts, layer_parameters_per_rank, routed_parameters
from rpeg_plugin_analytical.work import TRAINING_FORWARDS, decode_counts, model_counts

__all__ = ["HEAD_TRAINING_FORWARDS", "StageSeconds", "stage_seconds"]

Floats = NDArray[np.float64]

HEAD_TRAINING_FORWARDS = 3.0
"""Forward and backward of the head, which lies outside the recomputed layers: Megatron-LM counts 6 B s h
V FLOPs for it (Narayanan et al., arXiv:2104.04473, appendix), three times the forward pass."""


@attrs.frozen(kw_only=True, eq=False)
class StageSeconds:
    """One microbatch: ``layers_s`` on every stage, ``head_s`` on the last one in addition; shape (n,)."""

    layers_s: Floats
    head_s: Floats


def stage_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> StageSeconds:
    """Seconds per microbatch of one pass; in training with recomputation and backward."""
    training = batch.role is Role.TRAINING
    layers_s = _matrices_s(batch, model, part) + _attention_s(batch, model, part)
    head_s = _head_s(batch, model, part)
    return StageSeconds(
        layers_s=layers_s * (TRAINING_FORWARDS if training else 1.0),
        head_s=head_s * (HEAD_TRAINING_FORWARDS if training else 1.0),
    )


def _utilization(batch: OperatorBatch, model: ModelSpec, rows: Floats) -> Floats:
    width = min(model.hidden, model.ffn_gemm_width) / batch.layouts.tensor
    return gemm_utilization(rows, width, batch.hardware.efficiency)


def _matrices_s(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """Projections and feed-forward: ``2 active parameters`` FLOPs per token, weights moved once."""
    layouts = batch.layouts
    stage_layers = model.layers / layouts.pipeline
    flops = 2.0 * stage_layers * part.tokens * model.active_layer_parameters / layouts.tensor
    weights = layer_parameters_per_rank(model, layouts.tensor)
    rows = part.tokens
    if model.moe is not None:
        experts, active = model.moe.experts, model.moe.active_experts
        met = distinct_experts(experts, active, part.tokens)
        weights = weights - routed_parameters(model, experts - met) / layouts.tensor
        # An expert's GEMM has tokens * k / met rows. With 1/eta linear in 1/rows, the mean over both
        # kinds of GEMM, weighted by FLOPs, is eta at the harmonic mean of the rows.
        routed = float(routed_parameters(model, active)) / model.active_layer_parameters
        rows = part.tokens / (1.0 - routed + routed * met / active)
    moved_bytes = stage_layers * (weights + 2.0 * part.tokens * model.hidden) * batch.workload.bytes_per_element
    return roofline_s(flops, moved_bytes, _utilization(batch, model, rows), batch.hardware.device)


def _attention_s(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """Scores and values, ``4 d_attn context`` FLOPs per token; decode reads the cached K and V.

    Full sequences run at the utilization of the layers' GEMMs, decode at F_peak or, nearly always, at
    BW_mem: eta describes GEMM shapes, and the profile has no curve for attention.
    """
    layouts = batch.layouts
    stage_layers = model.layers / layouts.pipeline
    counts = decode_counts(model) if part.decode else model_counts(model)
    flops = 4.0 * stage_layers * part.tokens * counts.attention_width * part.context / layouts.tensor
    if not part.decode:
        return roofline_s(flops, 0.0, _utilization(batch, model, part.tokens), batch.hardware.device)
    per_token = model.kv_elements_per_token_per_layer(layouts.tensor) * batch.workload.bytes_per_element
    cache_bytes = stage_layers * part.tokens * part.context * per_token
    return roofline_s(flops, cache_bytes, 1.0, batch.hardware.device)


def _head_s(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """The head's GEMM over the tokens it is applied to; its matrix is read once per microbatch."""
    elements = model.head_flop_parameters / batch.layouts.tensor
    flops = 2.0 * part.head_tokens * elements
    moved_bytes = elements * batch.workload.bytes_per_element
    return roofline_s(flops, moved_bytes, _utilization(batch, model, part.head_tokens), batch.hardware.device)
