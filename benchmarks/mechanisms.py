"""What each mechanism is worth on this machine: ``python benchmarks/mechanisms.py [--quick] [--json FILE]``.

Two workers of one thread each, on two cores, train a llama that is small but large enough for its arithmetic to
dominate. Each mechanism is a pair of plans of one experiment that differ in nothing else:

* ``staleness``: generation and assessment on one worker, training on the other; tau = 0 against tau = 1.
* ``sharing``: PPO on both workers; actor and critic apart against one backbone with two heads.
* ``planner``: everything on both workers in the best single layout, against what the planner chooses among all plans
  with staleness 0 and 1.

Plans of a pair run in turns, five times. Printed for each pair: the median of the measured ratios of seconds per step
with the smallest and largest, and the predicted ratio beside it. ``publication`` has no pair: for each relation of the
GPUs that train and serve it shows the bytes that lowering charges, those that went from worker to worker,
and the measured seconds beside the predicted ones.

``--hardware FILE`` predicts with a profile that ``rpeg calibrate`` wrote, else with the quick one, ``host``. Run it on
a machine that does nothing else, and that did nothing else while its profile was measured: half an hour. ``--quick``
checks in a minute that everything runs; its times mean nothing.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import attrs
from rpeg_plugin_megatron import MEGATRON

from rpeg_core import Plan, Registry
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.search import Progress
from rpeg_core.planning.solve import only_choice, solve
from rpeg_core.report import words
from rpeg_core.report.execution import step_times
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.trace import Trace, Transferred
from rpeg_core.spec.experiment import parse_experiment

Layout = dict[str, Any]
Pins = dict[str, Layout]


@attrs.frozen(kw_only=True)
class Size:
    """How much a step computes, and how often what is run.

    Attributes:
        model: architecture.
        prompts, rollouts, prompt_tokens, response_tokens: of a step.
        steps: of a run; the first is not counted.
        repetitions: of a pair.
        search_seconds: of the planner.
        hardware: profile to predict with.
    """

    model: dict[str, int]
    prompts: int
    rollouts: int
    prompt_tokens: int
    response_tokens: int
    steps: int
    repetitions: int
    search_seconds: float
    hardware: str = "host"


FULL = Size(
    model={"layers": 4, "hidden": 256, "heads": 4, "kv_heads": 4, "ffn": 1024, "vocab": 512},
    prompts=16,
    rollouts=4,
    prompt_tokens=32,
    response_tokens=32,
    steps=8,
    repetitions=5,
    search_seconds=20,
)
QUICK = attrs.evolve(
    FULL,
    model={"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 4, "ffn": 128, "vocab": 64},
    prompt_tokens=8,
    response_tokens=8,
    steps=3,
    repetitions=1,
    search_seconds=5,
)


def pin(gpus: str, *, dp: int = 1, pp: int = 1, tp: int = 1, microbatches: int = 1) -> Layout:
    return {"gpus": gpus, "dp": dp, "pp": pp, "tp": tp, "microbatches": microbatches}


LOW, HIGH, BOTH = pin("0"), pin("1"), pin("0-1", dp=2)
BOTH_TP, BOTH_PP = pin("0-1", tp=2), pin("0-1", pp=2, microbatches=2)


def experiment(size: Size, algorithm: str, **sections: Any) -> dict[str, Any]:
    """An experiment on this machine."""
    models: dict[str, Any] = {"actor": {"config": size.model}, "reference": {"same_as": "actor"}}
    values: dict[str, Any] = {"reward_seconds_per_sample": 2e-5}
    if algorithm == "ppo":
        models |= {"critic": {"same_as": "actor", "head": "scalar"}}
    return {
        "algorithm": algorithm,
        "models": models,
        "workload": {
            "prompts": size.prompts,
            "rollouts_per_prompt": size.rollouts,
            "prompt_tokens": size.prompt_tokens,
            "response_tokens": size.response_tokens,
            "bytes_per_element": 4,
        },
        "cluster": {"hardware": size.hardware, "gpus_per_node": 2},
        "search": {"strategy": "annealing", "seconds": size.search_seconds, "seed": 0},
        "settings": {algorithm: values, "megatron": {"task": "copy", "threads_per_worker": 1}},
    } | sections


def planned(registry: Registry, document: dict[str, Any]) -> Plan:
    """The best plan of an experiment; the only one where the pins leave no other."""
    planner = Planner(parse_experiment(document), registry)
    problem = planner.problem()
    solution = only_choice(problem)
    if solution is None:
        outcome = solve(planner, problem, registry, Progress(), baselines=False)
        if outcome.winner is None:
            raise SystemExit("no plan fits this machine")
        solution = outcome.winner.solution
    structure = problem.structures[solution.structure]
    return planner.plan(structure, structure.plan(solution.choice), {"strategy": None})


def executed(plan: Plan, steps: int) -> Trace:
    settings = MEGATRON.settings(**plan.experiment.settings["megatron"])
    with MEGATRON.open(plan, settings) as session:
        return session.run(RunRequest(steps=steps))


def seconds_per_step(trace: Trace) -> float:
    """The mean of all steps but the first."""
    return statistics.fmean(step.seconds for step in step_times(trace)[1:])


@attrs.frozen(kw_only=True)
class Pair:
    """A baseline and a plan with the mechanism."""

    name: str
    baseline: Plan
    plan: Plan

    @property
    def predicted(self) -> float:
        """How many times faster the plan is under the model."""
        return self.baseline.prediction.step_s / self.plan.prediction.step_s

    def measured(self, size: Size, report: Callable[[str], None]) -> list[float]:
        """The same on this machine, once for each repetition."""
        found = []
        for repetition in range(size.repetitions):
            one, other = (seconds_per_step(executed(plan, size.steps)) for plan in (self.baseline, self.plan))
            found.append(one / other)
            report(f"{self.name} {repetition + 1}/{size.repetitions}: {words.seconds(one)} {words.seconds(other)}")
        return found


def staleness(size: Size, registry: Registry) -> Iterator[Pair]:
    """Training on a worker of its own."""
    pins = {
        "actor_generation": LOW,
        "reference_inference": LOW,
        "reward_function": LOW,
        "actor_training": HIGH,
    }
    sync, stale = (
        planned(registry, experiment(size, "grpo", pin=pins, structure={"staleness": [tau]})) for tau in (0, 1)
    )
    yield Pair(name="tau = 1 against tau = 0, generation and training apart", baseline=sync, plan=stale)


def sharing(size: Size, registry: Registry) -> Iterator[Pair]:
    """One backbone against two models, on both workers and with training apart."""
    for words_, train, serve in (("on both workers", BOTH, BOTH), ("training apart", HIGH, LOW)):
        common = {"reference_inference": serve, "reward_function": serve}
        separate = {"actor_generation": serve, "critic_inference": serve} | common
        separate |= {"actor_training": train, "critic_training": train}
        shared = {"actor_critic_generation": serve, "actor_critic_inference": serve, "actor_critic_training": train}
        plans = [
            planned(registry, experiment(size, "ppo", pin=pins, structure={"actor_critic_sharing": [value]}))
            for value, pins in ((False, separate), (True, shared | common))
        ]
        yield Pair(name=f"actor and critic share a backbone, {words_}", baseline=plans[0], plan=plans[1])


def planner(size: Size, registry: Registry) -> Iterator[Pair]:
    """The planner's choice against everything on all workers in one layout."""
    for algorithm in ("grpo", "ppo"):
        colocated = []
        for layout in (BOTH, BOTH_TP, BOTH_PP):
            pins = dict.fromkeys(operators(size, algorithm, registry), layout)
            pins["reward_function"] = BOTH  # a function is only data parallel
            colocated.append(planned(registry, experiment(size, algorithm, pin=pins)))
        best = min(colocated, key=lambda plan: plan.prediction.step_s)
        free = {"staleness": [0, 1]}
        if algorithm == "ppo":
            free["actor_critic_sharing"] = [False, True]
        chosen = planned(registry, experiment(size, algorithm, structure=free))
        yield Pair(name=f"the planner's choice of {algorithm} ({chosen.structure})", baseline=best, plan=chosen)


