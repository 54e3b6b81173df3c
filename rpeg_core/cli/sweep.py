"""``rpeg sweep``: one experiment over GPU counts, hardware, batch sizes or response lengths."""

from __future__ import annotations

import importlib.util
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import attrs
import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.cli.parameters import TIME_LIMIT
from rpeg_core.errors import ExperimentError, PinError, UsageError, suggest

if TYPE_CHECKING:
    from rpeg_core.planning.sweep import Point, Row
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.report.scatter import Scatter
    from rpeg_core.report.sweep import Analysis
    from rpeg_core.settings import Override
    from rpeg_core.spec.experiment import Experiment

__all__ = ["command"]

PIPE_WIDTH = 100


class _Numbers(click.ParamType):
    """``8,16,32``: whole numbers of at least 1."""

    name = "N,N,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[int, ...]:
        try:
            numbers = tuple(int(part) for part in value.split(","))
        except ValueError:
            numbers = ()
        if not numbers or min(numbers) < 1:
            self.fail(f"{value!r} is not a list of whole numbers >= 1, e.g. 8,16,32", param, ctx)
        return tuple(sorted(set(numbers)))


class _Names(click.ParamType):
    """``h100,h200``."""

    name = "NAME,NAME,..."

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> tuple[str, ...]:
        names = [part.strip() for part in value.split(",")]
        if not all(names):
            self.fail(f"{value!r} is not a list of names, e.g. h100,h200", param, ctx)
        return tuple(dict.fromkeys(names))


@click.command("sweep")
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option("--gpus", type=_Numbers(), help="Numbers of GPUs.")
@click.option("--hardware", type=_Names(), help="Hardware profiles.")
@click.option("--prompts", type=_Numbers(), help="Prompts per step.")
@click.option("--response-tokens", type=_Numbers(), help="Response lengths; response_lengths scale with them.")
@click.option("--seconds", type=TIME_LIMIT, help="Time to search, per point.")
@click.option("--evaluations", type=click.IntRange(1), help="Configurations to evaluate at most, per point.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the searches.")
@click.option("--strategy", metavar="NAME", help="Search strategy.")
@click.option(
    "--price",
    "prices",
    multiple=True,
    metavar="USD|NAME=USD,...",
    help="US dollars per GPU and hour, for all hardware or by profile; repeatable.",
)
@click.option("--set", "overrides", multiple=True, metavar="NAME.KEY=VALUE", help="A plugin setting; repeatable.")
@click.option("--csv", "csv_file", type=click.Path(path_type=Path), help="Write the points to this file.")
@click.option("--svg", "svg_file", type=click.Path(path_type=Path), help="Draw them to this file; needs matplotlib.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(
    context: CommandContext,
    experiment: Path,
    gpus: tuple[int, ...] | None,
    hardware: tuple[str, ...] | None,
    prompts: tuple[int, ...] | None,
    response_tokens: tuple[int, ...] | None,
    seconds: float | None,
    evaluations: int | None,
    seed: int | None,
    strategy: str | None,
    prices: tuple[str, ...],
    overrides: tuple[str, ...],
    csv_file: Path | None,
    svg_file: Path | None,
    as_json: bool,
) -> int:
    """Plan EXPERIMENT at every point of the given axes and show what more GPUs, or other ones, are worth.

    An axis that is not given is the experiment's value; without any axis a quarter, half, the same and twice its
    GPUs are planned. Nodes keep their size; a one-rack experiment stays in one rack, else racks keep theirs. Another
    hardware profile brings its own GPUs per node and memory. Every point is searched with the experiment's budget.

    Pareto-optimal points and the knee, beyond which more GPUs add less, are marked. Costs are of the whole cluster,
    busy or idle, and need a price: from --price, else cluster.price_per_gpu_hour, else the hardware profile.

    A point that cannot be planned, e.g. on GPUs without a precision that space: asks for, is skipped with the reason.
    A plan for fewer GPUs also runs on more: where a search finds less, the smaller plan is taken and marked. Ctrl-C
    keeps the finished points and exits with 130. The exit code is 1 when no point has a plan that fits.
    """
    from rpeg_core.planning.sweep import default_gpus, sweep_points
    from rpeg_core.report import sweep as report
    from rpeg_core.settings import parse_override
    from rpeg_core.spec.experiment import load_experiment

    _check_files(csv_file, svg_file)
    registry, parsed = context.registry, [parse_override(text) for text in overrides]
    base = load_experiment(experiment)
    profiles = [registry.get("hardware", name).record for name in hardware or (base.cluster.hardware,)]
    if gpus is None:
        own = registry.get("hardware", base.cluster.hardware).record
        gpus = default_gpus(base, own, several=(hardware, prompts, response_tokens) == (None, None, None))
    points = sweep_points(
        base,
        profiles,
        gpus=gpus,
        prompts=prompts,
        response_tokens=response_tokens,
        prices=_prices(prices, [profile.name for profile in profiles]),
    )
    search = {"seconds": seconds, "evaluations": evaluations, "seed": seed, "strategy": strategy}
    rows, stopped = _searched(points, registry, parsed, search)
    analysis = report.analyse(rows)
    pictures = _pictures(analysis)
    fits = any(row.found is not None for row in rows)
    document = {"feasible": fits, "interrupted": stopped, "points": report.documents(analysis)}
    if rows and not as_json:
        _show(base, analysis, pictures)
    try:
        _write_files(analysis, pictures, csv_file, svg_file)
    except UsageError as error:
        error.document = document
        raise
    if as_json:
        ui.print_json(document)
    if stopped:
        ui.print_note(f"interrupted: {len(rows)} of {len(points)} points are finished")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE if fits else ExitCode.NO


