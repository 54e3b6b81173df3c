"""What ``rpeg run`` and a backend that executes say to each other: a request in, a trace out.

``BackendSpec.open(plan, settings)`` returns a :class:`Session`; the command enters it, asks it to run once, and leaves
it. Whatever the session started, workers above all, is gone when it is left.

Files. With ``request.output`` the session writes into that folder, which exists: ``trace.jsonl`` while the run goes on,
``metrics.jsonl`` with one line per step, and what else it has to keep, e.g. checkpoints. The command adds ``plan.json``
before the run and ``trace.perfetto.json`` after it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

import attrs

from rpeg_core.runtime.trace import Trace

__all__ = ["METRICS_FILE", "PERFETTO_FILE", "PLAN_FILE", "TRACE_FILE", "RunRequest", "Session"]

PLAN_FILE = "plan.json"
TRACE_FILE = "trace.jsonl"
PERFETTO_FILE = "trace.perfetto.json"
METRICS_FILE = "metrics.jsonl"
"""Names in the output folder of a run."""


def _ignore_step(step: int, metrics: Mapping[str, float]) -> None:
    """Nobody observes the steps."""


def _ignore_status(text: str) -> None:
    """Nobody reads the status."""


def _never() -> bool:
    """Nobody cancels."""
    return False


@attrs.frozen(kw_only=True)
class RunRequest:
    """What the user wants of a run.

    Attributes:
        steps: RL steps in all, those before a resumed checkpoint included; None for the backend's setting.
        output: folder for files, see the module; None for none.
        resume: go on from the last complete checkpoint in ``output``.
        step_finished: to be called once per RL step in order, with its number from 0 and its metrics. Names that
            ``rpeg run`` shows when they are there: ``reward_mean``, ``loss``, ``kl``, ``tokens_per_s``; ``seconds``
            is the time since the step before it ended (or the run began), ``time_s`` that since the run began.
        cancelled: true once the user pressed Ctrl-C: dispatch nothing more, let what runs finish, end the trace
            with :class:`rpeg_core.runtime.trace.Stopped`, and return it.
        status: to be called with a few words on what happens outside the steps, e.g. ``starting 4 workers``.
    """

    steps: int | None = None
    output: Path | None = None
    resume: bool = False
    step_finished: Callable[[int, Mapping[str, float]], None] = _ignore_step
    cancelled: Callable[[], bool] = _never
    status: Callable[[str], None] = _ignore_status


class Session(Protocol):
    """One plan, ready to run on what a backend opened for it."""

    def __enter__(self) -> Self:
        """Acquire what the run needs."""
        ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Release it, also after an error."""
        ...

    def run(self, request: RunRequest) -> Trace:
        """Execute the plan's graph.

        Returns: the records of this run. One that was cancelled ends with :class:`Stopped`.

        Raises:
            ExecutionError: the run failed; the trace file, if any, is closed and ends with a :class:`Stopped`.
            BackendError: there is no checkpoint to resume from, or it belongs to another plan.
        """
        ...
