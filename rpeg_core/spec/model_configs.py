"""ModelSpec from a Hugging Face ``config.json`` or from dimensions written in the experiment file.

Policy: a key that the cost model needs must be there. The only defaults taken are those that the family's
own configuration class in ``transformers`` documents (tied embeddings, head width, biases); they stand in
`_FAMILIES` and the readers below. A model type whose matrices are not those counted in `models` is refused.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rpeg_core.errors import ModelConfigError, UnknownKeyError, suggest
from rpeg_core.spec.models import LatentAttention, ModelSpec, MoE, Norm

__all__ = ["model_from_config", "model_from_inline", "supported_model_types"]

_INLINE_HINT = "give inline dimensions instead: layers, hidden, heads, kv_heads, ffn, vocab, …"
_REQUIRED: Any = object()

_RUNTIME_KEYS = (
    "hidden_act",
    "max_position_embeddings",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "sliding_window",
    "use_sliding_window",
)
"""Keys that no cost depends on and a backend needs; kept as they stand in `ModelSpec.runtime_config`."""


@attrs.frozen(kw_only=True, slots=True)
class _Reader:
    """Typed access to the keys of one config, with errors that name the key and the file."""

    config: Mapping[str, Any]
    source: str

    def integer(self, key: str, *, default: Any = _REQUIRED, minimum: int = 1) -> Any:
        """The integer at ``key``; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        if value is None and default is not _REQUIRED:
            return default
        if value is None:
            raise self.error(f"key {key!r} is missing", hint=f"add {key!r} to the config")
        if isinstance(value, bool) or not isinstance(value, int) or value < minimum:
            raise self.error(f"key {key!r} is {value!r}", allowed=f"an integer >= {minimum}")
        return value

    def boolean(self, key: str, *, default: bool) -> bool:
        """The boolean at ``key``; ``default`` where the key is absent or null."""
        value = self.config.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise self.error(f"key {key!r} is {value!r}", allowed="true or false")
        return value

    def indices(self, key: str) -> frozenset[int]:
        """The layer indices listed at ``key``; none where it is absent or null."""
        value = self.config.get(key)
        if value is None:
            return frozenset()
        if not isinstance(value, list) or not all(type(item) is int and item >= 0 for item in value):
            raise self.error(f"key {key!r} is {value!r}", allowed="a list of layer indices")
        return frozenset(value)

    def error(self, what: str, *, allowed: str | None = None, hint: str | None = None) -> ModelConfigError:
        facts = [f"config: {self.source}"] + ([f"allowed: {allowed}"] if allowed else [])
        return ModelConfigError(what, facts=facts, hint=hint)


@attrs.frozen(kw_only=True, slots=True)
class _Family:
    """How one ``model_type`` differs from the plain gated decoder with RMSNorm and rotary positions."""

    tied_default: bool = False
    #: Absent ``num_key_value_heads`` means multi-head attention.
    kv_heads_default_to_heads: bool = False
    #: Default of ``head_dim``; None stands for hidden_size // num_attention_heads.
    head_dim_default: int | None = None
    #: ``attention_bias`` sets the biases of q, k, v and o.
    has_attention_bias_key: bool = False
    #: Default of the biases of q, k, v alone, and the key that sets them.
    qkv_bias: bool = False
    qkv_bias_key: str | None = None
    ffn_bias_key: str | None = None
    norms_per_layer: int = 2
    qk_norm: bool = False
    moe: Callable[[_Reader, int], MoE | None] | None = None


def _qwen_moe(read: _Reader, layers: int) -> MoE | None:
    """qwen2_moe, qwen3_moe: experts in every decoder_sparse_step-th layer not listed in mlp_only_layers."""
    step = read.integer("decoder_sparse_step", default=1)
    mlp_only = read.indices("mlp_only_layers")
    dense = sum(1 for layer in range(layers) if layer in mlp_only or (layer + 1) % step)
    if dense == layers:
        return None
    shared = 0
    if read.config["model_type"] == "qwen2_moe":
        shared = read.integer("shared_expert_intermediate_size")
    return MoE(
        experts=read.integer("num_experts"),
        active_experts=read.integer("num_experts_per_tok"),
        expert_ffn=read.integer("moe_intermediate_size"),
        shared_ffn=shared,
        dense_layers=dense,
        shared_gate=shared > 0,
    )


