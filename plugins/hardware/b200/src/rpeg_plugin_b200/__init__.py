"""NVIDIA B200 SXM 180 GB, eight per node, NDR InfiniBand, and its relatives: hardware profiles, pure data.

The numbers were found by ``benchmarks/derive_hardware.py``, whose ``--check`` keeps them.
"""

from rpeg_core import AlphaBeta, AttentionEfficiency, Device, GemmEfficiency, HardwareProfile, LinkTier, hookimpl
from rpeg_plugin_b200.blackwell import B300, GB200, GB300

_NODE = "DGX/HGX B200: eight GPUs on NVSwitch, eight ConnectX-7"
_MEMORY = (
    "180 GiB, mem_capacity of B200 in the system files of aiconfigurator-core 0.12.0 (Apache-2.0); a "
    "device query shows 178.35 GiB (pytorch/ao#4002), 0.9 % less"
)
_STREAMING = (
    "median rate of GEMMs with at most 16 rows over weights of 256 MB or more, aiconfigurator-core 0.12.0 "
    "(Apache-2.0), B200, trtllm 1.3.0rc20; equals weight_stream_GBps of its summary; 79 % of the data "
    "sheet; benchmarks/derive_hardware.py streaming_bandwidth"
)
_GEMM = (
    "fit to 11008 compute-bound shapes of aiconfigurator-core 0.12.0 (Apache-2.0), B200, trtllm 1.3.0rc20,"
    " bf16: least squares on log FLOP/s, soft-L1, shapes above the data-sheet ridge; median error 7.1%; "
    "benchmarks/derive_hardware.py fit_gemm"
)
_ALL_REDUCE = (
    "relative least squares of 2(p-1) alpha + 2(p-1)/p M beta over NCCL 2.29.2 AllReduce, p = 8, 1 KB to "
    "512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), B200; median error 6.2%, largest 26.7%; "
    "benchmarks/derive_hardware.py fit_all_reduce"
)
_SEND_RECEIVE = (
    "relative least squares of alpha + M beta over NCCL 2.29.2 AlltoAll between two GPUs (one send and one"
    " receive per rank, M half the buffer), 1 KB to 512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), B200;"
    " median error 16.3%, largest 30.5%; benchmarks/derive_hardware.py fit_send_receive"
)
_NETWORK_HOP = (
    "the intra-node latency plus 2.1 us per step: NCCL's own latency constants for a network hop (2.7 us) "
    "less those for an NVLink hop (0.6 us), ring LL, src/graph/tuning.cc hwLat at NVIDIA/nccl@b6475625"
)
_NIC = (
    "per GPU: one 400 Gb/s NIC per GPU (50 GB/s), of which NCCL reaches about 48 GB/s (NVIDIA engineer, "
    "NVIDIA/nccl-tests#319); B200 nodes carry eight ConnectX-7 (MLPerf Inference 6.0, nebius_b200_n1: 8x "
    "ConnectX-7 IB NDR 400 Gb/s), although the summary of aiconfigurator-core assumes 800 Gb/s; a group "
    "with r ranks per node can use r NICs"
)
_RACK_HOP = (
    "the inter-node latency plus 2 x 130 ns: a path leaf-spine-leaf crosses two switches more; NVIDIA "
    "QM8700 (Quantum) data sheet, port to port below 130 ns; the figure of the older generation, since "
    "NVIDIA prints none for Quantum-2"
)
_RACK_NIC = (
    "as between nodes: NVIDIA's reference fabrics are non-blocking fat trees (NVIDIA Enterprise Reference "
    "Architecture HGX H100/H200/B200, networking physical topologies); an oversubscribed spine needs its "
    "own profile"
)
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
_ATTENTION = (
    "fit to 3249 shapes of aiconfigurator-core 0.12.0 (Apache-2.0), B200, vllm, bf16 prefill: least squares on log "
    "FLOP/s, soft-L1; median error 16.7%; benchmarks/derive_hardware.py fit_attention"
)
_NON_GEMM = (
    "memory passes / BW_mem: 2 norms (1 read, 1 write each) and 2 residual additions (2 reads, 1 write "
    "each) make 10 passes over 8 sequences x 640 tokens x 4096 elements x 2 bytes, the shape of the "
    "paper's model validation (Lp = 512, Lr = 128, 7B); without sequence parallelism tensor parallelism "
    "does not divide them"
)
_REFERENCE_BATCH = "B_cal of non_gemm_layer_s, a choice: the smallest microbatch that rule P5 of the paper admits"

_NON_GEMM_BYTES = 10 * 8 * 640 * 4096 * 2

PROFILE = HardwareProfile(
    name="b200",
    summary="NVIDIA B200 SXM 180 GB, 8 per node on NVSwitch, one NDR 400 Gb/s NIC per GPU",
    gpus_per_node=8,
    device=Device(
        memory_bytes=180 * 2**30,
        memory_bandwidth_bytes_per_s=6.107e12,
        peak_flops_per_s=1.664e15,
        sustained_share=0.8481,
        clock_spread=0.02,
        fp8_speedup=2,
        fp4_speedup=3.867,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(1.957e-6, 5.854e11), p2p=AlphaBeta(1.127e-5, 2.996e11)),
        LinkTier(collective=AlphaBeta(4.057e-6, 4.8e10), p2p=AlphaBeta(1.337e-5, 4.8e10)),
        LinkTier(collective=AlphaBeta(4.317e-6, 4.8e10), p2p=AlphaBeta(1.363e-5, 4.8e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=196.9, gamma_k_columns=207.3),
    non_gemm_layer_s=_NON_GEMM_BYTES / 6.107e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=1.446e15, gamma_tokens=2399),
    sources={
        "gpus_per_node": _NODE,
        "device.memory_bytes": _MEMORY,
        "device.memory_bandwidth_bytes_per_s": _STREAMING,
        "device.peak_flops_per_s": _GEMM,
        "device.sustained_share": _SUSTAINED,
        "device.clock_spread": _SPREAD,
        "device.fp8_speedup": _SPEEDUP,
        "device.fp4_speedup": _SPEEDUP,
        "tiers.intra_node.collective.latency_s": _ALL_REDUCE,
        "tiers.intra_node.collective.bandwidth_bytes_per_s": _ALL_REDUCE,
        "tiers.intra_node.p2p.latency_s": _SEND_RECEIVE,
        "tiers.intra_node.p2p.bandwidth_bytes_per_s": _SEND_RECEIVE,
        "tiers.inter_node.collective.latency_s": _NETWORK_HOP,
        "tiers.inter_node.collective.bandwidth_bytes_per_s": _NIC,
        "tiers.inter_node.p2p.latency_s": _NETWORK_HOP,
        "tiers.inter_node.p2p.bandwidth_bytes_per_s": _NIC,
        "tiers.inter_rack.collective.latency_s": _RACK_HOP,
        "tiers.inter_rack.collective.bandwidth_bytes_per_s": _RACK_NIC,
        "tiers.inter_rack.p2p.latency_s": _RACK_HOP,
        "tiers.inter_rack.p2p.bandwidth_bytes_per_s": _RACK_NIC,
        "efficiency.gamma_m_rows": _GEMM,
        "efficiency.gamma_k_columns": _GEMM,
        "non_gemm_layer_s": _NON_GEMM,
        "non_gemm_reference_batch": _REFERENCE_BATCH,
        "attention.flops_per_s": _ATTENTION,
        "attention.gamma_tokens": _ATTENTION,
    },
)


@hookimpl
def rpeg_hardware() -> list[HardwareProfile]:
    """The profiles of this distribution."""
    return [PROFILE, B300, GB200, GB300]
