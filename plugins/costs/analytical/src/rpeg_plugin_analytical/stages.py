"""Seconds that one microbatch spends in a pipeline stage, in the model ``analytical``, by physical effect.

Kernels run one after another, so their times add up: the matrices of the layers, attention, memory-bound work
between them, what of the communication compute does not hide, and on the last stage the head. The paper takes one
roofline over the whole work (D-A b).
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.spec.models import ModelSpec
from rpeg_plugin_analytical import attention, exchange, launches, linear, pointwise
from rpeg_plugin_analytical.microbatches import Pass

__all__ = ["StageSeconds", "stage_seconds"]

Floats = NDArray[np.float64]


@attrs.frozen(kw_only=True, eq=False)
class StageSeconds:
    """One microbatch of one pass, all shape (n,): the mean stage's layers by effect, and the head.

    ``head_s`` and ``head_pointwise_s`` fall on the last stage only.
    """

    linear_s: Floats
    attention_s: Floats
    pointwise_s: Floats
    tensor_s: Floats
    context_s: Floats
    expert_s: Floats
    launch_s: Floats
    head_s: Floats
    head_pointwise_s: Floats

    @property
    def layers_s(self) -> Floats:
        """Every stage."""
        return self.kernels_s + self.launch_s

    @property
    def kernels_s(self) -> Floats:
        """Every stage, without what the host adds."""
        return self.linear_s + self.attention_s + self.pointwise_s + self.tensor_s + self.context_s + self.expert_s

    @property
    def last_s(self) -> Floats:
        """What the last stage does in addition."""
        return self.head_s + self.head_pointwise_s


def stage_seconds(batch: OperatorBatch, model: ModelSpec, part: Pass) -> StageSeconds:
    """Seconds per microbatch of one pass; in training with recomputation and backward."""
    layers = model.layers / batch.layouts.pipeline
    found = StageSeconds(
        linear_s=layers * linear.layer_seconds(batch, model, part),
        attention_s=layers * attention.layer_seconds(batch, model, part),
        pointwise_s=layers * pointwise.layer_seconds(batch, model, part),
        tensor_s=layers * exchange.tensor_layer_seconds(batch, model, part),
        context_s=layers * exchange.context_layer_seconds(batch, model, part),
        expert_s=layers * exchange.expert_layer_seconds(batch, model, part),
        launch_s=np.zeros(len(batch.layouts)),
        head_s=linear.head_seconds(batch, model, part),
        head_pointwise_s=pointwise.head_seconds(batch, model, part),
    )
    host_s = launches.stage_host_seconds(batch, model)
    return attrs.evolve(found, launch_s=launches.exposed_seconds(batch, host_s, found.kernels_s))
