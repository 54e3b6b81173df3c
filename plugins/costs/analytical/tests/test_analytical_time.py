"""Time terms of ``analytical`` against arithmetic on the gated tiny model.

Its products per layer, columns x inner length: q, k, v 8 x 4; output 4 x 4; gate and up 16 x 4; down 4 x 8;
head 10 x 4.
Attention width 4, one KV head of width 2.
"""

import attrs
import numpy as np
import pytest
from rpeg_plugin_analytical.shards import distinct_experts

from rpeg_core.ir import Role
from rpeg_core.spec.execution import Execution, Recompute, Sharding
from rpeg_core.spec.machine import AttentionEfficiency
from rpeg_core.spec.models import Head, MoE
from rpeg_core.spec.workload import LengthQuantile

LAYER = ((8, 4), (4, 4), (16, 4), (4, 8))
HEAD = (10, 4)
FAST_MEMORY, SLOW_MEMORY = 1e9, 1.0


def eta(rows, width):
    return rows / (rows + 4) * width / (width + 4)


def product(m, n, k):
    """Compute-bound seconds of m x k by k x n at 1000 FLOP/s."""
    return 2 * m * n * k / (1000 * eta(m, min(n, k)))


def with_memory(tiny, bandwidth, **changes):
    device = attrs.evolve(tiny.hardware.device, memory_bandwidth_bytes_per_s=bandwidth)
    return attrs.evolve(tiny.hardware, device=device, **changes)


def forward(tokens, layers=2):
    return layers * sum(product(tokens, n, k) for n, k in LAYER)


def test_inference_adds_the_products_of_layers_and_head(tiny):
    batch = tiny.operator(tiny.gated, Role.INFERENCE, tiny.layout(), hardware=with_memory(tiny, FAST_MEMORY))
    assert tiny.price("analytical.gemm", batch) == pytest.approx(forward(64) + product(64, *HEAD))


def test_training_recomputes_layers_but_not_the_head(tiny):
    batch = tiny.operator(tiny.gated, Role.TRAINING, tiny.layout(), hardware=with_memory(tiny, FAST_MEMORY))
    layer = sum(2 * product(64, n, k) + product(64, k, n) + product(n, k, 64) for n, k in LAYER)
    head = product(64, 10, 4) + product(64, 4, 10) + product(10, 4, 64)
    assert tiny.price("analytical.gemm", batch) == pytest.approx(2 * layer + head)


def test_without_recomputation_or_with_adapters_a_pass_less(tiny):
    hardware = with_memory(tiny, FAST_MEMORY)
    batch = tiny.operator(tiny.gated, Role.TRAINING, tiny.layout(), hardware=hardware)
    none = attrs.evolve(batch, execution=Execution(recompute=Recompute.NONE))
    adapters = attrs.evolve(batch, execution=Execution(frozen_base=True))
    whole, kept, frozen = (tiny.price("analytical.gemm", b) for b in (batch, none, adapters))
    assert whole - kept == pytest.approx(forward(64))
    weights = 2 * sum(product(n, k, 64) for n, k in LAYER) + product(10, 4, 64)
    assert whole - frozen == pytest.approx(weights)


def test_a_sustained_clock_slows_products_of_training_only(tiny):
    hardware = with_memory(tiny, FAST_MEMORY)
    slow = attrs.evolve(hardware, device=attrs.evolve(hardware.device, sustained_share=0.5))
    for role, ratio in ((Role.TRAINING, 2.0), (Role.INFERENCE, 2.0), (Role.GENERATION, 1.0)):
        before, after = (
            tiny.price("analytical.gemm", tiny.operator(tiny.gated, role, tiny.layout(), hardware=h))
            for h in (hardware, slow)
        )
        assert after == pytest.approx(ratio * before)


def test_decode_reads_weights_cache_and_head_every_step(tiny):
    # 3 steps (the first of 4 tokens is the prefill's), 8 sequences, contexts 5, 6, 7; one KV head of width 2.
    batch = tiny.operator(
        tiny.gated, Role.GENERATION, tiny.layout(), prefill=False, hardware=with_memory(tiny, SLOW_MEMORY)
    )

    def moved(n, k):
        return 2 * (8 * k + n * k + 8 * n)

    assert tiny.price("analytical.gemm", batch) == pytest.approx(
        3 * (2 * sum(moved(n, k) for n, k in LAYER) + moved(*HEAD))
    )
    assert tiny.price("analytical.attention", batch) == pytest.approx(3 * 2 * 8 * 6 * (2 * 2) * 2)


def test_prefill_applies_the_head_to_one_position_per_sequence(tiny):
    batch = tiny.operator(
        tiny.gated, Role.GENERATION, tiny.layout(), phases=(), hardware=with_memory(tiny, FAST_MEMORY)
    )
    assert tiny.price("analytical.gemm", batch) == pytest.approx(forward(32) + product(8, *HEAD))


