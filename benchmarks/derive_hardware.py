"""Re-derive every fitted or scaled number of the GPU profiles under ``plugins/hardware``.

    python benchmarks/derive_hardware.py --data ../shared/data/measured [--check]

Without ``--check`` it prints, per profile, each number beside the one the profile ships, and the quality of
the fits. With ``--check`` it exits 1 when a shipped number differs by more than rounding to four significant
digits, or when a source text quotes another fit error than the one found here. One function per method:

* :func:`fit_gemm`: ``F_peak, gamma_M, gamma_K`` of ``F * m/(m+gamma_M) * w/(w+gamma_K)``, ``w = min(n, k)``,
  on the compute-bound GEMM shapes (paper, D-A c).
* :func:`streaming_bandwidth`: ``BW_mem``, the median rate at which thin GEMMs read large weights.
* :func:`fit_all_reduce`: ``alpha, beta`` of the ring expression ``2(p-1) alpha + 2(p-1)/p M beta``.
* :func:`fit_attention`: ``F_a, gamma_l`` of ``F_a * l / (l + gamma_l)`` on causal prefill attention.
* :func:`fit_send_receive`: ``alpha, beta`` of ``alpha + M beta`` from two-GPU AlltoAll, which NCCL composes
  of one send and one receive per rank, M being the half of the buffer that leaves the GPU.

What the tables do not hold (networks, GH200, A100 40 GB) comes from the figures in :class:`Published`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path

import attrs
import numpy as np

from rpeg_core.spec.machine import HardwareProfile

REPOSITORY = Path(__file__).resolve().parents[1]
TIERS = ("intra_node", "inter_node", "inter_rack")
ROUNDING = 6e-4  # half a unit of the fourth significant digit is 5e-4 at most; the rest is solver noise
SMALLEST_MESSAGE_BYTES = 1024
ATTENTION_HEAD_DIM = 128  # of the attention table


class Published:
    """Figures that the measured tables do not hold; the profiles' ``sources`` say more about each."""

    NIC_200G_BYTES_PER_S = 24e9  # NVIDIA/nccl-tests#119, NVIDIA/nccl#812
    NIC_400G_BYTES_PER_S = 48e9  # NVIDIA/nccl-tests#319
    NVLINK_HOP_S = 0.6e-6  # NVIDIA/nccl src/graph/tuning.cc, hwLat, ring LL, NVLINK
    NETWORK_HOP_S = 2.7e-6  # the same, NET
    QUANTUM_SWITCH_S = 130e-9  # NVIDIA QM8700 data sheet
    ROSETTA_SWITCH_S = 350e-9  # De Sensi et al., SC20
    EXTRA_SWITCHES = 2  # leaf-spine-leaf instead of one leaf
    A100_40GB_BANDWIDTH = 1.555e12  # NVIDIA A100 data sheet
    ATHENA_GPUS_PER_NIC = 2  # the paper, appendix B: four interfaces for eight GPUs
    HBM2E_BANDWIDTH = 2.4e12  # pytorch/torchtitan benchmarks: "H100 96 GB HBM2e"
    GH200_BANDWIDTH = 4.0e12  # NVIDIA GH200 data sheet, 96 GB HBM3
    GH200_LINK_BYTES_PER_S = 160e9  # the paper, appendix B: per GPU pair
    ALPS_SEND_RECEIVE_BYTES_PER_S = 24.2382e9  # NVIDIA/nccl#1272
    ALPS_ALL_REDUCE_BYTES_PER_S = 91.04e9  # eth-cscs/cscs-reframe-tests: bus bandwidth of 4-GPU nodes


@attrs.frozen
class Gemm:
    """The result of :func:`fit_gemm`."""

    peak_flops_per_s: float
    gamma_m_rows: float
    gamma_k_columns: float
    median_error: float
    shapes: int


@attrs.frozen
class Link:
    """Latency and bandwidth of one fit, with its median and its largest relative error."""

    latency_s: float
    bandwidth_bytes_per_s: float
    median_error: float
    largest_error: float


@attrs.frozen
class Measured:
    """The tables: data-sheet values, TFLOP/s of large GEMMs (trtllm, bfloat16), GEMMs ``(m, n, k, seconds)``, prefill
    attention ``(tokens, FLOPs, seconds)`` and NCCL sweeps ``(bytes, seconds)``."""

    spec: dict[str, dict[str, float]]
    large_gemm: dict[str, float]
    gemm: dict[str, np.ndarray]
    attention: dict[str, np.ndarray]
    nccl: dict[tuple[str, str, int], np.ndarray]


