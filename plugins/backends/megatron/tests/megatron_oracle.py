"""Tiny models of `transformers` with random weights, and the same weights in Megatron's global names.

The mapping is written down here once more, in the plainest form, so that tests do not check the backend's own
conversion with itself.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from rpeg_plugin_megatron.shards import Fragment
from torch import Tensor

from rpeg_core.spec.model_configs import model_from_config
from rpeg_core.spec.models import Head, ModelSpec

__all__ = ["KINDS", "hf_model", "hf_names", "parameters_of", "reader_of", "rows", "spec_of"]

KINDS = ("llama", "llama3", "llama-bias", "mistral", "qwen2", "qwen3")

VOCABULARY = 64


def hf_model(kind: str, *, layers: int = 2, tied: bool = False, seed: int = 0) -> Any:
    """A tiny causal language model in fp32 whose norms and biases are not at their initial values either."""
    import transformers

    common = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": layers,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": tied,
    }
    llama3 = {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 16,
    }
    configs: dict[str, Callable[[], Any]] = {
        "llama": lambda: transformers.LlamaConfig(**common),
        "llama3": lambda: transformers.LlamaConfig(**common, rope_parameters=llama3),
        "llama-bias": lambda: transformers.LlamaConfig(**common, attention_bias=True, mlp_bias=True),
        "mistral": lambda: transformers.MistralConfig(**common, sliding_window=None, head_dim=8),
        "qwen2": lambda: transformers.Qwen2Config(
            **common, rope_parameters={"rope_type": "linear", "factor": 2.0, "rope_theta": 1000.0}
        ),
        "qwen3": lambda: transformers.Qwen3Config(**common, head_dim=16),
    }
    torch.manual_seed(seed)
    config = configs[kind]()
    config._attn_implementation = "sdpa"
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() == 1:
                parameter.add_(0.1 * torch.randn_like(parameter))
            else:
                parameter.mul_(4.0)  # so that attention and gradients are not almost uniform
    return model.eval()


def spec_of(model: Any, head: Head = Head.LM) -> ModelSpec:
    """The ModelSpec of a model's config.json."""
    return model_from_config(model.config.to_dict(), "tiny", "a test").with_head(head)


def hf_names(model: Any) -> dict[str, str | tuple[str, ...]]:
    """Megatron's global name -> the name in `transformers`, or those of q, k and v."""
    names: dict[str, str | tuple[str, ...]] = {
        "embedding.word_embeddings.weight": "model.embed_tokens.weight",
        "decoder.final_layernorm.weight": "model.norm.weight",
    }
    if not model.config.tie_word_embeddings:
        names["output_layer.weight"] = "lm_head.weight"
    present = dict(model.named_parameters())
    for layer in range(model.config.num_hidden_layers):
        ours, theirs = f"decoder.layers.{layer}.", f"model.layers.{layer}."
        names[ours + "input_layernorm.weight"] = theirs + "input_layernorm.weight"
        names[ours + "pre_mlp_layernorm.weight"] = theirs + "post_attention_layernorm.weight"
        for kind in ("weight", "bias"):
            attention, mlp = theirs + "self_attn.", theirs + "mlp."
            candidates: dict[str, str | tuple[str, ...]] = {
                f"self_attention.linear_qkv.{kind}": tuple(f"{attention}{x}_proj.{kind}" for x in "qkv"),
                f"self_attention.linear_proj.{kind}": f"{attention}o_proj.{kind}",
                f"self_attention.q_layernorm.{kind}": f"{attention}q_norm.{kind}",
                f"self_attention.k_layernorm.{kind}": f"{attention}k_norm.{kind}",
                f"mlp.linear_fc1.{kind}#gate": f"{mlp}gate_proj.{kind}",
                f"mlp.linear_fc1.{kind}#up": f"{mlp}up_proj.{kind}",
                f"mlp.linear_fc2.{kind}": f"{mlp}down_proj.{kind}",
            }
            for name, theirs_name in candidates.items():
                first = theirs_name if isinstance(theirs_name, str) else theirs_name[0]
                if first in present:
                    names[ours + name] = theirs_name
    return names


def parameters_of(model: Any, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Tensors by the names of `transformers` (weights, gradients) as whole tensors by Megatron's global names."""
    groups, dim = model.config.num_key_value_heads, _head_dim(model)
    found = {}
    for name, theirs in hf_names(model).items():
        if isinstance(theirs, str):
            found[name] = tensors[theirs]
            continue
        # Megatron keeps the heads of a KV group together: its queries, its key, its value.
        parts = [tensors[t] for t in theirs]
        by_group = [p.reshape(groups, -1, *p.shape[1:]) for p in parts]
        found[name] = torch.cat(by_group, dim=1).reshape(-1, *parts[0].shape[1:])
        assert by_group[1].shape[1] == dim
    if "score.weight" in tensors:
        found["score.weight"] = tensors["score.weight"]
    return found


def _head_dim(model: Any) -> int:
    config = model.config
    return getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads


def reader_of(weights: dict[str, Tensor]) -> Callable[[Fragment], Tensor]:
    """Boxes of whole tensors by global name."""
    return lambda fragment: weights[fragment.name][fragment.slices]


def rows(count: int, prompt_tokens: int, response_tokens: int, seed: int = 1) -> tuple[Tensor, Tensor]:
    """Random rows [count, Lp + Lr] with padding on both sides, and their mask; the first row has none."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(2, VOCABULARY, (count, prompt_tokens + response_tokens), generator=generator)
    mask = torch.ones_like(tokens, dtype=torch.bool)
    for row in range(1, count):
        left = int(torch.randint(0, prompt_tokens, (1,), generator=generator))
        right = int(torch.randint(0, response_tokens, (1,), generator=generator))
        mask[row, :left] = False
        mask[row, mask.shape[1] - right :] = False
    return tokens.masked_fill(~mask, 0).to(torch.int32), mask