def test_attention_of_sequences_follows_its_own_curve(tiny):
    # 64 tokens of width 4 at mean context 4, both layers; 800 FLOP/s at 8 of 8 + 8 tokens.
    curve = AttentionEfficiency(flops_per_s=800.0, gamma_tokens=8.0)
    hardware = attrs.evolve(tiny.hardware, attention=curve)
    flops = 2 * 64 * 4 * 4 * 4
    inference = tiny.operator(tiny.gated, Role.INFERENCE, tiny.layout(), hardware=hardware)
    assert tiny.price("analytical.attention", inference) == pytest.approx(flops / 400)
    # forward, recomputation, and a backward of 2.5 times the FLOPs at 0.8 of the speed
    training = tiny.operator(tiny.gated, Role.TRAINING, tiny.layout(), hardware=hardware)
    assert tiny.price("analytical.attention", training) == pytest.approx((2 + 2.5 / 0.8) * flops / 400)


def test_unfused_attention_moves_all_scores_through_memory(tiny):
    curve = AttentionEfficiency(flops_per_s=800.0, gamma_tokens=8.0)
    batch = tiny.operator(
        tiny.gated, Role.INFERENCE, tiny.layout(), hardware=attrs.evolve(tiny.hardware, attention=curve)
    )
    early = attrs.evolve(batch, execution=Execution(framework="megatron-2021"))
    scores = 64 * 8 * 2  # tokens, all positions, heads
    assert tiny.price("analytical.attention", early) == pytest.approx(
        2 * (2 * 64 * 4 * 4 * 4 / 400 + 13 * scores / 100)
    )


def stages(tiny, name, batch):
    return tiny.price(f"analytical.{name}", batch)


def test_pipeline_waits_for_the_stage_with_the_head(tiny):
    # 4 microbatches of 2 sequences through stages of t and t + h seconds: sum + 3 * (t + h).
    layouts = tiny.layout(1, 2, 1, 4)
    batch = tiny.operator(tiny.gated, Role.INFERENCE, layouts, hardware=with_memory(tiny, FAST_MEMORY))
    t = forward(16, layers=1) + stages(tiny, "attention", batch) / 4
    h = product(16, *HEAD)
    whole = sum(stages(tiny, name, batch) for name in ("gemm", "attention", "non_gemm", "pipeline_bubble"))
    assert whole == pytest.approx(t + (t + h) + 3 * (t + h), rel=1e-6)


def test_equal_stages_have_the_papers_bubble(tiny):
    headless = attrs.evolve(tiny.gated, vocab=1)  # a head of 4 elements
    batch = tiny.operator(headless, Role.INFERENCE, tiny.layout(1, 2, 1, 4), hardware=with_memory(tiny, FAST_MEMORY))
    work = stages(tiny, "gemm", batch) + stages(tiny, "attention", batch)
    assert stages(tiny, "pipeline_bubble", batch) == pytest.approx(work * (2 - 1) / 4, rel=0.2)


def test_virtual_stages_divide_the_fill(tiny):
    layouts = tiny.layout(1, 2, 1, 4)
    batch = tiny.operator(attrs.evolve(tiny.gated, vocab=1), Role.TRAINING, layouts)
    twice = attrs.evolve(batch, execution=Execution(virtual_stages=2))
    none = attrs.evolve(batch, execution=Execution(virtual_stages=10**9))
    wait = stages(tiny, "pipeline_bubble", none)
    assert stages(tiny, "pipeline_bubble", twice) - wait == pytest.approx(
        (stages(tiny, "pipeline_bubble", batch) - wait) / 2
    )
    assert stages(tiny, "pipeline_parallel", twice) > stages(tiny, "pipeline_parallel", batch)


def test_decode_keeps_the_pipeline_full_between_steps(tiny):
    long = attrs.evolve(tiny.workload, response_tokens=1001)
    batch = tiny.operator(
        attrs.evolve(tiny.gated, vocab=1), Role.GENERATION, tiny.layout(1, 2, 1, 2), workload=long, prefill=False
    )
    whole = stages(tiny, "gemm", batch) + stages(tiny, "attention", batch)
    assert stages(tiny, "pipeline_bubble", batch) < 0.05 * whole


def test_sequence_parallelism_divides_residuals_too(tiny):
    layouts = tiny.layout(1, 1, 2)
    batch = tiny.operator(tiny.gated, Role.INFERENCE, layouts)
    divided = attrs.evolve(batch, execution=Execution(sequence_parallel=True))
    before, after = (tiny.price("analytical.non_gemm", b) for b in (batch, divided))
    assert before - after == pytest.approx(2 * 64 * 10 * 4 * 2 / 2 / 100)


