"""Re-derive what is fitted to measured runs: framework coefficients and the sustained speed of GPUs.

    python benchmarks/derive_frameworks.py [--data benchmarks/measured] [--check] [--folds] [--ablation]

Method: the model is nearly linear in every parameter of :data:`PARAMETERS` (a speed enters as its inverse), so that
each round prices every run once per parameter name (a run has one framework and one GPU) and then minimizes

    sum w_i rho(log(T_i(y) / t_i)) + PRIOR_WEIGHT sum ((y_j - prior_j) / (upper_j - lower_j))^2

over the linear model by iteratively reweighted least squares within the bounds; rho is the soft-L1 loss. Three rounds.
Only grade A rows of dense 16-bit and FP8 training, and the mixture rows at less weight, are fitted.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import attrs
import numpy as np
from rpeg_plugin_analytical import frameworks as framework_table
from rpeg_plugin_analytical import rpeg_cost_terms

from rpeg_core.records import Target
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.validation.cases import Case, Table, training_cases

REPOSITORY = Path(__file__).resolve().parents[1]
PRIOR_WEIGHT = 0.02
LOSS_SCALE = 0.05
ROUNDS = 3
STEP = 0.02


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


def _framework(owners: str, field: str, prior: float, lower: float, upper: float, inverse: bool = False) -> Parameter:
    return Parameter("framework", tuple(owners.split()), field, prior, lower, upper, inverse)


def _device(owners: str, field: str, prior: float, lower: float, upper: float, inverse: bool = False) -> Parameter:
    return Parameter("device", tuple(owners.split()), field, prior, lower, upper, inverse)


MEGATRON = "nemo nemo-2024 megatron-core megatron-bridge megatron-bridge-26.06"
EARLY = "megatron-2021 megatron-2022"
AMPERE, HOPPER, BLACKWELL = "a100-40gb a100-80gb", "h100 h200", "b200 b300 gb200 gb300"

PARAMETERS: tuple[Parameter, ...] = (
    _device(AMPERE, "sustained_share", 0.95, 0.6, 1.05, True),
    _device(HOPPER, "sustained_share", 0.85, 0.6, 1.05, True),
    _device(BLACKWELL, "sustained_share", 0.80, 0.5, 1.05, True),
    _device("h100-hbm2e", "sustained_share", 0.70, 0.4, 1.05, True),
    _device("rtx-a6000", "sustained_share", 0.80, 0.4, 1.05, True),
    _device(f"{AMPERE} {HOPPER} {BLACKWELL} h100-hbm2e rtx-a6000", "clock_spread", 0.012, 0.0, 0.02),
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
    _framework(MEGATRON, "launch_expert_layer_s", 8e-3, 0.0, 1.5e-2),
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
            _framework(engine, "decode_reduce_s", 8e-6, 2e-6, 3e-5),
            _framework(engine, "stream_share", 0.85, 0.5, 1.1, True),
            _framework(engine, "prefill_share", 0.75, 0.4, 1.1, True),
        )
    ),
    _framework("trtllm-2023", "grouped_reads", 0.5, 0.0, 1.0),
    _framework("nanotron", "pointwise_passes", 4.0, 0.8, 20.0),
    _framework("nanotron", "launch_layer_s", 5e-3, 0.0, 2e-2),
)

TERMS = tuple(t for t in rpeg_cost_terms() if t.name.startswith("analytical.") and t.target is Target.OPERATOR)


def weight(case: Case) -> float:
    """How much a case counts in the fit."""
    if case.kind == "training-moe":
        return 0.4
    return 1.0 if case.grade == "A" else 0.15


def seconds(cases: Sequence[Case]) -> np.ndarray:
    """Predicted seconds by the same terms as the planner's."""
    return np.array(
        [
            sum(times * sum(float(term.function(batch)[0]) for term in TERMS) for batch, times in case.batches())
            for case in cases
        ]
    )


def applied(values: np.ndarray, cases: Sequence[Case], parameters: Sequence[Parameter]) -> list[Case]:
    """The cases under parameter values; framework values are set in the table."""
    table = dict(framework_table.FRAMEWORKS)
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
    """``T(y) = base + slopes (y - at)`` in the inner quantities y."""

    base: np.ndarray
    slopes: np.ndarray
    at: np.ndarray

    def times(self, y: np.ndarray) -> np.ndarray:
        """Predicted seconds, at least a tenth of the base."""
        return np.maximum(self.base + self.slopes @ (y - self.at), 0.1 * self.base)


