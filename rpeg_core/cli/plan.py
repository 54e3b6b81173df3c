"""``rpeg plan``: search for the best plan of an experiment and write it to ``plan.json``."""

from __future__ import annotations

from pathlib import Path

import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.cli.parameters import TIME_LIMIT

__all__ = ["command"]


@click.command("plan")
@click.argument("experiment", type=click.Path(path_type=Path))
@click.option(
    "-o", "--output", type=click.Path(path_type=Path), default=Path("plan.json"), show_default=True, help="Plan file."
)
@click.option("--seconds", type=TIME_LIMIT, help="Time to search.")
@click.option("--evaluations", type=click.IntRange(1), help="Configurations to evaluate at most.")
@click.option("--seed", type=click.IntRange(0), help="Seed of the search.")
@click.option("--strategy", metavar="NAME", help="Search strategy.")
@click.option("--set", "overrides", multiple=True, metavar="NAME.KEY=VALUE", help="A plugin setting; repeatable.")
@click.option("-v", "--verbose", is_flag=True, help="Print every improvement to stderr.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(
    context: CommandContext,
    experiment: Path,
    output: Path,
    seconds: float | None,
    evaluations: int | None,
    seed: int | None,
    strategy: str | None,
    overrides: tuple[str, ...],
    verbose: bool,
    as_json: bool,
) -> int:
    """Search for the best plan of EXPERIMENT, compare it with the baselines and write it to a file.

    --seconds and --evaluations take the place of the experiment's budget; with --evaluations alone a search is
    reproducible. Ctrl-C ends the search: the best plan so
    far is written and the exit code is 130. When no plan fits the exit code is 1, and the cheapest changes
    that make one fit are listed with their cost in time. Times are followed by their 90 % intervals, (low-high), from
    the errors of measured runs; docs/validation.md says what they hold.
    """
    from rpeg_core.cli import planning
    from rpeg_core.errors import PlanFileError
    from rpeg_core.report import documents, summary
    from rpeg_core.settings import parse_override
    from rpeg_core.spec.experiment import load_experiment

    registry = context.registry
    parsed = [parse_override(text) for text in overrides]
    planner = planning.make_planner(
        load_experiment(experiment),
        registry,
        parsed,
        evaluations=evaluations,
        seconds=seconds,
        seed=seed,
        strategy=strategy,
    )
    planning.writable(output, experiment)
    problem = planner.problem()
    planner.strategy()  # a wrong name or setting is an error before the search, not after it
    outcome, stopped = planning.searched(planner, problem, registry, verbose=verbose)
    winner = outcome.winner
    if winner is None:
        planning.fail_without_plan(planner, outcome, registry, parsed, as_json=as_json)

    structure = outcome.structure(winner)
    found_by = None if winner.result is None else winner.name
    plan = planner.plan(structure, structure.plan(winner.solution.choice), documents.search(outcome), found_by)
    unsaved: PlanFileError | None = None
    try:
        plan.save(output)
    except PlanFileError as error:  # the plan is shown all the same
        unsaved = error
    remarks = planning.announce(plan, registry)
    document = {
        "feasible": True,
        "interrupted": stopped,
        "plan_file": None if unsaved else str(output),
        "warnings": list(planner.remarks),
        "diagnostics": documents.diagnostics(remarks),
        "memory": documents.memory(winner.prediction.memory),
        "plan": plan.document(),
    }
    if as_json and unsaved is None:
        ui.print_json(document)
    elif not as_json:
        planning.show_heading(plan)
        planning.show_operators(plan)
        planning.show_grid(summary.comparison(outcome, plan, planner.hardware.device.memory_bytes))
        planning.show_certificate(summary.certificate(outcome))
        planning.show_memory(winner.prediction, planner)
        planning.show_chart(winner.prediction)
        if unsaved is None:
            ui.print_text(f"\nplan written to {output}\nnext: rpeg explain {output}")
    planning.note_missing_baselines(outcome)
    planning.show_diagnostics(remarks)
    if unsaved is not None:
        unsaved.document = document
        raise unsaved
    if stopped:
        ui.print_note(f"interrupted: {output} is the best plan so far")
        return ExitCode.INTERRUPTED
    return ExitCode.DONE
