"""Against physics and published measurements: wide bounds, no fitting. Profiles are written out here so that the
tests need no other plugin; the numbers are those of rpeg-plugin-a100 and rpeg-plugin-h100 0.1.0."""

import attrs
import pytest

from rpeg_core.ir import Role
from rpeg_core.records import Target
from rpeg_core.spec.machine import AlphaBeta, Device, GemmEfficiency, LinkTier
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.public_models import public_model
from rpeg_core.spec.workload import Workload


def profile(tiny, *, flops_per_s, bytes_per_s, intra, network, efficiency):
    tiers = tuple(LinkTier(collective=link, p2p=link) for link in (intra, network, network))
    return attrs.evolve(
        tiny.hardware,
        gpus_per_node=8,
        device=Device(memory_bytes=80 * 2**30, memory_bandwidth_bytes_per_s=bytes_per_s, peak_flops_per_s=flops_per_s),
        tiers=tiers,
        efficiency=efficiency,
    )


@pytest.fixture
def a100(tiny):
    return profile(
        tiny,
        flops_per_s=2.986e14,
        bytes_per_s=1.658e12,
        intra=AlphaBeta(1.712e-6, 1.897e11),
        network=AlphaBeta(3.812e-6, 2.4e10),
        efficiency=GemmEfficiency(gamma_m_rows=147.7, gamma_k_columns=315.0),
    )


@pytest.fixture
def h100(tiny):
    return profile(
        tiny,
        flops_per_s=8.343e14,
        bytes_per_s=2.801e12,
        intra=AlphaBeta(1.267e-6, 3.744e11),
        network=AlphaBeta(3.367e-6, 4.8e10),
        efficiency=GemmEfficiency(gamma_m_rows=131.6, gamma_k_columns=205.8),
    )


def seconds(tiny, batch):
    names = [n for n, t in tiny.terms.items() if n.startswith("analytical.") and t.target is Target.OPERATOR]
    return sum(tiny.price(name, batch) for name in names)


def seconds_per_step(tiny, hardware, model, *, prompt, response, sequences, tensor):
    """Decode seconds per output token after the first (TPOT)."""
    batch = tiny.operator(
        model,
        Role.GENERATION,
        tiny.layout(1, 1, tensor, gpus_per_node=8),
        workload=Workload(prompts=sequences, prompt_tokens=prompt, response_tokens=response),
        prefill=False,
        hardware=hardware,
        gpus_per_node=8,
    )
    return seconds(tiny, batch) / (response - 1)


def test_a_token_takes_at_least_the_time_to_read_the_weights(tiny, h100):
    model = public_model("meta-llama/Llama-3.1-8B")
    read_bytes = 2 * (model.total_parameters - model.embedding_parameters - model.small_parameters)
    floor = read_bytes / h100.device.memory_bandwidth_bytes_per_s
    step = seconds_per_step(tiny, h100, model, prompt=128, response=128, sequences=1, tensor=1)
    assert floor <= step < 1.1 * floor


# lmdeploy v0.1.0a1, A100 80 GB, FP16, closed loop: median per-token latency in ms (generation.csv G2055 .. G2127).
LMDEPLOY = [
    ("meta-llama/Llama-2-7b-hf", 1, 1, 128, 16, 10.0),
    ("meta-llama/Llama-2-7b-hf", 1, 2048, 2048, 16, 25.0),
    ("meta-llama/Llama-2-7b-hf", 1, 2048, 2048, 32, 40.0),
    ("meta-llama/Llama-2-7b-hf", 1, 128, 2048, 64, 30.0),
    ("meta-llama/Llama-2-13b-hf", 1, 1, 128, 64, 20.0),
    ("meta-llama/Llama-2-13b-hf", 1, 2048, 128, 16, 33.0),
    ("meta-llama/Llama-2-70b-hf", 4, 128, 2048, 16, 33.0),
    ("meta-llama/Llama-2-70b-hf", 4, 1, 128, 64, 37.0),
]


@pytest.mark.parametrize(("name", "tensor", "prompt", "response", "sequences", "measured_ms"), LMDEPLOY)
def test_decode_is_near_published_latencies(tiny, a100, name, tensor, prompt, response, sequences, measured_ms):
    predicted = seconds_per_step(
        tiny,
        a100,
        public_model(name),
        prompt=prompt,
        response=response,
        sequences=sequences,
        tensor=tensor,
    )
    assert predicted == pytest.approx(measured_ms / 1000, rel=0.3)


# Narayanan et al. (SC21), A100, full recomputation: layers, d, heads, tp, pp, dp, batch, microbatch, seconds
# (training.csv T0003 .. T0009).
SC21 = [
    (40, 6144, 48, 8, 1, 32, 1024, 8, 9.399),
    (48, 8192, 64, 8, 2, 32, 1536, 4, 14.453),
    (60, 10240, 80, 8, 4, 32, 1792, 2, 16.058),
    (96, 16384, 128, 8, 16, 15, 2160, 1, 37.614),
    (128, 25600, 160, 8, 64, 6, 3072, 1, 102.63),
]


def sc21_seconds(tiny, hardware, row):
    layers, hidden, heads, tp, pp, dp, batch, micro, _ = row
    model = ModelSpec(
        name="gpt",
        family="gpt",
        layers=layers,
        hidden=hidden,
        heads=heads,
        kv_heads=heads,
        head_dim=hidden // heads,
        ffn=4 * hidden,
        gated_ffn=False,
        vocab=51200,
        tied_embeddings=True,
    )
    node = tiny.operator(
        model,
        Role.TRAINING,
        tiny.layout(dp, pp, tp, batch // (dp * micro), gpus_per_node=8),
        workload=Workload(prompts=batch, prompt_tokens=1024, response_tokens=1024),
        hardware=hardware,
        gpus_per_node=8,
    )
    return seconds(tiny, node)


@pytest.mark.parametrize("row", SC21, ids=lambda row: f"{row[0]}x{row[1]}")
def test_training_is_near_published_step_times(tiny, a100, row):
    assert sc21_seconds(tiny, a100, row) == pytest.approx(row[-1], rel=0.25)
