"""Questions about time: of a generation, of a transfer, and of schedules of measured durations."""

from __future__ import annotations

import attrs
import numpy as np
from rpeg_plugin_analytical.engine_memory import Engine, engine_memory

from case_questions.asker import Answer, Asker, Facts
from rpeg_core.costing.batches import OperatorBatch, TransferBatch
from rpeg_core.ir import Role
from rpeg_core.passes.evaluate import EvaluationOptions, evaluate
from rpeg_core.passes.score import Evaluation, Objective
from rpeg_core.records import Target
from rpeg_core.spec.execution import Execution, Sharding
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.toys import on, toy_book, toy_mini, toy_plan, toy_ppo, toy_transfer_term, toy_workload
from rpeg_core.validation.rl import exponential_quantiles
from rpeg_core.validation.training import layouts_of

__all__ = ["asynchrony", "generation_ratio", "objective", "serial_reward", "transfer"]


def generation_ratio(asker: Asker, facts: Facts) -> Answer:
    """Does generation take more than in proportion to the tokens?"""
    seconds = [_generation_s(asker, facts, run) for run in facts["runs"]]
    ratio, tokens = seconds[1] / seconds[0], facts["runs"][1]["mean"] / facts["runs"][0]["mean"]
    verdict = "more than the tokens" if ratio > tokens else "as the tokens"
    return Answer(verdict, f"{ratio:.1f} times for {tokens:.0f} times the tokens", ratio)


def _generation_s(asker: Asker, facts: Facts, run: Facts) -> float:
    """Seconds of a generation in as many rounds as the caches of the replicas need."""
    model, hardware = asker.model(run["model"]), asker.hardware(facts["gpu"])
    replicas = facts["gpus"] // facts["tp"]
    mine = facts["sequences"] // replicas
    served = engine_memory(
        model, Engine(tensor=facts["tp"], memory_share=facts["memory_share"]), hardware.device.memory_bytes
    )
    held = max(1, min(mine, served.sequences(facts["prompt"] + run["mean"] / 2.0), Engine().sequences))
    lengths = exponential_quantiles(run["mean"], facts["longest"], held * replicas)
    workload = Workload(
        prompts=held * replicas,
        prompt_tokens=facts["prompt"],
        response_tokens=lengths[-1].tokens,
        response_lengths=lengths,
    )
    batch = OperatorBatch(
        role=Role.GENERATION,
        model=model,
        seconds_per_sample=None,
        workload=workload,
        machine=DeviceSpace(racks=1, nodes_per_rack=max(1, facts["gpus"] // 8), gpus_per_node=8),
        hardware=hardware,
        layouts=layouts_of(replicas, 1, facts["tp"], 1, 8),
        settings=None,
        execution=Execution(framework="vllm", sharding=Sharding.NONE),
        sequences=held * replicas,
        prefill=True,
        phases=workload.phases,
    )
    terms = [(term, s) for term, s in asker.terms if term.target is Target.OPERATOR]
    round_s = sum(float(term.function(attrs.evolve(batch, settings=settings))[0]) for term, settings in terms)
    return round_s * mine / held


def transfer(asker: Asker, facts: Facts) -> Answer:
    """How long do a model's weights take on the wire, resharded in place or sent from as many GPUs to as many?"""
    size, gpus = 2.0 * asker.model(facts["model"]).total_parameters, np.array([facts["gpus"]], np.int64)
    batch = TransferBatch(
        reshard=facts["reshard"],
        bytes=np.array([size]),
        source_gpus=gpus,
        destination_gpus=gpus,
        tier=np.array([facts["tier"]], np.int64),
        hardware=asker.hardware(facts["gpu"]),
        settings=None,
    )
    terms = [(term, settings) for term, settings in asker.terms if term.target is Target.TRANSFER]
    seconds = sum(float(term.function(attrs.evolve(batch, settings=settings))[0]) for term, settings in terms)
    return Answer("on the wire", f"{seconds:.2g} s", seconds)


def asynchrony(asker: Asker, facts: Facts) -> Answer:
    """Sync or async, from measured seconds of generation and training on GPUs of their own."""
    machine, steps = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4), 100
    seconds = {("actor", "generation"): facts["generation_s"], ("actor", "training"): facts["training_s"]}
    plan = toy_plan(actor_generation=on(0, 2), actor_training=on(2, 4))
    found = []
    for tau in (0, 1):
        graph = toy_mini(tau=tau)
        book = toy_book(graph, machine, seconds=seconds, transfer=toy_transfer_term(bytes_per_s=1e12))
        found.append(evaluate(graph, plan, book, EvaluationOptions(steps=steps)).evaluation.makespan_s / steps)
    far = [predicted / observed - 1.0 for predicted, observed in zip(found, facts["observed_s"], strict=True)]
    verdict = "async" if found[1] < found[0] else "sync"
    close = max(map(abs, far)) <= facts["within"]
    return Answer(
        verdict if close else f"{verdict}, but far off",
        f"{found[0]:.1f} s sync ({far[0]:+.0%}), {found[1]:.1f} s async ({far[1]:+.0%})",
    )


def serial_reward(asker: Asker, facts: Facts) -> Answer:
    """Is a reward hidden behind the rollout that it assesses, from the measured seconds of both?"""
    machine = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
    seconds = {("actor", "generation"): facts["generation_s"], ("reward", "inference"): facts["reward_s"]}
    graph = toy_ppo()
    plan = toy_plan(
        actor_generation=on(0, 2),
        reference_inference=on(2),
        reward_inference=on(3),
        critic_inference=on(2),
        actor_training=on(0, 2),
        critic_training=on(2, 4),
    )
    book = toy_book(graph, machine, toy_workload(), seconds=seconds, transfer=toy_transfer_term(bytes_per_s=1e12))
    step = evaluate(graph, plan, book, EvaluationOptions(steps=1)).evaluation.makespan_s
    whole = facts["generation_s"] + facts["reward_s"]
    return Answer(
        "serial" if step >= whole else "hidden", f"{step:.0f} s for {facts['generation_s']} + {facts['reward_s']} s"
    )


def objective(asker: Asker, facts: Facts) -> Answer:
    """Which of two splits wins in time and which in GPU-hours, by RPEG's objectives on the measured steps."""
    runs = {
        name: Evaluation(
            makespan_s=run["step_s"],
            tokens_per_s=1.0 / run["step_s"],
            peak_ratio=0.5,
            utilization=1.0,
            used_gpus=run["gpus"],
        )
        for name, run in facts["runs"].items()
    }
    best = max(run.tokens_per_s for run in runs.values())

    def winner(kind: str) -> str:
        aim = Objective(kind=kind, max_throughput_loss=0.1)
        return max(runs, key=lambda name: aim.value(runs[name], best))

    hours = {name: run.used_gpus * run.makespan_s / 3600 for name, run in runs.items()}
    return Answer(
        f"time: {winner('throughput')}, GPU-hours: {winner('cost_per_token')}",
        ", ".join(f"{name} {value:.3f} GPU-hours" for name, value in hours.items()),
    )
