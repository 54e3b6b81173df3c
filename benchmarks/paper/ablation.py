"""Ablation A1-A9 (paper, VI-B3, tables IV and XI): four scenarios, one mechanism off at a time, five seeds.

python benchmarks/paper/ablation.py [--seconds 4] [--seeds 5] [--full] [--costs paper|analytical] [--set NAME=VALUE]
    [--evaluations N]

The full system may choose staleness 0 or 1 of each model; A2 leaves 0. Beside the mean change over the seeds it prints
what does not depend on the search: between which values the change of the best possible plan lies, from what was found
and from the certified bounds, and what the best plan loses when the mechanism is taken from it without replanning.
"""

from __future__ import annotations

import argparse
import statistics
from typing import Any

import attrs
import numpy as np
from studies import Case, each, experiment, solve

from rpeg_core.cli.ui import print_table, print_text
from rpeg_core.planning.bounds import problem_bound
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import Problem, StructureProblem
from rpeg_core.planning.search import Solution
from rpeg_core.planning.solve import predict
from rpeg_core.plugins.registry import Registry
from rpeg_core.report.tables import split_operators

SCENARIOS = {
    "MEM-TIGHT": ((1, 4), 50, (13, 13, 13), 128, (128, 896)),
    "HETERO": ((1, 8), 102, (34, 7, 7), 512, (128, 128)),
    "DEEP": ((2, 8), 102, (7, 70, 70), 512, (128, 128)),
    "WIDE": ((1, 32), 102, (7, 7, 7), 1024, (128, 384)),
}
"""Racks and nodes, GB, A/C/R, B, Lp and Lr (paper, table XI)."""

FULL_SYSTEM: dict[str, Any] = {"staleness": (0, 1)}
CHAINS_ONLY: dict[str, Any] = {"proof_share": 0.0}
"""The paper has no branch and bound, which would find the same plan whatever is taken from the chains."""

SWITCHES: dict[str, tuple[str, dict[str, Any]]] = {
    "full": ("full system", {}),
    "A1": ("length splitting", {"split_lengths": False}),
    "A2": ("asynchrony", {"staleness": (0,)}),
    "A1+A2": ("both", {"split_lengths": False, "staleness": (0,)}),
    "A3": ("microbatch tuning", {"annealing": {"microbatch_tuning": False}}),
    "A4": ("pair moves", {"annealing": {"pair_moves": False}}),
    "A5": ("warm restarts", {"annealing": {"warm_restarts": False}}),
    "A6": ("critical-path selection", {"annealing": {"critical_path_selection": False}}),
    "A7": ("polish", {"annealing": {"polish": False}}),
    "A8": ("soft memory penalty", {"annealing": {"soft_memory_penalty": False}}),
    "A9": ("constant temperature", {"annealing": {"cooling": "geometric"}}),
}

PAPER = {
    "A1": {"MEM-TIGHT": -12.8, "HETERO": -13.2, "DEEP": -1.5},
    "A2": {"MEM-TIGHT": -18.8, "HETERO": -24.3, "DEEP": -5.2},
    "A3": {"MEM-TIGHT": 2.1, "HETERO": 2.4, "DEEP": -17.5},
    "A7": {"MEM-TIGHT": 0.0, "HETERO": -1.5, "DEEP": -5.2},
    "A9": {"MEM-TIGHT": 0.0, "HETERO": -7.5, "DEEP": -0.9},
}
"""Change in per cent (paper, table IV); WIDE is not printed there, A4, A5, A6 and A8 are below 1 % on average."""

PRINTED = ("MEM-TIGHT", "HETERO", "DEEP")
SPACE = ("A1", "A2", "A3")
"""Switches that change the search space; the others change the search only."""

FULL_SECONDS = 60.0


@attrs.frozen(kw_only=True)
class Setting:
    """What all runs share."""

    seconds: float
    evaluations: int | None
    costs: str
    annealing: dict[str, Any]


