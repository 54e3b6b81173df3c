"""Fitting what the software costs to measured operators, through the cost terms that the planner uses.

The parameters are the positive numbers of :class:`rpeg_core.spec.software.Software`. Least squares on the logarithm of
predicted over measured time, outliers weighted down (soft-L1), and each parameter held to where it starts as by one
more observation of relative error ``spread``: what no measurement tells stays as it was.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.calibration.measurements import OperatorTime
from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.errors import CostTermError
from rpeg_core.ir import Role
from rpeg_core.records import CostTerm, Target
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.validation.replay import spearman

__all__ = ["GUESS", "Errors", "Parameter", "Refined", "errors_of", "predicted_s", "refine"]

Floats = NDArray[np.float64]
Terms = Sequence[tuple[CostTerm, object]]

ROUNDS = 12
STEP = 0.02
"""Of the logarithm of a parameter, for its derivative."""

FARTHEST = 1.5
"""Largest change of the logarithm of a parameter in one round."""

GUESS = 2.0
"""Of the logarithm of a parameter that is known within a factor of e^2 only."""

OUTLIER = 0.15
"""Relative error from which on an observation counts less than its square."""

G, T = Role.GENERATION, Role.TRAINING
ALL = frozenset(Role)

PARAMETERS: Mapping[str, frozenset[Role]] = {
    "forward_layer_s": frozenset({Role.INFERENCE, T}),
    "backward_layer_s": frozenset({T}),
    "pass_s": frozenset({Role.INFERENCE, T}),
    "update_s": frozenset({T}),
    "update_layer_s": frozenset({T}),
    "token_layer_s": frozenset({G}),
    "token_step_s": frozenset({G}),
    "token_sequence_s": frozenset({G}),
    "token_exchange_s": frozenset({G}),
    "node_s": ALL,
    "attention_share": ALL,
    "cache_passes": frozenset({G}),
    "pointwise_passes": ALL,
    "score_bytes": ALL,
    "logit_passes": frozenset({Role.INFERENCE, T}),
    "sampling_passes": frozenset({G}),
    "stream_share": frozenset({G}),
    "tensor_exposed": ALL,
    "pipeline_exposed": ALL,
    "data_exposed": frozenset({T}),
    "optimizer_passes": frozenset({T}),
}
"""What is fitted, and the roles whose time it is part of."""


@attrs.frozen(kw_only=True)
class Parameter:
    """One fitted number.

    Attributes:
        before, after: its value.
        uncertainty: relative standard error; 1 and more says that the measurements do not tell it.
    """

    name: str
    before: float
    after: float
    uncertainty: float


@attrs.frozen(kw_only=True)
class Errors:
    """Of predictions of operators: mean absolute and mean signed relative error, rank correlation (nan below 3)."""

    count: int
    mape: float
    bias: float
    spearman: float


@attrs.frozen(kw_only=True)
class Refined:
    """A profile with its software fitted.

    Attributes:
        profile: the new one; its sources are still those of the old one.
        parameters: in the order of :data:`PARAMETERS`.
        before, after: predicted seconds of each observation.
        left_out: of each, ``log(measured / predicted)`` by a fit without it.
    """

    profile: HardwareProfile
    parameters: tuple[Parameter, ...]
    before: tuple[float, ...]
    after: tuple[float, ...]
    left_out: tuple[float, ...]


def predicted_s(
    hardware: HardwareProfile,
    observations: Sequence[OperatorTime],
    terms: Terms,
    only: frozenset[Role] | None = None,
) -> Floats:
    """What cost terms say about observations; nan for roles that are not wanted.

    Raises:
        CostTermError: a term fails.
    """
    alike: dict[tuple[object, ...], list[int]] = {}
    for index, each in enumerate(observations):
        alike.setdefault((each.role, each.model, each.workload, each.mode), []).append(index)
    found = np.full(len(observations), np.nan)
    for members in alike.values():
        first = observations[members[0]]
        if only is not None and first.role not in only:
            continue
        batch = first.batch(hardware, [observations[index].layout for index in members])
        found[members] = _priced(batch, terms, first.name)
    if hardware.software is not None:
        found -= np.where([each.node for each in observations], 0.0, hardware.software.node_s)
    return found


def _priced(batch: OperatorBatch, terms: Terms, name: str) -> Floats:
    total = np.zeros(len(batch.layouts))
    for term, settings in terms:
        if term.target is not Target.OPERATOR:
            continue
        try:
            with np.errstate(all="raise", under="ignore"):
                total = total + term.function(attrs.evolve(batch, settings=settings))  # type: ignore[arg-type]
        except Exception as error:
            raise CostTermError(
                f"cost term {term.name!r} failed for {name}", facts=[f"{type(error).__name__}: {error}"]
            ) from error
    return total


def errors_of(observations: Sequence[OperatorTime], predictions: Sequence[float]) -> Errors:
    """There is at least one."""
    measured = [observation.seconds for observation in observations]
    relative = np.array(predictions) / np.array(measured) - 1.0
    return Errors(
        count=len(measured),
        mape=float(np.mean(np.abs(relative))),
        bias=float(np.mean(relative)),
        spearman=spearman(list(predictions), measured),
    )


def refine(
    hardware: HardwareProfile,
    observations: Sequence[OperatorTime],
    terms: Terms,
    *,
    spread: float,
    unknown: frozenset[str] = frozenset(),
    progress: Callable[[float], None] = lambda share: None,
) -> Refined:
    """Fit the software of a profile, which it has.

    Args:
        hardware: where the parameters start.
        observations: at least one.
        terms: operator terms with their settings.
        spread: how far, in the logarithm, a parameter may be expected from where it starts.
        unknown: parameters that start at a mere guess, :data:`GUESS` off.
        progress: told the share that is done.
    """
    software = hardware.software
    assert software is not None
    roles = {observation.role for observation in observations}
    timed = any(observation.node for observation in observations)
    names = [
        name
        for name, parts in PARAMETERS.items()
        if parts & roles and getattr(software, name) > 0 and (name != "node_s" or timed)
    ]
    start = np.log([getattr(software, name) for name in names])
    measured = np.log([observation.seconds for observation in observations])
    theta = start.copy()
    hold = np.array([(OUTLIER / (GUESS if name in unknown else spread)) ** 2 for name in names])

    def profile_at(point: Floats) -> HardwareProfile:
        values = {name: math.exp(value) for name, value in zip(names, point, strict=True)}
        return attrs.evolve(hardware, software=attrs.evolve(software, **values))

    def predictions(point: Floats, only: frozenset[Role] | None = None) -> Floats:
        return predicted_s(profile_at(point), observations, terms, only)

    before = predictions(theta)
    current, damping = np.log(before), 1e-2
    cost = _cost(current - measured, theta - start, hold)
    weighted = np.zeros((0, len(names)))
    for round_ in range(ROUNDS):
        jacobian = np.zeros((len(observations), len(names)))
        for column, name in enumerate(names):
            moved = theta.copy()
            moved[column] += STEP
            found = np.log(predictions(moved, PARAMETERS[name]))
            jacobian[:, column] = np.where(np.isnan(found), 0.0, (found - current) / STEP)
            progress((round_ + (column + 1) / len(names)) / ROUNDS)
        residual = current - measured
        weight = 1.0 / np.sqrt(1.0 + (residual / OUTLIER) ** 2)
        weighted = jacobian * np.sqrt(weight)[:, None]
        normal = weighted.T @ weighted + np.diag(hold)
        gradient = weighted.T @ (residual * np.sqrt(weight)) + (theta - start) * hold
        improved = False
        for _ in range(4):
            change = np.linalg.solve(normal + damping * np.diag(np.diag(normal)), -gradient)
            tried = theta + np.clip(change, -FARTHEST, FARTHEST)
            values = np.log(predictions(tried))
            tried_cost = _cost(values - measured, tried - start, hold)
            if tried_cost < cost:
                improved = cost - tried_cost > 1e-4 * cost
                theta, current, cost, damping = tried, values, tried_cost, damping / 3
                break
            damping *= 5
        if not improved:
            break
    progress(1.0)
    residual = current - measured
    noise = max(float(np.mean(residual**2)), 1e-6)
    covariance = np.linalg.inv(weighted.T @ weighted / noise + np.diag(hold) / OUTLIER**2)
    parameters = tuple(
        Parameter(name=name, before=math.exp(first), after=math.exp(last), uncertainty=float(np.sqrt(variance)))
        for name, first, last, variance in zip(names, start, theta, np.diag(covariance), strict=True)
    )
    return Refined(
        profile=profile_at(theta),
        parameters=parameters,
        before=tuple(before.tolist()),
        after=tuple(np.exp(current).tolist()),
        left_out=tuple(_left_out(residual, weighted, hold).tolist()),
    )


def _left_out(residual: Floats, weighted: Floats, hold: Floats) -> Floats:
    """Of a held least-squares fit: the log error of each row without that row, ``r / (1 - leverage)``."""
    inverse = np.linalg.inv(weighted.T @ weighted + np.diag(hold))
    leverage = np.einsum("ij,jk,ik->i", weighted, inverse, weighted)
    return -residual / np.maximum(1.0 - leverage, 1e-6)


def _cost(residual: Floats, moved: Floats, hold: Floats) -> float:
    soft = 2.0 * OUTLIER**2 * (np.sqrt(1.0 + (residual / OUTLIER) ** 2) - 1.0)
    return float(np.sum(soft) + np.sum(hold * moved**2))
