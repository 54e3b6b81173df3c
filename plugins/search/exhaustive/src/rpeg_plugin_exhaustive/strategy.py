"""The run: :func:`rpeg_core.planning.exact.prove` with the whole budget."""

from __future__ import annotations

from rpeg_core.errors import UsageError
from rpeg_core.planning.bounds import can_split
from rpeg_core.planning.exact import prove
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.search import Incumbent, Progress, SearchBudget, SearchResult
from rpeg_plugin_exhaustive.settings import Settings

__all__ = ["prepare", "run"]


def run(problem: Problem, budget: SearchBudget, settings: Settings, progress: Progress) -> SearchResult:
    """Search all structures that have candidates; without any limit until the optimum is proved.

    Raises:
        UsageError: a graph has too many operators for the proof.
    """
    for structure in problem.structures:
        if not can_split(structure):
            raise UsageError(
                f"exhaustive cannot prove plans of {structure.rpeg.name!r}",
                facts=[f"it has {len(structure.candidates)} operators, too many for the bounds"],
                hint="use --strategy annealing",
            )
    incumbent = Incumbent(problem.objective)
    proof = prove(
        problem,
        budget,
        progress,
        incumbent,
        open_boxes=settings.open_boxes,
        evaluated_at_once=settings.evaluated_at_once,
    )
    stopped = "finished" if proof.complete else "cancelled" if progress.cancelled else "budget"
    return incumbent.result(proof.evaluations, stopped, proof.gap(incumbent))


def prepare(problem: Problem) -> None:
    """Compile or load the kernels, by a search that is over at once. Raises as :func:`run`."""
    run(problem, SearchBudget(evaluations=1), Settings(), Progress())
