"""The problem that a search strategy solves: structures, candidates, cost tables, an evaluator.

Everything plugins contribute is asked once, here; searching only reads tables.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from typing import Protocol

import attrs
import numpy as np

from rpeg_core.costing.book import ActiveTerm, CostBook
from rpeg_core.errors import PinError
from rpeg_core.ir import Rpeg
from rpeg_core.passes.evaluate import EvaluationOptions, Prediction, evaluate
from rpeg_core.passes.lower import NodeKind
from rpeg_core.passes.score import Evaluation, Objective, usable_bytes
from rpeg_core.planning.assignment import Assignment, ExecutionPlan, Layout, Mode
from rpeg_core.planning.axes import AXES, Axes, illegal_mode, illegal_value
from rpeg_core.planning.candidates import PAPER, Candidates, illegal_layout, legal_candidates, origins
from rpeg_core.planning.no_layout import no_layout
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.machine import DeviceSpace, HardwareProfile
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload

__all__ = ["Evaluator", "Problem", "ReadableEvaluator", "StructureProblem", "build_structure", "model_specs"]


class Evaluator(Protocol):
    """Evaluates choices of one structure; the readable and the compiled one are interchangeable."""

    def evaluate(self, choice: Sequence[int]) -> Evaluation:
        """Evaluate one candidate index per operator, in the graph's operator order."""

    def evaluate_many(self, choices: np.ndarray) -> np.ndarray:
        """Evaluate the rows of ``choices``, shape (n, operators); a row of the result has the fields of Evaluation."""

    def critical_seconds(self, choice: Sequence[int]) -> np.ndarray:
        """Seconds that each operator contributes to the critical path of the schedule, shape (operators,)."""


@attrs.frozen(kw_only=True, eq=False, slots=False)
class StructureProblem:
    """One structure of the search space.

    Attributes:
        structure: its structural choices.
        rpeg: its graph.
        candidates: per operator, in graph order: legal assignments that match the pins and fit a GPU on their own,
            sorted by time.
        book: its cost tables.
        options: how configurations are evaluated.
    """

    structure: Structure
    rpeg: Rpeg
    candidates: tuple[Candidates, ...]
    book: CostBook
    options: EvaluationOptions

    @property
    def operators(self) -> tuple[str, ...]:
        return tuple(op.name for op in self.rpeg.operators)

    @property
    def empty_operator(self) -> str | None:
        """An operator without any candidate (nothing fits), or None."""
        return next((c.operator for c in self.candidates if len(c) == 0), None)

    def plan(self, choice: Sequence[int]) -> dict[str, Assignment]:
        """The execution plan of one candidate index per operator."""
        return {
            candidates.operator: candidates.assignment(index)
            for candidates, index in zip(self.candidates, choice, strict=True)
        }

    def predict(self, plan: ExecutionPlan) -> Prediction:
        """Every level of the evaluation of a legal plan, from the readable evaluator."""
        return evaluate(self.rpeg, plan, self.book, self.options)

    def seconds(self, operator: int) -> np.ndarray:
        """Seconds of the unsplit operator for each of its candidates, shape (candidates,)."""
        candidates = self.candidates[operator]
        return self.book.operators[candidates.operator].whole.total[candidates.layout]

    @functools.cached_property
    def evaluator(self) -> Evaluator:
        """The evaluator for searching; numba is imported, and compiles once, when it is first asked for."""
        from rpeg_core.planning.compiled import CompiledEvaluator

        return CompiledEvaluator(self)


class ReadableEvaluator:
    """The passes, one after the other; slow and obviously right."""

    def __init__(self, problem: StructureProblem) -> None:
        self._problem = problem

    def evaluate(self, choice: Sequence[int]) -> Evaluation:
        return self._problem.predict(self._problem.plan(choice)).evaluation

    def evaluate_many(self, choices: np.ndarray) -> np.ndarray:
        return np.array([attrs.astuple(self.evaluate(choice)) for choice in choices.tolist()], np.float64)

    def critical_seconds(self, choice: Sequence[int]) -> np.ndarray:
        return critical_seconds(self._problem.predict(self._problem.plan(choice)))


