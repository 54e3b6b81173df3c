"""The bounds that reports show: of one structure, of a problem, and the gap of a plan to them."""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np

from rpeg_core.passes.score import Objective
from rpeg_core.planning.bounds import tree
from rpeg_core.planning.bounds.relaxation import BY_CHAIN, BY_IDLE, least_makespan
from rpeg_core.planning.bounds.state import BINDING, CLIQUES, MOST_PHASES, Scratch, build_scratch
from rpeg_core.planning.bounds.tables import build_box_tables
from rpeg_core.planning.compiled import CompiledEvaluator, Tables, build_tables
from rpeg_core.planning.problem import Problem, StructureProblem

__all__ = ["DEFAULT_BOXES", "Bound", "can_split", "evaluator_tables", "gap", "problem_bound", "upper_bound"]

DEFAULT_BOXES = 12_000
"""Boxes bounded per structure at most: about half a second. The bound holds wherever it stops."""

MAX_NODES = 62
"""Sets of nodes are bit masks."""


@attrs.frozen(kw_only=True)
class Bound:
    """No feasible plan is better than this.

    Attributes:
        tokens_per_s: upper bound, 0 when nothing fits, None when there is none for the objective.
        makespan_s: the least makespan of the horizon; infinite when nothing fits.
        reason: what keeps plans from being faster, in words.
        boxes: sets of plans that were bounded.
        structure: index of the structure that this bound is of, None for a bound of one structure.
    """

    tokens_per_s: float | None
    makespan_s: float | None
    reason: str
    boxes: int = 0
    structure: int | None = None


def gap(tokens_per_s: float, bound: Bound) -> float | None:
    """How far ``tokens_per_s`` is below the best possible at most, as a share of the latter; None without a bound."""
    if bound.tokens_per_s is None:
        return None
    if bound.tokens_per_s <= tokens_per_s:  # equal up to rounding
        return 0.0
    return 1.0 - tokens_per_s / bound.tokens_per_s


def problem_bound(problem: Problem, *, boxes: int = DEFAULT_BOXES, known_tokens_per_s: float = 0.0) -> Bound:
    """The largest bound over the structures of a problem.

    Args:
        problem: what is searched.
        boxes: see :func:`upper_bound`.
        known_tokens_per_s: see :func:`upper_bound`.
    """
    if problem.objective.kind != "throughput":
        return _no_bound(problem.objective)
    found = [upper_bound(s, boxes=boxes, known_tokens_per_s=known_tokens_per_s) for s in problem.structures]
    best = max(range(len(found)), key=lambda i: found[i].tokens_per_s)
    return attrs.evolve(found[best], boxes=sum(bound.boxes for bound in found), structure=best)


def upper_bound(
    problem: StructureProblem,
    objective: Objective | None = None,
    *,
    boxes: int = DEFAULT_BOXES,
    known_tokens_per_s: float = 0.0,
) -> Bound:
    """An upper bound on tokens/s over all feasible plans of one structure.

    Deterministic: it depends on the arguments only, not on time.

    Args:
        problem: the structure.
        objective: what is maximised, throughput by default; for other objectives there is no bound.
        boxes: stop after bounding so many sets of plans.
        known_tokens_per_s: what a known plan reaches. Plans that are no faster need no bound, which saves work; the
            result is never below it.
    """
    if objective is not None and objective.kind != "throughput":
        return _no_bound(objective)
    tokens = float(problem.options.steps * problem.book.workload.tokens_per_step)
    if problem.empty_operator is not None:
        return Bound(
            tokens_per_s=0.0, makespan_s=np.inf, reason=f"{problem.empty_operator} fits no GPU in any legal layout"
        )
    if not can_split(problem):
        return _work_bound(problem, tokens)
    cutoff = tokens / known_tokens_per_s if known_tokens_per_s > 0.0 else np.inf
    tables = build_box_tables(problem, evaluator_tables(problem))
    scratch = build_scratch(tables)
    frontier = tree.build_frontier(tables, scratch, 2 * boxes + 2 * len(tables.starts))
    makespan, _ = tree.grow(tables, frontier, scratch, cutoff, boxes, 1)
    count = int(frontier.counts[tree.BOUNDED])
    if makespan >= cutoff:
        known = np.isfinite(cutoff)
        return Bound(
            tokens_per_s=known_tokens_per_s,
            makespan_s=cutoff,
            reason="no plan is faster than the known one" if known else "no plan fits the memory of the GPUs",
            boxes=count,
        )
    group, start = (np.ascontiguousarray(plane, np.int64) for plane in tree.top(frontier))
    least_makespan(tables, group, start, scratch)
    return Bound(
        tokens_per_s=np.inf if makespan <= 0.0 else tokens / makespan,
        makespan_s=makespan,
        reason=_reason(problem.operators, scratch),
        boxes=count,
    )


def can_split(problem: StructureProblem) -> bool:
    """Whether the structure is small enough for sets of plans to be split; larger ones get a bound from their work."""
    return (1 + MOST_PHASES) * len(problem.candidates) + len(problem.rpeg.publication_edges) <= MAX_NODES


def evaluator_tables(problem: StructureProblem) -> Tables:
    """The tables of the problem's compiled evaluator, built when it has another evaluator."""
    evaluator = problem.evaluator
    return evaluator.tables if isinstance(evaluator, CompiledEvaluator) else build_tables(problem)


def _no_bound(objective: Objective) -> Bound:
    return Bound(
        tokens_per_s=None,
        makespan_s=None,
        reason=f"bounds are for the objective throughput, not for {objective.kind}",
    )


def _work_bound(problem: StructureProblem, tokens: float) -> Bound:
    """For graphs too large for bit masks: each operator at its fastest, and all at their least work."""
    work, longest = 0.0, 0.0
    for candidates in problem.candidates:
        costs = problem.book.operators[candidates.operator]
        seconds = costs.whole.total[candidates.layout]
        if costs.phases:
            seconds = np.minimum(seconds, sum(phase.total[candidates.layout] for phase in costs.phases))
        work += float((seconds * (candidates.stop - candidates.start)).min())
        longest = max(longest, float(seconds.min()))
    makespan = problem.options.steps * max(longest, work / problem.book.machine.gpus) * (1.0 - 1e-12)
    return Bound(
        tokens_per_s=tokens / makespan if makespan > 0.0 else np.inf,
        makespan_s=makespan,
        reason="the work of all operators, or the slowest one in every step",
    )


def _reason(operators: Sequence[str], w: Scratch) -> str:
    """What decides the bound of the box that was bounded last."""
    binding, cliques = int(w.counts[BINDING]), int(w.counts[CLIQUES])
    if binding == BY_CHAIN:
        count = len(operators)  # an operator's node, or that of its last phase
        through = w.done[:, :count] + w.left[:, :count]
        members = [operators[v] for v in np.flatnonzero(through.max(axis=0) >= through.max() * (1.0 - 1e-9))]
        return f"a chain over the steps through {_listed(members)}, which wait for each other or for shared GPUs"
    if binding == BY_IDLE:
        return "the GPU time of all operators, and GPUs that are idle while the first and the last ones run"
    if binding == cliques:
        return "the GPU time of all operators, between the first and the last ones"
    members = [name for v, name in enumerate(operators) if int(w.cliques[binding]) >> v & 1]
    if len(members) == 1:
        return f"{members[0]} runs once per step, one step after another"
    return f"{_listed(members)} share GPUs, where they run one after another"


def _listed(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{', '.join(names[:-1])} and {names[-1]}"
