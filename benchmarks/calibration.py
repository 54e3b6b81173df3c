"""Predictions of a calibrated profile against runs on this machine: ``python benchmarks/calibration.py PROFILE``.

PROFILE is a file of ``rpeg calibrate``. GRPO of three sizes of llama, 40 thousand to 4 million parameters, its layouts
pinned, planned with the profile and run by the backend ``megatron`` on one and two workers: 15 whole plans, and in each
of them generation, inference and training as operators of their own, 45 configurations. Neither sizes nor workloads are
those that ``rpeg calibrate`` measures. Printed: every operator and plan with predicted time and 90 % interval,
measured time (the median of the steps but the first) and error, MAPE, signed bias, Spearman's rank correlation, and how
many times lie in their intervals. ``--picture FILE`` draws them, ``--keep DIR`` keeps the runs for ``rpeg calibrate
--from-trace``, ``--json FILE`` the rows. The times are worth something on a machine that does nothing else.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import attrs
import numpy as np
from rpeg_plugin_megatron import MEGATRON

from rpeg_core import Plan, Registry
from rpeg_core.accuracy.draws import CONFIDENCE, Interval
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.solve import only_choice
from rpeg_core.report import intervals, words
from rpeg_core.report.execution import Execution
from rpeg_core.runtime.session import PLAN_FILE, RunRequest
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.validation.replay import spearman

Layout = dict[str, Any]

MOST_MAPE, LEAST_SPEARMAN = 0.20, 0.95


def pin(gpus: str, *, dp: int = 1, pp: int = 1, tp: int = 1, microbatches: int = 1) -> Layout:
    return {"gpus": gpus, "dp": dp, "pp": pp, "tp": tp, "microbatches": microbatches}


ONE, DP2, TP2 = pin("0"), pin("0-1", dp=2), pin("0-1", tp=2)
PP2 = pin("0-1", pp=2, microbatches=2)
HIGH = pin("1")

SIZES: dict[str, tuple[dict[str, Any], dict[str, int]]] = {
    "small": (
        {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 16},
        {"prompts": 32, "rollouts_per_prompt": 8, "prompt_tokens": 4, "response_tokens": 4},
    ),
    "medium": (
        {"layers": 4, "hidden": 96, "heads": 4, "kv_heads": 2, "ffn": 256, "vocab": 512},
        {"prompts": 16, "rollouts_per_prompt": 4, "prompt_tokens": 16, "response_tokens": 16},
    ),
    "large": (
        {"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 768, "vocab": 768},
        {"prompts": 8, "rollouts_per_prompt": 4, "prompt_tokens": 32, "response_tokens": 32},
    ),
}
"""Name -> dimensions of the models, workload."""

PLANS: dict[str, tuple[int, tuple[Layout, Layout, Layout]]] = {
    "one worker": (1, (ONE, ONE, ONE)),
    "dp2": (2, (DP2, DP2, DP2)),
    "tp2": (2, (TP2, TP2, TP2)),
    "pp2, 2 microbatches": (2, (PP2, PP2, PP2)),
}
"""Name -> workers; layouts of generation, inference, training."""

MIXED: dict[str, tuple[int, tuple[Layout, Layout, Layout]]] = {
    "generation and training apart": (2, (ONE, ONE, HIGH)),
    "generation on one, training on both": (2, (ONE, HIGH, DP2)),
    "dp2 generates, tp2 trains": (2, (DP2, DP2, TP2)),
}


@attrs.frozen(kw_only=True)
class Row:
    """One operator or whole plan; ``interval`` is None where the profile does not say how sure it is."""

    kind: str
    name: str
    predicted_s: float
    measured_s: float
    interval: Interval | None

    @property
    def error(self) -> float:
        return self.predicted_s / self.measured_s - 1.0


def planned(profile: Path, size: str, workers: int, layouts: tuple[Layout, Layout, Layout], registry: Registry) -> Plan:
    dimensions, workload = SIZES[size]
    operators = ("actor_generation", "reference_inference", "actor_training")
    place = layouts[0]
    scoring = pin(place["gpus"], dp=place["dp"] * place["pp"] * place["tp"])  # a function is only data parallel
    document = {
        "algorithm": "grpo",
        "models": {"actor": {"config": dimensions}, "reference": {"same_as": "actor"}},
        "workload": {**workload, "bytes_per_element": 4},
        "cluster": {"hardware": str(profile.resolve()), "gpus_per_node": workers},
        "pin": {**dict(zip(operators, layouts, strict=True)), "reward_function": scoring},
        "settings": {"grpo": {"reward_seconds_per_sample": 2e-5}, "megatron": {"task": "copy", "export": False}},
    }
    planner = Planner(parse_experiment(document), registry)
    problem = planner.problem()
    solution = only_choice(problem)
    if solution is None:
        raise SystemExit("the pins leave a choice")
    structure = problem.structures[solution.structure]
    return planner.plan(structure, structure.plan(solution.choice), {"strategy": None})


def executed(plan: Plan, steps: int, folder: Path) -> Execution:
    settings = MEGATRON.settings(**plan.experiment.settings["megatron"])
    folder.mkdir(parents=True)
    plan.save(folder / PLAN_FILE)
    with MEGATRON.open(plan, settings) as session:
        trace = session.run(RunRequest(steps=steps, output=folder))
    found = Execution.of(plan, trace)
    if found is None:
        raise SystemExit("no step was completed")
    return found


def rows_of(name: str, found: Execution) -> list[Row]:
    plan = found.plan
    sure = {} if plan.intervals is None else plan.intervals.operator_s
    rows = [
        Row(
            kind=plan.rpeg.operator(operator).role.value,
            name=f"{operator.partition('_')[2]} of {name}",
            predicted_s=sum(plan.prediction.operator_s[operator]),
            measured_s=found.operator_s(operator)[0],
            interval=sure.get(operator),
        )
        for operator in plan.assignments
        if plan.rpeg.model_of(operator) is not None
    ]
    step = plan.intervals and plan.intervals.step_s
    whole = Row(kind="plan", name=name, predicted_s=plan.prediction.step_s, measured_s=found.step_s, interval=step)
    return [*rows, whole]


def errors(rows: list[Row]) -> tuple[float, float, float]:
    """MAPE, signed bias, Spearman."""
    relative = np.array([row.error for row in rows])
    rank = spearman([row.predicted_s for row in rows], [row.measured_s for row in rows])
    return float(np.mean(np.abs(relative))), float(np.mean(relative)), rank


def draw(rows: list[Row], path: Path) -> None:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.2, 4.4), layout="constrained")
    panels = figure.subplots(1, 2)
    for axes, title in zip(panels, ("operators", "plans"), strict=True):
        members = [row for row in rows if (row.kind == "plan") == (title == "plans")]
        for kind in sorted({row.kind for row in members}):
            own = [row for row in members if row.kind == kind]
            axes.plot([r.measured_s for r in own], [r.predicted_s for r in own], ".", markersize=7, label=kind)
        values = [value for row in members for value in (row.measured_s, row.predicted_s)]
        ends = [min(values) / 1.2, max(values) * 1.2]
        axes.plot(ends, ends, "-", color="#888888", linewidth=1)
        axes.fill_between(ends, [v * 0.8 for v in ends], [v * 1.2 for v in ends], color="#888888", alpha=0.15)
        axes.set(xscale="log", yscale="log", xlabel="measured [s]", ylabel="predicted [s]", title=title)
        axes.legend(frameon=False, fontsize=8)
    figure.savefig(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("profile", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--only", help="plans whose name contains this")
    parser.add_argument("--picture", type=Path)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--keep", type=Path, help="a folder that does not exist, for the runs")
    options = parser.parse_args()
    registry = Registry(report=lambda text: print(text, file=sys.stderr))
    rows: list[Row] = []
    print(f"load average {os.getloadavg()[0]:.1f}\n\n| what | predicted | measured | error |\n|---|---|---|---|")
    with tempfile.TemporaryDirectory() as scratch:
        folder = options.keep or Path(scratch) / "runs"
        cases = [(size, plan, PLANS[plan]) for size in SIZES for plan in PLANS]
        cases += [("medium", plan, case) for plan, case in MIXED.items()]
        for size, plan_name, (workers, layouts) in cases:
            name = f"{size}, {plan_name}"
            if options.only and options.only not in name:
                continue
            plan = planned(options.profile, size, workers, layouts, registry)
            where = folder / name.replace(",", "").replace(" ", "-")
            for row in rows_of(name, executed(plan, options.steps, where)):
                rows.append(row)
                times = f"{intervals.seconds(row.predicted_s, row.interval)} | {words.seconds(row.measured_s)}"
                print(f"| {row.name} | {times} | {row.error:+.1%} |", flush=True)
    for title in ("operators", "plans"):
        members = [row for row in rows if (row.kind == "plan") == (title == "plans")]
        mape, bias, rank = errors(members)
        met = "" if options.only else f"; at most {MOST_MAPE:.0%} and at least {LEAST_SPEARMAN} are wanted"
        print(f"\n{len(members)} {title}: MAPE {mape:.1%}, bias {bias:+.1%}, Spearman {rank:.3f}{met}")
        held = [row.interval.holds(row.measured_s) for row in members if row.interval is not None]
        print(f"{sum(held)} of {len(held)} measured times lie in their {words.percent(CONFIDENCE)} interval")
    print(f"load average {os.getloadavg()[0]:.1f}")
    if options.picture is not None:
        draw(rows, options.picture)
    if options.json is not None:
        options.json.write_text(json.dumps([attrs.asdict(row) for row in rows], indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
