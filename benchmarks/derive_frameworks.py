"""Re-derive what is fitted to measured runs: framework coefficients and the sustained speed of GPUs.

    python benchmarks/derive_frameworks.py [--data benchmarks/measured] [--write] [--check] [--folds] [--ablation]

Method: the model is nearly linear in every parameter of :data:`PARAMETERS` (a speed enters as its inverse), so that
each round prices every run once per parameter name (a run has one framework and one GPU) and then minimizes

    sum w_i rho(log(T_i(y) / t_i)) + PRIOR_WEIGHT sum ((y_j - prior_j) / (upper_j - lower_j))^2

over the linear model by iteratively reweighted least squares within the bounds; rho is the soft-L1 loss. The last two
of four rounds go half the way. Rows of
grade A count fully, others and mixtures less. ``NEMO_RL_LOOP_SHARE`` is the geometric mean of measured over predicted
of the grade A steps, less 1. ``EAGER_MEMORY`` is the point of a grid with the smallest mean error of the peaks.

``--check`` derives everything again and exits 1 when a shipped number differs. ``--folds`` fits five times
without a fifth of the sources. ``--ablation`` leaves one term out at a time and fits the others again.
"""

from __future__ import annotations

import argparse
import contextlib
import itertools
import json
import pprint
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path

import attrs
import numpy as np
from rpeg_plugin_analytical import fitted as shipped_values
from rpeg_plugin_analytical import frameworks as framework_table
from rpeg_plugin_analytical import rpeg_cost_terms

from rpeg_core.records import Target
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.validation.cases import Case, memory_cases, training_cases
from rpeg_core.validation.generation import generation_cases
from rpeg_core.validation.rl import rl_cases

REPOSITORY = Path(__file__).resolve().parents[1]
VALUES = Path(shipped_values.__file__)
PRIOR_WEIGHT = 0.02
LOSS_SCALE = 0.05
ROUNDS = 4
STEP = 0.02
CHECKED = 2e-3  # of a parameter's range: rounding of the shipped numbers


@attrs.frozen
class Parameter:
    """One number shared by ``owners``: frameworks, or GPUs when ``of`` is ``device``.

    ``inverse`` parameters are speeds: times are linear in 1/x.
    """

    of: str
    owners: tuple[str, ...]
    field: str
    prior: float
    lower: float
    upper: float
    inverse: bool = False

    def concerns(self, case: Case) -> bool:
        """Whether a case's time depends on it."""
        owner = case.setup.execution.framework if self.of == "framework" else case.setup.hardware.name
        return owner in self.owners

    def inner(self, value: float) -> float:
        """The quantity that times are linear in."""
        return 1.0 / value if self.inverse else value

    @property
    def name(self) -> str:
        return f"{','.join(self.owners)} {self.field}"


def _framework(owners: str, field: str, prior: float, lower: float, upper: float, inverse: bool = False) -> Parameter:
    return Parameter("framework", tuple(owners.split()), field, prior, lower, upper, inverse)


def _device(owners: str, field: str, prior: float, lower: float, upper: float, inverse: bool = False) -> Parameter:
    return Parameter("device", tuple(owners.split()), field, prior, lower, upper, inverse)


MEGATRON = "nemo nemo-2024 megatron-core megatron-bridge megatron-bridge-26.06"
EARLY = "megatron-2021 megatron-2022"
AMPERE, HOPPER, BLACKWELL = "a100-40gb a100-80gb", "gh200 h100 h200", "b200 b300 gb200 gb300"

