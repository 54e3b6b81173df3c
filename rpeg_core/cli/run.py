"""``rpeg run``: execute a plan with a backend and compare what happened with what was predicted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.errors import BackendError, UnknownKeyError, suggest

if TYPE_CHECKING:
    from rpeg_core.planning.plan import Plan
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.records import BackendSpec
    from rpeg_core.report.page import Grid
    from rpeg_core.runtime.trace import Trace

__all__ = ["command"]


@click.command("run")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--backend", default="simulator", show_default=True, metavar="NAME", help="What executes the plan.")
@click.option("--steps", type=click.IntRange(1), help="RL steps; the backend's own default without it.")
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
    overrides: tuple[str, ...],
    trace_file: Path | None,
    as_json: bool,
) -> None:
    """Execute PLAN and compare the time of a step with the prediction.

    The simulator executes in virtual time, without hardware: --set simulator.noise=0.1 makes durations random.
    """
    from rpeg_core.cli import planning
    from rpeg_core.planning.plan import load_plan

    found = load_plan(plan)
    record = _backend(context.registry, backend)
    settings = _settings(record, found, overrides)
    _check(found, context.registry)
    if not found.prediction.feasible:
        ui.print_warning(f"{plan} is predicted not to fit the memory of its GPUs; `rpeg predict {plan}` says why")
    if trace_file is not None:
        planning.writable(trace_file, plan)
    trace = _execute(record, settings, found, steps, context.registry)
    files = _write(trace, trace_file)
    if as_json:
        ui.print_json({"plan_file": str(plan), **_document(found, trace), **files})
        return
    ui.print_text(f"{backend} executed {trace.header.steps} steps of {plan} ({trace.header.clock} time)")
    planning.show_grid(_comparison(found, trace))
    planning.show_grid(_operators(found, trace))
    if trace.header.notes:
        ui.print_text("\n" + "\n".join(trace.header.notes))
    for path in files.values():
        ui.print_text(f"written: {path}")


def _backend(registry: Registry, name: str) -> BackendSpec:
    """The backend of that name, if it can execute here.

    Raises:
        MissingPluginError, PluginError: it is not installed, or broken.
        BackendError: it only exports, or this machine lacks what it needs.
    """
    record: BackendSpec = registry.get("backend", name).record
    if "execute" not in record.can:
        able = sorted(loaded.name for loaded in registry.records("backend") if "execute" in loaded.record.can)
        raise BackendError(
            f"backend {name!r} cannot execute a plan",
            facts=[f"it can: {', '.join(sorted(record.can))}", f"backends that execute: {', '.join(able) or 'none'}"],
        )
    reason = record.probe()
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot be used on this machine", facts=[reason])
    return record


def _settings(record: BackendSpec, plan: Plan, overrides: Sequence[str]) -> Any:
    """The backend's settings: those of the plan's experiment, then of the command line."""
    from rpeg_core.settings import build_settings, parse_override

    values: dict[str, object] = dict(plan.experiment.settings.get(record.name, {}))
    origins = dict.fromkeys(values, f"settings.{record.name}")
    for override in map(parse_override, overrides):
        if override.target != record.name:
            raise UnknownKeyError(
                f"{override.origin} does not belong to backend {record.name!r}",
                facts=[f"allowed: {record.name}.KEY=VALUE; all else was settled when the plan was made"],
                hint=suggest(override.target, [record.name]),
            )
        values[override.name] = override.text
        origins[override.name] = override.origin
    return build_settings(record.settings, values, where=f"settings.{record.name}", origins=origins)


def _check(plan: Plan, registry: Registry) -> None:
    """Show what plugins remark on the plan.

    Raises:
        BackendError: one of them says that the plan cannot be run.
    """
    from rpeg_core.cli import planning
    from rpeg_core.diagnostics import Severity

    remarks = registry.check_plan(plan)
    planning.show_diagnostics(remarks)
    refused = [r for r in remarks if r.diagnostic.severity is Severity.ERROR]
    if refused:
        raise BackendError("the plan cannot be run", facts=[f"{r.plugin}: {r.diagnostic.message}" for r in refused])


def _execute(record: BackendSpec, settings: Any, plan: Plan, steps: int | None, registry: Registry) -> Trace:
    """Run, with progress on stderr and observers told."""
    from rpeg_core.runtime.session import RunRequest

    if record.open is None:
        raise BackendError(f"backend {record.name!r} cannot execute a plan", facts=["it has no open()"])
    with ui.progress(f"running on {record.name}") as show, record.open(plan, settings) as session:
        registry.observers("rpeg_run_started", plan=plan)

        def step_finished(step: int, metrics: Mapping[str, float]) -> None:
            show(f"step {step} done")
            registry.observers("rpeg_step_finished", plan=plan, step=step, metrics=metrics)

        trace = session.run(RunRequest(steps=steps, step_finished=step_finished))
    registry.observers("rpeg_run_finished", plan=plan, trace=trace)
    return trace


def _write(trace: Trace, path: Path | None) -> dict[str, str]:
    if path is None:
        return {}
    perfetto = path.with_suffix(".perfetto.json")
    trace.write(path)
    trace.write_chrome(perfetto)
    return {"trace_file": str(path), "perfetto_file": str(perfetto)}


def _tokens_per_s(plan: Plan, trace: Trace) -> float:
    return plan.workload.tokens_per_step / trace.step_s


def _document(plan: Plan, trace: Trace) -> dict[str, Any]:
    steps = trace.header.steps
    return {
        "plan": plan.digest,
        "backend": trace.header.backend,
        "clock": trace.header.clock,
        "steps": steps,
        "makespan_s": trace.makespan_s,
        "step_s": trace.step_s,
        "predicted_step_s": plan.prediction.step_s,
        "tokens_per_s": _tokens_per_s(plan, trace),
        "predicted_tokens_per_s": plan.prediction.tokens_per_s,
        "operators": {
            name: {"busy_s_per_step": run / steps, "transfers_to_it_s_per_step": moved / steps}
            for name, (run, moved) in trace.busy_s().items()
        },
        "notes": list(trace.header.notes),
    }


def _comparison(plan: Plan, trace: Trace) -> Grid:
    from rpeg_core.report import words
    from rpeg_core.report.page import Column, Grid

    ratio = trace.step_s / plan.prediction.step_s
    return Grid(
        title="predicted and executed",
        columns=(Column(""), Column("time of a step", right=True), Column("throughput", right=True)),
        rows=(
            ("predicted", words.seconds(plan.prediction.step_s), words.tokens_per_s(plan.prediction.tokens_per_s)),
            ("executed", words.seconds(trace.step_s), words.tokens_per_s(_tokens_per_s(plan, trace))),
            ("executed / predicted", words.times(ratio), words.times(1 / ratio)),
        ),
    )


def _operators(plan: Plan, trace: Trace) -> Grid:
    from rpeg_core.report import words
    from rpeg_core.report.page import Column, Grid

    steps = trace.header.steps
    rows = [
        (
            name,
            str(plan.assignments[name].allocation),
            words.seconds(run / steps),
            words.seconds(sum(plan.prediction.operator_s[name])),
            words.seconds(moved / steps),
            words.percent(run / trace.makespan_s),
        )
        for name, (run, moved) in trace.busy_s().items()
    ]
    names = ("runs", "predicted", "transfers to it", "share of the run")
    return Grid(
        title="time in one step",
        columns=(Column("operator"), Column("GPUs"), *(Column(name, right=True) for name in names)),
        rows=tuple(rows),
    )
