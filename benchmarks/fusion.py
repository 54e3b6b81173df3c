"""Actor and critic trained in one invocation against one after the other: ``python benchmarks/fusion.py``.

PPO of a small llama on two workers of this machine, every operator on both, pp2, planned for the hardware profile
``--hardware`` (``host``, or a file of ``rpeg calibrate``) and run by the backend ``megatron``, with 2 and with 4
microbatches. Printed: predicted and measured seconds of the trainings of a step, fused and unfused, and what fusing
them gains: medians of ``--repetitions`` sessions, fused and unfused in turn, of which each runs a step before the
measured one, and of their ratios turn by turn. The paper's 8B test gains 1.07 x. The times are worth something on a
machine that does nothing else; the load average is printed. ``--json FILE`` keeps all times.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
from pathlib import Path
from typing import Any

from rpeg_plugin_megatron import MEGATRON

from rpeg_core import Plan, Registry
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.solve import only_choice
from rpeg_core.report import words
from rpeg_core.runtime.session import RunRequest
from rpeg_core.spec.experiment import parse_experiment

DIMENSIONS = {"layers": 4, "hidden": 384, "heads": 6, "kv_heads": 6, "ffn": 1024, "vocab": 64}
SERVING = ("actor_generation", "reference_inference", "reward_inference", "critic_inference")
UNFUSED, FUSED = ("actor_training", "critic_training"), ("fused_training",)
MICROBATCHES = (2, 4)


def experiment(trainings: tuple[str, ...], microbatches: int, hardware: str) -> dict[str, Any]:
    layout = {"gpus": "0-1", "dp": 1, "pp": 2, "tp": 1, "microbatches": microbatches}
    return {
        "algorithm": "ppo",
        "models": {
            "actor": {"config": DIMENSIONS},
            "critic": {"same_as": "actor", "head": "scalar"},
            "reward": {"same_as": "actor", "head": "scalar"},
            "reference": {"same_as": "actor"},
        },
        "workload": {
            "prompts": 32,
            "rollouts_per_prompt": 1,
            "prompt_tokens": 32,
            "response_tokens": 16,
            "bytes_per_element": 4,
        },
        "cluster": {"hardware": hardware, "gpus_per_node": 2},
        "structure": {"fusion": trainings == FUSED},
        "pin": dict.fromkeys((*SERVING, *trainings), layout),
        "settings": {"megatron": {"task": "copy"}},
    }


def planned(trainings: tuple[str, ...], microbatches: int, hardware: str, registry: Registry) -> Plan:
    planner = Planner(parse_experiment(experiment(trainings, microbatches, hardware)), registry)
    problem = planner.problem()
    solution = only_choice(problem)
    if solution is None:
        raise SystemExit("the pins leave a choice")
    structure = problem.structures[solution.structure]
    return planner.plan(structure, structure.plan(solution.choice), {"strategy": None})


def measured_s(plan: Plan, trainings: tuple[str, ...]) -> float:
    """Seconds of the trainings of the second step of a session."""
    settings = MEGATRON.settings(**plan.experiment.settings["megatron"])
    with MEGATRON.open(plan, settings) as session:
        trace = session.run(RunRequest(steps=2))
    spans = [end - start for node, start, end in trace.intervals() if node.operator in trainings and node.step == 1]
    return sum(spans)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--microbatches", type=int, nargs="*", default=MICROBATCHES)
    parser.add_argument("--hardware", default="host", help="profile to predict with, e.g. a file of rpeg calibrate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    registry = Registry(report=lambda text: print(text, file=sys.stderr))
    print(f"load average {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores")
    print("| microbatches | | unfused | fused | unfused / fused |\n|---|---|---|---|---|")
    kept = []
    for microbatches in options.microbatches:
        plans = {t: planned(t, microbatches, options.hardware, registry) for t in (UNFUSED, FUSED)}
        predicted = {t: sum(sum(plan.prediction.operator_s[name]) for name in t) for t, plan in plans.items()}
        times: dict[tuple[str, ...], list[float]] = {UNFUSED: [], FUSED: []}
        for _ in range(options.repetitions):
            for trainings, plan in plans.items():
                times[trainings].append(measured_s(plan, trainings))
        medians = {trainings: statistics.median(found) for trainings, found in times.items()}
        ratios = sorted(apart / fused for apart, fused in zip(times[UNFUSED], times[FUSED], strict=True))
        spread = f"{words.times(statistics.median(ratios))} ({words.times(ratios[0])} to {words.times(ratios[-1])})"
        gains = {"predicted": words.times(predicted[UNFUSED] / predicted[FUSED]), "measured": spread}
        for what, found in (("predicted", predicted), ("measured", medians)):
            both = f"{words.seconds(found[UNFUSED])} | {words.seconds(found[FUSED])}"
            print(f"| {microbatches} | {what} | {both} | {gains[what]} |", flush=True)
        kept.append(
            {
                "microbatches": microbatches,
                "predicted_s": list(predicted.values()),
                "measured_s": [times[UNFUSED], times[FUSED]],
            }
        )
    print(f"load average {os.getloadavg()[0]:.1f}")
    if options.json is not None:
        options.json.write_text(json.dumps(kept, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
