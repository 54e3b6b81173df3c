"""Which measured error belongs to which of an operator's terms."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import attrs

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.records import CostTerm
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import HardwareProfile

__all__ = ["Chosen", "error_of_step", "error_of_term", "error_of_transfer"]


@attrs.frozen(kw_only=True)
class Chosen:
    """An error under a name; equal names are one and the same error, which all they scale share."""

    name: str
    error: TermError


def error_of_term(term: CostTerm, batch: OperatorBatch) -> Chosen | None:
    """The error of a term in a batch, None where it was never validated.

    A profile with errors of its own, one that was calibrated, speaks for the whole operator, whatever the term. With
    measured software terms have coefficients that no table validated: without errors of its own it has none.
    """
    role, mixture = batch.role.value, batch.model is not None and batch.model.moe is not None
    named = batch.execution.framework != ""
    owner, errors = _owner(term, batch.hardware) if batch.model is not None else (term.name, term.errors)
    return _first(owner, errors, role, mixture=mixture, named=named, of_step=False)


def error_of_transfer(term: CostTerm) -> Chosen | None:
    """The error of a term that prices transfers, None where it was never validated."""
    return _first(term.name, term.errors, "", mixture=False, named=False, of_step=False)


def error_of_step(
    terms: Sequence[CostTerm], hardware: HardwareProfile, roles: Iterable[Role], *, mixture: bool, named: bool
) -> tuple[Chosen, ...]:
    """The errors that scale whole steps with operators of these roles, of a calibrated profile or else of the terms."""
    names = sorted({role.value for role in roles})
    owners = dict(_owner(term, hardware) for term in terms)
    found = [
        _first(owner, errors, *names, mixture=mixture, named=named, of_step=True) for owner, errors in owners.items()
    ]
    return tuple(chosen for chosen in found if chosen is not None)


def _owner(term: CostTerm, hardware: HardwareProfile) -> tuple[str, tuple[TermError, ...]]:
    """Who speaks for a term on some hardware."""
    if hardware.errors is not None or hardware.software is not None:
        return f"hardware {hardware.name}", hardware.errors or ()
    return term.name, term.errors


def _first(
    owner: str, errors: Sequence[TermError], *roles: str, mixture: bool, named: bool, of_step: bool
) -> Chosen | None:
    for index, error in enumerate(errors):
        if error.of_step is of_step and error.concerns(*roles, mixture=mixture, named_framework=named):
            return Chosen(name=f"{owner} #{index}", error=error)
    return None