def operators(size: Size, algorithm: str, registry: Registry) -> tuple[str, ...]:
    structure = Planner(parse_experiment(experiment(size, algorithm)), registry).problem().structures[0]
    return tuple(op.name for op in structure.rpeg.operators)


PUBLICATIONS: dict[str, tuple[Layout, Layout]] = {
    "apart": (LOW, HIGH),
    "same GPUs, tp2 trains, dp2 serves": (BOTH, BOTH_TP),
    "same GPUs, pp2 trains, dp2 serves": (BOTH, BOTH_PP),
    "serving on one of two that train (tp2)": (LOW, BOTH_TP),
    "training on one of two that serve (dp2)": (BOTH, LOW),
    "training on one of two that serve (tp2)": (BOTH_TP, LOW),
}
"""Relation of the GPUs -> where generation and where training runs."""


@attrs.frozen(kw_only=True)
class Published:
    """One publication of a step, bytes and seconds."""

    name: str
    weights: float
    charged: float
    wire: float
    predicted_s: float
    measured_s: float


def publication(size: Size, registry: Registry) -> Iterator[Published]:
    """Weights of the actor from training to generation, medians over the steps of one run."""
    for name, (serve, train) in PUBLICATIONS.items():
        pins = {"actor_generation": serve, "reference_inference": LOW, "reward_function": LOW, "actor_training": train}
        plan = planned(registry, experiment(size, "grpo", pin=pins))
        trace = executed(plan, size.steps)
        bytes_of = {r.node: r for r in trace.records if isinstance(r, Transferred)}
        moves = [
            (bytes_of[node.node], end_s - start_s)
            for node, start_s, end_s in trace.intervals()
            if node.container == "W_actor" and node.operator == "actor_generation"
        ]
        yield Published(
            name=name,
            weights=float(plan.rpeg.container("W_actor").bytes),
            charged=statistics.median(record.bytes for record, _ in moves),
            wire=statistics.median(record.wire_bytes for record, _ in moves),
            predicted_s=predicted_seconds(plan, registry),
            measured_s=statistics.median(seconds for _, seconds in moves),
        )


