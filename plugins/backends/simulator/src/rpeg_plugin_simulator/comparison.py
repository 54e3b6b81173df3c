"""Why a simulated step takes longer or shorter than the predicted one: one cause added after the other.

The prediction is a greedy schedule by priority of ``options.steps`` steps, in which a transfer holds its destination
only (unless told otherwise). The engine holds a transfer's source too, goes by its own order, runs as many steps as it
is asked to, and takes noise and sampled lengths if they are on.
"""

from __future__ import annotations

from collections.abc import Callable

import attrs

from rpeg_core.ir import Rpeg
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.lower import Node, lower
from rpeg_core.passes.schedule import schedule
from rpeg_core.passes.unroll import unroll
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.workload import Workload
from rpeg_plugin_simulator.simulation import Simulation, simulate

__all__ = ["Cause", "causes"]


@attrs.frozen
class Cause:
    """``step_s`` is the mean seconds of a step with this and all earlier causes at work."""

    name: str
    step_s: float


def causes(
    rpeg: Rpeg,
    assignments: ExecutionPlan,
    workload: Workload,
    machine: DeviceSpace,
    seconds_of: Callable[[Node], float],
    options: EvaluationOptions,
    simulated: Simulation,
    predicted_step_s: float,
) -> tuple[Cause, ...]:
    """From the predicted to the simulated step time.

    Args:
        rpeg, assignments, workload, machine, seconds_of, options: what was simulated.
        simulated: the outcome.
        predicted_step_s: what the plan says.
    """
    graph = lower(unroll(rpeg, options.steps), assignments, workload, split_lengths=options.split_lengths)
    seconds = [seconds_of(node) for node in graph.nodes]

    def greedy(reserve_source: bool) -> float:
        return schedule(graph, seconds, machine.gpus, reserve_source=reserve_source).makespan_s / options.steps

    def engine(steps: int) -> float:
        return simulate(rpeg, assignments, workload, seconds_of, steps=steps, options=options).step_s

    return (
        Cause("predicted", predicted_step_s),
        Cause("plugins that changed since the plan was made", greedy(options.reserve_source)),
        Cause("transfers hold their source GPUs", greedy(True)),
        Cause("order of the engine", engine(options.steps)),
        Cause(f"{simulated.steps} instead of {options.steps} steps", engine(simulated.steps)),
        Cause("noise and sampled lengths", simulated.step_s),
    )
