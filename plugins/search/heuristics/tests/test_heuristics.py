"""The baselines as strategies: exact, best over structures, out of memory, settings."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from rpeg_plugin_heuristics import CONCURRENT, GREEDY, Settings, rpeg_search_strategies

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.errors import SettingsError
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.score import Objective
from rpeg_core.planning.problem import Problem, build_structure
from rpeg_core.planning.search import Progress, SearchBudget
from rpeg_core.planning.starts import colocated, concurrent
from rpeg_core.planning.structures import Structure
from rpeg_core.records import CostTerm, Target
from rpeg_core.settings import check_settings_class
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.testing.conformance import parametrize_checks
from rpeg_core.testing.toys import (
    active,
    toy_hardware,
    toy_memory_terms,
    toy_ppo,
    toy_transfer_term,
    toy_workload,
)


def _scaling(batch: OperatorBatch) -> np.ndarray:
    """12 s of work over the GPUs, and 1 s that does not scale per tensor and pipeline degree."""
    return 12.0 / batch.layouts.gpus + batch.layouts.tensor + batch.layouts.pipeline


SCALING = CostTerm(name="toy.scaling", summary="scales", target=Target.OPERATOR, quantity="work", function=_scaling)


def make_problem(
    taus: Sequence[int] = (0, 1), *, state: float = 0.0, gpus_per_node: int = 4, prompts: int = 16
) -> Problem:
    """PPO on one node; ``state`` bytes of training state per trainable model, of 900 per GPU."""
    machine = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=gpus_per_node)
    memory = toy_memory_terms(
        training_state={(model, "training"): state for model in ("actor", "critic")},
        weights={("reference", "inference"): 400.0, ("reward", "inference"): 400.0},
    )
    workload, options = toy_workload(prompts=prompts), EvaluationOptions(steps=2)
    structures = [
        build_structure(
            structure=Structure(staleness=(("actor", tau), ("critic", tau))),
            rpeg=toy_ppo(tau=tau),
            machine=machine,
            hardware=toy_hardware(),
            workload=workload,
            terms=[active(term) for term in (SCALING, toy_transfer_term(bytes_per_s=1e6), *memory)],
            options=options,
        )
        for tau in taus
    ]
    return Problem(
        workload=workload,
        machine=machine,
        hardware=toy_hardware(),
        objective=Objective(),
        options=options,
        structures=tuple(structures),
    )


def run(strategy, problem: Problem, progress: Progress | None = None, **settings):
    return strategy.run(problem, SearchBudget(seconds=10.0), Settings(**settings), progress or Progress())


@pytest.mark.parametrize(("strategy", "start"), [(GREEDY, colocated), (CONCURRENT, concurrent)])
def test_the_best_over_structures(strategy, start) -> None:
    problem = make_problem()
    each = [structure.evaluator.evaluate(start(structure)) for structure in problem.structures]
    result = run(strategy, problem)
    best = max(range(2), key=lambda index: each[index].tokens_per_s)
    assert (result.best.structure, result.best.choice) == (best, start(problem.structures[best]))
    assert result.evaluation == each[best]
    assert (result.evaluations, result.stopped, result.gap) == (2, "finished", None)


def test_greedy_uses_all_gpus_and_concurrent_parts_of_them() -> None:
    problem = make_problem(taus=(0,))
    structure = problem.structures[0]
    greedy = structure.plan(run(GREEDY, problem).best.choice)
    assert {a.allocation for a in greedy.values()} == {Allocation(0, 4)}
    plan = structure.plan(run(CONCURRENT, problem).best.choice)
    assert plan["actor_generation"].allocation == Allocation(0, 4)
    assert plan["actor_training"].allocation.disjoint(plan["critic_training"].allocation)


def test_concurrent_wins_when_work_does_not_scale() -> None:
    """Greedy runs six operators of 12 / 4 + 2 s one after another; the parts of concurrent run side by side."""
    problem = make_problem(taus=(0,))
    greedy, parts = run(GREEDY, problem).evaluation, run(CONCURRENT, problem).evaluation
    assert greedy.makespan_s == pytest.approx(2 * 6 * (12 / 4 + 2), rel=1e-2)
    # Generation on 4; the inferences on 2, 1, 1: 12 + 2 at most; the trainings on 2 and 2.
    assert parts.makespan_s == pytest.approx(2 * ((12 / 4 + 2) + (12 + 2) + (12 / 2 + 2)), rel=1e-2)


def test_out_of_memory() -> None:
    """Alone 3000 bytes of state fit 4 GPUs of 900; the states of both models together do not."""
    problem = make_problem(state=3000.0)
    result = run(GREEDY, problem)
    assert (result.best, result.evaluation, result.stopped) == (None, None, "finished")
    structure = problem.structures[result.nearest.structure]
    assert result.nearest.choice == colocated(structure)
    assert structure.evaluator.evaluate(result.nearest.choice).peak_ratio > 1


def test_a_structure_without_the_start_is_skipped() -> None:
    """On one GPU no group can be disjoint; 8000 bytes of state fit nowhere."""
    alone = run(CONCURRENT, make_problem(gpus_per_node=1, prompts=4))
    nowhere = run(GREEDY, make_problem(state=8000.0))
    for result in (alone, nowhere):
        assert (result.best, result.nearest, result.evaluations) == (None, None, 0)


def test_only_synchronous_structures() -> None:
    result = run(GREEDY, make_problem(taus=(1, 0, 2)), structures="synchronous")
    assert (result.best.structure, result.evaluations) == (1, 1)


def test_without_a_synchronous_structure() -> None:
    with pytest.raises(SettingsError, match="no structure with staleness 0"):
        run(GREEDY, make_problem(taus=(1,)), structures="synchronous")


def test_cancelling() -> None:
    progress = Progress()
    progress._report = lambda spent, evaluations, incumbent: progress.cancel()
    result = run(GREEDY, make_problem(), progress)
    assert (result.evaluations, result.stopped) == (1, "cancelled")
    assert result.best.structure == 0


@parametrize_checks(rpeg_search_strategies())
def test_conforms(check) -> None:
    check()


def test_the_records() -> None:
    assert rpeg_search_strategies() == (GREEDY, CONCURRENT)
    assert [(s.name, s.guarantee) for s in rpeg_search_strategies()] == [
        ("greedy", "baseline"),
        ("concurrent", "baseline"),
    ]
    assert check_settings_class(Settings) == ()
