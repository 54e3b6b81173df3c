"""The changes of an experiment that may make a plan fit, of each kind the smallest first; nothing is tried here."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import attrs

from rpeg_core.costing.memory import device_memory
from rpeg_core.errors import ExperimentError, PinError, UnknownKeyError
from rpeg_core.ir import Role
from rpeg_core.passes.score import RUNTIME_RESERVE
from rpeg_core.planning.axes import AXES, applies
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.space import Choices
from rpeg_core.records import HardwareProfile, Target
from rpeg_core.spec.execution import Recompute
from rpeg_core.spec.experiment import Experiment
from rpeg_core.spec.lengths import LengthQuantile
from rpeg_core.spec.workload import Workload

__all__ = ["LEFT_OUT", "MORE_GPUS", "OTHER_GPUS", "SOFTWARE", "Change", "Make", "kinds", "problem_of", "without_limit"]

MAX_NODE_FACTOR = 8
ENDLESS_GB = 1e9

SOFTWARE, MORE_GPUS, OTHER_GPUS = range(3)
"""What a change asks for: nothing, more GPUs, GPUs with more memory."""

LEFT_OUT = "left out"
"""In place of the value of a key that the file does not have."""

WIDER: Mapping[str, tuple[tuple[Any, ...], ...]] = {
    "recompute": ((Recompute.SELECTIVE,), (Recompute.FULL,)),
    "sequence_parallel": ((False, True),),
    "cp": ((1, 2), (1, 4), (1, 8)),
    "ep": ((1, 2), (1, 4), (1, 8)),
}
"""Axis that lowers memory -> what ``space:`` may say of it, the smallest change first."""

Make = Callable[[Experiment], Planner]


@attrs.frozen(kw_only=True)
class Change:
    """One changed experiment.

    Attributes:
        key, value, instead_of, extent, asks_for, note: see :class:`rpeg_core.planning.remedies.Remedy`.
        operators: whose pins are given up; what is found for them is then the change.
    """

    key: str
    value: str
    instead_of: str
    extent: float
    experiment: Experiment
    asks_for: int = SOFTWARE
    operators: tuple[str, ...] = ()
    note: str = ""


def kinds(
    experiment: Experiment,
    make: Make,
    suspects: Sequence[tuple[str, ...]],
    profiles: Sequence[HardwareProfile],
    deadline: float,
) -> Iterator[tuple[str, int, Iterator[Change]]]:
    """(key, what it asks for, its changes) of each kind.

    Args:
        experiment: what is changed.
        make: gives the planner of an experiment.
        suspects: groups of operators at a peak that is too high; empty when there is no plan.
        profiles: whose memory sizes there are to buy.
        deadline: on the clock ``time.monotonic``.
    """
    every = tuple(experiment.pins)
    pinned = [tuple(name for name in group if name in every) for group in suspects] or [every]
    for operator in pinned[0] if len(pinned) == 1 else ():
        yield f"pin.{operator}", SOFTWARE, _rechosen(experiment, (operator,))
    together = tuple(dict.fromkeys(name for group in pinned for name in group))
    # other operators may be next in line at a peak that is too high as well
    groups = [group for group in dict.fromkeys((together, every)) if len(group) > 1]
    if groups:
        yield "pin", SOFTWARE, itertools.chain.from_iterable(_rechosen(experiment, group) for group in groups)
    yield "structure.staleness", SOFTWARE, _synchronous(experiment)
    yield "structure.actor_critic_sharing", SOFTWARE, _sharing(experiment, make)
    yield "workload.cache_bytes_per_element", SOFTWARE, _small_cache(experiment)
    yield "workload.prompts", SOFTWARE, _prompts(experiment, make(experiment).machine.gpus)
    yield "workload.response_tokens", SOFTWARE, _responses(experiment)
    key = "cluster.racks" if experiment.cluster.racks > 1 else "cluster.nodes_per_rack"
    yield key, MORE_GPUS, _nodes(experiment)
    yield "cluster.memory_gb", OTHER_GPUS, _memory(experiment, make, profiles, deadline)
    for key, changes in _axes(experiment, make(experiment), together):
        yield key, SOFTWARE, changes


def problem_of(experiment: Experiment, make: Make) -> Problem | None:
    """None when the changed experiment is not allowed, e.g. a pin that no longer exists or is legal."""
    try:
        return make(experiment).problem()
    except (ExperimentError, PinError, UnknownKeyError):
        return None


def without_limit(experiment: Experiment) -> Experiment:
    """With GPUs that hold everything."""
    return attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=ENDLESS_GB))


def _rechosen(experiment: Experiment, operators: tuple[str, ...]) -> Iterator[Change]:
    """Whatever ``space:`` leaves open, on the same GPUs, then on any."""
    for freed in (_places(experiment, operators), {}):
        yield _given_up(experiment, operators, freed)


def _places(experiment: Experiment, operators: tuple[str, ...]) -> dict[str, Pin]:
    return {name: Pin(allocation=experiment.pins[name].allocation) for name in operators}


def _given_up(experiment: Experiment, operators: tuple[str, ...], freed: Mapping[str, Pin]) -> Change:
    others = {name: pin for name, pin in experiment.pins.items() if name not in operators}
    return Change(
        key=f"pin.{operators[0]}" if len(operators) == 1 else "pin",
        value="",
        instead_of="",
        extent=0.0,
        experiment=attrs.evolve(experiment, pins={**others, **freed}),
        operators=operators,
    )


def _axes(
    experiment: Experiment, planner: Planner, suspects: tuple[str, ...]
) -> Iterator[tuple[str, Iterator[Change]]]:
    """Axes beyond the paper's plan space of which ``space:`` says nothing and whose effect every cost term knows."""
    priced = [active.term for active in planner.terms if active.term.target is not Target.TRANSFER]
    graph = planner.graph(planner.structures()[0])
    for role in (Role.TRAINING, Role.INFERENCE, Role.GENERATION):
        for axis in WIDER:
            operators = [
                op.name
                for op in graph.operators
                if op.role is role and applies(axis, role, [m.spec for m in graph.models_of(op.name)]) is None
            ]
            said = any(experiment.space.get(n, Choices()).axis(axis) is not None for n in (role.value, *operators))
            if operators and not said and all(axis in term.axes for term in priced):
                yield f"space.{role.value}.{axis}", _wider(experiment, role, axis, operators, suspects)


