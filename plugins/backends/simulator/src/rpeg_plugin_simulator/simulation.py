"""The simulation: the engine, with a clock that jumps from one end of a node to the next."""

from __future__ import annotations

import heapq
from collections.abc import Callable

import attrs

from rpeg_core.errors import ExecutionError
from rpeg_core.ir import Rpeg
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.lower import Node
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import Dispatch, NodeFinished, Release
from rpeg_core.runtime.trace import Ended, Record, Started, Stopped, Transferred, dispatch_records, release_record
from rpeg_core.runtime.window import Window
from rpeg_core.spec.workload import Workload
from rpeg_plugin_simulator.durations import Durations

__all__ = ["Simulation", "StepFinished", "run_window", "simulate"]

StepFinished = Callable[[int, float], None]
"""Called with (step, virtual time in seconds) when a step and all before it are done."""


@attrs.frozen(kw_only=True)
class Simulation:
    """The outcome of a simulated run; times in virtual seconds. A run that was cancelled has fewer steps."""

    steps: int
    makespan_s: float
    nodes: int

    @property
    def step_s(self) -> float:
        """Mean seconds per RL step, start and end of the run included."""
        return self.makespan_s / self.steps


def simulate(
    rpeg: Rpeg,
    assignments: ExecutionPlan,
    workload: Workload,
    seconds_of: Callable[[Node], float],
    *,
    steps: int,
    options: EvaluationOptions | None = None,
    noise: float = 0.0,
    sample_lengths: bool = False,
    seed: int = 0,
    record: Callable[[Record], None] | None = None,
    step_finished: StepFinished | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Simulation:
    """Execute a configuration for ``steps`` RL steps in virtual time.

    Args:
        rpeg, assignments, workload: the configuration.
        seconds_of: seconds of a node, e.g. ``book.node_seconds``; see :class:`Durations`.
        steps: RL steps.
        options: of the prediction; says whether lengths are split.
        noise, sample_lengths, seed: see :class:`Durations`.
        record: gets every record of the trace; memory stays constant without it.
        step_finished: observes the end of steps.
        cancelled: asked before each event; the run stops where it is once it says true.
    """
    options = EvaluationOptions() if options is None else options
    window = Window(rpeg, assignments, workload, split_lengths=options.split_lengths)
    durations = Durations(window, workload, seconds_of, noise=noise, sample_lengths=sample_lengths, seed=seed)
    return run_window(window, durations, steps, record=record, step_finished=step_finished, cancelled=cancelled)


def run_window(
    window: Window,
    durations: Durations,
    steps: int,
    *,
    record: Callable[[Record], None] | None = None,
    step_finished: StepFinished | None = None,
    cancelled: Callable[[], bool] | None = None,
) -> Simulation:
    """Execute ``steps`` steps of a window; nodes that end at one time are reported to the engine together."""
    engine = Engine(window, steps)
    ends: list[tuple[float, int]] = []  # a heap of (time, node)
    now_s, steps_done = 0.0, 0
    instructions = engine.start(now_s)
    while True:
        for instruction in instructions:
            if isinstance(instruction, Dispatch):
                index = instruction.node.index
                heapq.heappush(ends, (now_s + durations.seconds(*window.locate(index)), index))
                if record is not None:
                    for each in dispatch_records(instruction, now_s):
                        record(each)
                    record(Started(now_s, index))
            elif isinstance(instruction, Release):
                if record is not None:
                    record(release_record(instruction, now_s))
            elif instruction.failed:
                raise ExecutionError(instruction.reason, facts=instruction.facts)
        while step_finished is not None and steps_done < engine.steps_done:
            step_finished(steps_done, now_s)
            steps_done += 1
        if engine.stopped:
            return Simulation(steps=steps, makespan_s=now_s, nodes=engine.counters.finished)
        if cancelled is not None and cancelled():
            if record is not None:
                record(Stopped(now_s, "interrupted", engine.steps_done))
            return Simulation(steps=engine.steps_done, makespan_s=now_s, nodes=engine.counters.finished)
        now_s = ends[0][0]
        finished = []
        while ends and ends[0][0] == now_s:
            index = heapq.heappop(ends)[1]
            finished.append(NodeFinished(index, now_s))
            if record is not None:
                _record_end(window, index, now_s, record)
        instructions = engine.handle(*finished)


def _record_end(window: Window, index: int, now_s: float, record: Callable[[Record], None]) -> None:
    step, position = window.locate(index)
    node = window.shape(step).nodes[position]
    if node.source is not None:
        record(Transferred(now_s, index, node.payload_bytes))
    record(Ended(now_s, index))
