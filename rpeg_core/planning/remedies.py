"""When nothing fits: the smallest changes of the experiment that make a plan fit, found by trying them.

Every remedy listed was verified: a plan for the changed experiment was found and evaluated, and its throughput is
what that plan has, not the best possible. ``tried`` names the changes that brought none.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator

import attrs

from rpeg_core.costing.memory import device_memory
from rpeg_core.errors import ExperimentError, PinError, RpegError, UnknownKeyError
from rpeg_core.passes.score import RUNTIME_RESERVE
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.search import Progress, SearchBudget, Solution
from rpeg_core.spec.experiment import Experiment

__all__ = ["Remedies", "Remedy", "find_remedies"]

SECONDS = 8.0
"""Time for all tries together."""

EVALUATIONS = 300
"""Budget of the search that improves a plan that fits."""

SEARCH_SECONDS = 0.5
MAX_NODE_FACTOR = 8
ENDLESS_GB = 1e9

Make = Callable[[Experiment], Planner]


@attrs.frozen(kw_only=True)
class Remedy:
    """One change after which a plan fits.

    Attributes:
        key: what to change, as a key path of the experiment file.
        value, instead_of: its new and its present value.
        extent: how much is changed, relative to what is there: 0 for what may be chosen, 0.5 for half the prompts,
            1 for twice the nodes, 0.2 for 20 % more memory.
        tokens_per_s: of the plan that was found.
    """

    key: str
    value: str
    instead_of: str
    extent: float
    tokens_per_s: float


@attrs.frozen(kw_only=True)
class Remedies:
    """What helps, the smallest change first, and the keys whose change was tried in vain."""

    found: tuple[Remedy, ...]
    tried: tuple[str, ...]


@attrs.frozen(kw_only=True)
class _Change:
    key: str
    value: str
    instead_of: str
    extent: float
    experiment: Experiment


def find_remedies(experiment: Experiment, make: Make, *, seconds: float = SECONDS) -> Remedies:
    """Try changes of ``experiment``, of each kind the smallest that helps.

    Args:
        experiment: one for which nothing fits.
        make: gives the planner of a changed experiment.
        seconds: time for all tries.
    """
    deadline = time.monotonic() + seconds
    found: list[Remedy] = []
    tried: list[str] = []
    for key, changes in _kinds(experiment, make, deadline):
        remedy, attempts = _first_that_fits(changes, make, deadline)
        if remedy is not None:
            found.append(remedy)
        elif attempts:
            tried.append(key)
    return Remedies(found=tuple(sorted(found, key=lambda r: (r.extent, r.key))), tried=tuple(tried))


def _first_that_fits(changes: Iterator[_Change], make: Make, deadline: float) -> tuple[Remedy | None, int]:
    attempts = 0
    for change in changes:
        if time.monotonic() > deadline:
            break
        speed = _throughput(change.experiment, make, deadline)
        if speed is not None:
            values = attrs.asdict(change, recurse=False, filter=lambda field, _: field.name != "experiment")
            return Remedy(**values, tokens_per_s=speed), attempts + 1
        attempts += 1
    return None, attempts


def _kinds(experiment: Experiment, make: Make, deadline: float) -> Iterator[tuple[str, Iterator[_Change]]]:
    yield "structure.staleness", _synchronous(experiment)
    yield "structure.actor_critic_sharing", _sharing(experiment, make)
    yield "cluster.memory_gb", _memory(experiment, make, deadline)
    yield "workload.prompts", _prompts(experiment, make(experiment).machine.gpus)
    yield "cluster.racks" if experiment.cluster.racks > 1 else "cluster.nodes_per_rack", _nodes(experiment)


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
    choices = experiment.structure
    if "actor_critic_sharing" in make(experiment).template.structures and True not in choices.actor_critic_sharing:
        yield _Change(
            key="structure.actor_critic_sharing",
            value="[true]",
            instead_of="[false]",
            extent=0.0,
            experiment=attrs.evolve(experiment, structure=attrs.evolve(choices, actor_critic_sharing=(True,))),
        )


def _memory(experiment: Experiment, make: Make, deadline: float) -> Iterator[_Change]:
    """The GPU memory that the configuration of least memory needs, to a tenth of a GB."""
    endless = attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=ENDLESS_GB))
    problem = _problem(endless, make)
    solution = None if problem is None else least_memory(problem, any_size=True, deadline=deadline)
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
            instead_of=f"{present:g}",
            extent=memory_gb / present - 1,
            experiment=attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=memory_gb)),
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
        )


def _throughput(experiment: Experiment, make: Make, deadline: float) -> float | None:
    """Tokens/s of a plan that fits, None when none was found."""
    problem = _problem(experiment, make)
    solution = None if problem is None else least_memory(problem, deadline=deadline)
    if problem is None or solution is None:
        return None
    return max(_speed(problem, solution), _searched(experiment, problem, make))


def _speed(problem: Problem, solution: Solution) -> float:
    structure = problem.structures[solution.structure]
    return structure.predict(structure.plan(solution.choice)).evaluation.tokens_per_s


def _searched(experiment: Experiment, problem: Problem, make: Make) -> float:
    """Tokens/s that a short search reaches, 0 when it finds nothing that fits."""
    try:
        strategy, settings = make(experiment).strategy()
        budget = SearchBudget(seconds=SEARCH_SECONDS, evaluations=EVALUATIONS)
        result = strategy.run(problem, budget, settings, Progress())
    except RpegError:
        return 0.0
    return 0.0 if result.evaluation is None else result.evaluation.tokens_per_s


def _problem(experiment: Experiment, make: Make) -> Problem | None:
    """None when the changed experiment is not allowed, e.g. a pin that no longer exists or is legal."""
    try:
        return make(experiment).problem()
    except (ExperimentError, PinError, UnknownKeyError):
        return None
