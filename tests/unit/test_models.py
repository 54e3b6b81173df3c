"""ModelSpec: published parameter counts, the paper's formula, config.json parsing and the bundled table."""

import json
import subprocess
import sys

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpeg_core.errors import ModelConfigError, UnknownKeyError, UnknownModelError
from rpeg_core.spec.model_configs import model_from_config, model_from_inline, supported_model_types
from rpeg_core.spec.models import Head, LatentAttention, ModelSpec, MoE, Norm
from rpeg_core.spec.public_models import load_model, public_model, public_model_names

# Total parameters as published: `safetensors.total` of the hub's model API, `num_parameters` of the loaded
# checkpoint, keras-hub's preset tables (`params`) or GGUF's `general.parameter_count`, all exact.
PUBLISHED_EXACT = {
    "HuggingFaceTB/SmolLM2-135M": 134_515_008,
    "HuggingFaceTB/SmolLM2-360M": 361_821_120,
    "HuggingFaceTB/SmolLM2-1.7B": 1_711_376_384,
    "Qwen/Qwen1.5-MoE-A2.7B": 14_315_784_192,  # keras-hub qwen1.5_moe_2.7b_en
    "Qwen/Qwen2.5-0.5B": 494_032_768,
    "Qwen/Qwen2.5-1.5B": 1_543_714_304,
    "Qwen/Qwen2.5-3B": 3_085_938_688,
    "Qwen/Qwen2.5-7B": 7_615_616_512,
    "Qwen/Qwen2.5-14B": 14_770_033_664,
    "Qwen/Qwen2.5-32B": 32_763_876_352,
    "Qwen/Qwen2.5-72B": 72_706_203_648,  # keras-hub qwen2.5_instruct_72b_en
    "Qwen/Qwen3-0.6B": 596_049_920,  # the hub's total stores the tied matrix twice: 751,632,384
    "Qwen/Qwen3-1.7B": 1_720_574_976,  # keras-hub qwen3_1.7b_en
    "Qwen/Qwen3-4B": 4_022_468_096,
    "Qwen/Qwen3-8B": 8_190_735_360,
    "Qwen/Qwen3-14B": 14_768_307_200,  # keras-hub qwen3_14b_en
    "Qwen/Qwen3-32B": 32_762_123_264,
    "Qwen/Qwen3-30B-A3B": 30_532_122_624,
    "Qwen/Qwen3-235B-A22B": 235_093_634_560,
    "bigcode/starcoder": 15_517_456_384,
    "codellama/CodeLlama-34b-hf": 33_743_970_304,  # Together's model table, num_parameters
    "deepseek-ai/DeepSeek-V2-Lite": 15_706_484_224,
    "deepseek-ai/DeepSeek-V3": 671_026_419_200,  # main model, without the multi-token-prediction layer
    "google/gemma-2b": 2_506_172_416,
    "google/gemma-7b": 8_537_680_896,
    "google/gemma-2-2b": 2_614_341_888,
    "google/gemma-2-9b": 9_241_705_984,
    "google/gemma-2-27b": 27_227_128_320,
    "google/gemma-3-1b-pt": 999_885_952,
    "meta-llama/Llama-2-7b-hf": 6_738_415_616,
    "meta-llama/Llama-2-13b-hf": 13_015_864_320,
    "meta-llama/Llama-2-70b-hf": 68_976_648_192,
    "meta-llama/Llama-3.1-8B": 8_030_261_248,
    "meta-llama/Llama-3.1-70B": 70_553_706_496,
    "meta-llama/Llama-3.1-405B": 405_853_388_800,
    "meta-llama/Llama-3.2-1B": 1_235_814_400,
    "meta-llama/Llama-3.2-3B": 3_212_749_824,
    "meta-llama/Llama-3.3-70B-Instruct": 70_553_706_496,
    "mistralai/Mistral-7B-v0.1": 7_241_732_096,
    "mistralai/Mistral-7B-v0.3": 7_248_023_552,
    "mistralai/Mixtral-8x7B-v0.1": 46_702_792_704,
    "mistralai/Mixtral-8x22B-v0.1": 140_620_634_112,
    "openai-community/gpt2": 124_439_808,
    "openai-community/gpt2-medium": 354_823_168,
    "openai-community/gpt2-large": 774_030_080,
    "openai-community/gpt2-xl": 1_557_611_200,
}
# Published rounded, but to four digits: Brown et al. 2020, Table D.1, "Params (M)" 174,600.
PUBLISHED_ROUNDED = {"openai/gpt-3-175b": 174_600_000_000}

