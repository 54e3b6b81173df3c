"""``rpeg calibrate`` with real workers: complete, progressing, and without a trace when interrupted."""

from __future__ import annotations

import os
from pathlib import Path

import attrs
import pytest
import rpeg_plugin_megatron.calibrate as calibrate
from rpeg_plugin_megatron import MEGATRON
from rpeg_plugin_megatron.calibrate_points import points

from rpeg_core.calibration.measurements import CalibrationRequest
from rpeg_core.cli.main import main
from rpeg_core.ir import Role
from rpeg_core.spec.profile_file import read_profile


@pytest.fixture(scope="module")
def measured():
    said: list[tuple[float, str]] = []
    request = CalibrationRequest(progress=lambda share, what: said.append((share, what)), quick=True, device="cpu")
    return MEGATRON.calibrate(request), said


def test_everything_is_measured(measured) -> None:
    found, said = measured
    wanted = points(cpu=True, ranks=min(2, found.devices), quick=True)
    assert [(each.rows, each.columns, each.inner) for each in found.gemms] == list(wanted.gemms)
    assert [each.name for each in found.operators] == [point.name for point in wanted.operators]
    assert {each.role for each in found.operators} == {Role.GENERATION, Role.INFERENCE, Role.TRAINING}
    times = [each.seconds for each in (*found.gemms, *found.messages, *found.operators)]
    assert min(times) > 0
    assert found.copy_bytes_per_s > 1e8
    assert found.bytes_per_element == 4
    shares = [share for share, _ in said]
    assert shares == sorted(shares)
    assert shares[-1] == 1.0


def test_work_that_is_twice_as_much_takes_longer(measured) -> None:
    found, _ = measured
    largest = max(found.gemms, key=lambda each: each.rows * each.columns * each.inner)
    smallest = min(found.gemms, key=lambda each: each.rows * each.columns * each.inner)
    assert largest.seconds > 10 * smallest.seconds


def test_an_interrupted_calibration_leaves_no_process_and_no_file(tmp_path: Path) -> None:
    children = Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children")
    before = children.read_text()

    def interrupt(share: float, what: str) -> None:
        if share > 0:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        MEGATRON.calibrate(CalibrationRequest(progress=interrupt, quick=True, device="cpu"))
    assert children.read_text() == before


def test_the_command_writes_a_profile_that_an_experiment_accepts(
    measured, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(calibrate, "measure", lambda request: measured[0])
    monkeypatch.chdir(tmp_path)
    assert main(["calibrate", "-o", "mine.yaml"]) == 0
    said = capsys.readouterr().out
    assert "generation, d 32" in said
    assert "next: cluster: {hardware: ./mine.yaml}" in said
    profile = read_profile(tmp_path / "mine.yaml")
    assert profile.software is not None
    assert profile.software.backend == "megatron"
    assert "measured by rpeg calibrate on" in profile.sources["software.token_layer_s"]
    (tmp_path / "experiment.yaml").write_text(
        "algorithm: grpo\n"
        "models: {actor: {config: {layers: 2, hidden: 64, heads: 4, kv_heads: 2, ffn: 128, vocab: 16}}, "
        "reference: {same_as: actor}}\n"
        "workload: {prompts: 16, rollouts_per_prompt: 4, prompt_tokens: 4, response_tokens: 4, bytes_per_element: 4}\n"
        "cluster: {hardware: ./mine.yaml}\n"
        "settings: {grpo: {reward_seconds_per_sample: 0.00001}}\n"
        "search: {strategy: greedy}\n"
    )
    assert main(["plan", "experiment.yaml", "-o", "plan.json"]) == 0
    assert main(["explain", "plan.json"]) == 0


def test_a_command_that_is_interrupted_writes_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupted(request: CalibrationRequest) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(calibrate, "measure", interrupted)
    assert main(["calibrate", "-o", str(tmp_path / "mine.yaml")]) == 130
    assert list(tmp_path.iterdir()) == []


def test_without_a_gpu_cuda_is_refused_before_a_process_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert main(["calibrate", "--device", "cuda", "-o", str(tmp_path / "mine.yaml")]) == 3
    error = capsys.readouterr().err
    assert error.endswith("error[backend]: this machine shows no GPU\nhint: --device cpu measures its cores\n")


def test_gpus_have_sizes_of_their_own() -> None:
    gpu, cpu = points(cpu=False, ranks=2, quick=False), points(cpu=True, ranks=2, quick=False)
    assert max(gpu.message_bytes) > max(cpu.message_bytes)
    assert len({attrs.astuple(point, recurse=False)[1] for point in gpu.operators}) == 3
    assert all(point.workload.bytes_per_element == 2 for point in gpu.operators)
