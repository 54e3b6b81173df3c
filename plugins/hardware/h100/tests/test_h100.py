from collections.abc import Iterator

import attrs
import pytest
from rpeg_plugin_h100 import PROFILE, rpeg_hardware

from rpeg_core import HardwareProfile
from rpeg_core.spec.machine import Tier

DATA_SHEET = {"h100": (989e12, 3.35e12), "h100-hbm2e": (989e12, 2.4e12)}
LARGE_GEMM_FLOPS_PER_S = 770.9e12


def numeric_paths(value: object, prefix: str = "") -> Iterator[str]:
    """Dotted paths of all numbers of a profile, tiers by name."""
    if isinstance(value, tuple):
        for tier, item in zip(Tier, value, strict=True):
            yield from numeric_paths(item, f"{prefix}{tier.name.lower()}.")
    elif attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            item = getattr(value, field.name)
            if field.name in ("default_costs", "errors") or item is None:
                continue
            if isinstance(item, int | float):
                yield prefix + field.name
            else:
                yield from numeric_paths(item, f"{prefix}{field.name}.")


def test_hook_offers_the_profiles() -> None:
    assert [profile.name for profile in rpeg_hardware()] == ["h100", "h100-hbm2e"]


@pytest.mark.parametrize("profile", rpeg_hardware(), ids=lambda profile: profile.name)
def test_every_number_has_a_source_and_every_source_a_number(profile: HardwareProfile) -> None:
    assert sorted(numeric_paths(profile)) == sorted(profile.sources)
    assert all(profile.sources.values())


@pytest.mark.parametrize("profile", rpeg_hardware(), ids=lambda profile: profile.name)
def test_effective_values_stay_below_the_data_sheet(profile: HardwareProfile) -> None:
    flops, bandwidth = DATA_SHEET[profile.name]
    assert 0.7 < profile.device.peak_flops_per_s / flops < 1
    assert 0.75 < profile.device.memory_bandwidth_bytes_per_s / bandwidth < 0.9


@pytest.mark.parametrize("profile", rpeg_hardware(), ids=lambda profile: profile.name)
def test_farther_tiers_are_slower(profile: HardwareProfile) -> None:
    for kind in ("collective", "p2p"):
        links = [getattr(tier, kind) for tier in profile.tiers]
        assert links == sorted(links, key=lambda link: link.latency_s)
        assert links == sorted(links, key=lambda link: -link.bandwidth_bytes_per_s)


@pytest.mark.parametrize("profile", rpeg_hardware(), ids=lambda profile: profile.name)
def test_large_gemm_runs_at_the_published_rate(profile: HardwareProfile) -> None:
    """``tflops_median_ge4096`` of aiconfigurator-core 0.12.0, trtllm, against 4096 rows and columns."""
    efficiency = profile.efficiency
    eta = 4096 / (4096 + efficiency.gamma_m_rows) * 4096 / (4096 + efficiency.gamma_k_columns)
    assert profile.device.peak_flops_per_s * eta == pytest.approx(LARGE_GEMM_FLOPS_PER_S, rel=0.04)


def all_reduce_s(profile: HardwareProfile, p: int, size: int) -> float:
    link = profile.tiers[Tier.INTRA_NODE].collective
    return 2 * (p - 1) * link.latency_s + 2 * (p - 1) / p * size / link.bandwidth_bytes_per_s


@pytest.mark.parametrize(("size", "microseconds"), [(2**20, 27.37), (2**26, 324.7), (2**30, 4029.4)])
def test_all_reduce_against_a_run_that_was_not_fitted(size: int, microseconds: float) -> None:
    """NVIDIA/dgxc-benchmarking, nccl/README.md: eight H100, out of place."""
    assert all_reduce_s(PROFILE, 8, size) == pytest.approx(microseconds * 1e-6, rel=0.26)