def _wider(
    experiment: Experiment, role: Role, axis: str, operators: Sequence[str], suspects: tuple[str, ...]
) -> Iterator[Change]:
    """More values of an axis: in ``space:`` for a role, in the pins of those at the peak where it is pinned."""
    freed = tuple(name for name in operators if name in suspects and name in experiment.pins)
    if not freed and any(name in experiment.pins for name in operators):
        return
    for values in WIDER[axis]:
        names = freed or (role.value,)
        entries = {n: attrs.evolve(experiment.space.get(n, Choices()), **{AXES[axis]: values}) for n in names}
        wider = attrs.evolve(experiment, space={**experiment.space, **entries})
        if freed:
            yield _given_up(wider, freed, _places(experiment, freed))
        else:
            yield Change(
                key=f"space.{role.value}.{axis}",
                value=_listed(Choices(**{AXES[axis]: values}).document()[axis]),
                instead_of=LEFT_OUT,
                extent=0.0,
                experiment=wider,
            )


def _listed(values: Sequence[Any]) -> str:
    """A list as YAML writes it in a line."""
    return "[" + ", ".join(str(value).lower() if isinstance(value, bool) else str(value) for value in values) + "]"


def _memory(
    experiment: Experiment, make: Make, profiles: Sequence[HardwareProfile], deadline: float
) -> Iterator[Change]:
    """The memory sizes of ``profiles`` that hold the configuration of least memory, the smallest first."""
    present = make(experiment).hardware.device.memory_bytes
    sizes: dict[int, list[str]] = {}
    for profile in sorted(profiles, key=lambda profile: (profile.device.memory_bytes, profile.name)):
        if profile.device.memory_bytes > present:
            sizes.setdefault(profile.device.memory_bytes, []).append(profile.name)
    problem = problem_of(without_limit(experiment), make) if sizes else None
    solution = None if problem is None else least_memory(problem, any_size=True, deadline=deadline)
    if problem is None or solution is None:
        return
    structure = problem.structures[solution.structure]
    peak = device_memory(structure.rpeg, structure.plan(solution.choice), structure.book).peak.peak_bytes
    for size, names in sizes.items():
        value = f"{size / 1e9:.4g}"
        if float(value) * 1e9 * (1 - RUNTIME_RESERVE) < peak:
            continue
        yield Change(
            key="cluster.memory_gb",
            value=value,
            instead_of=f"{present / 1e9:.4g}",
            extent=float(value) * 1e9 / present - 1,
            experiment=attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, memory_gb=float(value))),
            asks_for=OTHER_GPUS,
            note=f"{names[0]} has as much",
        )


