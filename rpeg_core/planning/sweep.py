"""One experiment on many clusters and workloads: the points of a sweep, and what was found at each.

Policy. A point is the experiment with another number of GPUs, hardware profile, batch or response length. The shape of
a cluster follows from its number of GPUs: nodes keep their GPUs; a one-rack experiment stays in one rack; otherwise up
to ``nodes_per_rack`` nodes are in one rack, more are whole racks of that size. What the experiment states about its own
GPUs (``gpus_per_node``, ``memory_gb``, ``price_per_gpu_hour``, ``host_memory_gb``) is not carried over to another
profile.

A plan for fewer GPUs is also a plan for more. Under the objective ``throughput`` a search that finds less than the plan
of a smaller cluster reaches gives way to that plan, so that tokens/s never fall with more GPUs.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

import attrs

from rpeg_core.accuracy.intervals import PlanIntervals, plan_intervals
from rpeg_core.errors import ExperimentError
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.bounds import gap, problem_bound
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.solve import Outcome
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.experiment import Cluster, Experiment
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.spec.workload import LengthQuantile, Workload

__all__ = ["DEFAULT_FACTORS", "Found", "Point", "Row", "default_gpus", "found", "sized", "sweep_points"]

DEFAULT_FACTORS = (0.25, 0.5, 1, 2)
"""GPU counts of a sweep that names no axis, relative to the experiment's."""


@attrs.frozen(kw_only=True)
class Point:
    """One setting of the axes.

    Attributes:
        hardware: name of the profile.
        gpus: GPUs of the cluster.
        prompts, response_tokens: of the workload.
        price_per_gpu_hour: US dollars, None when neither the user nor the profile states it.
        experiment: to search, None when there is none.
        skipped: why there is none.
    """

    hardware: str
    gpus: int
    prompts: int
    response_tokens: int
    price_per_gpu_hour: float | None = None
    experiment: Experiment | None = None
    skipped: str | None = None

    def same_but_gpus(self, other: Point) -> bool:
        """Whether two points differ in the number of GPUs at most."""
        own, others = (attrs.astuple(p, filter=_but_gpus, recurse=False) for p in (self, other))
        return own == others


def _but_gpus(field: attrs.Attribute, _: object) -> bool:
    return field.name in ("hardware", "prompts", "response_tokens")


@attrs.frozen(kw_only=True, eq=False)
class Found:
    """The plan of a point.

    Attributes:
        structure, assignments: the plan.
        prediction: of it, on the point's cluster.
        steps: K_eval, of the prediction's makespan.
        gap: how far below the best possible plan under the model it is at most, None without a bound.
        limit: what keeps plans from being faster, in words.
        intervals: how sure the prediction is.
        plan_of_gpus: GPUs of the smaller cluster whose plan this is, None when the point's own search found it.
    """

    structure: Structure
    assignments: ExecutionPlan
    prediction: Prediction
    steps: int
    gap: float | None
    limit: str
    intervals: PlanIntervals
    plan_of_gpus: int | None = None

    @property
    def tokens_per_s(self) -> float:
        return self.prediction.evaluation.tokens_per_s

    @property
    def step_s(self) -> float:
        return self.prediction.evaluation.makespan_s / self.steps


@attrs.frozen(kw_only=True, eq=False)
class Row:
    """A point after its search: ``found``, or ``why`` there is no plan."""

    point: Point
    found: Found | None = None
    why: str | None = None

    @property
    def tokens_per_s_per_gpu(self) -> float | None:
        return None if self.found is None else self.found.tokens_per_s / self.point.gpus

    @property
    def gpu_seconds_per_token(self) -> float | None:
        """GPU time of the whole cluster per token: what a token costs where no price is known."""
        return None if self.found is None else self.point.gpus / self.found.tokens_per_s

    @property
    def usd_per_step(self) -> float | None:
        """Price of the whole cluster, busy or idle, for one step."""
        if self.found is None or self.point.price_per_gpu_hour is None:
            return None
        return self.point.gpus * self.point.price_per_gpu_hour * self.found.step_s / 3600

    @property
    def usd_per_million_tokens(self) -> float | None:
        """Per 10^6 prompt and response tokens."""
        if self.found is None or self.point.price_per_gpu_hour is None:
            return None
        return self.point.price_per_gpu_hour * self.gpu_seconds_per_token * 1e6 / 3600


def default_gpus(experiment: Experiment, profile: HardwareProfile, *, several: bool) -> tuple[int, ...]:
    """The GPUs of the experiment on its own profile; ``several``: a quarter, half, the same and twice, if possible."""
    cluster = experiment.cluster
    gpus = cluster.racks * cluster.nodes_per_rack * _per_node(experiment, profile)
    if not several:
        return (gpus,)
    counts = (gpus * factor for factor in DEFAULT_FACTORS)
    whole = [int(count) for count in counts if count == int(count)]
    return tuple(count for count in whole if not isinstance(sized(experiment, profile, count), str))


