"""The profile ``host``: detected, measured once, kept."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import attrs
import numpy as np
import pytest
from rpeg_plugin_host import HOST, rpeg_check_plan, rpeg_hardware
from rpeg_plugin_host import profile as profile_module
from rpeg_plugin_host.fit import GemmFit, compute_bound, fit_gemm
from rpeg_plugin_host.loopback import Links
from rpeg_plugin_host.machine import cores, memory_bytes, processor
from rpeg_plugin_host.measure import Measurement, measure
from rpeg_plugin_host.profile import host_profile

from rpeg_core import Severity, load_plan
from rpeg_core.cli.main import main
from rpeg_core.testing.checks.samples import sample_plan
from rpeg_core.testing.conformance import Outcome, conformance

MEASURED = Measurement(
    at="2026-01-02T03:04+00:00",
    seconds=1.5,
    processes=2,
    gemm=GemmFit(peak_flops_per_s=4e10, gamma_m_rows=5.0, gamma_k_columns=30.0, median_error=0.1, shapes=20),
    copy_bytes_per_s=1e10,
    layer_s=1e-3,
    links=Links(latency_s=1e-5, one_way_bytes_per_s=2e9, both_ways_bytes_per_s=1e9),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache folder."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return tmp_path / "rpeg"


def ignore(text: str) -> None:
    """Nobody listens."""


def test_it_is_measured_once_and_says_so(cache: Path) -> None:
    calls: list[int] = []
    told: list[str] = []

    def measured(devices: int) -> Measurement:
        calls.append(devices)
        return MEASURED

    first = host_profile(told.append, measured=measured)
    assert host_profile(told.append, measured=measured) == first
    assert calls == [cores()]
    (file,) = cache.iterdir()
    assert [told[0].startswith("measuring this machine, once: "), told[1]] == [
        True,
        f"measured in 1.5 s, kept in {file}",
    ]


@pytest.mark.parametrize("damage", ["", "[]", '{"cores": 2}', "not json"])
def test_a_damaged_cache_is_measured_anew(cache: Path, damage: str) -> None:
    host_profile(ignore, measured=lambda devices: MEASURED)
    (file,) = cache.iterdir()
    file.write_text(damage)
    newer = attrs.evolve(MEASURED, copy_bytes_per_s=3e10)
    assert host_profile(ignore, measured=lambda devices: newer).device.memory_bandwidth_bytes_per_s == 3e10


def test_another_machine_or_version_is_measured_anew(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    host_profile(ignore, measured=lambda devices: MEASURED)
    monkeypatch.setattr(profile_module, "processor", lambda: "another")
    host_profile(ignore, measured=lambda devices: MEASURED)
    monkeypatch.setattr(profile_module.importlib.metadata, "version", lambda name: "9")
    host_profile(ignore, measured=lambda devices: MEASURED)
    assert len(list(cache.iterdir())) == 3


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv("XDG_CACHE_HOME", str(blocked))
    told: list[str] = []
    assert host_profile(told.append, measured=lambda devices: MEASURED).gpus_per_node == cores()
    assert told[1].startswith("measured in 1.5 s, not kept: ")


def test_devices_share_the_memory_and_sources_say_when() -> None:
    profile = host_profile(ignore, measured=lambda devices: MEASURED)
    assert profile.gpus_per_node == cores()
    assert profile.device.memory_bytes == memory_bytes() // cores()
    assert "at 2026-01-02T03:04+00:00" in profile.sources["device.peak_flops_per_s"]


def test_it_keeps_the_contract_of_hardware(monkeypatch: pytest.MonkeyPatch) -> None:
    host_profile(ignore, measured=lambda devices: MEASURED)
    (record,) = rpeg_hardware()
    failed = [result for result in conformance(record) if result.outcome is not Outcome.PASSED]
    assert not failed
    assert {result.check for result in conformance(record)} >= {"keeps", "sources", "quantities", "tiers"}


def test_listing_imports_no_numpy_and_measures_nothing(cache: Path) -> None:
    code = "import sys, rpeg_plugin_host as h; h.rpeg_hardware(); sys.exit('numpy' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    assert not cache.exists()


def test_more_devices_than_cores_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = sample_plan()
    cluster = attrs.evolve(plan.experiment.cluster, hardware="host")
    own = attrs.evolve(plan, experiment=attrs.evolve(plan.experiment, cluster=cluster))
    if plan.machine.gpus <= cores():
        pytest.skip("this machine has as many cores as the sample plan has GPUs")
    assert list(rpeg_check_plan(plan)) == []
    (remark,) = rpeg_check_plan(own)
    assert remark.severity is Severity.WARNING
    assert remark.message == f"the plan has {plan.machine.gpus} devices, this process may use {cores()} cores"


def test_an_experiment_for_this_machine_plans_as_it_is_written(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    host_profile(ignore, measured=lambda devices: MEASURED)
    assert main(["init", "--hardware", "host", "--algorithm", "ppo"]) == 0
    assert main(["plan", "experiment.yaml", "--strategy", "greedy"]) == 0
    plan = load_plan("plan.json")
    assert (plan.machine.gpus, plan.workload.bytes_per_element) == (cores(), 4)
    assert "measuring" not in capsys.readouterr().err


class TestDetection:
    """Against files as Linux writes them."""

    @pytest.fixture
    def root(self, tmp_path: Path) -> Path:
        root = tmp_path / "root"
        (root / "proc" / "self").mkdir(parents=True)
        (root / "sys" / "fs" / "cgroup" / "a" / "b").mkdir(parents=True)
        (root / "proc" / "self" / "cgroup").write_text("0::/a/b\n")
        return root

    def test_without_limits_it_is_what_the_scheduler_allows(self, root: Path) -> None:
        assert cores(root) == len(os.sched_getaffinity(0))
        assert memory_bytes(root) == os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")

    def test_the_least_limit_of_the_group_and_those_above_it_counts(self, root: Path) -> None:
        base = root / "sys" / "fs" / "cgroup"
        (base / "a" / "b" / "cpu.max").write_text("max 100000\n")
        (base / "a" / "cpu.max").write_text("50000 100000\n")
        (base / "a" / "b" / "memory.max").write_text("max\n")
        (base / "memory.max").write_text("1073741824\n")
        assert (cores(root), memory_bytes(root)) == (1, 2**30)

    def test_the_first_version_of_control_groups(self, root: Path) -> None:
        base = root / "sys" / "fs" / "cgroup"
        for name, text in {
            "cpu/cpu.cfs_quota_us": "60000",
            "cpu/cpu.cfs_period_us": "100000",
            "memory/memory.limit_in_bytes": "1000000",
        }.items():
            (base / name).parent.mkdir(exist_ok=True)
            (base / name).write_text(text)
        assert (cores(root), memory_bytes(root)) == (1, 1_000_000)

    def test_the_processor_is_named(self, root: Path) -> None:
        (root / "proc" / "cpuinfo").write_text("processor\t: 0\nmodel name\t: Example 9000\n")
        assert processor(root) == "Example 9000"


class TestFit:
    def test_it_finds_the_parameters_that_made_the_rates(self) -> None:
        rows, width = (a.ravel() for a in np.meshgrid([4.0, 16, 64, 256, 1024], [64.0, 128, 256, 512]))
        rates = 5e10 * rows / (rows + 7.0) * width / (width + 90.0)
        found = fit_gemm(rows, width, rates)
        assert found.peak_flops_per_s == pytest.approx(5e10, rel=0.01)
        assert found.gamma_m_rows == pytest.approx(7.0, rel=0.02)
        assert found.gamma_k_columns == pytest.approx(90.0, rel=0.02)
        assert found.median_error < 0.002

    def test_a_bad_shape_among_many_does_not_move_it(self) -> None:
        rows, width = (a.ravel() for a in np.meshgrid([4.0, 16, 64, 256, 1024], [64.0, 128, 256, 512]))
        rates = 5e10 * rows / (rows + 7.0) * width / (width + 90.0)
        rates[3] /= 10
        assert fit_gemm(rows, width, rates).peak_flops_per_s == pytest.approx(5e10, rel=0.02)

    def test_what_memory_limits_is_left_out(self) -> None:
        ones = np.ones(2)
        kept = compute_bound(np.array([1.0, 512]), 512 * ones, 512 * ones, np.array([1e9, 4e10]), 1e10)
        assert kept.tolist() == [False, True]


@pytest.mark.slow
def test_this_machine_can_be_measured() -> None:
    found = measure(2)
    assert found.processes == 2
    assert 1e8 < found.gemm.peak_flops_per_s < 1e13
    assert 1e8 < found.copy_bytes_per_s < 1e13
    assert 1e-7 < found.links.latency_s < 1e-2
    assert json.dumps(attrs.asdict(found))
    assert HOST.measure(ignore).gpus_per_node == cores()
