"""The compiled evaluator: one configuration through every pass in microseconds, equal to the readable one bit by bit.

``tables`` fills flat arrays from a structure problem, ``kernel`` holds the numba functions over them, ``evaluator``
the class that search uses. Importing this package imports numba; ``StructureProblem.evaluator`` does so when asked.
"""

from rpeg_core.planning.compiled.evaluator import CompiledEvaluator
from rpeg_core.planning.compiled.kernel import (
    KERNEL_FINGERPRINT,
    critical_seconds,
    evaluate_choice,
    evaluate_choices,
)
from rpeg_core.planning.compiled.tables import Tables, Workspace, build_tables, build_workspace

__all__ = [
    "KERNEL_FINGERPRINT",
    "CompiledEvaluator",
    "Tables",
    "Workspace",
    "build_tables",
    "build_workspace",
    "critical_seconds",
    "evaluate_choice",
    "evaluate_choices",
]
