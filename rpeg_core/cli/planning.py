"""What ``rpeg plan``, ``predict`` and ``explain`` share. Imports numpy, so commands import this when they run."""

from __future__ import annotations

import contextlib
import signal
import textwrap
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import attrs

from rpeg_core.cli import ui
from rpeg_core.errors import NoFeasiblePlanError, PlanFileError
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.footprint import smallest_footprint
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import DEFAULT_SECONDS, Planner
from rpeg_core.planning.problem import Problem
from rpeg_core.planning.remedies import Present, Remedies, find_headroom, find_remedies
from rpeg_core.planning.search import Incumbent, Progress
from rpeg_core.planning.solve import Outcome, solve
from rpeg_core.planning.structures import StructureChoices
from rpeg_core.plugins.registry import LoadedDiagnostic, Registry
from rpeg_core.records import HardwareProfile
from rpeg_core.report import documents, gantt, intervals, moments, summary, tables, words
from rpeg_core.report import remedies as remedies_in_words
from rpeg_core.report.memory import memory_overview, out_of_memory
from rpeg_core.report.moments import MemoryReport
from rpeg_core.report.page import Grid, draw, plain, terminal_width
from rpeg_core.settings import Override
from rpeg_core.spec.experiment import Experiment

__all__ = [
    "announce",
    "fail_without_plan",
    "headroom_for",
    "make_planner",
    "note_missing_baselines",
    "pinning",
    "remedies_for",
    "searched",
    "show_certificate",
    "show_chart",
    "show_diagnostics",
    "show_grid",
    "show_heading",
    "show_memory",
    "show_moments",
    "show_operators",
    "show_sentences",
    "too_large",
    "writable",
]

PIPE_WIDTH = 100
REPORTS_PER_S = 10.0
STOPPING = "stopping; Ctrl-C again gives up"
BASELINE_DISTRIBUTION = "rpeg-plugin-heuristics"


def make_planner(
    experiment: Experiment,
    registry: Registry,
    overrides: Sequence[Override],
    *,
    seconds: float | None = None,
    evaluations: int | None = None,
    told: set[str] | None = None,
    **search: Any,
) -> Planner:
    """The planner of an experiment whose ``search:`` the command line changes; None leaves a value as it is.

    A budget of the command line, ``seconds`` or ``evaluations`` or both, replaces that of the file. What the planner
    remarks is shown, unless it is in ``told``, which collects it: for commands that make several planners.
    """
    given = {key: value for key, value in search.items() if value is not None}
    if seconds is not None or evaluations is not None:
        given |= {"seconds": seconds, "evaluations": evaluations}
    planner = Planner(attrs.evolve(experiment, search=attrs.evolve(experiment.search, **given)), registry, overrides)
    told = set() if told is None else told
    for remark in planner.remarks:
        if remark not in told:
            ui.print_warning(remark)
            told.add(remark)
    return planner


def searched(planner: Planner, problem: Problem, registry: Registry, *, verbose: bool = False) -> tuple[Outcome, bool]:
    """Search with progress on stderr; Ctrl-C ends it with the best so far. Returns (outcome, whether it was ended)."""
    with ui.progress("searching") as show:
        show("getting ready; the first search after an installation compiles the evaluator")
        progress = Progress(_Reporter(planner.experiment, show, verbose=verbose))
        with _interruptible(progress):
            return solve(planner, problem, registry, progress), progress.cancelled


class _Reporter:
    """Progress in words, a few times a second."""

    def __init__(self, experiment: Experiment, show: Any, *, verbose: bool) -> None:
        self._limits, self._show, self._verbose = experiment.search, show, verbose
        self._told, self._improvements = 0.0, 0

    def __call__(self, spent: float, evaluations: int, incumbent: Incumbent) -> None:
        if self._verbose and len(incumbent.improvements) > self._improvements:
            self._improvements = len(incumbent.improvements)
            ui.print_note(self._line(spent, evaluations, incumbent))
        if time.monotonic() - self._told >= 1 / REPORTS_PER_S:
            self._told = time.monotonic()
            self._show(self._line(spent, evaluations, incumbent))

    def _line(self, spent: float, evaluations: int, incumbent: Incumbent) -> str:
        best = "nothing fits yet"
        if incumbent.evaluation is not None:
            best = f"best {words.tokens_per_s(incumbent.evaluation.tokens_per_s)}"
        rate = evaluations / max(incumbent.seconds, 1e-9)
        return f"{best} · {rate:,.0f} evaluations/s · {self._left(spent, evaluations)}"

    def _left(self, spent: float, evaluations: int) -> str:
        seconds = self._limits.seconds
        if seconds is None and self._limits.evaluations is not None:
            return f"{max(0, self._limits.evaluations - evaluations):,} evaluations left"
        return f"{max(0.0, (1 - spent) * (seconds or DEFAULT_SECONDS)):.0f} s left"


