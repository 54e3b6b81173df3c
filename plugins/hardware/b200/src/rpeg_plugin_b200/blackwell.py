"""NVIDIA B300, GB200 and GB300: three hardware profiles, pure data, beside the B200 of this distribution.

The numbers were found by ``benchmarks/derive_hardware.py`` and ``benchmarks/derive_frameworks.py``, whose ``--check``
keeps them. The tables have no GEMM or attention shapes of B300 and GB300: theirs are those of B200 and GB200 times the
ratio of large-GEMM FLOP/s in the tables' summary.
"""

from rpeg_core import AlphaBeta, AttentionEfficiency, Device, GemmEfficiency, HardwareProfile, LinkTier

_TABLES = "aiconfigurator-core 0.12.0 (Apache-2.0)"
_SCALED = {
    "GB300": "; of GB200, times 1842.6 / 1525.0, the ratio of tflops_median_ge4096 (trtllm) of both",
    "B300": "; of B200, times 1485.2 / 1470.5, the ratio of tflops_median_ge4096 (trtllm) of both",
}
_NODES = {
    "GB200": "NVL72: compute trays of four GPUs, 72 GPUs on NVSwitch",
    "GB300": "NVL72: compute trays of four GPUs, 72 GPUs on NVSwitch",
    "B300": "DGX/HGX B300: eight GPUs on NVSwitch",
}
_NETWORK_HOP = (
    "the intra-node latency plus 2.1 us per step: NCCL's own latency constants for a network hop (2.7 us) "
    "less those for an NVLink hop (0.6 us), ring LL, src/graph/tuning.cc hwLat at NVIDIA/nccl@b6475625"
)
_NIC = (
    "per GPU: one 400 Gb/s NIC per GPU (50 GB/s), of which NCCL reaches about 48 GB/s (NVIDIA engineer, "
    "NVIDIA/nccl-tests#319); faster adapters need their own profile"
)
_RACK_HOP = (
    "the inter-node latency plus 2 x 130 ns: a path leaf-spine-leaf crosses two switches more; NVIDIA "
    "QM8700 (Quantum) data sheet, port to port below 130 ns"
)
_NON_GEMM = (
    "memory passes / BW_mem: 10 passes over 8 sequences x 640 tokens x 4096 elements x 2 bytes, the shape of the "
    "paper's model validation"
)
_REFERENCE_BATCH = "B_cal of non_gemm_layer_s, a choice: the smallest microbatch that rule P5 of the paper admits"
_SUSTAINED = (
    "fit to published training steps of grade A (benchmarks/measured/training.csv), one number "
    "for B200, B300, GB200 and GB300; "
    "benchmarks/derive_frameworks.py"
)
_SPREAD = (
    "fit to published training steps of 8 to 3072 GPUs (benchmarks/measured/training.csv), one number for all GPUs; "
    "benchmarks/derive_frameworks.py"
)
_SPEEDUP = (
    "fit to published FP8 and FP4 training steps (benchmarks/measured/training.csv), one "
    "number for B200, B300, GB200 and GB300, at most the "
    "data sheet's; benchmarks/derive_frameworks.py"
)
_DOMAIN = "GPUs of one NVLink domain: NVIDIA GB200 NVL72 and GB300 NVL72 data sheets"

_NON_GEMM_BYTES = 10 * 8 * 640 * 4096 * 2


def _sources(
    gpu: str, fitted: str, reduce_error: str, send_error: str, gemm_error: str, attention_error: str
) -> dict[str, str]:
    """The source of every number; ``fitted`` is the system whose shapes the fits used."""
    scaled = _SCALED.get(gpu, "")
    gemm = (
        f"fit to the compute-bound bf16 shapes of {_TABLES}, {fitted}, trtllm 1.3.0rc20: least squares on log FLOP/s, "
        f"soft-L1; median error {gemm_error}{scaled}; benchmarks/derive_hardware.py fit_gemm"
    )
    attention = (
        f"fit to the bf16 prefill shapes of {_TABLES}, {fitted}, vllm: least squares on log FLOP/s, soft-L1; median "
        f"error {attention_error}{scaled}; benchmarks/derive_hardware.py fit_attention"
    )
    streaming = (
        f"median rate of GEMMs with at most 16 rows over weights of 256 MB or more, {_TABLES}, {fitted}, trtllm; "
        "benchmarks/derive_hardware.py streaming_bandwidth"
    )
    collective = (
        f"relative least squares of 2(p-1) alpha + 2(p-1)/p M beta over NCCL AllReduce in a node, {_TABLES}, {gpu}; "
        f"{reduce_error}; benchmarks/derive_hardware.py fit_all_reduce"
    )
    send = (
        f"relative least squares of alpha + M beta over NCCL AlltoAll between two GPUs, {_TABLES}, "
        f"{gpu}; {send_error}; "
        "benchmarks/derive_hardware.py fit_send_receive"
    )
    found = {
        "gpus_per_node": _NODES[gpu],
        "device.memory_bytes": f"mem_capacity of {gpu} in the system files of {_TABLES}",
        "device.memory_bandwidth_bytes_per_s": streaming,
        "device.peak_flops_per_s": gemm,
        "device.sustained_share": _SUSTAINED,
        "device.clock_spread": _SPREAD,
        "device.fp8_speedup": _SPEEDUP,
        "device.fp4_speedup": _SPEEDUP,
        "tiers.intra_node.collective.latency_s": collective,
        "tiers.intra_node.collective.bandwidth_bytes_per_s": collective,
        "tiers.intra_node.p2p.latency_s": send,
        "tiers.intra_node.p2p.bandwidth_bytes_per_s": send,
        "efficiency.gamma_m_rows": gemm,
        "efficiency.gamma_k_columns": gemm,
        "non_gemm_layer_s": _NON_GEMM,
        "non_gemm_reference_batch": _REFERENCE_BATCH,
        "attention.flops_per_s": attention,
        "attention.gamma_tokens": attention,
    }
    for tier, hop in (("inter_node", _NETWORK_HOP), ("inter_rack", _RACK_HOP)):
        for kind in ("collective", "p2p"):
            found[f"tiers.{tier}.{kind}.latency_s"] = hop
            found[f"tiers.{tier}.{kind}.bandwidth_bytes_per_s"] = _NIC
    if gpu != "B300":
        found["link_domain_gpus"] = _DOMAIN
    return found


