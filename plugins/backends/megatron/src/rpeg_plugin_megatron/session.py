"""What ``rpeg run --backend megatron`` opens: the workers of one plan, and the files of its run."""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import TracebackType

from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.session import METRICS_FILE, TRACE_FILE, RunRequest
from rpeg_core.runtime.trace import Record, Stopped, Trace, TraceHeader, TraceWriter
from rpeg_core.runtime.window import Window
from rpeg_plugin_megatron.checkpoints import Checkpoints, Found
from rpeg_plugin_megatron.controller import INTERRUPTED, Controller, reason_of
from rpeg_plugin_megatron.crew import Crew
from rpeg_plugin_megatron.flow import due_bytes
from rpeg_plugin_megatron.host import check_workers
from rpeg_plugin_megatron.inputs import open_inputs
from rpeg_plugin_megatron.launcher import launcher_for
from rpeg_plugin_megatron.layouts import check_axes
from rpeg_plugin_megatron.metrics import MetricsFiles, StepMetrics
from rpeg_plugin_megatron.settings import Settings

__all__ = ["LOGS_FOLDER", "TENSORBOARD_FOLDER", "WORKER", "MegatronSession", "open_session"]

LOGS_FOLDER = "logs"
TENSORBOARD_FOLDER = "tensorboard"
"""Names in the output folder of a run."""

WORKER = "rpeg_plugin_megatron.worker:Worker"
"""The class that does the work of a rank."""


class MegatronSession:
    """A context manager that runs one plan; its workers live as long as :meth:`run` takes.

    Args:
        plan: what to run.
        settings: of the backend.
        worker: dotted name of the class that does the work of a rank; tests name another.
        notes: what whoever reads the results must know, a sentence each.
    """

    def __init__(self, plan: Plan, settings: Settings, *, worker: str = WORKER, notes: tuple[str, ...] = ()) -> None:
        self._plan, self._settings, self._worker, self._notes = plan, settings, worker, notes
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> MegatronSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._stack.close()

    def run(self, request: RunRequest) -> Trace:
        """Execute the plan's graph, see :class:`rpeg_core.runtime.session.Session`.

        Raises:
            ExecutionError: the run failed; the trace file is closed and says why.
            BackendError: there is no checkpoint to resume from, it belongs to another run, or the output folder
                cannot be used.
            RpegError: what a worker raised on purpose when it was set up, e.g. about a file of data.
        """
        plan, settings = self._plan, self._settings
        window = Window(plan.rpeg, plan.assignments, plan.workload, split_lengths=plan.options.split_lengths)
        steps = settings.steps if request.steps is None else request.steps
        with contextlib.closing(self._crew(request.output)) as crew:
            checkpoints = self._checkpoints(request, crew.world)
            found = _resume_from(checkpoints, request, steps)
            first_step = 0 if found is None else found.step
            header = TraceHeader(
                plan=plan.digest,
                backend="megatron",
                steps=steps,
                clock="wall",
                first_step=first_step,
                notes=self._notes,
            )
            for note in self._notes:
                request.status(note)
            with _journal(request.output, header) as journal, _metrics(request, first_step) as write_metrics:

                def step_finished(step: int, metrics: Mapping[str, float]) -> None:
                    write_metrics(step, metrics)
                    request.step_finished(step, metrics)

                every = settings.checkpoint_every if checkpoints is not None else 0
                engine = Engine(
                    window,
                    steps,
                    first_step=first_step,
                    pause_every=every or None,
                    limit_s=settings.node_timeout_s,
                )
                controller = Controller(
                    engine=engine,
                    window=window,
                    steps=steps,
                    crew=crew,
                    journal=journal,
                    metrics=StepMetrics(plan.workload.tokens_per_step),
                    due_bytes=lambda node: due_bytes(node, plan.rpeg, plan.assignments, plan.workload),
                    clock=time.monotonic,
                    checkpoint=_saver(checkpoints, request.status),
                    step_finished=step_finished,
                    cancelled=request.cancelled,
                    status=request.status,
                    limit_s=settings.node_timeout_s,
                )
                with _hint(checkpoints):
                    started = self._execute(crew, controller, journal, found, request)
            trace = journal.trace()
            if request.output is not None and settings.export and first_step + trace.steps == steps:
                self._export(controller, request.output, request.status)
            if started:
                crew.dismiss()
        return trace

    def _execute(
        self, crew: Crew, controller: Controller, journal: _Journal, found: Found | None, request: RunRequest
    ) -> bool:
        """Start the workers, restore, run; False when the user cancelled before they were ready."""
        try:
            if not crew.start(request.cancelled, request.status):
                journal.write(Stopped(0.0, INTERRUPTED, journal.header.first_step))
                return False
            if found is not None:
                request.status(f"restoring step {found.step}")
                controller.restore(found.folder)
        except BaseException as error:
            journal.write(Stopped(0.0, reason_of(error), journal.header.first_step))
            raise
        request.status("running")
        controller.run()
        return True

    def _export(self, controller: Controller, output: Path, status: Callable[[str], None]) -> None:
        for model in self._plan.rpeg.models:
            if model.trainable:
                status(f"writing {model.name}")
                folder = output / model.name
                folder.mkdir(exist_ok=True)
                controller.export(folder, model.name)

    def _crew(self, output: Path | None) -> Crew:
        if output is None:
            logs = Path(self._stack.enter_context(tempfile.TemporaryDirectory(prefix="rpeg-logs-")))
        else:
            logs = output / LOGS_FOLDER
            logs.mkdir(exist_ok=True)
        launcher = launcher_for(self._settings, logs, os.environ)
        return Crew(launcher, self._plan, self._settings, self._worker, time.monotonic)

    def _checkpoints(self, request: RunRequest, world: int) -> Checkpoints | None:
        if request.output is None:
            if request.resume or self._settings.checkpoint_every:
                raise BackendError(
                    "checkpoints need an output folder",
                    facts=[
                        f"resume: {request.resume}",
                        f"megatron.checkpoint_every: {self._settings.checkpoint_every}",
                    ],
                    hint="name one with --output",
                )
            return None
        return Checkpoints(request.output, self._plan, self._settings, world)


