"""Re-derive how wrong the cost terms are where runs were measured, and say whether the intervals made of it hold.

    python benchmarks/derive_errors.py [--data benchmarks/measured] [--write] [--check]

A *population* is the rows whose errors are alike: training or generation; models with or without experts; priced with
the coefficients of the plan's own 3D subset or with those of the framework that ran. The first are what a plan predicts
with, are fitted to no run, and are measured on 16-bit rows, the only ones that a plan can express, each as it was
executed (recomputation, interleaving, sharding of the row) but with no framework named. The second are fitted, so that
each row is predicted by coefficients that were fitted without its source (five folds, ``derive_frameworks.py``).

Model: the error of a row is ``r = log(measured / predicted) = sum_t s_t e_t`` with s_t the share of term t and
``e_t ~ N(bias_t, std_t^2)``. Biases and deviations by expectation maximization; each term is held to the errors of all
rows together by the weight of one source. A source counts once, however many rows it has. Then all deviations of a
population are multiplied by the factor that makes 90 % of the held-out rows (one source left out at a time) lie within
1.645 of them. What the 90 % intervals hold in the end is printed, by the code that plans use.

Whole steps: what a published step takes beyond its operators, once for models with and without experts, has a mean
and the deviation that the operators' errors do not explain.
"""

from __future__ import annotations

import argparse
import collections
import pprint
import sys
from collections.abc import Sequence
from pathlib import Path

import attrs
import derive_frameworks as frameworks
import numpy as np
from rpeg_plugin_analytical import measured_errors as shipped_errors

from rpeg_core.accuracy.draws import Interval, standard_normal
from rpeg_core.accuracy.features import FEATURES, features
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Precision
from rpeg_core.validation.cases import Case, Part

VALUES = Path(shipped_errors.__file__)
TERMS = tuple(term.name.removeprefix("analytical.") for term in frameworks.TERMS)
PRIOR_SOURCES = 1.0
ROUNDS = 400
WITHIN = 1.645
CONFIDENCE = 0.9
LEAST_SHARE, LEAST_ROWS = 0.01, 3
"""A term is validated in a population where it takes that share of so many rows **[choice]**."""

CHECKED = 0.02
OWN, NAMED = "own", "named"
RANGE_DIGITS = 6


@attrs.frozen(eq=False)
class Rows:
    """Rows of one population: log errors, shares of terms (rows, terms), sources, features."""

    cases: tuple[Case, ...]
    log_errors: np.ndarray
    shares: np.ndarray

    @property
    def sources(self) -> list[str]:
        return [case.source for case in self.cases]

    @property
    def weights(self) -> np.ndarray:
        """One for each source."""
        counts = collections.Counter(self.sources)
        return np.array([1.0 / counts[source] for source in self.sources])

    def take(self, kept: np.ndarray) -> Rows:
        chosen = np.flatnonzero(kept)
        return Rows(tuple(self.cases[i] for i in chosen), self.log_errors[chosen], self.shares[chosen])


@attrs.frozen(eq=False)
class Fit:
    """Errors by term; ``factor`` is already in ``std``."""

    bias: np.ndarray
    std: np.ndarray
    factor: float = 1.0

    def mean(self, shares: np.ndarray) -> np.ndarray:
        return shares @ self.bias

    def deviation(self, shares: np.ndarray) -> np.ndarray:
        return np.sqrt(shares**2 @ self.std**2)


def fitted(rows: Rows) -> Fit:
    """Maximum a posteriori by expectation maximization: e_t of every row is what is not observed."""
    r, s, w = rows.log_errors, rows.shares, rows.weights
    center = np.average(r, weights=w)
    bias0 = np.full(s.shape[1], center)
    variance0 = np.full(s.shape[1], np.average((r - center) ** 2, weights=w) / np.average((s**2).sum(1), weights=w))
    bias, variance = bias0.copy(), variance0.copy()
    for _ in range(ROUNDS):
        total = s**2 @ variance
        expected = bias + s * variance * ((r - s @ bias) / total)[:, None]
        left = variance - (s * variance) ** 2 / total[:, None]
        bias = (PRIOR_SOURCES * bias0 + w @ expected) / (PRIOR_SOURCES + w.sum())
        variance = (PRIOR_SOURCES * variance0 + w @ (left + (expected - bias) ** 2)) / (PRIOR_SOURCES + w.sum())
    return Fit(bias, np.sqrt(variance))


