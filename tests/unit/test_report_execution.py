"""Step and operator times of a trace, against a run drawn by hand: two operators on two GPUs, three steps."""

from __future__ import annotations

import attrs
import pytest

from rpeg_core.accuracy.draws import Interval
from rpeg_core.accuracy.intervals import PlanIntervals
from rpeg_core.planning.plan import Plan
from rpeg_core.report import words
from rpeg_core.report.execution import Execution, comparison, document, operators, step_times
from rpeg_core.runtime.trace import Dispatched, Ended, Record, Started, Stopped, Trace, TraceHeader
from rpeg_core.spec.machine import Allocation
from rpeg_core.testing.checks.samples import sample_plan

GPU = Allocation(0, 1)

# (step, operator, kind, start, end): the first step is slow; in step 2 the second operator has two phases
DRAWN = (
    (0, "a", "OP", 0.0, 4.0),
    (0, "b", "OP", 4.0, 9.0),
    (1, "a", "OP", 9.0, 10.0),
    (1, "b", "COMM", 10.0, 10.5),
    (1, "b", "OP", 10.5, 12.0),
    (2, "a", "OP", 12.0, 14.0),
    (2, "b", "OP", 13.0, 14.5),
    (2, "b", "OP", 14.5, 15.0),
)


def trace(nodes: tuple[tuple[int, str, str, float, float], ...] = DRAWN, **header: object) -> Trace:
    records: list[tuple[float, Record]] = []
    for index, (step, operator, kind, start_s, end_s) in enumerate(nodes):
        node = Dispatched(
            start_s, index, f"{operator}@{step}", kind, operator, step, None, GPU, None, None, 1, None, ()
        )
        records += [(start_s, node), (start_s, Started(start_s, index)), (end_s, Ended(end_s, index))]
    records.sort(key=lambda each: each[0])
    given = {"plan": None, "backend": "toy", "steps": 3, "clock": "wall", **header}
    return Trace(TraceHeader(**given), tuple(record for _, record in records))


@pytest.fixture(scope="module")
def plan() -> Plan:
    plan = sample_plan()
    first, second, *_ = plan.assignments
    prediction = attrs.evolve(plan.prediction, step_s=2.0, operator_s={"a": (0.5, 0.5), "b": (1.0,)})
    assignments = {"a": plan.assignments[first], "b": plan.assignments[second]}
    return attrs.evolve(plan, prediction=prediction, assignments=assignments)


def test_steps_end_when_all_before_are_done_and_phases_are_added() -> None:
    steps = step_times(trace())
    assert [step.seconds for step in steps] == [9.0, 3.0, 3.0]
    assert [dict(step.operators) for step in steps] == [
        {"a": 4.0, "b": 5.0},
        {"a": 1.0, "b": 1.5},
        {"a": 2.0, "b": 2.0},
    ]
    assert [dict(step.transfers) for step in steps] == [{}, {"b": 0.5}, {}]


def test_a_step_that_overtakes_its_predecessor_takes_no_time_of_its_own() -> None:
    drawn = ((0, "a", "OP", 0.0, 5.0), (1, "b", "OP", 0.0, 3.0))
    assert [step.seconds for step in step_times(trace(drawn, steps=2))] == [5.0, 0.0]


def test_what_was_cut_off_is_no_step(plan: Plan) -> None:
    whole = trace()
    stopped = Trace(attrs.evolve(whole.header, steps=9), (*whole.records, Stopped(15.0, "interrupted", 2)))
    assert [step.step for step in step_times(stopped)] == [0, 1]
    nothing = Trace(whole.header, (Stopped(0.1, "interrupted", 0),))
    assert Execution.of(plan, nothing) is None
    assert document(plan, nothing, None)["step_s"] is None


def test_a_resumed_run_counts_from_its_first_step() -> None:
    later = tuple((step + 5, *rest) for step, *rest in DRAWN)
    assert [step.step for step in step_times(trace(later, steps=8, first_step=5))] == [5, 6, 7]


def test_in_wall_clock_time_the_first_step_is_apart(plan: Plan) -> None:
    found = Execution.of(plan, trace())
    assert found is not None
    assert (found.step_s, found.operator_s("a"), found.operator_s("b")) == (3.0, (1.5, 0.0), (1.75, 0.25))
    rows = {row[0]: row for row in comparison(found).rows}
    assert rows["executed"][1::2] == ("3.00 s", "median of 2 steps")
    assert rows["executed / predicted"][1] == "×1.50"
    assert rows["first step"][1] == "9.00 s"
    assert [row[0::2][:3] for row in operators(found).rows] == [("a", "1.50 s", "×1.50"), ("b", "1.75 s", "×1.75")]
    assert document(plan, found.trace, found)["first_step_s"] == 9.0


def surely(plan: Plan, low: float, high: float) -> Plan:
    operators = {"a": Interval(0.5, 1.25), "b": None}
    intervals = PlanIntervals(
        step_s=Interval(low, high),
        tokens_per_s=Interval(1.0, 2.0),
        operator_s=operators,
        unknown={},
        extrapolations=(),
    )
    return attrs.evolve(plan, intervals=intervals)


def test_the_report_says_whether_the_interval_held(plan: Plan) -> None:
    """Executed 3 s a step, predicted 2 s."""
    for low, high, verdict in ((1.5, 3.5, "inside"), (1.5, 2.5, "outside")):
        found = Execution.of(surely(plan, low, high), trace())
        assert found is not None
        rows = {row[0]: row for row in comparison(found).rows}
        assert rows["predicted"][1::2] == (f"2.00 s (1.5-{high})", "(90% interval)")
        assert rows["executed"][3] == f"median of 2 steps, {verdict} the interval"
        assert [row[3] for row in operators(found).rows] == ["1.00 s (0.50-1.3)", "1.00 s"]
        assert document(found.plan, found.trace, found)["intervals"]["step_s"] == [low, high]


def test_virtual_time_proves_no_interval(plan: Plan) -> None:
    found = Execution.of(surely(plan, 1.0, 9.0), trace(clock="virtual"))
    assert found is not None
    assert {row[0]: row for row in comparison(found).rows}["executed"][3] == "mean of 3 steps"


def test_in_virtual_time_it_is_the_mean_of_all(plan: Plan) -> None:
    found = Execution.of(plan, trace(clock="virtual"))
    assert found is not None
    assert (found.step_s, found.warm_up, found.basis) == (5.0, None, "mean of 3 steps")
    assert found.operator_s("a")[0] == pytest.approx(7 / 3)


def test_a_single_step_stands_for_all(plan: Plan) -> None:
    found = Execution.of(plan, trace(DRAWN[:2], steps=1))
    assert found is not None
    assert (found.step_s, found.warm_up) == (9.0, None)


def test_durations_and_ratios_in_words() -> None:
    assert [words.duration(value) for value in (0, 7.4, 754, 3723)] == ["0:00", "0:07", "12:34", "1:02:03"]
    assert [words.times(value) for value in (12.5, 1.3, 0.5, 0.0041, 0.0)] == [
        "×12.50",
        "×1.30",
        "×0.50",
        "×0.0041",
        "×0.00",
    ]
