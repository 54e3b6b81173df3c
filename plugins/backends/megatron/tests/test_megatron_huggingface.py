"""Hugging Face folders: round trips bit by bit, under any split; the export in transformers; errors."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from rpeg_plugin_megatron.huggingface import export, reader
from rpeg_plugin_megatron.numerics import Llama3Scaling, Numerics
from rpeg_plugin_megatron.shards import Fragment
from rpeg_plugin_megatron.tokenizer import character_tokenizer
from safetensors.torch import load_file
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoTokenizer,
    LlamaConfig,
    LlamaForSequenceClassification,
    MistralConfig,
    Qwen2Config,
    Qwen3Config,
)

from rpeg_core.errors import BackendError, ModelConfigError
from rpeg_core.spec.model_configs import model_from_config
from rpeg_core.spec.models import Head, ModelSpec

WEIGHTS = "model.safetensors"

COMMON: dict[str, Any] = {
    "vocab_size": 40,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 3,
    "initializer_range": 0.3,
}
CONFIGS = {
    "llama": LlamaConfig(**COMMON, rope_parameters={"rope_type": "default", "rope_theta": 5000.0}),
    "llama-tied-biased": LlamaConfig(**COMMON, tie_word_embeddings=True, attention_bias=True, mlp_bias=True),
    "llama3": LlamaConfig(
        **COMMON,
        rope_parameters={
            "rope_type": "llama3",
            "rope_theta": 500000.0,
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 16,
        },
    ),
    "mistral": MistralConfig(**COMMON, sliding_window=None),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=8),
}


def save(name: str, folder: Path) -> tuple[ModelSpec, torch.nn.Module]:
    """A model of random weights, saved by transformers."""
    torch.manual_seed(sorted(CONFIGS).index(name))
    model = AutoModelForCausalLM.from_config(CONFIGS[name])
    with torch.no_grad():
        for parameter in model.parameters():  # norms and biases too are random
            parameter.copy_(0.3 * torch.randn_like(parameter) + (parameter.dim() == 1))
    model.eval().save_pretrained(folder)
    return read_spec(folder), model


def read_spec(folder: Path) -> ModelSpec:
    return model_from_config(json.loads((folder / "config.json").read_text(encoding="utf-8")), "model", str(folder))


def parameters(spec: ModelSpec) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Names and shapes of Megatron's parameters, written down independently of the code under test."""
    d, qkv, attention = spec.hidden, (spec.heads + 2 * spec.kv_heads) * spec.head_dim, spec.heads * spec.head_dim
    yield "embedding.word_embeddings.weight", (spec.vocab, d)
    for layer in range(spec.layers):
        prefix = f"decoder.layers.{layer}."
        yield prefix + "input_layernorm.weight", (d,)
        yield prefix + "self_attention.linear_qkv.weight", (qkv, d)
        yield prefix + "self_attention.linear_proj.weight", (d, attention)
        yield prefix + "pre_mlp_layernorm.weight", (d,)
        for half in ("gate", "up"):
            yield prefix + f"mlp.linear_fc1.weight#{half}", (spec.ffn, d)
            if spec.ffn_bias:
                yield prefix + f"mlp.linear_fc1.bias#{half}", (spec.ffn,)
        yield prefix + "mlp.linear_fc2.weight", (d, spec.ffn)
        if spec.qkv_bias:
            yield prefix + "self_attention.linear_qkv.bias", (qkv,)
        if spec.output_bias:
            yield prefix + "self_attention.linear_proj.bias", (d,)
        if spec.ffn_bias:
            yield prefix + "mlp.linear_fc2.bias", (d,)
        if spec.qk_norm:
            yield prefix + "self_attention.q_layernorm.weight", (spec.head_dim,)
            yield prefix + "self_attention.k_layernorm.weight", (spec.head_dim,)
    yield "decoder.final_layernorm.weight", (d,)
    if spec.head is not Head.SCALAR and not spec.tied_embeddings:
        yield "output_layer.weight", (spec.vocab, d)
    if spec.head is not Head.LM:
        yield "score.weight", (1, d)