def held_out(rows: Rows, scale: float = 1.0) -> tuple[np.ndarray, np.ndarray]:
    """Mean and deviation of every row's error by a fit without its source."""
    mean, deviation = np.zeros(len(rows.cases)), np.zeros(len(rows.cases))
    for source in sorted(set(rows.sources)):
        outside = np.array([other == source for other in rows.sources])
        fit = fitted(rows.take(~outside))
        mean[outside] = fit.mean(rows.shares[outside])
        deviation[outside] = scale * fit.deviation(rows.shares[outside])
    return mean, deviation


def calibrated(rows: Rows) -> Fit:
    """The fit of all rows, its deviations scaled so that 90 % of held-out rows are within 1.645 of them."""
    mean, deviation = held_out(rows)
    off = np.abs(rows.log_errors - mean) / deviation
    factor = max(1.0, _quantile(off, rows.weights, CONFIDENCE) / WITHIN)
    fit = fitted(rows)
    return Fit(fit.bias, factor * fit.std, factor)


def _quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, share - 1e-12)])


def inside(rows: Rows, factor: float) -> np.ndarray:
    """Whether the interval that a plan would print holds each row, by errors of the other sources."""
    found = np.zeros(len(rows.cases), bool)
    names = [standard_normal(name) for name in TERMS]
    for source in sorted(set(rows.sources)):
        outside = np.array([other == source for other in rows.sources])
        fit = fitted(rows.take(~outside))
        for i in np.flatnonzero(outside):
            draws = sum(
                share * np.exp(bias + factor * std * z)
                for share, bias, std, z in zip(rows.shares[i], fit.bias, fit.std, names, strict=True)
            )
            found[i] = Interval.of(draws, 1.0).holds(float(np.exp(rows.log_errors[i])))
    return found


# Populations


def as_planned(case: Case) -> Case:
    """The case with no framework named."""

    def unnamed(part: Part) -> Part:
        return Part(attrs.evolve(part.batch, execution=attrs.evolve(part.batch.execution, framework="")), part.times)

    setup = attrs.evolve(case.setup, execution=attrs.evolve(case.setup.execution, framework=""))
    return attrs.evolve(case, setup=setup, parts=tuple(unnamed(part) for part in case.parts))


def populations(cases: Sequence[Case], out_of_fold: np.ndarray) -> dict[tuple[str, str, bool | None], Rows]:
    """(own or named, role, with experts) -> rows; ``out_of_fold`` are the seconds of the folds."""
    own = frameworks.seconds([as_planned(case) for case in cases])
    named = frameworks.seconds(cases)
    measured = np.array([case.measured for case in cases])
    found = {}
    for coefficients, terms, predicted in ((OWN, own, own.sum(axis=1)), (NAMED, named, out_of_fold)):
        for role, experts in (("training", False), ("training", True), ("generation", False)):
            kept = np.array(
                [
                    case.kind.startswith(role)
                    and (experts == (case.setup.model.moe is not None))
                    and (coefficients == NAMED or case.setup.execution.precision is Precision.BF16)
                    for case in cases
                ]
            )
            rows = Rows(tuple(cases), np.log(measured / predicted), terms / terms.sum(axis=1)[:, None]).take(kept)
            found[coefficients, role, experts] = rows
    return found


