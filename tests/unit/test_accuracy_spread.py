"""Intervals of plans, against hand-drawn schedules of toy operators whose distribution is known in closed form."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from rpeg_core.accuracy.draws import Interval, standard_normal
from rpeg_core.accuracy.intervals import PlanIntervals, plan_intervals
from rpeg_core.accuracy.spread import Spread, spread_of
from rpeg_core.costing.book import CostBook
from rpeg_core.ir import Role
from rpeg_core.passes.evaluate import EvaluationOptions, Prediction, evaluate
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.records import CostTerm, Target
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import DeviceSpace, HardwareProfile
from rpeg_core.spec.software import Software
from rpeg_core.testing.toys import on, toy_book, toy_hardware, toy_mini, toy_plan, toy_transfer_term, toy_workload

Z = 1.6448536269514722
"""The 95 % quantile of the standard normal distribution."""

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)


def error(log_std: float, log_bias: float = 0.0, **conditions: object) -> TermError:
    return TermError(log_std=log_std, log_bias=log_bias, rows=10, source="made up", **conditions)


def term(name: str, seconds: dict[Role, float], *errors: TermError) -> CostTerm:
    """So many seconds for every operator of a role."""

    def function(batch):
        return np.full(len(batch.layouts), seconds.get(batch.role, 0.0))

    return CostTerm(
        name=f"toy.{name}", summary=name, target=Target.OPERATOR, quantity=name, function=function, errors=errors
    )


def spread(terms: list[CostTerm], **options: object) -> Spread:
    """One step of generation and training."""
    return drawn(terms, **options)[0]


def drawn(
    terms: list[CostTerm],
    *,
    apart: bool = False,
    tau: int = 0,
    steps: int = 1,
    transfer: CostTerm | None = None,
    hardware: HardwareProfile | None = None,
) -> tuple[Spread, CostBook, ExecutionPlan, Prediction]:
    """Generation and training one after the other on the same GPUs, or ``apart`` on two each."""
    graph = toy_mini(tau=tau)
    plan = toy_plan(actor_generation=on(2, 4) if apart else on(0, 2), actor_training=on(0, 2))
    book = toy_book(graph, MACHINE, toy_workload(), extra=terms, transfer=transfer, hardware=hardware)
    prediction = evaluate(graph, plan, book, EvaluationOptions(steps=steps))
    return spread_of(book, plan, prediction), book, plan, prediction


def ends(interval: Interval | None) -> tuple[float, float]:
    assert interval is not None
    return interval.low, interval.high


def lognormal(seconds: float, std: float, bias: float = 0.0) -> tuple[float, float]:
    return pytest.approx((seconds * math.exp(bias - Z * std), seconds * math.exp(bias + Z * std)), rel=2e-3)


G, T = Role.GENERATION, Role.TRAINING


def test_one_term_gives_its_own_lognormal_interval() -> None:
    found = spread([term("work", {G: 4.0, T: 6.0}, error(0.1))])
    times = {name: timed for name, timed in found.operators.items() if timed.seconds > 0}
    assert sorted(timed.seconds for timed in times.values()) == [4.0, 6.0]
    for timed in times.values():
        assert ends(timed.interval) == lognormal(timed.seconds, 0.1)


def test_the_error_of_one_term_is_the_same_in_every_operator() -> None:
    """4 s and 6 s one after the other with one error: 10 s with that error, not with less."""
    assert ends(spread([term("work", {G: 4.0, T: 6.0}, error(0.1))]).step.interval) == lognormal(10.0, 0.1)


def test_errors_under_other_conditions_are_independent() -> None:
    """Generation and training each have an error of their own: the variances of 4 s and 6 s add, to first order."""
    both = [error(0.05, roles=("generation",)), error(0.05, roles=("training",))]
    step = spread([term("work", {G: 4.0, T: 6.0}, *both)]).step
    assert step.draws.std() == pytest.approx(0.05 * math.hypot(4.0, 6.0), rel=0.03)


def test_different_terms_err_independently() -> None:
    step = spread([term("a", {T: 3.0}, error(0.05)), term("b", {T: 4.0}, error(0.05))]).step
    assert step.draws.std() == pytest.approx(0.05 * 5.0, rel=0.03)


def test_a_bias_moves_the_interval_and_the_prediction_stays_inside() -> None:
    found = spread([term("work", {T: 10.0}, error(0.1, 0.05))])
    assert ends(found.step.interval) == lognormal(10.0, 0.1, 0.05)
    far = spread([term("work", {T: 10.0}, error(0.1, 1.0))])
    assert far.step.interval.low == 10.0
    assert far.step.interval.high == pytest.approx(10.0 * math.exp(1.0 + Z * 0.1), rel=2e-3)


def test_what_is_off_the_critical_path_counts_where_it_may_come_onto_it() -> None:
    """Two operators of 5 s side by side, errors independent: the step is the larger of both.

    P(max <= x) = Phi(log(x/5)/s)^2, so that its median is at Phi^-1(sqrt(1/2)) = 0.5449 standard deviations.
    """
    terms = [term("work", {G: 5.0, T: 5.0}, error(0.1, roles=("generation",)), error(0.1, roles=("training",)))]
    found, _, _, prediction = drawn(terms, apart=True, tau=1, steps=2, transfer=toy_transfer_term(bytes_per_s=1e12))
    assert prediction.evaluation.makespan_s == pytest.approx(15.0)  # generation, both side by side, training
    draws = found.step.draws * 2
    g, t = (np.exp(0.1 * standard_normal(f"toy.work #{index}")) * 5.0 for index in (0, 1))
    assert draws == pytest.approx(g + np.maximum(g, t) + t)
    assert np.median(np.maximum(g, t)) == pytest.approx(5.0 * math.exp(0.1 * 0.5449), rel=5e-3)


def test_an_error_of_the_step_scales_the_step_and_no_operator() -> None:
    between = term("between", {}, error(0.0, math.log(1.5), of_step=True))
    found = spread([term("work", {T: 10.0}, error(0.1)), between])
    assert found.step.interval.high == pytest.approx(15.0 * math.exp(Z * 0.1), rel=2e-3)
    assert ends(next(t for t in found.operators.values() if t.seconds > 0).interval) == lognormal(10.0, 0.1)


def test_an_error_of_steps_that_generate_is_none_of_others() -> None:
    between = term("between", {}, error(0.0, math.log(1.5), of_step=True, roles=("inference",)))
    found = spread([term("work", {T: 10.0}, error(0.1)), between])
    assert (found.step_errors, ends(found.step.interval)) == ((), lognormal(10.0, 0.1))


def test_a_term_that_was_never_validated_takes_the_interval_away() -> None:
    found, book, plan, prediction = drawn([term("known", {T: 8.0}, error(0.1)), term("unknown", {T: 2.0})])
    assert (found.step.interval, dict(found.step.unknown)) == (None, {"toy.unknown": pytest.approx(0.2)})
    intervals = plan_intervals(book, plan, prediction)
    assert (intervals.step_s, intervals.tokens_per_s) == (None, None)
    assert PlanIntervals.read(intervals.document()) == intervals


def test_a_little_that_was_never_validated_is_named_and_stays_as_predicted() -> None:
    found = spread([term("known", {T: 99.0}, error(0.1)), term("unknown", {T: 1.0})])
    low, high = ends(found.step.interval)
    assert (low - 1.0, high - 1.0) == lognormal(99.0, 0.1)
    assert dict(found.step.unknown) == {"toy.unknown": pytest.approx(0.01)}


def test_an_error_for_other_roles_does_not_validate_this_one() -> None:
    assert spread([term("work", {T: 9.0}, error(0.1, roles=("generation",)))]).step.interval is None


def test_a_calibrated_profile_speaks_for_whole_operators() -> None:
    hardware = attrs.evolve(toy_hardware(), errors=(error(0.2, roles=("training",)),))
    terms = [term("a", {T: 3.0}, error(0.01)), term("b", {T: 4.0})]
    assert ends(spread(terms, hardware=hardware).step.interval) == lognormal(7.0, 0.2)


def test_a_calibrated_profile_without_errors_is_not_vouched_for_by_other_machines() -> None:
    hardware = attrs.evolve(toy_hardware(), software=Software(backend="mine"))
    assert spread([term("a", {T: 3.0}, error(0.01))], hardware=hardware).step.interval is None


def test_a_machine_like_none_that_was_measured_has_no_interval() -> None:
    """The cores of a laptop are no GPU: what published runs of GPUs took says nothing of them."""
    hardware = attrs.evolve(toy_hardware(), errors=())
    assert spread([term("a", {T: 3.0}, error(0.01))], hardware=hardware).step.interval is None


def test_a_shared_error_cancels_out_of_a_ratio() -> None:
    both = [error(0.3, roles=("generation",)), error(0.1, roles=("training",))]
    slow = spread([term("work", {G: 8.0, T: 0.0}, *both)])
    fast = spread([term("work", {G: 4.0, T: 0.0}, *both)])
    assert ends(fast.ratio(slow)) == pytest.approx((2.0, 2.0))
    other = spread([term("work", {G: 0.0, T: 8.0}, *both)])
    low, high = ends(fast.ratio(other))
    assert (low, high) == pytest.approx(
        (2.0 * math.exp(-Z * math.hypot(0.3, 0.1)), 2.0 * math.exp(Z * math.hypot(0.3, 0.1))), rel=0.05
    )


def test_throughput_is_the_reciprocal() -> None:
    _, book, plan, prediction = drawn([term("work", {T: 10.0}, error(0.1))])
    found = plan_intervals(book, plan, prediction)
    tokens = toy_workload().tokens_per_step
    assert (found.tokens_per_s.low, found.tokens_per_s.high) == (tokens / found.step_s.high, tokens / found.step_s.low)


def test_coverage_by_simulation() -> None:
    """Steps drawn from the error model itself, by another generator: 90 % of them lie in the interval."""
    errors = [error(0.2, 0.1, roles=("generation",)), error(0.1, -0.1, roles=("training",))]
    step = spread([term("a", {G: 4.0, T: 5.0}, *errors), term("b", {T: 1.0}, error(0.5))]).step
    rng = np.random.default_rng(7)
    g, t, b = rng.standard_normal((3, 20_000))
    drawn = 4.0 * np.exp(0.1 + 0.2 * g) + 5.0 * np.exp(-0.1 + 0.1 * t) + np.exp(0.5 * b)
    inside = (step.interval.low <= drawn) & (drawn <= step.interval.high)
    assert inside.mean() == pytest.approx(0.9, abs=0.015)


def test_a_transfer_without_an_error_is_part_of_the_step_and_named() -> None:
    """Publishing 40,000 bytes of weights at 1000 bytes/s takes 40 s of 1000 s beside the operators."""
    terms = [term("work", {G: 400.0, T: 560.0}, error(0.1))]
    found, *_, prediction = drawn(terms, apart=True, steps=2, transfer=toy_transfer_term(bytes_per_s=1e3))
    moved = prediction.evaluation.makespan_s - 2 * 960.0
    assert moved > 0
    assert dict(found.step.unknown) == {"toy.transfer": pytest.approx(moved / prediction.evaluation.makespan_s)}
    low, high = ends(found.step.interval)
    assert (2 * low - moved, 2 * high - moved) == lognormal(1920.0, 0.1)
