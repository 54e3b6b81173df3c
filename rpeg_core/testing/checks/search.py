"""Search strategies: what they return exists, fits and is evaluated right; they stop when told, and repeat by seed."""

from __future__ import annotations

import contextlib
import itertools
import random
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np

from rpeg_core.passes.score import Evaluation, Objective
from rpeg_core.planning.problem import Evaluator, Problem
from rpeg_core.planning.search import Progress, SearchBudget, SearchResult
from rpeg_core.records import SearchStrategy
from rpeg_core.testing.checks.common import defaults
from rpeg_core.testing.checks.outcome import CheckFailedError, RecordCheck, require
from rpeg_core.testing.checks.samples import EMPTY, INFEASIBLE, ROOMY, TIGHT, Demand, problem

__all__ = ["checks"]

BUDGET = SearchBudget(evaluations=60)
SMALL_BUDGET = SearchBudget(evaluations=25)
SECONDS = 0.2
GRACE_S = 5.0
"""How late a search may return after its seconds are over; generous, for machines that are busy."""

LIMIT_S = 15.0
"""A search of a few hundred configurations that has not ended by then is cancelled, and fails."""

AFTER_CANCEL = 10
"""Evaluations that may follow a cancellation."""

STOPPED = ("budget", "cancelled", "finished")


@attrs.define
class _Counted:
    """An evaluator that keeps account."""

    evaluator: Evaluator
    evaluated: Callable[[], None]
    choices: set[tuple[int, ...]] = attrs.field(factory=set)

    def evaluate(self, choice: Sequence[int]) -> Evaluation:
        self.choices.add(tuple(map(int, choice)))
        self.evaluated()
        return self.evaluator.evaluate(choice)

    def critical_seconds(self, choice: Sequence[int]) -> np.ndarray:
        return self.evaluator.critical_seconds(choice)

    def __getattr__(self, name: str) -> Any:
        """What the compiled evaluator offers beyond the protocol."""
        return getattr(self.evaluator, name)


@attrs.frozen(kw_only=True)
class _Run:
    """One search and what it did."""

    problem: Problem
    result: SearchResult
    calls: int
    distinct: int
    seconds: float
    reports: tuple[tuple[float, int], ...]


def feasible(record: SearchStrategy) -> None:
    """With room for everything it finds a plan, for each objective, and says truly what it is worth."""
    for objective in Objective.KINDS:
        run = _run(record, ROOMY, BUDGET, objective=objective)
        if run.result.best is None:
            raise CheckFailedError(f"objective {objective}: every plan fits, and it found none")
        _require_true(run)


def memory(record: SearchStrategy) -> None:
    """Where not all fits, what it calls best fits."""
    _require_true(_run(record, TIGHT, BUDGET))


def nothing_fits(record: SearchStrategy) -> None:
    """Where nothing fits it returns no plan instead of raising or stretching memory."""
    for demand, which in ((INFEASIBLE, "no combination fits"), (EMPTY, "an operator has no candidate")):
        run = _run(record, demand, BUDGET)
        if run.result.best is not None:
            raise CheckFailedError(f"{which}, and it calls {run.result.best} the best")
        _require_true(run)


def evaluations(record: SearchStrategy) -> None:
    """The budget of evaluations is kept, and the count that it reports is right."""
    run = _run(record, ROOMY, SMALL_BUDGET)
    allowed = SMALL_BUDGET.evaluations
    if max(run.result.evaluations, run.distinct) > allowed:
        raise CheckFailedError(f"{allowed} evaluations allowed, {run.distinct} made, {run.result.evaluations} reported")
    if run.distinct > run.result.evaluations:
        raise CheckFailedError(f"{run.distinct} configurations evaluated, {run.result.evaluations} reported")


def seconds(record: SearchStrategy) -> None:
    """The search ends when its seconds are over."""
    run = _run(record, ROOMY, SearchBudget(seconds=SECONDS))
    if run.seconds > SECONDS + GRACE_S:
        raise CheckFailedError(f"{SECONDS} s allowed, it took {run.seconds:.1f} s")
    _require_true(run)


def cancelled(record: SearchStrategy) -> None:
    """Cancelled, it returns at once with what it has: before the start, and in the middle."""
    for calls in (0, 5):
        run = _run(record, ROOMY, SearchBudget(evaluations=1000), cancel_after=calls)
        if run.calls > calls + AFTER_CANCEL:
            raise CheckFailedError(f"cancelled after {calls} evaluations, it made {run.calls - calls} more")
        _require_true(run)


def repeatable(record: SearchStrategy) -> None:
    """The same seed and a budget of evaluations give the same result, whatever the global random state is."""
    found = []
    for state in (1, 2):
        with _global_random(state):
            result = _run(record, TIGHT, BUDGET, seed=3).result
        found.append((result.best, result.evaluation, result.nearest, result.evaluations))
    if found[0] != found[1]:
        raise CheckFailedError(f"two searches with one seed differ: {found[0]} and {found[1]}")


def progress(record: SearchStrategy) -> None:
    """Reports have a share in 0..1 and evaluations that only grow."""
    reports = _run(record, ROOMY, BUDGET).reports
    require([f"it reported a share of {share}; allowed: 0..1" for share, _ in reports if not 0 <= share <= 1])
    counts = [count for _, count in reports]
    if counts != sorted(counts):
        raise CheckFailedError(f"the evaluations that it reported shrink: {counts}")


