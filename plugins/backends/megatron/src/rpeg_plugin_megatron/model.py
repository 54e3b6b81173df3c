"""This rank's part of a model: Megatron's GPTModel with a language-model head, a scalar head, or both."""

from __future__ import annotations

import math
import re

import attrs
import torch
from megatron.core.models.gpt import GPTModel
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import Tensor
from torch.nn import functional

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.execution import Recompute
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_plugin_megatron.device import Device
from rpeg_plugin_megatron.groups import PlaceGroups
from rpeg_plugin_megatron.layers import block_spec
from rpeg_plugin_megatron.layouts import check_layout
from rpeg_plugin_megatron.numerics import Llama3Scaling, Numerics
from rpeg_plugin_megatron.shards import Fragment, fragments_of, split_dimension

__all__ = ["Decoder", "HeadOutputs", "ModelShard", "build_shard", "rotary_frequencies"]

_EMBEDDING = "embedding.word_embeddings.weight"
_HEAD = "output_layer.weight"


@attrs.frozen
class HeadOutputs:
    """What the last stage returns.

    Attributes:
        logits: ``[b, t, vocab / tp]`` in the weights' type, this rank's slice of the vocabulary; None without LM head.
        values: fp32 ``[b, t]``; None without scalar head.
    """

    logits: Tensor | None
    values: Tensor | None