PARAMETERS: tuple[Parameter, ...] = (
    _device(AMPERE, "sustained_share", 0.95, 0.6, 1.05, True),
    _device(HOPPER, "sustained_share", 0.85, 0.6, 1.05, True),
    _device(BLACKWELL, "sustained_share", 0.80, 0.5, 1.05, True),
    _device("h100-hbm2e", "sustained_share", 0.70, 0.4, 1.05, True),
    _device(f"{AMPERE} {HOPPER} {BLACKWELL} h100-hbm2e", "clock_spread", 0.012, 0.0, 0.02),
    _device(f"{HOPPER} h100-hbm2e", "fp8_speedup", 1.6, 1.4, 2.0, True),
    _device(BLACKWELL, "fp8_speedup", 1.8, 1.4, 2.0, True),
    _device(BLACKWELL, "fp4_speedup", 3.5, 2.0, 6.0, True),
    _framework(MEGATRON, "pointwise_passes", 1.2, 0.8, 4.0),
    _framework(MEGATRON.replace("nemo-2024 ", ""), "attention_share", 0.9, 0.4, 1.3, True),
    _framework("nemo-2024", "attention_share", 0.55, 0.3, 1.3, True),
    _framework(MEGATRON, "tensor_exposed", 0.5, 0.0, 1.3),
    _framework(MEGATRON, "context_exposed", 0.5, 0.0, 1.5),
    _framework(MEGATRON, "data_exposed", 0.1, 0.0, 0.99),
    _framework(MEGATRON, "pipeline_exposed", 0.5, 0.0, 1.5),
    _framework(MEGATRON, "cast_passes", 1.0, 0.3, 5.0),
    _framework("nemo nemo-2024", "step_s", 0.05, 0.0, 0.2),
    _framework("megatron-core", "step_s", 0.05, 0.0, 0.2),
    _framework("megatron-bridge megatron-bridge-26.06", "step_s", 0.05, 0.0, 0.2),
    _framework(MEGATRON.replace(" megatron-bridge-26.06", ""), "launch_expert_layer_s", 8e-3, 0.0, 1.5e-2),
    _framework("megatron-bridge-26.06", "launch_expert_layer_s", 8e-3, 0.0, 1.5e-2),
    _framework(MEGATRON, "expert_exposed", 0.8, 0.3, 2.0),
    _framework("nemo nemo-2024 megatron-core megatron-bridge", "expert_passes", 6.0, 2.0, 30.0),
    _framework("megatron-bridge-26.06", "expert_passes", 4.0, 2.0, 30.0),
    _framework("nemo nemo-2024 megatron-core megatron-bridge", "expert_gemm_share", 0.8, 0.4, 1.0, True),
    _framework("megatron-bridge-26.06", "expert_gemm_share", 0.9, 0.4, 1.0, True),
    _framework(EARLY, "pointwise_passes", 1.2, 0.8, 4.0),
    _framework(EARLY, "tensor_exposed", 1.0, 0.5, 1.6),
    _framework(EARLY, "pipeline_exposed", 1.0, 0.5, 1.5),
    _framework("prime-rl", "pointwise_passes", 8.0, 0.8, 20.0),
    _framework("prime-rl", "attention_share", 0.9, 0.1, 1.3, True),
    _framework("prime-rl", "step_s", 0.05, 0.0, 1.0),
    _framework("prime-rl-fa2", "pointwise_passes", 8.0, 0.8, 30.0),
    _framework("prime-rl-fa2", "attention_share", 0.5, 0.1, 1.3, True),
    _framework("prime-rl-fa2", "launch_expert_layer_s", 0.15, 0.0, 0.4),
    _framework("torchtitan", "pointwise_passes", 2.0, 0.8, 8.0),
    _framework("torchtitan", "data_exposed", 0.5, 0.0, 0.99),
    _framework("torchtitan", "tensor_exposed", 1.0, 0.0, 1.5),
    _framework("torchtitan", "context_exposed", 1.0, 0.0, 1.5),
    _framework("torchtitan", "attention_share", 0.55, 0.25, 1.3, True),
    _framework("torchtitan", "cast_passes", 1.0, 0.3, 5.0),
    _framework("maxtext", "pointwise_passes", 1.2, 0.8, 4.0),
    _framework("maxtext", "data_exposed", 0.1, 0.0, 0.99),
    _framework("maxtext", "cast_passes", 1.0, 0.3, 5.0),
    *(
        parameter
        for engine in ("trtllm", "trtllm-2023 trtllm-2024", "vllm", "sglang", "lmdeploy")
        for parameter in (
            _framework(engine, "decode_step_s", 1e-3, 0.0, 6e-3),
            _framework(engine, "decode_sequence_s", 1e-5, 0.0, 6e-5),
            _framework(engine, "decode_layer_s", 2e-5, 0.0, 1e-4),
            *([] if engine == "lmdeploy" else [_framework(engine, "decode_reduce_s", 8e-6, 2e-6, 3e-5)]),
            _framework(engine, "stream_share", 0.85, 0.5, 1.1, True),
            _framework(engine, "prefill_share", 0.75, 0.4, 1.1, True),
        )
    ),
    _framework("trtllm-2023", "grouped_reads", 0.5, 0.0, 1.0),
    _framework("nanotron", "pointwise_passes", 4.0, 0.8, 20.0),
)

TERMS = tuple(t for t in rpeg_cost_terms() if t.name.startswith("analytical.") and t.target is Target.OPERATOR)


