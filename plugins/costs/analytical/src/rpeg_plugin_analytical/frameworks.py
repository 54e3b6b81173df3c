"""What frameworks do beyond the arithmetic: which work they fuse, which communication they hide, what each step costs.

A coefficient belongs to a framework, never to a run. Those that are fitted carry their bounds and are found again by
``benchmarks/derive_frameworks.py``.
"""

from __future__ import annotations

import attrs

from rpeg_core.costing.batches import MemoryBatch, OperatorBatch
from rpeg_core.spec.software import Software
from rpeg_plugin_analytical.fitted import EAGER_MEMORY, FITTED, NEMO_RL_LOOP_SHARE

__all__ = ["FACTS", "FRAMEWORKS", "OFFERED", "PLAN", "Framework", "framework", "used_by"]


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
        held_weight_bytes: per element of a fully sharded model, 4 where its parameters stay in FP32.
        held_gradient_bytes: per element of the gradient buffer.
        held_logit_bytes: per logit at the peak of the loss.
        held_state_bytes: per parameter of the optimizer's state; None: FP32 moments, and FP32 weights where the weights
            are 16 bits wide.
        layer_buffers: activations of the layer at work, with their gradients, over those that a backward pass reads.
        reserved_share: what the allocator reserves beyond the tensors, over them.
        loop_share: waiting and hand-over between the phases of a reinforcement-learning loop over their own time.
        step_s: host time of a step that nothing hides: data loading, gradient norm, logging.
        launch_layer_s: launching one layer's kernels, forward and backward; a layer takes at least that long.
        launch_expert_layer_s: the same for a layer with experts: routing, permutation, a product per expert, and
            waiting on the host for the number of tokens per expert.
        decode_step_s: an engine's time between two token steps: scheduling, sampling, launching the CUDA graph.
        decode_sequence_s: the part of it that grows with the sequences of a step.
        decode_layer_s: kernels of a layer that are too short to be limited by anything but their number.
        decode_reduce_s: latency of the engine's own AllReduce for small messages; None: NCCL's ring.
        grouped_reads: share of the repeated reads of a cached K and V by the other query heads of its group that
            reach memory; 0 for kernels that load a group once.
        stream_share: rate at which GEMMs of few rows read weights over BW_mem.
        prefill_share: speed of an engine's GEMMs of many rows over the table's.
        launches_ahead: the host runs ahead of the device; else it is the device, and launching adds to computing.
        scores_responses: outside generation the head is applied to the response tokens only.
        forward_layer_s, backward_layer_s, token_layer_s: host time of a layer in a forward pass, a backward pass and
            a step of generation, the prefill too.
        pass_s: host time of a stage per microbatch and pass beside its layers.
        update_layer_s: the part of ``step_s`` that grows with the layers of a stage.
        token_exchange_s: agreeing on the tokens of a step, in a replica of more than one GPU.
        node_s: dispatching a node.
        cache_passes: memory traffic of reading a cached K and V over one read.
        score_bytes: memory traffic per score of unfused attention: 2 bytes written by the first product, 4 by the
            softmax (read and write), 5 by dropout and its mask, 2 read by the second product.
        logit_passes: memory traffic per logit of the loss over that of a fused one.
        sampling_passes: the same in a token step.
        optimizer_passes: memory traffic of an update over 18 bytes per parameter.
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
    held_weight_bytes: float = 2.0
    held_gradient_bytes: float = 4.0
    held_logit_bytes: float = 6.0
    held_state_bytes: float | None = None
    layer_buffers: float = 1.0
    reserved_share: float = 0.0
    loop_share: float = 0.0
    step_s: float = 0.0
    launch_layer_s: float = 0.0
    launch_expert_layer_s: float = 0.0
    decode_step_s: float = 0.0
    decode_sequence_s: float = 0.0
    decode_layer_s: float = 0.0
    decode_reduce_s: float | None = None
    grouped_reads: float = 0.0
    stream_share: float = 1.0
    prefill_share: float = 1.0
    launches_ahead: bool = True
    scores_responses: bool = False
    forward_layer_s: float = 0.0
    backward_layer_s: float = 0.0
    token_layer_s: float = 0.0
    pass_s: float = 0.0
    update_layer_s: float = 0.0
    token_exchange_s: float = 0.0
    node_s: float = 0.0
    cache_passes: float = 1.0
    score_bytes: float = 13.0
    logit_passes: float = 1.0
    sampling_passes: float = 0.0
    optimizer_passes: float = 1.0


PLAN = Framework()
"""The plan's own 3D subset: nothing is hidden."""

