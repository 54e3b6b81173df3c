"""Nodes per second of engine and simulator, and whether memory grows: ``python benchmarks/engine.py``.

Synthetic PPO with length phases and staleness 1 (30 nodes a step), on 4 and on 2,048 GPUs in the same pattern. Printed:
nodes per second (median of the repetitions), the ratio between the two cluster sizes measured in the same run, and the
growth of allocated memory between 1,000 and 10,000 steps. Targets: 20,000 nodes/s at 2,048 GPUs, no growth.

    --check     exit 1 when a target is missed
"""

from __future__ import annotations

import argparse
import gc
import statistics
import sys
import time
import tracemalloc

from rpeg_plugin_simulator import Durations, run_window

from rpeg_core.passes.lower import Node
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import SKEWED, on, toy_plan, toy_ppo, toy_workload

NODES_PER_S = 20_000
GROWTH_BYTES = 64 * 1024


def plan(gpus: int) -> ExecutionPlan:
    """Generation and actor training on one half, the rest on parts of the other."""
    half, part = gpus // 2, gpus // 4
    return toy_plan(
        actor_generation=on(0, half),
        reference_inference=on(half, half + part),
        reward_inference=on(half + part, gpus),
        critic_inference=on(half, half + part),
        actor_training=on(0, half),
        critic_training=on(half, gpus),
    )


def window(gpus: int) -> Window:
    return Window(toy_ppo(tau=1), plan(gpus), toy_workload(response_lengths=SKEWED))


def durations(graph: Window, noise: float) -> Durations:
    def seconds_of(node: Node) -> float:
        return 0.01 if node.source is not None else 1.0 + 0.1 * (node.index % 7)

    return Durations(graph, toy_workload(response_lengths=SKEWED), seconds_of, noise=noise)


def nodes_per_s(gpus: int, steps: int, repeat: int, noise: float) -> float:
    found = []
    for _ in range(repeat):
        graph = window(gpus)
        drawn = durations(graph, noise)
        begin = time.perf_counter()
        nodes = run_window(graph, drawn, steps).nodes
        found.append(nodes / (time.perf_counter() - begin))
    return statistics.median(found)


def growth_bytes(gpus: int, steps: int) -> tuple[int, int]:
    """(allocated bytes after a tenth of the steps, growth until the end)."""
    marks: list[int] = []

    def step_finished(step: int, time_s: float) -> None:
        if step + 1 in (steps // 10, steps - 1):
            gc.collect()
            marks.append(tracemalloc.get_traced_memory()[0])

    graph = window(gpus)
    tracemalloc.start()
    run_window(graph, durations(graph, 0.1), steps, step_finished=step_finished)
    tracemalloc.stop()
    return marks[0], marks[1] - marks[0]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    print("GPUs\tnoise\tnodes/s")
    speeds = {}
    for gpus in (4, 2048):
        for noise in (0.0, 0.1):
            speeds[gpus, noise] = nodes_per_s(gpus, args.steps, args.repeat, noise)
            print(f"{gpus}\t{noise}\t{speeds[gpus, noise]:,.0f}")
    print(f"2,048 GPUs / 4 GPUs: {speeds[2048, 0.1] / speeds[4, 0.1]:.2f} of the speed")
    before, growth = growth_bytes(2048, 10_000)
    print(f"memory after 1,000 steps {before:,} bytes, from there to 10,000 steps {growth:+,} bytes")
    missed = min(speeds[2048, 0.0], speeds[2048, 0.1]) < NODES_PER_S or growth > GROWTH_BYTES
    return 1 if args.check and missed else 0


if __name__ == "__main__":
    sys.exit(main())
