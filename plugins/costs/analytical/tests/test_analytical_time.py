"""Time terms of ``analytical`` against arithmetic on the gated tiny model: layer 144 (attention 48), head 40."""

import attrs
import numpy as np
import pytest
from rpeg_plugin_analytical.shards import distinct_experts

from rpeg_core.ir import Role
from rpeg_core.spec.models import MoE
from rpeg_core.spec.workload import LengthQuantile


def eta(rows, width):
    return rows / (rows + 4) * width / (width + 4)


def compute(flops, rows, width):
    return flops / (1000 * eta(rows, width))


# One GPU, 64 tokens at context 4: matrices, attention, head.
LAYERS_S = compute(2 * 64 * 2 * 144, 64, 4) + compute(2 * 64 * 4 * 4 * 4, 64, 4)
HEAD_S = compute(64 * 2 * 40, 64, 4)


def test_inference_adds_matrices_attention_and_head(tiny):
    batch = tiny.operator(tiny.gated, Role.INFERENCE, tiny.layout())
    assert tiny.price("analytical.gemm", batch) == pytest.approx(LAYERS_S + HEAD_S)


def test_training_recomputes_layers_but_not_the_head(tiny):
    batch = tiny.operator(tiny.gated, Role.TRAINING, tiny.layout())
    assert tiny.price("analytical.gemm", batch) == pytest.approx(4 * LAYERS_S + 3 * HEAD_S)


def test_decode_reads_weights_cache_and_head_every_step(tiny):
    # 3 steps (the first of 4 tokens is the prefill's), 8 sequences, contexts 5, 6, 7; one KV head of width 2.
    slow_memory = attrs.evolve(
        tiny.hardware, device=attrs.evolve(tiny.hardware.device, memory_bandwidth_bytes_per_s=1.0)
    )
    batch = tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(), prefill=False, hardware=slow_memory)
    weights = 2 * 144 * 2 + 2 * 8 * 4 * 2 * 2
    cache = 2 * 8 * 6 * (2 * 2) * 2
    head = 40 * 2
    assert tiny.price("analytical.gemm", batch) == pytest.approx(3 * (weights + cache + head))


def test_prefill_applies_the_head_to_one_position_per_sequence(tiny):
    batch = tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(), phases=())
    layers = compute(2 * 32 * 2 * 144, 32, 4) + compute(2 * 32 * 4 * 4 * 2, 32, 4)
    assert tiny.price("analytical.gemm", batch) == pytest.approx(layers + compute(8 * 2 * 40, 8, 4))


def test_pipeline_waits_for_the_stage_with_the_head(tiny):
    # 4 microbatches of 2 sequences through stages of t and t + h seconds: sum + 3 * (t + h).
    batch = tiny.operator(tiny.gated, Role.INFERENCE, tiny.layout(1, 2, 1, 4))
    t = compute(1 * 16 * 2 * 144, 16, 4) + compute(1 * 16 * 4 * 4 * 4, 16, 4)
    h = compute(16 * 2 * 40, 16, 4)
    whole = tiny.price("analytical.gemm", batch) + tiny.price("analytical.pipeline_bubble", batch)
    assert whole == pytest.approx(t + (t + h) + 3 * (t + h))


def test_equal_stages_have_the_papers_bubble(tiny):
    headless = attrs.evolve(tiny.gated, vocab=1)  # a head of 4 elements
    batch = tiny.operator(headless, Role.INFERENCE, tiny.layout(1, 2, 1, 4))
    gemm, bubble = (tiny.price(f"analytical.{term}", batch) for term in ("gemm", "pipeline_bubble"))
    assert bubble == pytest.approx(gemm * (2 - 1) / 4, rel=0.05)


def test_decode_keeps_the_pipeline_full_between_steps(tiny):
    long = attrs.evolve(tiny.workload, response_tokens=1001)
    batch = tiny.operator(
        attrs.evolve(tiny.gated, vocab=1), Role.GENERATION, tiny.layout(1, 2, 1, 2), workload=long, prefill=False
    )
    gemm, bubble = (tiny.price(f"analytical.{term}", batch) for term in ("gemm", "pipeline_bubble"))
    assert bubble < 0.02 * gemm