class _Journal:
    """Records of a run: in a file, or in memory when there is no folder for it."""

    def __init__(self, header: TraceHeader, path: Path | None, writer: TraceWriter | None) -> None:
        self.header, self._path, self._writer = header, path, writer
        self._records: list[Record] = []

    def write(self, record: Record) -> None:
        if self._writer is None:
            self._records.append(record)
        else:
            self._writer.write(record)

    def flush(self) -> None:
        if self._writer is not None:
            self._writer.flush()

    def trace(self) -> Trace:
        """The whole, once it is closed."""
        return Trace(self.header, tuple(self._records)) if self._path is None else Trace.read(self._path)


@contextlib.contextmanager
def _journal(output: Path | None, header: TraceHeader) -> Iterator[_Journal]:
    """A journal that is closed in any case: whoever wrote to it has said how the run ended."""
    if output is None:
        yield _Journal(header, None, None)
        return
    writer = TraceWriter(output / TRACE_FILE, header)
    try:
        yield _Journal(header, output / TRACE_FILE, writer)
    finally:
        writer.close()


@contextlib.contextmanager
def _metrics(request: RunRequest, first_step: int) -> Iterator[Callable[[int, Mapping[str, float]], None]]:
    """Where the metrics of a step are written to, if anywhere."""
    if request.output is None:
        yield lambda step, metrics: None
        return
    with MetricsFiles(request.output / METRICS_FILE, request.output / TENSORBOARD_FOLDER, first_step) as files:
        yield files.write


@contextlib.contextmanager
def _hint(checkpoints: Checkpoints | None) -> Iterator[None]:
    """Tell the user of a run that failed from where it can go on."""
    try:
        yield
    except ExecutionError as error:
        step = None if checkpoints is None else checkpoints.last_step()
        if step is None or error.hint is not None:
            raise
        hint = f"--resume goes on from the checkpoint after {step} steps"
        raise ExecutionError(error.what, facts=error.facts, hint=hint) from error


def _resume_from(checkpoints: Checkpoints | None, request: RunRequest, steps: int) -> Found | None:
    if checkpoints is None:
        return None
    if not request.resume:
        checkpoints.refuse_earlier()
        return None
    found = checkpoints.latest()
    if found.step >= steps:
        raise BackendError(
            f"{found.folder} is the checkpoint after {found.step} of {steps} steps: there is nothing left to do",
            hint="ask for more with --steps",
        )
    return found


def _saver(
    checkpoints: Checkpoints | None, status: Callable[[str], None]
) -> Callable[[int, Callable[[Path], None]], None]:
    """What the controller calls at a pause."""

    def save(step: int, write: Callable[[Path], None]) -> None:
        assert checkpoints is not None  # without an output folder the engine does not pause
        status(f"writing the checkpoint of step {step}")
        write(checkpoints.begin(step))
        checkpoints.complete(step)

    return save


def open_session(plan: Plan, settings: Settings) -> MegatronSession:
    """A session on Megatron workers.

    Not a plan check (``rpeg_check_plan``): what this backend cannot execute another one may.

    Raises:
        BackendError: the plan chooses what this backend cannot execute, or this machine cannot bear its workers.
        SettingsError, DataError, ExperimentError: what a run reads cannot be used; see :func:`open_inputs`.
    """
    check_axes(plan.assignments)
    check_workers(plan, settings)
    return MegatronSession(plan, settings, notes=open_inputs(plan, settings).notes)