def chosen(scenario: str, switch: str, setting: Setting, seed: int = 0) -> Any:
    (racks, nodes), memory_gb, (actor, critic, reward), prompts, (prompt, response) = SCENARIOS[scenario]
    case = Case(
        label=scenario,
        gpus=racks * nodes * 4,
        actor=actor,
        critic=critic,
        reward=reward,
        prompts=prompts,
        prompt_tokens=prompt,
        response_tokens=response,
        memory_gb=memory_gb,
        racks_nodes=(racks, nodes),
    )
    options = {**FULL_SYSTEM, **SWITCHES[switch][1]}
    annealing = {**CHAINS_ONLY, **setting.annealing, **options.pop("annealing", {})}
    return experiment(
        case,
        costs=setting.costs,
        seconds=setting.seconds,
        evaluations=setting.evaluations,
        seed=seed,
        settings={"annealing": annealing},
        **options,
    )


def search(task: tuple[str, str, int, Setting]) -> tuple[float, Solution | None]:
    scenario, switch, seed, setting = task
    result = solve(chosen(scenario, switch, setting, seed))
    return (result.evaluation.tokens_per_s if result.best else 0.0), result.best


@attrs.frozen(kw_only=True)
class Facts:
    """What holds whatever the search does: the best plan, its tokens/s without each mechanism, bounds."""

    structure: str
    pipelines: tuple[str, ...]
    split: tuple[str, ...]
    tuned: tuple[str, ...]
    limit: str
    without: dict[str, float | None]
    bounds: dict[str, float]


def facts(task: tuple[str, Solution, dict[str, float], Setting]) -> Facts:
    scenario, solution, reached, setting = task
    problems = {name: problem_of(scenario, name, setting) for name in ("full", *SPACE)}
    structure = problems["full"].structures[solution.structure]
    plan, prediction = structure.plan(solution.choice), predict(problems["full"], solution)
    bounds = {name: problem_bound(p, known_tokens_per_s=reached[name]) for name, p in problems.items()}
    return Facts(
        structure=str(structure.structure),
        pipelines=tuple(f"{name} pp={a.layout.pipeline} mb={a.microbatches}" for name, a in plan.items() if deep(a)),
        split=tuple(sorted(split_operators(prediction))),
        tuned=tuple(name for name, a in plan.items() if a.microbatches != fixed_microbatches(name, a.layout.pipeline)),
        limit=bounds["full"].reason,
        without={name: value(problems[name], structure, plan) for name in SPACE},
        bounds={name: bound.tokens_per_s for name, bound in bounds.items()},
    )


def deep(assignment: Any) -> bool:
    return assignment.layout.pipeline > 1


def fixed_microbatches(operator: str, pipeline: int) -> int:
    return pipeline * (2 if operator.endswith("_training") and pipeline > 1 else 1)


def problem_of(scenario: str, switch: str, setting: Setting) -> Problem:
    """The search space with a mechanism off; A3 is cut here as the strategy does."""
    problem = Planner(chosen(scenario, switch, setting), Registry()).problem()
    if switch != "A3":
        return problem
    structures = []
    for structure in problem.structures:
        kept = []
        for candidates in structure.candidates:
            rows = candidates.layouts
            pipeline, microbatches = rows.pipeline[candidates.layout], rows.microbatches[candidates.layout]
            factor = np.where(pipeline > 1, 2 if candidates.operator.endswith("_training") else 1, 1)
            kept.append(candidates.take(np.flatnonzero(microbatches == pipeline * factor)))
        structures.append(attrs.evolve(structure, candidates=tuple(kept)))
    return attrs.evolve(problem, structures=tuple(structures))


def value(problem: Problem, full: StructureProblem, plan: Any) -> float | None:
    """Tokens/s of the same placement where a mechanism is off, None where it does not exist or does not fit."""
    structures = [s for s in problem.structures if s.structure == full.structure] or problem.structures[:1]
    choice = []
    for candidates in structures[0].candidates:
        assignment = plan[candidates.operator]
        index = candidates.find(assignment)
        if index is None:
            fixed = fixed_microbatches(candidates.operator, assignment.layout.pipeline)
            index = candidates.find(attrs.evolve(assignment, microbatches=fixed))
        if index is None:
            return None
        choice.append(index)
    evaluation = structures[0].predict(structures[0].plan(choice)).evaluation
    return evaluation.tokens_per_s if evaluation.feasible else None


