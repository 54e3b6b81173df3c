"""Calibration: fits find the numbers that made the measurements, and a profile file holds them."""

from __future__ import annotations

import itertools
from pathlib import Path

import attrs
import numpy as np
import pytest

from rpeg_core import Registry
from rpeg_core.calibration.kernels import fit_gemms, fit_link
from rpeg_core.calibration.measurements import GemmTime, Measurements, MessageTime, OperatorTime
from rpeg_core.calibration.profile import calibrated
from rpeg_core.calibration.refine import errors_of, predicted_s, refine
from rpeg_core.calibration.trace import observations_of, refined_from_traces
from rpeg_core.errors import ExperimentError, TraceFileError, UsageError
from rpeg_core.ir import Role
from rpeg_core.planning.assignment import Mode
from rpeg_core.spec.execution import Recompute
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import AlphaBeta, Device, GemmEfficiency, HardwareProfile, LinkTier
from rpeg_core.spec.model_configs import model_from_inline
from rpeg_core.spec.profile_file import read_profile, write_profile
from rpeg_core.spec.software import Software
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.checks.hardware import checks
from rpeg_core.validation.replay import operator_terms

SOFTWARE = Software(
    backend="mine",
    launches="synchronous",
    attention="unfused",
    scored="responses",
    gradient_bytes=4.0,
    forward_layer_s=7e-4,
    backward_layer_s=9e-4,
    pass_s=3e-4,
    update_s=2e-3,
    update_layer_s=5e-4,
    token_layer_s=5e-4,
    token_step_s=2e-4,
    token_sequence_s=4e-6,
    token_exchange_s=3e-4,
    pointwise_passes=5.0,
    sampling_passes=3.0,
    stream_share=1.5,
    optimizer_passes=2.0,
)


def hardware(software: Software | None = SOFTWARE) -> HardwareProfile:
    link = LinkTier(collective=AlphaBeta(5e-5, 1e9), p2p=AlphaBeta(2e-5, 2e9))
    return HardwareProfile(
        name="mine",
        summary="x",
        gpus_per_node=2,
        device=Device(memory_bytes=10**10, memory_bandwidth_bytes_per_s=2e10, peak_flops_per_s=9e10),
        tiers=(link, link, link),
        efficiency=GemmEfficiency(gamma_m_rows=4.0, gamma_k_columns=20.0),
        non_gemm_layer_s=0.0,
        non_gemm_reference_batch=1,
        software=software,
    )


@pytest.fixture(scope="module")
def terms():
    return operator_terms(Registry(), ("analytical",))


def operators(profile: HardwareProfile, terms, *, node: bool = False) -> tuple[OperatorTime, ...]:
    """Times that the terms themselves give to operators of several sizes and layouts."""
    found = []
    layouts = [(1, 1, 1, 1), (2, 1, 1, 1), (1, 1, 2, 1), (1, 2, 1, 2)]
    for (hidden, layers), sequences, layout, role in itertools.product(
        ((64, 2), (128, 4), (256, 4)), (16, 64), layouts, (Role.GENERATION, Role.INFERENCE, Role.TRAINING)
    ):
        dimensions = {"layers": layers, "hidden": hidden, "heads": 4, "kv_heads": 2, "ffn": 2 * hidden, "vocab": 256}
        data, pipeline, tensor, microbatches = layout
        blank = OperatorTime(
            name=f"{role.value} {hidden} {sequences} {layout}",
            role=role,
            model=model_from_inline(dimensions, "m"),
            workload=Workload(prompts=sequences, prompt_tokens=16, response_tokens=16, bytes_per_element=4),
            data=data,
            pipeline=pipeline,
            tensor=tensor,
            microbatches=microbatches,
            seconds=1.0,
            node=node,
        )
        found.append(attrs.evolve(blank, seconds=float(predicted_s(profile, [blank], terms)[0])))
    return tuple(found)


def test_an_operator_is_priced_as_it_was_executed(terms) -> None:
    """Next to others that differ in nothing but their recomputation, and as it is alone."""
    profile = hardware()
    training = next(each for each in operators(profile, terms) if each.role is Role.TRAINING)
    modes = [Mode(), *(Mode(recompute=value) for value in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))]
    each = [attrs.evolve(training, mode=mode) for mode in modes]
    unsaid, none, selective, full = predicted_s(profile, each, terms)
    assert unsaid == none  # what the software does
    assert none < selective < full
    assert [float(predicted_s(profile, [one], terms)[0]) for one in each] == [unsaid, none, selective, full]


