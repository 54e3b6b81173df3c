"""How wrong predicted seconds were where somebody measured: what a cost term or a calibrated profile says of itself."""

from __future__ import annotations

import math
from collections.abc import Mapping

import attrs

__all__ = ["TermError"]


def _non_negative(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not (value >= 0 and math.isfinite(value)):
        raise ValueError(f"{attribute.name} is {value!r}; allowed: a finite number >= 0")


def _finite(instance: object, attribute: attrs.Attribute[float], value: float) -> None:
    if not math.isfinite(value):
        raise ValueError(f"{attribute.name} is {value!r}; allowed: a finite number")


def _ordered(instance: object, attribute: attrs.Attribute[object], value: Mapping[str, tuple[float, float]]) -> None:
    for name, (low, high) in value.items():
        if not low <= high:
            raise ValueError(f"{attribute.name}.{name} is {low!r} to {high!r}; allowed: the smaller number first")


@attrs.frozen(kw_only=True)
class TermError:
    """The error of predicted seconds: ``log(measured / predicted)`` is normal with this mean and deviation.

    Of a cost term (:attr:`rpeg_core.records.CostTerm.errors`) it scales that term's seconds; of a calibrated profile
    (:attr:`rpeg_core.spec.machine.HardwareProfile.errors`) whole operators. The first one whose conditions hold counts.

    Attributes:
        log_std: standard deviation; +-1.645 of it hold 90 % of rows that had no part in it.
        log_bias: mean; above 0 what was measured took longer than predicted.
        rows: measured rows behind it; 0 for a number that the user states.
        source: of the rows.
        ranges: feature (:mod:`rpeg_core.accuracy.features`) -> least and largest value among the rows; beyond it a
            prediction extrapolates.
        hardware: names of the profiles that were measured; empty: the error belongs to whatever it is given for.
        precisions: values of :class:`rpeg_core.spec.execution.Precision` among the rows; empty: any.
        roles: ``generation``, ``inference``, ``training``; empty: all.
        mixture: of models with experts (True), without (False), of both (None).
        named_framework: of executions that name a framework (True), of the plan's own subset (False), of both (None).
        of_step: it scales the whole step instead: what comes between operators and no term prices; ``roles`` are then
            those of which the step has an operator.

    .. versionadded:: 0.1

    Raises:
        ValueError: a number is not finite, or negative where it must not be.
    """

    log_std: float = attrs.field(validator=_non_negative)
    log_bias: float = attrs.field(default=0.0, validator=_finite)
    rows: int = attrs.field(validator=_non_negative)
    source: str
    ranges: Mapping[str, tuple[float, float]] = attrs.field(factory=dict, validator=_ordered, hash=False)
    hardware: tuple[str, ...] = ()
    precisions: tuple[str, ...] = ()
    roles: tuple[str, ...] = ()
    mixture: bool | None = None
    named_framework: bool | None = None
    of_step: bool = False

    def concerns(self, *roles: str, mixture: bool, named_framework: bool) -> bool:
        """Whether its conditions hold for an operator, or for a step with operators of these roles."""
        return (
            (not self.roles or bool(set(roles) & set(self.roles)))
            and self.mixture in (None, mixture)
            and self.named_framework in (None, named_framework)
        )
