"""Toy problems for the annealing search."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence

import attrs
import numpy as np
import pytest
from rpeg_plugin_annealing import chain_kernel as kernel
from rpeg_plugin_annealing import islands

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Rpeg
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.score import Evaluation, Objective
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.problem import Problem, StructureProblem, build_structure
from rpeg_core.planning.search import Solution
from rpeg_core.planning.structures import Structure
from rpeg_core.records import CostTerm, Target
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

WORK = {
    ("actor", "generation"): 24.0,
    ("reference", "inference"): 6.0,
    ("reward", "inference"): 3.0,
    ("critic", "inference"): 6.5,
    ("actor", "training"): 20.0,
    ("critic", "training"): 11.0,
}
STATE = {("actor", "training"): 900.0, ("critic", "training"): 500.0}


def _scaling(batch: OperatorBatch) -> np.ndarray:
    """Three tenths do not scale, so small allocations are worth it; pipelines and tensor parallelism cost."""
    layouts = batch.layouts
    seconds = WORK.get((batch.model.name, batch.role.value), 0.0) * (1 / layouts.gpus + 0.3)
    return seconds + 0.2 * layouts.tensor + 0.15 * layouts.pipeline + 0.01 * layouts.microbatches


SCALING = CostTerm(name="toy.scaling", summary="scales", target=Target.OPERATOR, quantity="work", function=_scaling)


class Watch:
    """What a run evaluated, and by whom.

    Attributes:
        batches: rows evaluated together, by the tables of their structure, in order.
        islands: every island that ran, by the tables of its structure.
    """

    def __init__(self) -> None:
        self.batches: dict[int, list[np.ndarray]] = {}
        self.islands: dict[int, dict[int, kernel.Island]] = {}

    def count(self, structure: StructureProblem) -> int:
        """Evaluations of a structure."""
        tables = id(structure.evaluator.tables)
        found = self.islands.get(tables, {}).values()
        return sum(map(len, self.batches.get(tables, ()))) + sum(int(i.counts[kernel.EVALUATIONS]) for i in found)

    def rows(self, structure: StructureProblem) -> list[tuple[int, ...]]:
        """Batches of a structure, row by row."""
        return [tuple(row) for batch in self.batches[id(structure.evaluator.tables)] for row in batch.tolist()]

    def cached(self, structure: StructureProblem) -> list[set[tuple[int, ...]]]:
        """What each island of a structure knows."""
        islands = self.islands[id(structure.evaluator.tables)].values()
        return [{tuple(row) for row in (i.keys[i.keys[:, 0] > 0] - 1).tolist()} for i in islands]


class Toys:
    """Makes problems; see the methods."""

    def structure(
        self,
        rpeg: Rpeg | None = None,
        *,
        machine: tuple[int, int, int] = (1, 1, 4),
        prompts: int = 16,
        state: Mapping[tuple[str, str], float] = STATE,
        pins: Mapping[str, Pin] | None = None,
    ) -> StructureProblem:
        """A structure with the scaling term; ``state`` is training state in bytes, of 900 per GPU."""
        rpeg = rpeg or toy_mini()
        racks, nodes, gpus = machine
        return build_structure(
            structure=Structure(staleness=tuple(rpeg.staleness.items())),
            rpeg=rpeg,
            machine=DeviceSpace(racks=racks, nodes_per_rack=nodes, gpus_per_node=gpus),
            hardware=toy_hardware(),
            workload=toy_workload(prompts=prompts),
            terms=[
                active(term)
                for term in (
                    SCALING,
                    toy_transfer_term(bytes_per_s=1e5),
                    *toy_memory_terms(training_state=state, transient={("actor", "generation"): 800.0}),
                )
            ],
            options=EvaluationOptions(steps=2),
            pins=pins,
        )

    def problem(self, *structures: StructureProblem, objective: Objective | None = None) -> Problem:
        """A problem of these structures."""
        first = structures[0]
        return Problem(
            workload=first.book.workload,
            machine=first.book.machine,
            hardware=first.book.hardware,
            objective=objective or Objective(),
            options=first.options,
            structures=structures,
        )

    def mini(self, taus: Sequence[int] = (0, 1), **options: object) -> Problem:
        """Two operators on 4 GPUs, once per staleness: some thousand configurations."""
        objective = options.pop("objective", None)
        return self.problem(*(self.structure(toy_mini(tau=tau), **options) for tau in taus), objective=objective)

    def ppo(self, taus: Sequence[int] = (0, 1), **options: object) -> Problem:
        """Six operators on two nodes of 2 GPUs."""
        options = {"machine": (1, 2, 2), **options}
        return self.problem(*(self.structure(toy_ppo(tau=tau), **options) for tau in taus))

    def evaluation(self, tokens_per_s: float, peak_ratio: float = 0.5) -> Evaluation:
        """An evaluation with these two numbers."""
        return Evaluation(
            makespan_s=1.0, tokens_per_s=tokens_per_s, peak_ratio=peak_ratio, utilization=0.5, used_gpus=4
        )

    def everything(self, problem: Problem) -> Iterator[tuple[Solution, Evaluation]]:
        """Every configuration, evaluated."""
        for index, structure in enumerate(problem.structures):
            for choice in itertools.product(*(range(len(c)) for c in structure.candidates)):
                yield Solution(index, choice), structure.evaluator.evaluate(choice)


@pytest.fixture
def watch(monkeypatch) -> Watch:
    """Watches every evaluation of the test's searches."""
    seen, batch, run = Watch(), islands.evaluate_choices, kernel.run_island
    alive = []  # an id names an object only while that lives: a later search could get the same

    def evaluate_choices(t, choices, w, results):
        alive.append(t)
        seen.batches.setdefault(id(t), []).append(choices.copy())
        batch(t, choices, w, results)

    def run_island(t, w, hood, policy, island, limit, stop):
        alive.extend((t, island.keys))
        seen.islands.setdefault(id(t), {})[id(island.keys)] = island
        return run(t, w, hood, policy, island, limit, stop)

    monkeypatch.setattr(islands, "evaluate_choices", evaluate_choices)
    monkeypatch.setattr(kernel, "run_island", run_island)
    return seen


@pytest.fixture
def fake_batches(monkeypatch):
    """Let a function of the choice answer whatever is evaluated outside islands; it returns an Evaluation."""

    def put(answer: Callable[[tuple[int, ...]], Evaluation]) -> None:
        def evaluate_choices(t, choices, w, results):
            for choice, row in zip(choices.tolist(), results, strict=True):
                row[:] = attrs.astuple(answer(tuple(choice)))

        monkeypatch.setattr(islands, "evaluate_choices", evaluate_choices)

    return put


@pytest.fixture(scope="session")
def toys() -> Toys:
    """The toy maker."""
    return Toys()
