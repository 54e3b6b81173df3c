"""How a framework executes an operator, beyond the plan's (Pd, Pp, Pt) and microbatches.

The default is the paper's subset: 16-bit work, full recomputation, nothing sharded beyond the three degrees and no
communication hidden behind compute. Cost terms read it from their batch; which framework's coefficients belong to
it is the cost plugin's business.
"""

from __future__ import annotations

import enum

import attrs

__all__ = ["Execution", "Precision", "Recompute", "Sharding"]


class Precision(enum.Enum):
    """Element type of the layers' GEMMs; attention, head and norms stay in 16 bits."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"


class Recompute(enum.Enum):
    """What the backward pass computes again.

    ``FULL`` repeats each layer's forward pass; ``SELECTIVE`` the attention core (Korthikanti et al.,
    arXiv:2205.05198, section 5); ``OPERATOR`` every second matrix product and all pointwise work (the ``op`` policy
    of torchtitan's selective activation checkpointing); ``NONE`` nothing.
    """

    NONE = "none"
    SELECTIVE = "selective"
    OPERATOR = "operator"
    FULL = "full"

    @property
    def linear(self) -> float:
        """Forward passes of the layers' matrices in the backward pass."""
        return {"full": 1.0, "operator": 0.5}.get(self.value, 0.0)

    @property
    def attention(self) -> float:
        """Forward passes of the attention core in the backward pass."""
        return {"full": 1.0, "selective": 1.0}.get(self.value, 0.0)

    @property
    def pointwise(self) -> float:
        """Forward passes of norms, activations and residuals in the backward pass."""
        return {"full": 1.0, "operator": 1.0}.get(self.value, 0.0)


class Sharding(enum.Enum):
    """What data parallelism divides: nothing, the optimizer's state (ZeRO-1), or all of the model (ZeRO-3, FSDP)."""

    NONE = "none"
    OPTIMIZER = "optimizer"
    FULL = "full"


def _degree() -> int:
    return attrs.field(default=1, validator=[attrs.validators.instance_of(int), attrs.validators.ge(1)])


@attrs.frozen(kw_only=True)
class Execution:
    """One way to execute an operator.

    Attributes:
        framework: whose coefficients the cost terms use; empty: those of the plan's own 3D subset.
        precision: of the layers' GEMMs.
        recompute: in training, what the backward pass computes again.
        sequence_parallel: norms and residuals are divided over Pt, AllReduces become ReduceScatter and AllGather.
        context: Pc, ranks that share each sequence; a replica then has Pc * Pp * Pt GPUs.
        expert: Pe, ranks over which a layer's experts are spread, taken from the replica's or the data-parallel ranks.
        expert_tensor: tensor-parallel degree of the experts; None is Pt without expert parallelism, else 1.
        virtual_stages: v, model chunks per pipeline stage (interleaved schedule).
        sharding: what data parallelism divides.
        shard_ranks: ranks of one sharding group; 0 is all of Pd (and Pc).
        short_moments: the optimizer's two moments and the gradients have 16 bits, as Megatron-Core's precision-aware
            optimizer may.
        frozen_base: only adapters are trained: no weight gradients, no optimizer of the base model.
        fixed_capacity: experts take a fixed number of tokens and drop the rest, so that the host need not wait for
            the counts.
        offloaded: kept activations go to the host.
        chunked_loss: the head and the loss work on part of the tokens at a time.
        cache_bytes_per_element: of the KV cache; None is that of the workload.
        pipeline_outermost: ranks are numbered tensor, context, data, pipeline (Megatron-LM), not replica by replica.
    """

    framework: str = ""
    precision: Precision = Precision.BF16
    recompute: Recompute = Recompute.FULL
    sequence_parallel: bool = False
    context: int = _degree()
    expert: int = _degree()
    expert_tensor: int | None = None
    virtual_stages: int = _degree()
    sharding: Sharding = Sharding.OPTIMIZER
    shard_ranks: int = 0
    short_moments: bool = False
    frozen_base: bool = False
    fixed_capacity: bool = False
    offloaded: bool = False
    chunked_loss: bool = False
    cache_bytes_per_element: float | None = None
    pipeline_outermost: bool = False