class Decoder(GPTModel):
    """GPTModel with positions per row, so that rows may be padded on the left, and with the heads of `ModelSpec`."""

    def __init__(
        self,
        spec: ModelSpec,
        numerics: Numerics,
        config: TransformerConfig,
        groups: PlaceGroups,
        *,
        recompute: Recompute,
    ) -> None:
        has_lm = spec.head is not Head.SCALAR
        stages = groups.place.layout.pipeline
        super().__init__(
            config=config,
            transformer_layer_spec=block_spec(spec.layers // stages, qk_norm=spec.qk_norm, recompute=recompute),
            vocab_size=spec.vocab,
            max_sequence_length=0,  # of learned positions only
            pre_process=groups.first_stage,
            post_process=groups.last_stage,
            share_embeddings_and_output_weights=spec.tied_embeddings and has_lm,
            position_embedding_type="none",
            pg_collection=groups.collection,
        )
        self._frequencies = rotary_frequencies(spec.head_dim, numerics)
        if groups.last_stage and not has_lm:
            self.output_layer = None
        if groups.last_stage and spec.head is not Head.LM:
            self.score = torch.nn.Linear(spec.hidden, 1, bias=False)
        # Megatron says so in its initialisation, which is off; the norm of gradients counts replicated ones once.
        for name, parameter in self.named_parameters():
            parameter.tensor_model_parallel = split_dimension(name) is not None

    def forward(
        self,
        input_ids: Tensor,
        position_ids: Tensor,
        attention_mask: Tensor | None,
        scored: slice = slice(None),
    ) -> Tensor | HeadOutputs:
        """One microbatch through this stage.

        Args:
            input_ids: ``[b, s]``; read by the first stage, the others take what `set_input_tensor` was given.
            position_ids: ``[b, s]``, where each token stands in its row.
            attention_mask: bool ``[b, 1, s, keys]``, True where a query may see a key; None for causal.
            scored: columns that the heads are applied to, ``t`` of them.

        Returns:
            The hidden states ``[s, b, hidden]`` for the next stage, or the outputs of the last one.
        """
        hidden = self.embedding(input_ids=input_ids, position_ids=position_ids) if self.pre_process else None
        hidden = self.decoder(
            hidden_states=hidden, attention_mask=attention_mask, rotary_pos_emb=self._rotary(position_ids)
        )
        if not self.post_process:
            return hidden
        hidden = hidden[scored]
        logits = values = None
        if self.output_layer is not None:
            tied = self.shared_embedding_or_output_weight() if self.share_embeddings_and_output_weights else None
            logits = self.output_layer(hidden, weight=tied)[0].transpose(0, 1)
        if hasattr(self, "score"):
            values = functional.linear(hidden.float(), self.score.weight.float()).squeeze(-1).transpose(0, 1)
        return HeadOutputs(logits, values)

    def _rotary(self, position_ids: Tensor) -> Tensor:
        """Angles ``[s, b, 1, head_dim]`` for Megatron's rotary embedding (both halves of a head turn alike)."""
        self._frequencies = self._frequencies.to(position_ids.device)
        angles = position_ids.t()[:, :, None, None].float() * self._frequencies
        return torch.cat((angles, angles), dim=-1)


def rotary_frequencies(head_dim: int, numerics: Numerics) -> Tensor:
    """Angle per position of each pair of a head's elements, fp32 ``[head_dim / 2]``.

    ``theta ** (-2 i / head_dim)``; ``linear`` scaling divides all of them; ``llama3`` divides those whose wavelength
    is above ``original_positions / low_frequency_factor``, keeps those below ``original_positions /
    high_frequency_factor`` and interpolates between (Llama 3.1's release).
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    plain = 1.0 / numerics.rotary_base**exponents
    scaling = numerics.rotary_scaling
    if scaling is None:
        return plain
    if not isinstance(scaling, Llama3Scaling):
        return plain / scaling
    turns = scaling.original_positions * plain / (2 * math.pi)
    low, high = scaling.low_frequency_factor, scaling.high_frequency_factor
    share = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - share) * plain / scaling.factor + share * plain


@attrs.frozen(eq=False)
class ModelShard:
    """One model on one rank.

    Attributes:
        spec, numerics: the whole model.
        groups: where it is.
        module: this rank's layers.
        device: what it runs on.
        dtype: of the weights.
    """

    spec: ModelSpec
    numerics: Numerics
    groups: PlaceGroups
    module: Decoder
    device: Device
    dtype: torch.dtype

    @property
    def fragments(self) -> tuple[tuple[Fragment, Tensor], ...]:
        """What this rank holds, with views into the weights.

        The views are fresh: a `Trainer` moves the weights into buffers of its own when it is made.
        """
        at, layout = self.groups.coordinates, self.groups.place.layout
        first = at.pp * (self.spec.layers // layout.pipeline)
        found: list[tuple[Fragment, Tensor]] = []
        for name, parameter in self.module.named_parameters():
            found += fragments_of(
                _global_name(name, first, tied=self.module.share_embeddings_and_output_weights),
                parameter.data,
                tensor_rank=at.tp,
                tensor_ranks=layout.tensor,
                gated=self.spec.gated_ffn,
            )
        return tuple(found)


def _global_name(name: str, first_layer: int, *, tied: bool) -> str:
    if name == _HEAD and tied:
        return _EMBEDDING  # the last stage's copy
    return re.sub(r"^decoder\.layers\.(\d+)\.", lambda m: f"decoder.layers.{first_layer + int(m[1])}.", name)


def build_shard(
    spec: ModelSpec,
    groups: PlaceGroups,
    *,
    device: Device,
    dtype: torch.dtype | None = None,
    recompute: Recompute = Recompute.NONE,
) -> ModelShard:
    """Build this rank's part of a model, weights uninitialised (`initial.fill`); collective over the place.

    Args:
        spec: the whole model, with its head; ``spec.runtime_config`` says how it runs.
        groups: of the place.
        device: of this process.
        dtype: of the weights, the device's by default.
        recompute: what the backward pass computes again: nothing, attention, or whole layers.

    Raises:
        BackendError: the model or the layout is not supported.
        ModelConfigError: the numerics of the model are not supported.
    """
    layout = groups.place.layout
    problem = check_layout(spec, layout)
    if problem is not None:
        raise BackendError(f"backend megatron cannot run {spec.name} on {groups.place}", facts=[problem])
    numerics = Numerics.from_config(spec.runtime_config, spec.source or spec.name)
    dtype = device.dtype if dtype is None else dtype
    with device.megatron():
        config = _config(spec, numerics, layout, device, dtype)
        module = Decoder(spec, numerics, config, groups, recompute=recompute).to(device.torch, dtype)
    module.eval()
    return ModelShard(spec, numerics, groups, module, device, dtype)


def _config(
    spec: ModelSpec, numerics: Numerics, layout: Layout, device: Device, dtype: torch.dtype
) -> TransformerConfig:
    """Fusions are off: they compile or need CUDA extensions, and would make results differ between devices."""
    return TransformerConfig(
        num_layers=spec.layers,
        hidden_size=spec.hidden,
        num_attention_heads=spec.heads,
        num_query_groups=spec.kv_heads,
        kv_channels=spec.head_dim,
        ffn_hidden_size=spec.ffn,
        gated_linear_unit=True,
        activation_func=functional.silu,
        normalization="RMSNorm",
        layernorm_epsilon=numerics.norm_epsilon,
        qk_layernorm=spec.qk_norm,
        add_bias_linear=spec.output_bias,
        add_qkv_bias=spec.qkv_bias,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        tensor_model_parallel_size=layout.tensor,
        pipeline_model_parallel_size=layout.pipeline,
        pipeline_dtype=dtype,
        params_dtype=dtype,
        bf16=dtype is torch.bfloat16,
        # Losses are normalised over the whole batch before they reach Megatron: it must not average.
        calculate_per_token_loss=True,
        batch_p2p_sync=not device.is_cpu,
        use_cpu_initialization=device.is_cpu,
        perform_initialization=False,
        gradient_accumulation_fusion=False,
        bias_activation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        deterministic_mode=False,
    )