def predicted_seconds(plan: Plan, registry: Registry) -> float:
    """Of a publication to generation, by the model."""
    prediction = Planner(plan.experiment, registry).structure_problem(plan).predict(plan.assignments)
    return max(
        seconds
        for node, seconds in zip(prediction.graph.nodes, prediction.seconds, strict=True)
        if node.container == "W_actor" and node.operator == "actor_generation"
    )


PAIRS = {"staleness": staleness, "sharing": sharing, "planner": planner}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="small and once")
    parser.add_argument("--only", choices=[*PAIRS, "publication"], action="append", help="these mechanisms")
    parser.add_argument("--hardware", default="host", help="profile to predict with, e.g. a file of rpeg calibrate")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    size = attrs.evolve(QUICK if options.quick else FULL, hardware=options.hardware)
    wanted = options.only or [*PAIRS, "publication"]
    registry = Registry(report=lambda text: print(text, file=sys.stderr))
    document: dict[str, Any] = {"size": attrs.asdict(size), "pairs": [], "publications": []}
    if set(wanted) & set(PAIRS):
        print("| mechanism | faster, measured | smallest to largest | predicted |\n|---|---|---|---|")
    for name, pairs in PAIRS.items():
        for pair in pairs(size, registry) if name in wanted else ():
            found = pair.measured(size, lambda text: print(text, file=sys.stderr))
            middle, spread = statistics.median(found), f"{words.times(min(found))} to {words.times(max(found))}"
            print(f"| {pair.name} | {words.times(middle)} | {spread} | {words.times(pair.predicted)} |", flush=True)
            document["pairs"].append({"name": pair.name, "measured": found, "predicted": pair.predicted})
    if "publication" in wanted:
        print("\n| publication | weights | charged | from worker to worker | predicted | measured |")
        print("|---|---|---|---|---|---|")
        for row in publication(size, registry):
            sizes = " | ".join(words.size(value) for value in (row.weights, row.charged, row.wire))
            times = f"{words.seconds(row.predicted_s)} | {words.seconds(row.measured_s)}"
            print(f"| {row.name} | {sizes} | {times} |", flush=True)
            document["publications"].append(attrs.asdict(row))
    if options.json is not None:
        options.json.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