def read(folder: Path) -> Measured:
    """Read the tables.

    GEMM rows of vllm are left out, since the data's README calls them optimistic; of the NCCL sweeps of a
    system only the newest version is kept.
    """
    systems = json.loads((folder / "operator_summary.json").read_text())["systems"]
    spec = {name: system["spec"] for name, system in systems.items()}
    gemm: dict[str, list[tuple[float, ...]]] = {}
    for row in _rows(folder / "gemm_bf16.csv.gz"):
        if row["framework"] != "vllm":
            gemm.setdefault(row["system"], []).append(
                (float(row["m"]), float(row["n"]), float(row["k"]), float(row["time_us"]) * 1e-6)
            )
    nccl = [row for row in _rows(folder / "collectives.csv.gz") if row["lib"] == "NCCL"]
    newest: dict[str, tuple[int, ...]] = {}
    for row in nccl:
        newest[row["system"]] = max(newest.get(row["system"], (0,)), _version(row))
    sweeps: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row in nccl:
        if _version(row) == newest[row["system"]] and int(row["bytes"]) >= SMALLEST_MESSAGE_BYTES:
            key = (row["system"], row["primitive"], int(row["n_gpus"]))
            sweeps.setdefault(key, []).append((float(row["bytes"]), float(row["time_us"]) * 1e-6))
    attention: dict[str, list[tuple[float, ...]]] = {}
    for row in _rows(folder / "attention_bf16.csv.gz"):
        heads = int(row["batch_size"]) * int(row["num_heads"])
        length = int(row["isl"])
        if row["kind"] == "context" and row["framework"] == "vllm" and heads >= 16 and length >= 256:
            flops = 2.0 * heads * ATTENTION_HEAD_DIM * length**2  # causal: half of 4 d l^2
            attention.setdefault(row["system"], []).append((length, flops, float(row["time_us"]) * 1e-6))
    return Measured(
        spec,
        {name: _large_gemm(system["gemm"]) for name, system in systems.items()},
        {k: np.array(v) for k, v in gemm.items()},
        {k: np.array(v) for k, v in attention.items()},
        {k: np.array(sorted(v)) for k, v in sweeps.items()},
    )


def _large_gemm(gemm: list[dict[str, object]]) -> float:
    """``tflops_median_ge4096`` of bfloat16, trtllm."""
    found = [e for e in gemm if e["framework"] == "trtllm" and e["dtype"] == "bfloat16"]
    return float(found[-1]["tflops_median_ge4096"])


def _rows(path: Path) -> Iterator[dict[str, str]]:
    with gzip.open(path, "rt", newline="") as file:
        yield from csv.DictReader(file)


def _version(row: dict[str, str]) -> tuple[int, ...]:
    return tuple(int(part) for part in row["version"].split("."))


def fit_gemm(data: Measured, system: str) -> Gemm:
    """Least squares on the logarithm of FLOP/s with the soft-L1 loss (scale 0.1), by reweighted Gauss-Newton.

    Compute-bound shapes are those whose arithmetic intensity ``mnk / (mk + kn + mn)`` FLOP/byte lies above
    the ridge of the data sheet, peak FLOP/s over bytes/s; below it the roofline's memory branch applies.
    """
    m, n, k, seconds = data.gemm[system].T
    spec = data.spec[system]
    bound = m * n * k / (m * k + k * n + m * n) > spec["bfloat16_tc_flops"] / spec["mem_bw"]
    rows, width = m[bound], np.minimum(n, k)[bound]
    measured = np.log((2 * m * n * k / seconds)[bound])

    def residual(p: np.ndarray) -> np.ndarray:
        return p[0] - np.log1p(np.exp(p[1]) / rows) - np.log1p(np.exp(p[2]) / width) - measured

    p = np.log([0.75 * spec["bfloat16_tc_flops"], 100.0, 100.0])
    for _ in range(200):
        r = residual(p)
        weight = (1 + (r / 0.1) ** 2) ** -0.25  # square root of the derivative of the soft-L1 loss
        gamma_m, gamma_k = np.exp(p[1:])
        slopes = [np.ones_like(r), -gamma_m / (rows + gamma_m), -gamma_k / (width + gamma_k)]
        step = np.linalg.lstsq(np.stack(slopes, axis=1) * weight[:, None], -r * weight, rcond=None)[0]
        p = p + step
        if np.abs(step).max() < 1e-10:
            break
    error = float(np.median(np.abs(np.expm1(residual(p)))))
    peak, gamma_m, gamma_k = np.exp(p)
    return Gemm(float(peak), float(gamma_m), float(gamma_k), error, int(bound.sum()))


