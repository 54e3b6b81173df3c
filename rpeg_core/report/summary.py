"""The page of one plan: table of operators, comparison with the baselines, memory, Gantt chart."""

from __future__ import annotations

from rpeg_core.accuracy.spread import Spread, spread_of
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.solve import LEAST_MEMORY, Contender, Outcome
from rpeg_core.report import intervals, words
from rpeg_core.report.memory import out_of_memory
from rpeg_core.report.page import Column, Grid

__all__ = ["certificate", "comparison", "found_by", "heading", "throughput"]

ROUNDING = 1e-9
"""Gaps below it are rounding errors of sums of times, not better plans."""


def heading(plan: Plan) -> str:
    """``ppo on 32 GPUs (gh200, 2x4x4): staleness 1, actor critic sharing``."""
    experiment, gpus = plan.experiment, words.plural(plan.machine.gpus, "GPU")
    return f"{experiment.algorithm} on {gpus} ({experiment.cluster.hardware}, {plan.machine}): {plan.structure}"


def throughput(plan: Plan) -> str:
    """``81,204 tok/s (44,000-82,000), 4.84 s (4.8-8.9) a step``, and how many GPUs are busy, on a line of its own."""
    prediction, sure = plan.prediction, plan.intervals
    rate = intervals.tokens_per_s(prediction.tokens_per_s, sure and sure.tokens_per_s)
    return (
        f"{rate}, {intervals.seconds(prediction.step_s, sure and sure.step_s)} a step\n"
        f"{words.count(prediction.used_gpus)} of {words.plural(plan.machine.gpus, 'GPU')} used, "
        f"busy {words.percent(prediction.utilization)} of the time"
    )


def certificate(outcome: Outcome) -> str | None:
    """``at most 3.2% below the best possible plan under this model; the limit: ...``, None without a bound."""
    if outcome.gap is None:
        return None
    if outcome.gap < ROUNDING:
        return "the best possible plan under this model"
    distance = "less than 0.1%" if outcome.gap < 0.0005 else f"at most {words.percent(outcome.gap)}"
    return f"{distance} below the best possible plan under this model; the limit: {outcome.limit}"


def comparison(outcome: Outcome, plan: Plan, capacity_bytes: float) -> Grid:
    """This plan against what every other strategy found.

    Plans share the errors of the model, so that their ratio is surer than either: it alone has an interval here.
    """
    own, winner = plan.prediction, outcome.winner
    rows = [
        (
            f"this plan ({winner.name})",
            words.tokens_per_s(own.tokens_per_s),
            "",
            words.seconds(own.step_s),
            _effort(winner),
        )
    ]
    others = [c for c in outcome.contenders if c is not winner and c.name != LEAST_MEMORY]
    spread = _spread(outcome, winner)
    rows += [_other(contender, plan, capacity_bytes, outcome, spread) for contender in others]
    return Grid(
        title="comparison",
        columns=(
            Column("plan"),
            Column("throughput", right=True),
            Column("this plan is", right=True),
            Column("step", right=True),
            Column("remarks"),
        ),
        rows=tuple(rows),
        styles=((0, "bold"),),
    )


def _spread(outcome: Outcome, contender: Contender) -> Spread:
    structure = outcome.structure(contender)
    return spread_of(structure.book, structure.plan(contender.solution.choice), contender.prediction)


def _other(
    contender: Contender, plan: Plan, capacity_bytes: float, outcome: Outcome, own: Spread
) -> tuple[str, str, str, str, str]:
    if contender.prediction is None:
        return (contender.name, "none found", "", "", "no placement exists")
    if not contender.feasible:
        why = out_of_memory(contender.prediction.memory, usable_bytes(capacity_bytes))
        return (contender.name, "out of memory", "", "", why)
    evaluation = contender.prediction.evaluation
    return (
        contender.name,
        words.tokens_per_s(evaluation.tokens_per_s),
        intervals.times(plan.prediction.tokens_per_s / evaluation.tokens_per_s, own.ratio(_spread(outcome, contender))),
        words.seconds(evaluation.makespan_s / plan.options.steps),
        _effort(contender),
    )


def _effort(contender: Contender) -> str:
    """``12,345 evaluations in 10.0 s``."""
    result = contender.result
    if result is None:
        return "no strategy found a plan that fits"
    return f"{words.plural(result.evaluations, 'evaluation')} in {words.seconds(result.seconds)}"


def found_by(outcome: Outcome) -> str:
    """``annealing: 12,345 evaluations in 10.0 s``."""
    return f"{outcome.winner.name}: {_effort(outcome.winner)}"