# Active parameters as model cards and papers round them.
PUBLISHED_ACTIVE_BILLIONS = {
    "Qwen/Qwen1.5-MoE-A2.7B": 2.7,
    "Qwen/Qwen3-30B-A3B": 3.3,
    "Qwen/Qwen3-235B-A22B": 22,
    "mistralai/Mixtral-8x7B-v0.1": 12.9,
    "mistralai/Mixtral-8x22B-v0.1": 39,
    "deepseek-ai/DeepSeek-V3": 37,
}

LLAMA_CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 4,
    "hidden_size": 64,
    "num_attention_heads": 8,
    "intermediate_size": 128,
    "vocab_size": 100,
}


@pytest.mark.parametrize(("name", "published"), sorted(PUBLISHED_EXACT.items()))
def test_total_equals_published_count(name, published):
    assert public_model(name).total_parameters == published


@pytest.mark.parametrize(("name", "published"), sorted(PUBLISHED_ROUNDED.items()))
def test_total_is_within_a_thousandth_of_rounded_count(name, published):
    assert public_model(name).total_parameters == pytest.approx(published, rel=1e-3)


@pytest.mark.parametrize(("name", "billions"), sorted(PUBLISHED_ACTIVE_BILLIONS.items()))
def test_active_parameters_match_published_rounding(name, billions):
    assert public_model(name).active_parameters / 1e9 == pytest.approx(billions, rel=0.02)


def test_every_bundled_model_has_a_source_and_a_published_count_or_a_twin():
    twins = {"meta-llama/Meta-Llama-3-8B", "meta-llama/Meta-Llama-3-70B"}  # dimensions of Llama 3.1
    assert set(public_model_names()) == {*PUBLISHED_EXACT, *PUBLISHED_ROUNDED, *twins}
    assert list(public_model_names()) == sorted(public_model_names())
    for name in public_model_names():
        assert "config.json" in public_model(name).source or "arXiv" in public_model(name).source


def inline(**changes):
    dimensions = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 100, **changes}
    return model_from_inline(dimensions, "toy")


# The paper's formula


def test_layer_reduces_to_the_papers_formula_for_mha_and_two_projections():
    d, d_ff = 12288, 49152
    assert public_model("openai/gpt-3-175b").layer_parameters == 4 * d * d + 2 * d * d_ff
    assert inline(gated_ffn=False).active_layer_parameters == 4 * 64 * 64 + 2 * 64 * 256


def test_grouped_query_attention_by_hand():
    model = public_model("meta-llama/Llama-3.1-8B")
    q_and_o, k_and_v = 2 * 4096 * 4096, 2 * 4096 * 1024
    assert model.attention_width == 4096
    assert model.kv_width == 1024
    assert model.attention_parameters == q_and_o + k_and_v
    assert model.ffn_parameters == 3 * 4096 * 14336


def test_head_width_need_not_divide_hidden():
    model = public_model("Qwen/Qwen3-32B")
    assert model.attention_width == 64 * 128 != model.hidden
    assert model.attention_parameters == 2 * 5120 * 8192 + 2 * 5120 * 1024


def test_latent_attention_by_hand():
    model = public_model("deepseek-ai/DeepSeek-V3")
    q = 7168 * 1536 + 1536 * 128 * 192
    kv = 7168 * (512 + 64) + 512 * 128 * (128 + 128)
    assert model.attention_parameters == q + kv + 128 * 128 * 7168
    # 4 d_attn ctx FLOPs: 2 ctx per element of every query head and of every value head.
    assert 2 * model.attention_width == 128 * 192 + 128 * 128