def _synchronous(experiment: Experiment) -> Iterator[Change]:
    """Staleness 0 keeps no second copy of the weights for serving."""
    choices = experiment.structure
    if 0 not in choices.staleness:
        yield Change(
            key="structure.staleness",
            value="[0]",
            instead_of=str(list(choices.staleness)),
            extent=0.0,
            experiment=attrs.evolve(experiment, structure=attrs.evolve(choices, staleness=(0,))),
        )


def _sharing(experiment: Experiment, make: Make) -> Iterator[Change]:
    """One backbone for actor and critic; its operators have other names, so that pins do not apply."""
    choices = experiment.structure
    if "actor_critic_sharing" in make(experiment).template.structures and True not in choices.actor_critic_sharing:
        shared = attrs.evolve(choices, actor_critic_sharing=(True,), fusion=(False,))
        yield Change(
            key="structure.actor_critic_sharing",
            value="[true]",
            instead_of="[false]",
            extent=0.0,
            experiment=attrs.evolve(experiment, structure=shared, pins={}),
        )


def _small_cache(experiment: Experiment) -> Iterator[Change]:
    """Keys and values in 8 bits."""
    workload = experiment.workload
    present = workload.cache_bytes_per_element or workload.bytes_per_element
    if present > 1:
        yield Change(
            key="workload.cache_bytes_per_element",
            value="1",
            instead_of=str(present),
            extent=0.0,
            experiment=attrs.evolve(experiment, workload=attrs.evolve(workload, cache_bytes_per_element=1)),
        )


def _prompts(experiment: Experiment, gpus: int) -> Iterator[Change]:
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
        yield Change(
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


def _responses(experiment: Experiment) -> Iterator[Change]:
    """Responses of three quarters, half, a quarter of the tokens; their lengths, where given, with them."""
    workload = experiment.workload
    for share in (0.75, 0.5, 0.25):
        shorter = _shortened(workload, share)
        if shorter is not None:
            yield Change(
                key="workload.response_tokens",
                value=str(shorter.response_tokens),
                instead_of=str(workload.response_tokens),
                extent=1 - share,
                experiment=attrs.evolve(experiment, workload=shorter),
                note=f"every length of workload.response_lengths times {share:g}" if workload.response_lengths else "",
            )


def _shortened(workload: Workload, share: float) -> Workload | None:
    """All lengths times ``share``; None where two of them would become one."""
    tokens = round(share * workload.response_tokens)
    lengths = tuple(LengthQuantile(q.fraction, round(share * q.tokens)) for q in workload.response_lengths)
    try:
        return attrs.evolve(workload, response_tokens=tokens, response_lengths=lengths)
    except ExperimentError:
        return None


def _nodes(experiment: Experiment) -> Iterator[Change]:
    """More racks where there are several, else more nodes in the rack."""
    if experiment.pins and all(pin.allocation is not None for pin in experiment.pins.values()):
        return  # what is pinned to GPUs does not spread
    name = "racks" if experiment.cluster.racks > 1 else "nodes_per_rack"
    present, factor = getattr(experiment.cluster, name), 1
    while factor < MAX_NODE_FACTOR:
        factor *= 2
        yield Change(
            key=f"cluster.{name}",
            value=str(present * factor),
            instead_of=str(present),
            extent=factor - 1.0,
            experiment=attrs.evolve(experiment, cluster=attrs.evolve(experiment.cluster, **{name: present * factor})),
            asks_for=MORE_GPUS,
        )