def percent(ratio: float | None, digits: int = 1) -> str:
    return "" if ratio is None else f"{round(100 * (ratio - 1), digits) + 0.0:+.{digits}f} %"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=float, default=4.0, help="of each of the searches")
    parser.add_argument("--evaluations", type=int, help="of each search at most; with 20000 --seconds 60 is no limit")
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--full", action="store_true", help=f"{FULL_SECONDS:.0f} seconds per search: about two hours")
    parser.add_argument("--costs", default="paper", choices=("paper", "analytical"))
    parser.add_argument("--set", action="append", default=[], metavar="NAME=VALUE", help="a setting of annealing")
    arguments = parser.parse_args()
    setting = Setting(
        seconds=FULL_SECONDS if arguments.full else arguments.seconds,
        evaluations=arguments.evaluations,
        costs=arguments.costs,
        annealing=dict(text.split("=", 1) for text in arguments.set),
    )
    keys = [(s, switch, seed) for seed in range(arguments.seeds) for s in SCENARIOS for switch in SWITCHES]
    found = dict(zip(keys, each(search, [(*key, setting) for key in keys]), strict=True))

    def speeds(scenario: str, switch: str) -> list[float]:
        return [found[scenario, switch, seed][0] for seed in range(arguments.seeds)]

    best = {(s, switch): max(speeds(s, switch)) for s in SCENARIOS for switch in SWITCHES}
    winners = {
        s: max((found[s, "full", seed] for seed in range(arguments.seeds)), key=lambda r: r[0]) for s in SCENARIOS
    }
    known = each(
        facts,
        [(s, winners[s][1], {name: best[s, name] for name in ("full", *SPACE)}, setting) for s in SCENARIOS],
    )
    report = dict(zip(SCENARIOS, known, strict=True))
    mean = {
        (s, switch): statistics.mean(speeds(s, switch)) / statistics.mean(speeds(s, "full"))
        for s in SCENARIOS
        for switch in SWITCHES
    }
    show_changes(mean, best, speeds)
    show_ranges(best, report)
    for line in notes(mean, best, report):
        print_text(line)


def show_changes(mean: dict[tuple[str, str], float], best: Any, speeds: Any) -> None:
    """Change of the mean over the seeds, the paper's beside it."""
    rows = []
    for switch, (name, _) in SWITCHES.items():
        if switch == "full":
            cells = [f"{statistics.mean(speeds(s, 'full')):,.0f} tok/s" for s in SCENARIOS]
            rows.append([name, "", *cells, "", *("" for _ in PRINTED), ""])
            spread = [f"{(max(v) - min(v)) / max(v):.1%}" for v in (speeds(s, "full") for s in SCENARIOS)]
            rows.append(["spread over its seeds", "", *spread, "", *("" for _ in PRINTED), ""])
            continue
        ours = statistics.mean(mean[s, switch] for s in PRINTED)
        paper = PAPER.get(switch)
        theirs = [f"{paper[s]:+.1f} %" if paper else "" for s in PRINTED]
        average = f"{statistics.mean(paper.values()):+.1f} %" if paper else "" if "+" in switch else "within 1 %"
        rows.append([switch, name, *(percent(mean[s, switch]) for s in SCENARIOS), percent(ours), *theirs, average])
    print_table(
        ["off", "", *SCENARIOS, "mean of three", *(f"paper {s}" for s in PRINTED), "paper, mean"],
        rows,
    )


