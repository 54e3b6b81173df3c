"""The JSON documents of ``--json``; every number is in the unit of its name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import attrs

from rpeg_core.accuracy.spread import Spread
from rpeg_core.costing.book import CostBook
from rpeg_core.costing.memory import DeviceMemory
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.problem import critical_seconds
from rpeg_core.planning.remedies import Remedies
from rpeg_core.planning.solve import Outcome
from rpeg_core.plugins.registry import LoadedDiagnostic
from rpeg_core.report.axes import Unplaced
from rpeg_core.report.structure import Rival
from rpeg_core.report.tables import split_operators, steady_step

__all__ = ["diagnostics", "explanation", "memory", "remedies", "rival", "search"]


def search(outcome: Outcome) -> dict[str, Any]:
    """How a plan was found: what ``plan.json`` keeps under ``search``."""
    result = outcome.chosen.result
    return {
        "strategy": outcome.chosen.name,
        "found_by": None if outcome.winner is None else outcome.winner.name,
        "evaluations": result.evaluations,
        "seconds": result.seconds,
        "stopped": result.stopped,
        "gap": outcome.gap,
        "limit": outcome.limit,
        "improvements": [attrs.asdict(improvement) for improvement in result.improvements],
        "baselines": [
            {
                "name": contender.name,
                "feasible": contender.feasible,
                "tokens_per_s": evaluation and evaluation.tokens_per_s,
                "peak_ratio": evaluation and evaluation.peak_ratio,
            }
            for contender in outcome.baselines
            for evaluation in [contender.prediction and contender.prediction.evaluation]
        ],
    }


def rival(rival: Rival | Unplaced) -> dict[str, Any]:
    """A plan with one choice changed, in the same places; ``peak_bytes`` where the choice changes it most.

    Where that is not legal, the ``reason``.
    """
    if isinstance(rival, Unplaced):
        return {**attrs.asdict(rival), "sentence": rival.sentence()}
    gpus, other_bytes, own_bytes = rival.most_added
    return {
        "chosen": rival.chosen,
        "other": rival.other,
        "step_s": rival.own_step_s,
        "other_step_s": rival.step_s,
        "ratio_interval": None if rival.ratio is None else [rival.ratio.low, rival.ratio.high],
        "gpus": str(gpus),
        "peak_bytes": own_bytes,
        "other_peak_bytes": other_bytes,
        "other_fits": rival.fits,
        "sentence": rival.sentence(),
    }


def memory(memory: DeviceMemory) -> list[dict[str, Any]]:
    """Peaks with their terms, one entry per group of GPUs."""
    return [
        {
            "gpus": str(segment.gpus),
            "peak_bytes": segment.peak_bytes,
            "while": segment.moment,
            "phase": None if segment.phase is None else segment.phase.value,
            "terms": [attrs.asdict(item) for item in segment.items],
        }
        for segment in memory.segments
    ]


def remedies(found: Remedies) -> dict[str, Any]:
    """``slowdown`` is time per token over that of the compared plan, less 1."""
    compared = None
    if found.present is not None:
        compared = {
            "tokens_per_s": found.present.tokens_per_s,
            "step_s": found.present.step_s,
            "is": "the plan" if found.present.assignments else "a plan without limit of memory",
        }
    return {
        "remedies": [attrs.asdict(remedy) for remedy in found.found],
        "compared_with": compared,
        "tried_in_vain": list(found.tried),
        "untried": list(found.untried),
        "tries_stopped": found.stopped,
    }


def diagnostics(found: Sequence[LoadedDiagnostic]) -> list[dict[str, Any]]:
    return [
        {
            "severity": str(loaded.diagnostic.severity),
            "message": loaded.diagnostic.message,
            "hint": loaded.diagnostic.hint,
            "plugin": loaded.plugin,
        }
        for loaded in found
    ]


def explanation(
    plan: Plan, prediction: Prediction, book: CostBook, spread: Spread, operators: Sequence[str]
) -> dict[str, Any]:
    """Everything that ``rpeg explain`` shows, of the given operators."""
    critical = dict(zip((op.name for op in plan.rpeg.operators), critical_seconds(prediction).tolist(), strict=True))
    return {
        "digest": plan.digest,
        "structure": str(plan.structure),
        "operators": {
            name: {
                "assignment": plan.document()["plan"][name],
                "seconds": _terms(book, plan.assignments, name, split=name in split_operators(prediction)),
                "seconds_interval": {
                    term: None if timed.interval is None else [timed.interval.low, timed.interval.high]
                    for term, timed in spread.terms[name].items()
                },
                "critical_path_s": critical[name],
            }
            for name in operators
        },
        "memory": memory(prediction.memory),
        "usable_bytes": plan.prediction.usable_bytes,
        "transfers": [
            {
                "kind": node.kind.value,
                "container": node.container,
                "operator": node.operator,
                "phase": node.phase,
                "source": str(node.source),
                "destination": str(node.allocation),
                "payload_bytes": node.payload_bytes,
                "seconds": prediction.seconds[node.index],
            }
            for node in steady_step(prediction)
            if node.operator in operators
        ],
        "makespan_s": prediction.evaluation.makespan_s,
        "intervals": None if plan.intervals is None else plan.intervals.document(),
        "cost_terms": [{"name": a.term.name, "distribution": a.distribution, "version": a.version} for a in book.terms],
        "hardware_sources": dict(book.hardware.sources),
    }


def _terms(book: CostBook, assignments: ExecutionPlan, name: str, *, split: bool) -> dict[str, float]:
    costs, row = book.operators[name], book.row(assignments[name], name)
    tables = costs.phases if split else (costs.whole,)
    return {term.name: float(sum(table.values[i, row] for table in tables)) for i, term in enumerate(costs.whole.terms)}
