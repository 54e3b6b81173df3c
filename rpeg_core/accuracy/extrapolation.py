"""Where a plan leaves what was measured."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import attrs

from rpeg_core.accuracy.features import FEATURES, features
from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.spec.accuracy import TermError

__all__ = ["Extrapolation", "extrapolations"]


@attrs.frozen(kw_only=True)
class Extrapolation:
    """One feature of the operators of one role that no measured row has.

    Attributes:
        role: of the operators.
        feature: of :data:`rpeg_core.accuracy.features.FEATURES`, or ``hardware`` or ``precision``.
        value: the plan's; of several operators the one farthest off.
        measured: least and largest value, or the names that were measured.
    """

    role: str
    feature: str
    value: float | str
    measured: tuple[float, float] | tuple[str, ...]


def extrapolations(
    operators: Iterable[tuple[tuple[OperatorBatch, ...], tuple[TermError, ...]]],
) -> tuple[Extrapolation, ...]:
    """Of a plan's operators, each given by its batches of one layout and the errors of its terms."""
    found: dict[tuple[str, str], tuple[float, Extrapolation]] = {}
    for batches, errors in operators:
        for batch in batches:
            for distance, each in _of(batch, errors):
                key = (each.role, each.feature)
                if key not in found or distance > found[key][0]:
                    found[key] = (distance, each)
    order = {name: i for i, name in enumerate(("hardware", "precision", *FEATURES))}
    return tuple(
        found[key][1] for key in sorted(found, key=lambda key: (key[0], order.get(key[1], len(order)), key[1]))
    )


def _of(batch: OperatorBatch, errors: tuple[TermError, ...]) -> Iterator[tuple[float, Extrapolation]]:
    role, values = batch.role.value, features(batch)
    if not values:
        return
    for feature, name, measured in (
        ("hardware", batch.hardware.name, [error.hardware for error in errors]),
        ("precision", batch.execution.precision.value, [error.precisions for error in errors]),
    ):
        if any(names and name not in names for names in measured):
            known = tuple(sorted({other for names in measured for other in names}))
            yield 1.0, Extrapolation(role=role, feature=feature, value=name, measured=known)
    for feature, value in values.items():
        low, high = _measured(feature, errors)
        if not low <= value <= high:
            distance = low / value if value < low else value / high
            yield distance, Extrapolation(role=role, feature=feature, value=value, measured=(low, high))


def _measured(feature: str, errors: tuple[TermError, ...]) -> tuple[float, float]:
    """The range that all errors cover; of two that have nothing in common the first."""
    low, high = 0.0, float("inf")
    ranges: list[Mapping[str, tuple[float, float]]] = [error.ranges for error in errors]
    for each in ranges:
        if feature in each and max(low, each[feature][0]) <= min(high, each[feature][1]):
            low, high = max(low, each[feature][0]), min(high, each[feature][1])
    return low, high
