"""What frameworks do beyond the arithmetic: which work they fuse, which communication they hide, what each step costs.

A coefficient belongs to a framework, never to a run. Those that are fitted carry their bounds and are found again by
``benchmarks/derive_frameworks.py``.
"""

from __future__ import annotations

import attrs

__all__ = ["FRAMEWORKS", "PLAN", "Framework", "framework"]


@attrs.frozen(kw_only=True)
class Framework:
    """Coefficients of one framework.

    Attributes:
        pointwise_passes: memory traffic of norms, residuals, activations and rotary embeddings over that of
            perfectly fused kernels.
        fused_attention: attention is one kernel that keeps its scores on chip; else the scores go through memory.
        attention_share: speed of its attention kernels over those of the profile's table.
        backward_attention_share: the backward kernels' FLOP/s over the forward ones'.
        tensor_exposed: share of the tensor-parallel communication that compute does not hide.
        context_exposed, expert_exposed, pipeline_exposed: the same for context and expert parallelism and for
            the messages between stages.
        data_exposed: share of the data-parallel communication that nothing hides, 1 without overlap; of the rest,
            what is longer than the compute it runs beside is exposed too.
        cast_passes: memory traffic of quantizing FP8 inputs over one read and two writes per element.
        expert_passes: memory passes over each routed token copy: gathering it by expert, scattering it back,
            weighting and adding.
        expert_gemm_share: speed of the experts' grouped products over that of single ones of the same shape.
        gradient_bytes: bytes per gradient element that data parallelism reduces.
        step_s: host time of a step that nothing hides: data loading, gradient norm, logging.
        launch_layer_s: launching one layer's kernels, forward and backward; a layer takes at least that long.
    """

    pointwise_passes: float = 1.0
    fused_attention: bool = True
    attention_share: float = 1.0
    backward_attention_share: float = 0.8
    tensor_exposed: float = 1.0
    context_exposed: float = 1.0
    expert_exposed: float = 1.0
    pipeline_exposed: float = 1.0
    data_exposed: float = 1.0
    cast_passes: float = 1.0
    expert_passes: float = 4.0
    expert_gemm_share: float = 1.0
    gradient_bytes: float = 2.0
    step_s: float = 0.0
    launch_layer_s: float = 0.0


PLAN = Framework()
"""The plan's own 3D subset: nothing is hidden."""

FRAMEWORKS: dict[str, Framework] = {
    "": PLAN,
    "megatron-2021": Framework(fused_attention=False, gradient_bytes=2.0),
    "megatron-2022": Framework(fused_attention=False, gradient_bytes=2.0),
    "megatron-core": Framework(gradient_bytes=4.0),
    "nemo": Framework(gradient_bytes=2.0),
    "nemo-2024": Framework(gradient_bytes=2.0),
    "megatron-bridge": Framework(gradient_bytes=2.0),
    "megatron-bridge-26.06": Framework(gradient_bytes=2.0),
    "torchtitan": Framework(gradient_bytes=2.0),
    "maxtext": Framework(gradient_bytes=2.0),
    "prime-rl": Framework(gradient_bytes=2.0),
    "nanotron": Framework(gradient_bytes=4.0),
    "automodel": Framework(gradient_bytes=2.0),
}


def framework(name: str) -> Framework:
    """The coefficients of a framework, those of :data:`PLAN` for the empty name.

    Raises:
        KeyError: there is none of that name.
    """
    return FRAMEWORKS[name]
