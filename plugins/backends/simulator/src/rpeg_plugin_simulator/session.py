"""What ``rpeg run --backend simulator`` opens: a plan with the durations that its cost terms predict."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from types import TracebackType

import attrs

from rpeg_core import setting
from rpeg_core.errors import BackendError, SettingsError
from rpeg_core.passes.lower import Node
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.recheck import recheck
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.session import TRACE_FILE, RunRequest
from rpeg_core.runtime.trace import Record, Trace, TraceHeader
from rpeg_plugin_simulator.comparison import Cause, causes
from rpeg_plugin_simulator.simulation import Simulation, simulate

__all__ = ["Settings", "SimulatorSession", "open_session"]


@attrs.frozen(kw_only=True)
class Settings:
    """Settings of the backend ``simulator``."""

    steps: int = setting(8, help="RL steps to execute when the command names no number.", minimum=1)
    noise: float = setting(0.0, help="Relative standard deviation of every duration (lognormal, mean 1).", minimum=0.0)
    sample_lengths: bool = setting(False, help="Draw response lengths from workload.response_lengths in every step.")
    seed: int = setting(0, help="Seed of noise and lengths.", minimum=0)


class SimulatorSession:
    """A context manager that runs one plan, as often as asked; it holds nothing that must be closed."""

    def __init__(
        self,
        plan: Plan,
        settings: Settings,
        seconds_of: Callable[[Node], float],
        differences: Sequence[str] = (),
    ) -> None:
        self._plan, self._settings, self._seconds_of = plan, settings, seconds_of
        self._differences = tuple(differences)

    def __enter__(self) -> SimulatorSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        pass

    def run(self, request: RunRequest) -> Trace:
        """Execute RL steps; the metrics of a step are ``{"seconds", "time_s"}`` in virtual time.

        Raises:
            BackendError: asked to resume.
        """
        if request.resume:
            raise BackendError("the simulator keeps no checkpoints to resume from", hint="leave --resume out")
        plan, settings = self._plan, self._settings
        records: list[Record] = []
        steps = settings.steps if request.steps is None else request.steps
        ends_s: list[float] = []

        def step_finished(step: int, time_s: float) -> None:
            seconds = time_s - (ends_s[-1] if ends_s else 0.0)
            ends_s.append(time_s)
            request.step_finished(step, {"seconds": seconds, "time_s": time_s})

        simulated = simulate(
            plan.rpeg,
            plan.assignments,
            plan.workload,
            self._seconds_of,
            steps=steps,
            options=plan.options,
            noise=settings.noise,
            sample_lengths=settings.sample_lengths,
            seed=settings.seed,
            record=records.append,
            step_finished=step_finished,
            cancelled=request.cancelled,
        )
        header = TraceHeader(
            plan=plan.digest,
            backend="simulator",
            steps=steps,
            clock="virtual",
            notes=(*(self._reasons(simulated) if simulated.steps == steps else ()), *self._differences),
        )
        trace = Trace(header, tuple(records))
        if request.output is not None:
            trace.write(request.output / TRACE_FILE)
        return trace

    def _reasons(self, simulated: Simulation) -> list[str]:
        """Why a simulated step does not take the predicted time."""
        plan = self._plan
        found = causes(
            plan.rpeg,
            plan.assignments,
            plan.workload,
            plan.machine,
            self._seconds_of,
            plan.options,
            simulated,
            plan.prediction.step_s,
        )
        return _notes(found)


def open_session(plan: Plan, settings: Settings) -> SimulatorSession:
    """A session whose durations are those of the plan's cost terms.

    Raises:
        SettingsError: lengths shall be sampled, but the workload has one length only.
        MissingPluginError, PluginError: a plugin that the plan needs is not there.
    """
    if settings.sample_lengths and not plan.workload.response_lengths:
        raise SettingsError(
            "simulator.sample_lengths is true, but the plan's workload has no response_lengths",
            hint="plan with workload.response_lengths, or leave the setting out",
        )
    checked = recheck(plan, Registry())
    return SimulatorSession(plan, settings, checked.structure.book.node_seconds, checked.differences)


def _notes(found: tuple[Cause, ...]) -> list[str]:
    first, last = found[0].step_s, found[-1].step_s
    notes = [f"a step takes {last:.6g} s simulated, {first:.6g} s predicted ({last / first - 1:+.2%})"]
    for before, cause in itertools.pairwise(found):
        if cause.step_s != before.step_s:
            notes.append(f"{cause.name}: {cause.step_s - before.step_s:+.6g} s per step")
    return notes
