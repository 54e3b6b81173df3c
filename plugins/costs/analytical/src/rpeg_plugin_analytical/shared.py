"""Terms and parts that both cost models have in common."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import TypeVar

import numpy as np
from numpy.typing import ArrayLike, NDArray

from rpeg_core.costing.batches import FusedBatch, Layouts, MemoryBatch, OperatorBatch, TransferBatch
from rpeg_core.passes.microtasks import interleaved_s
from rpeg_core.passes.microtasks import live_microbatches as live_of_each
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.collectives import all_to_all_s, point_to_point_s

__all__ = [
    "ADAM_STATE_BYTES_PER_PARAMETER",
    "MASTER_WEIGHT_BYTES_PER_PARAMETER",
    "OPTIMIZER_TRAFFIC_BYTES_PER_PARAMETER",
    "boundary_s",
    "checkpoint_interval",
    "communicate_s",
    "function_reward_s",
    "fused_bubble_s",
    "fused_checkpoints",
    "fused_messages_s",
    "live_microbatches",
    "of_model",
    "reshard_s",
]

Floats = NDArray[np.float64]
Batch = TypeVar("Batch", OperatorBatch, MemoryBatch)

ADAM_STATE_BYTES_PER_PARAMETER = 12.0
"""FP32 master weight and two FP32 moments: 4 + 4 + 4 bytes (paper, D-H)."""

MASTER_WEIGHT_BYTES_PER_PARAMETER = 4.0
"""Of those the part that is there from the start: Adam makes the moments in its first update (``Adam._init_group`` of
torch/optim/adam.py fills an empty state)."""

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

    ``n_intra/(Pp-1) * P2P_intra + n_inter/(Pp-1) * P2P_tier``, n_inter = max(0, ceil(Pp Pt / Ng) - 1). In a plan a
    stage has Pc Pt GPUs; all Pp - 1 boundaries are between nodes when it is a node or more.
    """
    layouts = batch.layouts
    boundaries = layouts.pipeline - 1
    gpus_per_node = batch.machine.gpus_per_node
    inter = -(-layouts.pipeline * layouts.tensor // gpus_per_node) - 1
    if not batch.execution.pipeline_outermost:
        stage = layouts.tensor * batch.execution.context
        inter = np.minimum(-(-layouts.pipeline * stage // gpus_per_node) - 1, boundaries)
    inter_share = inter / np.maximum(boundaries, 1)
    mixed_s = (1.0 - inter_share) * point_to_point_s(message_bytes, batch.intra_node_p2p)
    mixed_s = mixed_s + inter_share * point_to_point_s(message_bytes, batch.stage_p2p)
    return np.where(boundaries > 0, mixed_s, 0.0)


def fused_bubble_s(
    batch: FusedBatch[OperatorBatch],
    forward_s: Sequence[Sequence[Floats]],
    backward_s: Sequence[Sequence[Floats]],
    work_s: Floats,
) -> Floats:
    """What an interleaved schedule takes beyond ``work_s``, the mean stage's work of all its models.

    ``forward_s`` and ``backward_s`` have for each model the seconds of a microbatch on inner stages and on the last.
    """
    layouts = batch.layouts
    length_s = interleaved_s(layouts.pipeline, layouts.microbatches, np.array(forward_s), np.array(backward_s))
    return np.maximum(0.0, length_s - work_s)  # a pipeline of one stage has none, but for rounding


def fused_messages_s(batch: FusedBatch[OperatorBatch], messages_s: Sequence[Floats]) -> Floats:
    """``mb`` messages of each model, and once the ``2 Pp - 3`` that fill and drain the pipeline, of the slowest."""
    layouts = batch.layouts
    fill = np.maximum(2 * layouts.pipeline - 3, 0)
    total_s = fill * np.max(np.array(messages_s), axis=0)
    for message_s in messages_s:
        total_s = total_s + layouts.microbatches * message_s
    return total_s


def fused_checkpoints(batch: FusedBatch[MemoryBatch], microbatch_bytes: Sequence[Floats]) -> Floats:
    """Bytes of the microbatches that the first stage holds at the peak of the interleaved schedule."""
    layouts = batch.layouts
    live = np.array(
        [
            live_of_each(len(batch.parts), int(pipeline), int(count))
            for pipeline, count in zip(layouts.pipeline, layouts.microbatches, strict=True)
        ]
    ).reshape(len(layouts), len(batch.parts))
    largest_first = -np.sort(-np.array(microbatch_bytes), axis=0)
    total = np.zeros(len(layouts))
    for place in range(len(batch.parts)):
        total = total + live[:, place] * largest_first[place]
    return total


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
