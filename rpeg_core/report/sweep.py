"""The report of ``rpeg sweep``: what stands out among its rows, its table, its JSON document and its CSV file."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Hashable, Mapping, Sequence
from typing import Any

import attrs

from rpeg_core.accuracy.draws import CONFIDENCE
from rpeg_core.planning.structures import STRUCTURAL_OPTIONS, Structure
from rpeg_core.planning.sweep import Point, Row
from rpeg_core.report import intervals, words
from rpeg_core.report.page import Column, Grid, Grouping
from rpeg_core.report.pareto import frontier, knee

__all__ = [
    "AXES",
    "Analysis",
    "Curve",
    "analyse",
    "column_sentence",
    "csv_text",
    "documents",
    "interval_sentences",
    "knee_sentences",
    "label",
    "pareto_sentence",
    "state",
    "table",
    "without_plan",
]

AXES = {"gpus": "GPUs", "prompts": "prompts", "response_tokens": "response tokens", "hardware": "hardware"}
"""What can vary, with its heading; the first numeric one that does is the x axis."""

SHORT = {"actor_critic_sharing": "shared", "fusion": "fused"}
"""Structural options in the table."""


@attrs.frozen(kw_only=True)
class Curve:
    """Rows that differ along the x axis only, those with a plan, x ascending; ``knee`` is the index of one of them."""

    name: str
    rows: tuple[Row, ...]
    knee: int | None


@attrs.frozen(kw_only=True)
class Analysis:
    """What stands out in a sweep.

    Attributes:
        rows: every point, in the order of the sweep.
        axes: attributes of the points that vary.
        x: the axis along which curves run, None when only the hardware varies, or nothing.
        pareto: per row, whether it is Pareto-optimal; None without a plan or without a row to compare with.
        curves: along ``x``.
        priced: whether every row with a plan has a price.
    """

    rows: tuple[Row, ...]
    axes: tuple[str, ...]
    x: str | None
    pareto: tuple[bool | None, ...]
    curves: tuple[Curve, ...]
    priced: bool

    @property
    def knees(self) -> tuple[Row, ...]:
        return tuple(curve.rows[curve.knee] for curve in self.curves if curve.knee is not None)


def analyse(rows: Sequence[Row]) -> Analysis:
    """Pareto-optimal rows and knees.

    A row is compared with those of the same workload: on price per token where every one of them has a price, else
    with those of the same hardware, on GPU time per token.
    """
    axes = tuple(name for name in AXES if len({getattr(row.point, name) for row in rows}) > 1)
    x = next((name for name in axes if name != "hardware"), None)
    with_plan = [row for row in rows if row.found is not None]
    priced = bool(with_plan) and all(row.point.price_per_gpu_hour is not None for row in with_plan)
    optimal: dict[int, bool] = {}
    for group in _groups(with_plan, lambda p: (p.prompts, p.response_tokens, None if priced else p.hardware)):
        if len(group) > 1:
            points = [(_cost(row, priced), row.found.tokens_per_s) for row in group]
            optimal |= {id(row): best for row, best in zip(group, frontier(points), strict=True)}
    return Analysis(
        rows=tuple(rows),
        axes=axes,
        x=x,
        pareto=tuple(optimal.get(id(row)) for row in rows),
        curves=() if x is None else tuple(_curves(with_plan, axes, x)),
        priced=priced,
    )


def _cost(row: Row, priced: bool) -> float:
    return row.usd_per_million_tokens if priced else row.gpu_seconds_per_token


def _groups(rows: Sequence[Row], key: Callable[[Point], Hashable]) -> list[list[Row]]:
    groups: dict[Hashable, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row.point), []).append(row)
    return list(groups.values())


def _curves(rows: Sequence[Row], axes: Sequence[str], x: str) -> list[Curve]:
    others = [name for name in axes if name != x]
    curves = []
    for group in _groups(rows, lambda point: tuple(getattr(point, name) for name in others)):
        ordered = tuple(sorted(group, key=lambda row: getattr(row.point, x)))
        curve = [(getattr(row.point, x), row.found.tokens_per_s) for row in ordered]
        curves.append(Curve(name=label(ordered[0].point, others), rows=ordered, knee=knee(curve)))
    return curves


def label(point: Point, axes: Sequence[str]) -> str:
    """``gh200, 512 prompts``: the values of a point on some axes."""
    parts = []
    for name in (name for name in ("hardware", "gpus", "prompts", "response_tokens") if name in axes):
        value = getattr(point, name)
        parts.append(value if name == "hardware" else words.plural(value, AXES[name].removesuffix("s")))
    return ", ".join(parts)


def table(analysis: Analysis) -> Grid:
    """One row per point, grouped by curve; bold ones are knees."""
    x = analysis.x or "gpus"
    others = [name for name in analysis.axes if name != x]
    columns = [Column(", ".join(AXES[name] for name in others))] if others else []
    columns += [Column(AXES[x], right=not others)]
    columns += [Column(name, right=True) for name in ("tok/s", "per GPU", "step")]
    if analysis.priced:
        columns += [Column("$/Mtok", right=True), Column("$/step", right=True)]
    columns += [
        Column("staleness"),
        Column("gap", right=True),
        Column("memory", right=True),
        Column("remarks"),
    ]
    knees, rows, styles = {id(row) for row in analysis.knees}, [], []
    for row, optimal in zip(analysis.rows, analysis.pareto, strict=True):
        cells = [*([label(row.point, others)] if others else []), str(getattr(row.point, x))]
        if row.found is None:
            rows.append((*cells, *("" for _ in columns[len(cells) + 1 :]), state(row)))
            styles.append((len(rows) - 1, "bright_black"))
            continue
        if id(row) in knees:
            styles.append((len(rows), "bold"))
        cells += [f"{row.found.tokens_per_s:,.0f}", f"{row.tokens_per_s_per_gpu:,.0f}", words.seconds(row.found.step_s)]
        if analysis.priced:
            cells += [_usd(row.usd_per_million_tokens), _usd(row.usd_per_step)]
        cells += [_staleness(row.found.structure), _gap(row.found.gap), words.gigabytes(_peak(row))]
        rows.append((*cells, ", ".join(_remarks(row, optimal, id(row) in knees))))
    return Grid(
        title="sweep",
        columns=tuple(columns),
        rows=tuple(rows),
        styles=tuple(styles),
        grouping=Grouping.HEADED if others else Grouping.NONE,
    )


def state(row: Row) -> str:
    """``fits``, ``does not fit`` or ``skipped``."""
    if row.found is not None:
        return "fits"
    return "skipped" if row.point.skipped is not None else "does not fit"


def _remarks(row: Row, optimal: bool | None, is_knee: bool) -> list[str]:
    remarks = ["Pareto"] if optimal else []
    if is_knee:
        remarks.append("knee")
    if row.found.plan_of_gpus is not None:
        remarks.append(f"as {words.plural(row.found.plan_of_gpus, 'GPU')}")
    return remarks


def _staleness(structure: Structure) -> str:
    """``1``, or ``1/0`` by trainable model where they differ, and the structural options: ``1 shared``."""
    taus = [str(tau) for _, tau in structure.staleness]
    options = [SHORT[name] for name in STRUCTURAL_OPTIONS if getattr(structure, name)]
    return " ".join(["/".join(taus if len(set(taus)) > 1 else taus[:1]), *options])


def _usd(value: float) -> str:
    return f"{value:,.2f}" if value >= 1 else f"{value:.3g}"


def _gap(gap: float | None) -> str:
    if gap is None:
        return ""
    if gap == 0:
        return "0"
    return "< 0.1%" if gap < 0.001 else f"≤ {words.percent(gap)}"


def _peak(row: Row) -> float:
    return row.found.prediction.memory.peak.peak_bytes


def without_plan(analysis: Analysis) -> Grid | None:
    """Why the other points have none; None when all have one."""
    axes = [name for name in AXES if name in analysis.axes or name == "gpus"]
    rows = [(label(row.point, axes), state(row), row.why or "") for row in analysis.rows if row.found is None]
    if not rows:
        return None
    columns = (Column("point"), Column("state"), Column("why"))
    return Grid(title="points without a plan", columns=columns, rows=tuple(rows))


def column_sentence(analysis: Analysis) -> str | None:
    """What two of the columns mean; None when no row has a plan."""
    found = [row.found for row in analysis.rows if row.found is not None]
    if not found:
        return None
    gap = (
        "gap: below the best possible plan under this model, at most; " if any(f.gap is not None for f in found) else ""
    )
    return f"{gap}memory: peak of the fullest GPU"


def interval_sentences(analysis: Analysis) -> list[str]:
    """How sure the times are, as a share of them, what has no interval, and which points extrapolate.

    Points share their errors: they are told once, and rows have no intervals that would be compared with each other.
    """
    found: dict[str, list[str]] = {}
    axes = [name for name in AXES if name in analysis.axes]
    with_plan = [row for row in analysis.rows if row.found is not None]
    for row in with_plan:
        for remark in intervals.remarks(row.found.intervals, explained=False):
            found.setdefault(remark, []).append(label(row.point, axes))
    shares = [
        (step.low / row.found.step_s, step.high / row.found.step_s)
        for row in with_plan
        for step in [row.found.intervals.step_s]
        if step is not None
    ]
    sentences = []
    if shares:
        low, high = min(low for low, _ in shares), max(high for _, high in shares)
        sentences.append(
            f"step: {words.percent(CONFIDENCE)} interval {words.times(low)} to {words.times(high)} of the time that is "
            "predicted, from the errors of measured runs (docs/validation.md); points share them and are surer beside "
            "each other"
        )
    return sentences + [
        text if len(at) == len(with_plan) else f"{words.listing(at)}: {text}" for text, at in found.items()
    ]


def pareto_sentence(analysis: Analysis) -> str | None:
    """What the mark means; None when no row bears it."""
    if not any(analysis.pareto):
        return None
    if analysis.priced:
        return "Pareto: no point of the same workload is at least as fast and as cheap per token, and better in one"
    among = "workload and hardware" if "hardware" in analysis.axes else "workload"
    return (
        f"Pareto: no point of the same {among} is at least as fast with as little GPU time per token, and better in one"
    )


def knee_sentences(analysis: Analysis) -> list[str]:
    """``knee: 32 GPUs with 88,617 tok/s; up to there each GPU adds ...``, one per curve of three points or more."""
    return [_knee_sentence(curve, analysis.x) for curve in analysis.curves if len(curve.rows) >= 3]


def _knee_sentence(curve: Curve, x: str) -> str:
    prefix = f"{curve.name}: " if curve.name else ""
    if curve.knee is None:
        return f"{prefix}no knee: tok/s rise almost in a straight line with {AXES[x]}, or not at all"
    before, at, after = curve.rows[curve.knee - 1 : curve.knee + 2]

    def added(low: Row, high: Row) -> str:
        gain = high.found.tokens_per_s - low.found.tokens_per_s
        return f"{gain / (getattr(high.point, x) - getattr(low.point, x)):,.0f}"

    return (
        f"{prefix}knee: {label(at.point, [x])} with {words.tokens_per_s(at.found.tokens_per_s)}; "
        f"up to there each {AXES[x].removesuffix('s')} adds {added(before, at)} tok/s, "
        f"from there to {getattr(after.point, x):,} {added(at, after)}"
    )


def documents(analysis: Analysis) -> list[dict[str, Any]]:
    """The rows for ``--json``, complete, each number in the unit of its name."""
    knees = {id(row) for row in analysis.knees}
    return [
        _document(row, optimal, id(row) in knees) for row, optimal in zip(analysis.rows, analysis.pareto, strict=True)
    ]


def _document(row: Row, optimal: bool | None, is_knee: bool) -> dict[str, Any]:
    point, plan = row.point, row.found
    cluster = None if point.experiment is None else point.experiment.cluster
    document: dict[str, Any] = {
        "hardware": point.hardware,
        "gpus": point.gpus,
        "racks": cluster and cluster.racks,
        "nodes_per_rack": cluster and cluster.nodes_per_rack,
        "gpus_per_node": cluster and cluster.gpus_per_node,
        "prompts": point.prompts,
        "response_tokens": point.response_tokens,
        "price_per_gpu_hour": point.price_per_gpu_hour,
        "state": state(row),
        "why": row.why,
    }
    if plan is None:
        return document
    evaluation, step, rate = plan.prediction.evaluation, plan.intervals.step_s, plan.intervals.tokens_per_s
    return {
        **document,
        "tokens_per_s": plan.tokens_per_s,
        "tokens_per_s_per_gpu": row.tokens_per_s_per_gpu,
        "tokens_per_s_low": rate and rate.low,
        "tokens_per_s_high": rate and rate.high,
        "step_s": plan.step_s,
        "step_s_low": step and step.low,
        "step_s_high": step and step.high,
        "usd_per_million_tokens": row.usd_per_million_tokens,
        "usd_per_step": row.usd_per_step,
        "structure": str(plan.structure),
        "used_gpus": evaluation.used_gpus,
        "utilization": evaluation.utilization,
        "gap": plan.gap,
        "limit": plan.limit,
        "peak_memory_bytes": _peak(row),
        "peak_memory_share": evaluation.peak_ratio,
        "plan_of_gpus": plan.plan_of_gpus,
        "pareto": optimal,
        "knee": is_knee,
        "plan": {name: assignment.document() for name, assignment in plan.assignments.items()},
    }


def csv_text(analysis: Analysis) -> str:
    """The rows as CSV, plans left out."""
    rows: list[Mapping[str, Any]] = documents(analysis)
    names = list(dict.fromkeys(name for row in rows for name in row if name != "plan"))
    target = io.StringIO()
    writer = csv.DictWriter(target, names, extrasaction="ignore", lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    return target.getvalue()
