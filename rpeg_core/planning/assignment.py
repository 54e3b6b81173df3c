"""The execution plan ``P = (sigma, Pi, mb)``: what each operator runs on and how it is split (paper, A-C)."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from rpeg_core.spec.machine import Allocation

__all__ = ["Assignment", "ExecutionPlan", "Layout"]


@attrs.frozen(order=True)
class Layout:
    """Parallel degrees ``Pi = (Pd, Pp, Pt)``. Ranks are numbered replica-major, then stage, then tensor rank."""

    data: int
    pipeline: int
    tensor: int

    @property
    def gpus(self) -> int:
        """``Pd * Pp * Pt``."""
        return self.data * self.pipeline * self.tensor

    def __str__(self) -> str:
        return f"dp{self.data} pp{self.pipeline} tp{self.tensor}"


@attrs.frozen(order=True)
class Assignment:
    """One operator's part of the plan: ``sigma(v)``, ``Pi(v)``, ``mb(v)``."""

    allocation: Allocation
    layout: Layout
    microbatches: int


ExecutionPlan = Mapping[str, Assignment]
"""Operator name -> assignment, for every operator of one graph."""
