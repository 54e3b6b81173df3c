"""FLOPs of a forward pass (model.md, section 3, "FLOPs [choice]"; the paper, D-B, cites another work).

One token costs, per layer, ``2 * matrix parameters + 4 * d_attn * context`` FLOPs and, where the head is
applied, ``2 * head parameters``. A multiplication and an addition are two FLOPs.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpeg_core.spec.models import ModelSpec

__all__ = [
    "TRAINING_FORWARDS",
    "Counts",
    "causal_context",
    "decode_counts",
    "forward_flops",
    "model_counts",
    "paper_counts",
    "paper_layer_parameters",
]

TRAINING_FORWARDS = 4.0
"""A training pass in forward passes: forward, recomputation, and a backward of twice the forward."""


@attrs.frozen(kw_only=True)
class Counts:
    """What the FLOPs of one model depend on.

    Attributes:
        layers: L.
        layer_parameters: elements of one layer's matrices that a token meets.
        attention_width: d_attn; scores and values cost 4 d_attn per token of context.
        head_parameters: elements of the head's matrix.
    """

    layers: int
    layer_parameters: float
    attention_width: float
    head_parameters: int


def paper_layer_parameters(model: ModelSpec) -> int:
    """W_layer = 4 d^2 + 2 d d_ff: multi-head attention and two feed-forward projections (paper, D-H)."""
    return 4 * model.hidden**2 + 2 * model.hidden * model.ffn


def paper_counts(model: ModelSpec) -> Counts:
    """The paper's baseline architecture with the model's L, d, d_ff and head."""
    return Counts(
        layers=model.layers,
        layer_parameters=paper_layer_parameters(model),
        attention_width=model.hidden,
        head_parameters=model.head_flop_parameters,
    )


def model_counts(model: ModelSpec) -> Counts:
    """The model's real matrices: grouped queries, gated feed-forward, active experts."""
    return Counts(
        layers=model.layers,
        layer_parameters=model.active_layer_parameters,
        attention_width=model.attention_width,
        head_parameters=model.head_flop_parameters,
    )


def decode_counts(model: ModelSpec) -> Counts:
    """:func:`model_counts` for one new token against a cache.

    With latent attention the up-projections of K and V are absorbed into the query and the output
    (DeepSeek-V2, arXiv:2405.04434, section 2.1.2): each head attends in the latent space, with scores over
    kv_lora_rank + qk_rope_head_dim elements and values over kv_lora_rank.
    """
    counts, latent = model_counts(model), model.latent_attention
    if latent is None:
        return counts
    width = model.heads * (latent.cached_elements + latent.kv_lora_rank) / 2
    return attrs.evolve(counts, attention_width=width)


def causal_context(sequence_tokens: float) -> float:
    """Mean context of a causal full sequence, l / 2."""
    return sequence_tokens / 2.0


def forward_flops(
    counts: Counts, *, tokens: ArrayLike, context: ArrayLike, head_tokens: ArrayLike
) -> NDArray[np.float64]:
    """FLOPs of ``tokens`` through all layers at mean ``context`` and ``head_tokens`` through the head."""
    per_layer = 2.0 * counts.layer_parameters + 4.0 * counts.attention_width * np.asarray(context, np.float64)
    layers = counts.layers * np.asarray(tokens, np.float64) * per_layer
    return layers + 2.0 * counts.head_parameters * np.asarray(head_tokens, np.float64)
