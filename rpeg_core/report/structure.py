"""Why a structure won, in words: time saved and memory added against the same places with one choice changed.

The comparison holds the placement, so that the difference is the structure's alone; search compared the best plans of
each structure. What cannot be placed so is left out.
"""

from __future__ import annotations

from collections.abc import Iterator

import attrs

from rpeg_core.accuracy.draws import CONFIDENCE, Interval
from rpeg_core.accuracy.spread import spread_of
from rpeg_core.errors import RpegError
from rpeg_core.ir import Rpeg
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.recheck import Recheck
from rpeg_core.planning.structures import STRUCTURAL_OPTIONS, Structure
from rpeg_core.report import words
from rpeg_core.spec.machine import Allocation

__all__ = ["Rival", "reasons", "rivals"]

_CHOICES = {
    ("actor_critic_sharing", True): "one backbone for actor and critic",
    ("actor_critic_sharing", False): "a model each for actor and critic",
    ("fusion", True): "fused training of actor and critic",
    ("fusion", False): "training actor and critic one by one",
}


@attrs.frozen(kw_only=True)
class Rival:
    """A structure that differs in one choice, in the places of the plan.

    Attributes:
        chosen, other: the choice in words, as the plan has it and as the rival has it.
        structure: the rival's.
        prediction: the rival's.
        own: the plan's.
        usable_bytes: what a plan may use of a GPU.
        ratio: interval of the rival's step over the plan's; the errors that both share cancel out.
    """

    chosen: str
    other: str
    structure: Structure
    prediction: Prediction
    own: Prediction
    usable_bytes: float
    ratio: Interval | None = None

    @property
    def step_s(self) -> float:
        """Of the rival."""
        return self.prediction.evaluation.makespan_s / self.prediction.graph.steps

    @property
    def own_step_s(self) -> float:
        """Of the plan."""
        return self.own.evaluation.makespan_s / self.own.graph.steps

    @property
    def most_added(self) -> tuple[Allocation, float, float]:
        """The GPUs on which the choice changes the peak most: (GPUs, the rival's peak, the plan's), in bytes."""
        found = None
        for theirs in self.prediction.memory.segments:
            for mine in self.own.memory.segments:
                if theirs.gpus.overlap(mine.gpus):
                    first, last = max(theirs.gpus.start, mine.gpus.start), min(theirs.gpus.stop, mine.gpus.stop)
                    change = (Allocation(first, last), theirs.peak_bytes, mine.peak_bytes)
                    if found is None or abs(change[2] - change[1]) > abs(found[2] - found[1]):
                        found = change
        return found

    @property
    def fits(self) -> bool:
        """Whether the rival would fit."""
        return self.prediction.memory.peak.peak_bytes <= self.usable_bytes

    def sentence(self) -> str:
        """``staleness 1 of actor saves 1.67 s of 6.51 s a step (×1.35) against staleness 0; it adds ...``."""
        saved, factor = self.step_s - self.own_step_s, self.step_s / self.own_step_s
        if abs(factor - 1) < 0.0005:
            time = f"{self.chosen} takes as long as {self.other} here, {words.seconds(self.own_step_s)} a step"
        elif saved > 0:
            time = (
                f"{self.chosen} saves {words.seconds(saved)} of {words.seconds(self.step_s)} a step "
                f"({self._factor(factor)}) against {self.other}"
            )
        else:
            time = (
                f"{self.chosen} costs {words.seconds(-saved)} a step ({self._factor(factor)}) against {self.other} "
                "in these places"
            )
        gpus, before, after = self.most_added
        verb = "adds" if after > before else "frees"
        change = (
            f"{verb} {words.size(abs(after - before))} on GPUs {gpus} ({words.size(before)} to {words.size(after)})"
        )
        memory = "needs no other memory" if after == before else change
        return f"{time}; it {memory}" + ("" if self.fits else f", and {self.other} would not fit")

    def _factor(self, factor: float) -> str:
        if self.ratio is None:
            return words.times(factor)
        return f"{words.times(factor)}, {words.percent(CONFIDENCE)} interval {self.ratio.low:.2f}-{self.ratio.high:.2f}"


def reasons(checked: Recheck) -> tuple[str, ...]:
    """A sentence for each choice that could have been another one."""
    return tuple(rival.sentence() for rival in rivals(checked))


def rivals(checked: Recheck) -> Iterator[Rival]:
    """The structures next to the plan's: those that the experiment allows, and the plain ones."""
    plan, planner = checked.plan, checked.planner
    own = spread_of(checked.structure.book, plan.assignments, checked.prediction)
    for chosen, other, structure in _neighbours(plan, planner.structures()):
        try:
            graph = planner.graph(structure)
            places = _places(plan, graph)
            if places is None:
                continue
            trial = attrs.evolve(plan, structure=structure, rpeg=graph, assignments=places)
            problem = planner.structure_problem(trial)
            prediction = problem.predict(places)
        except RpegError:  # of a structure that these models do not have, or that is not legal in these places
            continue
        yield Rival(
            chosen=chosen,
            other=other,
            structure=structure,
            prediction=prediction,
            own=checked.prediction,
            usable_bytes=plan.prediction.usable_bytes,
            ratio=own.ratio(spread_of(problem.book, places, prediction)),
        )


def _neighbours(plan: Plan, allowed: tuple[Structure, ...]) -> Iterator[tuple[str, str, Structure]]:
    """(choice of the plan, another, the structure with it)."""
    own = plan.structure
    for model, tau in own.staleness:
        others = {structure.tau(model) for structure in allowed if model in dict(structure.staleness)}
        for other in sorted({*others, 0} - {tau}):
            staleness = tuple((name, other if name == model else value) for name, value in own.staleness)
            yield f"staleness {tau} of {model}", f"staleness {other}", attrs.evolve(own, staleness=staleness)
    for option in STRUCTURAL_OPTIONS:
        value = getattr(own, option)
        if value or any(getattr(structure, option) for structure in allowed):
            changed = attrs.evolve(own, **{option: not value})
            if changed.actor_critic_sharing and changed.fusion:  # a shared backbone has nothing to fuse
                if option == "fusion":
                    continue
                changed = attrs.evolve(changed, fusion=False)
            names = dict.fromkeys(name for s in allowed if getattr(s, option) != value for name, _ in s.staleness)
            if names:
                longest = max((tau for _, tau in own.staleness), default=0)
                changed = attrs.evolve(changed, staleness=tuple((name, longest) for name in names))
            yield _CHOICES[option, value], _CHOICES[option, not value], changed


def _places(plan: Plan, graph: Rpeg) -> ExecutionPlan | None:
    """Each operator where the plan has it, or has the one that does its work for a model of the same origin."""
    found = {}
    for operator in graph.operators:
        if operator.name in plan.assignments:
            found[operator.name] = plan.assignments[operator.name]
            continue
        kin = [
            other.name
            for other in plan.rpeg.operators
            if other.role is operator.role
            and any(_related(one, model) for one in other.models for model in operator.models)
        ]
        if not kin:
            return None
        found[operator.name] = plan.assignments[kin[0]]
    return found


def _related(one: str, other: str) -> bool:
    """Whether one model's name is a part of the other's, as ``actor`` and ``critic`` are of ``actor_critic``."""
    return bool(set(one.split("_")) & set(other.split("_")))
