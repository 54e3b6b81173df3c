"""Small problems and a plan that checks give to strategies and backends; everything can be enumerated."""

from __future__ import annotations

import attrs
import numpy as np

from rpeg_core.costing.batches import Floats, OperatorBatch
from rpeg_core.ir import Role, Rpeg
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.score import Objective
from rpeg_core.planning.plan import Plan, summarize
from rpeg_core.planning.problem import Problem, StructureProblem, build_structure
from rpeg_core.planning.starts import colocated
from rpeg_core.planning.structures import Structure
from rpeg_core.records import CostTerm, Target
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import (
    active,
    toy_hardware,
    toy_memory_terms,
    toy_mini,
    toy_ppo,
    toy_transfer_term,
    toy_workload,
)

__all__ = ["EMPTY", "INFEASIBLE", "ROOMY", "TIGHT", "Demand", "problem", "sample_plan"]

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
WORK_S = {Role.GENERATION: 8.0, Role.INFERENCE: 1.0, Role.TRAINING: 4.0}
TENSOR_S, STAGE_S = 0.2, 0.1


@attrs.frozen(kw_only=True)
class Demand:
    """Bytes of training state and of the transients of generation, over all GPUs of an operator; a GPU has 900."""

    state: float
    transient: float


ROOMY = Demand(state=400.0, transient=400.0)
"""Everything fits everywhere."""

TIGHT = Demand(state=1600.0, transient=1200.0)
"""Each operator fits two GPUs, but not the same two."""

INFEASIBLE = Demand(state=2000.0, transient=2000.0)
"""Each operator fits four GPUs, but not with the other."""

EMPTY = Demand(state=10_000.0, transient=400.0)
"""Training fits nowhere."""


def problem(demand: Demand, objective: str = "throughput") -> Problem:
    """Generation and training of one model on four GPUs, with staleness 0 or 1: some hundred configurations."""
    structures = tuple(_structure_problem(toy_mini(tau=tau), {"actor": tau}, demand) for tau in (0, 1))
    first = structures[0]
    return Problem(
        workload=first.book.workload,
        machine=first.book.machine,
        hardware=first.book.hardware,
        objective=Objective(kind=objective),
        options=first.options,
        structures=structures,
    )


def sample_plan() -> Plan:
    """PPO of toy models on four GPUs, as ``rpeg plan`` would have written it."""
    graph = toy_ppo(tau=1)
    structure = _structure_problem(graph, {"actor": 1, "critic": 1}, ROOMY)
    choice = colocated(structure)
    experiment = {
        "algorithm": "ppo",
        "models": {
            role: {"spec": graph.model(role).spec.to_dict()} for role in ("actor", "critic", "reward", "reference")
        },
        "workload": {"prompts": 16, "prompt_tokens": 100, "response_tokens": 100},
        "cluster": {"hardware": "toy", **attrs.asdict(MACHINE)},
        "structure": {"staleness": [1]},
    }
    assignments = structure.plan(choice)
    prediction = summarize(
        structure.predict(assignments), structure.options, structure.book.hardware.device.memory_bytes
    )
    return Plan(
        experiment=parse_experiment(experiment),
        structure=structure.structure,
        rpeg=graph,
        assignments=assignments,
        machine=MACHINE,
        options=structure.options,
        prediction=prediction,
        plugins=(),
    )


def _structure_problem(graph: Rpeg, staleness: dict[str, int], demand: Demand) -> StructureProblem:
    memory = toy_memory_terms(
        training_state={(name, "training"): demand.state for name in staleness},
        transient={("actor", "generation"): demand.transient},
    )
    terms = (_seconds_term(), toy_transfer_term(bytes_per_s=1e5), *memory)
    return build_structure(
        structure=Structure(staleness=tuple(staleness.items())),
        rpeg=graph,
        machine=MACHINE,
        hardware=toy_hardware(),
        workload=toy_workload(),
        terms=[active(term) for term in terms],
        options=EvaluationOptions(steps=4),
    )


def _seconds_term() -> CostTerm:
    """Perfect scaling but for a price of every tensor rank and pipeline stage."""

    def function(batch: OperatorBatch) -> Floats:
        layouts = batch.layouts
        overhead = TENSOR_S * (layouts.tensor - 1) + STAGE_S * (layouts.pipeline - 1)
        return np.asarray(WORK_S[batch.role] / layouts.gpus + overhead)

    return CostTerm(
        name="sample.seconds", summary="work over GPUs", target=Target.OPERATOR, quantity="work", function=function
    )
