"""Terms and parts that both cost models have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpeg_core.costing.batches import Layouts, MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.collectives import all_to_all_s, point_to_point_s

__all__ = [
    "ADAM_STATE_BYTES_PER_PARAMETER",
    "OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER",
    "boundary_s",
    "checkpoint_interval",
    "communicate_s",
    "function_reward_s",
    "live_microbatches",
    "of_model",
    "reshard_s",
]

Floats = NDArray[np.float64]
Batch = TypeVar("Batch", OperatorBatch, MemoryBatch)

ADAM_STATE_BYTES_PER_PARAMETER = 12.0
"""FP32 master weight and two FP32 moments: 4 + 4 + 4 bytes (paper, D-H)."""

OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER = 18.0
"""Effective memory traffic of an Adam update (paper, D-F)."""


def of_model(term: Callable[[Batch, ModelSpec], Floats]) -> Callable[[Batch], Floats]:
    """The term of ``(batch, batch.model)``, and zeros for an operator without a model (a function reward)."""

    @functools.wraps(term)
    def guarded(batch: Batch) -> Floats:
        return np.zeros(len(batch.layouts)) if batch.model is None else term(batch, batch.model)

    return guarded


def function_reward_s(batch: OperatorBatch) -> Floats:
    """``seconds_per_sample * sequences / Pd`` for a function, zero for a model."""
    if batch.model is not None or batch.seconds_per_sample is None:
        return np.zeros(len(batch.layouts))
    return batch.seconds_per_sample * batch.sequences / batch.layouts.data


def boundary_s(batch: OperatorBatch, message_bytes: ArrayLike) -> Floats:
    """Mean time of one message over a pipeline's Pp - 1 boundaries, 0 when Pp = 1 (paper, D-D b).

    ``n_intra/(Pp-1) * P2P_intra + n_inter/(Pp-1) * P2P_tier``, n_inter = max(0, ceil(Pp Pt / Ng) - 1).
    """
    layouts = batch.layouts
    boundaries = layouts.pipeline - 1
    gpus_per_node = batch.machine.gpus_per_node
    inter = -(-layouts.pipeline * layouts.tensor // gpus_per_node) - 1
    inter_share = inter / np.maximum(boundaries, 1)
    mixed_s = (1.0 - inter_share) * point_to_point_s(message_bytes, batch.intra_node_p2p)
    mixed_s = mixed_s + inter_share * point_to_point_s(message_bytes, batch.stage_p2p)
    return np.where(boundaries > 0, mixed_s, 0.0)


def communicate_s(batch: TransferBatch) -> Floats:
    """COMM: ``alpha + bytes/min(|src|, |dst|) * beta``, point to point (paper, D-G a)."""
    if batch.reshard:
        return np.zeros(len(batch.bytes))
    pairs = np.minimum(batch.source_gpus, batch.destination_gpus)
    return node_s(batch) + point_to_point_s(batch.bytes / pairs, batch.p2p_links)


def reshard_s(batch: TransferBatch) -> Floats:
    """RESHARD: ``AllToAll(bytes/|sigma|, |sigma|)`` (paper, D-G b)."""
    if not batch.reshard:
        return np.zeros(len(batch.bytes))
    gpus = batch.destination_gpus
    return node_s(batch) + all_to_all_s(batch.bytes / gpus, gpus, batch.collective_links)


def node_s(batch: TransferBatch) -> float:
    """Dispatching a node with measured software, else 0."""
    software = batch.hardware.software
    return 0.0 if software is None else software.node_s


def checkpoint_interval(stage_layers: NDArray[np.int64]) -> NDArray[np.int64]:
    """c = ``max(1, floor(sqrt(L/Pp)))``: every c-th layer's output is kept for the backward pass (D-I a)."""
    return np.maximum(1, np.floor(np.sqrt(stage_layers)).astype(np.int64))


def live_microbatches(layouts: Layouts) -> NDArray[np.int64]:
    """``min(mb, Pp)``: microbatches whose activations the first stage holds under 1F1B (paper, D-I a)."""
    return np.minimum(layouts.microbatches, layouts.pipeline)
