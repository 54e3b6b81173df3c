"""NVIDIA H200 SXM 141 GB, eight per node, NDR InfiniBand: one hardware profile, pure data.

The numbers were found by ``benchmarks/derive_hardware.py``, whose ``--check`` keeps them.
"""

from rpeg_core import AlphaBeta, AttentionEfficiency, Device, GemmEfficiency, HardwareProfile, LinkTier, hookimpl

_NODE = "DGX/HGX H200: eight GPUs on NVSwitch, eight ConnectX-7"
_MEMORY = (
    "141 GiB, mem_capacity of H200 in the system files of aiconfigurator-core 0.12.0 (Apache-2.0); nvidia-"
    "smi reports 143771 MiB, 0.4 % less"
)
_STREAMING = (
    "median rate of GEMMs with at most 16 rows over weights of 256 MB or more, aiconfigurator-core 0.12.0 "
    "(Apache-2.0), H200, trtllm 1.3.0rc20; equals weight_stream_GBps of its summary; 83 % of the data "
    "sheet; benchmarks/derive_hardware.py streaming_bandwidth"
)
_GEMM = (
    "fit to 12700 compute-bound shapes of aiconfigurator-core 0.12.0 (Apache-2.0), H200, trtllm 1.3.0rc20,"
    " bf16: least squares on log FLOP/s, soft-L1, shapes above the data-sheet ridge; median error 6.1%; "
    "benchmarks/derive_hardware.py fit_gemm"
)
_ALL_REDUCE = (
    "relative least squares of 2(p-1) alpha + 2(p-1)/p M beta over NCCL 2.29.2 AllReduce, p = 8, 1 KB to "
    "512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), H200; median error 11.4%, largest 27.9%; "
    "benchmarks/derive_hardware.py fit_all_reduce"
)
_SEND_RECEIVE = (
    "relative least squares of alpha + M beta over NCCL 2.29.2 AlltoAll between two GPUs (one send and one"
    " receive per rank, M half the buffer), 1 KB to 512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), H200;"
    " median error 17.3%, largest 34.9%; benchmarks/derive_hardware.py fit_send_receive"
)
_NETWORK_HOP = (
    "the intra-node latency plus 2.1 us per step: NCCL's own latency constants for a network hop (2.7 us) "
    "less those for an NVLink hop (0.6 us), ring LL, src/graph/tuning.cc hwLat at NVIDIA/nccl@b6475625"
)
_NIC = (
    "per GPU: one 400 Gb/s NIC per GPU (50 GB/s), of which NCCL reaches about 48 GB/s (NVIDIA engineer, "
    "NVIDIA/nccl-tests#319); a group with r ranks per node can use r NICs"
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
    "for H100, H200 and GH200; "
    "benchmarks/derive_frameworks.py"
)
_SPREAD = (
    "fit to published training steps of 8 to 3072 GPUs (benchmarks/measured/training.csv), one number for all GPUs; "
    "benchmarks/derive_frameworks.py"
)
_SPEEDUP = (
    "fit to published FP8 training steps (benchmarks/measured/training.csv), one number for "
    "H100, H200 and GH200, at most the "
    "data sheet's; benchmarks/derive_frameworks.py"
)
_ATTENTION = (
    "fit to 3187 shapes of aiconfigurator-core 0.12.0 (Apache-2.0), H200, vllm, bf16 prefill: least squares on log "
    "FLOP/s, soft-L1; median error 10.1%; benchmarks/derive_hardware.py fit_attention"
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
    name="h200",
    summary="NVIDIA H200 SXM 141 GB, 8 per node on NVSwitch, one NDR 400 Gb/s NIC per GPU",
    gpus_per_node=8,
    device=Device(
        memory_bytes=141 * 2**30,
        memory_bandwidth_bytes_per_s=3.985e12,
        peak_flops_per_s=8.289e14,
        sustained_share=0.8484,
        clock_spread=0.02,
        fp8_speedup=1.828,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(1.315e-6, 3.859e11), p2p=AlphaBeta(8.373e-6, 2.546e11)),
        LinkTier(collective=AlphaBeta(3.415e-6, 4.8e10), p2p=AlphaBeta(1.047e-5, 4.8e10)),
        LinkTier(collective=AlphaBeta(3.675e-6, 4.8e10), p2p=AlphaBeta(1.073e-5, 4.8e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=97.02, gamma_k_columns=196.0),
    non_gemm_layer_s=_NON_GEMM_BYTES / 3.985e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=6.951e14, gamma_tokens=1609),
    sources={
        "gpus_per_node": _NODE,
        "device.memory_bytes": _MEMORY,
        "device.memory_bandwidth_bytes_per_s": _STREAMING,
        "device.peak_flops_per_s": _GEMM,
        "device.sustained_share": _SUSTAINED,
        "device.clock_spread": _SPREAD,
        "device.fp8_speedup": _SPEEDUP,
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
    """The profile of this distribution."""
    return [PROFILE]