B300 = HardwareProfile(
    name="b300",
    summary="NVIDIA B300 SXM, 8 per node on NVSwitch, one NDR 400 Gb/s NIC per GPU",
    gpus_per_node=8,
    device=Device(
        memory_bytes=288400343040,
        memory_bandwidth_bytes_per_s=6.107e12,
        peak_flops_per_s=1.681e15,
        sustained_share=0.8481,
        clock_spread=0.02,
        fp8_speedup=2,
        fp4_speedup=3.867,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(1.919e-06, 5.884e11), p2p=AlphaBeta(1.074e-05, 3.075e11)),
        LinkTier(collective=AlphaBeta(4.019e-06, 4.8e10), p2p=AlphaBeta(1.284e-05, 4.8e10)),
        LinkTier(collective=AlphaBeta(4.279e-06, 4.8e10), p2p=AlphaBeta(1.31e-05, 4.8e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=196.9, gamma_k_columns=207.3),
    non_gemm_layer_s=_NON_GEMM_BYTES / 6.107e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=1.461e15, gamma_tokens=2399),
    sources=_sources(
        "B300",
        "B200",
        "median error 6.0%, largest 26.1%",
        "median error 15.8%, largest 29.1%",
        "7.1%",
        "16.7%",
    ),
)

GB200 = HardwareProfile(
    name="gb200",
    summary="NVIDIA GB200 NVL72, 72 GPUs on NVSwitch, one NDR 400 Gb/s NIC per GPU",
    gpus_per_node=4,
    device=Device(
        memory_bytes=198674743296,
        memory_bandwidth_bytes_per_s=6.261e12,
        peak_flops_per_s=1.782e15,
        sustained_share=0.8481,
        clock_spread=0.02,
        fp8_speedup=2,
        fp4_speedup=3.867,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(2.854e-06, 5.551e11), p2p=AlphaBeta(1.204e-05, 3.024e11)),
        LinkTier(collective=AlphaBeta(4.954e-06, 4.8e10), p2p=AlphaBeta(1.414e-05, 4.8e10)),
        LinkTier(collective=AlphaBeta(5.214e-06, 4.8e10), p2p=AlphaBeta(1.44e-05, 4.8e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=214, gamma_k_columns=192.9),
    non_gemm_layer_s=_NON_GEMM_BYTES / 6.261e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=1.519e15, gamma_tokens=2441),
    link_domain_gpus=72,
    sources=_sources(
        "GB200",
        "GB200",
        "median error 7.1%, largest 54.7%",
        "median error 17.1%, largest 27.9%",
        "7.0%",
        "19.8%",
    ),
)

GB300 = HardwareProfile(
    name="gb300",
    summary="NVIDIA GB300 NVL72, 72 GPUs on NVSwitch, one NDR 400 Gb/s NIC per GPU",
    gpus_per_node=4,
    device=Device(
        memory_bytes=298013687808,
        memory_bandwidth_bytes_per_s=6.261e12,
        peak_flops_per_s=2.153e15,
        sustained_share=0.8481,
        clock_spread=0.02,
        fp8_speedup=2,
        fp4_speedup=3.867,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(2.74e-06, 5.622e11), p2p=AlphaBeta(1.193e-05, 3.211e11)),
        LinkTier(collective=AlphaBeta(4.84e-06, 4.8e10), p2p=AlphaBeta(1.403e-05, 4.8e10)),
        LinkTier(collective=AlphaBeta(5.1e-06, 4.8e10), p2p=AlphaBeta(1.429e-05, 4.8e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=214, gamma_k_columns=192.9),
    non_gemm_layer_s=_NON_GEMM_BYTES / 6.261e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=1.835e15, gamma_tokens=2441),
    link_domain_gpus=72,
    sources=_sources(
        "GB300",
        "GB200",
        "median error 7.5%, largest 54.2%",
        "median error 14.0%, largest 24.8%",
        "7.0%",
        "19.8%",
    ),
)
