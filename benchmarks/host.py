"""The measured step of plans on this machine beside the predicted one: ``python benchmarks/host.py [--steps 6]``.

GRPO of a tiny llama, its layouts pinned, planned for the hardware profile ``host`` and run by the backend ``megatron``
on 1, 2 and 4 workers. Printed: for each plan the predicted step, the median of the measured steps but the first, their
ratio; the same for the operators of every plan with ``--operators``; and Spearman's rank correlation of both columns.
More workers than cores share them, which the profile does not know; such plans are marked. The times are worth
something on a machine that does nothing else; ``--json FILE`` keeps them.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from rpeg_plugin_megatron import MEGATRON

from rpeg_core import Plan, Registry
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.solve import only_choice
from rpeg_core.report import words
from rpeg_core.report.execution import Execution
from rpeg_core.runtime.session import RunRequest
from rpeg_core.spec.experiment import parse_experiment

Pins = dict[str, dict[str, Any]]


def pin(gpus: str, *, dp: int = 1, pp: int = 1, tp: int = 1, microbatches: int = 1) -> dict[str, Any]:
    return {"gpus": gpus, "dp": dp, "pp": pp, "tp": tp, "microbatches": microbatches}


def everywhere(layout: dict[str, Any]) -> Pins:
    """Every operator in one layout."""
    return {"actor_generation": layout, "reference_inference": layout, "actor_training": layout}


def apart(generation: dict[str, Any], reference: dict[str, Any], training: dict[str, Any]) -> Pins:
    return {"actor_generation": generation, "reference_inference": reference, "actor_training": training}


ONE, DP2, TP2 = pin("0"), pin("0-1", dp=2), pin("0-1", tp=2)
PP2 = pin("0-1", pp=2, microbatches=2)
LOW, HIGH = pin("0"), pin("1")
CASES: dict[str, tuple[int, Pins]] = {
    "one worker": (1, everywhere(ONE)),
    "dp2": (2, everywhere(DP2)),
    "tp2": (2, everywhere(TP2)),
    "pp2, 2 microbatches": (2, everywhere(PP2)),
    "dp2 generates, tp2 trains": (2, apart(DP2, DP2, TP2)),
    "tp2 generates, dp2 trains": (2, apart(TP2, DP2, DP2)),
    "dp2 generates, pp2 trains": (2, apart(DP2, DP2, PP2)),
    "generation and training apart": (2, apart(LOW, LOW, HIGH)),
    "reference on its own worker": (2, apart(LOW, HIGH, LOW)),
    "generation on one, training on both": (2, apart(LOW, HIGH, DP2)),
    "tp2 x dp2": (4, everywhere(pin("0-3", dp=2, tp=2))),
    "halves apart": (4, apart(pin("0-1", dp=2), pin("0-1", dp=2), pin("2-3", dp=2))),
}
"""Name -> workers, pins."""


def experiment(workers: int, pins: Pins) -> dict[str, Any]:
    dimensions = {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 16}
    place = pins["actor_generation"]
    scoring = pin(place["gpus"], dp=place["dp"] * place["pp"] * place["tp"])  # a function is only data parallel
    return {
        "algorithm": "grpo",
        "models": {"actor": {"config": dimensions}, "reference": {"same_as": "actor"}},
        "workload": {
            "prompts": 32,
            "rollouts_per_prompt": 8,
            "prompt_tokens": 4,
            "response_tokens": 4,
            "bytes_per_element": 4,
        },
        "cluster": {"hardware": "host", "gpus_per_node": workers},
        "pin": {**pins, "reward_function": scoring},
        "settings": {"grpo": {"reward_seconds_per_sample": 2e-5}, "megatron": {"task": "copy"}},
    }


def planned(workers: int, pins: Pins, registry: Registry) -> Plan:
    planner = Planner(parse_experiment(experiment(workers, pins)), registry)
    problem = planner.problem()
    solution = only_choice(problem)
    if solution is None:
        raise SystemExit("the pins leave a choice")
    structure = problem.structures[solution.structure]
    return planner.plan(structure, structure.plan(solution.choice), {"strategy": None})


def executed(plan: Plan, steps: int) -> Execution:
    settings = MEGATRON.settings(**plan.experiment.settings["megatron"])
    with MEGATRON.open(plan, settings) as session:
        trace = session.run(RunRequest(steps=steps))
    found = Execution.of(plan, trace)
    if found is None:
        raise SystemExit("no step was completed")
    return found


@attrs.frozen
class Row:
    """One plan; seconds of a step and of each operator, predicted and measured."""

    name: str
    workers: int
    predicted_s: float
    measured_s: float
    operators: dict[str, tuple[float, float]]


def row(name: str, workers: int, pins: Pins, steps: int, registry: Registry) -> Row:
    plan = planned(workers, pins, registry)
    found = executed(plan, steps)
    operators = {
        operator: (sum(plan.prediction.operator_s[operator]), found.operator_s(operator)[0])
        for operator in plan.assignments
    }
    return Row(name, workers, plan.prediction.step_s, found.step_s, operators)


def rank_correlation(rows: list[Row]) -> float:
    """Spearman's, of measured and predicted steps."""
    ranks = [np.argsort(np.argsort([getattr(r, name) for r in rows])) for name in ("predicted_s", "measured_s")]
    return float(np.corrcoef(*ranks)[0, 1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--operators", action="store_true")
    parser.add_argument("--only", help="plans whose name contains this")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    registry = Registry(report=lambda text: print(text, file=sys.stderr))
    cores = registry.get("hardware", "host").record.gpus_per_node
    rows = []
    print("| plan | workers | predicted | measured | measured / predicted |\n|---|---|---|---|---|")
    for name, (workers, pins) in CASES.items():
        if options.only and options.only not in name:
            continue
        rows.append(found := row(name, workers, pins, options.steps, registry))
        shared = " (more than cores)" if workers > cores else ""
        times = f"{words.seconds(found.predicted_s)} | {words.seconds(found.measured_s)}"
        print(f"| {name} | {workers}{shared} | {times} | {words.times(found.measured_s / found.predicted_s)} |")
        sys.stdout.flush()
        if options.operators:
            for operator, (predicted, measured) in found.operators.items():
                print(f"| - {operator} | | {words.seconds(predicted)} | {words.seconds(measured)} | |")
    within = [r for r in rows if r.workers <= cores]
    if len(within) > 2:
        print(f"\nrank correlation of the plans with a core for each worker: {rank_correlation(within):.2f}")
    if options.json is not None:
        options.json.write_text(json.dumps([attrs.asdict(r) for r in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
