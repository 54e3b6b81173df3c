"""Hardware profile ``host``: the CPU cores that this process may use, as the devices of one node.

Importing this measures nothing and imports no numpy; :func:`rpeg_plugin_host.profile.host_profile` does.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from rpeg_core import Diagnostic, MeasuredHardware, Severity, hookimpl

if TYPE_CHECKING:
    from rpeg_core import HardwareProfile, Plan

__all__ = ["HOST", "NAME", "rpeg_check_plan", "rpeg_hardware"]

NAME = "host"


def _measure(report: Callable[[str], None]) -> HardwareProfile:
    from rpeg_plugin_host.profile import host_profile

    return host_profile(report)


HOST = MeasuredHardware(
    name=NAME, summary="The CPU cores of this machine as devices, measured when first used.", measure=_measure
)


@hookimpl
def rpeg_hardware() -> list[MeasuredHardware]:
    """The profile of this machine."""
    return [HOST]


@hookimpl
def rpeg_check_plan(plan: Plan) -> Iterator[Diagnostic]:
    """More devices than cores work, but not at the predicted speed."""
    from rpeg_plugin_host.machine import cores

    if plan.experiment.cluster.hardware == NAME and plan.machine.gpus > cores():
        yield Diagnostic(
            severity=Severity.WARNING,
            message=f"the plan has {plan.machine.gpus} devices, this process may use {cores()} cores",
            hint="workers that share a core take longer than predicted, and the memory of a device is not their own",
        )
