"""Backend ``megatron``: executes a plan on PyTorch and Megatron-Core workers, one process per device.

This module imports no torch, so that listing plugins and planning stay light: the record's functions import what
they need when they are called.
"""

from __future__ import annotations

import importlib.metadata
from typing import TYPE_CHECKING, Any

from rpeg_core import BackendSpec, Diagnostic, Severity, hookimpl
from rpeg_plugin_megatron.settings import Settings

if TYPE_CHECKING:
    from collections.abc import Iterator

    from rpeg_core.calibration.measurements import CalibrationRequest, Measurements
    from rpeg_core.planning.plan import Plan
    from rpeg_core.runtime.lengths import LengthsRequest

__all__ = ["MEGATRON", "Settings", "rpeg_backends", "rpeg_check_plan"]


def _probe() -> str | None:
    installed = {distribution.name.lower() for distribution in importlib.metadata.distributions() if distribution.name}
    missing = [name for name in ("megatron-core", "torch") if name not in installed]
    return f"not installed: {', '.join(missing)}" if missing else None


def _open(plan: Plan, settings: Any) -> Any:
    from rpeg_plugin_megatron.session import open_session

    return open_session(plan, settings)


def _calibrate(request: CalibrationRequest) -> Measurements:
    from rpeg_plugin_megatron.calibrate import measure

    return measure(request)


def _profile(request: LengthsRequest, settings: Any) -> None:
    from rpeg_plugin_megatron.lengths import profile_lengths

    profile_lengths(request, settings)


MEGATRON = BackendSpec(
    name="megatron",
    summary="Executes a plan on PyTorch and Megatron-Core workers, on GPUs or CPU cores.",
    can=frozenset({"execute"}),
    probe=_probe,
    open=_open,
    calibrate=_calibrate,
    profile=_profile,
    settings=Settings,
)


@hookimpl
def rpeg_backends() -> tuple[BackendSpec, ...]:
    """The backend on Megatron-Core."""
    return (MEGATRON,)


@hookimpl
def rpeg_check_plan(plan: Plan) -> Iterator[Diagnostic]:
    """What this backend refuses to run although the planner's rules allow it."""
    from rpeg_plugin_megatron.layouts import refusals

    for refusal in refusals(plan):
        yield Diagnostic(
            severity=Severity.WARNING,
            message=f"backend megatron cannot run {refusal.operators}: {refusal.reason}",
            hint=refusal.hint,
        )
