"""Nodes per second of engine and simulator, and whether memory grows: ``python benchmarks/engine.py``.

Synthetic PPO with length phases and staleness 1 (30 nodes a step), on 4 and on 2,048 GPUs in the same pattern. Printed:
nodes per second (median of the repetitions), the ratio between the two cluster sizes measured in the same run, and the
growth of allocated memory between 1,000 and 10,000 steps. Targets: 20,000 nodes/s at 2,048 GPUs, no growth.

    --check     exit 1 when a target is missed
    --local     the overhead of a node on the local launcher of the backend megatron instead: GRPO on two processes that
                do no work, so that the time between the ends of two nodes is all overhead. Target: 2 ms.
"""

from __future__ import annotations

import argparse
import gc
import itertools
import statistics
import sys
import tempfile
import time
import tracemalloc
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rpeg_plugin_simulator import Durations, run_window

from rpeg_core.passes.lower import Node
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import SKEWED, on, toy_plan, toy_ppo, toy_workload

if TYPE_CHECKING:
    from rpeg_core.planning.plan import Plan

NODES_PER_S = 20_000
OVERHEAD_S = 0.002
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


class Idle:
    """A worker that does nothing; the processes of the local launcher find it as ``engine:Idle``."""

    uses_torch = False

    def __init__(self, rank: int, world: int, plan: Plan, settings: Any) -> None:
        self.rank, self.bytes = rank, {container.name: container.bytes for container in plan.rpeg.containers}

    def setup(self, store: object) -> str:
        return "idle"

    def execute(self, message: Any) -> Any:
        from rpeg_plugin_megatron.messages import Done

        node = message.node
        first = node.source is not None and self.rank == node.allocation.start
        return Done(rank=self.rank, node=node.index, seconds=0.0, bytes=self.bytes[node.container] if first else 0)

    def drop(self, artifacts: object) -> None:
        pass

    def close(self) -> None:
        pass


def grpo_plan() -> Plan:
    """Generation on one of two GPUs, everything else data parallel on both."""
    from rpeg_core.planning.planner import Planner
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.spec.experiment import parse_experiment

    model = {"layers": 2, "hidden": 32, "heads": 4, "kv_heads": 2, "ffn": 64, "gated_ffn": True, "vocab": 64}
    experiment = parse_experiment(
        {
            "algorithm": "grpo",
            "models": {"actor": {"config": {**model, "tied_embeddings": False}}, "reference": {"same_as": "actor"}},
            "workload": {"prompts": 8, "rollouts_per_prompt": 4, "prompt_tokens": 6, "response_tokens": 6},
            "cluster": {"hardware": "h100", "nodes_per_rack": 1, "gpus_per_node": 2},
            "settings": {"grpo": {"reward_seconds_per_sample": 0.001}},
        }
    )
    planner = Planner(experiment, Registry())
    problem = planner.problem().structures[0]
    operators = [op.name for op in problem.rpeg.operators]
    places = {name: on(0) if name == "actor_generation" else on(0, 2) for name in operators}
    return planner.plan(problem, places, {})


def overheads_s(steps: int) -> list[float]:
    """Seconds between the ends of neighbouring nodes, in a run with all its files."""
    from rpeg_plugin_megatron.session import MegatronSession
    from rpeg_plugin_megatron.settings import Settings

    from rpeg_core.runtime.session import RunRequest
    from rpeg_core.runtime.trace import Ended

    with (
        tempfile.TemporaryDirectory() as folder,
        MegatronSession(grpo_plan(), Settings(export=False), worker="engine:Idle") as session,
    ):
        trace = session.run(RunRequest(steps=steps, output=Path(folder)))
    ends = [record.time_s for record in trace.records if isinstance(record, Ended)]
    return [after - before for before, after in itertools.pairwise(ends)]


def measure_local(steps: int) -> bool:
    """Print the overhead of a node; returns whether the target is met."""
    found = overheads_s(steps)
    mean_s, median_s = statistics.fmean(found), statistics.median(found)
    print(f"{len(found)} nodes on 2 idle processes: mean {1e3 * mean_s:.2f} ms, median {1e3 * median_s:.2f} ms a node")
    return mean_s <= OVERHEAD_S


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--check", action="store_true")
    parser.add_argument("--local", action="store_true")
    args = parser.parse_args()
    if args.local:
        return 0 if measure_local(args.steps) or not args.check else 1
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