def optimal(record: SearchStrategy) -> None:
    """A search that promises the optimum finds what trying everything finds."""
    for demand in (ROOMY, TIGHT):
        run = _run(record, demand, SearchBudget(seconds=60.0))
        best = max(e.tokens_per_s for e in _every_evaluation(run.problem) if e.feasible)
        got = 0.0 if run.result.evaluation is None else run.result.evaluation.tokens_per_s
        if got < best:
            raise CheckFailedError(f"it found {got:.6g} tokens/s, trying everything finds {best:.6g}")


def checks(record: SearchStrategy) -> tuple[RecordCheck, ...]:
    """The checks that apply to what ``record`` guarantees."""
    common: tuple[RecordCheck, ...] = (
        ("feasible", feasible),
        ("memory", memory),
        ("nothing-fits", nothing_fits),
        ("evaluations", evaluations),
        ("seconds", seconds),
        ("cancelled", cancelled),
        ("repeatable", repeatable),
        ("progress", progress),
    )
    return (*common, ("optimal", optimal)) if record.guarantee == "optimal" else common


def _run(
    record: SearchStrategy,
    demand: Demand,
    budget: SearchBudget,
    *,
    objective: str = "throughput",
    seed: int | None = None,
    cancel_after: int | None = None,
) -> _Run:
    given = problem(demand, objective)
    calls = 0
    reports: list[tuple[float, int]] = []
    watched = Progress(lambda share, count, incumbent: reports.append((share, count)))

    def evaluated() -> None:
        nonlocal calls
        calls += 1
        if calls == cancel_after:
            watched.cancel()

    given.prepare()  # compiled before the clock runs, as the planner has it
    if record.prepare is not None:
        record.prepare(given)
    evaluators = []
    for structure in given.structures:
        evaluators.append(_Counted(structure.evaluator, evaluated))
        structure.__dict__["evaluator"] = evaluators[-1]  # in place of the cached property
    if cancel_after == 0:
        watched.cancel()
    settings = defaults(record)
    if seed is not None and "seed" in attrs.fields_dict(record.settings):
        settings = attrs.evolve(settings, seed=seed)
    began = time.monotonic()
    with _cancelled_after(LIMIT_S, watched):
        result = record.run(given, budget, settings, watched)
    took = time.monotonic() - began
    if took > LIMIT_S:
        raise CheckFailedError(f"with {_described(budget)} it had not ended after {LIMIT_S:g} s")
    if not isinstance(result, SearchResult):
        raise CheckFailedError(f"run returned {type(result).__name__}, not SearchResult")
    return _Run(
        problem=given,
        result=result,
        calls=calls,
        distinct=sum(len(counted.choices) for counted in evaluators),
        seconds=took,
        reports=tuple(reports),
    )


@contextlib.contextmanager
def _cancelled_after(limit_s: float, progress: Progress) -> Iterator[None]:
    timer = threading.Timer(limit_s, progress.cancel)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _described(budget: SearchBudget) -> str:
    limits = attrs.asdict(budget, filter=lambda _, value: value is not None)
    return "a budget of " + ", ".join(f"{value:g} {name}" for name, value in limits.items())


def _require_true(run: _Run) -> None:
    """Fails when the result contradicts itself or the readable evaluator."""
    result = run.result
    problems = []
    if result.stopped not in STOPPED:
        problems.append(f"stopped is {result.stopped!r}; allowed: {', '.join(STOPPED)}")
    if (result.best is None) != (result.evaluation is None):
        problems.append("best and evaluation must both be there or both be None")
    for solution, name in ((result.best, "best"), (result.nearest, "nearest")):
        if solution is not None and not _exists(run.problem, solution.structure, solution.choice):
            problems.append(f"{name}, {solution}, is not in the search space")
    require(problems)
    if result.best is None:
        return
    structure = run.problem.structures[result.best.structure]
    readable = structure.predict(structure.plan(result.best.choice)).evaluation
    if result.evaluation != readable:
        raise CheckFailedError(f"it says {result.evaluation}, the readable evaluator {readable}")
    if not readable.feasible:
        raise CheckFailedError(f"its best plan does not fit: {readable.peak_ratio:.3f} of the usable memory")


def _exists(given: Problem, structure: int, choice: Sequence[int]) -> bool:
    if not 0 <= structure < len(given.structures):
        return False
    candidates = given.structures[structure].candidates
    return len(choice) == len(candidates) and all(
        0 <= index < len(options) for index, options in zip(choice, candidates, strict=True)
    )


def _every_evaluation(given: Problem) -> Iterator[Evaluation]:
    for structure in given.structures:
        for choice in itertools.product(*(range(len(candidates)) for candidates in structure.candidates)):
            yield structure.predict(structure.plan(choice)).evaluation


@contextlib.contextmanager
def _global_random(seed: int) -> Iterator[None]:
    """Sets the global random state for a while: a strategy that uses it gives itself away."""
    python, legacy = random.getstate(), np.random.get_state()
    random.seed(seed)
    np.random.seed(seed)
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(legacy)
