"""How sure a calibrated profile is, against fits that are repeated without each row and against numbers by hand."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from rpeg_core.calibration.accuracy import role_errors
from rpeg_core.calibration.measurements import OperatorTime
from rpeg_core.calibration.refine import _left_out
from rpeg_core.ir import Role
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.spec.model_configs import model_from_inline
from rpeg_core.spec.profile_file import read_profile, write_profile
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.toys import toy_hardware

DIMENSIONS = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 256}


def test_leaving_out_by_leverage_is_fitting_again_without_the_row() -> None:
    """Of a held linear fit, exactly: 12 rows, 3 parameters, each row left out in turn."""
    rng = np.random.default_rng(5)
    jacobian, measured = rng.normal(size=(12, 3)), rng.normal(size=12)
    hold = np.array([0.3, 0.01, 2.0])

    def solved(kept: np.ndarray) -> np.ndarray:
        part = jacobian[kept]
        return np.linalg.solve(part.T @ part + np.diag(hold), part.T @ measured[kept])

    everything = np.ones(12, bool)
    predicted = jacobian @ solved(everything)
    again = []
    for row in range(12):
        kept = everything.copy()
        kept[row] = False
        again.append(measured[row] - jacobian[row] @ solved(kept))
    assert _left_out(predicted - measured, jacobian, hold) == pytest.approx(again)


def operator(role: Role, sequences: int, data: int = 1) -> OperatorTime:
    return OperatorTime(
        name="x",
        role=role,
        model=model_from_inline(DIMENSIONS, "m"),
        workload=Workload(prompts=sequences, prompt_tokens=16, response_tokens=16, bytes_per_element=4),
        data=data,
        pipeline=1,
        tensor=1,
        microbatches=1,
        seconds=1.0,
        node=False,
    )


def profile() -> HardwareProfile:
    return attrs.evolve(toy_hardware(memory_bytes=10**10), name="mine")


def test_a_role_has_the_mean_and_deviation_of_its_operators_and_their_ranges() -> None:
    """Errors 0.0, 0.1, 0.2: mean and deviation 0.1, of the next operator sqrt(4/3) of it; two say nothing."""
    measured = [operator(Role.GENERATION, n, data) for n, data in ((16, 1), (32, 2), (64, 1))]
    measured += [operator(Role.TRAINING, 16), operator(Role.TRAINING, 32)]
    (error,) = role_errors(profile(), measured, [0.0, 0.1, 0.2, 9.0, -9.0], "by hand")
    assert (error.log_bias, error.log_std) == pytest.approx((0.1, 0.1 * (4 / 3) ** 0.5))
    assert (error.rows, error.roles, error.hardware) == (3, ("generation",), ())
    assert error.source == "3 operators, each predicted without it; by hand"
    assert error.ranges["replica_sequences"] == (16.0, 64.0)
    assert error.ranges["sequence_tokens"] == (32.0, 32.0)
    assert "gpus" not in error.ranges


def test_far_outliers_widen_the_error_to_what_holds_ninety_percent() -> None:
    """Of 20 errors three are 1.0, the others 0: more than a tenth lie 0.85 from the mean, 1.645 times 0.52."""
    measured = [operator(Role.TRAINING, 16)] * 20
    (error,) = role_errors(profile(), measured, [1.0] * 3 + [0.0] * 17, "by hand")
    assert (error.log_bias, error.log_std) == pytest.approx((0.15, 0.85 / 1.645))
    assert error.ranges["gpus"] == (1.0, 1.0)


def test_a_profile_file_keeps_its_errors(tmp_path) -> None:
    measured = [operator(Role.TRAINING, n) for n in (16, 32, 64)]
    sure = attrs.evolve(profile(), errors=role_errors(profile(), measured, [0.0, 0.1, 0.3], "by hand"))
    write_profile(tmp_path / "mine.yaml", sure)
    assert read_profile(tmp_path / "mine.yaml").errors == sure.errors
