"""The cheapest changes that make a plan fit, or give it more room, found by trying them.

Every remedy listed was verified: a plan for the changed experiment was found and evaluated. Its throughput is what that
plan has, not the best possible. ``tried`` names the changes that brought none.

Order: changes of the plan, the structure and the workload by what they cost in time, then more GPUs, then GPUs with
more memory, which nobody can set.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import attrs
import numpy as np

from rpeg_core.costing.memory import DeviceMemory, device_memory
from rpeg_core.errors import ExperimentError, PinError, UnknownKeyError
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.score import RUNTIME_RESERVE, usable_bytes
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Solution
from rpeg_core.spec.experiment import Experiment
from rpeg_core.spec.lengths import LengthQuantile
from rpeg_core.spec.workload import Workload

__all__ = ["LITTLE_ROOM", "Present", "Remedies", "Remedy", "find_headroom", "find_remedies", "present_plan"]

SECONDS = 8.0
"""Time for all tries together."""

HEADROOM_SECONDS = 4.0

LITTLE_ROOM = 0.90
"""From this share of the usable memory on a plan has little room **[choice]**; headroom means less than that."""

MAX_PASSES = 4

WORTH_A_CHANGE = 0.01
"""Share of the throughput below which an operator is left as it is **[choice]**."""
MAX_NODE_FACTOR = 8
ENDLESS_GB = 1e9

SOFTWARE, MORE_GPUS, OTHER_GPUS = range(3)
"""What a change asks for: nothing, more GPUs, GPUs with more memory."""

Make = Callable[[Experiment], Planner]


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
class _Change:
    key: str
    value: str
    instead_of: str
    extent: float
    experiment: Experiment
    asks_for: int = SOFTWARE
    operators: tuple[str, ...] = ()  # whose pins are given up


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
    seconds: float = SECONDS,
    cancelled: Callable[[], bool] = _never,
) -> Remedies:
    """Try changes of ``experiment``, of each kind the smallest that helps.

    Args:
        experiment: one for which nothing fits.
        make: gives the planner of a changed experiment.
        present: the plan that does not fit; without it slowdowns refer to a plan that memory does not limit.
        seconds: time for all tries.
        cancelled: asked between tries; what was found until then is returned.
    """
    limits = _Limits(time.monotonic() + seconds, cancelled)
    if present is None and not limits.reached:
        present = _without_limit(experiment, make, limits)
    return _tried(experiment, make, present, limits, (SOFTWARE, MORE_GPUS, OTHER_GPUS), 1.0)


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
    experiment: Experiment, make: Make, present: Present | None, limits: _Limits, allowed: tuple[int, ...], share: float
) -> Remedies:
    """``share`` of the real memory is what ``experiment`` says a GPU has."""
    found: list[Remedy] = []
    tried: list[str] = []
    untried: list[str] = []
    for key, asks_for, changes in _kinds(experiment, make, present, limits):
        if asks_for not in allowed:
            continue
        remedy, attempts = _first_that_fits(changes, make, present, limits, share)
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


def _first_that_fits(
    changes: Iterator[_Change], make: Make, present: Present | None, limits: _Limits, share: float
) -> tuple[Remedy | None, int]:
    attempts = 0
    for change in changes:
        if limits.reached:
            break
        attempts += 1
        start = present.assignments if change.operators else None
        found = _fitting(change.experiment, make, limits, start)
        if found is None:
            continue
        values = {name: getattr(change, name) for name in ("key", "value", "instead_of", "extent", "asks_for")}
        if change.operators:
            values |= _differing(change.operators, present.assignments, found.assignments)
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


def _kinds(
    experiment: Experiment, make: Make, present: Present | None, limits: _Limits
) -> Iterator[tuple[str, int, Iterator[_Change]]]:
    limit = usable_bytes(make(experiment).hardware.device.memory_bytes)
    groups = () if present is None else present.suspects(limit)
    pinned = [tuple(name for name in group if name in experiment.pins) for group in groups]
    for operator in pinned[0] if len(pinned) == 1 else ():
        yield f"pin.{operator}", SOFTWARE, _rechosen(experiment, (operator,))
    together = tuple(dict.fromkeys(name for group in pinned for name in group))
    if len(together) > 1:
        yield "pin", SOFTWARE, _rechosen(experiment, together)
    yield "structure.staleness", SOFTWARE, _synchronous(experiment)
    yield "structure.actor_critic_sharing", SOFTWARE, _sharing(experiment, make)
    yield "workload.cache_bytes_per_element", SOFTWARE, _small_cache(experiment)
    yield "workload.prompts", SOFTWARE, _prompts(experiment, make(experiment).machine.gpus)
    yield "workload.response_tokens", SOFTWARE, _responses(experiment)
    key = "cluster.racks" if experiment.cluster.racks > 1 else "cluster.nodes_per_rack"
    yield key, MORE_GPUS, _nodes(experiment)
    yield "cluster.memory_gb", OTHER_GPUS, _memory(experiment, make, limits)


def _rechosen(experiment: Experiment, operators: tuple[str, ...]) -> Iterator[_Change]:
    """Other degrees and microbatches on the same GPUs, then on any."""
    others = {name: pin for name, pin in experiment.pins.items() if name not in operators}
    places = {name: Pin(allocation=experiment.pins[name].allocation) for name in operators}
    for freed in (places, {}):
        yield _Change(
            key=f"pin.{operators[0]}" if len(operators) == 1 else "pin",
            value="",
            instead_of="",
            extent=0.0,
            experiment=attrs.evolve(experiment, pins=others | freed),
            operators=operators,
        )


def _differing(operators: tuple[str, ...], present: ExecutionPlan, found: ExecutionPlan) -> dict[str, str]:
    """Key, old and new value of the pins that differ; several operators are named in the values."""
    changed = tuple(name for name in operators if present[name] != found[name])
    texts: list[tuple[str, str]] = []
    for name in changed:
        before, after = Pin.of(present[name]).document(), Pin.of(found[name]).document()
        keys = [key for key in before if before[key] != after[key]]
        named = f"{name} " if len(changed) > 1 else ""
        texts.append(tuple(named + ", ".join(f"{key} {pin[key]}" for key in keys) for pin in (before, after)))
    return {
        "key": f"pin.{changed[0]}" if len(changed) == 1 else "pin",
        "instead_of": "; ".join(text for text, _ in texts),
        "value": "; ".join(text for _, text in texts),
    }


def _synchronous(experiment: Experiment) -> Iterator[_Change]:
    """Staleness 0 keeps no second copy of the weights for serving."""
    choices = experiment.structure
    if 0 not in choices.staleness:
        yield _Change(
            key="structure.staleness",
            value="[0]",
            instead_of=str(list(choices.staleness)),
            extent=0.0,
            experiment=attrs.evolve(experiment, structure=attrs.evolve(choices, staleness=(0,))),
        )


def _sharing(experiment: Experiment, make: Make) -> Iterator[_Change]:
    """One backbone for actor and critic; its operators have other names, so that pins do not apply."""
    choices = experiment.structure
    if "actor_critic_sharing" in make(experiment).template.structures and True not in choices.actor_critic_sharing:
        shared = attrs.evolve(choices, actor_critic_sharing=(True,), fusion=(False,))
        yield _Change(
            key="structure.actor_critic_sharing",
            value="[true]",
            instead_of="[false]",
            extent=0.0,
            experiment=attrs.evolve(experiment, structure=shared, pins={}),
        )


def _small_cache(experiment: Experiment) -> Iterator[_Change]:
    """Keys and values in 8 bits."""
    workload = experiment.workload
    present = workload.cache_bytes_per_element or workload.bytes_per_element
    if present > 1:
        yield _Change(
            key="workload.cache_bytes_per_element",
            value="1",
            instead_of=str(present),
            extent=0.0,
            experiment=attrs.evolve(experiment, workload=attrs.evolve(workload, cache_bytes_per_element=1)),
        )


def _memory(experiment: Experiment, make: Make, limits: _Limits) -> Iterator[_Change]:
    """The GPU memory that the configuration of least memory needs, to a tenth of a GB."""
    endless = attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=ENDLESS_GB))
    problem = _problem(endless, make)
    solution = None if problem is None else least_memory(problem, any_size=True, deadline=limits.deadline)
    if solution is None:
        return
    structure = problem.structures[solution.structure]
    peak = device_memory(structure.rpeg, structure.plan(solution.choice), structure.book).peak.peak_bytes
    needed = math.ceil(peak / (1 - RUNTIME_RESERVE) / 1e8) / 10
    present = make(experiment).hardware.device.memory_bytes / 1e9
    for memory_gb in (needed, needed + 0.1):  # the second for a peak at the rounding edge
        yield _Change(
            key="cluster.memory_gb",
            value=f"{memory_gb:g}",
            instead_of=f"{present:.4g}",
            extent=memory_gb / present - 1,
            experiment=attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=memory_gb)),
            asks_for=OTHER_GPUS,
        )


def _prompts(experiment: Experiment, gpus: int) -> Iterator[_Change]:
    """Close numbers that more data-parallel degrees divide (rule P3), then half of one that all do, a quarter, ..."""
    workload = experiment.workload
    present, close = workload.prompts, _divisible(workload.prompts, gpus)
    power = 1 << max(0, min(present, gpus).bit_length() - 1)
    halved = max(power, round(present / power) * power)
    smaller = []
    while halved > 1:
        halved //= 2
        smaller.append(halved)
    for prompts in (*close, *smaller):
        yield _Change(
            key="workload.prompts",
            value=str(prompts),
            instead_of=str(present),
            extent=abs(1 - prompts / present),
            experiment=attrs.evolve(experiment, workload=attrs.evolve(workload, prompts=prompts)),
        )


def _divisible(prompts: int, gpus: int) -> list[int]:
    """The multiples below and above ``prompts`` of each power of two up to ``gpus`` that does not divide it.

    The closest come first, of two as close the one that a larger power divides.
    """
    powers = [1 << exponent for exponent in range(1, gpus.bit_length()) if prompts % (1 << exponent)]
    near = {multiple * power for power in powers for multiple in (prompts // power, -(-prompts // power))}
    return sorted(near - {0}, key=lambda value: (abs(value - prompts), -(value & -value)))


def _responses(experiment: Experiment) -> Iterator[_Change]:
    """Responses of three quarters, half, a quarter of the tokens."""
    workload = experiment.workload
    for share in (0.75, 0.5, 0.25):
        shorter = _shortened(workload, share)
        if shorter is not None:
            yield _Change(
                key="workload.response_tokens",
                value=str(shorter.response_tokens),
                instead_of=str(workload.response_tokens),
                extent=1 - share,
                experiment=attrs.evolve(experiment, workload=shorter),
            )


def _shortened(workload: Workload, share: float) -> Workload | None:
    """All lengths times ``share``; None where two of them would become one."""
    tokens = round(share * workload.response_tokens)
    lengths = tuple(LengthQuantile(q.fraction, round(share * q.tokens)) for q in workload.response_lengths)
    try:
        return attrs.evolve(workload, response_tokens=tokens, response_lengths=lengths)
    except ExperimentError:
        return None


def _nodes(experiment: Experiment) -> Iterator[_Change]:
    """More racks where there are several, else more nodes in the rack."""
    if experiment.pins and all(pin.allocation is not None for pin in experiment.pins.values()):
        return  # what is pinned to GPUs does not spread
    name = "racks" if experiment.cluster.racks > 1 else "nodes_per_rack"
    present, factor = getattr(experiment.cluster, name), 1
    while factor < MAX_NODE_FACTOR:
        factor *= 2
        yield _Change(
            key=f"cluster.{name}",
            value=str(present * factor),
            instead_of=str(present),
            extent=factor - 1.0,
            experiment=attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, **{name: present * factor})),
            asks_for=MORE_GPUS,
        )


def _without_limit(experiment: Experiment, make: Make, limits: _Limits) -> Present | None:
    """How fast a plan is that memory does not limit."""
    endless = attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=ENDLESS_GB))
    found = _fitting(endless, make, limits)
    return None if found is None else Present(tokens_per_s=found.tokens_per_s, step_s=found.step_s)


def _fitting(experiment: Experiment, make: Make, limits: _Limits, start: ExecutionPlan | None = None) -> _Found | None:
    """A configuration that fits, as fast as coordinate descent makes it, None when none was found.

    Args:
        experiment, make, limits: of the problem.
        start: where to begin, so that little is changed; otherwise with the least memory.
    """
    problem = _problem(experiment, make)
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


def _problem(experiment: Experiment, make: Make) -> Problem | None:
    """None when the changed experiment is not allowed, e.g. a pin that no longer exists or is legal."""
    try:
        return make(experiment).problem()
    except (ExperimentError, PinError, UnknownKeyError):
        return None
