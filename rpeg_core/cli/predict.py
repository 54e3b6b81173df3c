"""``rpeg predict``: time and memory of a plan that the user pins, or of a plan file."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import attrs
import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.cli.parameters import TIME_LIMIT

if TYPE_CHECKING:
    from collections.abc import Sequence

    from rpeg_core.costing.host import HostMemory
    from rpeg_core.passes.evaluate import Prediction
    from rpeg_core.planning.plan import Plan
    from rpeg_core.planning.planner import Planner
    from rpeg_core.planning.problem import StructureProblem
    from rpeg_core.plugins.registry import Registry
    from rpeg_core.settings import Override

__all__ = ["command"]

SECONDS = 5.0


@click.command("predict")
@click.argument("file", type=click.Path(path_type=Path), metavar="EXPERIMENT|PLAN")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Write the plan to this file.")
@click.option(
    "--seconds",
    type=TIME_LIMIT,
    help="Time to search for what is not pinned; default 5 s, unless --evaluations is given.",
)
@click.option("--evaluations", type=click.IntRange(1), help="Configurations to evaluate at most.")
@click.option("--strategy", metavar="NAME", help="Search strategy; default: the experiment's.")
@click.option("--set", "overrides", multiple=True, metavar="NAME.KEY=VALUE", help="A plugin setting; repeatable.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(
    context: CommandContext,
    file: Path,
    output: Path | None,
    seconds: float | None,
    evaluations: int | None,
    strategy: str | None,
    overrides: tuple[str, ...],
    as_json: bool,
) -> int:
    """Say whether a plan fits and how fast it is.

    From an EXPERIMENT whose `pin:` fixes every operator this needs no search; what is not pinned is searched for
    a short time. A PLAN file is evaluated again with the installed plugins, and what differs is named. Times are
    followed by their 90 % intervals, (low-high).

    Memory is shown over a step: for each operator on its GPUs what is held while it runs, in the first step and in
    later ones, and the terms of the peak. When the plan does not fit the exit code is 1, and the cheapest changes that
    make it fit are listed with their cost in time; when it leaves less than a tenth of the usable memory, those that
    would leave more. Each was tried: Ctrl-C ends the tries.

    With `cluster: host_memory_gb` it also says what optimizer states would take of a node's host memory.
    """
    from rpeg_core.cli import planning
    from rpeg_core.planning.remedies import LITTLE_ROOM, present_plan
    from rpeg_core.report import documents
    from rpeg_core.report.host import host_document, host_sentence
    from rpeg_core.report.moments import MemoryReport
    from rpeg_core.report.remedies import headroom
    from rpeg_core.settings import parse_override

    registry, parsed = context.registry, [parse_override(text) for text in overrides]
    if output is not None:
        planning.writable(output, file)
    if _is_plan(file):
        subject = _recheck(file, registry, parsed)
    else:
        subject = _pinned(file, registry, parsed, seconds, evaluations, strategy, as_json)
    plan, prediction = subject.plan, subject.prediction
    fits = plan.prediction.feasible
    report = MemoryReport.of(prediction, plan.assignments, subject.structure.book)
    share = prediction.evaluation.peak_ratio
    present = present_plan(prediction, plan.assignments)
    remedies = room = None
    if not fits:
        remedies = planning.remedies_for(planning.pinning(plan), registry, parsed, present)
    elif share > LITTLE_ROOM:
        room = planning.headroom_for(planning.pinning(plan), registry, parsed, present)
    remarks = planning.announce(plan, registry)
    host = _host(subject)
    if output is not None:
        plan.save(output)
    document = {
        "feasible": fits,
        "differences": list(subject.differences),
        "warnings": list(subject.planner.remarks),
        "diagnostics": documents.diagnostics(remarks),
        "memory": documents.memory(prediction.memory),
        **report.document(),
        "plan": plan.document(),
        **({} if host is None else {"host_memory": host_document(*host)}),
        **({} if remedies is None else documents.remedies(remedies)),
        **({} if room is None else {"headroom": documents.remedies(room)}),
    }
    if as_json and fits:
        ui.print_json(document)
    elif not as_json:
        planning.show_heading(plan, "fits: " if fits else "does not fit: ")
        planning.show_operators(plan)
        planning.show_memory(prediction, subject.planner)
        planning.show_moments(report)
        if room is not None:
            planning.show_sentences(list(headroom(room, share)))
        if host is not None:
            planning.show_sentences([host_sentence(*host)])
        planning.show_chart(prediction)
        if output is not None:
            ui.print_text(f"\nplan written to {output}\nnext: rpeg explain {output}")
        else:
            ui.print_text(f"\nnext: rpeg predict {file} -o plan.json writes this plan")
    for line in subject.differences:
        ui.print_warning(line)
    planning.show_diagnostics(remarks)
    if remedies is not None:
        error = planning.too_large(subject.planner, prediction, remedies)
        error.document = document
        raise error
    if subject.interrupted:
        ui.print_note("interrupted: this is the best plan so far")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE


@attrs.frozen(kw_only=True)
class _Subject:
    """The plan that is predicted, and how it came about."""

    planner: Planner
    structure: StructureProblem
    plan: Plan
    prediction: Prediction
    differences: tuple[str, ...] = ()
    interrupted: bool = False


def _host(subject: _Subject) -> tuple[HostMemory, float] | None:
    """What the plan's trainings would take of a node's host memory, and what it has; None when nobody says."""
    from rpeg_core.costing.host import host_memory

    plan, limit_gb = subject.plan, subject.plan.experiment.cluster.host_memory_gb
    if limit_gb is None:
        return None
    book = subject.planner.structure_problem(plan).book
    return host_memory(plan.rpeg, plan.assignments, book), limit_gb * 1e9


def _is_plan(path: Path) -> bool:
    """A plan is a JSON document with a schema number; anything else, readable or not, is an experiment."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return path.suffix == ".json"
    return text.lstrip().startswith("{") and '"schema"' in text