def test_mixture_of_experts_by_hand():
    model = inline(layers=4, moe={"experts": 8, "active_experts": 2, "expert_ffn": 32, "dense_layers": 1})
    router, dense = 8 * 64, 3 * 64 * 256
    assert model.ffn_parameters == (dense + 3 * (router + 8 * 3 * 64 * 32)) / 4
    assert model.active_ffn_parameters == (dense + 3 * (router + 2 * 3 * 64 * 32)) / 4
    assert (model.active_ffn_width, model.ffn_gemm_width) == (256, 32)


def test_active_width_of_experts_without_dense_layers():
    model = public_model("Qwen/Qwen3-30B-A3B")
    assert (model.active_ffn_width, model.ffn_gemm_width) == (8 * 768, 768)


# Heads


@pytest.mark.parametrize(
    ("tied", "head", "memory", "flops"),
    [
        (False, Head.LM, 6400, 6400),
        (True, Head.LM, 0, 6400),
        (False, Head.SCALAR, 64, 64),
        (True, Head.SCALAR, 64, 64),
        (False, Head.LM_AND_SCALAR, 6464, 6464),
        (True, Head.LM_AND_SCALAR, 64, 6464),
    ],
)
def test_heads_in_memory_and_in_flops(tied, head, memory, flops):
    model = inline(tied_embeddings=tied).with_head(head)
    assert (model.head_parameters, model.head_flop_parameters) == (memory, flops)
    backbone = model.matrix_parameters + model.embedding_parameters + model.small_parameters
    assert model.total_parameters == backbone + memory


def test_critic_is_smaller_than_actor_by_the_lm_head():
    actor = public_model("meta-llama/Llama-3.1-8B")
    critic = actor.with_head(Head.SCALAR)
    assert actor.total_parameters - critic.total_parameters == 128256 * 4096 - 4096
    assert critic.with_head(Head.LM) == actor


def test_weights_bytes_in_bf16():
    assert public_model("meta-llama/Llama-3.1-8B").weights_bytes(2) == 16_060_522_496


# Small parameters


def test_biases_and_norms_by_hand():
    qwen2 = public_model("Qwen/Qwen2.5-7B")
    assert qwen2.small_parameters == 28 * (2 * 3584 + 3584 + 2 * 512) + 3584
    gpt2 = public_model("openai-community/gpt2")
    assert gpt2.small_parameters == 12 * (4 * 768 + 3 * 768 + 768 + 3072 + 768) + 2 * 768
    qwen3 = public_model("Qwen/Qwen3-8B")
    assert qwen3.small_parameters == 36 * (2 * 4096 + 2 * 128) + 4096


# KV cache and tensor parallelism


@pytest.mark.parametrize(("tp", "elements"), [(1, 2048), (2, 1024), (8, 256), (16, 256), (32, 256)])
def test_kv_heads_are_divided_then_replicated(tp, elements):
    assert public_model("meta-llama/Llama-3.1-8B").kv_elements_per_token_per_layer(tp) == elements


def test_latent_cache_is_replicated():
    model = public_model("deepseek-ai/DeepSeek-V3")
    assert [model.kv_elements_per_token_per_layer(tp) for tp in (1, 8)] == [576, 576]


@pytest.mark.parametrize("name", ["meta-llama/Llama-3.1-8B", "deepseek-ai/DeepSeek-V3"])
@pytest.mark.parametrize("dtype", [np.int8, np.uint16, np.int64])
def test_kv_elements_of_an_array_equal_those_of_its_items(name, dtype):
    model, degrees = public_model(name), np.array([[1, 2, 4], [8, 16, 32]], dtype=dtype)
    result = model.kv_elements_per_token_per_layer(degrees)
    expected = [[model.kv_elements_per_token_per_layer(int(tp)) for tp in row] for row in degrees]
    assert result.dtype == np.int64
    assert result.tolist() == expected


