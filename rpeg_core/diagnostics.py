"""What a plan check has to say: the record that :func:`rpeg_core.hookspecs.rpeg_check_plan` returns."""

from __future__ import annotations

import enum

import attrs

__all__ = ["Diagnostic", "Severity"]


class Severity(enum.StrEnum):
    """How much a diagnostic matters."""

    INFO = "info"  # worth knowing
    WARNING = "warning"  # the plan runs, but probably not as wanted
    ERROR = "error"  # the plan must not be run


@attrs.frozen(kw_only=True)
class Diagnostic:
    """One remark of one check about one plan.

    Attributes:
        severity: how much it matters.
        message: what (name and value) and where (operator, container).
        hint: the next step, or None.
    """

    severity: Severity
    message: str
    hint: str | None = None