def test_all_reduces_of_decode_come_per_microbatch(tiny):
    batch = tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(1, 2, 2, 4), prefill=False)
    assert tiny.price("analytical.tensor_parallel", batch) == pytest.approx(2 * 1 * 3 * 4 * (2 + 2 * 4 * 2 / 10))


def test_messages_of_decode_come_per_microbatch(tiny):
    batch = tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(1, 2, 2, 4), prefill=False)
    assert tiny.price("analytical.pipeline_parallel", batch) == pytest.approx(
        (3 * 4 + 2 - 2) * (2 + 2 * 4 * 2 / 2 / 20)
    )


def test_data_parallel_and_optimizer_work_on_the_largest_stage(tiny):
    # pp 2: a layer of 144 and two norms (8), half of the final norm (2), and embedding or head (40)
    layouts = tiny.layout(2, 2, 1, 2)
    stage = 144 + 8 + 2 + 40
    batch = tiny.operator(tiny.gated, Role.TRAINING, layouts)
    assert tiny.price("analytical.data_parallel", batch) == pytest.approx(2 * (1 * 1 + 0.5 * stage * 2 / 10))
    assert tiny.price("analytical.optimizer", batch) == pytest.approx(18 * stage / (2 * 100))


@pytest.mark.parametrize(("role", "passes"), [(Role.INFERENCE, 1), (Role.TRAINING, 4)])
def test_non_gemm_moves_ten_elements_per_token_and_layer(tiny, role, passes):
    batch = tiny.operator(tiny.gated, role, tiny.layout(1, 2, 4, 2))
    seconds = 1 * (10 * 64 * 4 * 2) / 100 * (1 - 1 / 4)
    assert tiny.price("analytical.non_gemm", batch) == pytest.approx(passes * seconds)


def test_non_gemm_of_generation_is_its_prefill(tiny):
    batch = tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(1, 1, 2))
    assert tiny.price("analytical.non_gemm", batch) == pytest.approx(2 * (10 * 32 * 4 * 2) / 100 * 0.5)


def test_non_gemm_equals_the_profiles_constant_at_its_calibration_shape(tiny):
    """c_ng of the hardware profiles is ten passes over 8 sequences x 640 tokens x 4096 x 2 bytes."""
    model = attrs.evolve(tiny.plain, hidden=4096, heads=32, kv_heads=32, head_dim=128, ffn=11008)
    workload = attrs.evolve(tiny.workload, prompts=8, prompt_tokens=512, response_tokens=128)
    hardware = attrs.evolve(
        tiny.hardware,
        device=attrs.evolve(tiny.hardware.device, memory_bandwidth_bytes_per_s=2e12),
        non_gemm_layer_s=10 * 8 * 640 * 4096 * 2 / 2e12,
        non_gemm_reference_batch=8,
    )
    batch = tiny.operator(model, Role.TRAINING, tiny.layout(1, 1, 4), workload=workload, hardware=hardware)
    assert tiny.price("analytical.non_gemm", batch) == pytest.approx(tiny.price("paper.non_gemm", batch))


def test_expected_distinct_experts():
    assert distinct_experts(8, 2, np.array([1.0, 2.0, 1e4])).tolist() == [
        pytest.approx(2.0),
        pytest.approx(3.5),  # 8 (1 - (3/4)^2)
        pytest.approx(8.0),
    ]


