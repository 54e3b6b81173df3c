"""How sure predicted times are, in words: ``3.99 s (3.5-4.6)``, why there is no interval, where a plan extrapolates."""

from __future__ import annotations

import itertools

from rpeg_core.accuracy.draws import CONFIDENCE, Interval
from rpeg_core.accuracy.extrapolation import Extrapolation
from rpeg_core.accuracy.intervals import PlanIntervals
from rpeg_core.report import words

__all__ = ["remarks", "seconds", "times", "tokens_per_s"]

_NAMES = {
    "gpus": "{} GPUs",
    "data": "dp {}",
    "pipeline": "pp {}",
    "tensor": "tp {}",
    "layers": "{} layers",
    "hidden": "hidden size {}",
    "parameters": "{} parameters",
    "sequence_tokens": "{} tokens per sequence",
    "microbatch_tokens": "{} tokens per microbatch",
    "replica_sequences": "{} sequences per replica",
}

WIDE = 6.0
"""Of an interval's ends: a time that is known no better is no base for a decision **[choice]**."""

_COUNTS = ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k"))


def seconds(value: float, interval: Interval | None) -> str:
    """``3.99 s (3.5-4.6)``; the time alone where it has no interval, or is stated and has no width."""
    if interval is None or interval.low == interval.high:
        return words.seconds(value)
    return words.seconds_within(value, interval.low, interval.high)


def tokens_per_s(value: float, interval: Interval | None) -> str:
    """``84,662 tok/s (46,000-85,000)``, or the throughput alone."""
    if interval is None:
        return words.tokens_per_s(value)
    return words.tokens_per_s_within(value, interval.low, interval.high)


def times(ratio: float, interval: Interval | None) -> str:
    """``×1.17 (1.12-1.20)``, or the ratio alone."""
    if interval is None:
        return words.times(ratio)
    return f"{words.times(ratio)} ({interval.low:.2f}-{interval.high:.2f})"


def remarks(intervals: PlanIntervals | None, *, explained: bool = True) -> list[str]:
    """What a reader must know, a sentence each; what intervals are is left out unless ``explained``."""
    if intervals is None:
        return []
    found, certain = [], words.percent(CONFIDENCE)
    if explained and (intervals.step_s is not None or any(intervals.operator_s.values())):
        found.append(f"(a-b): {certain} interval, from the errors of measured runs (docs/validation.md)")
    found += _without_interval(intervals)
    wide = [name for name, each in intervals.operator_s.items() if each is not None and each.high > WIDE * each.low]
    if wide:
        found.append(
            f"the time of {words.listing(wide)} is hardly known: where it was measured, the plan's own coefficients"
            " were wrong by factors; a framework named in space: has fitted ones"
        )
    small = {term: share for term, share in intervals.unknown.get("step", {}).items() if share > 0.0005}
    if intervals.step_s is not None and small:
        part = words.percent(sum(small.values()))
        found.append(f"not in the interval of the step: {words.listing(sorted(small))}, never validated, {part} of it")
    if intervals.step_s is not None:
        found += [
            f"the interval of the step counts in that {source} took {words.times(factor)} of their operators' time"
            for factor, source in intervals.beyond_operators
        ]
    return [*found, *_extrapolations(intervals)]


def _extrapolations(intervals: PlanIntervals) -> list[str]:
    """``extrapolates: inference and training on gh200, measured on h100``: a sentence for roles that do alike."""
    alike: dict[str, list[str]] = {}
    for role, group in itertools.groupby(intervals.extrapolations, key=lambda each: each.role):
        alike.setdefault("; ".join(map(_phrase, group)), []).append(role)
    return [f"extrapolates: {words.listing(roles)} {what}" for what, roles in alike.items()]


def _without_interval(intervals: PlanIntervals) -> list[str]:
    """``no interval of actor_generation: term analytical.pipeline_bubble was never validated for it``."""
    bare = {"the step": intervals.step_s, **intervals.operator_s}
    reasons: dict[str, list[str]] = {}
    for name, interval in bare.items():
        shares = intervals.unknown.get("step" if name == "the step" else name, {})
        if interval is None and shares:
            worst = sorted(shares, key=lambda term: (-shares[term], term))[:2]
            reasons.setdefault(words.listing([f"term {term}" for term in worst]), []).append(name)
    return [
        f"no interval of {words.listing(names)}: {terms} {'were' if ' and ' in terms else 'was'} never validated for it"
        for terms, names in reasons.items()
    ]


def _phrase(each: Extrapolation) -> str:
    if isinstance(each.value, str):
        before = {"hardware": "on"}.get(each.feature, "in")
        return f"{before} {each.value}, measured {before} {words.listing([str(name) for name in each.measured])}"
    low, high = (_number(each.feature, float(end)) for end in each.measured)
    value = _NAMES.get(each.feature, f"{each.feature} {{}}").format(_number(each.feature, float(each.value)))
    return f"at {value}, measured {low if low == high else f'{low} to {high}'}"


def _number(feature: str, value: float) -> str:
    if feature == "parameters":
        unit, name = next(((u, n) for u, n in _COUNTS if value >= u), (1.0, ""))
        return f"{value / unit:.3g} {name}".rstrip()
    return words.count(round(value)) if value >= 1 else f"{value:.2g}"