@attrs.frozen
class Attention:
    """The result of :func:`fit_attention`."""

    flops_per_s: float
    gamma_tokens: float
    median_error: float
    shapes: int


def fit_attention(data: Measured, system: str) -> Attention:
    """Least squares on the logarithm of FLOP/s with the soft-L1 loss (scale 0.1), as :func:`fit_gemm`.

    Rows of vllm, whose kernels (FlashAttention 2 and 3, FlashInfer) frameworks train with too; at least 16 heads
    over the batch, 256 tokens or more.
    """
    length, flops, seconds = data.attention[system].T
    measured = np.log(flops / seconds)
    p = np.array([measured.max(), np.log(1000.0)])
    for _ in range(200):
        gamma = np.exp(p[1])
        r = p[0] - np.log1p(gamma / length) - measured
        weight = (1 + (r / 0.1) ** 2) ** -0.25
        slopes = np.stack([np.ones_like(r), -gamma / (length + gamma)], axis=1)
        step = np.linalg.lstsq(slopes * weight[:, None], -r * weight, rcond=None)[0]
        p = p + step
        if np.abs(step).max() < 1e-10:
            break
    error = float(np.median(np.abs(np.expm1(p[0] - np.log1p(np.exp(p[1]) / length) - measured))))
    return Attention(float(np.exp(p[0])), float(np.exp(p[1])), error, len(length))


def streaming_bandwidth(data: Measured, system: str) -> float:
    """Median bytes/s of the GEMMs with at most 16 rows over weights of at least 256 MB, more than twice the
    largest L2 cache (the rule behind ``weight_stream_GBps`` of operator_summary.json)."""
    m, n, k, seconds = data.gemm[system].T
    thin = (m <= 16) & (2 * n * k >= 256e6)
    return float(np.median((2 * (m * k + k * n + m * n) / seconds)[thin]))


def _fit_link(sweep: np.ndarray, steps: float, volume: float) -> Link:
    """Least squared relative error of ``steps * alpha + volume * M * beta``; linear, so in closed form."""
    size, seconds = sweep.T
    design = np.stack([np.full_like(size, steps), volume * size], axis=1) / seconds[:, None]
    alpha, beta = np.linalg.lstsq(design, np.ones_like(size), rcond=None)[0]
    error = np.abs(design @ (alpha, beta) - 1)
    return Link(float(alpha), float(1 / beta), float(np.median(error)), float(error.max()))


def fit_all_reduce(data: Measured, system: str, p: int) -> Link:
    """NCCL AllReduce over the p GPUs of a node, 1 KB to 512 MB, M the buffer of each GPU."""
    return _fit_link(data.nccl[system, "all_reduce", p], 2 * (p - 1), 2 * (p - 1) / p)


def fit_send_receive(data: Measured, system: str) -> Link:
    """NCCL AlltoAll between two GPUs: half the buffer crosses the link in each direction."""
    return _fit_link(data.nccl[system, "alltoall", 2], 1, 1 / 2)


def bus_bandwidth(data: Measured, system: str, p: int) -> float:
    """``2(p-1)/p M / T`` of the largest AllReduce."""
    size, seconds = data.nccl[system, "all_reduce", p][-1]
    return float(2 * (p - 1) / p * size / seconds)


def non_gemm_layer_s(bandwidth: float) -> float:
    """c_ng: ten memory passes over 8 sequences of 640 tokens, 4096 elements of 2 bytes.

    Two norms (one read, one write each) and two residual additions (two reads, one write each), at the shape
    of the paper's model validation.
    """
    return 10 * 8 * 640 * 4096 * 2 / bandwidth


@attrs.frozen
class Derivation:
    """What a profile should say: numbers by dotted path, and the fit errors its source texts should quote."""

    numbers: dict[str, float]
    errors: dict[str, float]