def weight(case: Case) -> float:
    """How much a case counts in the fit."""
    if case.kind == "training-moe":
        return 0.4
    return 1.0 if case.grade == "A" else 0.15


def seconds(cases: Sequence[Case]) -> np.ndarray:
    """Predicted seconds, one row per case and one column per term, by the same terms as the planner's."""
    found = np.zeros((len(cases), len(TERMS)))
    for i, case in enumerate(cases):
        for batch, times in case.batches():
            found[i] += [times * float(term.function(batch)[0]) for term in TERMS]
    return found


def applied(values: np.ndarray, cases: Iterable[Case], parameters: Sequence[Parameter]) -> list[Case]:
    """The cases under parameter values; framework values are set in the table, on nothing but its facts."""
    table = {**framework_table.FRAMEWORKS, **framework_table.FACTS}
    devices: dict[str, dict[str, float]] = {}
    for parameter, value in zip(parameters, values, strict=True):
        for owner in parameter.owners:
            if parameter.of == "framework":
                table[owner] = attrs.evolve(table[owner], **{parameter.field: float(value)})
            else:
                devices.setdefault(owner, {})[parameter.field] = float(value)
    framework_table.FRAMEWORKS.update(table)
    return [_with_device(case, devices) for case in cases]


def _with_device(case: Case, devices: dict[str, dict[str, float]]) -> Case:
    hardware: HardwareProfile = case.setup.hardware
    changes = devices.get(hardware.name)
    if not changes:
        return case
    changed = attrs.evolve(hardware, device=attrs.evolve(hardware.device, **changes))
    return attrs.evolve(case, setup=attrs.evolve(case.setup, hardware=changed))


@attrs.frozen(eq=False)
class Linear:
    """``T(y) = sum over terms (base + slopes (y - at))`` in the inner quantities y.

    Attributes:
        base: seconds by case and term.
        slopes: by case, parameter and term.
        at: where the slopes were taken.
    """

    base: np.ndarray
    slopes: np.ndarray
    at: np.ndarray

    def of(self, rows: np.ndarray, terms: Sequence[int] | None = None) -> Total:
        """The sum over some terms, of some cases."""
        kept = list(range(self.base.shape[1])) if terms is None else list(terms)
        base, slopes = self.base[rows][:, kept].sum(axis=1), self.slopes[rows][:, :, kept].sum(axis=2)
        return Total(base, slopes, self.at)


