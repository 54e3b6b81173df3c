"""Small experiments, any plan of them, and a run of a plan without controller: for tests of the workers.

`run_plan` gives every rank an engine of its own. The same events give the same instructions, so all ranks see the same
nodes in the same order, and each executes those that it takes part in.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import attrs
from rpeg_plugin_megatron.flow import due_bytes
from rpeg_plugin_megatron.messages import Done, Execute
from rpeg_plugin_megatron.metrics import charged_bytes
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.passes.lower import NodeKind
from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.structures import Structure
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import Dispatch, NodeFinished, Pause, Proceed, Release, Stop
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import Allocation, DeviceSpace

__all__ = ["TINY", "Ran", "at", "drive", "experiment", "make_plan", "ranks_of", "run_plan", "settings", "transfers"]

TINY = {
    "layers": 2,
    "hidden": 32,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 64,
    "gated_ffn": True,
    "vocab": 64,
    "tied_embeddings": False,
}


def at(gpus: str, dp: int = 1, pp: int = 1, tp: int = 1, mb: int = 1) -> Assignment:
    """``at("0-3", dp=2, tp=2)``."""
    start, _, last = gpus.partition("-")
    return Assignment(Allocation(int(start), int(last or start) + 1), Layout(dp, pp, tp), mb)


def experiment(algorithm: str, **changes: Any) -> dict[str, Any]:
    """An experiment file on a tiny llama; ``changes`` replace its sections."""
    models: dict[str, Any] = {"actor": {"config": dict(TINY)}, "reference": {"same_as": "actor"}}
    # With Adam's usual epsilon an element whose gradient is rounding noise moves by the learning rate, to either side.
    values: dict[str, Any] = {"learning_rate": 1e-2, "adam_epsilon": 1e-3}
    if algorithm == "ppo":
        models |= {"critic": {"same_as": "actor", "head": "scalar"}, "reward": {"same_as": "actor", "head": "scalar"}}
    if algorithm == "dpo":  # with equal models, which of two margins is the larger is rounding noise
        models["reference"] = {"config": dict(TINY)}
    if algorithm == "grpo":
        values["reward_seconds_per_sample"] = 0.001
    return {
        "algorithm": algorithm,
        "models": models,
        "workload": {
            "prompts": 8,
            "rollouts_per_prompt": 2 if algorithm == "dpo" else 4,
            "prompt_tokens": 6,
            "response_tokens": 6,
            "bytes_per_element": 4,
        },
        "cluster": {"hardware": "h100", "nodes_per_rack": 1, "gpus_per_node": 4},
        "settings": {algorithm: values},
    } | changes


def make_plan(document: Mapping[str, Any], assignments: Mapping[str, Assignment], **staleness: int) -> Plan:
    """The plan that gives every operator the assignment of its name, or that of ``""``; ``actor=1`` is a staleness.

    Actor and critic share a backbone where the experiment allows nothing else.
    """
    planner = Planner(parse_experiment(document), Registry())
    sharing = planner.experiment.structure.actor_critic_sharing == (True,)
    chosen = Structure(staleness=tuple(staleness.items()), actor_critic_sharing=sharing)
    graph = planner.graph(chosen)
    full = {op.name: assignments.get(op.name, assignments.get("")) for op in graph.operators}
    found = Plan(
        experiment=planner.experiment,
        structure=attrs.evolve(chosen, staleness=tuple(graph.staleness.items())),
        rpeg=graph,
        assignments=full,
        machine=DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4),
        options=planner.options,
        prediction=None,
        plugins=(),
    )
    problem = planner.structure_problem(found)
    return planner.plan(problem, full, {})


def settings(**changes: Any) -> Settings:
    """Settings of the backend for a tiny run on CPUs."""
    return Settings(**{"task": "copy", "device": "cpu", "seed": 7} | changes)


def ranks_of(plan: Plan) -> int:
    """Size of the world."""
    return max(a.allocation.stop for a in plan.assignments.values())


@attrs.frozen(kw_only=True)
class Ran:
    """What a rank did.

    Attributes:
        done: (label, answer) of its nodes, in order.
        artifacts: left in the store at the end.
        kept_bytes: of versions beside the trainers', at the end.
        weights: model -> boxes of the trained version as (name, start, stop, values), on ranks of its trainer.
        rows: (step, container) -> (numbers of rows, values) of each node that made some here, when asked for.
    """

    done: tuple[tuple[str, Done], ...]
    artifacts: int
    kept_bytes: int
    weights: Mapping[str, Sequence[tuple[str, tuple[int, ...], tuple[int, ...], Any]]]
    rows: Mapping[tuple[int, str], Sequence[tuple[Any, Any]]]


def drive(worker: Any, engine: Engine, on_done: Any = None, on_pause: Any = None) -> list[tuple[str, Done]]:
    """Execute what an engine says on one rank, until it stops; ``on_done(node, answer)``, ``on_pause(step)``."""
    done = []
    waiting = list(engine.start(0.0))
    while waiting:
        instruction = waiting.pop(0)
        if isinstance(instruction, Dispatch):
            if any(a.start <= worker.rank < a.stop for a in instruction.held):
                answer = worker.execute(Execute(instruction.node, instruction.inputs))
                done.append((instruction.node.label, answer))
                if on_done is not None:
                    on_done(instruction.node, answer)
            waiting += engine.handle(NodeFinished(instruction.node.index, time.monotonic()))
        elif isinstance(instruction, Release):
            worker.drop((instruction.artifact,))
        elif isinstance(instruction, Pause):
            if on_pause is not None:
                on_pause(instruction.step)
            waiting += engine.handle(Proceed(time.monotonic()))
        elif isinstance(instruction, Stop):
            assert not instruction.failed, instruction
    return done


def run_plan(rank: int, world: int, plan: Plan, chosen: Settings, steps: int, keep_rows: bool = False) -> Ran:
    """Run a plan on this rank of a world."""
    from rpeg_plugin_megatron.regroup import home_rows
    from rpeg_plugin_megatron.worker import Worker

    worker = Worker(rank, world, plan, chosen)
    worker.setup()
    rows: dict[tuple[int, str], list[tuple[Any, Any]]] = {}

    def note(node: Any, answer: Done) -> None:
        if node.kind is not NodeKind.OP or not keep_rows:
            return
        for key, value in worker.store.all_rows():
            if key.node == node.index:
                numbers = range(*home_rows(plan.workload.sequences, key.place, rank))
                numbers = list(numbers) if value.numbers is None else value.numbers.tolist()
                rows.setdefault((node.step, key.container), []).append((numbers, value.tensor.numpy()))

    done = drive(worker, Engine(worker.window, steps), note)
    weights = {}
    for (model, _), installation in worker.installations.items():
        if installation.trained is not None:
            views = installation.views(installation.trained)
            weights[model] = [
                (box.name, box.start, box.stop, view.detach().numpy())
                for box, view in zip(installation.fragments, views, strict=True)
            ]
    left = len(worker.store)
    kept = sum(item.bytes for item in worker.installations.values() if item.changes)
    worker.close()
    return Ran(done=tuple(done), artifacts=left, kept_bytes=kept, weights=weights, rows=rows)


def transfers(plan: Plan, results: Sequence[Ran]) -> dict[str, tuple[float, int]]:
    """Label of each transfer -> (bytes charged by its delivery, bytes on the wire), over all ranks."""
    from rpeg_core.runtime.window import Window

    window = Window(plan.rpeg, plan.assignments, plan.workload, split_lengths=plan.options.split_lengths)
    sums: dict[str, list[Any]] = {}
    for result in results:
        for label, answer in result.done:
            node = window.node(*window.locate(answer.node))
            if node.kind is not NodeKind.OP:
                found = sums.setdefault(label, [node, 0, 0])
                found[1] += answer.bytes
                found[2] += answer.wire_bytes
    return {
        label: (
            charged_bytes(
                node,
                delivered,
                plan.rpeg.container(node.container).bytes,
                due_bytes(node, plan.rpeg, plan.assignments, plan.workload),
            ),
            wire,
        )
        for label, (node, delivered, wire) in sums.items()
    }