def derive(data: Measured) -> dict[str, Derivation]:
    """Every fitted or scaled number, by profile name."""
    pub = Published
    profiles = {}
    for name, system, nic, memory_scale in (
        ("a100-80gb", "A100-SXM-80GB", pub.NIC_200G_BYTES_PER_S, 1.0),
        (
            "a100-40gb",
            "A100-SXM-80GB",
            pub.NIC_200G_BYTES_PER_S / pub.ATHENA_GPUS_PER_NIC,
            pub.A100_40GB_BANDWIDTH / data.spec["A100-SXM-80GB"]["mem_bw"],
        ),
        ("h100", "H100-SXM-80GB", pub.NIC_400G_BYTES_PER_S, 1.0),
        ("h200", "H200", pub.NIC_400G_BYTES_PER_S, 1.0),
        ("b200", "B200", pub.NIC_400G_BYTES_PER_S, 1.0),
    ):
        profiles[name] = _profile(
            gemm=fit_gemm(data, system),
            attention=fit_attention(data, system),
            memory=streaming_bandwidth(data, system) * memory_scale,
            collective=fit_all_reduce(data, system, 8),
            p2p=fit_send_receive(data, system),
            network=(nic, nic),
            switch_s=pub.QUANTUM_SWITCH_S,
        )
    h100 = "H100-SXM-80GB"
    link = pub.GH200_LINK_BYTES_PER_S * bus_bandwidth(data, h100, 4) / data.spec[h100]["intra_node_bw"]
    profiles["h100-hbm2e"] = _profile(
        gemm=fit_gemm(data, h100),
        attention=fit_attention(data, h100),
        memory=streaming_bandwidth(data, h100) * pub.HBM2E_BANDWIDTH / data.spec[h100]["mem_bw"],
        collective=fit_all_reduce(data, h100, 8),
        p2p=fit_send_receive(data, h100),
        network=(pub.NIC_400G_BYTES_PER_S, pub.NIC_400G_BYTES_PER_S),
        switch_s=pub.QUANTUM_SWITCH_S,
    )
    for name, system, shapes, ranks in (
        ("b300", "B300", "B200", 8),
        ("gb200", "GB200", "GB200", 4),
        ("gb300", "GB300", "GB200", 4),
    ):
        # The tables have no shapes of B300 and GB300: theirs are scaled by the speed of large GEMMs.
        scale = data.large_gemm[system] / data.large_gemm[shapes]
        gemm, attention = fit_gemm(data, shapes), fit_attention(data, shapes)
        profiles[name] = _profile(
            gemm=attrs.evolve(gemm, peak_flops_per_s=gemm.peak_flops_per_s * scale),
            attention=attrs.evolve(attention, flops_per_s=attention.flops_per_s * scale),
            memory=streaming_bandwidth(data, shapes),
            collective=fit_all_reduce(data, system, ranks),
            p2p=fit_send_receive(data, system),
            network=(pub.NIC_400G_BYTES_PER_S, pub.NIC_400G_BYTES_PER_S),
            switch_s=pub.QUANTUM_SWITCH_S,
        )
    profiles["gh200"] = _profile(
        gemm=fit_gemm(data, h100),
        attention=fit_attention(data, h100),
        memory=streaming_bandwidth(data, h100) * pub.GH200_BANDWIDTH / data.spec[h100]["mem_bw"],
        collective=fit_all_reduce(data, h100, 4),
        p2p=attrs.evolve(fit_send_receive(data, h100), bandwidth_bytes_per_s=link),
        network=(pub.ALPS_ALL_REDUCE_BYTES_PER_S / 4, pub.ALPS_SEND_RECEIVE_BYTES_PER_S),
        switch_s=pub.ROSETTA_SWITCH_S,
    )
    return profiles