def boxes(spec: ModelSpec, rows: int, columns: int) -> Iterator[Fragment]:
    """Every parameter cut into boxes of at most so many rows and columns: splits that no layout would make too."""
    for name, shape in parameters(spec):
        for row in range(0, shape[0], rows):
            stop = min(row + rows, shape[0])
            if len(shape) == 1:
                yield Fragment(name, shape, (row,), (stop,))
                continue
            for column in range(0, shape[1], columns):
                yield Fragment(name, shape, (row, column), (stop, min(column + columns, shape[1])))


@pytest.mark.parametrize("name", sorted(CONFIGS))
@pytest.mark.parametrize(("rows", "columns"), [(10**6, 10**6), (7, 9)])
def test_a_round_trip_is_exact_and_transformers_loads_the_export(
    tmp_path: Path, name: str, rows: int, columns: int
) -> None:
    spec, model = save(name, tmp_path / "in")
    read = reader(tmp_path / "in", spec)
    tokenizer = character_tokenizer("0123456789")
    fragments = list(boxes(spec, rows, columns))
    assert sum(fragment.elements for fragment in fragments) == spec.total_parameters
    given = [(fragment, read(fragment)) for fragment in [*fragments[::-1], *fragments]]  # any order, copies too
    export(given, spec, tmp_path / "out", tokenizer=tokenizer, file_bytes=12_000)
    loaded = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    theirs, ours = model.state_dict(), loaded.state_dict()
    assert set(ours) == set(theirs)
    assert all(torch.equal(ours[key], theirs[key]) and ours[key].dtype == torch.float32 for key in theirs)
    tokens = torch.tensor([[1, 5, 39, 7] * 6])
    assert torch.equal(model(tokens).logits, loaded.eval()(tokens).logits)
    assert AutoTokenizer.from_pretrained(tmp_path / "out")("07").input_ids == [2, 9]
    assert read_spec(tmp_path / "out") == spec.__class__.from_dict(spec.to_dict() | {"source": str(tmp_path / "out")})
    assert (tmp_path / "out" / "model.safetensors.index.json").is_file()
    again = reader(tmp_path / "out", spec)
    assert all(torch.equal(again(fragment), read(fragment)) for fragment in fragments)


def test_fused_rows_are_the_queries_keys_and_values_of_each_group(tmp_path: Path) -> None:
    spec, _ = save("llama", tmp_path)
    weights = load_file(tmp_path / "model.safetensors")
    prefix, width = "model.layers.1.self_attn.", spec.head_dim
    groups = []
    for group in range(3):  # 6 heads, 3 KV heads: 2 queries to a group
        groups.append(weights[prefix + "q_proj.weight"][2 * group * width : 2 * (group + 1) * width])
        groups += [weights[f"{prefix}{kind}_proj.weight"][group * width : (group + 1) * width] for kind in "kv"]
    shape = (12 * width, 24)
    whole = Fragment("decoder.layers.1.self_attention.linear_qkv.weight", shape, (0, 0), shape)
    assert torch.equal(reader(tmp_path, spec)(whole), torch.cat(groups))


def test_several_files_and_other_types_are_read(tmp_path: Path) -> None:
    spec, model = save("qwen2", tmp_path / "one")
    model.to(torch.bfloat16).save_pretrained(tmp_path / "many", max_shard_size="8KB")
    assert len(list((tmp_path / "many").glob("model-*.safetensors"))) > 3
    read = reader(tmp_path / "many", spec)
    export(((box, read(box)) for box in boxes(spec, 9, 9)), spec, tmp_path / "out", source=tmp_path / "many")
    theirs, ours = model.state_dict(), load_file(tmp_path / "out" / "model.safetensors")
    assert all(torch.equal(value, theirs[key]) and value.dtype == torch.bfloat16 for key, value in ours.items())
    assert AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto").dtype == torch.bfloat16


def test_a_scalar_head_is_read_made_up_and_written(tmp_path: Path) -> None:
    plain, _ = save("llama", tmp_path / "lm")
    spec = plain.with_head(Head.SCALAR)
    read = reader(tmp_path / "lm", spec, missing=lambda box: torch.full(box.size, 7.0))
    with pytest.raises(BackendError, match=r"has no tensor 'score\.weight'"):
        reader(tmp_path / "lm", spec)(Fragment("score.weight", (1, 24), (0, 0), (1, 24)))
    export(((box, read(box)) for box in boxes(spec, 99, 99)), spec, tmp_path / "out", source=tmp_path / "lm")
    loaded = AutoModelForSequenceClassification.from_pretrained(tmp_path / "out")
    assert isinstance(loaded, LlamaForSequenceClassification)
    assert loaded.score.weight.detach().unique().tolist() == [7.0]
    assert torch.equal(
        reader(tmp_path / "out", spec)(Fragment("score.weight", (1, 24), (0, 8), (1, 16))), torch.full((1, 8), 7.0)
    )


