"""A machine and a model so small that every term can be worked out by hand."""

from __future__ import annotations

from types import SimpleNamespace

import attrs
import numpy as np
import pytest
from rpeg_plugin_analytical import rpeg_cost_terms

from rpeg_core.costing.batches import Layouts, MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.ir import Role
from rpeg_core.spec.machine import (
    AlphaBeta,
    Device,
    DeviceSpace,
    GemmEfficiency,
    HardwareProfile,
    LinkTier,
)
from rpeg_core.spec.models import ModelSpec, Norm
from rpeg_core.spec.workload import LengthPhase, Workload

HARDWARE = HardwareProfile(
    name="tiny",
    summary="made up",
    gpus_per_node=4,
    device=Device(memory_bytes=1000, memory_bandwidth_bytes_per_s=100.0, peak_flops_per_s=1000.0),
    tiers=(
        LinkTier(collective=AlphaBeta(1.0, 10.0), p2p=AlphaBeta(2.0, 20.0)),
        LinkTier(collective=AlphaBeta(3.0, 5.0), p2p=AlphaBeta(4.0, 8.0)),
        LinkTier(collective=AlphaBeta(5.0, 2.0), p2p=AlphaBeta(6.0, 4.0)),
    ),
    efficiency=GemmEfficiency(gamma_m_rows=4.0, gamma_k_columns=4.0),
    non_gemm_layer_s=3.0,
    non_gemm_reference_batch=4,
)

# Multi-head attention, two projections: W_layer = 4 * 16 + 2 * 4 * 8 = 128, head and embedding 40.
PLAIN = ModelSpec(
    name="plain",
    family="tiny",
    layers=2,
    hidden=4,
    heads=2,
    kv_heads=2,
    head_dim=2,
    ffn=8,
    gated_ffn=False,
    vocab=10,
    tied_embeddings=False,
    norms_per_layer=2,
    norm=Norm.RMS,
)

# One KV head, three projections: attention 2 * 16 + 2 * 4 * 2 = 48, feed-forward 3 * 4 * 8 = 96, together 144.
GATED = attrs.evolve(PLAIN, name="gated", kv_heads=1, gated_ffn=True)

# 8 sequences of 4 + 4 tokens.
WORKLOAD = Workload(prompts=8, prompt_tokens=4, response_tokens=4)


def machine(gpus_per_node: int = 4, nodes: int = 4) -> DeviceSpace:
    return DeviceSpace(racks=1, nodes_per_rack=nodes, gpus_per_node=gpus_per_node)


def layout(data: int = 1, pipeline: int = 1, tensor: int = 1, microbatches: int = 1, gpus_per_node: int = 4) -> Layouts:
    def one(value: int) -> np.ndarray:
        return np.array([value], np.int64)

    gpus = data * pipeline * tensor
    return Layouts(
        data=one(data),
        pipeline=one(pipeline),
        tensor=one(tensor),
        microbatches=one(microbatches),
        gpus=one(gpus),
        data_tier=one(int(gpus > gpus_per_node)),
        stage_tier=one(int(pipeline * tensor > gpus_per_node)),
        stages_per_node=one(min(pipeline, max(1, gpus_per_node // tensor))),
    )


def operator(
    model: ModelSpec | None,
    role: Role,
    layouts: Layouts,
    *,
    workload: Workload = WORKLOAD,
    sequences: float | None = None,
    prefill: bool | None = None,
    phases: tuple[LengthPhase, ...] | None = None,
    gpus_per_node: int = 4,
    hardware: HardwareProfile = HARDWARE,
    seconds_per_sample: float | None = None,
) -> OperatorBatch:
    generates = role is Role.GENERATION
    return OperatorBatch(
        role=role,
        model=model,
        seconds_per_sample=seconds_per_sample,
        workload=workload,
        machine=machine(gpus_per_node),
        hardware=hardware,
        layouts=layouts,
        settings=None,
        sequences=workload.sequences if sequences is None else sequences,
        prefill=generates if prefill is None else prefill,
        phases=(workload.phases if generates else ()) if phases is None else phases,
    )


def memory(model: ModelSpec | None, role: Role, layouts: Layouts, *, workload: Workload = WORKLOAD) -> MemoryBatch:
    return MemoryBatch(
        role=role,
        model=model,
        seconds_per_sample=None,
        workload=workload,
        machine=machine(),
        hardware=HARDWARE,
        layouts=layouts,
        settings=None,
        trainable=role is Role.TRAINING,
    )


def transfer(*, reshard: bool, payload: float, source: int, destination: int, tier: int) -> TransferBatch:
    return TransferBatch(
        reshard=reshard,
        bytes=np.array([payload]),
        source_gpus=np.array([source]),
        destination_gpus=np.array([destination]),
        tier=np.array([tier]),
        hardware=HARDWARE,
        settings=None,
    )


TERMS = {term.name: term for term in rpeg_cost_terms()}


def price(name: str, batch: OperatorBatch | MemoryBatch | TransferBatch) -> float:
    """The one value of term ``name``; divisions by zero and the like raise, as in the cost book."""
    with np.errstate(all="raise", under="ignore"):
        (value,) = TERMS[name].function(batch)
    return float(value)


@pytest.fixture(scope="session")
def tiny() -> SimpleNamespace:
    """The builders above; test modules have no import path to this file."""
    return SimpleNamespace(
        hardware=HARDWARE,
        plain=PLAIN,
        gated=GATED,
        workload=WORKLOAD,
        terms=TERMS,
        layout=layout,
        memory=memory,
        operator=operator,
        price=price,
        transfer=transfer,
    )
