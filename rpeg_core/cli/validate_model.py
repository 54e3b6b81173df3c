"""``rpeg validate-model``: measured runs against the predictions of the cost model."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import UsageError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rpeg_core.validation.cases import Skipped, Table
    from rpeg_core.validation.replay import Errors, Result

__all__ = ["command"]

GROUPS: tuple[tuple[str, Callable[[Result], str]], ...] = (
    ("source", lambda result: result.case.source),
    ("GPU", lambda result: result.case.gpu),
    ("precision", lambda result: result.case.precision),
    ("model", lambda result: result.case.model),
)
GRADES = ("A", "B")
INSIDE = "in 90% interval"


@click.command("validate-model")
@click.option("--training", type=click.Path(path_type=Path), help="A table of training runs; CSV, .gz too.")
@click.option("--generation", type=click.Path(path_type=Path), help="A table of generation runs.")
@click.option("--rl", type=click.Path(path_type=Path), help="A table of whole reinforcement learning steps.")
@click.option("--costs", "costs", multiple=True, metavar="NAME", help="Cost models or terms; default: analytical.")
@click.option("--worst", type=click.IntRange(0), default=10, show_default=True, help="Worst rows to list.")
@click.option("--picture", type=click.Path(path_type=Path), help="Write predicted against measured to this SVG file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(
    context: CommandContext,
    training: Path | None,
    generation: Path | None,
    rl: Path | None,
    costs: tuple[str, ...],
    worst: int,
    picture: Path | None,
    as_json: bool,
) -> int:
    """Replay measured runs through the cost terms that the planner uses, and say how far off they are.

    The columns are those of the tables in docs/validation.md; a blank means unknown and is never guessed. Rows that
    cannot be replayed are listed with the reason. Peak memory is compared where the training table has it. The last
    column is the share of rows whose measured time lies in its predicted 90 % interval.
    """
    from rpeg_core.validation.cases import memory_cases, training_cases
    from rpeg_core.validation.generation import generation_cases
    from rpeg_core.validation.profiles import InstalledProfiles
    from rpeg_core.validation.replay import operator_terms, replayed
    from rpeg_core.validation.rl import rl_cases

    if training is None and generation is None and rl is None:
        raise UsageError(
            "there is nothing to validate", hint="name a table: --training FILE, --generation FILE or --rl FILE"
        )
    registry = context.registry
    profiles = InstalledProfiles(registry)
    terms = operator_terms(registry, costs or ("analytical",))
    readers = (
        (training, training_cases),
        (training, memory_cases),
        (generation, generation_cases),
        (rl, rl_cases),
    )
    tables: list[Table] = [read(path, profiles) for path, read in readers if path is not None]
    results = [result for table in tables for result in replayed(table.cases, terms)]
    skipped = [(table, row) for table in tables for row in table.skipped]
    if picture is not None:
        _draw(picture, results)
    if as_json:
        ui.print_json(_document(results, skipped))
    else:
        _print(results, skipped, worst)
    return ExitCode.DONE if results else ExitCode.NO


def _kinds(results: Sequence[Result]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(result.case.kind, []).append(result)
    return dict(sorted(found.items()))


def _by(results: Sequence[Result], key: Callable[[Result], str]) -> dict[str, list[Result]]:
    found: dict[str, list[Result]] = {}
    for result in results:
        found.setdefault(key(result), []).append(result)
    return dict(sorted(found.items()))


def _cells(errors: Errors) -> list[str]:
    rank = "" if math.isnan(errors.spearman) else f"{errors.spearman:.3f}"
    inside = "" if math.isnan(errors.inside) else f"{errors.inside:.0%}"
    return [str(errors.count), f"{errors.mape:.1%}", f"{errors.bias:+.1%}", rank, inside]


def _print(results: Sequence[Result], skipped: Sequence[tuple[Table, Skipped]], worst: int) -> None:
    from rpeg_core.validation.replay import errors_of

    rows = []
    for kind, members in _kinds(results).items():
        rows.append([kind, "all", *_cells(errors_of(members))])
        for grade in GRADES:
            graded = [result for result in members if result.case.grade == grade]
            if graded and len(graded) < len(members):
                rows.append([kind, grade, *_cells(errors_of(graded))])
    ui.print_table(["what", "grade", "rows", "MAPE", "bias", "Spearman", INSIDE], rows)
    for kind, members in _kinds(results).items():
        for name, key in GROUPS:
            groups = _by(members, key)
            lines = [[kind, group, *_cells(errors_of(part))] for group, part in groups.items()]
            ui.print_table(["what", name, "rows", "MAPE", "bias", "Spearman", INSIDE], lines)
        order = sorted(members, key=_distance, reverse=True)
        lines = []
        for result in order[:worst]:
            term, share = result.dominant
            lines.append(
                [
                    kind,
                    result.case.id,
                    result.case.model,
                    result.case.gpu,
                    _quantity(result.case.measured, kind),
                    _quantity(result.predicted, kind),
                    f"{result.error:+.1%}",
                    f"{term} {share:.0%}",
                ]
            )
        if lines:
            ui.print_table(["worst", "row", "model", "GPU", "measured", "predicted", "error", "dominant term"], lines)
    if skipped:
        ui.print_table(
            ["skipped", "row", "source", "reason"],
            [[table.path.name, row.id, row.source, row.reason] for table, row in skipped],
        )
    if not results:
        ui.print_note("no row could be replayed")


def _distance(result: Result) -> tuple[float, str]:
    """How far off a prediction is, too high and too low alike."""
    return abs(math.log(result.predicted / result.case.measured)), result.case.id


def _quantity(value: float, kind: str) -> str:
    return f"{value / 1e9:.4g} GB" if kind == "memory" else f"{value:.4g} s"


def _draw(path: Path, results: Sequence[Result]) -> None:
    from rpeg_core.errors import ExperimentError
    from rpeg_core.report.validation_picture import picture

    if not results:
        return
    try:
        path.write_text(picture(results), encoding="utf-8")
    except OSError as error:
        raise ExperimentError(f"{path} cannot be written", facts=[str(error)]) from error


def _document(results: Sequence[Result], skipped: Sequence[tuple[Table, Skipped]]) -> dict[str, Any]:
    from rpeg_core.validation.replay import errors_of

    def error(members: Sequence[Result]) -> dict[str, Any]:
        found = errors_of(members)
        rank = None if math.isnan(found.spearman) else found.spearman
        inside = None if math.isnan(found.inside) else found.inside
        return {"rows": found.count, "mape": found.mape, "bias": found.bias, "spearman": rank, "inside": inside}

    kinds = {}
    for kind, members in _kinds(results).items():
        kinds[kind] = {
            "all": error(members),
            "grades": {grade: error(part) for grade, part in _by(members, lambda r: r.case.grade).items()},
            **{name.lower(): {group: error(part) for group, part in _by(members, key).items()} for name, key in GROUPS},
        }
    return {
        "kinds": kinds,
        "rows": [
            {
                "id": result.case.id,
                "kind": result.case.kind,
                "source": result.case.source,
                "gpu": result.case.gpu,
                "model": result.case.model,
                "precision": result.case.precision,
                "grade": result.case.grade,
                "measured": result.case.measured,
                "predicted": result.predicted,
                "error": result.error,
                "interval": None if result.interval is None else [result.interval.low, result.interval.high],
                "terms": dict(result.terms),
            }
            for result in results
        ],
        "skipped": [
            {"file": str(table.path), "id": row.id, "source": row.source, "reason": row.reason}
            for table, row in skipped
        ],
    }