def test_a_folder_that_does_not_fit_is_refused(tmp_path: Path) -> None:
    spec, _ = save("llama", tmp_path / "in")
    read = reader(tmp_path / "in", spec)
    with pytest.raises(
        BackendError, match=r"'model\.norm\.weight' of .* has shape \[24\]\n  allowed: \[25\], which decod"
    ):
        read(Fragment("decoder.final_layernorm.weight", (25,), (0,), (25,)))
    with pytest.raises(BackendError, match=r"has no tensor 'model\.layers\.3\.input_layernorm\.weight'"):
        read(Fragment("decoder.layers.3.input_layernorm.weight", (24,), (0,), (24,)))
    with pytest.raises(BackendError, match=r"parameter 'decoder\.layers\.0\.mlp\.router\.weight' has no counterpart"):
        read(Fragment("decoder.layers.0.mlp.router.weight", (4,), (0,), (4,)))
    with pytest.raises(BackendError, match="has no weights"):
        reader(tmp_path, spec)
    index = tmp_path / "model.safetensors.index.json"
    for text, expected in (
        ("{", "index.json cannot be read: JSONDecodeError"),
        ("{}", "index.json cannot be read: KeyError: 'weight_map'"),
        ('{"weight_map": {"model.norm.weight": "lost.safetensors"}}', r"lost\.safetensors cannot be read"),
    ):
        index.write_text(text)
        with pytest.raises(BackendError, match=expected):
            reader(tmp_path, spec)(Fragment("decoder.final_layernorm.weight", (24,), (0,), (24,)))
    index.unlink()
    for content in (b"", b"version https://git-lfs.github.com/spec/v1", (tmp_path / "in" / WEIGHTS).read_bytes()[:200]):
        (tmp_path / WEIGHTS).write_bytes(content)
        with pytest.raises(BackendError, match=r"model\.safetensors cannot be read"):
            reader(tmp_path, spec)
    with pytest.raises(
        BackendError, match=r"tensors are incomplete, first 'model\.embed_tokens\.weight': 480 of 960 elem"
    ):
        export(((box, read(box)) for box in [*boxes(spec, 20, 99)][1:]), spec, tmp_path / "out")
    assert not (tmp_path / "out" / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"hidden_act": "gelu"}, r"hidden_act is 'gelu'\n  config: c\.json\n  allowed: silu or swish"),
        (
            {"rope_scaling": {"rope_type": "yarn"}},
            r"rope_type is 'yarn'\n  config: c\.json\n  allowed: default, linear",
        ),
        ({"sliding_window": 4096}, "sliding_window is 4096"),
    ],
)
def test_numerics_that_are_not_supported_are_refused(changes: dict[str, Any], expected: str) -> None:
    with pytest.raises(ModelConfigError, match=expected):
        Numerics.from_config(changes, "c.json")


def test_numerics_are_read_in_both_spellings_and_written_back() -> None:
    llama3 = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    scaling = Llama3Scaling(factor=8.0, low_frequency_factor=1.0, high_frequency_factor=4.0, original_positions=8192)
    expected = Numerics(rotary_base=5e5, rotary_scaling=scaling, norm_epsilon=1e-5)
    old = {"rope_theta": 5e5, "rope_scaling": llama3, "rms_norm_eps": 1e-5}
    new = {"rope_parameters": {"rope_theta": 5e5, **llama3}, "rms_norm_eps": 1e-5}
    window_off = {"sliding_window": 4096, "use_sliding_window": False}
    assert Numerics.from_config(old | window_off, "") == Numerics.from_config(new, "") == expected
    for numerics in (expected, Numerics(), Numerics(rotary_scaling=2.0)):
        assert Numerics.from_config(numerics.to_config(), "") == numerics