def gemms(profile: HardwareProfile) -> tuple[GemmTime, ...]:
    found = []
    for m, (n, k) in itertools.product((1, 16, 256, 2048), ((64, 64), (256, 256), (1024, 256), (1024, 1024))):
        eta = m / (m + profile.efficiency.gamma_m_rows)
        eta *= min(n, k) / (min(n, k) + profile.efficiency.gamma_k_columns)
        seconds = 1e-9 + 2.0 * m * n * k / (profile.device.peak_flops_per_s * eta)
        found.append(GemmTime(rows=m, columns=n, inner=k, seconds=seconds))
    return tuple(found)


def messages(pattern: str, link: AlphaBeta) -> tuple[MessageTime, ...]:
    """Of two ranks."""
    found = []
    for size in (64, 4096, 2**18, 2**24):
        steps, share = (2.0, 1.0) if pattern == "all_reduce" else (1.0, 1.0)
        seconds = steps * link.latency_s + share * size / link.bandwidth_bytes_per_s
        found.append(MessageTime(pattern=pattern, ranks=2, bytes=size, seconds=seconds))
    return tuple(found)


def measurements(profile: HardwareProfile, terms) -> Measurements:
    blank = {field.name: field.default for field in attrs.fields(Software) if field.name.endswith(("_s", "_passes"))}
    return Measurements(
        device="Acme One",
        versions="mine 1.0",
        devices=2,
        memory_bytes=10**10,
        bytes_per_element=4,
        gemms=gemms(profile),
        messages=(
            *messages("all_reduce", profile.tiers[0].collective),
            *messages("p2p", profile.tiers[0].p2p),
        ),
        operators=operators(profile, terms),
        copy_bytes_per_s=profile.device.memory_bandwidth_bytes_per_s,
        node_s=None,
        software=attrs.evolve(SOFTWARE, **blank),
        seconds=1.0,
        at="2026-01-01T00:00+00:00",
    )


def test_the_fit_of_products_finds_the_curve_that_made_them() -> None:
    profile = hardware()
    found = fit_gemms(gemms(profile), bytes_per_element=4, bandwidth_bytes_per_s=1e15)
    assert found.peak_flops_per_s == pytest.approx(9e10, rel=0.05)
    assert found.efficiency.gamma_m_rows == pytest.approx(4.0, rel=0.2)
    assert found.efficiency.gamma_k_columns == pytest.approx(20.0, rel=0.2)
    assert found.median_error < 0.02


@pytest.mark.parametrize("pattern", ["all_reduce", "p2p"])
def test_the_fit_of_messages_finds_latency_and_bandwidth_despite_an_outlier(pattern: str) -> None:
    link = AlphaBeta(3e-5, 1.5e9)
    disturbed = list(messages(pattern, link) * 3)
    disturbed[0] = attrs.evolve(disturbed[0], seconds=20 * disturbed[0].seconds)
    found = fit_link(disturbed)
    assert found.link.latency_s == pytest.approx(3e-5, rel=0.02)
    assert found.link.bandwidth_bytes_per_s == pytest.approx(1.5e9, rel=0.02)


def test_a_calibration_predicts_the_operators_that_it_measured_and_others(terms) -> None:
    truth = hardware()
    found = calibrated(measurements(truth, terms), terms)
    assert found.errors.mape < 0.05
    others = [attrs.evolve(each, workload=attrs.evolve(each.workload, prompts=32)) for each in found.operators[::5]]
    assert predicted_s(found.profile, others, terms) == pytest.approx(predicted_s(truth, others, terms), rel=0.12)
    for _, check in checks(found.profile):
        check(found.profile)


def test_a_parameter_that_nothing_tells_stays_and_says_so(terms) -> None:
    start = attrs.evolve(hardware(), software=attrs.evolve(SOFTWARE, token_layer_s=9e-4, update_s=5e-3))
    seen = [each for each in operators(hardware(), terms) if each.role is Role.GENERATION]
    found = refine(start, seen, terms, spread=1.0)
    assert found.profile.software.update_s == 5e-3
    assert "update_s" not in {parameter.name for parameter in found.parameters}
    assert errors_of(seen, found.after).mape < 0.03 < errors_of(seen, found.before).mape


def test_the_software_of_another_role_is_not_moved(terms) -> None:
    seen = [each for each in operators(hardware(), terms) if each.role is Role.INFERENCE]
    found = refine(hardware(), seen, terms, spread=1.0)
    assert found.profile.software.token_layer_s == SOFTWARE.token_layer_s