def critical_seconds(prediction: Prediction) -> np.ndarray:
    """Walk back from the last node to finish, each time to the node that held it up; sum OP seconds by operator.

    What holds a node up is the predecessor or the earlier holder of its GPUs that finishes when it starts; of several
    the one scheduled last.
    """
    graph, result = prediction.graph, prediction.schedule
    predecessors = graph.predecessors()
    held = [set(segments) for segments in result.held]
    position = {index: place for place, index in enumerate(result.order)}
    total = np.zeros(len(graph.rpeg.operators))
    current = max(result.order, key=lambda i: (result.finish_s[i], position[i]))
    while True:
        node = graph.nodes[current]
        if node.kind is NodeKind.OP:
            total[graph.rpeg.index(node.operator)] += prediction.seconds[current]
        start = result.start_s[current]
        blockers = [
            other
            for other in result.order[: position[current]]
            if result.finish_s[other] == start and (other in predecessors[current] or held[other] & held[current])
        ]
        if not blockers:
            return total
        current = blockers[-1]


@attrs.frozen(kw_only=True, eq=False)
class Problem:
    """All structures of one experiment."""

    workload: Workload
    machine: DeviceSpace
    hardware: HardwareProfile
    objective: Objective
    options: EvaluationOptions
    structures: tuple[StructureProblem, ...]

    def prepare(self) -> None:
        """Evaluate one configuration, so that compiling or loading the kernels is not part of a timed search."""
        for structure in self.structures:
            if structure.empty_operator is None:
                structure.evaluator.evaluate((0,) * len(structure.candidates))
                return


def build_structure(
    *,
    structure: Structure,
    rpeg: Rpeg,
    machine: DeviceSpace,
    hardware: HardwareProfile,
    workload: Workload,
    terms: Sequence[ActiveTerm],
    options: EvaluationOptions,
    pins: Mapping[str, Pin] | None = None,
    axes: Mapping[str, Axes] | None = None,
) -> StructureProblem:
    """Candidates and cost tables of one graph; operators that are not in ``axes`` have the paper's plan space.

    Raises:
        PinError: a pin breaks a rule, or nothing legal matches it.
        ExperimentError: the axes leave an operator no layout.
        CostTermError: a cost term fails.
    """
    open_to = {op.name: (axes or {}).get(op.name, PAPER) for op in rpeg.operators}
    for name, pin in (pins or {}).items():
        _check_values(pin, rpeg, name, hardware)
        open_to[name] = open_to[name].pinned(pin)
    legal = {
        op.name: legal_candidates(op.name, machine, workload, *model_specs(rpeg, op.name), axes=open_to[op.name])
        for op in rpeg.operators
    }
    for name, candidates in legal.items():
        first, others = model_specs(rpeg, name)
        by_space = open_to[name] == (axes or {}).get(name, PAPER)  # else the pin has its own reasons, see _pinned
        if not len(candidates) and first is not None and by_space:
            raise no_layout(name, machine, workload, (first, *others), open_to[name])
    book = CostBook(
        rpeg=rpeg,
        machine=machine,
        hardware=hardware,
        workload=workload,
        layouts={name: candidates.layouts for name, candidates in legal.items()},
        terms=terms,
        frameworks={name: own.framework for name, own in open_to.items()},
    )
    kept = []
    for op in rpeg.operators:
        candidates = legal[op.name]
        pin = (pins or {}).get(op.name)
        if pin is not None:
            candidates = _pinned(candidates, pin, rpeg, op.name, machine, workload)
        costs = book.operators[op.name]
        fits = costs.isolated[candidates.layout] <= usable_bytes(hardware.device.memory_bytes)
        if pin is not None and not fits.any():
            fits[:] = True  # what the user fixed is kept, so that the report can say why it does not fit
        indices = np.flatnonzero(fits)
        seconds = costs.whole.total[candidates.layout[indices]]
        kept.append(candidates.take(indices[np.argsort(seconds, kind="stable")]))
    return StructureProblem(structure=structure, rpeg=rpeg, candidates=tuple(kept), book=book, options=options)


