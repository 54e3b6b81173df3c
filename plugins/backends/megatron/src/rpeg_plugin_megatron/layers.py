"""The transformer layer as Megatron-Core modules, with attention of ours in the middle.

Megatron's own core attention wants CUDA's random-number tracker even without dropout. Ours calls
``torch.nn.functional.scaled_dot_product_attention``: on GPUs that is FlashAttention where there is no mask, on CPUs
torch's fused kernel. It can also keep keys and values of earlier tokens, for generation.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import attrs
import torch
from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import SelfAttention, SelfAttentionSubmodules
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP, MLPSubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.torch_norm import WrappedTorchNorm
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_layer import TransformerLayer, TransformerLayerSubmodules
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from rpeg_core.spec.execution import Recompute

if TYPE_CHECKING:
    from rpeg_plugin_megatron.model import ModelShard

__all__ = ["CoreAttention", "KVCache", "LayerCache", "RecomputedAttention", "RecomputedLayer", "attached", "block_spec"]


class LayerCache:
    """Keys and values of one layer, for rows that all have the same number of columns (padding included).

    Args:
        rows, heads, tokens, width: capacity; ``heads`` are the KV heads of this rank.
    """

    def __init__(
        self, rows: int, heads: int, tokens: int, width: int, *, device: torch.device, dtype: torch.dtype
    ) -> None:
        shape = (rows, heads, tokens, width)
        self._key, self._value = (torch.empty(shape, device=device, dtype=dtype) for _ in range(2))
        self.tokens = 0

    def append(self, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Add new tokens ``[rows, heads, new, width]``; returns all so far ``[rows, heads, tokens, width]``."""
        stop = self.tokens + key.shape[2]
        self._key[:, :, self.tokens : stop] = key
        self._value[:, :, self.tokens : stop] = value
        self.tokens = stop
        return self._key[:, :, :stop], self._value[:, :, :stop]

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these (indices, ascending): the others are finished."""
        self._key, self._value = self._key[rows], self._value[rows]


@attrs.frozen
class KVCache:
    """The caches of this rank's layers, in order."""

    layers: tuple[LayerCache, ...]

    @classmethod
    def of(cls, shard: ModelShard, *, rows: int, tokens: int) -> KVCache:
        """Room for ``rows`` rows of up to ``tokens`` columns in every layer of this stage."""
        heads = shard.spec.kv_heads // shard.groups.place.layout.tensor
        width, device, dtype = shard.spec.head_dim, shard.device.torch, shard.dtype
        count = len(shard.module.decoder.layers)
        return cls(tuple(LayerCache(rows, heads, tokens, width, device=device, dtype=dtype) for _ in range(count)))

    @property
    def tokens(self) -> int:
        """Columns held so far."""
        return self.layers[0].tokens

    def keep(self, rows: Tensor) -> None:
        """Drop all rows but these (indices, ascending)."""
        for layer in self.layers:
            layer.keep(rows)


@contextlib.contextmanager
def attached(module: torch.nn.Module, cache: KVCache) -> Iterator[None]:
    """While open, calls of ``module`` pass only new tokens and attend to those in ``cache`` too."""
    attentions = [layer.self_attention.core_attention for layer in module.decoder.layers]
    for attention, layer in zip(attentions, cache.layers, strict=True):
        attention.cache = layer
    try:
        yield
    finally:
        for attention in attentions:
            attention.cache = None


class CoreAttention(torch.nn.Module):
    """Softmax(q k / sqrt(width)) v for grouped queries; the signature is that of Megatron's core attention.

    ``attention_mask`` is bool ``[b, 1, queries, keys]``, True where a query may see a key (torch's convention, not
    Megatron's). None means causal, which with a filled cache allows one new token only.
    """

    def __init__(self, config: Any, layer_number: int, **_unused: Any) -> None:
        super().__init__()
        self.cache: LayerCache | None = None

    def forward(
        self, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **_unused: Any
    ) -> Tensor:
        """Attention of ``query [new, b, heads, width]`` to ``key, value [new, b, kv heads, width]`` and the cache.

        Returns:
            ``[new, b, heads * width]``.
        """
        q, k, v = (tensor.permute(1, 2, 0, 3) for tensor in (query, key, value))
        if self.cache is not None:
            k, v = self.cache.append(k, v)
        grouped = q.shape[1] != k.shape[1]
        if grouped and q.is_cuda and attention_mask is not None:
            # CUDA's fused kernels take a mask or grouped heads, not both; unfused, all weights would be in memory.
            k, v = (tensor.repeat_interleave(q.shape[1] // k.shape[1], dim=1) for tensor in (k, v))
            grouped = False
        out = functional.scaled_dot_product_attention(
            q,
            k,
            v,
            attn_mask=attention_mask,
            is_causal=attention_mask is None and q.shape[2] > 1,
            enable_gqa=grouped,
        )
        return out.permute(2, 0, 1, 3).reshape(query.shape[0], query.shape[1], -1)


class RecomputedAttention(CoreAttention):
    """Attention that keeps its inputs only and runs again in the backward pass (selective recomputation)."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


class RecomputedLayer(TransformerLayer):
    """A layer that keeps its input only and runs again in the backward pass.

    Megatron's own recomputation saves and restores the states of its random-number tracker, a global that has no use
    without dropout and needs CUDA; torch's does the same without it.
    """

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)
        return checkpoint(super().forward, *args, use_reentrant=False, preserve_rng_state=False, **kwargs)


def block_spec(layers: int, *, qk_norm: bool, recompute: Recompute) -> TransformerBlockSubmodules:
    """A stage of ``layers`` gated layers with RMSNorm, and the final norm that the last stage has.

    ``recompute`` is none, selective or full; inference is the same in all of them.
    """
    norm: Any = WrappedTorchNorm
    head_norm: Any = WrappedTorchNorm if qk_norm else IdentityOp
    layer = ModuleSpec(
        module=RecomputedLayer if recompute is Recompute.FULL else TransformerLayer,
        submodules=TransformerLayerSubmodules(
            input_layernorm=norm,
            self_attention=ModuleSpec(
                module=SelfAttention,
                params={"attn_mask_type": AttnMaskType.causal},
                submodules=SelfAttentionSubmodules(
                    linear_qkv=ColumnParallelLinear,
                    core_attention=RecomputedAttention if recompute is Recompute.SELECTIVE else CoreAttention,
                    linear_proj=RowParallelLinear,
                    q_layernorm=head_norm,
                    k_layernorm=head_norm,
                ),
            ),
            self_attn_bda=get_bias_dropout_add,
            pre_mlp_layernorm=norm,
            mlp=ModuleSpec(
                module=MLP, submodules=MLPSubmodules(linear_fc1=ColumnParallelLinear, linear_fc2=RowParallelLinear)
            ),
            mlp_bda=get_bias_dropout_add,
        ),
    )
    return TransformerBlockSubmodules(layer_specs=[layer] * layers, layer_norm=norm)