@pytest.mark.parametrize(
    ("name", "tp", "problem"),
    [
        ("Qwen/Qwen2.5-7B", 4, None),
        ("Qwen/Qwen2.5-7B", 8, "28 attention heads are not divisible by tp=8"),
        ("meta-llama/Llama-3.1-8B", 16, None),
        ("meta-llama/Llama-3.1-8B", 0, "tp=0 is not a positive degree"),
        ("Qwen/Qwen2.5-14B", 20, "8 KV heads neither divide tp=20 nor are divisible by it"),
        ("google/gemma-2b", 8, None),
        ("deepseek-ai/DeepSeek-V3", 128, None),
        ("Qwen/Qwen3-30B-A3B", 32, None),
        ("deepseek-ai/DeepSeek-V2-Lite", 16, None),
    ],
)
def test_tensor_parallel_legality(name, tp, problem):
    assert public_model(name).tp_problem(tp) == problem


def test_feed_forward_width_must_divide():
    assert inline(ffn=250).tp_problem(4) == "FFN width 250 is not divisible by tp=4"
    experts = {"experts": 2, "active_experts": 1, "expert_ffn": 30}
    assert inline(moe=experts).tp_problem(4) == "expert FFN width 30 is not divisible by tp=4"


# Properties


@st.composite
def model_specs(draw):
    kv_heads, group, layers = draw(st.integers(1, 8)), draw(st.integers(1, 4)), draw(st.integers(1, 6))
    flags = {key: draw(st.booleans()) for key in ("gated_ffn", "tied_embeddings", "qkv_bias", "output_bias")}
    width, moe, latent = st.integers(1, 300), None, None
    if draw(st.booleans()):
        experts, shared = draw(st.integers(1, 9)), draw(st.integers(0, 50))
        moe = MoE(
            experts=experts,
            active_experts=draw(st.integers(1, experts)),
            expert_ffn=draw(width),
            shared_ffn=shared,
            dense_layers=draw(st.integers(0, layers - 1)),
            shared_gate=shared > 0 and draw(st.booleans()),
            router_bias=draw(st.booleans()),
        )
    head_dim, qk_norm = draw(width), draw(st.booleans())
    if draw(st.booleans()):
        parts = {key: draw(width) for key in ("kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim")}
        rank = draw(st.none() | width)
        latent = LatentAttention(**parts, q_lora_rank=rank, v_head_dim=draw(width))
        head_dim, qk_norm = latent.qk_head_dim, False
        flags |= {"qkv_bias": False, "output_bias": False}
    return ModelSpec(
        name=draw(st.text(min_size=1)),
        family="test",
        layers=layers,
        hidden=draw(width),
        heads=kv_heads * group,
        kv_heads=kv_heads,
        head_dim=head_dim,
        ffn=draw(width),
        vocab=draw(width),
        head=draw(st.sampled_from(Head)),
        moe=moe,
        latent_attention=latent,
        learned_positions=draw(st.integers(0, 20)),
        ffn_bias=moe is None and draw(st.booleans()),
        norm=draw(st.sampled_from(Norm)),
        norms_per_layer=draw(st.integers(0, 4)),
        qk_norm=qk_norm,
        source="drawn",
        **flags,
    )


@given(model_specs())
def test_dict_round_trip_through_json(model):
    assert ModelSpec.from_dict(json.loads(json.dumps(model.to_dict()))) == model


@given(model_specs())
def test_counts_are_consistent(model):
    parts = model.embedding_parameters + model.head_parameters + model.small_parameters
    assert model.layers * model.layer_parameters + parts == pytest.approx(model.total_parameters)
    assert model.layer_parameters == pytest.approx(model.attention_parameters + model.ffn_parameters)
    assert model.active_ffn_parameters <= model.ffn_parameters
    assert 0 < model.active_parameters <= model.total_parameters
    assert isinstance(model.total_parameters, int)


@given(model_specs(), st.integers(1, 6))
def test_tp_ranks_together_hold_every_kv_head(model, power):
    tp = 2**power
    if model.tp_problem(tp) is None and model.latent_attention is None:
        per_rank = model.kv_elements_per_token_per_layer(tp)
        assert per_rank == 2 * model.head_dim * max(1, model.kv_heads / tp)


# config.json


def test_llama_defaults_are_the_documented_ones():
    model = model_from_config(LLAMA_CONFIG, "toy", "toy/config.json")
    assert (model.kv_heads, model.head_dim, model.tied_embeddings) == (8, 8, False)
    assert (model.qkv_bias, model.output_bias, model.ffn_bias, model.gated_ffn) == (False, False, False, True)
    assert (model.name, model.family, model.source) == ("toy", "llama", "toy/config.json")


