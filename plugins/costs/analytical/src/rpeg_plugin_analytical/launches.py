"""Host time of measured software: what a layer and a stage take however small their kernels are."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Recompute
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical.frameworks import used_by

__all__ = ["exposed_seconds", "replica_step_seconds", "stage_host_seconds"]

Floats = NDArray[np.float64]


def stage_host_seconds(batch: OperatorBatch, model: ModelSpec) -> Floats:
    """One microbatch in the mean stage, ``(L/Pp) t_layer + t_pass``; in training forward, recomputation, backward.

    A prefill is one more token step for the host.
    """
    used = used_by(batch)
    layers = model.layers / batch.layouts.pipeline
    if batch.role is Role.GENERATION:
        return layers * used.token_layer_s
    layer_s, passes = used.forward_layer_s, 1.0
    if batch.role is Role.TRAINING:
        layer_s = layer_s * (1.0 + (batch.execution.recompute is Recompute.FULL)) + used.backward_layer_s
        passes = 2.0
    return layers * layer_s + passes * used.pass_s


def exposed_seconds(batch: OperatorBatch, host_s: Floats, kernels_s: Floats) -> Floats:
    """What the host adds to the kernels: what is longer than they are when it runs ahead of the device, else all."""
    return np.maximum(0.0, host_s - kernels_s) if used_by(batch).launches_ahead else host_s


def replica_step_seconds(batch: OperatorBatch) -> Floats:
    """Per microbatch of a token step: the ranks of a replica hear which tokens were chosen."""
    layouts = batch.layouts
    return np.where(layouts.pipeline * layouts.tensor > 1, used_by(batch).token_exchange_s, 0.0)
