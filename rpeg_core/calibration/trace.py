"""A profile from a run's own trace: the operators that it executed are the observations."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs

from rpeg_core.calibration.accuracy import role_errors
from rpeg_core.calibration.measurements import OperatorTime
from rpeg_core.calibration.profile import software_sources
from rpeg_core.calibration.refine import Errors, Refined, Terms, errors_of, predicted_s, refine
from rpeg_core.errors import TraceFileError, UsageError
from rpeg_core.planning.plan import Plan
from rpeg_core.report.execution import Execution
from rpeg_core.runtime.trace import Trace
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import HardwareProfile

__all__ = ["TraceRefinement", "observations_of", "refined_from_traces"]

SPREAD = 0.5
"""A run tells less than a calibration: parameters stay within a factor e^0.5 unless it says otherwise clearly."""


@attrs.frozen(kw_only=True)
class TraceRefinement:
    """A refined profile and its errors on the operators of the traces, before and after."""

    profile: HardwareProfile
    refined: Refined
    operators: tuple[OperatorTime, ...]
    before: Errors
    after: Errors


def observations_of(name: str, plan: Plan, trace: Trace) -> tuple[OperatorTime, ...]:
    """Each operator with a model in a typical step.

    Raises:
        TraceFileError: no step is complete, or times are not those of a clock.
    """
    if trace.header.clock != "wall":
        raise TraceFileError(
            f"{name} has {trace.header.clock} times", facts=["allowed: the trace of a run on real workers"]
        )
    execution = Execution.of(plan, trace)
    if execution is None:
        raise TraceFileError(f"no step of {name} is complete")
    found = []
    for operator in plan.rpeg.operators:
        model = plan.rpeg.model_of(operator.name)
        seconds, _ = execution.operator_s(operator.name)
        if model is None or seconds <= 0:
            continue
        assignment = plan.assignments[operator.name]
        found.append(
            OperatorTime(
                name=f"{operator.name} of {name}",
                role=operator.role,
                model=model.spec,
                workload=plan.workload,
                data=assignment.layout.data,
                pipeline=assignment.layout.pipeline,
                tensor=assignment.layout.tensor,
                microbatches=assignment.microbatches,
                seconds=seconds,
                node=True,
                mode=assignment.mode,
            )
        )
    return tuple(found)


def refined_from_traces(
    hardware: HardwareProfile,
    observations: Sequence[OperatorTime],
    terms: Terms,
    *,
    what: str,
    progress: Callable[[float], None] = lambda share: None,
) -> TraceRefinement:
    """Fit the software of a profile to the operators of traces.

    Args:
        hardware: the profile to refine.
        observations: at least one.
        terms: operator terms with their settings.
        what: the traces in words, for the sources.
        progress: told the share that is done.

    Raises:
        UsageError: the profile has no measured software.
    """
    if hardware.software is None:
        raise UsageError(
            f"hardware {hardware.name!r} has no measured software to refine",
            hint="rpeg calibrate --output profile.yaml on that machine, then name the file",
        )
    start, unknown = hardware, frozenset[str]()
    if hardware.software.node_s <= 0:
        start = attrs.evolve(hardware, software=attrs.evolve(hardware.software, node_s=1e-3))
        unknown = frozenset({"node_s"})
    refined = refine(start, observations, terms, spread=SPREAD, unknown=unknown, progress=progress)
    # The fit starts with a guess for what the profile does not know; the errors before are those of the profile itself.
    refined = attrs.evolve(refined, before=tuple(predicted_s(hardware, observations, terms).tolist()))
    after = errors_of(observations, refined.after)
    assert refined.profile.software is not None
    sources = software_sources(refined.profile.software, refined.parameters, after, f"refined from {what}")
    fitted = {f"software.{parameter.name}" for parameter in refined.parameters}
    kept = {path: text if path in fitted else hardware.sources.get(path, text) for path, text in sources.items()}
    return TraceRefinement(
        profile=attrs.evolve(
            refined.profile, sources={**hardware.sources, **kept}, errors=_errors(hardware, refined, observations, what)
        ),
        refined=refined,
        operators=tuple(observations),
        before=errors_of(observations, refined.before),
        after=after,
    )


def _errors(
    hardware: HardwareProfile, refined: Refined, operators: Sequence[OperatorTime], what: str
) -> tuple[TermError, ...]:
    """Those of roles that the traces tell, and the profile's of the others."""
    now = role_errors(refined.profile, operators, refined.left_out, f"refined from {what}")
    told = {role for error in now for role in error.roles}
    return (*now, *(error for error in hardware.errors or () if not set(error.roles) <= told))
