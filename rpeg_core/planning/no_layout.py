"""Why the values of ``space:`` leave an operator no layout at all, and which values would leave it one.

The paper's plan space always has a layout (dp 1, pp 1, tp 1 on one GPU), so only the further axes can leave none.
"""

from __future__ import annotations

import collections
import itertools
from collections.abc import Iterator, Sequence

import attrs

from rpeg_core.errors import ExperimentError
from rpeg_core.planning.assignment import Layout
from rpeg_core.planning.axes import Axes, illegal_mode
from rpeg_core.planning.candidates import illegal_layout, legal_layouts
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload

__all__ = ["no_layout"]


def no_layout(
    operator: str, machine: DeviceSpace, workload: Workload, models: Sequence[ModelSpec], axes: Axes
) -> ExperimentError:
    """The error of an operator that ``axes`` leave no candidate: the broken rule, and what is allowed.

    Args:
        operator: its name.
        machine: the cluster.
        workload: whose prompts and tokens are divided.
        models: of the operator; each must be legal.
        axes: what was asked for.
    """
    facts = [_reason(machine, workload, models, axes, pc, pe) for pc in axes.context for pe in axes.expert]
    return ExperimentError(
        f"space: leaves operator {operator!r} no layout",
        facts=[*dict.fromkeys(facts), *_allowed(machine, workload, models, axes)],
        hint="add an allowed value, or leave the axis out of space:",
    )


def _reason(machine: DeviceSpace, workload: Workload, models: Sequence[ModelSpec], axes: Axes, pc: int, pe: int) -> str:
    """The rule that pc and pe break, or that the modes do with every layout they have."""
    if pc > machine.gpus:
        return f"CP: cp={pc} divides a sequence over {pc} GPUs, the cluster has {machine.gpus}"
    if pe > machine.gpus:
        return f"EP: ep={pe} divides the experts over {pe} GPUs, the cluster has {machine.gpus}"
    legal = _layouts(machine, workload, models, attrs.evolve(axes, context=(pc,), expert=(pe,)))
    if legal:
        reasons = (illegal_mode(layout, mode) for layout in legal for mode in axes.modes())
        return next(reason for reason in reasons if reason is not None)
    tried = (
        Layout(pd, 1, pt, pc, pe)
        for pd, pt in itertools.product(range(1, workload.prompts + 1), range(1, machine.gpus_per_node + 1))
        if workload.prompts % pd == 0 and machine.gpus_per_node % pt == 0 and pd * pt * pc <= machine.gpus
    )
    broken = (illegal_layout(machine, workload, model, layout, 1) for layout in tried for model in models)
    counts = collections.Counter(reason for reason in broken if reason is not None)
    return counts.most_common(1)[0][0]


def _allowed(machine: DeviceSpace, workload: Workload, models: Sequence[ModelSpec], axes: Axes) -> Iterator[str]:
    """Per axis that was asked for, values that have a layout when the others keep their default.

    Of the degrees the divisors of the number of GPUs.
    """
    degrees = tuple(d for d in range(1, machine.gpus + 1) if machine.gpus % d == 0)
    default = Axes()
    for name, attribute in (("cp", "context"), ("ep", "expert")):
        if getattr(axes, attribute) != getattr(default, attribute):
            found = _layouts(machine, workload, models, attrs.evolve(default, **{attribute: degrees}))
            values = sorted({getattr(layout, attribute) for layout in found})
            yield f"for {name} alone there are layouts with: {', '.join(map(str, values))}"
    if axes.sequence_parallel != default.sequence_parallel:
        found = _layouts(machine, workload, models, default)
        values = "true, false" if any(layout.tensor > 1 for layout in found) else "false, every legal tp is 1"
        yield f"for sequence_parallel alone there are layouts with: {values}"


def _layouts(machine: DeviceSpace, workload: Workload, models: Sequence[ModelSpec], axes: Axes) -> tuple[Layout, ...]:
    found = legal_layouts(machine, workload, models[0], models[1:], axes)
    return tuple(dict.fromkeys(layout for layout, _ in found))
