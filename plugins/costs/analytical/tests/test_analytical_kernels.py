"""Single kernels: precision, roofline sides, what a framework's coefficients change."""

import attrs
import pytest
from rpeg_plugin_analytical.frameworks import FRAMEWORKS, framework
from rpeg_plugin_analytical.kernels import gemm_flops_per_s, gemm_seconds, input_bytes

from rpeg_core.ir import Role
from rpeg_core.spec.execution import Execution, Precision


def device(tiny, **changes):
    return attrs.evolve(tiny.hardware, device=attrs.evolve(tiny.hardware.device, **changes))


def test_low_precision_multiplies_the_peak_where_the_gpu_has_it(tiny):
    fast = device(tiny, fp8_speedup=2.0, fp4_speedup=4.0, sustained_share=0.5)
    speeds = [gemm_flops_per_s(fast, p, sustained=False) for p in Precision]
    assert speeds == [1000, 2000, 2000, 4000]
    assert gemm_flops_per_s(fast, Precision.FP8, sustained=True) == 1000
    assert {gemm_flops_per_s(tiny.hardware, p, sustained=True) for p in Precision} == {1000}
    assert gemm_flops_per_s(device(tiny, fp8_speedup=2.0), Precision.NVFP4, sustained=False) == 2000


def test_block_scales_add_to_an_input():
    assert [input_bytes(p, 2) for p in Precision] == [2.0, 1.0, 1.0 + 1 / 32, 0.5 + 1 / 16]


def test_a_thin_product_streams_its_weights(tiny):
    # 1 x 64 by 64 x 64: 2 (64 + 4096) + 2 * 64 bytes at 100 B/s against 8192 FLOPs
    seconds = gemm_seconds(tiny.hardware, 1, 64, 64, flops_per_s=1e9)
    assert seconds == pytest.approx((2 * (64 + 4096) + 2 * 64) / 100)
    slower = gemm_seconds(tiny.hardware, 1, 64, 64, flops_per_s=1e9, stream_share=0.5)
    assert slower == pytest.approx(2 * seconds)


def test_engines_have_a_floor_per_step_sequence_and_layer(tiny):
    batch = tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(), prefill=False)
    assert tiny.price("analytical.step_overhead", batch) == 0.0
    vllm = attrs.evolve(batch, execution=Execution(framework="vllm"))
    used = framework("vllm")
    step = used.decode_step_s + 8 * used.decode_sequence_s + 2 * used.decode_layer_s
    assert tiny.price("analytical.step_overhead", vllm) == pytest.approx(3 * step)


def test_an_engines_own_all_reduce_replaces_the_ring_where_it_is_faster(tiny):
    batch = tiny.operator(tiny.gated, Role.GENERATION, tiny.layout(1, 1, 2), prefill=False)
    ring = tiny.price("analytical.tensor_parallel", batch)
    vllm = tiny.price("analytical.tensor_parallel", attrs.evolve(batch, execution=Execution(framework="vllm")))
    # two reduces in two layers over three steps; 2 (p-1)/p of 8 x 4 x 2 bytes at 10 B/s, without the ring's 2 s
    assert vllm == pytest.approx(2 * 2 * 3 * (framework("vllm").decode_reduce_s + 64 / 10))
    assert ring == pytest.approx(2 * 2 * 3 * (2 * 1 + 64 / 10))


def test_a_loop_takes_a_share_more_than_its_operators(tiny):
    batch = tiny.operator(tiny.gated, Role.TRAINING, tiny.layout())
    loop = attrs.evolve(batch, execution=Execution(framework="nemo-rl"))
    others = sum(
        tiny.price(name, loop)
        for name, term in tiny.terms.items()
        if name.startswith("analytical.") and term.target.value == "operator" and name != "analytical.loop_overhead"
    )
    assert tiny.price("analytical.loop_overhead", loop) == pytest.approx(framework("nemo-rl").loop_share * others)
    assert tiny.price("analytical.loop_overhead", batch) == 0.0


def test_every_coefficient_is_finite_and_not_negative():
    for name, used in FRAMEWORKS.items():
        for field, value in attrs.asdict(used).items():
            assert value is None or isinstance(value, bool) or 0 <= value < 100, (name, field)
