"""The exhaustive search: equal to trying everything, honest when stopped early, obedient to budget and cancel."""

from __future__ import annotations

import itertools
import zlib

import attrs
import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpeg_plugin_exhaustive import EXHAUSTIVE, Settings, rpeg_search_strategies

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.errors import UsageError
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.passes.score import Objective
from rpeg_core.planning.bounds import certificate
from rpeg_core.planning.compiled import CompiledEvaluator
from rpeg_core.planning.problem import Problem, build_structure
from rpeg_core.planning.search import Progress, SearchBudget, SearchResult
from rpeg_core.planning.structures import Structure
from rpeg_core.records import CostTerm, Target
from rpeg_core.settings import check_settings_class
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.conformance import parametrize_checks
from rpeg_core.testing.toys import (
    SKEWED,
    active,
    toy_actor_critic,
    toy_hardware,
    toy_memory_terms,
    toy_mini,
    toy_ppo,
    toy_transfer_term,
    toy_workload,
)

SLOW = settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))


def uneven_seconds(seed: int) -> CostTerm:
    """Every layout has a time of its own, which falls with the GPUs more or less; phases have their share."""

    def function(batch: OperatorBatch) -> np.ndarray:
        what = (batch.role.value, batch.model.name, batch.prefill, len(batch.phases), batch.sequences)
        random = np.random.default_rng([seed, zlib.crc32(repr(what).encode())])
        share = batch.sequences / batch.workload.sequences
        if batch.phases:
            share = sum(phase.tokens for phase in batch.phases) / batch.workload.response_tokens
        scaled = batch.layouts.gpus ** -random.uniform(0.3, 1.0)
        return random.uniform(1.0, 4.0) * share * scaled * random.uniform(0.9, 1.1, len(batch.layouts))

    return CostTerm(name="uneven", summary="uneven", target=Target.OPERATOR, quantity="work", function=function)


def make_problem(
    graphs,
    *,
    seed: int = 0,
    machine: tuple[int, int, int] = (1, 1, 2),
    lengths=(),
    state: float = 0.0,
    steps: int = 3,
    prompts: int = 8,
    objective: Objective | None = None,
) -> Problem:
    """Problem of the given graphs; ``state`` bytes of training state of 900 per GPU."""
    space = DeviceSpace(racks=machine[0], nodes_per_rack=machine[1], gpus_per_node=machine[2])
    memory = toy_memory_terms(training_state={(m, "training"): state for m in ("actor", "critic", "shared")})
    workload = toy_workload(prompts=prompts, response_lengths=lengths)
    options = EvaluationOptions(steps=steps)
    terms = [active(term) for term in (uneven_seconds(seed), toy_transfer_term(bytes_per_s=1e5), *memory)]
    structures = tuple(
        build_structure(
            structure=Structure(staleness=()),
            rpeg=graph,
            machine=space,
            hardware=toy_hardware(),
            workload=workload,
            terms=terms,
            options=options,
        )
        for graph in graphs
    )
    return Problem(
        workload=workload,
        machine=space,
        hardware=toy_hardware(),
        objective=objective or Objective(),
        options=options,
        structures=structures,
    )


def run(
    problem: Problem, budget: SearchBudget | None = None, progress: Progress | None = None, **chosen
) -> SearchResult:
    return EXHAUSTIVE.run(problem, budget or SearchBudget(), Settings(**chosen), progress or Progress())


def everything(problem: Problem) -> np.ndarray:
    """Makespan, tokens/s, peak ratio, utilization and GPUs of every plan of every structure."""
    plans = [np.zeros((0, 5))]
    for structure in problem.structures:
        if structure.empty_operator is None:
            choices = np.array(list(itertools.product(*(range(len(c)) for c in structure.candidates))))
            plans.append(CompiledEvaluator(structure).evaluate_many(choices))
    return np.concatenate(plans)


def fastest(problem: Problem) -> float:
    plans = everything(problem)
    feasible = plans[plans[:, 2] <= 1.0]
    return float(feasible[:, 1].max()) if len(feasible) else 0.0


@SLOW
@given(
    st.integers(0, 10**6),
    st.sampled_from((toy_mini, toy_actor_critic)),
    st.sampled_from(((1, 1, 4), (1, 2, 2), (2, 1, 2), (1, 3, 1))),
    st.sampled_from(((), SKEWED)),
    st.sampled_from((0.0, 900.0, 2000.0)),
    st.sampled_from((1, 128)),
)
def test_it_finds_what_trying_everything_finds(seed, graph, machine, lengths, state, at_once):
    problem = make_problem([graph(tau=0), graph(tau=1)], seed=seed, machine=machine, lengths=lengths, state=state)
    result = run(problem, evaluated_at_once=at_once)
    best = fastest(problem)
    assert result.stopped == "finished"
    assert (result.evaluation.tokens_per_s if result.evaluation else 0.0) == pytest.approx(best, rel=1e-11)
    assert result.gap == (pytest.approx(0.0, abs=1e-11) if best else None)


@SLOW
@given(st.integers(0, 10**6), st.integers(0, 1), st.sampled_from(((), SKEWED)))
def test_six_operators_on_two_gpus(seed, tau, lengths):
    problem = make_problem([toy_ppo(tau=tau)], seed=seed, lengths=lengths, prompts=2)
    assert run(problem).evaluation.tokens_per_s == pytest.approx(fastest(problem), rel=1e-11)


