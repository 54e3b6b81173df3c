"""Communication inside a layer: tensor, context and expert parallelism, what compute does not hide of it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import Links, OperatorBatch, links
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Recompute
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.collectives import all_reduce_s
from rpeg_plugin_analytical.frameworks import used_by
from rpeg_plugin_analytical.linear import local_tokens
from rpeg_plugin_analytical.microbatches import Pass
from rpeg_plugin_analytical.shards import expert_tensor, kv_width_per_rank

__all__ = ["context_layer_seconds", "expert_layer_seconds", "group_links", "tensor_layer_seconds"]

Floats = NDArray[np.float64]


def group_links(batch: OperatorBatch, ranks: Floats | float, *, collective: bool) -> Links:
    """Links of a group of ``ranks`` consecutive GPUs: intra-node while these fit the link domain."""
    domain = batch.hardware.link_domain_gpus or batch.machine.gpus_per_node
    spanned = np.broadcast_to(np.asarray(ranks), (len(batch.layouts),))
    tier = (spanned > domain).astype(np.int64) + (spanned > max(domain, batch.machine.gpus_per_rack))
    return links(batch.hardware.tiers, tier, collective=collective)


def tensor_layer_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """2 AllReduces per layer and forward pass, 2 in the backward, 2 in the recomputation (D-D a).

    Sequence parallelism replaces each by an AllGather and a ReduceScatter of the same bytes.
    """
    execution = batch.execution
    reduces = 2.0
    if batch.role is Role.TRAINING:
        reduces = 4.0 + 2.0 * (execution.recompute is Recompute.FULL)
    payload = local_tokens(batch, part) * model.hidden * batch.workload.bytes_per_element
    used, ranks = used_by(batch), batch.layouts.tensor
    seconds = all_reduce_s(payload, ranks, batch.tp_links)
    if batch.role is Role.GENERATION and used.decode_reduce_s is not None:
        moved_s = 2.0 * (ranks - 1) / ranks * payload / batch.tp_links.bandwidth_bytes_per_s
        seconds = np.where(ranks > 1, np.minimum(seconds, used.decode_reduce_s + moved_s), 0.0)
    return used.tensor_exposed * reduces * seconds


def context_layer_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """Pc - 1 ring steps of the local K and V, in the backward pass also of their gradients."""
    execution, layouts = batch.execution, batch.layouts
    if execution.context == 1 or part.decode:
        return np.zeros(len(layouts))
    passes = 1.0
    if batch.role is Role.TRAINING:
        passes = 3.0 + execution.recompute.attention
    width = 2.0 * kv_width_per_rank(model, layouts.tensor)
    payload = local_tokens(batch, part) * width * batch.workload.bytes_per_element
    found = group_links(batch, layouts.tensor * execution.context, collective=False)
    step_s = found.latency_s + payload / found.bandwidth_bytes_per_s
    return used_by(batch).context_exposed * passes * (execution.context - 1) * step_s


def expert_layer_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> Floats:
    """Dispatch and combine: two AllToAlls per mixture layer and forward pass, two in the backward."""
    execution, layouts = batch.execution, batch.layouts
    if model.moe is None or execution.expert == 1:
        return np.zeros(len(layouts))
    exchanges = 2.0
    if batch.role is Role.TRAINING:
        exchanges = 4.0 + 2.0 * execution.recompute.linear
    sparse = 1.0 - model.moe.dense_layers / model.layers
    tokens = local_tokens(batch, part) / layouts.tensor
    token_bytes = tokens * model.hidden * batch.workload.bytes_per_element
    copies = float(model.moe.active_experts)
    ranks = execution.expert * expert_tensor(batch)
    domain = batch.hardware.link_domain_gpus or batch.machine.gpus_per_node
    near, far = batch.hardware.tiers[0].collective, group_links(batch, _expert_span(batch, ranks), collective=True)
    # A token crosses the network once per node that holds one of its experts, and is copied inside the node.
    nodes = np.maximum(1.0, np.ceil(_expert_span(batch, ranks) / domain))
    visited = nodes * (1.0 - np.power(1.0 - 1.0 / nodes, copies))
    far_s = token_bytes * visited * (nodes - 1.0) / nodes / far.bandwidth_bytes_per_s
    near_s = token_bytes * copies * (ranks - 1.0) / ranks / near.bandwidth_bytes_per_s
    latency_s = np.where(nodes > 1.0, far.latency_s, near.latency_s) * np.log2(np.maximum(ranks, 2.0))
    seconds = latency_s + np.maximum(far_s, near_s)
    return used_by(batch).expert_exposed * sparse * exchanges * seconds


def _expert_span(batch: OperatorBatch, ranks: Floats) -> Floats:
    """GPUs from the first to the last rank of an expert group.

    Beyond the ranks of a stage of one replica the group takes in those of the next replicas, and with replica-major
    numbers the other stages lie between.
    """
    layouts, execution = batch.layouts, batch.execution
    if execution.pipeline_outermost:
        return ranks
    return np.where(ranks > execution.context * layouts.tensor, ranks * layouts.pipeline, ranks)
