"""How sure a calibrated profile is of operators on its machine, by role: from the operators that it was fitted to.

Each operator is predicted by a fit without it. That fit is not repeated: of a linear least-squares fit the residual
without a row is the row's residual over one less its leverage, and near its minimum this fit is linear.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from rpeg_core.accuracy.draws import CONFIDENCE
from rpeg_core.accuracy.features import FEATURES, features
from rpeg_core.calibration.measurements import OperatorTime
from rpeg_core.ir import Role
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import HardwareProfile

__all__ = ["LEAST_OPERATORS", "role_errors"]

LEAST_OPERATORS = 3
"""With fewer of a role nothing is said of it **[choice]**."""

NORMAL = 1.645
"""Standard deviations that hold 90 % of a normal distribution."""


def role_errors(
    hardware: HardwareProfile, operators: Sequence[OperatorTime], left_out: Sequence[float], source: str
) -> tuple[TermError, ...]:
    """The errors of whole operators, one for each role that was measured often enough.

    Args:
        hardware: that the operators are predicted with.
        operators: measured.
        left_out: of each ``log(measured / predicted)`` by a fit without it.
        source: of the measurements, in words.
    """
    found = []
    for role in Role:
        rows = [index for index, operator in enumerate(operators) if operator.role is role]
        if len(rows) < LEAST_OPERATORS:
            continue
        errors = np.array([left_out[index] for index in rows])
        bias = float(np.mean(errors))
        # For the next operator, and not below what holds the confidence's share of these.
        deviation = float(np.std(errors, ddof=1)) * (1.0 + 1.0 / len(rows)) ** 0.5
        widest = float(np.quantile(np.abs(errors - bias), CONFIDENCE)) / NORMAL
        values = [features(operators[index].batch(hardware, [operators[index].layout])) for index in rows]
        found.append(
            TermError(
                log_bias=bias,
                log_std=max(deviation, widest),
                rows=len(rows),
                source=f"{len(rows)} operators, each predicted without it; {source}",
                ranges={
                    name: (min(each[name] for each in values), max(each[name] for each in values))
                    for name in FEATURES
                    if name in values[0]
                },
                roles=(role.value,),
            )
        )
    return tuple(found)
