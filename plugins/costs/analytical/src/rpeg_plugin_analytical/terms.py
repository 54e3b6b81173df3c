"""The records of both cost models: which function is which term, and what reports call it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from rpeg_core import CostTerm, MemoryKind, Target
from rpeg_core.costing.batches import FusedBatch, MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.planning.axes import AXES
from rpeg_plugin_analytical import analytical_memory, analytical_time, host_memory, paper_memory, paper_time, shared
from rpeg_plugin_analytical.errors import errors_of
from rpeg_plugin_analytical.frameworks import OFFERED

__all__ = ["analytical_terms", "paper_terms"]


def analytical_terms() -> tuple[CostTerm, ...]:
    """The terms of ``analytical``."""
    model, time, memory = "analytical", analytical_time, analytical_memory
    return (
        _time(model, "gemm", "GEMM", time.gemm_s, "each matrix product of layers and head at its own shape"),
        _time(model, "attention", "attention", time.attention_s, "4 d_attn context FLOPs per token, or the cache read"),
        _time(
            model,
            "pipeline_bubble",
            "pipeline bubble",
            time.pipeline_bubble_s,
            "fill and drain, and waiting for the stage with the head",
            fused=time.fused_pipeline_bubble_s,
        ),
        _time(
            model,
            "tensor_parallel",
            "TP all-reduce",
            time.tensor_parallel_s,
            "2 per layer, forward pass and microbatch, 6 in training",
        ),
        _time(
            model,
            "pipeline_parallel",
            "PP send/recv",
            time.pipeline_parallel_s,
            "one message per microbatch and boundary in sequence",
            fused=time.fused_pipeline_parallel_s,
        ),
        _time(
            model,
            "data_parallel",
            "DP reduce-scatter + all-gather",
            time.data_parallel_s,
            "gradients and updated weights of the largest stage",
        ),
        _time(
            model,
            "non_gemm",
            "non-GEMM",
            time.non_gemm_s,
            "norms, residuals, activations, casts and the loss at BW_mem",
        ),
        _time(model, "context_parallel", "CP ring", time.context_parallel_s, "Pc - 1 exchanges of K and V per layer"),
        _time(model, "expert_parallel", "EP all-to-all", time.expert_parallel_s, "dispatch and combine per MoE layer"),
        _time(
            model, "step_overhead", "step overhead", time.step_overhead_s, "host time and launches of a training step"
        ),
        _time(model, "optimizer", "optimizer", time.optimizer_s, "18 W_shard / (Pd BW_mem)"),
        _time(model, "loop_overhead", "loop overhead", time.loop_overhead_s, "waiting and hand-over between phases"),
        _time(model, "stragglers", "stragglers", time.stragglers_s, "the slowest of N GPUs, sigma sqrt(2 ln N)"),
        *_shared_time_terms(model),
        *_memory_terms(
            model,
            optimizer_state=memory.optimizer_state_bytes,
            first_state=memory.first_state_bytes,
            weights=memory.weights_bytes,
            gradients=memory.gradients_bytes,
            activations=memory.activations_bytes,
            fused_activations=memory.fused_activations_bytes,
            kv_cache=memory.kv_cache_bytes,
        ),
        _memory(
            model,
            "logits",
            "logits",
            MemoryKind.TRANSIENT,
            memory.logits_bytes,
            "16-bit and FP32 logits beyond the layer buffer",
            fused=memory.fused_logits_bytes,
        ),
        _memory(
            model,
            "reserve",
            "reserve",
            MemoryKind.TRANSIENT,
            memory.reserve_bytes,
            "fragmentation of a framework's training step",
        ),
    )


def paper_terms() -> tuple[CostTerm, ...]:
    """The terms of ``paper``; logits are part of its activations."""
    model, time, memory = "paper", paper_time, paper_memory
    return (
        _time(model, "gemm", "GEMM", time.gemm_s, "W / (P F_eff), D-A"),
        _time(
            model,
            "pipeline_bubble",
            "pipeline bubble",
            time.pipeline_bubble_s,
            "T_gemm (Pp - 1)/mb, D-C",
            fused=time.fused_pipeline_bubble_s,
        ),
        _time(
            model,
            "tensor_parallel",
            "TP all-reduce",
            time.tensor_parallel_s,
            "2 (training 6) L/Pp AllReduces per microbatch or decode step, D-D a",
        ),
        _time(
            model,
            "pipeline_parallel",
            "PP send/recv",
            time.pipeline_parallel_s,
            "mb + Pp - 2 (training mb + 2 Pp - 3) messages, D-D b",
            fused=time.fused_pipeline_parallel_s,
        ),
        _time(
            model,
            "data_parallel",
            "DP reduce-scatter + all-gather",
            time.data_parallel_s,
            "N_m s_b / (Pp Pt) over Pd, D-D c",
        ),
        _time(model, "non_gemm", "non-GEMM", time.non_gemm_s, "L/Pp c_ng b_loc mb / B_cal (1 - 1/Pt), D-E"),
        _time(model, "optimizer", "optimizer", time.optimizer_s, "18 N_m / (P BW_mem), D-F"),
        *_shared_time_terms(model),
        *_memory_terms(
            model,
            optimizer_state=memory.optimizer_state_bytes,
            first_state=memory.first_state_bytes,
            weights=memory.weights_bytes,
            gradients=memory.gradients_bytes,
            activations=memory.activations_bytes,
            fused_activations=memory.fused_activations_bytes,
            kv_cache=memory.kv_cache_bytes,
        ),
    )


OperatorFunction = Callable[[OperatorBatch], np.ndarray]
TransferFunction = Callable[[TransferBatch], np.ndarray]
MemoryFunction = Callable[[MemoryBatch], np.ndarray]
FusedFunction = Callable[[FusedBatch], np.ndarray]


def _shared_time_terms(model: str) -> tuple[CostTerm, ...]:
    return (
        _time(
            model,
            "function_reward",
            "function reward",
            shared.function_reward_s,
            "seconds per sample * sequences / Pd",
        ),
        _transfer(
            model,
            "communicate",
            "transfer",
            shared.communicate_s,
            "alpha + bytes/min(|src|, |dst|) beta, D-G a",
        ),
        _transfer(model, "reshard", "reshard", shared.reshard_s, "AllToAll(bytes/|sigma|, |sigma|), D-G b"),
    )


def _memory_terms(
    model: str,
    *,
    optimizer_state: MemoryFunction,
    first_state: MemoryFunction,
    weights: MemoryFunction,
    gradients: MemoryFunction,
    activations: MemoryFunction,
    fused_activations: FusedFunction,
    kv_cache: MemoryFunction,
) -> tuple[CostTerm, ...]:
    return (
        _memory(
            model,
            "optimizer_state",
            "optimizer state",
            MemoryKind.TRAINING_STATE,
            optimizer_state,
            "12 W_shard / Pd: FP32 weights and two moments",
            first_step=first_state,
            host=host_memory.state_bytes,
        ),
        _memory(model, "weights", "weights", MemoryKind.WEIGHTS, weights, "W_shard s_b"),
        _memory(model, "gradients", "gradients", MemoryKind.GRADIENTS, gradients, "W_shard s_b / Pd"),
        _memory(
            model,
            "activations",
            "activations",
            MemoryKind.TRANSIENT,
            activations,
            "checkpoints and layer intermediates, D-I a, b",
            fused=fused_activations,
        ),
        _memory(model, "kv_cache", "KV cache", MemoryKind.TRANSIENT, kv_cache, "K and V of Lp + Lr tokens, D-I c"),
    )


def _time(
    model: str,
    term: str,
    quantity: str,
    function: OperatorFunction,
    summary: str,
    *,
    fused: FusedFunction | None = None,
) -> CostTerm:
    return CostTerm(
        name=f"{model}.{term}",
        summary=summary,
        target=Target.OPERATOR,
        quantity=quantity,
        function=function,
        fused=fused,
        errors=errors_of(term) if model == "analytical" else (),
        **_offered(model),
    )


def _transfer(model: str, term: str, quantity: str, function: TransferFunction, summary: str) -> CostTerm:
    return CostTerm(
        name=f"{model}.{term}", summary=summary, target=Target.TRANSFER, quantity=quantity, function=function
    )


def _memory(
    model: str,
    term: str,
    quantity: str,
    kind: MemoryKind,
    function: MemoryFunction,
    summary: str,
    *,
    fused: FusedFunction | None = None,
    first_step: MemoryFunction | None = None,
    host: MemoryFunction | None = None,
) -> CostTerm:
    return CostTerm(
        name=f"{model}.{term}",
        summary=summary,
        target=Target.MEMORY,
        quantity=quantity,
        function=function,
        memory=kind,
        fused=fused,
        first_step=first_step,
        host=host,
        **_offered(model),
    )


def _offered(model: str) -> dict[str, Any]:
    """The axes and frameworks that a model's terms know; the paper's know its 3D space only."""
    return {} if model == "paper" else {"axes": frozenset(AXES), "frameworks": OFFERED}