def sized(experiment: Experiment, profile: HardwareProfile, gpus: int) -> Cluster | str:
    """The cluster of ``gpus`` GPUs of a profile, or the sentence that says why there is none."""
    cluster, per_node = experiment.cluster, _per_node(experiment, profile)
    if gpus % per_node:
        return f"{gpus} GPUs are not whole nodes of {per_node}"
    nodes = gpus // per_node
    racks = 1
    if cluster.racks > 1 and nodes > cluster.nodes_per_rack:
        if nodes % cluster.nodes_per_rack:
            rack = f"a rack of {cluster.nodes_per_rack} nodes"
            return f"{gpus} GPUs are {nodes} nodes, more than {rack} and not whole racks"
        racks, nodes = nodes // cluster.nodes_per_rack, cluster.nodes_per_rack
    own = profile.name == cluster.hardware
    return Cluster(
        hardware=profile.name,
        racks=racks,
        nodes_per_rack=nodes,
        gpus_per_node=per_node,
        memory_gb=cluster.memory_gb if own else None,
        price_per_gpu_hour=cluster.price_per_gpu_hour if own else None,
        host_memory_gb=cluster.host_memory_gb if own else None,
    )


def _per_node(experiment: Experiment, profile: HardwareProfile) -> int:
    stated = experiment.cluster.gpus_per_node if profile.name == experiment.cluster.hardware else None
    return stated or profile.gpus_per_node


def sweep_points(
    experiment: Experiment,
    profiles: Sequence[HardwareProfile],
    *,
    gpus: Sequence[int],
    prompts: Sequence[int] | None = None,
    response_tokens: Sequence[int] | None = None,
    prices: Mapping[str, float] | None = None,
) -> tuple[Point, ...]:
    """The product of the axes, GPUs innermost and ascending; None is the experiment's value.

    Args:
        experiment: the base.
        profiles: hardware.
        gpus: numbers of GPUs.
        prompts: batch sizes.
        response_tokens: ``response_tokens`` of the workload; quantiles of ``response_lengths`` scale with them.
        prices: profile -> US dollars per GPU and hour, before the experiment's and the profile's.
    """
    workload = experiment.workload
    batches = prompts or (workload.prompts,)
    lengths = response_tokens or (workload.response_tokens,)
    return tuple(
        _point(experiment, profile, count, batch, length, prices or {})
        for profile, batch, length, count in itertools.product(profiles, batches, lengths, sorted(set(gpus)))
    )


def _point(
    experiment: Experiment,
    profile: HardwareProfile,
    gpus: int,
    prompts: int,
    response_tokens: int,
    prices: Mapping[str, float],
) -> Point:
    cluster = sized(experiment, profile, gpus)
    stated = None if isinstance(cluster, str) else cluster.price_per_gpu_hour
    point = Point(
        hardware=profile.name,
        gpus=gpus,
        prompts=prompts,
        response_tokens=response_tokens,
        price_per_gpu_hour=prices.get(profile.name) or stated or profile.price_per_gpu_hour,
    )
    if isinstance(cluster, str):
        return attrs.evolve(point, skipped=cluster)
    try:
        workload = _resized(experiment.workload, prompts, response_tokens)
    except ExperimentError as error:
        return attrs.evolve(point, skipped="; ".join([error.what, *error.facts]))
    return attrs.evolve(point, experiment=attrs.evolve(experiment, cluster=cluster, workload=workload))


def _resized(workload: Workload, prompts: int, response_tokens: int) -> Workload:
    scale = response_tokens / workload.response_tokens
    return attrs.evolve(
        workload,
        prompts=prompts,
        response_tokens=response_tokens,
        response_lengths=tuple(
            LengthQuantile(quantile.fraction, round(quantile.tokens * scale)) for quantile in workload.response_lengths
        ),
    )


def found(point: Point, outcome: Outcome, earlier: Sequence[Row]) -> Found | None:
    """The plan of a point: what its search found, or a smaller cluster's where that is faster; None when nothing fits.

    Args:
        point: the point that was searched.
        outcome: of its search.
        earlier: rows of the sweep so far.
    """
    own = None
    if outcome.winner is not None:
        structure = outcome.structure(outcome.winner)
        assignments = structure.plan(outcome.winner.solution.choice)
        own = Found(
            structure=structure.structure,
            assignments=assignments,
            prediction=outcome.winner.prediction,
            steps=outcome.problem.options.steps,
            gap=outcome.gap,
            limit=outcome.limit,
            intervals=plan_intervals(structure.book, assignments, outcome.winner.prediction),
        )
    if outcome.problem.objective.kind != "throughput":
        return own
    smaller = [row for row in earlier if row.found is not None and row.point.same_but_gpus(point)]
    best = max(smaller, key=lambda row: row.found.tokens_per_s, default=None)
    if best is None or (own is not None and best.found.tokens_per_s <= own.tokens_per_s):
        return own
    return _taken_over(best, outcome.problem) or own


def _taken_over(row: Row, problem: Problem) -> Found | None:
    """The plan of a smaller cluster on a larger one, None where it is not among the candidates."""
    plan = row.found
    structure = next((s for s in problem.structures if s.structure == plan.structure), None)
    if structure is None or not _has(structure, plan.assignments):
        return None
    prediction = structure.predict(plan.assignments)
    reached = prediction.evaluation.tokens_per_s
    bound = problem_bound(problem, known_tokens_per_s=reached)
    return attrs.evolve(
        plan,
        prediction=prediction,
        gap=gap(reached, bound),
        limit=bound.reason,
        intervals=plan_intervals(structure.book, plan.assignments, prediction),
        plan_of_gpus=plan.plan_of_gpus or row.point.gpus,
    )


def _has(structure: StructureProblem, assignments: ExecutionPlan) -> bool:
    return all(candidates.find(assignments[candidates.operator]) is not None for candidates in structure.candidates)
