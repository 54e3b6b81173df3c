"""Questions about plans: whether one is legal, whether any fits, and what is held where."""

from __future__ import annotations

from case_questions.asker import FITS, FULL, GB, Answer, Asker, Facts
from rpeg_core.errors import PinError
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.search import Solution
from rpeg_core.planning.solve import only_choice

__all__ = ["any_plan", "legal", "shared_gpus", "together"]

ENDLESS_GB = 100_000.0


def legal(asker: Asker, facts: Facts) -> Answer:
    """Is a pinned plan legal?"""
    try:
        asker.planner(facts["experiment"]).problem()
    except PinError as error:
        reason = error.facts[0]
        return Answer(f"rejected, {reason.partition(':')[0]}", reason)
    return Answer("legal", "every pin can be met")


def any_plan(asker: Asker, facts: Facts) -> Answer:
    """Does any plan fit? The number is the smallest peak of all plans."""
    limit = usable_bytes(asker.planner(facts["experiment"]).hardware.device.memory_bytes)
    problem = asker.planner(facts["experiment"], memory_gb=ENDLESS_GB).problem()
    solution = least_memory(problem, any_size=True)
    peak = _prediction(problem, solution).memory.peak.peak_bytes
    return Answer(FITS if peak <= limit else FULL, f"at least {peak / GB:.1f} of {limit / GB:.1f} GB", limit)


def _prediction(problem: Problem, solution: Solution) -> Prediction:
    structure = problem.structures[solution.structure]
    return structure.predict(structure.plan(solution.choice))


def together(asker: Asker, facts: Facts) -> Answer:
    """Are all ``terms`` held at the moment of a training's peak?"""
    problem = asker.planner(facts["experiment"]).problem()
    peak = _prediction(problem, only_choice(problem)).memory.peak
    held = {item.quantity: item.bytes for item in peak.items if item.operator == facts["operator"]}
    verdict = "at the same time" if set(facts["terms"]) <= set(held) else "one after the other"
    return Answer(verdict, ", ".join(f"{term} {held.get(term, 0.0) / GB:.1f} GB" for term in facts["terms"]))


def shared_gpus(asker: Asker, facts: Facts) -> Answer:
    """Does placing ``model`` on the trainer's GPUs, rather than apart, explain more memory there, and is it named?"""
    peaks = []
    for side in ("together", "apart"):
        pins = {**facts["experiment"]["pin"], **facts[side]}
        problem = asker.planner({**facts["experiment"], "pin": pins}).problem()
        segment = _prediction(problem, only_choice(problem)).memory.segments[0]
        named = sum(item.bytes for item in segment.items if item.model == facts["model"])
        peaks.append((segment.peak_bytes, named))
    more = peaks[0][0] - peaks[1][0]
    explained = more > 0 and peaks[1][1] == 0 and abs(more - peaks[0][1]) < 1.0
    numbers = (
        f"{peaks[1][0] / GB:.1f} GB apart, {peaks[0][0] / GB:.1f} together, {peaks[0][1] / GB:.1f} of {facts['model']}"
    )
    return Answer("explained" if explained else "not explained", numbers)
