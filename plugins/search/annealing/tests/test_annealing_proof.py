"""Branch and bound before the chains: what it proves, what it leaves to them, and when it is left out."""

from __future__ import annotations

import pytest
from rpeg_plugin_annealing import ANNEALING, Settings, strategy

from rpeg_core.passes.score import Objective
from rpeg_core.planning.bounds import certificate
from rpeg_core.planning.exact import Proof
from rpeg_core.planning.search import Progress, SearchBudget
from rpeg_core.testing.toys import toy_ppo


def run(problem, evaluations: int, **settings):
    return ANNEALING.run(problem, SearchBudget(evaluations=evaluations), Settings(**settings), Progress())


@pytest.mark.parametrize("kind", Objective.KINDS)
def test_a_proved_optimum_ends_the_search(toys, kind: str) -> None:
    """Of both structures, against all configurations, with a tenth of their number to evaluate."""
    objective = Objective(kind=kind, max_throughput_loss=0.3)
    problem = toys.mini(objective=objective)
    everything = [e for _, e in toys.everything(problem)]
    fastest = max(e.tokens_per_s for e in everything if e.feasible)
    result = run(problem, 100_000)
    assert (result.stopped, result.gap) == ("finished", 0.0)
    assert result.evaluations < len(everything)
    best = max(objective.value(e, fastest) for e in everything if e.feasible)
    assert objective.value(result.evaluation, fastest) == pytest.approx(best, rel=1e-11)


def test_chains_continue_from_what_was_not_proved(toys, watch) -> None:
    """Its plan is what the islands are asked first, and the gap is that of the plan in the end."""
    problem = toys.problem(toys.structure(toy_ppo(tau=1), machine=(1, 4, 2)))
    handed = []

    class Watched(strategy.StructureSearch):
        def run(self, inherited):
            handed.append((list(inherited), self._account.incumbent.best))
            super().run(inherited)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(strategy, "StructureSearch", Watched)
        result = run(problem, 6000, proof_share=0.3)
    assert handed[0][0] == [handed[0][1].choice]
    assert watch.count(problem.structures[0]) > 3000
    assert result.stopped == "budget"
    optimum = run(problem, 2_000_000, proof_share=0.9)
    assert optimum.stopped == "finished"
    reached = result.evaluation.tokens_per_s
    assert optimum.evaluation.tokens_per_s * (1 - result.gap) <= reached * (1 + 1e-9)
    assert reached <= optimum.evaluation.tokens_per_s * (1 + 1e-9)


@pytest.mark.parametrize("evaluations", [1, 2, 3, 10, 77, 1500, 9001])
def test_evaluations_are_never_exceeded(toys, evaluations: int) -> None:
    result = run(toys.problem(toys.structure(toy_ppo(tau=1), machine=(1, 4, 2))), evaluations)
    assert result.evaluations <= evaluations
    assert result.best is not None


@pytest.mark.parametrize("left_out", [{"proof_share": 0.0}, {"microbatch_tuning": False}])
def test_it_can_be_left_out(toys, monkeypatch, left_out) -> None:
    """By its own setting, and where chains may not choose all candidates."""
    monkeypatch.setattr(strategy, "prove", lambda *_, **__: pytest.fail("proved"))
    result = run(toys.ppo(), 2000, **left_out)
    assert (result.gap, result.best is not None) == (None, True)


def test_graphs_that_are_too_large_for_bounds_are_left_to_the_chains(toys, monkeypatch) -> None:
    monkeypatch.setattr(certificate, "MAX_NODES", 1)
    result = run(toys.ppo(), 2000)
    assert (result.gap, result.best is not None) == (None, True)


def test_a_proof_that_finds_nothing_feasible(toys) -> None:
    result = run(toys.mini(state={("actor", "training"): 3200.0}), 10_000)
    assert (result.best, result.gap, result.stopped) == (None, None, "finished")
    assert result.nearest is not None


def test_it_does_not_say_more_than_it_knows(toys, monkeypatch) -> None:
    """An unfinished proof with a limit: the gap is to the limit."""
    monkeypatch.setattr(
        strategy, "prove", lambda *_, **__: Proof(complete=False, limit_tokens_per_s=1e9, evaluations=7)
    )
    result = run(toys.ppo(), 2000)
    assert result.gap == pytest.approx(1 - result.evaluation.tokens_per_s / 1e9)
    assert result.stopped == "budget"