def _searched(
    points: Sequence[Point], registry: Registry, overrides: Sequence[Override], search: dict[str, Any]
) -> tuple[list[Row], bool]:
    """The rows up to the end or to Ctrl-C, and whether there was one.

    Raises:
        ExperimentError: the experiment fits no point.
    """
    from rpeg_core.cli import planning
    from rpeg_core.planning.sweep import Row

    told: set[str] = set()
    planners = [
        None
        if point.experiment is None
        else planning.make_planner(point.experiment, registry, overrides, told=told, **search)
        for point in points
    ]
    for planner in planners:
        if planner is not None:
            planner.strategy()  # a wrong name or setting is an error before the first search, not after it
    rows: list[Row] = []
    unfit: list[ExperimentError | PinError] = []
    try:
        for point, planner in zip(points, planners, strict=True):
            if planner is None:
                rows.append(Row(point=point, why=point.skipped))
                continue
            try:
                row, stopped = _search_one(point, planner, registry, rows)
            except (ExperimentError, PinError) as error:
                why = "; ".join([error.what, *error.facts])
                row, stopped = Row(point=attrs.evolve(point, skipped=why), why=why), False
                unfit.append(error)
            rows.append(row)
            _tell(row, len(rows), len(points))
            if stopped:
                return rows, True
    except KeyboardInterrupt:
        return rows, True
    if unfit and len(unfit) == len(rows) and all(isinstance(error, ExperimentError) for error in unfit):
        raise unfit[0]
    return rows, False


def _search_one(point: Point, planner: Any, registry: Registry, earlier: Sequence[Row]) -> tuple[Row, bool]:
    """The row of a point, and whether Ctrl-C ended its search.

    Raises:
        ExperimentError, PinError: the experiment does not fit this hardware or cluster.
    """
    from rpeg_core.cli import planning
    from rpeg_core.planning.remedies import Remedies
    from rpeg_core.planning.sweep import Row, found

    problem = planner.problem()
    outcome, stopped = planning.searched(planner, problem, registry)
    plan = found(point, outcome, earlier)
    if plan is not None:
        return Row(point=point, found=plan), stopped
    error = planning.no_plan(planner, outcome, Remedies(found=(), tried=()))
    return Row(point=point, why="; ".join(error.facts[:1])), stopped


def _tell(row: Row, done: int, total: int) -> None:
    """Progress between two searches, on a terminal."""
    if not ui.is_terminal(sys.stderr):
        return
    from rpeg_core.report import words
    from rpeg_core.report.sweep import AXES, label

    what = "does not fit" if row.found is None else words.tokens_per_s(row.found.tokens_per_s)
    ui.print_note(f"[{done}/{total}] {label(row.point, list(AXES))}: {what}")


def _prices(texts: Sequence[str], hardware: Sequence[str]) -> dict[str, float]:
    """``--price``, by profile.

    Raises:
        UsageError: not a price, or of hardware that is not swept.
    """
    prices: dict[str, float] = {}
    for part in (part.strip() for text in texts for part in text.split(",")):
        name, equals, amount = part.rpartition("=")
        if equals and name not in hardware:
            raise UsageError(
                f"--price {part}: {name!r} is not swept",
                facts=[f"allowed: {', '.join(hardware)}"],
                hint=suggest(name, hardware),
            )
        try:
            value = float(amount)
        except ValueError:
            value = 0.0
        if not 0 < value < float("inf"):
            raise UsageError(
                f"--price {part}: {amount!r} is not a price",
                facts=["allowed: US dollars per GPU and hour, a number > 0, e.g. 2.5 or h100=2.5,h200=3.5"],
            )
        prices |= dict.fromkeys([name] if equals else hardware, value)
    return prices


