"""NVIDIA A100 SXM, 40 and 80 GB, eight per node: two hardware profiles, pure data.

The numbers were found by ``benchmarks/derive_hardware.py``, whose ``--check`` keeps them.
"""

from rpeg_core import AlphaBeta, AttentionEfficiency, Device, GemmEfficiency, HardwareProfile, LinkTier, hookimpl

_NODE = "DGX/HGX A100: eight GPUs on NVSwitch"
_MEMORY_80 = (
    "80 GiB, mem_capacity of A100-SXM-80GB in the system files of aiconfigurator-core 0.12.0 (Apache-2.0);"
    " a device query shows 85198045184 bytes, 0.8 % less"
)
_MEMORY_40 = "40 GiB: NVIDIA A100 data sheet, 40 GB; nvidia-smi reports 40960 MiB on A100-SXM4-40GB"
_STREAMING_80 = (
    "median rate of GEMMs with at most 16 rows over weights of 256 MB or more, aiconfigurator-core 0.12.0 "
    "(Apache-2.0), A100-SXM-80GB, trtllm 1.0.0; equals weight_stream_GBps of its summary; 81 % of the data"
    " sheet; benchmarks/derive_hardware.py streaming_bandwidth"
)
_STREAMING_40 = (
    "the rate of the 80 GB part times 1555/2039, the ratio of the NVIDIA A100 data-sheet bandwidths (the "
    "same die; the tables hold no 40 GB part)"
)
_GEMM = (
    "fit to 2767 compute-bound shapes of aiconfigurator-core 0.12.0 (Apache-2.0), A100-SXM-80GB, trtllm "
    "1.0.0, bf16: least squares on log FLOP/s, soft-L1, shapes above the data-sheet ridge; median error "
    "10.6%; benchmarks/derive_hardware.py fit_gemm"
)
_ALL_REDUCE = (
    "relative least squares of 2(p-1) alpha + 2(p-1)/p M beta over NCCL 2.27.3 AllReduce, p = 8, 1 KB to "
    "512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), A100-SXM-80GB; median error 11.7%, largest 20.8%; "
    "benchmarks/derive_hardware.py fit_all_reduce"
)
_SEND_RECEIVE = (
    "relative least squares of alpha + M beta over NCCL 2.27.3 AlltoAll between two GPUs (one send and one"
    " receive per rank, M half the buffer), 1 KB to 512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), "
    "A100-SXM-80GB; median error 15.1%, largest 28.9%; benchmarks/derive_hardware.py fit_send_receive"
)
_NETWORK_HOP = (
    "the intra-node latency plus 2.1 us per step: NCCL's own latency constants for a network hop (2.7 us) "
    "less those for an NVLink hop (0.6 us), ring LL, src/graph/tuning.cc hwLat at NVIDIA/nccl@b6475625"
)
_NIC_80 = (
    "per GPU: one 200 Gb/s HDR NIC per GPU as in DGX A100 (25 GB/s), of which NCCL reaches 24 GB/s (NCCL "
    "maintainer, NVIDIA/nccl-tests#119; 192 GB/s of a DGX A100 with eight, NVIDIA/nccl#812); a group with "
    "r ranks per node can use r NICs"
)
_NIC_40 = (
    "per GPU: the paper's A100 platform (Athena, appendix B) has four 200 Gb/s HDR interfaces for eight "
    "GPUs, so two GPUs share one of 24 GB/s (NVIDIA/nccl-tests#119); DGX A100 40 GB with eight interfaces "
    "has twice as much"
)
_RACK_HOP = (
    "the inter-node latency plus 2 x 130 ns: a path leaf-spine-leaf crosses two switches more; NVIDIA "
    "QM8700 (Quantum) data sheet, port to port below 130 ns"
)
_RACK_NIC = (
    "as between nodes: NVIDIA's reference fabrics are non-blocking fat trees (NVIDIA Enterprise Reference "
    "Architecture HGX H100/H200/B200, networking physical topologies); an oversubscribed spine needs its "
    "own profile"
)
_SUSTAINED = (
    "fit to published training steps of grade A (benchmarks/measured/training.csv), one number for A100; "
    "benchmarks/derive_frameworks.py"
)
_SPREAD = (
    "fit to published training steps of 8 to 3072 GPUs (benchmarks/measured/training.csv), one number for all GPUs; "
    "benchmarks/derive_frameworks.py"
)
_ATTENTION = (
    "fit to 2839 shapes of aiconfigurator-core 0.12.0 (Apache-2.0), A100-SXM-80GB, vllm, bf16 "
    "prefill: least squares on log "
    "FLOP/s, soft-L1; median error 7.3%; benchmarks/derive_hardware.py fit_attention"
)
_NON_GEMM = (
    "memory passes / BW_mem: 2 norms (1 read, 1 write each) and 2 residual additions (2 reads, 1 write "
    "each) make 10 passes over 8 sequences x 640 tokens x 4096 elements x 2 bytes, the shape of the "
    "paper's model validation (Lp = 512, Lr = 128, 7B); without sequence parallelism tensor parallelism "
    "does not divide them"
)
_REFERENCE_BATCH = "B_cal of non_gemm_layer_s, a choice: the smallest microbatch that rule P5 of the paper admits"

