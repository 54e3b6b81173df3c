"""The tables of ``rpeg plan``, ``predict`` and ``explain``: from a prediction to rows of text."""

from __future__ import annotations

from collections.abc import Sequence

from rpeg_core.accuracy.draws import Interval
from rpeg_core.accuracy.spread import Spread
from rpeg_core.costing.book import CostBook
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.problem import critical_seconds
from rpeg_core.planning.space import framework_of
from rpeg_core.report import intervals, words
from rpeg_core.report.page import Column, Grid, Grouping
from rpeg_core.spec.execution import Precision

__all__ = [
    "critical_path",
    "mode_table",
    "operator_table",
    "operator_terms",
    "split_operators",
    "steady_step",
    "transfer_table",
]

BAR_CELLS = 16


def operator_table(plan: Plan, operators: Sequence[str] | None = None) -> Grid:
    """Operator -> GPUs, degrees, microbatches, time with its interval; None: of all operators.

    Context and expert parallelism have columns where an operator has it.
    """
    prediction, rows = plan.prediction, []
    sure = {} if plan.intervals is None else plan.intervals.operator_s
    names = tuple(plan.assignments) if operators is None else tuple(operators)
    layouts = [plan.assignments[name].layout for name in names]
    further = [key for key in ("context", "expert") if any(getattr(layout, key) > 1 for layout in layouts)]
    for name in names:
        assignment = plan.assignments[name]
        layout, phases = assignment.layout, prediction.operator_s[name]
        beyond = (getattr(layout, key) for key in further)
        degrees = (layout.data, layout.pipeline, layout.tensor, *beyond, assignment.microbatches)
        rows.append(
            (
                name,
                str(assignment.allocation),
                *(str(degree) for degree in degrees),
                intervals.seconds(sum(phases), sure.get(name)),
                " + ".join(map(words.seconds, phases)) if len(phases) > 1 else "",
            )
        )
    split = any(row[-1] for row in rows)
    columns = (
        Column("operator"),
        Column("GPUs"),
        Column("dp", right=True),
        Column("pp", right=True),
        Column("tp", right=True),
        *(Column({"context": "cp", "expert": "ep"}[key], right=True) for key in further),
        Column("microbatches", right=True),
        Column("time", right=True),
        Column("length phases"),
    )
    if not split:
        columns, rows = columns[:-1], [row[:-1] for row in rows]
    return Grid(title="plan", columns=columns, rows=tuple(rows))


def mode_table(plan: Plan, operators: Sequence[str]) -> Grid | None:
    """Operator -> sequence parallelism, recomputation, precision, framework; None when no operator says any."""
    rows = []
    for name in operators:
        mode, operator = plan.assignments[name].mode, plan.rpeg.operator(name)
        framework = framework_of(plan.experiment.space, name, operator.role)
        if operator.models:
            rows.append(
                (
                    name,
                    "yes" if mode.sequence_parallel else "",
                    "" if mode.recompute is None else mode.recompute.value,
                    "" if mode.precision is Precision.BF16 else mode.precision.value,
                    framework,
                )
            )
    names = ("operator", "sequence parallel", "recompute", "precision", "framework")
    said = [column for column in range(len(names)) if any(row[column] for row in rows)]
    if said == [0] or not rows:
        return None
    return Grid(
        title="execution",
        columns=tuple(Column(names[column]) for column in said),
        rows=tuple(tuple(row[column] for column in said) for row in rows if any(row[1:])),
    )


def operator_terms(book: CostBook, spread: Spread, operators: Sequence[str]) -> Grid:
    """Seconds of each operator in a step by cost term, each with the interval of its own error."""
    rows, styles = [], []
    quantity = {active.term.name: active.term.quantity for active in book.terms}
    for name in operators:
        total = spread.operators[name]
        styles.append((len(rows), "bold"))
        rows.append((name, "total", intervals.seconds(total.seconds, total.interval), "", "", ""))
        for term, timed in sorted(spread.terms[name].items(), key=lambda item: -item[1].seconds):
            share = timed.seconds / total.seconds
            time = intervals.seconds(timed.seconds, timed.interval)
            rows.append((name, quantity[term], time, words.percent(share), words.bar(share, BAR_CELLS), term))
    return Grid(
        title="time of one step, by term",
        columns=(
            Column("operator"),
            Column("term"),
            Column("time", right=True),
            Column("share", right=True),
            Column("of the operator", drawn=True),
            Column("cost term"),
        ),
        rows=tuple(rows),
        styles=tuple(styles),
        grouping=Grouping.FIRST_ROW,
    )


def split_operators(prediction: Prediction) -> frozenset[str]:
    """The operators that run in length phases."""
    return frozenset(n.operator for n in prediction.graph.nodes if n.kind is NodeKind.OP and n.phase is not None)


def steady_step(prediction: Prediction) -> tuple[Node, ...]:
    """The transfers of the last step of the horizon, in the order of their start."""
    graph, result = prediction.graph, prediction.schedule
    nodes = [n for n in graph.nodes if n.step == graph.steps - 1 and n.kind is not NodeKind.OP]
    return tuple(sorted(nodes, key=lambda node: (result.start_s[node.index], node.index)))


def transfer_table(prediction: Prediction, book: CostBook, operators: Sequence[str] | None = None) -> Grid:
    """COMM and RESHARD of one step in steady state, with bytes, link and time."""
    rows, place = [], {op.name: i for i, op in enumerate(prediction.graph.rpeg.operators)}
    for node in steady_step(prediction):
        if operators is not None and node.operator not in operators:
            continue
        tier = book.machine.tier_between(node.allocation, node.source)
        rows.append(
            (
                node.operator,
                node.kind.value if node.phase is None else f"{node.kind.value} of phase {node.phase + 1}",
                node.container or "",
                str(node.source),
                str(node.allocation),
                words.size(node.payload_bytes),
                tier.name.lower().replace("_", "-"),
                words.seconds(prediction.seconds[node.index]),
            )
        )
    return Grid(
        title="transfers of one step",
        columns=(
            Column("for"),
            Column("kind"),
            Column("carries"),
            Column("from", right=True),
            Column("to GPUs", right=True),
            Column("payload", right=True),
            Column("link"),
            Column("time", right=True),
        ),
        rows=tuple(sorted(rows, key=lambda row: place[row[0]])),
        grouping=Grouping.HEADED,
    )


def critical_path(prediction: Prediction, spread: Spread) -> Grid:
    """What the makespan consists of: seconds of each operator on the critical path, the rest is transfers.

    The path is the predicted one; where times turn out otherwise another one may be critical, and the interval of the
    makespan counts that in.
    """
    makespan, steps, step = prediction.evaluation.makespan_s, prediction.graph.steps, spread.step.interval
    whole = step and Interval(steps * step.low, steps * step.high)
    values = critical_seconds(prediction)
    parts = [(op.name, float(s)) for op, s in zip(prediction.graph.rpeg.operators, values, strict=True)]
    parts.append(("transfers", max(0.0, makespan - sum(value for _, value in parts))))
    rows = tuple(
        (
            name,
            words.seconds(value),
            words.percent(value / makespan),
            words.bar(value / makespan, BAR_CELLS),
        )
        for name, value in sorted(parts, key=lambda part: -part[1])
        if value > 1e-9 * makespan
    )
    return Grid(
        title=f"critical path of {words.plural(steps, 'step')}, {intervals.seconds(makespan, whole)}",
        columns=(
            Column("operator"),
            Column("time", right=True),
            Column("share", right=True),
            Column("of the makespan", drawn=True),
        ),
        rows=rows,
    )