def _mixtral_moe(read: _Reader, layers: int) -> MoE:
    return MoE(
        experts=read.integer("num_local_experts"),
        active_experts=read.integer("num_experts_per_tok"),
        expert_ffn=read.integer("intermediate_size"),
    )


def _deepseek_moe(read: _Reader, layers: int) -> MoE | None:
    """DeepSeek: the first layers are dense, then experts in every moe_layer_freq-th layer."""
    experts = read.integer("n_routed_experts", default=None)
    if experts is None:
        return None
    first, step = read.integer("first_k_dense_replace", minimum=0), read.integer("moe_layer_freq", default=1)
    dense = sum(1 for layer in range(layers) if layer < first or layer % step)
    if dense == layers:
        return None
    expert_ffn = read.integer("moe_intermediate_size")
    return MoE(
        experts=experts,
        active_experts=read.integer("num_experts_per_tok"),
        expert_ffn=expert_ffn,
        shared_ffn=expert_ffn * read.integer("n_shared_experts", default=0),
        dense_layers=dense,
        router_bias=read.config["model_type"] == "deepseek_v3",
    )


_FAMILIES: Mapping[str, _Family] = {
    "gemma": _Family(tied_default=True, head_dim_default=256, has_attention_bias_key=True),
    "gemma2": _Family(tied_default=True, head_dim_default=256, has_attention_bias_key=True, norms_per_layer=4),
    "gemma3_text": _Family(
        tied_default=True, head_dim_default=256, has_attention_bias_key=True, norms_per_layer=4, qk_norm=True
    ),
    "llama": _Family(kv_heads_default_to_heads=True, has_attention_bias_key=True, ffn_bias_key="mlp_bias"),
    "mistral": _Family(),
    "mixtral": _Family(moe=_mixtral_moe),
    "qwen2": _Family(qkv_bias=True),
    "qwen2_moe": _Family(qkv_bias=True, qkv_bias_key="qkv_bias", moe=_qwen_moe),
    "qwen3": _Family(head_dim_default=128, has_attention_bias_key=True, qk_norm=True),
    "qwen3_moe": _Family(has_attention_bias_key=True, qk_norm=True, moe=_qwen_moe),
}


def _head_dim(read: _Reader, hidden: int, heads: int, default: int | None) -> int:
    head_dim: int | None = read.integer("head_dim", default=default)
    if head_dim is not None:
        return head_dim
    if hidden % heads:
        raise read.error(f"hidden_size {hidden} is not divisible by num_attention_heads {heads}", hint="add 'head_dim'")
    return hidden // heads


def _gated_decoder(read: _Reader, family: _Family, name: str, model_type: str) -> ModelSpec:
    layers, hidden = read.integer("num_hidden_layers"), read.integer("hidden_size")
    heads = read.integer("num_attention_heads")
    attention_bias = family.has_attention_bias_key and read.boolean("attention_bias", default=False)
    qkv_bias = attention_bias or family.qkv_bias
    if family.qkv_bias_key is not None:
        qkv_bias = read.boolean(family.qkv_bias_key, default=family.qkv_bias)
    return ModelSpec(
        name=name,
        family=model_type,
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=read.integer("num_key_value_heads", default=heads if family.kv_heads_default_to_heads else _REQUIRED),
        head_dim=_head_dim(read, hidden, heads, family.head_dim_default),
        ffn=read.integer("intermediate_size"),
        gated_ffn=True,
        vocab=read.integer("vocab_size"),
        tied_embeddings=read.boolean("tie_word_embeddings", default=family.tied_default),
        moe=None if family.moe is None else family.moe(read, layers),
        qkv_bias=qkv_bias,
        output_bias=attention_bias,
        ffn_bias=family.ffn_bias_key is not None and read.boolean(family.ffn_bias_key, default=False),
        norms_per_layer=family.norms_per_layer,
        qk_norm=family.qk_norm,
        source=read.source,
        runtime_config={key: read.config[key] for key in _RUNTIME_KEYS if read.config.get(key) is not None},
    )


