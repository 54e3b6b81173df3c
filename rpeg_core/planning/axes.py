"""The axes beyond the paper's plan space: context, expert and sequence parallelism, recomputation, precision.

The rules that no rule of the paper covers, each named after its axis. Those that need the degrees are
:func:`illegal_mode` here and the rules CP and EP of :mod:`rpeg_core.planning.candidates`; those that need only the
operator are :func:`illegal_value`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs

from rpeg_core.ir import Role
from rpeg_core.planning.assignment import Layout, Mode
from rpeg_core.planning.pins import Pin
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.spec.models import ModelSpec

__all__ = ["AXES", "Axes", "applies", "illegal_mode", "illegal_value", "missing_peak"]

AXES: Mapping[str, str] = {
    "cp": "context",
    "ep": "expert",
    "sequence_parallel": "sequence_parallel",
    "recompute": "recompute",
    "precision": "precision",
}
"""Name of each axis in experiment files, plans and reports -> attribute of :class:`Axes`."""


@attrs.frozen(kw_only=True)
class Axes:
    """The values that each axis may take for one operator; the default is the paper's subset.

    Attributes:
        context, expert: Pc and Pe.
        sequence_parallel, recompute, precision: of the :class:`Mode`.
        framework: whose coefficients price the operator, not searched; empty: those of the plan's own subset.
    """

    context: tuple[int, ...] = (1,)
    expert: tuple[int, ...] = (1,)
    sequence_parallel: tuple[bool, ...] = (False,)
    recompute: tuple[Recompute | None, ...] = (None,)
    precision: tuple[Precision, ...] = (Precision.BF16,)
    framework: str = ""

    def modes(self) -> Iterator[Mode]:
        """Every combination that makes a mode."""
        for sequence, recompute, precision in itertools.product(self.sequence_parallel, self.recompute, self.precision):
            yield Mode(sequence_parallel=sequence, recompute=recompute, precision=precision)

    def pinned(self, pin: Pin) -> Axes:
        """With the single values that a pin fixes."""
        given = {name: getattr(pin, name) for name in AXES.values()}
        return attrs.evolve(self, **{name: (value,) for name, value in given.items() if value is not None})


def applies(axis: str, role: Role, models: Sequence[ModelSpec]) -> str | None:
    """Why an axis has no meaning for an operator of ``role`` with ``models``, None when it has one."""
    if not models:
        return f"{axis}: a function without a model has none"
    if axis in ("cp", "sequence_parallel") and role is Role.GENERATION:
        return f"{axis}: it divides the tokens of whole sequences, and a generation makes one token at a time"
    if axis == "recompute" and role is not Role.TRAINING:
        return "recompute: only a training has a backward pass"
    if axis == "ep":
        for model in models:
            if model.moe is None:
                return f"ep: {model.name} is no mixture of experts"
    return None


def illegal_value(
    axis: str, value: Any, role: Role, models: Sequence[ModelSpec], hardware: HardwareProfile
) -> str | None:
    """Why no layout of an operator can have this value of an axis, None when one may."""
    if value == getattr(Axes(), AXES[axis])[0]:
        return None
    reason = applies(axis, role, models)
    if reason is None and axis == "ep":
        for model in models:
            if model.moe is not None and model.moe.experts % value:
                return f"ep: {value} does not divide the {model.moe.experts} experts of {model.name}"
    if reason is None and axis == "precision":
        return missing_peak(value, hardware)
    return reason


def missing_peak(precision: Precision, hardware: HardwareProfile) -> str | None:
    """Why a GPU has no GEMMs of a precision, None when its profile has their peak.

    The tensor cores with block scales (MXFP8) are those that came with FP4 (NVIDIA Blackwell).
    """
    device = hardware.device
    peaks = {
        Precision.BF16: device.peak_flops_per_s,
        Precision.FP8: device.fp8_speedup,
        Precision.MXFP8: device.fp8_speedup if device.fp4_speedup else None,
        Precision.NVFP4: device.fp4_speedup,
    }
    if peaks[precision] is None:
        return f"precision: {hardware.name} has no peak of {precision.value} matrix products"
    return None


def illegal_mode(layout: Layout, mode: Mode) -> str | None:
    """Why a layout cannot be executed in a mode, None when it can."""
    if mode.sequence_parallel and layout.tensor == 1:
        return "sequence_parallel: it divides over the tensor-parallel ranks, and tp=1 has one"
    return None
