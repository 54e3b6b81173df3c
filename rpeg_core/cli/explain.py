"""``rpeg explain``: why its structure, where the time and the memory of a plan go, and where the numbers come from."""

from __future__ import annotations

from pathlib import Path

import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.errors import UsageError, suggest

__all__ = ["command"]


@click.command("explain")
@click.argument("plan", type=click.Path(path_type=Path))
@click.option("--operator", metavar="NAME", help="Only this operator.")
@click.option("--sources", "with_sources", is_flag=True, help="Also where each number of the hardware comes from.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(context: CommandContext, plan: Path, operator: str | None, with_sources: bool, as_json: bool) -> None:
    """Explain PLAN: why its structure, time of each operator by term, memory of each GPU by term, transfers, critical
    path, sources.

    Memory is also shown over a step, and of a plan that does not fit the cheapest changes that make it.
    What a choice of the structure saves and adds is said against the other choices in the same places; what an axis
    beyond dp, pp and tp does, against its default.
    The plan is evaluated again with the installed plugins; what differs from the file is a warning.
    """
    from rpeg_core.accuracy.spread import spread_of
    from rpeg_core.cli import planning
    from rpeg_core.planning.plan import load_plan
    from rpeg_core.planning.recheck import recheck
    from rpeg_core.planning.remedies import present_plan
    from rpeg_core.report import axes, documents, sources, structure, tables
    from rpeg_core.report.memory import memory_details
    from rpeg_core.report.moments import MemoryReport
    from rpeg_core.report.remedies import changes

    checked = recheck(load_plan(plan), context.registry)
    found, prediction, book = checked.plan, checked.prediction, checked.structure.book
    spread, names = spread_of(book, found.assignments, prediction), tuple(found.assignments)
    if operator is not None and operator not in names:
        raise UsageError(
            f"there is no operator {operator!r} in {plan}",
            facts=[f"allowed: {', '.join(names)}"],
            hint=suggest(operator, names),
        )
    chosen = names if operator is None else (operator,)
    if as_json:
        document = documents.explanation(found, prediction, book, spread, chosen)
        document |= MemoryReport.of(prediction, found.assignments, book).document()
        why = [] if operator is not None else [documents.rival(rival) for rival in structure.rivals(checked)]
        further = [documents.rival(rival) for rival in axes.rivals(checked, chosen)]
        ui.print_json(
            {
                "plan_file": str(plan),
                "differences": list(checked.differences),
                "structure_choices": why,
                **({"axis_choices": further} if further else {}),
                **document,
            }
        )
        return
    usable = found.prediction.usable_bytes
    remedies = None
    if operator is None and not found.prediction.feasible:
        present = present_plan(prediction, found.assignments)
        remedies = planning.remedies_for(planning.pinning(found), context.registry, (), present)
    planning.show_heading(found)
    ui.print_text(f"plan {plan}, {found.digest}")
    if operator is None:
        for sentence in structure.reasons(checked):
            ui.print_text(f"- {sentence}")
    for rival in axes.rivals(checked, chosen):
        ui.print_text(f"- {rival.sentence()}")
    planning.show_operators(found, chosen)
    planning.show_grid(tables.operator_terms(book, spread, chosen))
    planning.show_grid(memory_details(prediction.memory, usable, None if operator is None else chosen))
    if operator is None:
        planning.show_moments(MemoryReport.of(prediction, found.assignments, book), with_terms=False)
    if remedies is not None:
        planning.show_sentences(["this plan does not fit", *changes(remedies)])
    planning.show_grid(tables.transfer_table(prediction, book, None if operator is None else chosen))
    if operator is None:
        planning.show_grid(tables.critical_path(prediction, spread))
        planning.show_grid(sources.cost_terms(book))
    if with_sources:
        planning.show_grid(sources.hardware(book))
    elif operator is None:
        ui.print_text(f"\nnext: rpeg explain {plan} --sources, or --operator {names[0]}")
    for line in checked.differences:
        ui.print_warning(line)