@contextlib.contextmanager
def _interruptible(progress: Progress, said: str = f"{STOPPING} without a plan") -> Iterator[None]:
    """The first Ctrl-C cancels the search, the second gives up."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def cancel(*_: object) -> None:
        if progress.cancelled:
            raise KeyboardInterrupt
        progress.cancel()
        ui.print_note(said)

    before = signal.signal(signal.SIGINT, cancel)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def writable(path: Path, source: Path | None = None) -> None:
    """Refuse a file that cannot be written before the search, not after it.

    Raises:
        PlanFileError: its folder does not exist, it is a folder, or it is ``source``, the input.
    """
    if source is not None and path.exists() and source.exists() and path.samefile(source):
        raise PlanFileError(f"cannot write {path}", facts=["it is the input"], hint="name another file")
    if path.is_dir():
        raise PlanFileError(f"cannot write {path}", facts=["it is a folder"], hint="name a file, e.g. -o plan.json")
    if not path.parent.is_dir():
        raise PlanFileError(f"cannot write {path}", facts=[f"there is no folder {path.parent}"])


def announce(plan: Plan, registry: Registry) -> tuple[LoadedDiagnostic, ...]:
    """Tell observers that a plan is final and collect what plugins remark on it."""
    registry.records("backend")  # those that are installed say what they cannot run
    registry.observers("rpeg_plan_ready", plan=plan)
    return registry.check_plan(plan)


def show_diagnostics(found: Sequence[LoadedDiagnostic]) -> None:
    """Remarks of plugins, on stderr."""
    for loaded in found:
        remark = loaded.diagnostic
        ui.print_error(f"{remark.severity}: {remark.message}  [{loaded.plugin}]")
        if remark.hint is not None:
            ui.print_error(f"hint: {remark.hint}")


def note_missing_baselines(outcome: Outcome) -> None:
    if not outcome.baselines:
        ui.print_note(f"no baselines to compare with; `pip install {BASELINE_DISTRIBUTION}` adds greedy and concurrent")


def show_certificate(text: str | None) -> None:
    """How far from the best the plan can be; folded on a terminal."""
    if text is not None:
        show_sentences([text])


def show_heading(plan: Plan, verdict: str = "") -> None:
    """What the plan is of, and how fast it is."""
    first, second = summary.heading(plan), verdict + summary.throughput(plan)
    if ui.is_terminal():
        from rich.text import Text

        first = draw(Text(plain(first), style="bold"))
    ui.print_text(f"{first}\n{second}")


def _show_remarks(plan: Plan) -> None:
    """What the intervals are, what has none, and where the plan extrapolates; folded on a terminal."""
    found = intervals.remarks(plan.intervals)
    if found:
        ui.print_text("")
    for remark in found:
        ui.print_text(textwrap.fill(remark, terminal_width()) if ui.is_terminal() else remark)


def show_grid(grid: Grid) -> None:
    """A titled table: drawn on a terminal, tab-separated in a pipe."""
    ui.print_text("")
    if ui.is_terminal():
        ui.print_text(draw(grid.rich(terminal_width())))
    else:
        ui.print_text(grid.title)
        ui.print_table(*grid.written())


def show_operators(plan: Plan, operators: Sequence[str] | None = None) -> None:
    """Where each operator runs and how it is split; how it is executed, where the plan says so."""
    chosen = tuple(plan.assignments) if operators is None else tuple(operators)
    show_grid(tables.operator_table(plan, chosen))
    modes = tables.mode_table(plan, chosen)
    if modes is not None:
        show_grid(modes)
    _show_remarks(plan)


def show_memory(prediction: Prediction, planner: Planner) -> None:
    """Peak memory per GPU against what is usable."""
    show_grid(memory_overview(prediction.memory, usable_bytes(planner.hardware.device.memory_bytes)))


def show_moments(report: MemoryReport, *, with_terms: bool = True) -> None:
    """Memory over a step, then the terms of each peak and what else is worth knowing."""
    show_grid(moments.moment_table(report))
    show_sentences([*(moments.peak_terms(report) if with_terms else ()), *moments.notes(report)])


def show_sentences(sentences: Sequence[str]) -> None:
    """One line each; on a terminal folded, continued with an indent."""
    width = terminal_width()
    lines = [textwrap.fill(line, width, subsequent_indent="  ") if ui.is_terminal() else line for line in sentences]
    ui.print_text("\n".join(["", *map(_plain_lines, lines)]))


def _plain_lines(text: str) -> str:
    """``text`` without control characters but for line ends."""
    return "\n".join(map(plain, text.split("\n")))


def show_chart(prediction: Prediction) -> None:
    """The Gantt chart of the first steps."""
    picture = gantt.chart(prediction)
    ui.print_text("")
    if not ui.has_colour():
        width = terminal_width() if ui.is_terminal() else PIPE_WIDTH
        ui.print_text("\n".join([picture.heading, *gantt.ascii_lines(picture, width=width)]))
        return
    from rich.console import Group
    from rich.text import Text

    lines = gantt.rich_lines(picture, width=terminal_width())
    ui.print_text(draw(Group(Text(picture.heading, style="bold"), *lines)))


def fail_without_plan(
    planner: Planner, outcome: Outcome, registry: Registry, overrides: Sequence[Override], *, as_json: bool
) -> NoReturn:
    """End a command whose search found nothing.

    Raises:
        NoFeasiblePlanError: always.
    """
    remedies = remedies_for(planner.experiment, registry, overrides)
    error = no_plan(planner, outcome, remedies)
    if as_json:
        error.document = {"feasible": False, "search": documents.search(outcome), **documents.remedies(remedies)}
    raise error


def no_plan(planner: Planner, outcome: Outcome, remedies: Remedies) -> NoFeasiblePlanError:
    """Why nothing fits, and what would."""
    hardware, gpus = planner.hardware, words.plural(planner.machine.gpus, "GPU")
    usable = usable_bytes(hardware.device.memory_bytes)
    if outcome.nearest is not None:
        structure = outcome.structure(outcome.nearest).structure
        why = [
            f"closest plan found ({structure}): {out_of_memory(outcome.nearest.prediction.memory, usable)}",
            f"tried: {words.listing(_tried(outcome))}",
        ]
    else:
        why = _too_large_alone(outcome.problem, usable)
    memory = words.gigabytes(hardware.device.memory_bytes)
    return NoFeasiblePlanError(
        f"no plan fits {gpus} of {hardware.name} with {memory} each ({words.gigabytes(usable)} usable)",
        facts=[*why, *remedies_in_words.changes(remedies)],
        hint=remedies_in_words.first_step(remedies),
    )


def _tried(outcome: Outcome) -> list[str]:
    searched = f"{words.plural(outcome.chosen.result.evaluations, 'evaluation')} by {outcome.chosen.name}"
    return [searched, *(contender.name for contender in outcome.baselines), "the descent to the least memory"]


def too_large(planner: Planner, prediction: Prediction, remedies: Remedies) -> NoFeasiblePlanError:
    """Why a given plan does not fit, and what would."""
    usable = usable_bytes(planner.hardware.device.memory_bytes)
    return NoFeasiblePlanError(
        "this plan does not fit",
        facts=[out_of_memory(prediction.memory, usable), *remedies_in_words.changes(remedies)],
        hint=remedies_in_words.first_step(remedies),
    )


def remedies_for(
    experiment: Experiment, registry: Registry, overrides: Sequence[Override], present: Present | None = None
) -> Remedies:
    """What would make the experiment, or the ``present`` plan of it, fit; Ctrl-C ends the tries."""
    progress = Progress()
    with ui.progress("it does not fit; trying what would"), _interruptible(progress, STOPPING):
        return find_remedies(
            experiment,
            lambda changed: Planner(changed, registry, overrides),
            present=present,
            profiles=[r.record for r in registry.records("hardware") if isinstance(r.record, HardwareProfile)],
            cancelled=lambda: progress.cancelled,
        )


def headroom_for(
    experiment: Experiment, registry: Registry, overrides: Sequence[Override], present: Present
) -> Remedies:
    """What would give the ``present`` plan of the experiment more room; Ctrl-C ends the tries."""
    progress = Progress()
    with ui.progress("little room; trying what gives more"), _interruptible(progress, STOPPING):
        return find_headroom(
            experiment,
            lambda changed: Planner(changed, registry, overrides),
            present,
            cancelled=lambda: progress.cancelled,
        )


def pinning(plan: Plan) -> Experiment:
    """The experiment that asks for exactly this plan; pins that are given up leave what its ``space:`` says."""
    structure = plan.structure
    pins: dict[str, Pin] = {}
    for name, assignment in plan.assignments.items():
        layout, mode = assignment.layout, assignment.mode
        pins[name] = attrs.evolve(  # defaults, too: without them ``space:`` would leave a choice
            Pin.of(assignment),
            context=layout.context,
            expert=layout.expert,
            sequence_parallel=mode.sequence_parallel,
            precision=mode.precision,
        )
    return attrs.evolve(
        plan.experiment,
        pins=pins,
        structure=StructureChoices(
            staleness=tuple(sorted({tau for _, tau in structure.staleness})) or (0,),
            actor_critic_sharing=(structure.actor_critic_sharing,),
            fusion=(structure.fusion,),
        ),
    )


def _too_large_alone(problem: Problem, usable: float) -> list[str]:
    """For each operator that fits nowhere: the least that it needs, by term."""
    facts: dict[str, None] = {}
    for structure in problem.structures:
        name = structure.empty_operator
        if name is None:
            continue
        column, costs = smallest_footprint(structure, name)
        layout, needed = costs.layouts.layout(column), float(costs.isolated[column])
        terms = _terms(costs.memory, column)
        facts[
            f"operator {name} fits no GPU even alone: its smallest layout {layout} needs "
            f"{words.gigabytes(needed)} of {words.gigabytes(usable)}: {terms}"
        ] = None
    return list(facts)


def _terms(values: Any, column: int) -> str:
    parts = [(float(values.values[i, column]), term.quantity) for i, term in enumerate(values.terms)]
    return ", ".join(f"{name} {words.gigabytes(size)}" for size, name in sorted(parts, reverse=True) if size > 0)
