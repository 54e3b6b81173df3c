"""``rpeg calibrate``: measures this machine, or takes a run's trace, and writes a hardware profile."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.errors import BackendError, UsageError

if TYPE_CHECKING:
    from rpeg_core.calibration.profile import Calibration
    from rpeg_core.calibration.refine import Errors, Parameter, Terms
    from rpeg_core.calibration.trace import TraceRefinement
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.records import BackendSpec
    from rpeg_core.spec.accuracy import TermError

__all__ = ["command"]

MOST_LOAD = 1.0
"""Beyond this, times of workers that wait for each other are too long."""

BAR = 30
FIT_SHARE = 0.2
"""Of the progress bar."""


@click.command("calibrate")
@click.option("-o", "--output", type=click.Path(path_type=Path), required=True, help="The profile file to write, YAML.")
@click.option(
    "--backend", "name", metavar="NAME", help="Whose operations are measured; default: the only one that can."
)
@click.option("--device", type=click.Choice(["auto", "cpu", "cuda"]), default="auto", show_default=True)
@click.option("--quick", is_flag=True, help="A fraction of the measurements, to try the way; inaccurate.")
@click.option(
    "--from-trace",
    "runs",
    multiple=True,
    type=click.Path(path_type=Path),
    metavar="DIR",
    help="Refine a profile with the trace of a run (the folder of rpeg run --output) instead of measuring; repeatable.",
)
@click.option("--profile", type=click.Path(path_type=Path), help="The profile file to refine; default: the run's own.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(
    context: CommandContext,
    output: Path,
    name: str | None,
    device: str,
    quick: bool,
    runs: tuple[Path, ...],
    profile: Path | None,
    as_json: bool,
) -> None:
    """Measure this machine and write a hardware profile that cluster.hardware accepts: hardware: ./profile.yaml.

    Takes some minutes in which the machine should do nothing else. Every number has its source and its residual; the
    file is written at the end, whole or not at all. With --from-trace nothing is measured: the operators of a run are
    the observations, and the errors of the profile on them are shown before and after.
    """
    if not output.parent.is_dir():
        raise UsageError(f"--output {output}: there is no folder {output.parent}")
    if runs:
        _refine(context.registry, runs, profile, output, as_json=as_json)
        return
    if profile is not None:
        raise UsageError("--profile is for --from-trace", hint="without it a new profile is measured")
    _measure(context.registry, name, device, output, quick=quick, as_json=as_json)


def _measure(registry: Registry, name: str | None, device: str, output: Path, *, quick: bool, as_json: bool) -> None:
    from rpeg_core.calibration.measurements import CalibrationRequest
    from rpeg_core.calibration.profile import calibrated
    from rpeg_core.spec.profile_file import write_profile

    record = _backend(registry, name)
    assert record.calibrate is not None
    terms = _terms(registry)
    _warn_of_load()
    began = time.monotonic()
    with _bar() as shown:
        request = CalibrationRequest(
            progress=lambda share, what: shown((1.0 - FIT_SHARE) * share, what), quick=quick, device=device
        )
        measured = record.calibrate(request)
        found = calibrated(
            measured, terms, progress=lambda share: shown(1.0 - FIT_SHARE + FIT_SHARE * share, "fitting")
        )
    seconds = time.monotonic() - began
    write_profile(output, found.profile, found.document())
    if as_json:
        ui.print_json({"profile_file": str(output), "seconds": seconds, **found.document()})
        return
    _show(found, seconds)
    ui.print_text(f"\nwritten: {output}\nnext: cluster: {{hardware: {_named(output)}}} in an experiment file")


def _refine(registry: Registry, runs: Sequence[Path], profile: Path | None, output: Path, *, as_json: bool) -> None:
    from rpeg_core.calibration.trace import observations_of, refined_from_traces
    from rpeg_core.planning.plan import load_plan
    from rpeg_core.runtime.session import PLAN_FILE, TRACE_FILE
    from rpeg_core.runtime.trace import Trace
    from rpeg_core.spec.profile_file import write_profile

    plans = [load_plan(run / PLAN_FILE) for run in runs]
    observations = [
        observation
        for run, plan in zip(runs, plans, strict=True)
        for observation in observations_of(run.name or str(run), plan, Trace.read(run / TRACE_FILE))
    ]
    if not observations:
        raise UsageError("the runs have no operator with a model")
    hardware = str(profile) if profile is not None else plans[0].experiment.cluster.hardware
    start = registry.get("hardware", hardware).record
    with _bar() as shown:
        found = refined_from_traces(
            start,
            observations,
            _terms(registry, start.default_costs),
            what=", ".join(str(run) for run in runs),
            progress=lambda share: shown(share, "fitting"),
        )
    write_profile(output, found.profile, _trace_document(found))
    if as_json:
        ui.print_json({"profile_file": str(output), "hardware": hardware, **_trace_document(found)})
        return
    _show_refined(found)
    ui.print_text(f"\nwritten: {output}\nnext: cluster: {{hardware: {_named(output)}}} in an experiment file")


def _backend(registry: Registry, name: str | None) -> BackendSpec:
    """The backend that measures.

    Raises:
        MissingPluginError, PluginError: it is not installed, or broken.
        BackendError: none or several can, or this machine lacks what it needs.
    """
    able = [loaded.name for loaded in registry.records("backend") if loaded.record.calibrate is not None]
    if name is None:
        if len(able) != 1:
            raise BackendError(
                f"{len(able)} installed backends can calibrate",
                facts=[f"these: {', '.join(able)}"] if able else [],
                hint="name one: --backend NAME" if able else "pip install 'rpeg-core[all]'",
            )
        name = able[0]
    record: BackendSpec = registry.get("backend", name).record
    if record.calibrate is None:
        raise BackendError(f"backend {name!r} cannot calibrate", facts=[f"those that can: {', '.join(able) or 'none'}"])
    reason = record.probe()
    if reason is not None:
        raise BackendError(f"backend {name!r} cannot be used on this machine", facts=[reason])
    return record


def _terms(registry: Registry, names: Sequence[str] = ("analytical",)) -> Terms:
    from rpeg_core.validation.replay import operator_terms

    return operator_terms(registry, names)


def _warn_of_load() -> None:
    load = os.getloadavg()[0] if hasattr(os, "getloadavg") else 0.0
    if load > MOST_LOAD:
        ui.print_warning(f"the load average is {load:.1f}: other processes stretch what workers do together")


@contextlib.contextmanager
def _bar() -> Iterator[Callable[[float, str], None]]:
    """A progress bar with what is done now."""
    with ui.progress("calibrating") as shown:

        def show(share: float, what: str) -> None:
            full = round(BAR * share)
            shown(f"{'#' * full}{'.' * (BAR - full)} {share:4.0%}  {what}")

        yield show


def _show(found: Calibration, seconds: float) -> None:
    from rpeg_core.report import words

    hardware, software = found.profile, found.profile.software
    assert software is not None
    ui.print_text(f"{hardware.summary}, in {words.seconds(seconds)}")
    rows: list[list[object]] = [
        [
            "matrix products",
            f"{hardware.device.peak_flops_per_s / 1e9:.4g} GFLOP/s, half of it at "
            f"{hardware.efficiency.gamma_m_rows:.3g} rows and at {hardware.efficiency.gamma_k_columns:.3g} columns",
            f"{found.gemm.median_error:.1%}",
        ],
        ["memory", f"{hardware.device.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s", ""],
    ]
    for name, fit in (("AllReduce", found.collective), ("messages", found.p2p)):
        if fit is not None:
            link = fit.link
            text = f"{words.seconds(link.latency_s)} and {link.bandwidth_bytes_per_s / 1e9:.4g} GB/s"
            rows.append([name, text, f"{fit.median_error:.1%}"])
    ui.print_table(["measured", "result", "median error"], rows)
    _show_parameters(found.parameters)
    _show_operators([operator.name for operator in found.operators], found)
    ui.print_text(_line("these operators as the profile predicts them", found.errors))
    for line in _sureness(found.profile.errors):
        ui.print_text(line)


def _show_operators(names: Sequence[str], found: Calibration) -> None:
    from rpeg_core.report import words

    rows = [
        [name, words.seconds(operator.seconds), words.seconds(predicted), f"{predicted / operator.seconds - 1.0:+.1%}"]
        for name, operator, predicted in zip(names, found.operators, found.predicted_s, strict=True)
    ]
    ui.print_table(["operator", "measured", "fitted", "residual"], rows)


def _show_parameters(parameters: Sequence[Parameter]) -> None:
    rows = [
        [parameter.name, f"{parameter.after:.4g}", f"{min(parameter.uncertainty, 9.99):.0%}"]
        for parameter in parameters
    ]
    ui.print_table(["software", "value", "uncertainty"], rows)


def _show_refined(found: TraceRefinement) -> None:
    from rpeg_core.report import words

    columns = zip(found.operators, found.refined.before, found.refined.after, strict=True)
    rows = [
        [
            operator.name,
            words.seconds(operator.seconds),
            f"{before / operator.seconds - 1.0:+.1%}",
            f"{after / operator.seconds - 1.0:+.1%}",
        ]
        for operator, before, after in columns
    ]
    ui.print_table(["operator", "executed", "error before", "error after"], rows)
    ui.print_text(_line("before", found.before))
    ui.print_text(_line("after", found.after))
    for line in _sureness(found.profile.errors):
        ui.print_text(line)


def _sureness(errors: Sequence[TermError]) -> list[str]:
    """``generation: measured x0.91 to x1.12 of a prediction by a fit without it (90% interval of 24 operators)``."""
    import numpy as np

    from rpeg_core.accuracy.draws import CONFIDENCE, standard_normal
    from rpeg_core.report import words

    lines = []
    for error in errors:
        draws = np.exp(error.log_bias + error.log_std * standard_normal("calibration"))
        low, high = np.quantile(draws, ((1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2))
        lines.append(
            f"{', '.join(error.roles)}: {words.times(float(low))} to {words.times(float(high))} of what is predicted "
            f"without it ({words.percent(CONFIDENCE)} interval, {words.plural(error.rows, 'operator')})"
        )
    return lines


def _line(what: str, errors: Errors) -> str:
    rank = "" if errors.spearman != errors.spearman else f", Spearman {errors.spearman:.3f}"
    return f"{what}: {errors.count} operators, MAPE {errors.mape:.1%}, bias {errors.bias:+.1%}{rank}"


def _trace_document(found: TraceRefinement) -> dict[str, Any]:
    def error(errors: Errors) -> dict[str, Any]:
        return {"count": errors.count, "mape": errors.mape, "bias": errors.bias}

    return {
        "before": error(found.before),
        "after": error(found.after),
        "software": {parameter.name: {"uncertainty": parameter.uncertainty} for parameter in found.refined.parameters},
        "operators": [
            {"name": operator.name, "measured_s": operator.seconds, "before_s": before, "after_s": after}
            for operator, before, after in zip(found.operators, found.refined.before, found.refined.after, strict=True)
        ],
    }


def _named(path: Path) -> str:
    """As an experiment file beside it names it."""
    return str(path) if path.is_absolute() or len(path.parts) > 1 else f"./{path}"