def _profile(
    *,
    gemm: Gemm,
    attention: Attention,
    memory: float,
    collective: Link,
    p2p: Link,
    network: tuple[float, float],
    switch_s: float,
) -> Derivation:
    numbers = {
        "device.peak_flops_per_s": gemm.peak_flops_per_s,
        "device.memory_bandwidth_bytes_per_s": memory,
        "efficiency.gamma_m_rows": gemm.gamma_m_rows,
        "efficiency.gamma_k_columns": gemm.gamma_k_columns,
        "non_gemm_layer_s": non_gemm_layer_s(memory),
        "attention.flops_per_s": attention.flops_per_s,
        "attention.gamma_tokens": attention.gamma_tokens,
    }
    network_hop = Published.NETWORK_HOP_S - Published.NVLINK_HOP_S
    for kind, link, network_bandwidth in (("collective", collective, network[0]), ("p2p", p2p, network[1])):
        far = (0.0, network_hop, network_hop + Published.EXTRA_SWITCHES * switch_s)
        for tier, extra_s in zip(TIERS, far, strict=True):
            bandwidth = link.bandwidth_bytes_per_s if tier == "intra_node" else network_bandwidth
            numbers[f"tiers.{tier}.{kind}.latency_s"] = link.latency_s + extra_s
            numbers[f"tiers.{tier}.{kind}.bandwidth_bytes_per_s"] = bandwidth
    return Derivation(
        numbers,
        {
            "device.peak_flops_per_s": gemm.median_error,
            "attention.flops_per_s": attention.median_error,
            "tiers.intra_node.collective.latency_s": collective.median_error,
            "tiers.intra_node.p2p.latency_s": p2p.median_error,
        },
    )


def shipped() -> dict[str, HardwareProfile]:
    """The profiles in this checkout, whether or not they are installed."""
    profiles = {}
    for path in sorted(REPOSITORY.glob("plugins/hardware/*/src/rpeg_plugin_*/__init__.py")):
        if str(path.parents[1]) not in sys.path:
            sys.path.append(str(path.parents[1]))  # a profile module may import its neighbours
        spec = importlib.util.spec_from_file_location(path.parent.name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        for profile in module.rpeg_hardware():
            profiles[profile.name] = profile
    return profiles


def number(profile: HardwareProfile, path: str) -> float:
    """The number at a dotted path, tiers by name."""
    value = profile
    for part in path.split("."):
        value = value[TIERS.index(part)] if part in TIERS else getattr(value, part)
    return float(value)


def differences(profile: HardwareProfile, derivation: Derivation) -> list[str]:
    """What is wrong with a shipped profile; empty when nothing is."""
    wrong = []
    for path, derived in derivation.numbers.items():
        value = number(profile, path)
        if abs(value / derived - 1) > ROUNDING:
            wrong.append(f"{profile.name}: {path} is {value:.6g}, derived {derived:.6g}")
    for path, error in derivation.errors.items():
        quote = f"median error {error:.1%}"
        if quote not in profile.sources[path]:
            wrong.append(f"{profile.name}: the source of {path} does not say {quote!r}")
    return wrong


def _print_profile(profile: HardwareProfile, derivation: Derivation) -> None:
    print(f"\n{profile.name}\n  {'number':<48} {'shipped':>12} {'derived':>12} {'fit error':>10}")
    for path, derived in derivation.numbers.items():
        error = f"{derivation.errors[path]:.1%}" if path in derivation.errors else ""
        print(f"  {path:<48} {number(profile, path):>12.4g} {derived:>12.4g} {error:>10}")


def _print_all_reduce(data: Measured, profiles: dict[str, HardwareProfile]) -> None:
    print("\nNCCL AllReduce within a node: predicted and measured, microseconds")
    for name, system, p in (
        ("a100-80gb", "A100-SXM-80GB", 8),
        ("h100", "H100-SXM-80GB", 8),
        ("h200", "H200", 8),
        ("b200", "B200", 8),
        ("gh200", "H100-SXM-80GB", 4),
    ):
        line = profiles[name].tiers[0].collective
        measured = dict(data.nccl[system, "all_reduce", p])
        for size in (2**20, 2**26, 2**29):
            predicted = 2 * (p - 1) * line.latency_s + 2 * (p - 1) / p * size / line.bandwidth_bytes_per_s
            print(
                f"  {name:<10} p={p} {size >> 20:>4} MiB {predicted * 1e6:>8.1f} {measured[size] * 1e6:>8.1f}"
                f" {predicted / measured[size] - 1:>+6.0%}  ({system})"
            )


def main(arguments: list[str] | None = None) -> int:
    """Print the derivation, or check it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder with the measured tables")
    parser.add_argument("--check", action="store_true", help="exit 1 when a profile differs")
    options = parser.parse_args(arguments)
    data = read(options.data)
    profiles = shipped()
    wrong = []
    for name, derivation in derive(data).items():
        if not options.check:
            _print_profile(profiles[name], derivation)
        wrong += differences(profiles[name], derivation)
    if not options.check:
        _print_all_reduce(data, profiles)
    for line in wrong:
        print(line, file=sys.stderr)
    return 1 if options.check and wrong else 0


if __name__ == "__main__":
    sys.exit(main())
