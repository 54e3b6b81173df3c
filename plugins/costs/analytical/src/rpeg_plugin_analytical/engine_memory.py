"""What a generation engine takes of one GPU, as vLLM accounts for it.

An engine is told a share of the GPU's memory. It loads the weights, runs one forward pass of as many tokens as a step
may have, and gives what is left of its share to K and V (``Worker.determine_available_memory`` in
vllm/v1/worker/gpu_worker.py): its share is full from the start, however short the sequences. CUDA graphs and the
sampler's warm-up come after that and on top (``compile_or_warm_up_model``). Tensor-parallel ranks each hold the logits
of the whole vocabulary, because the sampler gathers them.
"""

from __future__ import annotations

import attrs
import numpy as np

from rpeg_core.costing.batches import Layouts
from rpeg_core.costing.kv_pool import ENGINE_FRACTION
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_plugin_analytical.shards import expert_parameters, kv_width_per_rank, shard_parameters

__all__ = ["Engine", "EngineMemory", "engine_memory"]

SEQUENCES = 1024
"""``max_num_seqs`` of vLLM on GPUs of 70 GiB and more (``_set_default_max_num_seqs_and_batched_tokens_args`` in
vllm/engine/arg_utils.py)."""

BATCHED_TOKENS = 8192
"""``max_num_batched_tokens`` of vLLM's server on such GPUs; same place."""

SAMPLER_BYTES_PER_LOGIT = 23.0
"""The logits in 16 bits (2) and in FP32 (4), sorted (4) with their places (8), their probabilities (4) and a mask (1):
``apply_top_k_top_p`` of vllm/v1/sample/ops/topk_topp_sampler.py."""

OUTSIDE_PYTORCH_BYTES = 0.6 * 2**30
"""CUDA context and NCCL buffers of a tensor-parallel rank; vLLM's own log in vllm-project/vllm#48601: 0.6 GiB."""

GRAPH_BYTES = 2.04 * 2**30
"""CUDA graphs; 2.04 GiB in the same log (Qwen3.6-27B on 4 H100)."""

EXPERT_COPIES = 3.0
"""Each routed copy of a token as dispatched, permuted and combined, as ``training_memory`` counts them."""


@attrs.frozen(kw_only=True)
class Engine:
    """How one replica of an engine is started.

    Attributes:
        tensor: ranks that divide heads, feed-forward and vocabulary.
        expert: ranks over which the experts of a layer are spread; 1: divided over ``tensor`` like the rest.
        memory_share: share of the GPU's memory that it may take.
        sequences: most sequences of a step.
        batched_tokens: most tokens of a step.
        feed_forward_bytes: per element of the feed-forward matrices (4 bits with a scale for 16: 0.5625).
        weight_bytes: per element of all other weights.
        cache_bytes: per element of K and V.
        eager: no CUDA graphs.
        transfer_copies: whole copies of this rank's weights that an update holds beside the engine's own: 0 where it
            is copied tensor by tensor.
        outside_bytes: CUDA context and communication buffers.
    """

    tensor: int = 1
    expert: int = 1
    memory_share: float = ENGINE_FRACTION
    sequences: int = SEQUENCES
    batched_tokens: int = BATCHED_TOKENS
    feed_forward_bytes: float = 2.0
    weight_bytes: float = 2.0
    cache_bytes: float = 2.0
    eager: bool = False
    transfer_copies: float = 0.0
    outside_bytes: float = OUTSIDE_PYTORCH_BYTES


@attrs.frozen(kw_only=True)
class EngineMemory:
    """Bytes on one GPU.

    Attributes:
        weights: of this rank.
        forward: the largest step: its activations, or the sampler's logits where these are more.
        outside: CUDA context and communication buffers.
        cache: what is left of the engine's share; negative: it does not start.
        graphs: CUDA graphs, beyond the share.
        update: weights on their way in, beyond the share.
        cache_per_token: of one token of one sequence.
    """

    weights: float
    forward: float
    outside: float
    cache: float
    graphs: float
    update: float
    cache_per_token: float

    @property
    def starts(self) -> bool:
        """Whether anything is left for K and V."""
        return self.cache > 0.0

    @property
    def share(self) -> float:
        """What the engine takes from its start: its share, or what it needs without any cache."""
        return self.weights + self.forward + self.outside + max(0.0, self.cache)

    @property
    def peak(self) -> float:
        """Its share, its graphs, and an update of the weights."""
        return self.share + self.graphs + self.update

    def sequences(self, tokens: float) -> int:
        """How many sequences of ``tokens`` tokens are held at once; more of them wait."""
        return max(0, int(self.cache // (self.cache_per_token * tokens)))

    def asleep(self, level: int) -> tuple[float, float]:
        """(bytes on the GPU, bytes moved to the host) of an engine that sleeps.

        Level 1 keeps the weights in host memory, level 2 drops them; both drop K and V. Graphs, context and buffers
        stay (``Worker.sleep`` in vllm/v1/worker/gpu_worker.py). Level 0: it does not sleep.
        """
        if level == 0:
            return self.share + self.graphs, 0.0
        return self.outside + self.graphs, self.weights if level == 1 else 0.0


def engine_memory(model: ModelSpec, engine: Engine, memory_bytes: float) -> EngineMemory:
    """What ``engine`` takes of a GPU with ``memory_bytes`` when it serves ``model``."""
    layouts = _one(engine.tensor)
    routed = float(expert_parameters(model, layouts)[0])
    feed_forward = model.layers * model.ffn_parameters
    rest = float(shard_parameters(model, layouts)[0]) - feed_forward / engine.tensor
    feed_forward = (feed_forward - routed) / engine.tensor + routed / max(engine.tensor, engine.expert)
    weights = engine.weight_bytes * rest + engine.feed_forward_bytes * feed_forward
    forward = max(_activation_bytes(model, engine), _sampler_bytes(model, engine))
    per_token = model.kv_elements_per_token_per_layer(engine.tensor) * engine.cache_bytes * model.layers
    return EngineMemory(
        weights=weights,
        forward=forward,
        outside=engine.outside_bytes,
        cache=engine.memory_share * memory_bytes - weights - forward - engine.outside_bytes,
        graphs=0.0 if engine.eager else GRAPH_BYTES,
        update=engine.transfer_copies * weights,
        cache_per_token=float(per_token),
    )


def _activation_bytes(model: ModelSpec, engine: Engine) -> float:
    """Tensors of the wider block of a layer for the largest step, in 16 bits."""
    kv = float(kv_width_per_rank(model, np.array([engine.tensor]))[0])
    attention = 2.0 * model.hidden + 2.0 * model.attention_width / engine.tensor + 2.0 * kv
    projections = 3.0 if model.gated_ffn else 2.0
    feed_forward = 2.0 * model.hidden + projections * model.active_ffn_width / engine.tensor
    if model.moe is not None:
        feed_forward += EXPERT_COPIES * model.moe.active_experts * model.hidden
    return 2.0 * engine.batched_tokens * max(attention, feed_forward)


def _sampler_bytes(model: ModelSpec, engine: Engine) -> float:
    if model.head is Head.SCALAR:
        return 0.0
    return SAMPLER_BYTES_PER_LOGIT * min(engine.sequences, engine.batched_tokens) * model.vocab


def _one(tensor: int) -> Layouts:
    one = np.ones(1, np.int64)
    return Layouts(
        data=one,
        pipeline=one,
        tensor=one * tensor,
        microbatches=one,
        gpus=one * tensor,
        data_tier=one * 0,
        stage_tier=one * 0,
        stages_per_node=one,
    )