_NON_GEMM_BYTES = 10 * 8 * 640 * 4096 * 2

A100_80GB = HardwareProfile(
    name="a100-80gb",
    summary="NVIDIA A100 SXM 80 GB, 8 per node on NVSwitch, one HDR 200 Gb/s NIC per GPU",
    gpus_per_node=8,
    device=Device(
        memory_bytes=80 * 2**30,
        memory_bandwidth_bytes_per_s=1.658e12,
        peak_flops_per_s=2.986e14,
        sustained_share=0.9682,
        clock_spread=0.02,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(1.712e-6, 1.897e11), p2p=AlphaBeta(1.282e-5, 1.394e11)),
        LinkTier(collective=AlphaBeta(3.812e-6, 2.4e10), p2p=AlphaBeta(1.492e-5, 2.4e10)),
        LinkTier(collective=AlphaBeta(4.072e-6, 2.4e10), p2p=AlphaBeta(1.518e-5, 2.4e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=147.7, gamma_k_columns=315.0),
    non_gemm_layer_s=_NON_GEMM_BYTES / 1.658e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=1.872e14, gamma_tokens=752),
    sources={
        "gpus_per_node": _NODE,
        "device.memory_bytes": _MEMORY_80,
        "device.memory_bandwidth_bytes_per_s": _STREAMING_80,
        "device.peak_flops_per_s": _GEMM,
        "device.sustained_share": _SUSTAINED,
        "device.clock_spread": _SPREAD,
        "tiers.intra_node.collective.latency_s": _ALL_REDUCE,
        "tiers.intra_node.collective.bandwidth_bytes_per_s": _ALL_REDUCE,
        "tiers.intra_node.p2p.latency_s": _SEND_RECEIVE,
        "tiers.intra_node.p2p.bandwidth_bytes_per_s": _SEND_RECEIVE,
        "tiers.inter_node.collective.latency_s": _NETWORK_HOP,
        "tiers.inter_node.collective.bandwidth_bytes_per_s": _NIC_80,
        "tiers.inter_node.p2p.latency_s": _NETWORK_HOP,
        "tiers.inter_node.p2p.bandwidth_bytes_per_s": _NIC_80,
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

A100_40GB = HardwareProfile(
    name="a100-40gb",
    summary="NVIDIA A100 SXM 40 GB, 8 per node on NVSwitch, one HDR 200 Gb/s NIC per two GPUs",
    gpus_per_node=8,
    device=Device(
        memory_bytes=40 * 2**30,
        memory_bandwidth_bytes_per_s=1.264e12,
        peak_flops_per_s=2.986e14,
        sustained_share=0.9682,
        clock_spread=0.02,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(1.712e-6, 1.897e11), p2p=AlphaBeta(1.282e-5, 1.394e11)),
        LinkTier(collective=AlphaBeta(3.812e-6, 1.2e10), p2p=AlphaBeta(1.492e-5, 1.2e10)),
        LinkTier(collective=AlphaBeta(4.072e-6, 1.2e10), p2p=AlphaBeta(1.518e-5, 1.2e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=147.7, gamma_k_columns=315.0),
    non_gemm_layer_s=_NON_GEMM_BYTES / 1.264e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=1.872e14, gamma_tokens=752),
    sources={
        "gpus_per_node": _NODE,
        "device.memory_bytes": _MEMORY_40,
        "device.memory_bandwidth_bytes_per_s": _STREAMING_40,
        "device.peak_flops_per_s": _GEMM,
        "device.sustained_share": _SUSTAINED,
        "device.clock_spread": _SPREAD,
        "tiers.intra_node.collective.latency_s": _ALL_REDUCE,
        "tiers.intra_node.collective.bandwidth_bytes_per_s": _ALL_REDUCE,
        "tiers.intra_node.p2p.latency_s": _SEND_RECEIVE,
        "tiers.intra_node.p2p.bandwidth_bytes_per_s": _SEND_RECEIVE,
        "tiers.inter_node.collective.latency_s": _NETWORK_HOP,
        "tiers.inter_node.collective.bandwidth_bytes_per_s": _NIC_40,
        "tiers.inter_node.p2p.latency_s": _NETWORK_HOP,
        "tiers.inter_node.p2p.bandwidth_bytes_per_s": _NIC_40,
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
    return [A100_40GB, A100_80GB]
