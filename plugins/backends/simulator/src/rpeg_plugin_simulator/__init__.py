"""Backend ``simulator``: executes a plan in virtual time through the engine of rpeg-core, without hardware."""

from __future__ import annotations

from rpeg_core import BackendSpec, hookimpl
from rpeg_plugin_simulator.comparison import Cause, causes
from rpeg_plugin_simulator.durations import Durations
from rpeg_plugin_simulator.session import Settings, SimulatorSession, open_session
from rpeg_plugin_simulator.simulation import Simulation, run_window, simulate

__all__ = [
    "SIMULATOR",
    "Cause",
    "Durations",
    "Settings",
    "Simulation",
    "SimulatorSession",
    "causes",
    "rpeg_backends",
    "run_window",
    "simulate",
]

SIMULATOR = BackendSpec(
    name="simulator",
    summary="Executes a plan in virtual time, optionally with noise and sampled response lengths.",
    can=frozenset({"execute"}),
    probe=lambda: None,
    open=open_session,
    settings=Settings,
)


@hookimpl
def rpeg_backends() -> tuple[BackendSpec, ...]:
    """The simulator."""
    return (SIMULATOR,)
