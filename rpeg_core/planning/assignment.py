"""The execution plan ``P = (sigma, Pi, mb)``: what each operator runs on and how it is split (paper, A-C)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.machine import Allocation

__all__ = ["Assignment", "ExecutionPlan", "Layout", "Mode"]


@attrs.frozen(order=True)
class Layout:
    """Parallel degrees ``Pi = (Pd, Pp, Pt)``, and beyond the paper Pc and Pe.

    Ranks are numbered replica-major, then stage, then context rank, then tensor rank.

    Attributes:
        data, pipeline, tensor: Pd, Pp, Pt.
        context: Pc, ranks that share each sequence; they hold the same weights.
        expert: Pe, ranks of a stage, over all replicas, that share the experts of each layer. It needs no GPUs of its
            own: of the Pd * Pc * Pt ranks of a stage Pe consecutive ones form a group.
    """

    data: int
    pipeline: int
    tensor: int
    context: int = 1
    expert: int = 1

    @property
    def gpus(self) -> int:
        """``Pd * Pc * Pp * Pt``."""
        return self.data * self.replica

    @property
    def stage(self) -> int:
        """GPUs of one pipeline stage of one replica, ``Pc * Pt``."""
        return self.context * self.tensor

    @property
    def replica(self) -> int:
        """GPUs of one replica, ``Pc * Pp * Pt``."""
        return self.pipeline * self.stage

    @property
    def weights(self) -> tuple[int, int, int, int]:
        """What decides which part of a model each GPU of a given allocation holds.

        Two layouts on the same GPUs that are equal in this need no RESHARD. Context ranks hold the same weights, so
        that without a pipeline they are like data-parallel ones; with one they widen the stages.
        """
        return self.pipeline, self.tensor, self.stage if self.pipeline > 1 else self.tensor, self.expert

    def __str__(self) -> str:
        further = [f"{name}{value}" for name, value in (("cp", self.context), ("ep", self.expert)) if value > 1]
        return " ".join([f"dp{self.data} pp{self.pipeline} tp{self.tensor}", *further])


def _value(member: Precision | Recompute | None) -> str:
    return "" if member is None else member.value


@attrs.frozen(kw_only=True, order=True)
class Mode:
    """How an operator is executed in its layout; the default is the paper's subset.

    Attributes:
        sequence_parallel: norms and residuals are divided over Pt.
        recompute: of a training; None is what the profile's software does, and ``FULL`` where none was measured.
        precision: of the layers' matrix products.
    """

    sequence_parallel: bool = False
    recompute: Recompute | None = attrs.field(default=None, order=_value)
    precision: Precision = attrs.field(default=Precision.BF16, order=_value)

    def document(self) -> dict[str, bool | str]:
        """What is not the default, as plans and experiment files write it."""
        return {
            **({"sequence_parallel": True} if self.sequence_parallel else {}),
            **({} if self.recompute is None else {"recompute": self.recompute.value}),
            **({} if self.precision is Precision.BF16 else {"precision": self.precision.value}),
        }

    def __str__(self) -> str:
        parts = [name for name, value in self.document().items() if value is True]
        return ", ".join(parts + [f"{name} {value}" for name, value in self.document().items() if value is not True])


@attrs.frozen(order=True)
class Assignment:
    """One operator's part of the plan: ``sigma(v)``, ``Pi(v)``, ``mb(v)``, and its mode."""

    allocation: Allocation
    layout: Layout
    microbatches: int
    mode: Mode = attrs.field(factory=Mode)

    def document(self) -> dict[str, object]:
        """The assignment as plans write it; what goes beyond the paper only where it is not the default."""
        layout = self.layout
        return {
            "gpus": str(self.allocation),
            "dp": layout.data,
            "pp": layout.pipeline,
            "tp": layout.tensor,
            **({} if layout.context == 1 else {"cp": layout.context}),
            **({} if layout.expert == 1 else {"ep": layout.expert}),
            "microbatches": self.microbatches,
            **self.mode.document(),
        }


ExecutionPlan = Mapping[str, Assignment]
"""Operator name -> assignment, for every operator of one graph."""
