"""Time terms of ``paper`` against arithmetic on the plain tiny model: W_layer 128, head 40, s_b 2."""

import attrs
import pytest

from rpeg_core.ir import Role
from rpeg_core.spec.models import Head
from rpeg_core.spec.workload import LengthPhase

N_M = 2 * 128 + 40 + 40

# Whole sequences: 8 x 8 tokens at context 4. Layers 2 * 64 * (2 * 128 + 4 * 4 * 4), head 64 * 2 * 40.
FORWARD_FLOPS = 2 * 64 * (256 + 64) + 64 * 80


def eta(rows, width):
    return rows / (rows + 4) * width / (width + 4)


def test_inference_on_one_gpu_is_compute_bound(tiny):
    batch = tiny.operator(tiny.plain, Role.INFERENCE, tiny.layout())
    moved = 2 * 128 * 2 + 2 * 64 * 4 * 2 * 2  # Omega_W + Omega_A
    compute = FORWARD_FLOPS / (1000 * eta(64, 4))
    assert compute > moved / 100
    assert tiny.price("paper.gemm", batch) == pytest.approx(compute)


def test_gemm_follows_the_printed_roofline(tiny):
    # T = W / (P F_eff), F_eff = min(F eta, I BW), I = W_dev / (Omega_W + Omega_A), on dp 2 pp 2 tp 2, mb 2
    slow_memory = attrs.evolve(
        tiny.hardware, device=attrs.evolve(tiny.hardware.device, memory_bandwidth_bytes_per_s=5.0)
    )
    batch = tiny.operator(tiny.plain, Role.INFERENCE, tiny.layout(2, 2, 2, 2), hardware=slow_memory)
    b_loc = 8 / (2 * 2)
    w_dev = FORWARD_FLOPS / (8 * 2)
    omega_w = 2 / (2 * 2) * 128 * 2
    omega_a = 2 * b_loc * 8 * 4 * (2 / 2) * 2
    f_eff = min(1000 * eta(b_loc * 8, 4 / 2), w_dev / (omega_w + omega_a) * 5.0)
    assert f_eff < 1000 * eta(b_loc * 8, 4 / 2)  # the bandwidth decides
    assert tiny.price("paper.gemm", batch) == pytest.approx(FORWARD_FLOPS / (8 * f_eff))


def test_training_is_four_forward_passes(tiny):
    layouts = tiny.layout(2, 2, 1, 2)
    forward = tiny.price("paper.gemm", tiny.operator(tiny.plain, Role.INFERENCE, layouts))
    assert tiny.price("paper.gemm", tiny.operator(tiny.plain, Role.TRAINING, layouts)) == pytest.approx(4 * forward)


def test_scalar_head_has_one_output(tiny):
    scalar = tiny.plain.with_head(Head.SCALAR)
    batch = tiny.operator(scalar, Role.INFERENCE, tiny.layout())
    flops = 2 * 64 * (256 + 64) + 64 * 2 * 4
    assert tiny.price("paper.gemm", batch) == pytest.approx(flops / (1000 * eta(64, 4)))


def test_generation_is_prefill_without_head_and_four_decoded_tokens(tiny):
    batch = tiny.operator(tiny.plain, Role.GENERATION, tiny.layout())
    # Prefill: 32 tokens at context 2. Decode: rows 8, mean context 4 + 2.
    prefill_flops = 2 * 32 * (256 + 16 * 2)
    decode_flops = 2 * 8 * (256 + 16 * 6) + 8 * 80
    prefill = prefill_flops / (1000 * eta(32, 4))
    decode = max(decode_flops / (1000 * eta(8, 4)), (512 + 2 * 8 * 4 * 2 * 2) / 100)
    assert tiny.price("paper.gemm", batch) == pytest.approx(prefill + 4 * decode)


def test_shared_prefix_prefills_each_prompt_once(tiny):
    def prefill(**workload):
        batch = tiny.operator(
            tiny.plain,
            Role.GENERATION,
            tiny.layout(),
            workload=attrs.evolve(tiny.workload, **workload),
            phases=(),
        )
        return tiny.price("paper.gemm", batch)

    four_prompts = prefill(prompts=4)
    assert prefill(prompts=4, rollouts_per_prompt=3, shared_prefix=True) == four_prompts
    assert prefill(prompts=4, rollouts_per_prompt=3) > four_prompts


def test_bubble_is_idle_stages_over_microbatches(tiny):
    for role in Role:
        batch = tiny.operator(tiny.plain, role, tiny.layout(1, 2, 1, 4))
        gemm = tiny.price("paper.gemm", batch)
        assert tiny.price("paper.pipeline_bubble", batch) == pytest.approx(gemm * (2 - 1) / 4)


@pytest.mark.parametrize(("role", "per_layer"), [(Role.INFERENCE, 2), (Role.TRAINING, 6)])
def test_tensor_parallel_all_reduces(tiny, role, per_layer):
    batch = tiny.operator(tiny.plain, role, tiny.layout(1, 2, 2, 4))
    # b_loc = 2: 2 * 8 * 4 * 2 = 128 bytes over 2 ranks: 2 * 1 s + 128 / 10; one layer per stage, 4 microbatches
    assert tiny.price("paper.tensor_parallel", batch) == pytest.approx(per_layer * 1 * 4 * (2 + 12.8))


