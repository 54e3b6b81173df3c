"""Convergence (paper, VI-B and appendix B): 7B on 256, 13B on 512, 34B on 1024 and 70B on 2048 GPUs.

python benchmarks/paper/convergence.py [--seconds 60] [--seeds 2] [--full] [--costs paper|analytical]

How good the best plan is after 5, 10, 30, 60 (with --full 300, 3600) seconds, as a share of the best that any run of
the case found. The paper prints neither the batch nor the lengths: those of its stability study are taken, 128/384.
"""

from __future__ import annotations

import argparse
from typing import Any

from studies import Case, each, experiment, solve

from rpeg_core.cli.ui import print_table
from rpeg_core.planning.search import SearchResult

WORKLOADS = {
    (7, 256): ((4, 16), 1024),
    (13, 512): ((8, 16), 2048),
    (34, 1024): ((16, 16), 2048),
    (70, 2048): ((32, 16), 2048),
}
"""Size and GPUs -> racks and nodes, B."""

MOMENTS = (5, 10, 30, 60, 300, 3600)
FULL_SECONDS = 3600.0
CLAIM = 0.95


def run(task: tuple[int, int, int, float, str]) -> SearchResult:
    size, gpus, seed, seconds, costs = task
    racks_nodes, prompts = WORKLOADS[size, gpus]
    case = Case(
        label="convergence",
        gpus=gpus,
        actor=size,
        critic=size,
        reward=size,
        prompts=prompts,
        prompt_tokens=128,
        response_tokens=384,
        racks_nodes=racks_nodes,
    )
    return solve(experiment(case, costs=costs, seconds=seconds, seed=seed))


def reached(result: SearchResult, seconds: float) -> float:
    """Tokens/s of the best plan after so many seconds."""
    return max((i.tokens_per_s for i in result.improvements if i.seconds <= seconds), default=0.0)


def when(results: list[SearchResult], value: float) -> str:
    """Seconds after which the slowest run had a plan of at least ``value`` tokens/s."""
    times = [min((i.seconds for i in r.improvements if i.tokens_per_s >= value), default=None) for r in results]
    return "not by all" if None in times else f"{max(times):.1f} s"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=60.0, help="of each run")
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--full", action="store_true", help="an hour per run, as in the paper")
    parser.add_argument("--costs", default="paper", choices=("paper", "analytical"))
    arguments = parser.parse_args()
    seconds = FULL_SECONDS if arguments.full else arguments.seconds
    tasks = [(*case, seed, seconds, arguments.costs) for case in WORKLOADS for seed in range(arguments.seeds)]
    results = each(run, tasks)
    moments = [moment for moment in MOMENTS if moment <= seconds]
    rows: list[list[Any]] = []
    claimed = []
    for index, (size, gpus) in enumerate(WORKLOADS):
        runs = results[index * arguments.seeds : (index + 1) * arguments.seeds]
        best = max(reached(run, float("inf")) for run in runs)
        if best == 0:
            rows.append([f"{size}B", gpus, "no plan", *("" for _ in moments), "", "", ""])
            continue
        shares = [min(reached(run, moment) for run in runs) / best for moment in moments]
        claimed.append(min(reached(run, 300.0) for run in runs) / best)
        evaluations = sum(run.evaluations for run in runs) / sum(run.seconds for run in runs)
        rows.append(
            [
                f"{size}B",
                gpus,
                f"{best:,.0f}",
                *(f"{share:.1%}" for share in shares),
                when(runs, CLAIM * best),
                when(runs, 0.99 * best),
                f"{evaluations:,.0f}",
            ]
        )
    heads = [f"after {moment} s" for moment in moments]
    print_table(["models", "GPUs", "best tok/s", *heads, "within 5 %", "within 1 %", "evaluations/s"], rows)
    print_table(
        ["claim", "paper", "here, the worst run"],
        [
            [
                "best plan within 300 s, of the longest run's",
                "at least 95 % of an hour's",
                f"{min(claimed, default=0.0):.1%} after {min(seconds, 300):.0f} s, of the best in {seconds:.0f} s",
            ]
        ],
    )


if __name__ == "__main__":
    main()