def test_one_token_reads_only_its_experts(tiny):
    moe = attrs.evolve(tiny.gated, moe=MoE(experts=8, active_experts=2, expert_ffn=8))
    slow_memory = attrs.evolve(
        tiny.hardware, device=attrs.evolve(tiny.hardware.device, memory_bandwidth_bytes_per_s=1.0, peak_flops_per_s=1e6)
    )

    def decode(sequences):
        workload = attrs.evolve(tiny.workload, prompts=sequences, response_tokens=2)
        batch = tiny.operator(
            moe, Role.GENERATION, tiny.layout(), workload=workload, prefill=False, hardware=slow_memory
        )
        return tiny.price("analytical.gemm", batch)

    def moved(sequences, experts):
        layer = 48 + 4 * 8 + experts * 96  # attention, router, experts of 3 * 4 * 8
        activations = 2 * sequences * 4
        cache = sequences * 5 * (2 * 2)
        return 2 * (2 * (layer + activations + cache) + 40)

    assert decode(1) == pytest.approx(moved(1, 2))
    assert decode(2) == pytest.approx(moved(2, 3.5))
    assert decode(1000) == pytest.approx(moved(1000, 8), rel=1e-6)


def test_function_reward_runs_on_its_replicas(tiny):
    batch = tiny.operator(None, Role.INFERENCE, tiny.layout(2), seconds_per_sample=0.25)
    for name, term in tiny.terms.items():
        if term.target.value == "operator":
            expected = 0.25 * 8 / 2 if name.endswith(".function_reward") else 0.0
            assert tiny.price(name, batch) == expected
    model = tiny.operator(tiny.gated, Role.INFERENCE, tiny.layout())
    assert tiny.price("analytical.function_reward", model) == 0.0


PHASED = (LengthQuantile(0.5, 1), LengthQuantile(0.75, 2), LengthQuantile(1.0, 4))


@pytest.mark.parametrize("model", ["analytical", "paper"])
@pytest.mark.parametrize("term", ["gemm", "pipeline_bubble", "tensor_parallel", "pipeline_parallel", "non_gemm"])
def test_length_phases_add_up_to_the_whole_generation(tiny, model, term):
    workload = attrs.evolve(tiny.workload, response_lengths=PHASED)
    layouts = tiny.layout(1, 2, 2, 2)
    whole = tiny.operator(tiny.gated, Role.GENERATION, layouts, workload=workload)
    parts = [
        tiny.operator(
            tiny.gated, Role.GENERATION, layouts, workload=workload, prefill=phase.index == 0, phases=(phase,)
        )
        for phase in workload.phases
    ]
    name = f"{model}.{term}"
    assert sum(tiny.price(name, part) for part in parts) == pytest.approx(tiny.price(name, whole))


@pytest.mark.parametrize("model", ["analytical", "paper"])
def test_phases_of_sequences_that_all_live_change_nothing(tiny, model):
    """Splitting a decode without early finishers is only bookkeeping where the roofline side is fixed."""
    fast = attrs.evolve(tiny.hardware, device=attrs.evolve(tiny.hardware.device, memory_bandwidth_bytes_per_s=1e9))
    late = (LengthQuantile(1e-12, 1), LengthQuantile(2e-12, 3), LengthQuantile(1.0, 4))
    one, three = (
        tiny.price(
            f"{model}.gemm",
            tiny.operator(
                tiny.gated,
                Role.GENERATION,
                tiny.layout(),
                workload=attrs.evolve(tiny.workload, response_lengths=lengths),
                hardware=fast,
            ),
        )
        for lengths in ((), late)
    )
    assert one == pytest.approx(three)


@pytest.mark.parametrize("term", ["tensor_parallel", "non_gemm"])
@pytest.mark.parametrize("model", ["analytical", "paper"])
def test_shares_of_a_split_inference_add_up_in_linear_terms(tiny, model, term):
    free_latency = attrs.evolve(
        tiny.hardware,
        tiers=tuple(
            attrs.evolve(tier, collective=attrs.evolve(tier.collective, latency_s=0.0)) for tier in tiny.hardware.tiers
        ),
    )

    def seconds(sequences):
        batch = tiny.operator(
            tiny.gated, Role.INFERENCE, tiny.layout(1, 1, 2), sequences=sequences, hardware=free_latency
        )
        return tiny.price(f"{model}.{term}", batch)

    assert seconds(2.0) + seconds(6.0) == pytest.approx(seconds(8.0))
