"""What an engine takes of a GPU, against what vLLM printed."""

from __future__ import annotations

from pathlib import Path

import pytest
from rpeg_plugin_analytical.engine_memory import Engine, engine_memory

from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.public_models import load_model

GIB = 2**30


def model(name: str) -> ModelSpec:
    return load_model(name, base_dir=Path())


def test_weights_and_cache_are_those_of_a_log() -> None:
    """vllm-project/vllm#12330, Llama-3-8B on an A100 of 39.50 GiB: 14.96 GiB of weights; the 11.12 GiB left for the
    cache beside 9.37 of activations and 0.10 outside PyTorch are 5,691 blocks of 16 tokens, 11.12 times 8,192."""
    found = engine_memory(
        model("meta-llama/Meta-Llama-3-8B"), Engine(memory_share=0.9, outside_bytes=0.10 * GIB), 39.50 * GIB
    )
    assert found.weights / GIB == pytest.approx(14.96, abs=0.01)
    left = found.cache + found.forward - 9.37 * GIB
    assert left / GIB == pytest.approx(11.12, abs=0.01)
    assert left / found.cache_per_token == pytest.approx(5691 * 16, rel=1e-3)
    assert left / (8192 * found.cache_per_token) == pytest.approx(11.12, abs=0.01)


def test_the_share_is_full_whatever_the_lengths() -> None:
    found = engine_memory(model("Qwen/Qwen2.5-3B"), Engine(memory_share=0.8), 32 * GIB)
    assert found.share == pytest.approx(0.8 * 32 * GIB)
    assert found.peak - found.share == pytest.approx(found.graphs)
    assert found.graphs > 0
    assert engine_memory(model("Qwen/Qwen2.5-3B"), Engine(memory_share=0.8, eager=True), 32 * GIB).graphs == 0


def test_weights_that_fill_the_share_leave_no_engine() -> None:
    found = engine_memory(model("Qwen/Qwen2.5-72B"), Engine(), 80 * GIB)
    assert not found.starts
    assert found.share > 0.92 * 80 * GIB
    assert found.sequences(1000) == 0


def test_experts_are_divided_over_the_larger_of_both_degrees() -> None:
    """Qwen3-30B-A3B has 48 layers of 128 experts of 3 x 2048 x 768."""
    experts = 2.0 * 48 * 128 * 3 * 2048 * 768
    spec = model("Qwen/Qwen3-30B-A3B")
    alone, spread = (engine_memory(spec, Engine(expert=e), 80 * GIB).weights for e in (1, 8))
    assert alone - spread == pytest.approx(experts * 7 / 8)
    assert engine_memory(spec, Engine(tensor=8, expert=8), 80 * GIB).weights < spread


def test_the_sampler_needs_every_logit_of_every_sequence() -> None:
    """1,024 sequences of 151,936 logits, 23 bytes each: more than the largest step of a small model."""
    spec = model("Qwen/Qwen2.5-0.5B")
    assert engine_memory(spec, Engine(), 80 * GIB).forward == 23.0 * 1024 * 151936
    few = engine_memory(spec, Engine(sequences=16), 80 * GIB)
    assert few.forward < engine_memory(spec, Engine(), 80 * GIB).forward
    assert few.cache > engine_memory(spec, Engine(), 80 * GIB).cache


def test_sleeping_drops_the_cache_and_keeps_or_moves_the_weights() -> None:
    found = engine_memory(model("Qwen/Qwen2.5-7B"), Engine(), 80 * GIB)
    here, moved = found.asleep(1)
    assert here == found.outside + found.graphs
    assert moved == found.weights
    assert found.asleep(2) == (here, 0.0)
    assert found.asleep(0) == (found.share + found.graphs, 0.0)


def test_an_update_that_copies_the_weights_whole_needs_them_twice() -> None:
    once, twice = (
        engine_memory(model("Qwen/Qwen2.5-7B"), Engine(transfer_copies=c), 80 * GIB).peak for c in (0.0, 1.0)
    )
    assert twice - once == pytest.approx(2 * 7.615616512e9, rel=1e-6)
