"""What each axis beyond dp, pp and tp bought, in words: the plan evaluated with that axis at its default."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from rpeg_core.costing.batches import execution_of
from rpeg_core.errors import RpegError
from rpeg_core.planning.assignment import Assignment
from rpeg_core.planning.recheck import Recheck
from rpeg_core.report.structure import Rival
from rpeg_core.spec.execution import Precision
from rpeg_core.spec.machine import Allocation, HardwareProfile

__all__ = ["Unplaced", "rivals"]


@attrs.frozen(kw_only=True)
class Unplaced:
    """An axis whose default is not legal in the places of the plan, and why."""

    chosen: str
    other: str
    reason: str

    def sentence(self) -> str:
        """``cp=4 of actor_training: cp=1 is not legal in these places: P3: ...``."""
        return f"{self.chosen}: {self.other} is not legal in these places: {self.reason}"


def rivals(checked: Recheck, operators: Sequence[str]) -> Iterator[Rival | Unplaced]:
    """For each axis of an operator that is not at its default the plan with the default.

    Context ranks become data-parallel ones on the same GPUs, with microbatches of as many sequences; where that is not
    legal, the operator keeps its replicas and leaves GPUs free.
    """
    plan, planner = checked.plan, checked.planner
    for name in operators:
        for chosen, other, instead in _neighbours(plan.assignments[name], planner.hardware):
            yield _rival(checked, name, f"{chosen} of {name}", other, instead)


def _rival(checked: Recheck, name: str, chosen: str, other: str, instead: Sequence[Assignment]) -> Rival | Unplaced:
    plan, planner, reasons = checked.plan, checked.planner, []
    for assignment in instead:
        places = {**plan.assignments, name: assignment}
        try:
            prediction = planner.structure_problem(attrs.evolve(plan, assignments=places)).predict(places)
        except RpegError as error:
            reasons.append(error.facts[0] if error.facts else error.what)
            continue
        return Rival(
            chosen=chosen,
            other=other,
            structure=plan.structure,
            prediction=prediction,
            own=checked.prediction,
            usable_bytes=plan.prediction.usable_bytes,
        )
    return Unplaced(chosen=chosen, other=other, reason=reasons[0])


def _neighbours(own: Assignment, hardware: HardwareProfile) -> Iterator[tuple[str, str, tuple[Assignment, ...]]]:
    """(the choice, its default, assignments with the default, the closest first)."""
    layout, mode = own.layout, own.mode
    if layout.context > 1:
        wider = attrs.evolve(layout, context=1, data=layout.data * layout.context)
        as_large = max(1, own.microbatches // layout.context)
        smaller = attrs.evolve(layout, context=1)
        fewer = Allocation(own.allocation.start, own.allocation.start + smaller.gpus)
        instead = (
            attrs.evolve(own, layout=wider, microbatches=as_large),
            attrs.evolve(own, layout=wider),
            attrs.evolve(own, layout=smaller, allocation=fewer),
        )
        yield f"cp={layout.context}", "cp=1", instead
    if layout.expert > 1:
        yield f"ep={layout.expert}", "ep=1", (attrs.evolve(own, layout=attrs.evolve(layout, expert=1)),)
    if mode.sequence_parallel:
        without = attrs.evolve(own, mode=attrs.evolve(mode, sequence_parallel=False))
        yield "sequence parallelism", "no sequence parallelism", (without,)
    default = execution_of(hardware).recompute
    if mode.recompute not in (None, default):
        without = attrs.evolve(own, mode=attrs.evolve(mode, recompute=default))
        yield f"recompute {mode.recompute.value}", f"recompute {default.value}", (without,)
    if mode.precision is not Precision.BF16:
        without = attrs.evolve(own, mode=attrs.evolve(mode, precision=Precision.BF16))
        yield f"precision {mode.precision.value}", "bf16", (without,)
