"""The readable evaluator: a configuration through every pass, keeping each level for reports and tests.

``C = (G, P) -> unroll -> lower -> times and memory -> schedule -> score``. The compiled evaluator that search uses must
agree with this one to the last bit.
"""

from __future__ import annotations

import attrs

from rpeg_core.costing.book import CostBook
from rpeg_core.costing.memory import DeviceMemory, device_memory
from rpeg_core.errors import CostTermError
from rpeg_core.ir import Rpeg
from rpeg_core.passes.lower import ExecutableGraph, lower
from rpeg_core.passes.schedule import Schedule, Segments, schedule
from rpeg_core.passes.score import Evaluation, usable_bytes
from rpeg_core.passes.unroll import unroll
from rpeg_core.planning.assignment import ExecutionPlan

__all__ = ["EvaluationOptions", "Prediction", "evaluate"]


@attrs.frozen(kw_only=True)
class EvaluationOptions:
    """How configurations are evaluated.

    Attributes:
        steps: K_eval, the unrolled horizon (8 in the paper's predicted schedules).
        split_lengths: apply length-quantile splitting (ablation A1 turns it off).
        reserve_source: a transfer also holds its source GPUs.
    """

    steps: int = 8
    split_lengths: bool = True
    reserve_source: bool = False


@attrs.frozen(kw_only=True)
class Prediction:
    """Everything the model says about one configuration."""

    graph: ExecutableGraph
    seconds: tuple[float, ...]
    schedule: Schedule
    memory: DeviceMemory
    evaluation: Evaluation


def evaluate(rpeg: Rpeg, plan: ExecutionPlan, book: CostBook, options: EvaluationOptions) -> Prediction:
    """Evaluate ``(rpeg, plan)``; every assignment must be legal (its layout is a column of the book)."""
    graph = lower(unroll(rpeg, options.steps), plan, book.workload, split_lengths=options.split_lengths)
    seconds = tuple(book.node_seconds(node) for node in graph.nodes)
    result = schedule(graph, seconds, book.machine.gpus, reserve_source=options.reserve_source)
    if result.makespan_s <= 0.0:
        raise CostTermError("the cost terms give every operator 0 seconds", hint="name a cost model under costs:")
    memory = device_memory(rpeg, plan, book)
    return Prediction(
        graph=graph,
        seconds=seconds,
        schedule=result,
        memory=memory,
        evaluation=Evaluation(
            makespan_s=result.makespan_s,
            tokens_per_s=options.steps * book.workload.tokens_per_step / result.makespan_s,
            peak_ratio=memory.peak.peak_bytes / usable_bytes(book.hardware.device.memory_bytes),
            utilization=_utilization(result, book.machine.gpus),
            used_gpus=_used(rpeg, plan, book.machine.gpus),
        ),
    )


def _utilization(result: Schedule, gpus: int) -> float:
    busy = 0.0
    for segment in range(result.segments.count):
        busy = busy + result.busy_s[segment] * result.segments.allocation(segment).size
    return busy / (gpus * result.makespan_s)


def _used(rpeg: Rpeg, plan: ExecutionPlan, gpus: int) -> int:
    allocations = [plan[op.name].allocation for op in rpeg.operators]
    segments = Segments.of(allocations, gpus)
    used = {s for allocation in allocations for s in segments.within(allocation)}
    return sum(segments.allocation(s).size for s in used)