def _check_files(csv_file: Path | None, svg_file: Path | None) -> None:
    """Refuse before the searches what could not be written after them.

    Raises:
        UsageError: a file cannot be written, or matplotlib is missing.
    """
    for option, path in (("--csv", csv_file), ("--svg", svg_file)):
        if path is not None and (path.is_dir() or not path.parent.is_dir()):
            why = "it is a folder" if path.is_dir() else f"there is no folder {path.parent}"
            raise UsageError(f"{option}: cannot write {path}", facts=[why])
    if svg_file is not None and importlib.util.find_spec("matplotlib") is None:
        raise UsageError("--svg needs matplotlib, which is not installed", hint="pip install 'rpeg-core[plot]'")


def _write_files(analysis: Analysis, pictures: list[Scatter], csv_file: Path | None, svg_file: Path | None) -> None:
    if csv_file is not None:
        from rpeg_core.report.sweep import csv_text

        _write(csv_file, csv_text(analysis))
    if svg_file is not None and pictures:
        from rpeg_core.report.scatter import svg

        _write(svg_file, svg(pictures))
    elif svg_file is not None:
        ui.print_warning(f"{svg_file} was not written: a picture needs two points with a plan")


def _write(path: Path, text: str) -> None:
    try:
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot write {path}", facts=[error.strerror or str(error)]) from error


def _pictures(analysis: Analysis) -> list[Scatter]:
    """Tokens/s along the x axis and, where a price is known, against cost; none for fewer than two points."""
    from rpeg_core.report.scatter import Line, Scatter
    from rpeg_core.report.sweep import AXES

    x = analysis.x
    if x is None or sum(len(curve.rows) for curve in analysis.curves) < 2:
        return []
    values = sorted({getattr(row.point, x) for curve in analysis.curves for row in curve.rows})
    pictures = [
        Scatter(
            x_name=AXES[x],
            y_name="tok/s",
            lines=tuple(
                Line(
                    name=curve.name,
                    points=tuple((getattr(row.point, x), row.found.tokens_per_s) for row in curve.rows),
                    knee=curve.knee,
                )
                for curve in analysis.curves
            ),
            x_ticks=tuple(values),
            proportional=x == "gpus",
        )
    ]
    if analysis.priced:
        pictures.append(
            Scatter(
                x_name="$ per million tokens",
                y_name="tok/s",
                lines=tuple(
                    Line(
                        name=curve.name,
                        points=tuple((row.usd_per_million_tokens, row.found.tokens_per_s) for row in curve.rows),
                        knee=curve.knee,
                    )
                    for curve in analysis.curves
                ),
            )
        )
    return pictures


def _show(experiment: Experiment, analysis: Analysis, pictures: Sequence[Scatter]) -> None:
    from rpeg_core.cli import planning
    from rpeg_core.report import scatter
    from rpeg_core.report import sweep as report
    from rpeg_core.report.page import draw, terminal_width

    ui.print_text(_heading(experiment, analysis))
    planning.show_grid(report.table(analysis))
    ui.print_text("")
    for sentence in _sentences(analysis):
        ui.print_text(textwrap.fill(sentence, terminal_width()) if ui.is_terminal() else sentence)
    missing = report.without_plan(analysis)
    if missing is not None:
        planning.show_grid(missing)
    for picture in pictures:
        ui.print_text("")
        if ui.has_colour():
            from rich.console import Group
            from rich.text import Text

            lines = scatter.rich_lines(picture, width=terminal_width())
            ui.print_text(draw(Group(Text(picture.title, style="bold"), *lines)))
        else:
            width = terminal_width() if ui.is_terminal() else PIPE_WIDTH
            ui.print_text("\n".join([picture.title, *scatter.ascii_lines(picture, width=width)]))


def _heading(experiment: Experiment, analysis: Analysis) -> str:
    """``ppo: gh200, 256 prompts, 1,024 response tokens``: what does not vary."""
    from rpeg_core.report.sweep import AXES, label

    fixed = [name for name in AXES if name not in analysis.axes]
    return f"{experiment.algorithm}: {label(analysis.rows[0].point, fixed) or 'several clusters and workloads'}"


def _sentences(analysis: Analysis) -> Iterator[str]:
    from rpeg_core.report import sweep as report

    yield from filter(None, (report.column_sentence(analysis), report.pareto_sentence(analysis)))
    yield from report.knee_sentences(analysis)
    yield from report.interval_sentences(analysis)
    unpriced = {row.point.hardware for row in analysis.rows if row.found and row.point.price_per_gpu_hour is None}
    if unpriced:
        names = ", ".join(sorted(unpriced))
        yield f"no costs: the price of {names} is not known; --price gives it in US dollars per GPU and hour"