def test_context_parallelism_divides_work_and_exchanges_keys_and_values(tiny):
    hardware = with_memory(tiny, FAST_MEMORY)
    batch = tiny.operator(tiny.gated, Role.INFERENCE, tiny.layout(), hardware=hardware)
    ring = attrs.evolve(batch, execution=Execution(context=2))
    assert tiny.price("analytical.attention", ring) == tiny.price("analytical.attention", batch) / 2
    assert tiny.price("analytical.context_parallel", batch) == 0.0
    # two layers, one step: 32 tokens of K and V (2 + 2 elements of 2 bytes), point to point within the node
    assert tiny.price("analytical.context_parallel", ring) == pytest.approx(2 * (2 + 32 * 4 * 2 / 20))


def test_expert_parallelism_sends_each_copy_there_and_back(tiny):
    moe = attrs.evolve(tiny.gated, moe=MoE(experts=8, active_experts=2, expert_ffn=8))
    batch = tiny.operator(moe, Role.INFERENCE, tiny.layout(4))
    spread = attrs.evolve(batch, execution=Execution(expert=4))
    assert tiny.price("analytical.expert_parallel", batch) == 0.0
    # 16 tokens of 4 elements of 2 bytes, two copies, three quarters leave; log2(4) latencies of 1 s; two per layer
    assert tiny.price("analytical.expert_parallel", spread) == pytest.approx(2 * 2 * (2 + 16 * 4 * 2 * 2 * 0.75 / 10))


def test_stragglers_grow_with_the_logarithm_of_gpus(tiny):
    hardware = attrs.evolve(tiny.hardware, device=attrs.evolve(tiny.hardware.device, clock_spread=0.01))
    one, eight = (
        tiny.price("analytical.stragglers", tiny.operator(tiny.gated, Role.TRAINING, tiny.layout(d), hardware=hardware))
        for d in (1, 8)
    )
    assert one == 0.0
    work = tiny.operator(tiny.gated, Role.TRAINING, tiny.layout(8), hardware=hardware)
    compute = sum(tiny.price(f"analytical.{name}", work) for name in ("gemm", "attention", "non_gemm"))
    assert 0 < eight <= 0.01 * np.sqrt(2 * np.log(8)) * compute


def test_sharding_decides_what_data_parallelism_moves_and_updates(tiny):
    batch = tiny.operator(tiny.gated, Role.TRAINING, tiny.layout(4))
    nothing, everything = (attrs.evolve(batch, execution=Execution(sharding=s)) for s in (Sharding.NONE, Sharding.FULL))
    update = tiny.price("analytical.optimizer", batch)
    assert tiny.price("analytical.optimizer", nothing) == pytest.approx(4 * update)
    assert tiny.price("analytical.data_parallel", everything) == pytest.approx(
        1.5 * tiny.price("analytical.data_parallel", batch)
    )


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
def test_non_gemm_moves_the_tensors_between_products(tiny, role, passes):
    # per token and layer: 10 hidden elements whole on every rank; q, k, v twice and three feed-forward widths divided
    batch = tiny.operator(tiny.gated.with_head(Head.SCALAR), role, tiny.layout(1, 2, 4, 2))
    heads, feed_forward = 4 / 4 + 2 * 2, 3 * 8 / 4  # one KV head of 2 is whole on every rank
    seconds = 64 * 2 * (10 * 4 + 2 * heads + feed_forward) / 100
    assert tiny.price("analytical.non_gemm", batch) == pytest.approx(passes * seconds)


def test_the_loss_reads_and_writes_logits(tiny):
    scalar, lm = (
        tiny.price("analytical.non_gemm", tiny.operator(model, Role.TRAINING, tiny.layout()))
        for model in (tiny.gated.with_head(Head.SCALAR), tiny.gated)
    )
    assert lm - scalar == pytest.approx(16 * 64 * 10 / 100)


def test_non_gemm_of_generation_is_its_prefill(tiny):
    prompts = tiny.price("analytical.non_gemm", tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(1, 1, 2)))
    whole = tiny.price(
        "analytical.non_gemm",
        tiny.operator(tiny.gated.with_head(Head.SCALAR), Role.INFERENCE, tiny.layout(1, 1, 2)),
    )
    assert prompts == pytest.approx(whole / 2)  # Lp of Lp + Lr


def test_expected_distinct_experts():
    assert distinct_experts(8, 2, np.array([1.0, 2.0, 1e4])).tolist() == [
        pytest.approx(2.0),
        pytest.approx(3.5),  # 8 (1 - (3/4)^2)
        pytest.approx(8.0),
    ]