def show_ranges(best: dict[tuple[str, str], float], report: dict[str, Facts]) -> None:
    """What the change of the best possible plan is, within proven limits."""
    rows = []
    for switch in SPACE:
        for scenario, known in report.items():
            low, high = proven(best, known, scenario, switch)
            same = known.without[switch]
            rows.append(
                [
                    switch,
                    scenario,
                    percent(best[scenario, switch] / best[scenario, "full"]),
                    f"{percent(low)} to {percent(high)}",
                    "does not exist or fit" if same is None else percent(same / best[scenario, "full"]),
                ]
            )
    print_text("")
    print_table(
        ["off", "scenario", "best of the seeds", "of the best possible, proven", "the best plan as it is"], rows
    )


def proven(best: dict[tuple[str, str], float], known: Facts, scenario: str, switch: str) -> tuple[float, float]:
    """Limits of (best possible without) / (best possible with)."""
    with_it, without = best[scenario, "full"], best[scenario, switch]
    return without / known.bounds["full"], max(known.bounds[switch], without) / with_it


def notes(mean: Any, best: dict[tuple[str, str], float], report: dict[str, Facts]) -> list[str]:
    """Where we differ from the paper and what is known about why; every sentence is computed."""
    lines = ["", "notes"]
    ours = {switch: statistics.mean(mean[s, switch] for s in PRINTED) - 1 for switch in SPACE}
    theirs = {switch: statistics.mean(PAPER[switch].values()) / 100 for switch in SPACE}
    order = [" > ".join(sorted(values, key=values.get)) for values in (ours, theirs)]
    lines.append(f"loss, largest first: {order[0]} here, {order[1]} in the paper")
    both = statistics.mean(mean[s, "A1+A2"] for s in PRINTED) - 1
    relation = (
        "more than the sum, so each makes up for the other" if both < ours["A1"] + ours["A2"] else "at most the sum"
    )
    lines.append(f"A1 costs {ours['A1']:+.1%}, A2 {ours['A2']:+.1%}, both together {both:+.1%}: {relation}")
    for scenario, known in report.items():
        pipes = ", ".join(known.pipelines) or "none"
        gap = 1 - best[scenario, "full"] / known.bounds["full"]
        lines.append(
            f"{scenario}: best plan has {known.structure}; pipelines: {pipes}; split by length: "
            f"{', '.join(known.split) or 'nothing'}; at most {max(gap, 0):.1%} below the best possible; "
            f"the limit: {known.limit}"
        )
        alone, after = best[scenario, "A1"] / best[scenario, "full"], best[scenario, "A1+A2"] / best[scenario, "A2"]
        lines.append(f"  A1 changes {percent(alone)} with asynchrony and {percent(after)} in a synchronous system")
        lines += [text for switch in SPACE for text in reasons(switch, scenario, best, known)]
    return lines


def reasons(switch: str, scenario: str, best: dict[tuple[str, str], float], known: Facts) -> list[str]:
    low, high = proven(best, known, scenario, switch)
    paper = PAPER[switch].get(scenario)
    said = "" if paper is None else f" (paper {paper:+.1f} %)"
    head = f"  {switch}{said}: "
    unused = {
        "A1": not known.split and "the best plan splits nothing, inference shares GPUs with generation or follows it",
        "A2": known.structure == "staleness 0" and "the best plan is synchronous anyway",
        "A3": not known.tuned
        and "the best plan's microbatches are the fixed ones, most often because pp=1 has only one",
    }[switch]
    lines = []
    if unused:
        lines.append(f"{head}{unused}, so taking it away costs the best plan nothing")
    elif high < 1:
        lines.append(f"{head}under this model it is worth {1 - high:.1%} to {1 - low:.1%}, whatever the search")
    else:
        lines.append(f"{head}under this model it is worth at most {1 - low:.1%}, whatever the search")
    same = known.without[switch]
    if not unused and same is not None and best[scenario, switch] > same * 1.005:
        gain = best[scenario, switch] / same - 1
        lines.append(f"      without it another plan is {gain:.1%} faster than this one: replanning makes up for part")
    if paper is not None and paper > 0 and switch != "A1":
        lines.append(
            "      a gain in the paper: leaving fewer choices cannot make the best plan better, so it is chance"
        )
    return lines


if __name__ == "__main__":
    main()
