"""``rpeg run``: execute a plan with a backend and compare what happened with what was predicted."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpeg_core.cli import ui
from rpeg_core.cli.backends import backend_settings, interruptible
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import BackendError, ExecutionError, UsageError

if TYPE_CHECKING:
    from rpeg_core.cli.run_display import RunDisplay
    from rpeg_core.planning.plan import Plan
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.records import BackendSpec
    from rpeg_core.runtime.trace import Trace

__all__ = ["command"]

CURVE_WIDTH = 72
LAST_STEPS = 5
"""The final reward is the mean of so many."""


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--backend", default="simulator", show_default=True, metavar="NAME", help="What executes the plan.")
@click.option("--steps", type=click.IntRange(1), help="RL steps; the backend's own default without it.")
@click.option(
    "--output",
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Write the plan, the trace, metrics and what else the backend keeps into this folder.",
)
@click.option("--resume", is_flag=True, help="Go on from the last checkpoint in the folder of --output.")
@click.option("--set", "overrides", multiple=True, metavar="NAME.KEY=VALUE", help="A backend setting; repeatable.")
@click.option(
    "--trace",
    "trace_file",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="Write the trace as JSON lines, and beside it as .perfetto.json for ui.perfetto.dev.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(
    context: CommandContext,
    plan: Path,
    backend: str,
    steps: int | None,
    output: Path | None,
    resume: bool,
    overrides: tuple[str, ...],
    trace_file: Path | None,
    as_json: bool,
) -> int:
    """Execute PLAN and compare the time of a step with the prediction.

    The simulator, the default, executes in virtual time, without hardware: --set simulator.noise=0.1 makes durations
    random. --backend megatron trains for real, on the GPUs or CPU cores of this machine. Ctrl-C lets what runs finish
    and ends with 130: what was done is shown, and the trace is valid. Ends with 5 when the run fails.
    """
    from rpeg_core.cli import planning, run_folder
    from rpeg_core.cli.run_display import RunDisplay
    from rpeg_core.planning.plan import load_plan
    from rpeg_core.planning.recheck import with_own_intervals

    found = load_plan(plan)
    record = _backend(context.registry, backend)
    settings = backend_settings(
        record, found.experiment.settings, overrides, "all else was settled when the plan was made"
    )
    if resume and output is None:
        raise UsageError("--resume needs the folder of the run", hint="--output DIR")
    _check(found, context.registry)
    if not found.prediction.feasible:
        ui.print_warning(f"{plan} is predicted not to fit the memory of its GPUs; `rpeg predict {plan}` says why")
    if trace_file is not None:
        planning.writable(trace_file, plan)
    asked = getattr(settings, "steps", None) if steps is None else steps
    found = with_own_intervals(found, context.registry)
    with run_folder.held(output, found, resume=resume), ui.live() as show:
        display = RunDisplay(found, f"{backend} runs {plan}", asked, show)
        try:
            trace = _execute(record, settings, found, context.registry, display, steps, output, resume=resume)
        except ExecutionError as error:
            if output is None:
                raise
            raise _failed(error, output) from error
        except OSError as error:
            if output is None:
                raise
            where = [] if error.filename is None else [f"file: {error.filename}"]
            problem = ExecutionError(f"the run cannot go on: {error.strerror or error}", facts=where)
            raise _failed(problem, output) from error
    files = _write(trace, trace_file, output)
    stopped = _stopped(trace)
    metrics = (None if output is None else run_folder.read_metrics(output)) or display.metrics
    if as_json:
        ui.print_json(_document(plan, found, trace, metrics, files))
    else:
        _show(plan, found, trace, metrics, files)
    return ExitCode.INTERRUPTED if stopped else ExitCode.DONE


def _backend(registry: Registry, name: str) -> BackendSpec:
    """The backend of that name, if it can execute here.

    Raises:
        MissingPluginError, PluginError: it is not installed, or broken.
        BackendError: it only exports, or this machine lacks what it needs.
    """
    record: BackendSpec = registry.get("backend", name).record
    if "execute" not in record.can or record.open is None:
        able = sorted(loaded.name for loaded in registry.records("backend") if "execute" in loaded.record.can)
        raise BackendError(
            f"backend {name!r} cannot execute a plan",
            facts=[f"it can: {', '.join(sorted(record.can))}", f"backends that execute: {', '.join(able) or 'none'}"],
        )
    reason = record.probe()
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot be used on this machine", facts=[reason])
    return record


def _check(plan: Plan, registry: Registry) -> None:
    """Show what plugins remark on the plan.

    Raises:
        BackendError: one of them says that the plan cannot be run.
    """
    from rpeg_core.cli import planning
    from rpeg_core.diagnostics import Severity

    registry.load("hardware")  # the plan's profile may have a say; loading does not measure
    remarks = registry.check_plan(plan)
    planning.show_diagnostics(remarks)
    refused = [r for r in remarks if r.diagnostic.severity is Severity.ERROR]
    if refused:
        raise BackendError("the plan cannot be run", facts=[f"{r.plugin}: {r.diagnostic.message}" for r in refused])


def _execute(
    record: BackendSpec,
    settings: Any,
    plan: Plan,
    registry: Registry,
    display: RunDisplay,
    steps: int | None,
    output: Path | None,
    *,
    resume: bool,
) -> Trace:
    """Run, with progress shown and observers told."""
    from rpeg_core.runtime.session import RunRequest

    assert record.open is not None  # _backend refuses those that do not execute

    def step_finished(step: int, metrics: Mapping[str, float]) -> None:
        display.step_finished(step, metrics)
        registry.observers("rpeg_step_finished", plan=plan, step=step, metrics=metrics)

    with (
        interruptible("stopping when what runs is done; Ctrl-C again gives up") as pressed,
        record.open(plan, settings) as session,
    ):
        registry.observers("rpeg_run_started", plan=plan)
        request = RunRequest(
            steps=steps,
            output=output,
            resume=resume,
            step_finished=step_finished,
            cancelled=pressed.is_set,
            status=display.status,
        )
        trace = session.run(request)
    registry.observers("rpeg_run_finished", plan=plan, trace=trace)
    return trace


def _failed(error: ExecutionError, output: Path) -> ExecutionError:
    """The error with where to look, the trace made readable."""
    from rpeg_core.cli import run_folder

    run_folder.write_perfetto(output)
    return ExecutionError(error.what, facts=[*error.facts, f"what was done is in {output}"], hint=error.hint)


def _stopped(trace: Trace) -> str | None:
    """Why a run ended early, None when it did not."""
    from rpeg_core.runtime.trace import Stopped

    last = trace.records[-1] if trace.records else None
    return last.reason if isinstance(last, Stopped) else None


def _write(trace: Trace, path: Path | None, output: Path | None) -> dict[str, str]:
    """Write what the session does not; the names of the files."""
    from rpeg_core.runtime.session import PERFETTO_FILE, TRACE_FILE

    files: dict[str, str] = {}
    if output is not None:
        trace.write_chrome(output / PERFETTO_FILE)
        files = {
            "output": str(output),
            "trace_file": str(output / TRACE_FILE),
            "perfetto_file": str(output / PERFETTO_FILE),
        }
    if path is not None:
        perfetto = path.with_suffix(".perfetto.json")
        trace.write(path)
        trace.write_chrome(perfetto)
        files |= {"trace_file": str(path), "perfetto_file": str(perfetto)}
    return files


def _document(
    path: Path, plan: Plan, trace: Trace, metrics: Mapping[int, Mapping[str, float]], files: Mapping[str, str]
) -> dict[str, Any]:
    from rpeg_core.report import execution

    return {
        "plan_file": str(path),
        **execution.document(plan, trace, execution.Execution.of(plan, trace)),
        "interrupted": _stopped(trace),
        "metrics": [{"step": step, **_finite(values)} for step, values in metrics.items()],
        **files,
    }


def _finite(values: Mapping[str, float]) -> dict[str, float | None]:
    """JSON has no NaN."""
    return {name: value if abs(value) < float("inf") else None for name, value in values.items()}


def _show(
    path: Path, plan: Plan, trace: Trace, metrics: Mapping[int, Mapping[str, float]], files: Mapping[str, str]
) -> None:
    from rpeg_core.cli import planning
    from rpeg_core.report import execution, words

    stopped, backend = _stopped(trace), trace.header.backend
    asked = trace.header.steps - trace.header.first_step
    done = words.plural(trace.steps, "step") if stopped is None else f"{trace.steps} of {words.plural(asked, 'step')}"
    after = f", from step {trace.header.first_step + 1} on" if trace.header.first_step else ""
    ui.print_text(f"{backend} executed {done} of {path}{after} ({trace.header.clock} time)")
    if stopped is not None:
        ui.print_text(f"stopped: {stopped}")
    found = execution.Execution.of(plan, trace)
    if found is not None:
        planning.show_grid(execution.comparison(found))
        planning.show_grid(execution.operators(found))
    _show_curve(metrics)
    if trace.header.notes:
        ui.print_text("\n" + "\n".join(trace.header.notes))
    if files:
        ui.print_text("")
    for name in files.values():
        ui.print_text(f"written: {name}")
    if "output" in files:
        ui.print_text(f"next: rpeg verify {files['output']}")


def _show_curve(metrics: Mapping[int, Mapping[str, float]]) -> None:
    """The reward, or what stands for it, by step."""
    import statistics

    from rpeg_core.cli.run_display import CURVES, metric
    from rpeg_core.report import curve, words
    from rpeg_core.report.page import terminal_width

    for label in CURVES:
        values = {step: value for step, each in metrics.items() if (value := metric(each, label)) is not None}
        if not values:
            continue
        terminal = ui.is_terminal()
        width = max(8, min(CURVE_WIDTH, terminal_width() - 12)) if terminal else CURVE_WIDTH
        series = list(values.values())
        lines = curve.chart(series, first=min(values) + 1, width=width, ascii_only=not terminal)
        last = series[-LAST_STEPS:]
        ui.print_text("\n".join(["", f"{label} by step", *lines]))
        of = f"mean of the last {words.plural(len(last), 'step')}" if len(last) > 1 else "of the only step"
        ui.print_text(f"final {label} {statistics.fmean(last):.4g}, {of}; {series[0]:.4g} in step {min(values) + 1}")
        return
