"""A plan evaluated again with the plugins that are installed now, and what is different from when it was made."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import attrs

from rpeg_core._version import __version__
from rpeg_core.errors import RpegError
from rpeg_core.ir import to_text
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import StructureProblem
from rpeg_core.plugins.registry import Registry
from rpeg_core.settings import Override

__all__ = ["Recheck", "recheck", "with_own_intervals"]


@attrs.frozen(kw_only=True)
class Recheck:
    """A plan as the installed plugins see it.

    Attributes:
        planner: of the plan's experiment.
        structure: the plan's structure, every operator pinned.
        plan: with the prediction and the versions of now.
        prediction: in full.
        differences: from what the file says, one sentence each.
    """

    planner: Planner
    structure: StructureProblem
    plan: Plan
    prediction: Prediction
    differences: tuple[str, ...]


def recheck(plan: Plan, registry: Registry, overrides: Sequence[Override] = ()) -> Recheck:
    """Evaluate a plan again.

    Raises:
        MissingPluginError, PluginError: a plugin it was made with is not there.
        PinError: the plan breaks a rule of now.
    """
    planner = Planner(plan.experiment, registry, overrides)
    structure = planner.structure_problem(plan)
    searched = next((use.name for use in plan.plugins if use.kind == "search"), None)
    known = {loaded.name for loaded in registry.records("search")}
    now = planner.plan(structure, plan.assignments, plan.search, searched if searched in known else None)
    return Recheck(
        planner=planner,
        structure=structure,
        plan=now,
        prediction=structure.predict(plan.assignments),
        differences=tuple(_differences(plan, now, to_text(planner.graph(plan.structure)))),
    )


def with_own_intervals(plan: Plan, registry: Registry) -> Plan:
    """The plan with the intervals of the installed plugins: those of the file are outside its digest.

    Without intervals where the plan cannot be evaluated again, or is predicted differently now: those of now would not
    be of the prediction that the file has.
    """
    said = plan.intervals
    if said is None or not any([said.step_s, said.tokens_per_s, *said.operator_s.values()]):
        return plan
    try:
        now = recheck(plan, registry).plan
    except RpegError:
        return attrs.evolve(plan, intervals=None)
    return attrs.evolve(plan, intervals=now.intervals if now.prediction == plan.prediction else None)


def _differences(then: Plan, now: Plan, graph: str) -> Iterator[str]:
    if then.rpeg_version != __version__:
        yield f"the plan was made with rpeg-core {then.rpeg_version}, installed is {__version__}"
    installed = {(use.kind, use.name): use for use in now.plugins}
    for use in then.plugins:
        current = installed.get((use.kind, use.name))
        if current is not None and current != use:
            yield (
                f"{use.kind} {use.name!r} came from {use.distribution} {use.version}, "
                f"installed is {current.distribution} {current.version}"
            )
    if graph != to_text(then.rpeg):
        yield f"algorithm {then.experiment.algorithm!r} builds another graph now; the plan's graph is evaluated"
    for name in ("tokens_per_s", "utilization"):
        before, after = getattr(then.prediction, name), getattr(now.prediction, name)
        if before != after:
            yield f"{name} was predicted as {before:.6g}, is now {after:.6g}"
    peaks = [max(peak for _, peak, _ in plan.prediction.memory) for plan in (then, now)]
    if peaks[0] != peaks[1]:
        yield f"peak memory was predicted as {peaks[0]:.6g} bytes, is now {peaks[1]:.6g}"