def test_a_file_holds_the_profile(tmp_path: Path, terms) -> None:
    profile = calibrated(measurements(hardware(), terms), terms).profile
    write_profile(tmp_path / "mine.yaml", profile, {"note": 1})
    assert attrs.evolve(read_profile(tmp_path / "mine.yaml"), name=profile.name) == profile
    assert [path.name for path in tmp_path.iterdir()] == ["mine.yaml"]


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("memory_bytes:", "memory_bites:", "memory_bites"),
        ("peak_flops_per_s: 9", "peak_flops_per_s: fast # 9", "fast"),
        ("inter_rack:", "moon:", "inter_rack"),
        ("schema: 1", "schema: 7", "schema"),
        ("gamma_m_rows: 4.0", "gamma_m_rows: -4.0", "gamma_m_rows"),
        ("latency_s: 5.0e-05", "latency_s: -5.0e-05", "latency_s"),
        ("stream_share: 1.5", "stream_share: 0.0", "stream_share"),
        ("backend: mine", "backend: 3", "3"),
    ],
)
def test_a_malformed_file_is_one_error_that_names_the_place(tmp_path: Path, old: str, new: str, said: str) -> None:
    path = tmp_path / "mine.yaml"
    write_profile(path, hardware())
    text = path.read_text()
    assert old in text
    path.write_text(text.replace(old, new, 1))
    with pytest.raises(ExperimentError) as caught:
        read_profile(path)
    assert str(path) in caught.value.what
    assert any(said in fact for fact in caught.value.facts)
    assert "rpeg calibrate" in caught.value.hint


def test_an_experiment_names_the_file_from_its_own_folder(tmp_path: Path) -> None:
    write_profile(tmp_path / "mine.yaml", hardware())
    dimensions = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 16}
    document = {
        "algorithm": "grpo",
        "models": {"actor": {"config": dimensions}, "reference": {"same_as": "actor"}},
        "workload": {"prompts": 8, "prompt_tokens": 4, "response_tokens": 4, "bytes_per_element": 4},
        "cluster": {"hardware": "./mine.yaml"},
    }
    experiment = parse_experiment(document, base_dir=tmp_path)
    assert experiment.cluster.hardware == str(tmp_path / "mine.yaml")
    loaded = Registry().get("hardware", experiment.cluster.hardware)
    assert (loaded.record.name, loaded.record.software) == (experiment.cluster.hardware, SOFTWARE)
    assert parse_experiment(experiment.document()) == experiment


def test_a_trace_in_virtual_time_and_a_profile_without_software_are_refused(terms) -> None:
    from rpeg_core.runtime.trace import Trace, TraceHeader

    with pytest.raises(UsageError, match="no measured software"):
        refined_from_traces(hardware(None), operators(hardware(), terms)[:3], terms, what="t")
    header = attrs.evolve(_header(TraceHeader), clock="virtual")
    with pytest.raises(TraceFileError, match="virtual"):
        observations_of("t", None, Trace(header=header, records=()))


def _header(kind: type):
    required = {field.name: 0 for field in attrs.fields(kind) if field.default is attrs.NOTHING}
    return kind(**required)


def test_refining_from_a_run_finds_what_dispatching_costs(terms) -> None:
    truth = attrs.evolve(hardware(), software=attrs.evolve(SOFTWARE, node_s=4e-3))
    seen = operators(truth, terms, node=True)
    found = refined_from_traces(hardware(), seen, terms, what="a run")
    assert found.after.mape < 0.02 < found.before.mape
    assert found.profile.software.node_s == pytest.approx(4e-3, rel=0.25)
    assert "a run" in found.profile.sources["software.node_s"]


def test_times_of_the_host_add_where_it_is_the_device_and_hide_where_it_runs_ahead(terms) -> None:
    (point,) = [each for each in operators(hardware(), terms) if each.name == "inference 256 64 (1, 1, 1, 1)"]
    free = attrs.evolve(SOFTWARE, forward_layer_s=0.0, pass_s=0.0)
    costly = attrs.evolve(free, forward_layer_s=1e-3)

    def seconds(software: Software) -> float:
        return float(predicted_s(hardware(software), [point], terms)[0])

    assert seconds(costly) - seconds(free) == pytest.approx(4 * 1e-3)
    ahead = attrs.evolve(costly, launches="asynchronous")
    assert seconds(ahead) == pytest.approx(max(seconds(free), 4e-3), rel=0.2)
    assert np.isfinite(seconds(ahead))