def model_specs(rpeg: Rpeg, operator: str) -> tuple[ModelSpec | None, tuple[ModelSpec, ...]]:
    """The architecture of an operator's model, None for a function, and of its further models when it is fused."""
    first, *others = [model.spec for model in rpeg.models_of(operator)] or [None]
    return first, tuple(others)


def _check_values(pin: Pin, rpeg: Rpeg, operator: str, hardware: HardwareProfile) -> None:
    first, others = model_specs(rpeg, operator)
    models = () if first is None else (first, *others)
    for axis, attribute in AXES.items():
        value = getattr(pin, attribute)
        if value is not None:
            reason = illegal_value(axis, value, rpeg.operator(operator).role, models, hardware)
            if reason is not None:
                raise PinError(
                    f"pin.{operator}.{axis} cannot be met",
                    facts=[reason],
                    hint="change the pin, or leave the key out",
                )


def _pinned(
    candidates: Candidates, pin: Pin, rpeg: Rpeg, operator: str, machine: DeviceSpace, workload: Workload
) -> Candidates:
    rows = candidates.layouts
    keep = np.ones(len(candidates), bool)
    for value, column in (
        (pin.data, rows.data),
        (pin.pipeline, rows.pipeline),
        (pin.tensor, rows.tensor),
        (pin.microbatches, rows.microbatches),
    ):
        if value is not None:
            keep &= column[candidates.layout] == value
    matching_degrees = keep.copy()
    if pin.allocation is not None:
        keep &= (candidates.start == pin.allocation.start) & (candidates.stop == pin.allocation.stop)
    if not keep.any():
        raise PinError(
            f"pin.{operator} cannot be met",
            facts=[_pin_reason(pin, rpeg, operator, machine, workload, bool(matching_degrees.any()))],
            hint="change the pin, or leave the key out and let the search choose it",
        )
    return candidates.take(np.flatnonzero(keep))


def _pin_reason(
    pin: Pin, rpeg: Rpeg, operator: str, machine: DeviceSpace, workload: Workload, degrees_are_legal: bool
) -> str:
    """The rule that the pin breaks, in the words of the modules ``candidates`` and ``axes``."""
    spec, also = model_specs(rpeg, operator)
    where = pin.allocation
    if where is not None and where.stop > machine.gpus:
        return f"P7: GPUs {where} are outside the cluster's 0-{machine.gpus - 1}"
    tensor, pipeline = pin.tensor or 1, pin.pipeline or 1
    context, expert, data = pin.context or 1, pin.expert or 1, pin.data or 1
    replica = Layout(1, pipeline, tensor, context).gpus
    if where is not None and pin.data is None and where.size % replica == 0:
        data = where.size // replica
    microbatches = pin.microbatches or (1 if pipeline == 1 else pipeline)
    layout = Layout(data, pipeline, tensor, context, expert)
    for size, what in (
        (machine.gpus, "the cluster has"),
        (where.size if where else machine.gpus, f"gpus: {where} are"),
    ):
        if layout.gpus > size:
            return f"P8: {_product(layout)} needs {layout.gpus} GPUs, {what} {size}"
    reasons = (illegal_layout(machine, workload, model, layout, microbatches) for model in (spec, *also))
    for reason in filter(None, reasons):
        return reason
    if pin.sequence_parallel and (pin.tensor or 1) == 1:
        return str(illegal_mode(layout, Mode(sequence_parallel=True)))
    if where is not None and degrees_are_legal and layout.gpus == where.size:
        starts = ", ".join(str(start) for start in origins(machine, layout)[:8])
        return f"P7: {layout} cannot start at GPU {where.start}; its aligned starts are {starts}"
    if where is not None:
        return f"P8: no legal degrees with {_describe(pin)} use exactly the {where.size} GPUs {where}"
    return f"no legal assignment has {_describe(pin)}"


def _product(layout: Layout) -> str:
    """``dp=4 * cp=2 * tp=4``: the degrees whose product is the number of GPUs, without those that are 1."""
    degrees = {"dp": layout.data, "cp": layout.context, "pp": layout.pipeline, "tp": layout.tensor}
    return " * ".join(f"{name}={value}" for name, value in degrees.items() if value > 1)


def _describe(pin: Pin) -> str:
    return str(attrs.evolve(pin, allocation=None)) or "any degrees"