_EAGER = Framework(
    held_logit_bytes=EAGER_MEMORY["held_logit_bytes"],
    layer_buffers=EAGER_MEMORY["layer_buffers"],
    reserved_share=EAGER_MEMORY["reserved_share"],
)
"""Frameworks whose layers and losses are PyTorch operators. Per logit: 2 bytes in 16 bits and, in FP32, the copy, its
logarithm of the softmax and the gradient."""

FACTS: dict[str, Framework] = {
    "megatron-2021": Framework(fused_attention=False),
    "megatron-2022": Framework(fused_attention=False),
    "megatron-core": Framework(gradient_bytes=4.0),
    "nemo": Framework(held_gradient_bytes=2.0),
    "nemo-2024": Framework(held_gradient_bytes=2.0),
    "megatron-bridge": Framework(),
    "megatron-bridge-26.06": Framework(),
    "torchtitan": attrs.evolve(_EAGER, held_weight_bytes=4.0),
    "maxtext": Framework(),
    "prime-rl": attrs.evolve(_EAGER, held_weight_bytes=4.0),
    "prime-rl-fa2": attrs.evolve(_EAGER, held_weight_bytes=4.0),
    "nanotron": attrs.evolve(_EAGER, gradient_bytes=4.0),
    "automodel": _EAGER,
    "trl": attrs.evolve(_EAGER, held_state_bytes=4.0),
    "trtllm": Framework(),
    "trtllm-2023": Framework(),
    "trtllm-2024": Framework(),
    "vllm": Framework(),
    "sglang": Framework(),
    "lmdeploy": Framework(),
}
"""What is known of each framework: precision of gradients, parameters and reductions, kinds of kernels.

``trl``: parameters in 16 bits, and AdamW of PyTorch keeps its two moments in their type; beside the gradients,
DistributedDataParallel has its own copy of them (``gradient_as_bucket_view`` is off).
"""


def _frameworks() -> dict[str, Framework]:
    """The facts with what was fitted.

    Log-probabilities of NeMo-RL (``DistributedLogprob`` in nemo_rl/distributed/model_utils.py) hold three FP32 tensors
    of logits: as they came, of the logarithm and of the softmax. Until release 0.3 the backward pass held the softmax
    and two 64-bit one-hot tensors.
    """
    found = {name: attrs.evolve(facts, **FITTED.get(name, {})) for name, facts in FACTS.items()}
    found["nemo-rl"] = attrs.evolve(found["nemo"], loop_share=NEMO_RL_LOOP_SHARE, held_logit_bytes=12.0)
    found["nemo-rl-0.3"] = attrs.evolve(found["nemo-rl"], held_logit_bytes=20.0)
    found["nemo-rl-vllm"] = attrs.evolve(found["vllm"], loop_share=NEMO_RL_LOOP_SHARE)
    return {"": PLAN, **found}


FRAMEWORKS: dict[str, Framework] = _frameworks()
"""Coefficients by name."""


_ENGINES = ("lmdeploy", "nemo-rl-vllm", "sglang", "trtllm", "trtllm-2023", "trtllm-2024", "vllm")
_TRAINERS = tuple(sorted(set(FRAMEWORKS) - {"", *_ENGINES}))

OFFERED: dict[str, tuple[str, ...]] = {"generation": _ENGINES, "inference": _TRAINERS, "training": _TRAINERS}
"""Role -> the frameworks whose coefficients for it are known: engines generate, trainers do the rest."""


def framework(name: str) -> Framework:
    """The coefficients of a framework, those of :data:`PLAN` for the empty name.

    Raises:
        KeyError: there is none of that name.
    """
    return FRAMEWORKS[name]


def used_by(batch: OperatorBatch | MemoryBatch) -> Framework:
    """The coefficients that price a batch: of the framework that its execution names, or else of the software that was
    measured on its machine.

    Raises:
        KeyError: there is no framework of that name.
    """
    name, software = batch.execution.framework, batch.hardware.software
    if name == "" and software is not None:
        return _measured(software)
    return framework(name)


def _measured(software: Software) -> Framework:
    same = {field.name for field in attrs.fields(Framework)} & {field.name for field in attrs.fields(Software)}
    return Framework(
        **{name: getattr(software, name) for name in sorted(same)},
        launches_ahead=software.launches == "asynchronous",
        fused_attention=software.attention == "fused",
        scores_responses=software.scored == "responses",
        step_s=software.update_s,
        decode_step_s=software.token_step_s,
        decode_sequence_s=software.token_sequence_s,
    )
