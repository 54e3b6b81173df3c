"""Does staleness change what is learned: ``python benchmarks/learning.py [--seeds 5] [--steps 800] [--json FILE]``.

The experiment of ``examples/grpo-copy-digits.yaml`` on one worker: what a run learns does not depend on where it runs,
only on which version generates. Staleness 0, 1 and 2 with the plain objective, and 1 and 2 with the decoupled one, each
for all seeds. Printed: the mean reward of the last tenth of the steps, its mean over the seeds and their standard
deviation, and how far that mean is from the synchronous one. The claim to check: tau = 1 is within 2 %.

With the example's own KL coefficient, 0.001, runs of some seeds give one of the ten digits up for good, synchronous
ones too, and end at 0.9 instead of 1: seeds differ by more than what is to be seen. A larger coefficient keeps every
digit alive.

``--only "tau 1"`` runs those whose name contains this, ``--quick`` one seed of 20 steps.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

from rpeg_plugin_megatron import MEGATRON

from rpeg_core import Plan, Registry
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.solve import only_choice
from rpeg_core.runtime.session import RunRequest
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.sections import read_yaml

EXAMPLE = Path(__file__).parents[1] / "examples" / "grpo-copy-digits.yaml"
CASES: dict[str, tuple[int, str]] = {
    "tau 0": (0, "plain"),
    "tau 1": (1, "plain"),
    "tau 2": (2, "plain"),
    "tau 1, decoupled": (1, "decoupled"),
    "tau 2, decoupled": (2, "decoupled"),
}
"""Name -> staleness, objective."""

KL_COEFFICIENT = 0.03

PLACE = {"gpus": "0", "dp": 1, "pp": 1, "tp": 1, "microbatches": 1}


def planned(registry: Registry, tau: int, objective: str) -> Plan:
    """All operators on one worker."""
    document: dict[str, Any] = dict(read_yaml(EXAMPLE))
    names = ("actor_generation", "reference_inference", "reward_function", "actor_training")
    document["cluster"] = {**document["cluster"], "gpus_per_node": 1}
    document["pin"] = dict.fromkeys(names, PLACE)
    document["structure"] = {"staleness": [tau]}
    document["settings"] = {
        **document["settings"],
        "grpo": {**document["settings"]["grpo"], "objective": objective, "kl_coefficient": KL_COEFFICIENT},
    }
    planner = Planner(parse_experiment(document, base_dir=EXAMPLE.parent), registry)
    problem = planner.problem()
    structure = problem.structures[only_choice(problem).structure]
    return planner.plan(structure, structure.plan((0,) * len(structure.candidates)), {"strategy": None})


def rewards(plan: Plan, seed: int, steps: int) -> list[float]:
    """The mean reward of every step."""
    found: dict[int, float] = {}
    settings = MEGATRON.settings(**{**plan.experiment.settings["megatron"], "seed": seed, "export": False})
    with MEGATRON.open(plan, settings) as session:
        session.run(
            RunRequest(
                steps=steps,
                step_finished=lambda step, metrics: found.__setitem__(step, metrics["actor_training/reward"]),
            )
        )
    return [found[step] for step in range(steps)]


def final(curve: list[float]) -> float:
    """The mean reward of the last tenth of the steps."""
    return statistics.fmean(curve[-max(1, len(curve) // 10) :])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--steps", type=int, default=800)
    parser.add_argument("--only", help="cases whose name contains this")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    seeds, steps = (1, 20) if options.quick else (options.seeds, options.steps)
    registry = Registry(report=lambda text: print(text, file=sys.stderr))
    curves: dict[str, list[list[float]]] = {}
    base = None
    print(f"| {steps} steps, {seeds} seeds | first reward | final reward | against tau 0 |\n|---|---|---|---|")
    for name, (tau, objective) in CASES.items():
        if options.only and options.only not in name:
            continue
        plan = planned(registry, tau, objective)
        curves[name] = []
        for seed in range(seeds):
            curves[name].append(rewards(plan, seed, steps))
            print(f"{name}, seed {seed}: {final(curves[name][-1]):.4f}", file=sys.stderr)
        ends = [final(curve) for curve in curves[name]]
        mean = statistics.fmean(ends)
        base = mean if tau == 0 else base
        spread = f" ± {statistics.stdev(ends):.4f}" if len(ends) > 1 else ""
        against = "" if base is None else f"{100 * (mean / base - 1):+.2f} %"
        begun = statistics.fmean(curve[0] for curve in curves[name])
        print(f"| {name} | {begun:.4f} | {mean:.4f}{spread} | {against} |", flush=True)
    if options.json is not None:
        options.json.write_text(json.dumps({"steps": steps, "rewards": curves}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