@SLOW
@given(st.integers(0, 10**6), st.sampled_from(("throughput_x_utilization", "cost_per_token")))
def test_other_objectives_are_maximised_among_plans_that_are_fast_enough(seed, kind):
    objective = Objective(kind=kind, max_throughput_loss=0.2)
    problem = make_problem([toy_actor_critic(tau=1)], seed=seed, machine=(1, 1, 4), objective=objective)
    result = run(problem)
    plans = everything(problem)
    enough = plans[(plans[:, 2] <= 1.0) & (plans[:, 1] >= 0.8 * fastest(problem))]
    values = enough[:, 1] * (enough[:, 3] if kind == "throughput_x_utilization" else 1 / enough[:, 4])
    assert objective.value(result.evaluation, fastest(problem)) == pytest.approx(values.max(), rel=1e-11)
    assert (result.stopped, result.gap) == ("finished", 0.0)


@pytest.mark.parametrize("evaluations", [1, 10, 100, 400])
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_the_gap_of_an_early_stop_covers_the_optimum(evaluations, seed):
    problem = make_problem([toy_ppo(tau=1)], seed=seed, machine=(1, 1, 4), lengths=SKEWED)
    optimum = run(problem).evaluation.tokens_per_s
    early = run(problem, SearchBudget(evaluations=evaluations))
    assert early.evaluations <= evaluations
    assert early.evaluation.tokens_per_s >= optimum * (1 - early.gap) * (1 - 1e-9)
    assert early.gap >= 0.0
    assert early.stopped == "budget" or early.gap == pytest.approx(0.0, abs=1e-11)


def test_the_same_evaluations_give_the_same_result():
    problem = make_problem([toy_ppo(tau=0), toy_ppo(tau=1)], machine=(1, 1, 4), lengths=SKEWED)
    one, other = (run(problem, SearchBudget(evaluations=700)) for _ in range(2))
    assert (one.best, one.evaluation, one.nearest, one.evaluations, one.gap) == (
        (other.best, other.evaluation, other.nearest, other.evaluations, other.gap)
    )


def test_it_says_when_nothing_fits():
    problem = make_problem([toy_ppo(tau=1)], state=2000.0)
    result = run(problem)
    assert (result.best, result.gap, result.stopped) == (None, None, "finished")
    assert problem.structures[0].empty_operator is not None
    tight = make_problem([toy_ppo(tau=1)], state=1500.0)
    result = run(tight)
    assert fastest(tight) == 0.0
    assert (result.best, result.gap, result.stopped) == (None, None, "finished")
    assert result.nearest is not None


def test_a_structure_without_candidates_is_left_out():
    fine = make_problem([toy_mini(tau=1)])
    problem = attrs.evolve(fine, structures=(make_problem([toy_ppo()], state=5000.0).structures[0], *fine.structures))
    assert run(problem).best.structure == 1


def test_a_graph_too_large_for_the_proof_is_refused(monkeypatch):
    monkeypatch.setattr(certificate, "MAX_NODES", 1)
    with pytest.raises(UsageError, match="operators, too many for the bounds"):
        run(make_problem([toy_mini(tau=0)]))


def test_cancelled_before_and_in_the_middle():
    problem = make_problem([toy_ppo(tau=1)], machine=(1, 1, 4), lengths=SKEWED)
    progress = Progress()
    progress.cancel()
    assert run(problem, progress=progress).stopped == "cancelled"
    counts: list[int] = []

    def report(share: float, evaluations: int, incumbent: object) -> None:
        assert 0.0 <= share <= 1.0
        counts.append(evaluations)
        if evaluations > 50:
            progress.cancel()

    progress = Progress(report)
    result = run(problem, progress=progress)
    assert result.stopped == "cancelled"
    assert result.best is not None
    assert counts == sorted(counts)


def test_seconds_are_kept():
    problem = make_problem([toy_ppo(tau=1)], machine=(1, 2, 4), lengths=SKEWED, prompts=16)
    run(problem, SearchBudget(evaluations=1))  # compiled
    result = run(problem, SearchBudget(seconds=0.3))
    assert result.stopped == "finished" or 0.3 <= result.seconds < 5.0
    assert result.gap is not None


def test_a_full_tree_ends_the_search_with_its_gap():
    problem = make_problem([toy_ppo(tau=1)], machine=(1, 1, 4), lengths=SKEWED)
    optimum = run(problem)
    small = run(problem, open_boxes=64, evaluated_at_once=1)
    assert small.stopped == "budget"
    assert small.evaluation.tokens_per_s >= optimum.evaluation.tokens_per_s * (1 - small.gap) * (1 - 1e-9)


@parametrize_checks(rpeg_search_strategies())
def test_conforms(check):
    make_compiled()
    check()


def make_compiled() -> None:
    """Compiles before a check looks at the clock."""
    run(make_problem([toy_mini()]), SearchBudget(evaluations=1))


def test_the_record_and_its_settings():
    assert rpeg_search_strategies() == (EXHAUSTIVE,)
    assert (EXHAUSTIVE.name, EXHAUSTIVE.guarantee) == ("exhaustive", "optimal")
    check_settings_class(Settings)