def test_tensor_parallel_decode_takes_one_batch_per_step(tiny):
    batch = tiny.operator(tiny.plain, Role.GENERATION, tiny.layout(1, 2, 2, 4))
    prefill = 4 * (2 + 2 * 4 * 4 * 2 / 10)  # 4 microbatches of 2 prompts of 4 tokens
    decode = (4 - 1) * (2 + 8 * 4 * 2 / 10)  # Lr - 1 steps of all 8 sequences
    assert tiny.price("paper.tensor_parallel", batch) == pytest.approx(2 * 1 * (prefill + decode))


@pytest.mark.parametrize(("role", "messages"), [(Role.INFERENCE, 4 + 2 - 2), (Role.TRAINING, 4 + 4 - 3)])
def test_pipeline_messages_inside_a_node(tiny, role, messages):
    batch = tiny.operator(tiny.plain, role, tiny.layout(1, 2, 2, 4))
    # M_pp = 8 * 8 * 4 * 2 / (1 * 2 * 4) = 64 bytes
    assert tiny.price("paper.pipeline_parallel", batch) == pytest.approx(messages * (2 + 64 / 20))


def test_pipeline_messages_are_weighted_by_boundary(tiny):
    # pp 4 on nodes of 2 GPUs: n_inter = ceil(4 / 2) - 1 = 1 of 3 boundaries
    batch = tiny.operator(tiny.plain, Role.INFERENCE, tiny.layout(1, 4, 1, 4, gpus_per_node=2), gpus_per_node=2)
    message = 8 * 8 * 4 * 2 / 4
    mixed = 2 / 3 * (2 + message / 20) + 1 / 3 * (4 + message / 8)
    assert tiny.price("paper.pipeline_parallel", batch) == pytest.approx((4 + 4 - 2) * mixed)


def test_pipeline_decode_crosses_every_boundary_once_per_step(tiny):
    batch = tiny.operator(tiny.plain, Role.GENERATION, tiny.layout(1, 2, 1, 4), prefill=False)
    step = 2 + 8 * 4 * 2 / 20
    assert tiny.price("paper.pipeline_parallel", batch) == pytest.approx(3 * 1 * step)


def test_data_parallel_reduces_and_gathers_the_shard(tiny):
    # tp 2, dp 4 on two nodes of 4: 2 ranks of a group per node, so 2 adapters of 5 bytes/s each
    batch = tiny.operator(tiny.plain, Role.TRAINING, tiny.layout(4, 1, 2))
    shard_bytes = N_M * 2 / 2
    assert tiny.price("paper.data_parallel", batch) == pytest.approx(2 * (3 * 3 + 0.75 * shard_bytes / 10))


def test_non_gemm_scales_with_the_local_batch_not_with_microbatches(tiny):
    # L/Pp * c_ng * (b_loc * mb / B_cal) * (1 - 1/Pt)
    expected = 1 * 3.0 * (8 / 2 / 4) * 0.5
    for microbatches in (2, 4):
        layouts = tiny.layout(2, 2, 2, microbatches)
        inference = tiny.operator(tiny.plain, Role.INFERENCE, layouts)
        training = tiny.operator(tiny.plain, Role.TRAINING, layouts)
        assert tiny.price("paper.non_gemm", inference) == pytest.approx(expected)
        assert tiny.price("paper.non_gemm", training) == pytest.approx(4 * expected)
    assert tiny.price("paper.non_gemm", tiny.operator(tiny.plain, Role.GENERATION, layouts)) == 0.0


def test_optimizer_moves_eighteen_bytes_per_parameter(tiny):
    batch = tiny.operator(tiny.plain, Role.TRAINING, tiny.layout(2, 2, 2, 2))
    assert tiny.price("paper.optimizer", batch) == pytest.approx(18 * N_M / (8 * 100))


def test_architecture_is_the_baseline_whatever_the_model_has(tiny):
    for role in Role:
        for term in ("gemm", "tensor_parallel", "data_parallel", "optimizer"):
            plain, gated = (
                tiny.price(f"paper.{term}", tiny.operator(model, role, tiny.layout(2, 1, 2)))
                for model in (tiny.plain, tiny.gated)
            )
            assert plain == gated


def test_dying_sequences_cost_less(tiny):
    full = LengthPhase(index=1, first_token=2, last_token=4, alive=1.0, finishing=1.0)
    half = attrs.evolve(full, alive=0.5, finishing=0.5)
    for term in ("gemm", "tensor_parallel"):
        late, early = (
            tiny.price(
                f"paper.{term}",
                tiny.operator(tiny.plain, Role.GENERATION, tiny.layout(1, 1, 2), prefill=False, phases=(phase,)),
            )
            for phase in (half, full)
        )
        assert late < early