@attrs.frozen(eq=False)
class Total:
    """:class:`Linear` summed over terms."""

    base: np.ndarray
    slopes: np.ndarray
    at: np.ndarray

    def times(self, y: np.ndarray) -> np.ndarray:
        """Predicted seconds, at least a tenth of the base."""
        return np.maximum(self.base + self.slopes @ (y - self.at), 0.1 * self.base)

    def predicted(self, values: np.ndarray, parameters: Sequence[Parameter]) -> np.ndarray:
        """Predicted seconds at parameter values."""
        return self.times(np.array([p.inner(v) for p, v in zip(parameters, values, strict=True)]))


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Whatever happens to the table of frameworks inside is undone."""
    before = dict(framework_table.FRAMEWORKS)
    try:
        yield
    finally:
        framework_table.FRAMEWORKS.clear()
        framework_table.FRAMEWORKS.update(before)


@restored()
def linearized(values: np.ndarray, cases: Sequence[Case], parameters: Sequence[Parameter]) -> Linear:
    """One pricing per parameter name: a case has one framework and one GPU."""
    base = seconds(applied(values, cases, parameters))
    slopes = np.zeros((len(cases), len(parameters), len(TERMS)))
    at = np.array([p.inner(v) for p, v in zip(parameters, values, strict=True)])
    for field in sorted({(p.of, p.field) for p in parameters}):
        moved, rows = values.copy(), set()
        for j, p in enumerate(parameters):
            if (p.of, p.field) == field:
                step = STEP * (p.upper - p.lower)
                moved[j] = values[j] + step if values[j] + step <= p.upper else values[j] - step
                rows |= {i for i, case in enumerate(cases) if p.concerns(case)}
        chosen = sorted(rows)
        if not chosen:
            continue
        new = seconds(applied(moved, [cases[i] for i in chosen], parameters))
        for j, p in enumerate(parameters):
            if (p.of, p.field) == field:
                change = p.inner(moved[j]) - at[j]
                for i, row in zip(chosen, new, strict=True):
                    if p.concerns(cases[i]):
                        slopes[i, j] = (row - base[i]) / change
    return Linear(base, slopes, at)


def minimized(model: Total, measured: np.ndarray, weights: np.ndarray, parameters: Sequence[Parameter]) -> np.ndarray:
    """The parameter values that fit the linear model best, within their bounds."""
    ends = np.array([sorted((p.inner(p.lower), p.inner(p.upper))) for p in parameters])
    low, width = ends[:, 0], ends[:, 1] - ends[:, 0]
    prior = (np.array([p.inner(p.prior) for p in parameters]) - low) / width
    z = np.clip((model.at - low) / width, 0.0, 1.0)
    for _ in range(100):
        times = model.times(low + width * z)
        r = np.log(times / measured)
        w = np.sqrt(weights) * (1.0 + (r / LOSS_SCALE) ** 2) ** -0.25
        jacobian = model.slopes * width / times[:, None] * w[:, None]
        normal = jacobian.T @ jacobian + PRIOR_WEIGHT * np.eye(len(z))
        right = -jacobian.T @ (r * w) - PRIOR_WEIGHT * (z - prior)
        free = np.ones(len(z), bool)
        step = np.zeros(len(z))
        for _ in range(len(z)):
            step[:] = 0.0
            step[free] = np.linalg.solve(normal[np.ix_(free, free)], right[free])
            out = free & ((z <= 0.0) & (step < 0.0) | (z >= 1.0) & (step > 0.0))
            if not out.any():
                break
            free &= ~out
        new = np.clip(z + 0.7 * np.clip(step, -0.3, 0.3), 0.0, 1.0)
        moved, z = np.abs(new - z).max(), new
        if moved < 1e-6:
            break
    y = low + width * z
    return np.array([1.0 / v if p.inverse else v for p, v in zip(parameters, y, strict=True)])


def fitted(
    cases: Sequence[Case],
    start: np.ndarray,
    rounds: int = ROUNDS,
    parameters: Sequence[Parameter] = PARAMETERS,
    report: Callable[[str], None] | None = None,
) -> tuple[np.ndarray, Linear]:
    """Values after ``rounds`` rounds, and the model of the last round."""
    measured, weights = _arrays(cases)
    everything = np.arange(len(cases))
    values, model = start, None
    for index in range(rounds):
        model = linearized(values, cases, parameters)
        total = model.of(everything)
        found = minimized(total, measured, weights, parameters)
        values = found if index < 2 else _between(values, found, parameters)
        if report is not None:
            wrong = np.mean(np.abs(total.predicted(values, parameters) / measured - 1))
            report(f"round {index + 1}: mean absolute error of the linear model {wrong:.2%}")
    assert model is not None
    return values, model


def _between(old: np.ndarray, new: np.ndarray, parameters: Sequence[Parameter]) -> np.ndarray:
    """Half the way in the inner quantities: later rounds settle where a maximum of two times makes the model bend."""
    halves = [(p.inner(a) + p.inner(b)) / 2 for p, a, b in zip(parameters, old, new, strict=True)]
    return np.array([1.0 / y if p.inverse else y for p, y in zip(parameters, halves, strict=True)])


def _arrays(cases: Sequence[Case]) -> tuple[np.ndarray, np.ndarray]:
    return np.array([case.measured for case in cases]), np.array([weight(case) for case in cases])


def folds(sources: Sequence[str], count: int = 5) -> np.ndarray:
    """Fold of each row: sources sorted by size, then dealt out so that folds have about equally many rows."""
    sizes = {source: list(sources).count(source) for source in sources}
    load, fold = np.zeros(count), {}
    for source in sorted(sizes, key=lambda s: (-sizes[s], s)):
        fold[source] = int(np.argmin(load))
        load[fold[source]] += sizes[source]
    return np.array([fold[source] for source in sources])


def cross_validated(cases: Sequence[Case], model: Linear, parameters: Sequence[Parameter] = PARAMETERS) -> np.ndarray:
    """Predicted seconds of every case by parameters fitted to the sources of the other folds."""
    measured, weights = _arrays(cases)
    fold = folds([case.source for case in cases])
    predicted = np.zeros(len(cases))
    for index in range(fold.max() + 1):
        inside, outside = np.flatnonzero(fold != index), np.flatnonzero(fold == index)
        values = minimized(model.of(inside), measured[inside], weights[inside], parameters)
        predicted[outside] = model.of(outside).predicted(values, parameters)
    return predicted


def ablation(
    cases: Sequence[Case], model: Linear, parameters: Sequence[Parameter] = PARAMETERS
) -> dict[str, np.ndarray]:
    """Predicted seconds without each term, everything else fitted again."""
    measured, weights = _arrays(cases)
    everything = np.arange(len(cases))
    found = {}
    for left_out, term in enumerate(TERMS):
        if not model.base[:, left_out].any():
            continue
        total = model.of(everything, [k for k in range(len(TERMS)) if k != left_out])
        positive = attrs.evolve(total, base=np.maximum(total.base, 1e-9))
        values = minimized(positive, measured, weights, parameters)
        found[term.name] = positive.predicted(values, parameters)
    return found


def shipped(profiles: dict[str, HardwareProfile]) -> np.ndarray:
    """The values in this checkout, in the order of :data:`PARAMETERS`."""
    found = []
    for p in PARAMETERS:
        owner = p.owners[-1]
        record = profiles[owner].device if p.of == "device" else framework_table.FRAMEWORKS[owner]
        found.append(float(getattr(record, p.field)))
    return np.array(found)


def rounded(value: float) -> float:
    """Four significant digits, as shipped."""
    return float(f"{value:.4g}")


def render(values: np.ndarray, loop_share: float, eager: dict[str, float]) -> str:
    """The text of the module with the fitted numbers."""
    table: dict[str, dict[str, float]] = {}
    for p, value in zip(PARAMETERS, values, strict=True):
        if p.of == "framework":
            for owner in p.owners:
                table.setdefault(owner, {})[p.field] = rounded(value)
    body = pprint.pformat(table, width=100, sort_dicts=True).replace("'", '"')
    return (
        '"""Numbers that ``benchmarks/derive_frameworks.py --write`` found; its ``--check`` keeps them."""\n'
        "\n# fmt: off\nfrom __future__ import annotations\n\n"
        f"NEMO_RL_LOOP_SHARE = {rounded(loop_share)}\n\nEAGER_MEMORY = {json.dumps(eager)}\n\n"
        f"FITTED: dict[str, dict[str, float]] = {body}\n"
    )


EAGER = ("torchtitan", "prime-rl", "prime-rl-fa2", "nanotron", "automodel")
EAGER_GRID = {
    "held_logit_bytes": (6.0, 10.0, 14.0, 18.0),
    "layer_buffers": (1.0, 1.5, 2.0, 2.5, 3.0),
    "reserved_share": (0.0, 0.05, 0.08, 0.12),
}
"""Whole passes over a logit, halves of a layer, and what allocators of long runs reserve."""


def memory_errors(cases: Sequence[Case]) -> tuple[list[dict[str, float]], np.ndarray]:
    """The grid of memory coefficients that frameworks of PyTorch operators share, and the relative error of every
    case at each point."""
    terms = [t for t in rpeg_cost_terms() if t.name.startswith("analytical.") and t.target is Target.MEMORY]
    points = [dict(zip(EAGER_GRID, point, strict=True)) for point in itertools.product(*EAGER_GRID.values())]
    before = dict(framework_table.FRAMEWORKS)
    errors = np.zeros((len(points), len(cases)))
    for i, point in enumerate(points):
        for name in EAGER:
            framework_table.FRAMEWORKS[name] = attrs.evolve(before[name], **point)
        for j, case in enumerate(cases):
            ((batch, _),) = case.batches()
            held = sum(float(t.function(batch)[0]) for t in terms if t.quantity not in case.without)
            errors[i, j] = abs(held / case.measured - 1)
    framework_table.FRAMEWORKS.update(before)
    return points, errors


def memory_fit(cases: Sequence[Case]) -> tuple[dict[str, float], float, float]:
    """The best point of the grid, its mean error, and the mean error of five folds by source."""
    points, errors = memory_errors(cases)
    best = int(np.argmin(errors.mean(axis=1)))
    fold = folds([case.source for case in cases])
    outside = []
    for index in range(fold.max() + 1):
        chosen = int(np.argmin(errors[:, fold != index].mean(axis=1)))
        outside += list(errors[chosen, fold == index])
    return points[best], float(errors[best].mean()), float(np.mean(outside))


def loop_share(cases: Sequence[Case]) -> float:
    """The geometric mean of measured over predicted, less 1; the cases' own share is left out."""
    ratios = []
    for case in cases:
        parts = []
        for batch, times in case.batches():
            parts.append(
                times * sum(float(t.function(batch)[0]) for t in TERMS if t.name != "analytical.loop_overhead")
            )
        ratios.append(case.measured / (max(parts[0], sum(parts[1:])) if case.apart else sum(parts)))
    return float(np.exp(np.mean(np.log(ratios)))) - 1.0


