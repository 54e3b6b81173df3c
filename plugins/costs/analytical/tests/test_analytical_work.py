"""FLOPs and utilization against the definitions and against published formulas."""

import numpy as np
import pytest
from rpeg_plugin_analytical.roofline import gemm_utilization, roofline_s
from rpeg_plugin_analytical.work import (
    TRAINING_FORWARDS,
    causal_context,
    decode_counts,
    forward_flops,
    model_counts,
    paper_counts,
)

from rpeg_core.spec.machine import Device, GemmEfficiency
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.public_models import public_model


def gpt(layers, hidden, heads, vocab):
    return ModelSpec(
        name="gpt",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        gated_ffn=False,
        vocab=vocab,
        tied_embeddings=True,
    )


def test_one_token_by_hand(tiny):
    # gated tiny model: 2 layers of 144, d_attn 4, context 10, head 40
    counts = model_counts(tiny.gated)
    assert forward_flops(counts, tokens=3, context=10, head_tokens=1) == 2 * 3 * (288 + 160) + 80


def test_paper_counts_equal_real_counts_for_the_baseline_architecture(tiny):
    assert paper_counts(tiny.plain) == model_counts(tiny.plain)


def test_training_flops_are_megatrons_formula():
    """96 B s l h^2 (1 + s/6h + V/16lh) of Narayanan et al. (arXiv:2104.04473), GPT of 18 B parameters.

    It counts recomputation, attention to all s positions (no causal halving), and 3 passes of the head.
    """
    layers, hidden, vocab, batch, length = 40, 6144, 51200, 1024, 2048
    counts = model_counts(gpt(layers, hidden, 48, vocab))
    tokens = batch * length
    layers_flops = forward_flops(counts, tokens=tokens, context=length, head_tokens=0)
    head_flops = forward_flops(counts, tokens=0, context=0, head_tokens=tokens)
    published = 96 * tokens * layers * hidden**2
    published *= 1 + length / (6 * hidden) + vocab / (16 * layers * hidden)
    assert TRAINING_FORWARDS * layers_flops + 3 * head_flops == pytest.approx(published)


@pytest.mark.parametrize(
    "name", ["meta-llama/Llama-2-7b-hf", "meta-llama/Llama-3.1-70B", "mistralai/Mixtral-8x7B-v0.1", "Qwen/Qwen3-8B"]
)
def test_a_short_forward_pass_costs_twice_the_active_parameters(name):
    model = public_model(name)
    flops = forward_flops(model_counts(model), tokens=1, context=causal_context(256), head_tokens=1)
    assert flops == pytest.approx(2 * (model.active_parameters - model.embedding_parameters), rel=0.05)


def test_latent_attention_decodes_in_the_latent_space():
    """DeepSeek-V3: 128 heads; scores over 512 + 64 elements, values over 512 (arXiv:2405.04434, 2.1)."""
    model = public_model("deepseek-ai/DeepSeek-V3")
    short, long = (forward_flops(decode_counts(model), tokens=1, context=c, head_tokens=0) for c in (0, 1000))
    assert long - short == pytest.approx(61 * 1000 * 128 * 2 * (576 + 512))
    llama = public_model("meta-llama/Llama-3.1-8B")
    assert decode_counts(llama) == model_counts(llama)


def test_utilization_is_half_per_factor_at_its_constant():
    efficiency = GemmEfficiency(gamma_m_rows=100.0, gamma_k_columns=50.0)
    assert gemm_utilization(100, 50, efficiency) == 0.25
    assert gemm_utilization(1e12, 1e12, efficiency) == pytest.approx(1.0)


def test_roofline_takes_the_longer_side():
    device = Device(memory_bytes=1, memory_bandwidth_bytes_per_s=10.0, peak_flops_per_s=100.0)
    flops, moved = np.array([1000.0, 1000.0]), np.array([10.0, 1000.0])
    assert roofline_s(flops, moved, 0.5, device).tolist() == [20.0, 100.0]
