"""``space:`` of the experiment file: which values the axes beyond the paper's plan space may take."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import attrs

from rpeg_core.errors import ExperimentError, suggest
from rpeg_core.ir import Role
from rpeg_core.planning.axes import AXES, Axes, applies, illegal_value, missing_peak
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.sections import Section

__all__ = [
    "Choices",
    "Space",
    "axes_of",
    "flag",
    "framework_of",
    "member",
    "read_space",
    "without_peak",
]

_NOT_IN_ROLE = {"generation": ("cp", "sequence_parallel", "recompute"), "inference": ("recompute",)}


@attrs.frozen(kw_only=True)
class Choices:
    """One entry of ``space:``, of a role or an operator; None is not said.

    Attributes:
        context, expert, sequence_parallel, recompute, precision: the values that the search may choose from.
        framework: whose coefficients price the operators.
    """

    context: tuple[int, ...] | None = None
    expert: tuple[int, ...] | None = None
    sequence_parallel: tuple[bool, ...] | None = None
    recompute: tuple[Recompute, ...] | None = None
    precision: tuple[Precision, ...] | None = None
    framework: str | None = None

    def axis(self, name: str) -> tuple[Any, ...] | None:
        """The values of an axis, by its name in the file."""
        values: tuple[Any, ...] | None = getattr(self, AXES[name])
        return values

    def document(self) -> dict[str, Any]:
        """The entry as the experiment file writes it."""
        found: dict[str, Any] = {}
        for name in AXES:
            values = self.axis(name)
            if values is not None:
                found[name] = [value.value if isinstance(value, enum.Enum) else value for value in values]
        return found if self.framework is None else {**found, "framework": self.framework}


Space = Mapping[str, Choices]
"""Role or operator -> its entry. What an operator's own entry says counts; else that of its role."""


def read_space(section: Section) -> dict[str, Choices]:
    """The entries of ``space:``.

    Raises:
        ExperimentError, UnknownKeyError: a key or a value is not allowed.
    """
    found = {}
    for name in section.values:
        entry = section.section(name)
        entry.only(*(key for key in (*AXES, "framework") if key not in _NOT_IN_ROLE.get(name, ())))
        found[name] = _choices(entry)
    return found


def _choices(entry: Section) -> Choices:
    booleans = entry.sequence("sequence_parallel", bool, "true, false or both")
    return Choices(
        context=_degrees(entry, "cp"),
        expert=_degrees(entry, "ep"),
        sequence_parallel=_distinct(booleans),
        recompute=_members(entry, "recompute", Recompute),
        precision=_members(entry, "precision", Precision),
        framework=None if entry.get("framework") is None else entry.text("framework"),
    )


def _degrees(entry: Section, key: str) -> tuple[int, ...] | None:
    allowed = "whole numbers >= 1"
    values = entry.sequence(key, int, allowed)
    if any(value < 1 for value in values):
        raise ExperimentError(f"{entry.key(key)} is {list(values)!r}", facts=[f"allowed: {allowed}"])
    return _distinct(values)


_Member = TypeVar("_Member", bound=enum.Enum)


def member(entry: Section, key: str, kind: type[_Member]) -> _Member | None:
    """The single value of an axis, None when it is not said; a list is refused. Raises as :func:`read_space`."""
    if isinstance(entry.get(key), list | tuple):
        raise ExperimentError(
            f"{entry.key(key)} is {entry.get(key)!r}", facts=[f"allowed: one of {', '.join(v.value for v in kind)}"]
        )
    values = _members(entry, key, kind)
    return None if values is None else values[0]


def _members(entry: Section, key: str, kind: type[_Member]) -> tuple[_Member, ...] | None:
    names = [member.value for member in kind]
    values = entry.sequence(key, str, ", ".join(names))
    for value in values:
        if value not in names:
            raise ExperimentError(
                f"{entry.key(key)} names {value!r}",
                facts=[f"allowed: {', '.join(names)}"],
                hint=suggest(value, names),
            )
    return _distinct([kind(value) for value in values])


def flag(entry: Section, key: str) -> bool | None:
    """True or false, None when it is not said. Raises as :func:`read_space`."""
    return None if entry.get(key) is None else entry.boolean(key, False)


def _distinct(values: Sequence[Any]) -> tuple[Any, ...] | None:
    return tuple(dict.fromkeys(values)) or None


def axes_of(space: Space, operator: str, role: Role, models: Sequence[ModelSpec], hardware: HardwareProfile) -> Axes:
    """What the search may choose for one operator: the values that are legal for it.

    An axis of the role's entry that has no meaning for the operator (``ep`` for a dense model) stays at its default.

    Raises:
        ExperimentError: no value of an axis is legal, or an operator's own entry names an axis without meaning for it.
    """
    values: dict[str, Any] = {}
    for name in (role.value, operator):
        entry = space.get(name, Choices())
        for axis, attribute in AXES.items():
            asked = entry.axis(axis)
            if asked is None or (name == role.value and applies(axis, role, models) is not None):
                continue
            reasons = {value: illegal_value(axis, value, role, models, hardware) for value in asked}
            legal = tuple(value for value in asked if reasons[value] is None)
            if not legal:
                raise ExperimentError(
                    f"space.{name}.{axis} has no value that operator {operator!r} can have",
                    facts=list(dict.fromkeys(reason for reason in reasons.values() if reason is not None)),
                    hint=f"leave space.{name}.{axis} out, or add the default",
                )
            values[attribute] = legal
    return Axes(**values, framework=framework_of(space, operator, role) if models else "")


def framework_of(space: Space, operator: str, role: Role) -> str:
    """Whose coefficients price an operator; empty when nobody is named."""
    named = (space.get(name, Choices()).framework for name in (operator, role.value))
    return next((framework for framework in named if framework is not None), "")


def without_peak(space: Space, hardware: HardwareProfile) -> Iterator[str]:
    """A sentence for each precision that the space names and the GPU does not have."""
    for name, entry in space.items():
        reasons = [missing_peak(precision, hardware) for precision in entry.precision or ()]
        if any(reason is None for reason in reasons):  # else it is an error, see axes_of
            yield from (f"space.{name}.{reason}; it is left out" for reason in reasons if reason is not None)