def linearized(values: np.ndarray, cases: Sequence[Case], parameters: Sequence[Parameter]) -> Linear:
    """One pricing per parameter name: a case has one framework and one GPU."""
    base = seconds(applied(values, cases, parameters))
    slopes = np.zeros((len(cases), len(parameters)))
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
                for i, value in zip(chosen, new, strict=True):
                    if p.concerns(cases[i]):
                        slopes[i, j] = (value - base[i]) / change
    return Linear(base, slopes, at)


def minimized(
    model: Linear, measured: np.ndarray, weights: np.ndarray, parameters: Sequence[Parameter]
) -> np.ndarray:
    """The parameter values that fit the linear model best, within their bounds."""
    ends = np.array([sorted((p.inner(p.lower), p.inner(p.upper))) for p in parameters])
    low, width = ends[:, 0], ends[:, 1] - ends[:, 0]
    prior = (np.array([p.inner(p.prior) for p in parameters]) - low) / width
    z = np.clip((model.at - low) / width, 0.0, 1.0)
    pull = np.sqrt(PRIOR_WEIGHT)
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
    parameters: Sequence[Parameter] = PARAMETERS,
    start: np.ndarray | None = None,
    report: Callable[[str], None] | None = None,
    rounds: int = ROUNDS,
) -> tuple[np.ndarray, Linear]:
    """Values after ``rounds`` rounds, and the model of the last round."""
    measured = np.array([case.measured for case in cases])
    weights = np.array([weight(case) for case in cases])
    values = np.array([p.prior for p in parameters]) if start is None else start
    model = None
    for index in range(rounds):
        model = linearized(values, cases, parameters)
        values = minimized(model, measured, weights, parameters)
        if report is not None:
            report(f"round {index + 1}: linear MAPE {error(model, values, measured, parameters):.2%}")
    assert model is not None
    return values, model


def error(model: Linear, values: np.ndarray, measured: np.ndarray, parameters: Sequence[Parameter]) -> float:
    """Mean absolute relative error of the linear model."""
    y = np.array([p.inner(v) for p, v in zip(parameters, values, strict=True)])
    return float(np.mean(np.abs(model.times(y) / measured - 1)))


def folds(sources: Sequence[str], count: int = 5) -> np.ndarray:
    """Fold of each source: sources sorted by size, then dealt out so that folds have about equally many rows."""
    sizes = {source: list(sources).count(source) for source in sources}
    load, fold = np.zeros(count), {}
    for source in sorted(sizes, key=lambda s: (-sizes[s], s)):
        fold[source] = int(np.argmin(load))
        load[fold[source]] += sizes[source]
    return np.array([fold[source] for source in sources])


def cross_validated(
    cases: Sequence[Case], model: Linear, parameters: Sequence[Parameter] = PARAMETERS
) -> np.ndarray:
    """Predicted seconds of every case by parameters fitted to the sources of the other folds."""
    measured = np.array([case.measured for case in cases])
    weights = np.array([weight(case) for case in cases])
    fold = folds([case.source for case in cases])
    predicted = np.zeros(len(cases))
    for index in range(fold.max() + 1):
        inside = fold != index
        part = Linear(model.base[inside], model.slopes[inside], model.at)
        values = minimized(part, measured[inside], weights[inside], parameters)
        y = np.array([p.inner(v) for p, v in zip(parameters, values, strict=True)])
        predicted[~inside] = model.times(y)[~inside]
    return predicted


def main(arguments: list[str] | None = None) -> int:
    """Print the derivation, or check it; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, default=REPOSITORY / "benchmarks" / "measured")
    parser.add_argument("--check", action="store_true", help="exit 1 when a shipped number differs")
    parser.add_argument("--folds", action="store_true", help="also 5-fold cross-validation by source")
    options = parser.parse_args(arguments)
    table: Table = training_cases(options.data / "training.csv", _profiles())
    values, model = fitted(table.cases, report=print)
    for parameter, value in zip(PARAMETERS, values, strict=True):
        print(f"{','.join(parameter.owners):60.60} {parameter.field:18} {value:.4g}")
    if options.folds:
        predicted = cross_validated(table.cases, model)
        for kind in sorted({case.kind for case in table.cases}):
            chosen = [i for i, case in enumerate(table.cases) if case.kind == kind and case.grade == "A"]
            if chosen:
                ratio = np.array([predicted[i] / table.cases[i].measured for i in chosen])
                print(f"{kind}: 5-fold by source MAPE {np.mean(np.abs(ratio - 1)):.2%} over {len(chosen)} rows")
    return 0


def _profiles() -> dict[str, HardwareProfile]:
    sys.path.insert(0, str(Path(__file__).parent))
    import derive_hardware

    return derive_hardware.shipped()


if __name__ == "__main__":
    sys.exit(main())
