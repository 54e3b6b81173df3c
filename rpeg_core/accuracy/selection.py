"""Which measured error belongs to which of an operator's terms."""

from __future__ import annotations

from collections.abc import Sequence

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

    A profile with errors of its own, one that was calibrated, speaks for the whole operator, whatever the term.
    """
    role, mixture = batch.role.value, batch.model is not None and batch.model.moe is not None
    named = batch.execution.framework != ""
    own = batch.hardware.errors if batch.model is not None else ()
    owner = f"hardware {batch.hardware.name}" if own else term.name
    return _first(owner, own or term.errors, role, mixture=mixture, named=named, of_step=False)


def error_of_transfer(term: CostTerm) -> Chosen | None:
    """The error of a term that prices transfers, None where it was never validated."""
    return _first(term.name, term.errors, "", mixture=False, named=False, of_step=False)


def error_of_step(
    terms: Sequence[CostTerm], hardware: HardwareProfile, *, mixture: bool, named: bool
) -> tuple[Chosen, ...]:
    """The errors that scale whole steps; those of a calibrated profile take the place of the terms'."""
    if hardware.errors:
        owners: list[tuple[str, tuple[TermError, ...]]] = [(f"hardware {hardware.name}", hardware.errors)]
    else:
        owners = [(term.name, term.errors) for term in terms]
    found = [
        _first(owner, errors, Role.TRAINING.value, mixture=mixture, named=named, of_step=True)
        for owner, errors in owners
    ]
    return tuple(chosen for chosen in found if chosen is not None)


def _first(
    owner: str, errors: Sequence[TermError], role: str, *, mixture: bool, named: bool, of_step: bool
) -> Chosen | None:
    for index, error in enumerate(errors):
        if error.of_step is of_step and error.concerns(role, mixture=mixture, named_framework=named):
            return Chosen(name=f"{owner} #{index}", error=error)
    return None