def _recheck(path: Path, registry: Registry, overrides: Sequence[Override]) -> _Subject:
    from rpeg_core.planning.plan import load_plan
    from rpeg_core.planning.recheck import recheck

    checked = recheck(load_plan(path), registry, overrides)
    for remark in checked.planner.remarks:
        ui.print_warning(remark)
    return _Subject(
        planner=checked.planner,
        structure=checked.structure,
        plan=checked.plan,
        prediction=checked.prediction,
        differences=checked.differences,
    )


def _pinned(
    path: Path,
    registry: Registry,
    overrides: Sequence[Override],
    seconds: float | None,
    evaluations: int | None,
    strategy: str | None,
    as_json: bool,
) -> _Subject:
    """The plan that the pins describe, the rest of it searched."""
    from rpeg_core.cli import planning
    from rpeg_core.planning.solve import only_choice
    from rpeg_core.report import documents, summary
    from rpeg_core.spec.experiment import load_experiment

    if seconds is None and evaluations is None:
        seconds = SECONDS
    planner = planning.make_planner(
        load_experiment(path), registry, overrides, seconds=seconds, evaluations=evaluations, strategy=strategy
    )
    problem = planner.problem()
    solution = only_choice(problem)
    if solution is not None:
        structure = problem.structures[solution.structure]
        assignments = structure.plan(solution.choice)
        return _Subject(
            planner=planner,
            structure=structure,
            plan=planner.plan(structure, assignments, {"strategy": None}),
            prediction=structure.predict(assignments),
        )
    outcome, stopped = planning.searched(planner, problem, registry)
    winner = outcome.winner
    if winner is None:
        planning.fail_without_plan(planner, outcome, registry, overrides, as_json=as_json)
    structure = outcome.structure(winner)
    found_by = None if winner.result is None else winner.name
    plan = planner.plan(structure, structure.plan(winner.solution.choice), documents.search(outcome), found_by)
    ui.print_note(f"what is not pinned was searched; {summary.found_by(outcome)}")
    return _Subject(planner=planner, structure=structure, plan=plan, prediction=winner.prediction, interrupted=stopped)
