"""Measured errors of cost terms and profiles: conditions that can hold, features that exist, rows behind them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rpeg_core.accuracy.features import FEATURES
from rpeg_core.ir import Role
from rpeg_core.records import CostTerm, HardwareProfile, Target
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.execution import Precision
from rpeg_core.testing.checks.outcome import require

__all__ = ["errors_of_profile", "errors_of_term"]

ROLES = tuple(role.value for role in Role)
PRECISIONS = tuple(precision.value for precision in Precision)


def errors_of_term(term: CostTerm) -> None:
    """Only seconds have errors, and each of them can be chosen."""
    problems = list(_problems(term.errors))
    if term.errors and term.target is Target.MEMORY:
        problems.append("errors are of seconds; a term that prices memory has none")
    require(problems)


def errors_of_profile(record: HardwareProfile) -> None:
    """Each can be chosen, and is this profile's own."""
    errors = record.errors or ()
    problems = list(_problems(errors))
    problems += [f"errors[{i}].hardware names other profiles" for i, e in enumerate(errors) if e.hardware]
    require(problems)


def _problems(errors: Sequence[TermError]) -> Iterator[str]:
    for index, error in enumerate(errors):
        where = f"errors[{index}]"
        if not isinstance(error, TermError):
            yield f"{where} is a {type(error).__name__}; allowed: TermError"
            continue
        for role in error.roles:
            if role not in ROLES:
                yield f"{where}.roles has {role!r}; allowed: {', '.join(ROLES)}"
        for precision in error.precisions:
            if precision not in PRECISIONS:
                yield f"{where}.precisions has {precision!r}; allowed: {', '.join(PRECISIONS)}"
        for feature in error.ranges:
            if feature not in FEATURES:
                yield f"{where}.ranges has {feature!r}; allowed: {', '.join(FEATURES)}"
        if not error.source.strip():
            yield f"{where}.source is empty"
        if error.rows == 0 and (error.log_std > 0 or error.log_bias != 0):
            yield f"{where}.rows is 0, yet it states an error; allowed: the number of measured rows behind it"
        if any(_covers(earlier, error) for earlier in errors[:index] if isinstance(earlier, TermError)):
            yield f"{where} is never chosen: an error before it has the same or wider conditions"


def _covers(first: TermError, later: TermError) -> bool:
    """Whether the conditions of ``first`` hold wherever those of ``later`` do."""
    return (
        first.of_step is later.of_step
        and (not first.roles or (bool(later.roles) and set(later.roles) <= set(first.roles)))
        and first.mixture in (None, later.mixture)
        and first.named_framework in (None, later.named_framework)
    )
