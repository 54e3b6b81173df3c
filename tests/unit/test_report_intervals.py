"""How intervals and their gaps read."""

from __future__ import annotations

import pytest

from rpeg_core.accuracy.draws import Interval
from rpeg_core.accuracy.extrapolation import Extrapolation
from rpeg_core.accuracy.intervals import PlanIntervals
from rpeg_core.report import intervals, words


@pytest.mark.parametrize(
    ("value", "low", "high", "text"),
    [
        (3.99, 3.52, 4.58, "3.99 s (3.5-4.6)"),
        (0.633, 0.497, 0.94, "633 ms (490-940)"),
        (0.95, 0.9, 1.43, "950 ms (900-1,500)"),
        (4.64, 4.64, 11.4, "4.64 s (4.6-12)"),
        (2.0, 2.0, 2.0, "2.00 s (2.0-2.0)"),
        (356.0, 301.0, 1234.0, "356 s (300-1,300)"),
        (7.89e-6, 6e-6, 9.01e-6, "7.89 µs (6.0-9.1)"),
    ],
)
def test_a_time_and_its_interval_have_one_unit_and_round_outwards(value, low, high, text) -> None:
    assert words.seconds_within(value, low, high) == text


def test_throughput_and_ratios() -> None:
    assert intervals.tokens_per_s(84662.0, Interval(45999.0, 84662.0)) == "84,662 tok/s (45,000-85,000)"
    assert intervals.tokens_per_s(84662.0, None) == "84,662 tok/s"
    assert intervals.times(1.17, Interval(1.1, 1.256)) == "×1.17 (1.10-1.26)"
    assert intervals.times(1.17, None) == "×1.17"
    assert intervals.seconds(4.0, None) == "4.00 s"
    assert intervals.seconds(4.0, Interval(4.0, 4.0)) == "4.00 s"


def found(**changes) -> PlanIntervals:
    given = {
        "step_s": Interval(1.0, 2.0),
        "tokens_per_s": Interval(1.0, 2.0),
        "operator_s": {"a": Interval(1.0, 2.0), "b": Interval(1.0, 2.0)},
        "unknown": {},
        "extrapolations": (),
    }
    return PlanIntervals(**{**given, **changes})


EXPLAINED = "(a-b): 90% interval, from the errors of measured runs (docs/validation.md)"


def test_nothing_is_said_of_a_plan_that_does_not_say() -> None:
    assert intervals.remarks(None) == []
    assert intervals.remarks(found()) == [EXPLAINED]


def test_what_has_no_interval_says_which_term_was_never_validated() -> None:
    shares = {"mine.x": 0.2, "mine.y": 0.4, "mine.z": 0.1}
    some = found(operator_s={"a": Interval(1.0, 2.0), "b": None}, unknown={"b": shares, "step": {"mine.x": 0.02}})
    assert intervals.remarks(some) == [
        EXPLAINED,
        "no interval of b: term mine.y and term mine.x were never validated for it",
        "not in the interval of the step: mine.x, never validated, 2.0% of it",
    ]
    none = found(
        step_s=None, operator_s={"a": None, "b": None}, unknown={key: {"m.x": 1.0} for key in ("a", "b", "step")}
    )
    assert intervals.remarks(none) == ["no interval of the step, a and b: term m.x was never validated for it"]


def test_a_time_that_may_be_wrong_by_factors_is_called_so() -> None:
    wide = found(operator_s={"a": Interval(1.0, 6.5), "b": Interval(1.0, 5.5)})
    (remark,) = [line for line in intervals.remarks(wide) if "hardly known" in line]
    assert remark.startswith("the time of a is hardly known: ")


def test_extrapolation_is_said_once_for_roles_that_do_alike() -> None:
    def all_of(role: str) -> tuple[Extrapolation, ...]:
        return (
            Extrapolation(role=role, feature="hardware", value="gh200", measured=("a100-80gb", "h100")),
            Extrapolation(role=role, feature="gpus", value=2048.0, measured=(8.0, 1536.0)),
            Extrapolation(role=role, feature="parameters", value=4.05e11, measured=(76_112.0, 1.008e12)),
        )

    tensor = Extrapolation(role="generation", feature="tensor", value=16.0, measured=(8.0, 8.0))
    precise = Extrapolation(role="generation", feature="precision", value="fp8", measured=("bf16",))
    said = intervals.remarks(found(extrapolations=(precise, tensor, *all_of("inference"), *all_of("training"))))
    assert said[1:] == [
        "extrapolates: generation in fp8, measured in bf16; at tp 16, measured 8",
        "extrapolates: inference and training on gh200, measured on a100-80gb and h100; at 2,048 GPUs, measured 8 to "
        "1,536; at 405 B parameters, measured 76.1 k to 1.01 T",
    ]


def test_what_a_step_takes_beyond_its_operators_is_said() -> None:
    said = intervals.remarks(found(beyond_operators=((1.63, "6 published steps"),)))
    assert said[1:] == ["the interval of the step counts in that 6 published steps took ×1.63 of their operators' time"]
