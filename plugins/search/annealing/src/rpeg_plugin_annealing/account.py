"""The account of a run: evaluations and time spent, allowances, and the threads that work while it watches the clock.

The calling thread only waits: every few milliseconds it looks at the clock and at ``progress.cancelled``, and tells the
compiled loops to stop through one array element. With an evaluation budget alone nothing here depends on the clock.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from types import TracebackType
from typing import TypeVar

import numpy as np

from rpeg_core.costing.batches import Floats, Ints
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.search import Incumbent, Progress, SearchBudget

__all__ = ["Account", "cores"]

WATCH_S = 0.01
"""How often the clock and the cancellation are looked at."""

REPORTS_PER_S = 10

T = TypeVar("T")


def cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Account:
    """Books evaluations of one run against allowances.

    Attributes:
        incumbent: what was found.
        evaluations: uncached ones, of the whole run.
        stop: the element that the compiled loops look at; not 0 when they must return.
        threads: how many jobs run at once.
    """

    def __init__(self, problem: Problem, budget: SearchBudget, progress: Progress, threads: int) -> None:
        self.incumbent = Incumbent(problem.objective)
        self.evaluations = 0
        self.stop = np.zeros(1, np.int64)
        self.threads = threads
        self._budget, self._progress = budget, progress
        self._began = time.monotonic()
        self._next_report = self._began
        self._deadline, self._limit = math.inf, math.inf
        self._pool = ThreadPoolExecutor(threads, thread_name_prefix="annealing")

    def __enter__(self) -> Account:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, raised: BaseException | None, at: TracebackType | None
    ) -> None:
        self.stop[0] = 1
        self._pool.shutdown()

    @property
    def seconds(self) -> float:
        """Wall clock since the run began."""
        return time.monotonic() - self._began

    def allow(self, until: SearchBudget) -> None:
        """Work until the run, counted from its beginning, has spent ``until``."""
        self._deadline = math.inf if until.seconds is None else self._began + until.seconds
        self._limit = math.inf if until.evaluations is None else until.evaluations
        self.stop[0] = 0

    def over(self) -> bool:
        """Whether the current allowance is spent or the user cancelled."""
        return self.evaluations >= self._limit or self._interrupted()

    def room(self, wanted: int) -> int:
        """``wanted`` evaluations, or as many as the allowance has left."""
        return max(0, int(min(wanted, self._limit - self.evaluations)))

    def parallel(self, jobs: Sequence[Callable[[], T]]) -> list[T]:
        """Run jobs on the threads and return their results in order; ``stop`` is set when time is up meanwhile."""
        waiting = futures = [self._pool.submit(job) for job in jobs]
        try:
            while waiting:
                waiting = list(wait(waiting, timeout=WATCH_S).not_done)
                if self._interrupted():
                    self.stop[0] = 1
                self.report(only_when_due=True)
        except BaseException:
            self.stop[0] = 1
            wait(futures)
            raise
        return [future.result() for future in futures]

    def offer(self, structure: int, choices: Ints, results: Floats) -> None:
        """Consider evaluated choices."""
        self.incumbent.offer_rows(structure, choices, results, self.evaluations)

    def spent(self) -> float:
        """Share of the budget that is spent, 0..1; the larger share when it has two limits."""
        shares = [0.0]
        if self._budget.seconds:
            shares.append(self.seconds / self._budget.seconds)
        if self._budget.evaluations:
            shares.append(self.evaluations / self._budget.evaluations)
        return min(1.0, max(shares))

    def report(self, *, only_when_due: bool = False) -> None:
        """Tell the progress where the run stands."""
        now = time.monotonic()
        if not only_when_due or now >= self._next_report:
            self._next_report = now + 1 / REPORTS_PER_S
            self._progress.update(self.spent(), self.evaluations, self.incumbent)

    def _interrupted(self) -> bool:
        return self._progress.cancelled or time.monotonic() >= self._deadline
