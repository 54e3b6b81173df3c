"""What a plan says of how sure its prediction is; made with the prediction, kept beside it, no part of the digest."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import attrs

from rpeg_core.accuracy.draws import CONFIDENCE, Interval
from rpeg_core.accuracy.extrapolation import Extrapolation, extrapolations
from rpeg_core.accuracy.spread import Spread, Timed, spread_of
from rpeg_core.costing.book import CostBook
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.planning.assignment import ExecutionPlan

__all__ = ["PlanIntervals", "plan_intervals"]


@attrs.frozen(kw_only=True)
class PlanIntervals:
    """Intervals of a plan's predicted times; None where too much was never validated.

    Attributes:
        step_s, tokens_per_s: of a step and of the throughput.
        operator_s: by operator, in one step, all length phases together.
        unknown: operator, or ``step`` -> term -> share of its time, of the terms that were never validated.
        extrapolations: where the plan leaves what was measured.
        beyond_operators: (factor, source) of each error that scales the step as a whole: how much longer than its
            operators it takes in the median. It is in ``step_s``.
    """

    step_s: Interval | None
    tokens_per_s: Interval | None
    operator_s: Mapping[str, Interval | None]
    unknown: Mapping[str, Mapping[str, float]]
    extrapolations: tuple[Extrapolation, ...]
    beyond_operators: tuple[tuple[float, str], ...] = ()

    def document(self) -> dict[str, Any]:
        """For JSON; an interval is ``[low, high]``."""
        return {
            "confidence": CONFIDENCE,
            "step_s": _pair(self.step_s),
            "tokens_per_s": _pair(self.tokens_per_s),
            "operator_s": {name: _pair(interval) for name, interval in self.operator_s.items()},
            "beyond_operators": [{"factor": factor, "source": source} for factor, source in self.beyond_operators],
            "never_validated": {name: dict(shares) for name, shares in self.unknown.items()},
            "extrapolations": [
                {"role": each.role, "feature": each.feature, "value": each.value, "measured": list(each.measured)}
                for each in self.extrapolations
            ],
        }

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> PlanIntervals:
        """From :meth:`document`.

        Raises:
            KeyError, TypeError, ValueError: it is none.
        """
        return cls(
            step_s=_interval(document["step_s"]),
            tokens_per_s=_interval(document["tokens_per_s"]),
            operator_s={name: _interval(pair) for name, pair in document["operator_s"].items()},
            beyond_operators=tuple((each["factor"], each["source"]) for each in document["beyond_operators"]),
            unknown={name: dict(shares) for name, shares in document["never_validated"].items()},
            extrapolations=tuple(
                Extrapolation(
                    role=each["role"], feature=each["feature"], value=each["value"], measured=tuple(each["measured"])
                )
                for each in document["extrapolations"]
            ),
        )


def plan_intervals(
    book: CostBook, assignments: ExecutionPlan, prediction: Prediction, spread: Spread | None = None
) -> PlanIntervals:
    """Of a prediction that ``book`` gave for ``assignments``; ``spread`` is :func:`spread_of` it where it is known."""
    spread = spread_of(book, assignments, prediction) if spread is None else spread
    tokens = book.workload.tokens_per_step
    step = spread.step.interval
    times: dict[str, Timed] = {**spread.operators, "step": spread.step}
    return PlanIntervals(
        step_s=step,
        tokens_per_s=None if step is None else Interval(tokens / step.high, tokens / step.low),
        operator_s={name: timed.interval for name, timed in spread.operators.items()},
        beyond_operators=tuple((math.exp(error.log_bias), error.source) for error in spread.step_errors),
        unknown={name: timed.unknown for name, timed in times.items() if timed.unknown},
        extrapolations=extrapolations(
            (book.batches(name, book.row(assignment, name)), spread.errors[name])
            for name, assignment in assignments.items()
        ),
    )


def _pair(interval: Interval | None) -> list[float] | None:
    return None if interval is None else [interval.low, interval.high]


def _interval(pair: Any) -> Interval | None:
    return None if pair is None else Interval(float(pair[0]), float(pair[1]))
