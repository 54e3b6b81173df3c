"""Uncached evaluations per second of the compiled evaluator on one core: ``python benchmarks/evaluator.py``.

PPO with separate actor and critic, K = 8, tau = 1, three length phases, on the paper's five stability workloads (64 to
1,024 GPUs) and on 2,048 GPUs with 175B / 70B / 34B. Choices are random legal ones, none repeated. Workloads take turns,
so that what else the machine does slows all of them alike; printed is the median over the turns, in CPU time of this
process. Every thousandth choice is evaluated again by the readable evaluator and must be equal bit by bit.

    --choices N  per turn and workload
    --check      exit 1 when fewer than 25,000 evaluations per second or slowest / fastest below 1 / 2
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time

import attrs
import numpy as np
from paper.studies import Case, experiment

from rpeg_core.planning.compiled import CompiledEvaluator
from rpeg_core.planning.compiled.tables import SCHEDULED_COUNT
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import ReadableEvaluator, StructureProblem
from rpeg_core.plugins.registry import Registry

EVALUATIONS_PER_S = 25_000
SLOWEST_TO_FASTEST = 0.5
TURNS = 7
RECHECK = 1_000

WORKLOADS = (  # GPUs, actor, critic, reward in 10^9 parameters, prompts, racks and nodes per rack
    (64, 13, 13, 7, 1024, (2, 8)),
    (128, 34, 13, 13, 1024, (2, 16)),
    (256, 70, 34, 13, 1024, (4, 16)),
    (512, 70, 70, 34, 2048, (8, 16)),
    (1024, 175, 70, 34, 2048, (16, 16)),
    (2048, 175, 70, 34, 2048, (32, 16)),
)


@attrs.frozen
class Contender:
    """One workload with its evaluator and what has been measured."""

    gpus: int
    problem: StructureProblem
    evaluator: CompiledEvaluator
    tables_s: float
    rates: list[float]
    wall_rates: list[float]
    nodes: list[int]
    seen: set[bytes]


def contender(gpus: int, actor: int, critic: int, reward: int, prompts: int, shape: tuple[int, int]) -> Contender:
    case = Case(
        label="stability",
        gpus=gpus,
        actor=actor,
        critic=critic,
        reward=reward,
        prompts=prompts,
        prompt_tokens=128,
        response_tokens=384,
        racks_nodes=shape,
    )
    [problem] = Planner(experiment(case, costs="analytical", seconds=1.0), Registry()).problem().structures
    begin = time.process_time()
    evaluator = CompiledEvaluator(problem)
    return Contender(gpus, problem, evaluator, time.process_time() - begin, [], [], [], set())


def fresh_choices(contender: Contender, count: int, rng: np.random.Generator) -> np.ndarray:
    """Random choices that were not drawn before."""
    rows: list[np.ndarray] = []
    sizes = [len(candidates) for candidates in contender.problem.candidates]
    while len(rows) < count:
        row = rng.integers(0, sizes)
        if row.tobytes() not in contender.seen:
            contender.seen.add(row.tobytes())
            rows.append(row)
    return np.array(rows, np.int64)


def turn(contender: Contender, choices: np.ndarray) -> int:
    """Measure once; returns how many choices were checked against the readable evaluator."""
    wall, cpu = time.perf_counter(), time.process_time()
    results = contender.evaluator.evaluate_many(choices)
    contender.rates.append(len(choices) / (time.process_time() - cpu))
    contender.wall_rates.append(len(choices) / (time.perf_counter() - wall))
    readable = ReadableEvaluator(contender.problem)
    for choice, result in zip(choices[::RECHECK], results[::RECHECK], strict=True):
        expected = attrs.astuple(readable.evaluate(choice))
        if expected != tuple(result):
            raise SystemExit(f"{contender.gpus} GPUs, choice {choice.tolist()}: {tuple(result)} is not {expected}")
        contender.evaluator.evaluate(choice)
        contender.nodes.append(int(contender.evaluator.workspace.counts[SCHEDULED_COUNT]))
    return len(choices[::RECHECK])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--choices", type=int, default=20_000)
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    rng = np.random.default_rng(0)
    contenders = [contender(*workload) for workload in WORKLOADS]
    begin = time.process_time()
    contenders[0].evaluator.evaluate_many(fresh_choices(contenders[0], 1, rng))
    print(f"compiled or loaded from the cache in {time.process_time() - begin:.1f} s CPU")
    checked = 0
    for _ in range(TURNS):
        for each in contenders:
            checked += turn(each, fresh_choices(each, options.choices, rng))
    print("GPUs   candidates   tables s   nodes   evaluations/s (CPU)   (wall)")
    for each in contenders:
        candidates = sum(len(c) for c in each.problem.candidates)
        print(
            f"{each.gpus:4d}   {candidates:10d}   {each.tables_s:8.2f}   {statistics.mean(each.nodes):5.0f}"
            f"   {statistics.median(each.rates):19,.0f}   {statistics.median(each.wall_rates):6,.0f}"
        )
    rates = [statistics.median(each.rates) for each in contenders]
    ratio = min(rates) / max(rates)
    print(f"slowest / fastest: {ratio:.2f}; {checked} choices equal to the readable evaluator")
    return int(options.check and (min(rates) < EVALUATIONS_PER_S or ratio < SLOWEST_TO_FASTEST))


if __name__ == "__main__":
    sys.exit(main())
