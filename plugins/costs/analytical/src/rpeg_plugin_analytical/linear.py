"""The matrix products of a layer and of the head, each with its own shape.

Forward and input gradient are ``tokens x k`` by ``k x n`` and ``tokens x n`` by ``n x k``; the weight gradient is
``n x tokens`` by ``tokens x k``, summed into an FP32 buffer.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Precision
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.frameworks import used_by
from rpeg_plugin_analytical.kernels import gemm_flops_per_s, gemm_seconds, input_bytes
from rpeg_plugin_analytical.microbatches import Pass
from rpeg_plugin_analytical.shards import distinct_experts, expert_tensor, kv_width_per_rank

__all__ = ["head_seconds", "layer_seconds", "local_tokens", "routed_rows"]

Floats = NDArray[np.float64]

GRADIENT_ACCUMULATION_BYTES = 8.0
"""Reading and writing one FP32 element of the gradient buffer (fused weight gradient, Megatron-LM)."""


@attrs.frozen(eq=False)
class _Gemm:
    """``layers`` products of n columns and inner length k per mean layer; rows differ from tokens for experts."""

    columns: Floats
    inner: Floats
    rows: Floats
    count: Floats | float = 1.0


def local_tokens(batch: OperatorBatch, part: Pass) -> Floats:
    """Tokens of a microbatch on one GPU: context parallelism divides each sequence."""
    return part.tokens / batch.execution.context


def routed_rows(batch: OperatorBatch, model: ModelSpec, part: Pass) -> tuple[Floats, Floats]:
    """(rows of one expert's product, experts of one GPU that have any), tokens choosing experts evenly."""
    assert model.moe is not None
    moe, execution = model.moe, batch.execution
    group_tokens = local_tokens(batch, part) / batch.layouts.tensor * execution.expert * expert_tensor(batch)
    met = distinct_experts(moe.experts, moe.active_experts, group_tokens)
    return group_tokens * moe.active_experts / met, met / execution.expert


def layer_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """All matrix products of one mean layer for one microbatch; in training with recomputation and backward."""
    precision = batch.execution.precision
    total_s = np.zeros(len(batch.layouts))
    for gemm in _layer_gemms(batch, model, part):
        total_s = total_s + gemm.count * _seconds(batch, gemm, precision, batch.execution.recompute.linear)
    return total_s


def head_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """The head's product in 16 bits; three forward passes in training: it lies outside the recomputed layers."""
    columns = model.head_flop_parameters / model.hidden / batch.layouts.tensor
    rows = part.head_tokens / batch.execution.context
    gemm = _Gemm(columns=columns, inner=np.float64(model.hidden), rows=rows)
    return _seconds(batch, gemm, Precision.BF16, 0.0)


def _layer_gemms(batch: OperatorBatch, model: ModelSpec, part: Pass) -> list[_Gemm]:
    tensor, rows = batch.layouts.tensor.astype(float), local_tokens(batch, part)
    hidden = np.full(len(tensor), float(model.hidden))
    latent = model.latent_attention
    gemms = []
    if latent is None:
        heads = model.attention_width / tensor
        gemms += [
            _Gemm(columns=heads + 2 * kv_width_per_rank(model, batch.layouts.tensor), inner=hidden, rows=rows),
            _Gemm(columns=hidden, inner=heads, rows=rows),
        ]
    else:
        queries = model.heads * model.head_dim / tensor
        values = model.heads * latent.v_head_dim / tensor
        up = model.heads * (latent.qk_nope_head_dim + latent.v_head_dim) / tensor
        down = float(latent.cached_elements + (latent.q_lora_rank or 0))
        gemms += [
            _Gemm(columns=np.full(len(tensor), down), inner=hidden, rows=rows),
            _Gemm(columns=queries, inner=np.full(len(tensor), float(latent.q_lora_rank or model.hidden)), rows=rows),
            _Gemm(columns=up, inner=np.full(len(tensor), float(latent.kv_lora_rank)), rows=rows),
            _Gemm(columns=hidden, inner=values, rows=rows),
        ]
    fused = 2.0 if model.gated_ffn else 1.0
    moe = model.moe
    dense = 1.0 if moe is None else moe.dense_layers / model.layers
    if dense > 0:
        width = model.ffn / tensor
        gemms += [
            _Gemm(columns=fused * width, inner=hidden, rows=rows, count=dense),
            _Gemm(columns=hidden, inner=width, rows=rows, count=dense),
        ]
    if moe is not None:
        sparse = 1.0 - dense
        gemms.append(_Gemm(columns=np.full(len(tensor), float(moe.experts)), inner=hidden, rows=rows, count=sparse))
        if moe.shared_ffn:
            width = moe.shared_ffn / tensor
            gemms += [
                _Gemm(columns=fused * width, inner=hidden, rows=rows, count=sparse),
                _Gemm(columns=hidden, inner=width, rows=rows, count=sparse),
            ]
        expert_rows, experts = routed_rows(batch, model, part)
        experts = experts / used_by(batch).expert_gemm_share
        width = moe.expert_ffn / expert_tensor(batch)
        gemms += [
            _Gemm(columns=fused * width, inner=hidden, rows=expert_rows, count=sparse * experts),
            _Gemm(columns=hidden, inner=width, rows=expert_rows, count=sparse * experts),
        ]
    return gemms


def _seconds(batch: OperatorBatch, gemm: _Gemm, precision: Precision, recomputed: float) -> Floats:
    hardware, execution = batch.hardware, batch.execution
    element = input_bytes(precision, batch.workload.bytes_per_element)
    training = batch.role is Role.TRAINING
    flops = gemm_flops_per_s(hardware, precision, sustained=batch.role is not Role.GENERATION)
    if not training:
        used = used_by(batch)
        return gemm_seconds(
            hardware,
            gemm.rows,
            gemm.columns,
            gemm.inner,
            flops_per_s=flops * used.prefill_share,
            element_bytes=element,
            stream_share=used.stream_share,
        )
    forward = gemm_seconds(hardware, gemm.rows, gemm.columns, gemm.inner, flops_per_s=flops, element_bytes=element)
    backward = gemm_seconds(hardware, gemm.rows, gemm.inner, gemm.columns, flops_per_s=flops, element_bytes=element)
    total = (1.0 + recomputed) * forward + backward
    if execution.frozen_base:
        return total
    weight = gemm_seconds(
        hardware,
        gemm.columns,
        gemm.inner,
        gemm.rows,
        flops_per_s=flops,
        element_bytes=element,
        extra_bytes=(GRADIENT_ACCUMULATION_BYTES - 2.0) * gemm.columns * gemm.inner,
    )
    return total + weight