def steps_of(cases: Sequence[Case], fits: dict[tuple[str, str, bool | None], Fit], coefficients: str, experts: bool):
    """What steps take beyond their operators: log errors left over, and the operators' own deviation, by case."""
    left, deviation, kept = [], [], []
    for case in cases:
        if (case.setup.model.moe is not None) != experts:
            continue
        priced = as_planned(case) if coefficients == OWN else case
        parts = []
        for batch, times in priced.batches():
            role = "generation" if batch.role is Role.GENERATION else "training"
            # Generation of mixtures has hardly any rows: that of dense models stands for it here.
            fit = fits[coefficients, role, experts and role == "training"]
            parts.append((fit, role, np.array([times * float(t.function(batch)[0]) for t in frameworks.TERMS])))
        if case.apart:
            parts = max(parts[:1], parts[1:], key=lambda group: sum(terms.sum() for _, _, terms in group))
        total = sum(terms.sum() for _, _, terms in parts)
        by_role = {role: sum(terms for _, r, terms in parts if r == role) for _, role, _ in parts}
        fit_of = {role: fit for fit, role, _ in parts}
        mean = sum(float(fit_of[role].mean(terms / total)) for role, terms in by_role.items())
        variance = sum(float(fit_of[role].deviation(terms / total)) ** 2 for role, terms in by_role.items())
        left.append(np.log(case.measured / total) - mean)
        deviation.append(np.sqrt(variance))
        kept.append(case)
    return kept, np.array(left), np.array(deviation)


def step_error(left: np.ndarray, deviation: np.ndarray) -> tuple[float, float]:
    """Mean, and the deviation that the operators do not explain; of the next step, so with that of the mean."""
    count = len(left)
    variance = float(np.var(left, ddof=1)) * (1.0 + 1.0 / count)
    return float(np.mean(left)), float(np.sqrt(max(0.0, variance - float(np.mean(deviation**2)))))


def ranges(rows: Rows) -> dict[str, tuple[float, float]]:
    """The least and the largest value of each feature."""
    values = [features(case.batches()[0][0]) for case in rows.cases]
    names = [name for name in FEATURES if any(name in each for each in values)]
    return {
        name: (min(each[name] for each in values if name in each), max(each[name] for each in values if name in each))
        for name in names
    }


def hardware(rows: Rows) -> tuple[str, ...]:
    return tuple(sorted({case.setup.hardware.name for case in rows.cases}))


# The derivation


@attrs.frozen(eq=False)
class Derived:
    """Everything that is shipped, as plain values, the share of held-out rows inside, and the lines to print."""

    populations: dict[str, dict]
    steps: dict[str, dict]
    coverage: dict[str, float]
    lines: tuple[str, ...]


def derive(data: Path) -> Derived:
    """From the tables."""
    profiles = frameworks._profiles()
    cases = [
        *frameworks.training_cases(data / "training.csv", profiles).cases,
        *frameworks.generation_cases(data / "generation.csv", profiles).cases,
    ]
    model = frameworks.linearized(frameworks.shipped(profiles), cases, frameworks.PARAMETERS)
    groups = populations(cases, frameworks.cross_validated(cases, model))
    fits, found, coverage, lines = {}, {}, {}, []
    for (coefficients, role, experts), rows in groups.items():
        fit = fits[coefficients, role, experts] = calibrated(rows)
        held = inside(rows, fit.factor)
        name = f"{coefficients} {role}{' of mixtures' if experts else ''}"
        coverage[name] = float(held.mean())
        counts = (rows.shares >= LEAST_SHARE).sum(axis=0)
        found[name] = {
            "rows": len(rows.cases),
            "sources": len(set(rows.sources)),
            "terms": {
                term: (_rounded(bias), _rounded(std), int(count))
                for term, bias, std, count in zip(TERMS, fit.bias, fit.std, counts, strict=True)
                if count >= LEAST_ROWS
            },
            "ranges": {feature: tuple(_shown(v) for v in pair) for feature, pair in ranges(rows).items()},
            "hardware": hardware(rows),
            "precisions": tuple(sorted({case.setup.execution.precision.value for case in rows.cases})),
        }
        lines.append(
            f"{name:28} {len(rows.cases):4} rows {len(set(rows.sources)):3} sources, factor {fit.factor:.2f}, "
            f"held out inside: {held.mean():.0%} of rows, {np.average(held, weights=rows.weights):.0%} by source"
        )
        lines += [
            f"    {term:20} bias {bias:+.3f}  std {std:.3f}  {rows_} rows"
            for term, (bias, std, rows_) in found[name]["terms"].items()
        ]
    steps = {}
    whole = frameworks.rl_cases(data / "rl_step.csv", profiles).cases
    for coefficients, experts in ((OWN, False), (NAMED, False), (NAMED, True)):
        kept, left, deviation = steps_of(whole, fits, coefficients, experts)
        bias, std = step_error(left, deviation)
        name = f"{coefficients} steps{' of mixtures' if experts else ''}"
        steps[name] = {"rows": len(kept), "bias": _rounded(bias), "std": _rounded(std)}
        held = _steps_inside(kept, left, deviation)
        lines.append(
            f"{name:28} {len(kept):4} rows, bias {bias:+.3f}  std {std:.3f}, held out inside: {held.mean():.0%} of rows"
        )
    return Derived(found, steps, coverage, tuple(lines))