def test_one_token_reads_only_its_experts(tiny):
    moe = attrs.evolve(tiny.gated, moe=MoE(experts=8, active_experts=2, expert_ffn=8))

    def decode(sequences):
        workload = attrs.evolve(tiny.workload, prompts=sequences, response_tokens=2)
        device = attrs.evolve(tiny.hardware.device, memory_bandwidth_bytes_per_s=1.0, peak_flops_per_s=1e12)
        hardware = attrs.evolve(tiny.hardware, device=device)
        batch = tiny.operator(moe, Role.GENERATION, tiny.layout(), workload=workload, prefill=False, hardware=hardware)
        return tiny.price("analytical.gemm", batch)

    def moved(sequences, experts):
        def one(rows, n, k):
            return 2 * (rows * k + n * k + rows * n)

        rows = sequences * 2 / experts
        layer = one(sequences, 8, 4) + one(sequences, 4, 4) + one(sequences, 8, 4)  # attention, router
        layer += experts * (one(rows, 16, 4) + one(rows, 4, 8))
        return 2 * layer + one(sequences, 10, 4)

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


# Half of 8 responses has 1 token, a quarter 2, a quarter 4: 2 on average, 8 sequences of 6 tokens on average.
@pytest.mark.parametrize("role", [Role.INFERENCE, Role.TRAINING])
def test_short_responses_are_priced_as_short(tiny, role):
    phased = attrs.evolve(tiny.workload, response_lengths=PHASED)
    mean = attrs.evolve(tiny.workload, response_tokens=2)
    layouts = tiny.layout(1, 2, 2, 2)
    for term in ("gemm", "tensor_parallel", "pipeline_parallel", "non_gemm"):
        found = tiny.price(
            f"analytical.{term}", tiny.operator(tiny.gated, role, layouts, workload=phased, phases=phased.phases)
        )
        expected = tiny.price(f"analytical.{term}", tiny.operator(tiny.gated, role, layouts, workload=mean))
        assert found == pytest.approx(expected)
        padded = tiny.price(f"analytical.{term}", tiny.operator(tiny.gated, role, layouts, workload=phased))
        assert found < padded


def test_attention_of_short_responses_is_that_of_each(tiny):
    curve = AttentionEfficiency(flops_per_s=500.0, gamma_tokens=2.0)
    hardware = attrs.evolve(tiny.hardware, attention=curve)
    phased = attrs.evolve(tiny.workload, response_lengths=PHASED)

    def seconds(sequences, response, **changes):
        workload = attrs.evolve(tiny.workload, response_tokens=response, **changes)
        batch = tiny.operator(
            tiny.gated,
            Role.INFERENCE,
            tiny.layout(),
            workload=workload,
            sequences=sequences,
            hardware=hardware,
            phases=workload.phases,
        )
        return tiny.price("analytical.attention", batch)

    whole = tiny.operator(
        tiny.gated, Role.INFERENCE, tiny.layout(), workload=phased, hardware=hardware, phases=phased.phases
    )
    by_length = seconds(4, 1) + seconds(2, 2) + seconds(2, 4)
    assert tiny.price("analytical.attention", whole) == pytest.approx(by_length)
    # 2 layers, 4 d_attn FLOPs per token and token of context; contexts 5/2, 3, 4 at 500 l/(l + 2) FLOP/s.
    assert by_length == pytest.approx(
        2 * 4 * 4 * (4 * 5 * 2.5 / (500 * 5 / 7) + 2 * 6 * 3 / (500 * 6 / 8) + 2 * 8 * 4 / (500 * 8 / 10))
    )


def test_a_split_inference_is_priced_at_the_length_of_its_phase(tiny):
    phased = attrs.evolve(tiny.workload, response_lengths=PHASED)
    for index, response in enumerate((1, 2, 4)):
        phase = phased.phases[index]
        part = tiny.operator(
            tiny.gated, Role.INFERENCE, tiny.layout(), workload=phased, sequences=8 * phase.finishing, phases=(phase,)
        )
        alone = attrs.evolve(tiny.workload, prompts=round(8 * phase.finishing), response_tokens=response)
        assert tiny.price("analytical.gemm", part) == pytest.approx(
            tiny.price("analytical.gemm", tiny.operator(tiny.gated, Role.INFERENCE, tiny.layout(), workload=alone))
        )


@pytest.mark.parametrize("role", [Role.INFERENCE, Role.TRAINING])
def test_the_paper_prices_all_responses_at_the_longest(tiny, role):
    phased = attrs.evolve(tiny.workload, response_lengths=PHASED)
    for term in ("gemm", "tensor_parallel", "pipeline_parallel", "pipeline_bubble"):
        one, three = (
            tiny.price(
                f"paper.{term}",
                tiny.operator(tiny.gated, role, tiny.layout(1, 2, 2, 2), workload=workload, phases=workload.phases),
            )
            for workload in (tiny.workload, phased)
        )
        assert one == three