def test_llama_biases():
    config = {**LLAMA_CONFIG, "attention_bias": True, "mlp_bias": True}
    plain, biased = (model_from_config(c, "toy", "") for c in (LLAMA_CONFIG, config))
    extra = 4 * (4 * 64 + 2 * 128 + 64)
    assert biased.small_parameters - plain.small_parameters == extra


def test_gpt2_inner_width_defaults_to_four_times_hidden():
    config = {"model_type": "gpt2", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9, "n_positions": 4}
    assert model_from_config(config, "toy", "").ffn == 32
    assert model_from_config({**config, "n_inner": 20}, "toy", "").ffn == 20


def test_gpt_bigcode_without_multi_query_is_multi_head():
    config = {"model_type": "gpt_bigcode", "n_layer": 1, "n_embd": 8, "n_head": 2, "vocab_size": 9}
    config |= {"n_positions": 4, "multi_query": False}
    assert model_from_config(config, "toy", "").kv_heads == 2


def qwen_moe_config(**changes):
    experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    return {**LLAMA_CONFIG, "model_type": "qwen3_moe", "num_key_value_heads": 2, **experts, **changes}


@pytest.mark.parametrize(
    ("changes", "dense_layers"),
    [
        ({}, 0),
        ({"decoder_sparse_step": 2}, 2),
        ({"mlp_only_layers": [0]}, 1),
        ({"decoder_sparse_step": 3}, 3),
    ],
)
def test_qwen_layers_without_experts_are_counted(changes, dense_layers):
    moe = model_from_config(qwen_moe_config(**changes), "toy", "").moe
    assert moe.dense_layers == dense_layers


def test_qwen_moe_with_no_expert_layer_is_dense():
    assert model_from_config(qwen_moe_config(mlp_only_layers=[0, 1, 2, 3]), "toy", "").moe is None


def test_unsupported_model_type_is_refused():
    with pytest.raises(ModelConfigError) as caught:
        model_from_config({"model_type": "mamba2"}, "toy", "toy/config.json")
    assert str(caught.value) == (
        "error[model-config]: model_type 'mamba2' is not supported\n"
        "  config: toy/config.json\n"
        "  allowed: deepseek_v2, deepseek_v3, gemma, gemma2, gemma3_text, gpt2, gpt_bigcode, llama, mistral, "
        "mixtral, qwen2, qwen2_moe, qwen3, qwen3_moe\n"
        "hint: give inline dimensions instead: layers, hidden, heads, kv_heads, ffn, vocab, …"
    )


def test_multimodal_config_points_at_its_language_model():
    config = {"model_type": "gemma3", "text_config": {"model_type": "gemma3_text"}}
    with pytest.raises(ModelConfigError) as caught:
        model_from_config(config, "toy", "")
    assert caught.value.hint == "save its 'text_config' (gemma3_text) as a config.json of its own"


@pytest.mark.parametrize("key", sorted(set(LLAMA_CONFIG) - {"model_type"}))
@pytest.mark.parametrize("value", [None, 0, -1, 1.5, "4096", True, [4]])
def test_missing_ill_typed_and_non_positive_keys_are_named(key, value):
    with pytest.raises(ModelConfigError, match=repr(key)):
        model_from_config({**LLAMA_CONFIG, key: value}, "toy", "")


