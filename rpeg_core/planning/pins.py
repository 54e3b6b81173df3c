"""Pins: the part of a plan that the user fixes (``pin:`` in the experiment file)."""

from __future__ import annotations

import re
from typing import Any

import attrs

from rpeg_core.errors import ExperimentError
from rpeg_core.planning.assignment import Assignment
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.machine import Allocation

__all__ = ["Pin", "parse_gpus"]

_RANGE = re.compile(r"(\d+)(?:-(\d+))?")


@attrs.frozen(kw_only=True)
class Pin:
    """The fixed part of one operator's assignment; None leaves it to the search.

    Of the axes beyond the paper's plan space None leaves what ``space:`` says, without an entry there the default.
    """

    allocation: Allocation | None = None
    data: int | None = None
    pipeline: int | None = None
    tensor: int | None = None
    microbatches: int | None = None
    context: int | None = None
    expert: int | None = None
    sequence_parallel: bool | None = None
    recompute: Recompute | None = None
    precision: Precision | None = None

    @classmethod
    def of(cls, assignment: Assignment) -> Pin:
        """A pin that leaves no choice where ``space:`` has none."""
        layout, mode = assignment.layout, assignment.mode
        return cls(
            allocation=assignment.allocation,
            data=layout.data,
            pipeline=layout.pipeline,
            tensor=layout.tensor,
            microbatches=assignment.microbatches,
            context=layout.context if layout.context > 1 else None,
            expert=layout.expert if layout.expert > 1 else None,
            sequence_parallel=mode.sequence_parallel or None,
            recompute=mode.recompute,
            precision=None if mode.precision is Precision.BF16 else mode.precision,
        )

    def document(self) -> dict[str, Any]:
        """The pin as the experiment file writes it."""
        values = {
            "gpus": None if self.allocation is None else str(self.allocation),
            "dp": self.data,
            "pp": self.pipeline,
            "tp": self.tensor,
            "cp": self.context,
            "ep": self.expert,
            "microbatches": self.microbatches,
            "sequence_parallel": self.sequence_parallel,
            "recompute": None if self.recompute is None else self.recompute.value,
            "precision": None if self.precision is None else self.precision.value,
        }
        return {key: value for key, value in values.items() if value is not None}

    def __str__(self) -> str:
        return ", ".join(f"{key}={value}" for key, value in self.document().items())


def parse_gpus(value: object, where: str) -> Allocation:
    """``"8-15"``, ``"3"`` or ``3`` as an allocation.

    Raises:
        ExperimentError: anything else, or an empty range.
    """
    match = _RANGE.fullmatch(str(value)) if isinstance(value, str | int) and not isinstance(value, bool) else None
    first, last = (0, -1) if match is None else (int(match[1]), int(match[2] or match[1]))
    if last < first:
        raise ExperimentError(
            f"{where} is {value!r}",
            facts=['allowed: one contiguous range of GPU numbers, e.g. "0-15", or one number'],
        )
    return Allocation(first, last + 1)
