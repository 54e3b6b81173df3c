"""The cheapest changes that make a plan fit, or give it more room, found by trying them.

Every remedy listed was verified: a plan for the changed experiment was found and evaluated. Its throughput is what that
plan has, not the best possible. ``tried`` names the changes that brought none.

Order: changes of the plan, the structure and the workload by what they cost in time, then more GPUs, then GPUs with
more memory, which nobody can set.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs
import numpy as np

from rpeg_core.costing.memory import DeviceMemory
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.changes import (
    LEFT_OUT,
    MORE_GPUS,
    OTHER_GPUS,
    SOFTWARE,
    Change,
    Make,
    kinds,
    problem_of,
    without_limit,
)
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Solution
from rpeg_core.records import HardwareProfile
from rpeg_core.spec.execution import Precision
from rpeg_core.spec.experiment import Experiment

__all__ = ["LITTLE_ROOM", "Present", "Remedies", "Remedy", "find_headroom", "find_remedies", "present_plan"]

SECONDS = 8.0
"""Time for all tries together."""

HEADROOM_SECONDS = 4.0

LITTLE_ROOM = 0.90
"""From this share of the usable memory on a plan has little room **[choice]**; headroom means less than that."""

MAX_PASSES = 4

WORTH_A_CHANGE = 0.01
"""Share of the throughput below which an operator is left as it is **[choice]**."""

WRITTEN = ("gpus", "dp", "pp", "tp", "cp", "ep", "microbatches", "sequence_parallel", "recompute", "precision")
"""The keys of a pin, in the order in which changes name them."""

DEFAULTS: Mapping[str, Any] = {
    "cp": 1,
    "ep": 1,
    "sequence_parallel": False,
    "recompute": LEFT_OUT,
    "precision": Precision.BF16.value,
}
"""What a pin without the key stands for."""


@attrs.frozen(kw_only=True)
class Present:
    """The plan at hand, and how fast it is.

    Attributes:
        tokens_per_s, step_s: of the plan, as if it fitted.
        assignments: operator -> assignment; empty when there is no plan but only a speed without the limit of memory.
        memory: its peaks.
    """

    tokens_per_s: float
    step_s: float
    assignments: ExecutionPlan = attrs.field(factory=dict)
    memory: DeviceMemory = attrs.field(factory=lambda: DeviceMemory(segments=()))

    def suspects(self, usable_bytes: float) -> tuple[tuple[str, ...], ...]:
        """For each group of GPUs with a peak above ``usable_bytes``, the fullest first: its operators, those with most
        at the peak first."""
        groups = []
        for segment in sorted(self.memory.segments, key=lambda segment: -segment.peak_bytes):
            if segment.peak_bytes <= usable_bytes:
                break
            held: dict[str, float] = {}
            for item in segment.items:
                held[item.operator] = held.get(item.operator, 0.0) + item.bytes
            groups.append(tuple(sorted(held, key=lambda name: (name != segment.moment, -held[name]))))
        return tuple(groups)


@attrs.frozen(kw_only=True)
class Remedy:
    """One change after which a plan fits.

    Attributes:
        key: what to change, as a key path of the experiment file.
        value, instead_of: its new and its present value.
        extent: how much is changed, relative to what is there: 0 for what may be chosen, 0.5 for half the prompts,
            1 for twice the nodes, 0.2 for 20 % more memory.
        asks_for: 0 for nothing, 1 for more GPUs, 2 for GPUs with more memory.
        tokens_per_s, step_s: of the plan that was found.
        peak_bytes, usable_bytes: of its fullest GPU.
        slowdown: time per token over that of the present plan, less 1; None where there is nothing to compare with.
        note: what has to change with it, or which GPU has that memory; empty when there is nothing to say.
    """

    key: str
    value: str
    instead_of: str
    extent: float
    asks_for: int
    tokens_per_s: float
    step_s: float
    peak_bytes: float
    usable_bytes: float
    slowdown: float | None
    note: str = ""


@attrs.frozen(kw_only=True)
class Remedies:
    """What helps, the cheapest change first, and the keys whose change was tried in vain.

    Attributes:
        untried: keys for which no time was left.
        present: what the slowdowns refer to; None when unknown.
        stopped: the user ended the tries.
    """

    found: tuple[Remedy, ...]
    tried: tuple[str, ...]
    untried: tuple[str, ...] = ()
    present: Present | None = None
    stopped: bool = False


@attrs.frozen(kw_only=True)
class _Found:
    """A configuration that fits."""

    assignments: ExecutionPlan
    tokens_per_s: float
    step_s: float
    peak_bytes: float


@attrs.frozen
class _Limits:
    """When to stop trying."""

    deadline: float
    cancelled: Callable[[], bool]

    @property
    def reached(self) -> bool:
        return self.cancelled() or time.monotonic() > self.deadline


def _never() -> bool:
    return False


def present_plan(prediction: Prediction, assignments: ExecutionPlan) -> Present:
    """What remedies are compared with, from the prediction of a plan."""
    evaluation = prediction.evaluation
    return Present(
        tokens_per_s=evaluation.tokens_per_s,
        step_s=evaluation.makespan_s / prediction.graph.steps,
        assignments=assignments,
        memory=prediction.memory,
    )


def find_remedies(
    experiment: Experiment,
    make: Make,
    *,
    present: Present | None = None,
    profiles: Sequence[HardwareProfile] = (),
    seconds: float = SECONDS,
    cancelled: Callable[[], bool] = _never,
) -> Remedies:
    """Try changes of ``experiment``, of each kind the smallest that helps.

    Args:
        experiment: one for which nothing fits.
        make: gives the planner of a changed experiment.
        profiles: of GPUs that there are; memory is offered up to what one of them has.
        present: the plan that does not fit; without it slowdowns refer to a plan that memory does not limit.
        seconds: time for all tries.
        cancelled: asked between tries; what was found until then is returned.
    """
    limits = _Limits(time.monotonic() + seconds, cancelled)
    if present is None and not limits.reached:
        present = _without_limit(experiment, make, limits)
    return _tried(experiment, make, present, limits, (SOFTWARE, MORE_GPUS, OTHER_GPUS), 1.0, profiles)


def find_headroom(
    experiment: Experiment,
    make: Make,
    present: Present,
    *,
    seconds: float = HEADROOM_SECONDS,
    cancelled: Callable[[], bool] = _never,
) -> Remedies:
    """Changes after which a plan leaves more of the usable memory than :data:`LITTLE_ROOM` says, without other GPUs.

    Args:
        experiment: one whose plan fits.
        make, present, seconds, cancelled: see :func:`find_remedies`.
    """
    limits = _Limits(time.monotonic() + seconds, cancelled)
    memory_gb = LITTLE_ROOM * make(experiment).hardware.device.memory_bytes / 1e9
    tight = attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=memory_gb))
    return _tried(tight, make, present, limits, (SOFTWARE,), LITTLE_ROOM)


def _tried(
    experiment: Experiment,
    make: Make,
    present: Present | None,
    limits: _Limits,
    allowed: tuple[int, ...],
    share: float,
    profiles: Sequence[HardwareProfile] = (),
) -> Remedies:
    """``share`` of the real memory is what ``experiment`` says a GPU has."""
    found: list[Remedy] = []
    tried: list[str] = []
    untried: list[str] = []
    limit = usable_bytes(make(experiment).hardware.device.memory_bytes)
    suspects = () if present is None else present.suspects(limit)
    for key, asks_for, changes in kinds(experiment, make, suspects, profiles, limits.deadline):
        if asks_for not in allowed:
            continue
        remedy, attempts = _first_that_fits(changes, make, present, experiment.pins, limits, share)
        if remedy is not None and key.startswith("space.") and _surpassed(remedy, found):
            continue
        if remedy is not None:
            found += [remedy] if all((remedy.key, remedy.value) != (r.key, r.value) for r in found) else []
        elif limits.reached:
            untried.append(key)
        elif attempts:
            tried.append(key)
    found.sort(key=lambda remedy: (remedy.asks_for, remedy.slowdown or 0.0, remedy.extent, remedy.key))
    return Remedies(
        found=tuple(found),
        tried=tuple(tried),
        untried=tuple(untried),
        present=present,
        stopped=limits.cancelled(),
    )


def _surpassed(remedy: Remedy, found: Sequence[Remedy]) -> bool:
    """Whether other pins, within the present ``space:``, are as fast."""
    least = (1.0 - WORTH_A_CHANGE) * remedy.tokens_per_s
    return any(other.key.split(".")[0] == "pin" and other.tokens_per_s >= least for other in found)


def _first_that_fits(
    changes: Iterator[Change],
    make: Make,
    present: Present | None,
    pinned: Mapping[str, Pin],
    limits: _Limits,
    share: float,
) -> tuple[Remedy | None, int]:
    """``pinned`` is what pins are compared with when there is no plan."""
    attempts = 0
    for change in changes:
        if limits.reached:
            break
        attempts += 1
        plan = {} if present is None else present.assignments
        found = _fitting(change.experiment, make, limits, plan if plan and change.operators else None)
        if found is None:
            continue
        names = ("key", "value", "instead_of", "extent", "asks_for", "note")
        values = {name: getattr(change, name) for name in names}
        if change.operators:
            pins = {name: Pin.of(assignment) for name, assignment in plan.items()} or pinned
            before = {name: pins[name].document() for name in change.operators}
            values |= _differing(change.operators, before, found.assignments)
            if not values["value"]:
                continue  # the pins do not say what made the difference
        memory_bytes = make(change.experiment).hardware.device.memory_bytes / share
        remedy = Remedy(
            **values,
            tokens_per_s=found.tokens_per_s,
            step_s=found.step_s,
            peak_bytes=found.peak_bytes,
            usable_bytes=usable_bytes(memory_bytes),
            slowdown=None if present is None else present.tokens_per_s / found.tokens_per_s - 1.0,
        )
        return remedy, attempts
    return None, attempts


def _differing(
    operators: tuple[str, ...], present: Mapping[str, Mapping[str, Any]], found: ExecutionPlan
) -> dict[str, str]:
    """Key, old and new value of the pins that differ; several operators are named in the values.

    Args:
        operators: whose pins were given up.
        present: their pins as the file writes them; a degree that is missing is open, an axis at its default.
        found: what the change brought.
    """
    texts: dict[str, tuple[str, str]] = {}
    for name in operators:
        before, after = {**DEFAULTS, **present[name]}, {**DEFAULTS, **Pin.of(found[name]).document()}
        keys = sorted((key for key in before if before[key] != after[key]), key=WRITTEN.index)
        if keys:
            texts[name] = tuple(", ".join(f"{key} {_shown(pin[key])}" for key in keys) for pin in (before, after))
    if len(texts) == 1:
        [(name, (old, new))] = texts.items()
        return {"key": f"pin.{name}", "instead_of": old, "value": new}
    return {
        "key": "pin",
        "instead_of": "; ".join(f"{name} {old}" for name, (old, _) in texts.items()),
        "value": "; ".join(f"{name} {new}" for name, (_, new) in texts.items()),
    }


def _shown(value: Any) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _without_limit(experiment: Experiment, make: Make, limits: _Limits) -> Present | None:
    """How fast a plan is that memory does not limit."""
    found = _fitting(without_limit(experiment), make, limits)
    return None if found is None else Present(tokens_per_s=found.tokens_per_s, step_s=found.step_s)


def _fitting(experiment: Experiment, make: Make, limits: _Limits, start: ExecutionPlan | None = None) -> _Found | None:
    """A configuration that fits, as fast as coordinate descent makes it, None when none was found.

    Args:
        experiment, make, limits: of the problem.
        start: where to begin, so that little is changed; otherwise with the least memory.
    """
    problem = problem_of(experiment, make)
    if problem is None:
        return None
    solution = None
    if start is not None:
        near = (_nearest(structure, start) for structure in problem.structures)
        before = next((Solution(i, choice) for i, choice in enumerate(near) if choice is not None), None)
        solution = None if before is None else _descended(problem, before, limits)
        solution = None if solution is None else _closer(problem, solution, before, start)
    if solution is None:
        solution = least_memory(problem, deadline=limits.deadline)
        solution = None if solution is None else _descended(problem, solution, limits)
    if solution is None:
        return None
    structure = problem.structures[solution.structure]
    assignments = structure.plan(solution.choice)
    prediction = structure.predict(assignments)
    return _Found(
        assignments=assignments,
        tokens_per_s=prediction.evaluation.tokens_per_s,
        step_s=prediction.evaluation.makespan_s / problem.options.steps,
        peak_bytes=prediction.memory.peak.peak_bytes,
    )


def _nearest(structure: StructureProblem, plan: ExecutionPlan) -> tuple[int, ...] | None:
    """The choice of a plan; of an operator whose assignment is no candidate, because it fits no GPU, the first one."""
    if structure.empty_operator is not None or not set(structure.operators) <= set(plan):
        return None
    choice = []
    for candidates in structure.candidates:
        wanted = plan[candidates.operator]
        same = np.flatnonzero(
            (candidates.start == wanted.allocation.start) & (candidates.stop == wanted.allocation.stop)
        )
        choice.append(next((int(i) for i in same if candidates.assignment(int(i)) == wanted), 0))
    return tuple(choice)


def _descended(problem: Problem, solution: Solution, limits: _Limits) -> Solution | None:
    """From a configuration, one operator at a time: first what fits better, among what fits what is faster.

    Returns:
        None when that ends with one that does not fit.
    """
    structure, choice = problem.structures[solution.structure], list(solution.choice)
    best = _worth(structure.evaluator.evaluate_many(np.array([choice])))[0]
    for _ in range(MAX_PASSES):
        before = best
        for position, candidates in enumerate(structure.candidates):
            if limits.reached or len(candidates) == 1:
                continue
            choices = np.repeat(np.array([choice]), len(candidates), axis=0)
            choices[:, position] = np.arange(len(candidates))
            worth = _worth(structure.evaluator.evaluate_many(choices))
            index = min(range(len(worth)), key=lambda i: (worth[i], i != choice[position], i))
            if worth[index] < best:
                best, choice[position] = worth[index], index
        if best == before:
            break
    return Solution(solution.structure, tuple(choice)) if best[0] <= 1.0 else None


def _closer(problem: Problem, found: Solution, before: Solution, start: ExecutionPlan) -> Solution:
    """Take back the changes of ``found`` that bring less than :data:`WORTH_A_CHANGE`, one operator at a time."""
    structure, choice = problem.structures[found.structure], list(found.choice)
    least = (1.0 - WORTH_A_CHANGE) * structure.evaluator.evaluate(choice).tokens_per_s
    for position, candidates in enumerate(structure.candidates):
        as_it_was = before.choice[position]
        if candidates.assignment(as_it_was) != start[candidates.operator]:
            continue
        trial = [*choice[:position], as_it_was, *choice[position + 1 :]]
        evaluation = structure.evaluator.evaluate(trial)
        if evaluation.feasible and evaluation.tokens_per_s >= least:
            choice = trial
    return Solution(found.structure, tuple(choice))


def _worth(results: np.ndarray) -> list[tuple[float, float]]:
    """(overflow of the fullest GPU, at least 1; less the tokens/s), the smaller the better; rows of an evaluator."""
    return [(max(1.0, ratio), -tokens) for _, tokens, ratio, *_ in results.tolist()]