def test_text_of_a_bad_value():
    with pytest.raises(ModelConfigError) as caught:
        model_from_config({**LLAMA_CONFIG, "vocab_size": "32k"}, "toy", "toy/config.json")
    assert str(caught.value) == (
        "error[model-config]: key 'vocab_size' is '32k'\n  config: toy/config.json\n  allowed: an integer >= 1"
    )


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"model_type": None}, "key 'model_type' is missing"),
        ({"model_type": "mistral"}, "key 'num_key_value_heads' is missing"),
        ({"tie_word_embeddings": 1}, "key 'tie_word_embeddings' is 1"),
        ({"num_attention_heads": 7}, "hidden_size 64 is not divisible by num_attention_heads 7"),
        ({"num_key_value_heads": 3}, "model 'toy': 8 attention heads are not divisible by 3 KV heads"),
        (
            {"model_type": "gpt2", "n_embd": 8, "n_head": 2, "add_cross_attention": True},
            "'add_cross_attention'",
        ),
        ({"model_type": "gpt2", "n_embd": 8, "n_head": 3}, "n_embd 8 is not divisible by n_head 3"),
        ({"model_type": "deepseek_v3"}, "key 'q_lora_rank' is missing"),
        ({"model_type": "deepseek_v3", "attention_bias": True}, "key 'attention_bias' is true"),
        (qwen_moe_config(mlp_only_layers=[-1]), r"key 'mlp_only_layers' is \[-1\]"),
        (qwen_moe_config(num_experts_per_tok=9), "active_experts is 9 but there are 8 experts"),
    ],
)
def test_refusals(changes, what):
    with pytest.raises(ModelConfigError, match=what):
        model_from_config({**LLAMA_CONFIG, **changes}, "toy", "")


def test_every_supported_type_is_bundled():
    assert {public_model(name).family for name in public_model_names()} == set(supported_model_types())


# Inline dimensions


def test_inline_defaults():
    model = inline()
    assert (model.kv_heads, model.head_dim, model.gated_ffn, model.tied_embeddings) == (4, 16, True, False)
    assert (model.name, model.family, model.source) == ("toy", "inline", "inline dimensions")


def test_inline_equals_the_bundled_model_of_the_same_dimensions():
    bundled = public_model("meta-llama/Llama-3.1-8B")
    dimensions = {"layers": 32, "hidden": 4096, "heads": 32, "kv_heads": 8, "ffn": 14336, "vocab": 128256}
    built = model_from_inline(dimensions, bundled.name)
    assert attrs.evolve(built, family=bundled.family, source=bundled.source) == bundled


def test_inline_nested_dimensions():
    latent = {
        "q_lora_rank": None,
        "kv_lora_rank": 8,
        "qk_nope_head_dim": 6,
        "qk_rope_head_dim": 2,
        "v_head_dim": 4,
    }
    model = inline(norm="layernorm", latent_attention=latent)
    assert (model.norm, model.head_dim) == (Norm.LAYER, 8)
    without_ffn = {"layers": 2, "hidden": 8, "heads": 2, "vocab": 9}
    moe = {"experts": 2, "active_experts": 1, "expert_ffn": 5}
    assert model_from_inline({**without_ffn, "moe": moe}, "toy").ffn == 5


def test_unknown_inline_key_is_refused_with_a_suggestion():
    with pytest.raises(UnknownKeyError) as caught:
        inline(hiden=3)
    assert caught.value.what == "model 'toy': unknown dimension 'hiden'"
    assert caught.value.hint == "did you mean 'hidden'?"
    with pytest.raises(UnknownKeyError, match="model 'toy', moe: unknown dimension 'expert'"):
        inline(moe={"expert": 8})


@pytest.mark.parametrize(
    ("changes", "what"),
    [
        ({"hidden": "64"}, "model 'toy': hidden is '64'"),
        ({"heads": 0}, "model 'toy': heads is 0"),
        ({"heads": 5}, "model 'toy': hidden 64 is not divisible by heads 5"),
        ({"gated_ffn": "yes"}, "model 'toy': gated_ffn is 'yes'"),
        ({"norm": "batchnorm"}, "norm is 'batchnorm'"),
        ({"moe": 8}, "model 'toy', moe is 8"),
        ({"moe": {"experts": 8}}, "model 'toy', moe does not have the keys of MoE"),
        (
            {"moe": {"experts": 8, "active_experts": 1, "expert_ffn": 4, "dense_layers": 2}},
            "2 of 2 layers are dense",
        ),
    ],
)
def test_inline_refusals(changes, what):
    with pytest.raises(ModelConfigError, match=what):
        inline(**changes)


def test_missing_inline_dimensions_are_named_together():
    with pytest.raises(ModelConfigError, match="model 'toy': missing heads, ffn, vocab"):
        model_from_inline({"layers": 2, "hidden": 64}, "toy")