def _gpt2(read: _Reader, name: str, model_type: str) -> ModelSpec:
    """gpt2 and gpt_bigcode: LayerNorm, biases everywhere, learned positions, two feed-forward projections."""
    if read.boolean("add_cross_attention", default=False):
        raise read.error("key 'add_cross_attention' is true", allowed="false", hint=_INLINE_HINT)
    hidden, heads = read.integer("n_embd"), read.integer("n_head")
    if hidden % heads:
        raise read.error(f"n_embd {hidden} is not divisible by n_head {heads}")
    multi_query = model_type == "gpt_bigcode" and read.boolean("multi_query", default=True)
    return ModelSpec(
        name=name,
        family=model_type,
        layers=read.integer("n_layer"),
        hidden=hidden,
        heads=heads,
        kv_heads=1 if multi_query else heads,
        head_dim=hidden // heads,
        ffn=read.integer("n_inner", default=4 * hidden),
        gated_ffn=False,
        vocab=read.integer("vocab_size"),
        tied_embeddings=read.boolean("tie_word_embeddings", default=True),
        learned_positions=read.integer("n_positions"),
        qkv_bias=True,
        output_bias=True,
        ffn_bias=True,
        norm=Norm.LAYER,
        source=read.source,
    )


def _deepseek(read: _Reader, name: str, model_type: str) -> ModelSpec:
    """deepseek_v2 and deepseek_v3, without the multi-token-prediction layers (as in ``transformers``)."""
    for key in ("attention_bias", "mlp_bias"):
        if read.boolean(key, default=False):
            raise read.error(f"key {key!r} is true", allowed="false for DeepSeek models", hint=_INLINE_HINT)
    if "q_lora_rank" not in read.config:
        raise read.error("key 'q_lora_rank' is missing", hint="add 'q_lora_rank' (null for direct queries)")
    layers, heads = read.integer("num_hidden_layers"), read.integer("num_attention_heads")
    latent = LatentAttention(
        q_lora_rank=read.integer("q_lora_rank", default=None),
        kv_lora_rank=read.integer("kv_lora_rank"),
        qk_nope_head_dim=read.integer("qk_nope_head_dim"),
        qk_rope_head_dim=read.integer("qk_rope_head_dim"),
        v_head_dim=read.integer("v_head_dim"),
    )
    return ModelSpec(
        name=name,
        family=model_type,
        layers=layers,
        hidden=read.integer("hidden_size"),
        heads=heads,
        kv_heads=heads,
        head_dim=latent.qk_head_dim,
        ffn=read.integer("intermediate_size"),
        gated_ffn=True,
        vocab=read.integer("vocab_size"),
        tied_embeddings=read.boolean("tie_word_embeddings", default=False),
        moe=_deepseek_moe(read, layers),
        latent_attention=latent,
        source=read.source,
    )


_SPECIAL: Mapping[str, Callable[[_Reader, str, str], ModelSpec]] = {
    "deepseek_v2": _deepseek,
    "deepseek_v3": _deepseek,
    "gpt2": _gpt2,
    "gpt_bigcode": _gpt2,
}


def supported_model_types() -> tuple[str, ...]:
    """Values of ``model_type`` that `model_from_config` reads, sorted."""
    return tuple(sorted({*_FAMILIES, *_SPECIAL}))