def _steps_inside(cases: Sequence[Case], left: np.ndarray, deviation: np.ndarray) -> np.ndarray:
    """One source left out at a time, in logarithms."""
    held = np.zeros(len(cases), bool)
    for source in sorted({case.source for case in cases}):
        outside = np.array([case.source == source for case in cases])
        bias, std = step_error(left[~outside], deviation[~outside])
        held[outside] = np.abs(left[outside] - bias) <= WITHIN * np.sqrt(std**2 + deviation[outside] ** 2)
    return held


def _rounded(value: float) -> float:
    return float(f"{value:.3f}")


def _shown(value: float) -> float:
    return float(f"{value:.{RANGE_DIGITS}g}")


def render(derived: Derived) -> str:
    """The text of the module with the numbers."""
    populations_text = pprint.pformat(derived.populations, width=116, sort_dicts=False).replace("'", '"')
    steps_text = pprint.pformat(derived.steps, width=116, sort_dicts=False).replace("'", '"')
    return (
        '"""Numbers that ``benchmarks/derive_errors.py --write`` found; its ``--check`` keeps them.\n\n'
        "``terms``: bias and standard deviation of log(measured / predicted), and the rows in which the term takes a\n"
        'share. ``own``: the plan\'s own subset; ``named``: executions that name a framework.\n"""\n'
        "\n# fmt: off\nfrom __future__ import annotations\n\nfrom typing import Any\n\n"
        f"POPULATIONS: dict[str, dict[str, Any]] = {populations_text}\n\n"
        f"STEPS: dict[str, dict[str, Any]] = {steps_text}\n"
    )


def differences(derived: Derived) -> list[str]:
    """Where the shipped numbers are others."""
    found = []
    for name, now in derived.populations.items():
        was = shipped_errors.POPULATIONS.get(name, {})
        for key in ("rows", "sources", "hardware", "precisions", "ranges"):
            if was.get(key) != now[key]:
                found.append(f"{name}: {key} is {was.get(key)}, derived {now[key]}")
        terms = was.get("terms", {})
        if set(terms) != set(now["terms"]):
            found.append(f"{name}: terms are {sorted(terms)}, derived {sorted(now['terms'])}")
            continue
        for term, (bias, std, _) in now["terms"].items():
            if max(abs(terms[term][0] - bias), abs(terms[term][1] - std)) > CHECKED:
                found.append(f"{name}: {term} is {terms[term]}, derived {now['terms'][term]}")
    for name, now in derived.steps.items():
        was = shipped_errors.STEPS.get(name)
        if was is None or was["rows"] != now["rows"] or any(abs(was[k] - now[k]) > CHECKED for k in ("bias", "std")):
            found.append(f"{name} is {was}, derived {now}")
    return found


def main(arguments: list[str] | None = None) -> int:
    """Print the derivation, write it or check it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=frameworks.REPOSITORY / "benchmarks" / "measured")
    parser.add_argument("--write", action="store_true", help="write the numbers into the cost plugin")
    parser.add_argument("--check", action="store_true", help="exit 1 when a shipped number differs")
    options = parser.parse_args(arguments)
    derived = derive(options.data)
    if options.check:
        wrong = differences(derived)
        print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
        return 1 if wrong else 0
    print("\n".join(derived.lines))
    if options.write:
        VALUES.write_text(render(derived), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