@pytest.mark.parametrize("change", [{"drop": "vocab"}, {"add": "hiden"}])
def test_from_dict_refuses_other_keys(change):
    data = inline().to_dict()
    data.pop(change.get("drop"), None)
    data |= {key: 1 for key in [change.get("add")] if key}
    with pytest.raises(ModelConfigError, match="model 'toy' does not have the keys of ModelSpec"):
        ModelSpec.from_dict(data)


# References


def test_bundled_names_ignore_case_and_variants_keep_their_name(tmp_path):
    base = load_model("META-LLAMA/llama-3.1-8b", base_dir=tmp_path)
    assert base.name == "meta-llama/Llama-3.1-8B"
    variant = load_model("meta-llama/Llama-3.1-8B-Instruct", base_dir=tmp_path)
    assert attrs.evolve(variant, name=base.name) == base
    assert variant.name == "meta-llama/Llama-3.1-8B-Instruct"


def test_unknown_model_gives_the_three_closest_names(tmp_path):
    with pytest.raises(UnknownModelError) as caught:
        load_model("Llama-3.1-8", base_dir=tmp_path)
    assert str(caught.value) == (
        "error[unknown-model]: model 'Llama-3.1-8' is neither a bundled public model nor a config.json\n"
        "  closest bundled names: meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, "
        "meta-llama/Llama-3.1-405B\n"
        "hint: name a bundled model, the path of a config.json, or give inline dimensions"
    )


def test_config_is_found_by_file_and_by_folder(tmp_path):
    folder = tmp_path / "my-model"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(LLAMA_CONFIG))
    (tmp_path / "other.json").write_text(json.dumps(LLAMA_CONFIG))
    by_folder = load_model("my-model", base_dir=tmp_path)
    assert by_folder.name == "my-model"
    assert by_folder.source == str(folder / "config.json")
    assert load_model("my-model/config.json", base_dir=tmp_path) == by_folder
    assert load_model(str(folder), base_dir=tmp_path / "elsewhere") == by_folder
    assert load_model("other.json", base_dir=tmp_path).name == "other"


@pytest.mark.parametrize(("text", "what"), [("{", "cannot be read as JSON"), ("[1]", "holds list, not a JSON object")])
def test_unreadable_config_is_refused(tmp_path, text, what):
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelConfigError, match=what):
        load_model("config.json", base_dir=tmp_path)


def test_missing_config_names_the_path_looked_at(tmp_path):
    with pytest.raises(ModelConfigError) as caught:
        load_model("./nowhere/config.json", base_dir=tmp_path)
    assert caught.value.what == "no model config at './nowhere/config.json'"
    assert caught.value.facts == (f"looked at: {tmp_path / 'nowhere' / 'config.json'}",)


def test_mapping_reference_is_inline(tmp_path):
    dimensions = {"layers": 2, "hidden": 64, "heads": 4, "ffn": 256, "vocab": 100}
    assert load_model(dimensions, base_dir=tmp_path, name="toy") == inline()


def test_reading_a_bundled_model_imports_no_numpy():
    code = (
        "import sys, rpeg_core.errors; before = set(sys.modules)\n"
        "from rpeg_core.spec.public_models import public_model\n"
        "public_model('Qwen/Qwen3-8B').kv_elements_per_token_per_layer(2)\n"
        "print('numpy' in set(sys.modules) - before)"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "False"


def test_what_only_running_needs_is_carried_but_no_part_of_equality() -> None:
    config = {
        "model_type": "llama",
        "num_hidden_layers": 2,
        "hidden_size": 8,
        "num_attention_heads": 2,
        "intermediate_size": 16,
        "vocab_size": 32,
        "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 8.0},
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
    }
    model = model_from_config(config, "tiny", "config.json")
    plain = model_from_config(
        {k: v for k, v in config.items() if not k.startswith(("rope", "rms"))}, "tiny", "config.json"
    )
    expected = {key: config[key] for key in ("rms_norm_eps", "rope_scaling", "rope_theta")}
    assert model.runtime_config == expected
    assert ModelSpec.from_dict(json.loads(json.dumps(model.to_dict()))).runtime_config == expected
    assert model == plain
    assert "runtime_config" not in plain.to_dict()
