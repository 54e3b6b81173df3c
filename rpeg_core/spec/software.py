"""What the software that executes plans costs beyond the arithmetic, measured on a machine by ``rpeg calibrate``."""

from __future__ import annotations

from typing import Literal

import attrs

__all__ = ["Software"]


@attrs.frozen(kw_only=True)
class Software:
    """One backend on one machine; cost terms price an operator with it unless an execution names a framework.

    Times of the host are per GPU and pass of one microbatch. Where kernels are launched ahead of their execution
    (``asynchronous``) a layer takes the longer of launches and kernels, else both.

    Attributes:
        backend: whose operations were measured.
        launches: whether the host runs ahead of the device (GPUs) or is the device (CPU cores).
        recompute: ``none`` or ``full``, what the backward pass computes again.
        attention: ``fused``, or ``unfused``: scores go through memory.
        scored: the tokens that the head is applied to outside generation.
        gradient_bytes: bytes per gradient element that data parallelism reduces.
        forward_layer_s: host time of a layer's forward pass outside generation.
        backward_layer_s: of its backward pass.
        pass_s: of what a stage does once per microbatch: embedding, head, loss, schedule.
        update_s: of an optimizer update.
        update_layer_s: the part of it that grows with the layers.
        token_layer_s: of a layer in a token step of generation, and in its prefill.
        token_step_s: of a token step beside its layers: sampling and bookkeeping.
        token_sequence_s: the part of it that grows with the sequences.
        token_exchange_s: agreeing on the tokens of a step, in a replica of more than one GPU.
        node_s: from a node's dispatch to its begin, and from its end to the next dispatch.
        attention_share: speed of the scores' products over that of the profile's GEMMs or attention.
        cache_passes: memory traffic of reading a cached K and V over one read.
        pointwise_passes: memory traffic of norms, residuals and activations over that of perfectly fused kernels.
        score_bytes: memory traffic per attention score, for unfused attention.
        logit_passes: memory traffic per logit over that of a fused loss.
        sampling_passes: memory traffic per logit in a token step over that of a fused loss.
        stream_share: rate at which GEMMs of few rows read weights over the streaming rate; above 1 from caches.
        tensor_exposed, pipeline_exposed, data_exposed: communication time over that of the measured links.
        optimizer_passes: memory traffic of the optimizer over that of a fused one.
    """

    backend: str
    launches: Literal["asynchronous", "synchronous"] = "asynchronous"
    recompute: Literal["none", "full"] = "none"
    attention: Literal["fused", "unfused"] = "fused"
    scored: Literal["all", "responses"] = "all"
    gradient_bytes: float = 2.0
    forward_layer_s: float = 0.0
    backward_layer_s: float = 0.0
    pass_s: float = 0.0
    update_s: float = 0.0
    update_layer_s: float = 0.0
    token_layer_s: float = 0.0
    token_step_s: float = 0.0
    token_sequence_s: float = 0.0
    token_exchange_s: float = 0.0
    node_s: float = 0.0
    attention_share: float = 1.0
    cache_passes: float = 1.0
    pointwise_passes: float = 1.0
    score_bytes: float = 13.0
    logit_passes: float = 1.0
    sampling_passes: float = 0.0
    stream_share: float = 1.0
    tensor_exposed: float = 1.0
    pipeline_exposed: float = 1.0
    data_exposed: float = 1.0
    optimizer_passes: float = 1.0
