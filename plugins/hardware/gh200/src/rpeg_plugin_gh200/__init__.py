"""NVIDIA GH200, four per node, Slingshot-11 (Alps at CSCS): one hardware profile, pure data.

The numbers were found by ``benchmarks/derive_hardware.py``, whose ``--check`` keeps them.
"""

from rpeg_core import AlphaBeta, AttentionEfficiency, Device, GemmEfficiency, HardwareProfile, LinkTier, hookimpl

_NODE = "Clariden/Alps (the paper, appendix B; CSCS documentation, Alps hardware): four GH200 per node"
_MEMORY = (
    "102 GB: the capacity the paper's analytical studies use for GH200 (appendix B, table of ablation "
    "scenarios), which is what nvidia-smi reports of the 96 GB HBM3 part, 97871 MiB; the 120 GB in the "
    "appendix's platform paragraph is not used"
)
_STREAMING = (
    "the NVIDIA GH200 data sheet's 4.0 TB/s times 0.836, which the H100's thin GEMMs reach of its data "
    "sheet (aiconfigurator-core 0.12.0 (Apache-2.0); same die); CSCS expects 3700 GB/s of a STREAM kernel "
    "(eth-cscs/cscs-reframe-tests, node-burn), 11 % more than a GEMM draws here; "
    "benchmarks/derive_hardware.py streaming_bandwidth"
)
_GEMM = (
    "fit to 10980 compute-bound shapes of aiconfigurator-core 0.12.0 (Apache-2.0), H100-SXM-80GB, trtllm "
    "1.3.0rc20, bf16: least squares on log FLOP/s, soft-L1, shapes above the data-sheet ridge; median "
    "error 5.2%, on H100: the same GH100 die and data-sheet peak (989 TFLOP/s dense), while the tables "
    "hold no GH200; benchmarks/derive_hardware.py fit_gemm"
)
_ALL_REDUCE = (
    "relative least squares of 2(p-1) alpha + 2(p-1)/p M beta over NCCL 2.29.2 AllReduce, p = 4, 1 KB to "
    "512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), H100-SXM-80GB; median error 9.3%, largest 25.9%, on "
    "four H100: the same 18 NVLink 4 links per GPU, though through NVSwitch instead of 6 to each peer; "
    "benchmarks/derive_hardware.py fit_all_reduce"
)
_SEND_RECEIVE = (
    "relative least squares of alpha + M beta over NCCL 2.29.2 AlltoAll between two GPUs (one send and one"
    " receive per rank, M half the buffer), 1 KB to 512 MB, aiconfigurator-core 0.12.0 (Apache-2.0), "
    "H100-SXM-80GB; median error 19.5%, largest 38.6%, on H100; benchmarks/derive_hardware.py "
    "fit_send_receive"
)
_NVLINK = (
    "160 GB/s per GPU pair (the paper, appendix B) times 0.778, the bus bandwidth of a 512 MB AllReduce "
    "over four H100 per data-sheet 450 GB/s (aiconfigurator-core 0.12.0 (Apache-2.0), NCCL 2.29.2)"
)
_NETWORK_HOP = (
    "the intra-node latency plus 2.1 us per step: NCCL's own latency constants for a network hop (2.7 us) "
    "less those for an NVLink hop (0.6 us), ring LL, src/graph/tuning.cc hwLat at NVIDIA/nccl@b6475625; "
    "carried over, since none is published for Slingshot-11"
)
_ALPS_ALL_REDUCE = (
    "per GPU (one Slingshot-11 NIC of 200 Gb/s): a quarter of 91.04 GB/s, the bus bandwidth CSCS expects "
    "of a 16 GiB AllReduce over eight nodes of four GH200 (eth-cscs/cscs-reframe-tests, "
    "pytorch_allreduce); a group with r ranks per node can use r NICs"
)
_ALPS_SEND_RECEIVE = (
    "per GPU: 24.2382 GB/s of NCCL send/receive between GH200 nodes, 512 MB, of 25 GB/s (NVIDIA/nccl#1272,"
    " four GH200 per node on Slingshot)"
)
_RACK_HOP = (
    "the inter-node latency plus 2 x 350 ns: up to two Rosetta switches more in a dragonfly between "
    "groups; 350 ns mean and median per switch (De Sensi et al., An In-Depth Analysis of the Slingshot "
    "Interconnect, SC20, section II-A)"
)
_ALPS_RACK = (
    "as between nodes: the injection rate of the NIC; no taper of the global links is published for Alps, "
    "and the CSCS reference of eight nodes does not separate groups"
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
    "fit to 3187 shapes of aiconfigurator-core 0.12.0 (Apache-2.0), H100-SXM-80GB, vllm, bf16 "
    "prefill: least squares on log "
    "FLOP/s, soft-L1; median error 11.4%; a GH200 has the same GPU at a higher power limit; "
    "benchmarks/derive_hardware.py fit_attention"
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
    name="gh200",
    summary="NVIDIA GH200 superchip, 4 per node on NVLink, one Slingshot-11 200 Gb/s NIC per GPU (Alps)",
    gpus_per_node=4,
    device=Device(
        memory_bytes=102_000_000_000,
        memory_bandwidth_bytes_per_s=3.345e12,
        peak_flops_per_s=8.343e14,
        sustained_share=0.8484,
        clock_spread=0.02,
        fp8_speedup=1.828,
    ),
    tiers=(
        LinkTier(collective=AlphaBeta(1.781e-6, 3.059e11), p2p=AlphaBeta(8.301e-6, 1.245e11)),
        LinkTier(collective=AlphaBeta(3.881e-6, 2.276e10), p2p=AlphaBeta(1.040e-5, 2.424e10)),
        LinkTier(collective=AlphaBeta(4.581e-6, 2.276e10), p2p=AlphaBeta(1.110e-5, 2.424e10)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=131.6, gamma_k_columns=205.8),
    non_gemm_layer_s=_NON_GEMM_BYTES / 3.345e12,
    non_gemm_reference_batch=8,
    attention=AttentionEfficiency(flops_per_s=7.069e14, gamma_tokens=1721),
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
        "tiers.intra_node.p2p.bandwidth_bytes_per_s": _NVLINK,
        "tiers.inter_node.collective.latency_s": _NETWORK_HOP,
        "tiers.inter_node.collective.bandwidth_bytes_per_s": _ALPS_ALL_REDUCE,
        "tiers.inter_node.p2p.latency_s": _NETWORK_HOP,
        "tiers.inter_node.p2p.bandwidth_bytes_per_s": _ALPS_SEND_RECEIVE,
        "tiers.inter_rack.collective.latency_s": _RACK_HOP,
        "tiers.inter_rack.collective.bandwidth_bytes_per_s": _ALPS_RACK,
        "tiers.inter_rack.p2p.latency_s": _RACK_HOP,
        "tiers.inter_rack.p2p.bandwidth_bytes_per_s": _ALPS_RACK,
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