@restored()
def _share_of(steps: Sequence[Case]) -> float:
    """The loop share of the grade A steps, on the frameworks' present coefficients."""
    table = framework_table.FRAMEWORKS
    table["nemo-rl"], table["nemo-rl-vllm"] = table["nemo"], table["vllm"]
    return loop_share([case for case in steps if case.grade == "A"])


def _print_errors(cases: Sequence[Case], columns: dict[str, np.ndarray]) -> None:
    print(f"\n{'kind and grade':24}{'rows':>6}" + "".join(f"{name:>28}" for name in columns))
    kinds = sorted({(case.kind, case.grade) for case in cases})
    for kind, grade in kinds:
        rows = [i for i, case in enumerate(cases) if (case.kind, case.grade) == (kind, grade)]
        measured = np.array([cases[i].measured for i in rows])
        cells = "".join(f"{np.mean(np.abs(p[rows] / measured - 1)):>28.2%}" for p in columns.values())
        print(f"{kind + ' ' + grade:24}{len(rows):>6}{cells}")


def main(arguments: list[str] | None = None) -> int:
    """Print the derivation, write it or check it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY / "benchmarks" / "measured")
    parser.add_argument("--write", action="store_true", help="write the framework numbers into the cost plugin")
    parser.add_argument("--check", action="store_true", help="exit 1 when a shipped number differs")
    parser.add_argument("--folds", action="store_true", help="5-fold cross-validation by source")
    parser.add_argument("--ablation", action="store_true", help="leave one term out at a time")
    options = parser.parse_args(arguments)
    profiles = _profiles()
    cases = [
        *training_cases(options.data / "training.csv", profiles).cases,
        *generation_cases(options.data / "generation.csv", profiles).cases,
    ]
    priors = np.array([p.prior for p in PARAMETERS])
    values, model = fitted(cases, priors, report=None if options.check else print)
    if options.check:
        wrong = [
            f"{p.name} is {was:.4g}, derived {now:.4g}"
            for p, was, now in zip(PARAMETERS, shipped(profiles), values, strict=True)
            if abs(now - was) > CHECKED * (p.upper - p.lower)
        ]
        eager, _, _ = memory_fit(memory_cases(options.data / "training.csv", profiles).cases)
        if eager != shipped_values.EAGER_MEMORY:
            wrong.append(f"EAGER_MEMORY is {shipped_values.EAGER_MEMORY}, derived {eager}")
        steps = rl_cases(options.data / "rl_step.csv", profiles).cases
        share = _share_of(steps)
        if abs(share - shipped_values.NEMO_RL_LOOP_SHARE) > CHECKED:
            wrong.append(f"NEMO_RL_LOOP_SHARE is {shipped_values.NEMO_RL_LOOP_SHARE}, derived {share:.4g}")
        print("\n".join(wrong), file=sys.stderr, end="\n" if wrong else "")
        return 1 if wrong else 0
    with restored():
        share = _share_of(applied(values, rl_cases(options.data / "rl_step.csv", profiles).cases, PARAMETERS))
    for p, value in zip(PARAMETERS, values, strict=True):
        edge = " at its bound" if min(abs(value - p.lower), abs(value - p.upper)) < 1e-3 * (p.upper - p.lower) else ""
        print(f"{','.join(p.owners):72.72} {p.field:22} {value:.4g}{edge}")
    print(f"loop_share {share:.4g}")
    eager, memory_error, memory_outside = memory_fit(memory_cases(options.data / "training.csv", profiles).cases)
    print(f"memory of {', '.join(EAGER)}: {eager}; all rows {memory_error:.2%}, 5-fold by source {memory_outside:.2%}")
    columns = {"fitted": model.of(np.arange(len(cases))).predicted(values, PARAMETERS)}
    if options.folds:
        columns["5-fold by source"] = cross_validated(cases, model)
    _print_errors(cases, columns)
    if options.ablation:
        for name, predicted in ablation(cases, model).items():
            _print_errors(cases, {"fitted": columns["fitted"], f"without {name[11:]}": predicted})
    if options.write:
        VALUES.write_text(render(values, share, eager), encoding="utf-8")
    return 0


def _profiles() -> dict[str, HardwareProfile]:
    sys.path.insert(0, str(Path(__file__).parent))
    import derive_hardware

    return derive_hardware.shipped()


if __name__ == "__main__":
    sys.exit(main())
