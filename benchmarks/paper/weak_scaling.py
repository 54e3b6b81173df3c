"""Weak scaling (paper, VI-B1, figures 6 and 7): 36 cases, gain over the concurrent baseline, utilization.

python benchmarks/paper/weak_scaling.py [--seconds 10] [--costs analytical|paper]
"""

from __future__ import annotations

import argparse
from typing import Any

from studies import Case, each, experiment, solve, weak_scaling_cases

from rpeg_core.cli.ui import print_table


def run(task: tuple[Case, str, float]) -> dict[str, Any]:
    """Both objectives and the baseline of one case."""
    case, costs, seconds = task
    fastest = solve(experiment(case, costs=costs, seconds=seconds))
    busiest = solve(experiment(case, costs=costs, seconds=seconds, objective="throughput_x_utilization"))
    baseline = solve(experiment(case, costs=costs, seconds=seconds), "concurrent")
    return {"case": case, "fastest": fastest, "busiest": busiest, "baseline": baseline}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=10.0, help="search time per case and objective")
    parser.add_argument("--costs", default="analytical", choices=("analytical", "paper"))
    arguments = parser.parse_args()
    results = each(run, [(case, arguments.costs, arguments.seconds) for case in weak_scaling_cases()])
    rows, gains, losses, extra, used = [], [], [], [], []
    for result in results:
        case, fast, busy, base = result["case"], result["fastest"], result["busiest"], result["baseline"]
        row = [
            case.label,
            case.gpus,
            f"{case.actor}/{case.critic}/{case.reward}",
            f"{case.prompts}x{case.response_tokens}",
        ]
        if fast.best is None:
            rows.append([*row, "no plan", "", "", "", "", ""])
            continue
        top = fast.evaluation
        row += [f"{top.tokens_per_s:,.0f}"]
        if base.best is None:
            row += ["out of memory", ""]
        else:
            gains.append(top.tokens_per_s / base.evaluation.tokens_per_s - 1)
            row += [f"{base.evaluation.tokens_per_s:,.0f}", f"{gains[-1]:+.0%}"]
        losses.append(busy.evaluation.tokens_per_s / top.tokens_per_s - 1)
        extra.append(busy.evaluation.utilization - top.utilization)
        used.append(busy.evaluation.utilization)
        row += [f"{top.utilization:.0%}", f"{used[-1]:.0%}", f"{losses[-1]:+.1%}"]
        rows.append(row)
    print_table(
        [
            "sweep",
            "GPUs",
            "A/C/R",
            "BxLr",
            "tok/s",
            "concurrent",
            "gain",
            "util",
            "util (eff.)",
            "loss (eff.)",
        ],
        rows,
    )
    feasible = sum(result["fastest"].best is not None for result in results)
    print_table(
        ["claim", "paper", "here"],
        [
            ["feasible plans", "36 of 36", f"{feasible} of {len(results)}"],
            ["gain over the concurrent baseline", "+5 to +60 %", span(gains)],
            ["throughput of the efficiency objective", "-1 to -3 %", span(losses)],
            ["utilization it adds", "up to +25 points", f"up to {max(extra) * 100:+.0f} points"],
            ["its utilization", "78 to 100 %", span(used, sign="")],
        ],
    )


def span(values: list[float], sign: str = "+") -> str:
    ordered = sorted(values)
    middle = ordered[len(ordered) // 2]
    return f"{ordered[0]:{sign}.0%} to {ordered[-1]:{sign}.0%}, median {middle:{sign}.0%} ({len(values)} cases)"


if __name__ == "__main__":
    main()
