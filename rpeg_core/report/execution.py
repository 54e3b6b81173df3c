"""What a trace says about time, beside what the plan predicts: steps, operators, throughput.

In wall-clock time the first step of a run pays for what is done once (compilation, allocation, first connections); it
is shown apart, and *typical* is the median of the complete steps after it. In virtual time nothing is paid once, and
typical is the mean over the run, its start and end included, as predictions count them.
"""

from __future__ import annotations

import collections
import statistics
from collections.abc import Callable, Mapping
from typing import Any

import attrs

from rpeg_core.accuracy.draws import CONFIDENCE
from rpeg_core.planning.plan import Plan
from rpeg_core.report import intervals, words
from rpeg_core.report.page import Column, Grid
from rpeg_core.runtime.trace import Trace

__all__ = ["Execution", "StepTimes", "comparison", "document", "operators", "step_times"]


@attrs.frozen(kw_only=True)
class StepTimes:
    """One complete RL step.

    Attributes:
        step: its number.
        seconds: from the end of the step before it (of the run's start) until it and all before it were done.
        operators: operator -> seconds that it ran, all its length phases together.
        transfers: operator -> seconds of transfers to it.
    """

    step: int
    seconds: float
    operators: Mapping[str, float]
    transfers: Mapping[str, float]


def step_times(trace: Trace) -> tuple[StepTimes, ...]:
    """The complete steps of a run, in order."""
    ran: dict[int, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    moved: dict[int, dict[str, float]] = collections.defaultdict(lambda: collections.defaultdict(float))
    ends_s: dict[int, float] = collections.defaultdict(float)
    for node, start_s, end_s in trace.intervals():
        (ran if node.kind == "OP" else moved)[node.step][node.operator] += end_s - start_s
        ends_s[node.step] = max(ends_s[node.step], end_s)
    found = []
    before_s = 0.0
    for step in range(trace.header.first_step, trace.header.first_step + trace.steps):
        done_s = max(before_s, ends_s[step])
        found.append(
            StepTimes(
                step=step,
                seconds=done_s - before_s,
                operators=dict(sorted(ran[step].items())),
                transfers=dict(sorted(moved[step].items())),
            )
        )
        before_s = done_s
    return tuple(found)


@attrs.frozen(kw_only=True)
class Execution:
    """A run of a plan of which at least one step is complete."""

    plan: Plan
    trace: Trace
    steps: tuple[StepTimes, ...]

    @classmethod
    def of(cls, plan: Plan, trace: Trace) -> Execution | None:
        """None when no step is complete."""
        steps = step_times(trace)
        return cls(plan=plan, trace=trace, steps=steps) if steps else None

    @property
    def warm_up(self) -> StepTimes | None:
        """The first step where it is shown apart."""
        return self.steps[0] if self.trace.header.clock == "wall" and len(self.steps) > 1 else None

    @property
    def step_s(self) -> float:
        """Typical seconds of a step."""
        if self.trace.header.clock == "virtual":
            return self.trace.step_s
        return self._typical(lambda step: step.seconds)

    @property
    def tokens_per_s(self) -> float:
        return self.plan.workload.tokens_per_step / self.step_s

    def operator_s(self, name: str) -> tuple[float, float]:
        """Typical (seconds that an operator runs, seconds of transfers to it) in a step."""
        return (
            self._typical(lambda step: step.operators.get(name, 0.0)),
            self._typical(lambda step: step.transfers.get(name, 0.0)),
        )

    @property
    def basis(self) -> str:
        """What typical numbers are, in words."""
        if self.trace.header.clock == "virtual":
            return f"mean of {words.plural(len(self.steps), 'step')}"
        later = self.steps[1:] or self.steps
        return f"median of {words.plural(len(later), 'step')}"

    def _typical(self, of: Callable[[StepTimes], float]) -> float:
        values = [of(step) for step in self.steps]
        if self.trace.header.clock == "virtual":
            return statistics.fmean(values)
        return statistics.median(values[1:] or values)


def comparison(execution: Execution) -> Grid:
    """The step as predicted and as executed."""
    plan = execution.plan
    predicted = plan.prediction
    ratio = execution.step_s / predicted.step_s
    first = execution.warm_up
    sure = plan.intervals
    rows = [
        (
            "predicted",
            intervals.seconds(predicted.step_s, sure and sure.step_s),
            intervals.tokens_per_s(predicted.tokens_per_s, sure and sure.tokens_per_s),
            "" if sure is None or sure.step_s is None else f"({words.percent(CONFIDENCE)} interval)",
        ),
        (
            "executed",
            words.seconds(execution.step_s),
            words.tokens_per_s(execution.tokens_per_s),
            ", ".join([execution.basis, *_verdict(execution)]),
        ),
        ("executed / predicted", words.times(ratio), words.times(1 / ratio), ""),
    ]
    if first is not None:
        rate = plan.workload.tokens_per_step / first.seconds if first.seconds else 0.0
        rows.append(("first step", words.seconds(first.seconds), words.tokens_per_s(rate), "not counted above"))
    return Grid(
        title="predicted and executed",
        columns=(
            Column(""),
            Column("time of a step", right=True),
            Column("throughput", right=True),
            Column("remarks"),
        ),
        rows=tuple(rows),
    )


def _verdict(execution: Execution) -> list[str]:
    """Whether the interval held; virtual time executes the prediction itself and proves nothing."""
    sure = execution.plan.intervals
    if sure is None or sure.step_s is None or execution.trace.header.clock == "virtual":
        return []
    return ["inside the interval" if sure.step_s.holds(execution.step_s) else "outside the interval"]


def operators(execution: Execution) -> Grid:
    """Where the time of a typical step goes, by operator."""
    plan, trace, rows = execution.plan, execution.trace, []
    sure = {} if plan.intervals is None else plan.intervals.operator_s
    for name, (run, _) in trace.busy_s().items():
        measured, moved = execution.operator_s(name)
        predicted = sum(plan.prediction.operator_s[name])
        rows.append(
            (
                name,
                str(plan.assignments[name].allocation),
                words.seconds(measured),
                intervals.seconds(predicted, sure.get(name)),
                words.times(measured / predicted) if predicted else "",
                words.seconds(moved),
                words.percent(run / trace.makespan_s),
            )
        )
    names = ("runs", "predicted", "runs / predicted", "transfers to it", "share of the run")
    return Grid(
        title="time in one step",
        columns=(Column("operator"), Column("GPUs"), *(Column(name, right=True) for name in names)),
        rows=tuple(rows),
    )


def document(plan: Plan, trace: Trace, execution: Execution | None) -> dict[str, Any]:
    """For ``--json``; numbers of a typical step are null when none is complete."""
    first = None if execution is None else execution.warm_up
    found: dict[str, Any] = {
        "plan": plan.digest,
        "backend": trace.header.backend,
        "clock": trace.header.clock,
        "first_step": trace.header.first_step,
        "steps": trace.steps,
        "makespan_s": trace.makespan_s,
        "step_s": None if execution is None else execution.step_s,
        "first_step_s": None if first is None else first.seconds,
        "predicted_step_s": plan.prediction.step_s,
        "intervals": None if plan.intervals is None else plan.intervals.document(),
        "tokens_per_s": None if execution is None else execution.tokens_per_s,
        "predicted_tokens_per_s": plan.prediction.tokens_per_s,
        "operators": {},
        "notes": list(trace.header.notes),
    }
    if execution is not None:
        for name in trace.busy_s():
            measured, moved = execution.operator_s(name)
            found["operators"][name] = {
                "busy_s_per_step": measured,
                "predicted_s_per_step": sum(plan.prediction.operator_s[name]),
                "transfers_to_it_s_per_step": moved,
            }
    return found