def model_from_config(config: Mapping[str, Any], name: str, source: str) -> ModelSpec:
    """ModelSpec with an LM head from the contents of a Hugging Face ``config.json``.

    Args:
        config: the parsed JSON object.
        name: the model's name in reports.
        source: where the config comes from, kept in `ModelSpec.source` and shown in errors.

    Raises:
        ModelConfigError: the model type is not supported; a key is missing, ill-typed or not positive.
    """
    read = _Reader(config=config, source=source)
    model_type = config.get("model_type")
    if model_type is None:
        raise read.error("key 'model_type' is missing", allowed=", ".join(supported_model_types()))
    if model_type not in supported_model_types():
        hint = _INLINE_HINT
        nested = config.get("text_config")
        if isinstance(nested, Mapping) and nested.get("model_type") in supported_model_types():
            hint = f"save its 'text_config' ({nested['model_type']}) as a config.json of its own"
        allowed = ", ".join(supported_model_types())
        raise read.error(f"model_type {model_type!r} is not supported", allowed=allowed, hint=hint)
    if model_type in _SPECIAL:
        return _SPECIAL[model_type](read, name, model_type)
    return _gated_decoder(read, _FAMILIES[model_type], name, model_type)


_NOT_INLINE = frozenset({"name", "family", "head", "runtime_config", "source"})


def model_from_inline(dimensions: Mapping[str, Any], name: str) -> ModelSpec:
    """ModelSpec with an LM head from dimensions that a user writes in the experiment file.

    Required: layers, hidden, heads, ffn, vocab. Defaults: kv_heads = heads, head_dim = hidden / heads,
    gated_ffn true, tied_embeddings false, the others as in `ModelSpec`. ``moe`` and ``latent_attention`` are
    mappings; with ``moe`` and no dense layers, ``ffn`` may be left out.

    Raises:
        UnknownKeyError: a key that is no dimension, with the closest one.
        ModelConfigError: a dimension is missing or not allowed.
    """
    allowed = [key for key in attrs.fields_dict(ModelSpec) if key not in _NOT_INLINE]
    _check_keys(dimensions, allowed, f"model {name!r}")
    values = dict(dimensions)
    for key, record in (("moe", MoE), ("latent_attention", LatentAttention)):
        if isinstance(values.get(key), Mapping):
            _check_keys(values[key], list(attrs.fields_dict(record)), f"model {name!r}, {key}")
    if isinstance(values.get("moe"), Mapping) and not values["moe"].get("dense_layers"):
        values.setdefault("ffn", values["moe"].get("expert_ffn"))
    missing = [key for key in ("layers", "hidden", "heads", "ffn", "vocab") if key not in values]
    if missing:
        raise ModelConfigError(
            f"model {name!r}: missing {', '.join(missing)}",
            facts=["required: layers, hidden, heads, ffn, vocab"],
        )
    hidden, heads = values["hidden"], values["heads"]
    values.setdefault("kv_heads", heads)
    if "head_dim" not in values:
        values["head_dim"] = _inline_head_dim(values, name, hidden, heads)
    values.setdefault("gated_ffn", True)
    values.setdefault("tied_embeddings", False)
    return ModelSpec.from_dict({**values, "name": name, "family": "inline", "source": "inline dimensions"})


def _inline_head_dim(values: Mapping[str, Any], name: str, hidden: object, heads: object) -> object:
    latent = values.get("latent_attention")
    if isinstance(latent, Mapping):
        parts = (latent.get("qk_nope_head_dim"), latent.get("qk_rope_head_dim"))
        return sum(part for part in parts if isinstance(part, int))
    if type(hidden) is not int or type(heads) is not int or heads < 1:
        return 1  # ModelSpec refuses hidden or heads first
    if hidden % heads:
        raise ModelConfigError(
            f"model {name!r}: hidden {hidden} is not divisible by heads {heads}", hint="give head_dim"
        )
    return hidden // heads


def _check_keys(given: Mapping[str, Any], allowed: list[str], where: str) -> None:
    for key in given:
        if key not in allowed:
            raise UnknownKeyError(
                f"{where}: unknown dimension {key!r}",
                facts=[f"allowed: {', '.join(sorted(allowed))}"],
                hint=suggest(str(key), allowed),
            )
