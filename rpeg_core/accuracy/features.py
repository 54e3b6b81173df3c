"""The physical features of an operator by which measured rows and plans are compared."""

from __future__ import annotations

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role

__all__ = ["FEATURES", "features"]

FEATURES = (
    "gpus",
    "data",
    "pipeline",
    "tensor",
    "layers",
    "hidden",
    "parameters",
    "sequence_tokens",
    "microbatch_tokens",
    "replica_sequences",
)
"""Replicas of a generation do not meet: its GPUs and dp are no features of it, its sequences per replica are."""


def features(batch: OperatorBatch) -> dict[str, float]:
    """The features of a batch of one layout; empty without a model."""
    model, layouts = batch.model, batch.layouts
    if model is None:
        return {}
    tokens = float(batch.workload.sequence_tokens)
    found = {
        "pipeline": float(layouts.pipeline[0]),
        "tensor": float(layouts.tensor[0]),
        "layers": float(model.layers),
        "hidden": float(model.hidden),
        "parameters": float(model.total_parameters),
        "sequence_tokens": tokens,
    }
    if batch.role is Role.GENERATION:
        return {**found, "replica_sequences": float(batch.sequences / layouts.data[0])}
    return {
        "gpus": float(layouts.gpus[0]),
        "data": float(layouts.data[0]),
        **found,
        "microbatch_tokens": float(batch.sequences_per_microbatch[0]) * tokens,
    }
