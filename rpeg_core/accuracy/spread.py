"""The spread of a plan's predicted times: the errors of cost terms, drawn together, through the plan's own schedule.

A term's error in one operator is its error in every operator of the same conditions (fully correlated); different
terms, and one term under different conditions (generation and training, say), err independently. A draw scales the
seconds of every term and replays the schedule in the order that was planned: a node starts when its predecessors and
the nodes before it on its GPUs have ended. So an operator off the predicted critical path counts where it may come
onto it.
"""

from __future__ import annotations

from collections.abc import Mapping

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.accuracy.draws import DRAWS, Interval, standard_normal
from rpeg_core.accuracy.selection import Chosen, error_of_step, error_of_term, error_of_transfer
from rpeg_core.costing.book import CostBook, TermValues
from rpeg_core.passes.evaluate import Prediction
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.spec.accuracy import TermError

__all__ = ["UNKNOWN_SHARE", "Spread", "Timed", "factors", "spread_of"]

Floats = NDArray[np.float64]

UNKNOWN_SHARE = 0.1
"""Of a time: more than that from terms that were never validated, and it has no interval **[choice]**."""


@attrs.frozen(kw_only=True, eq=False)
class Timed:
    """A predicted time with its draws.

    Attributes:
        seconds: predicted.
        draws: of what a measurement would give, shape (draws,).
        unknown: term -> its share of the seconds, of the terms that were never validated; their seconds are in the
            draws as predicted.
    """

    seconds: float
    draws: Floats
    unknown: Mapping[str, float]

    @property
    def interval(self) -> Interval | None:
        """None where too much of it was never validated."""
        if self.seconds <= 0 or sum(self.unknown.values()) > UNKNOWN_SHARE:
            return None
        return Interval.of(self.draws, self.seconds)


@attrs.frozen(kw_only=True, eq=False)
class Spread:
    """The predicted times of one configuration.

    Attributes:
        operators: in one RL step, all length phases together.
        terms: the same by operator and term name, of terms that take any time.
        step: makespan over the horizon's steps.
        errors: by operator, the errors that its time is made of.
        step_errors: those that scale the step beside.
    """

    operators: Mapping[str, Timed]
    terms: Mapping[str, Mapping[str, Timed]]
    step: Timed
    errors: Mapping[str, tuple[TermError, ...]]
    step_errors: tuple[TermError, ...] = ()

    def ratio(self, other: Spread) -> Interval | None:
        """The interval of this configuration's throughput over another's; errors that both share cancel out."""
        if self.step.interval is None or other.step.interval is None:
            return None
        return Interval.of(other.step.draws / self.step.draws, other.step.seconds / self.step.seconds)


def factors(chosen: Chosen | None) -> Floats | float:
    """What a term's seconds are multiplied with, draw by draw; 1 where nothing is known."""
    if chosen is None:
        return 1.0
    return np.exp(chosen.error.log_bias + chosen.error.log_std * standard_normal(chosen.name))


def spread_of(book: CostBook, assignments: ExecutionPlan, prediction: Prediction) -> Spread:
    """The spread of a prediction that ``book`` gave for ``assignments``."""
    return _Spreading(book, assignments, prediction).found()


class _Spreading:
    def __init__(self, book: CostBook, assignments: ExecutionPlan, prediction: Prediction) -> None:
        self._book, self._assignments, self._prediction = book, assignments, prediction
        self._chosen = {op.name: self._errors(op.name) for op in prediction.graph.rpeg.operators}
        self._transfer_errors = {a.term.name: error_of_transfer(a.term) for a in book.terms}
        self._step_errors = self._beyond_operators()
        self._nodes: dict[object, tuple[Floats, Mapping[str, float]]] = {}

    def _errors(self, operator: str) -> dict[str, Chosen | None]:
        """By term; a fused operator's models are of one kind or its first model speaks for it."""
        column = self._book.row(self._assignments[operator], operator)
        batch = self._book.batches(operator, column)[0]
        terms = self._book.operators[operator].whole.terms
        return {term.name: error_of_term(term, batch) for term in terms}

    def found(self) -> Spread:
        graph = self._prediction.graph
        last = [n for n in graph.nodes if n.step == graph.steps - 1 and n.kind is NodeKind.OP]
        terms = {
            op.name: self._terms(op.name, [n for n in last if n.operator == op.name]) for op in graph.rpeg.operators
        }
        return Spread(
            step_errors=tuple(chosen.error for chosen in self._step_errors),
            operators={name: _sum(parts) for name, parts in terms.items()},
            terms=terms,
            step=self._step(),
            errors={
                name: tuple(
                    dict.fromkeys(
                        chosen.error for term, chosen in self._chosen[name].items() if chosen and term in terms[name]
                    )
                )
                for name in terms
            },
        )

    def _terms(self, operator: str, nodes: list[Node]) -> dict[str, Timed]:
        found: dict[str, Timed] = {}
        tables = [self._book.operators[operator].seconds(node.phase) for node in nodes]
        for i, term in enumerate(self._book.operators[operator].whole.terms):
            seconds = float(sum(t.values[i, self._book.row(n, operator)] for t, n in zip(tables, nodes, strict=True)))
            if seconds <= 0:
                continue
            chosen = self._chosen[operator][term.name]
            draws = np.broadcast_to(np.asarray(seconds * factors(chosen)), (DRAWS,))
            unknown = {term.name: 1.0} if chosen is None else {}
            found[term.name] = Timed(seconds=seconds, draws=draws, unknown=unknown)
        return found

    def _step(self) -> Timed:
        graph = self._prediction.graph
        makespan = self._prediction.evaluation.makespan_s
        drawn = [self._node(node) for node in graph.nodes]
        draws = self._replayed([draws for draws, _ in drawn]) / graph.steps
        for chosen in self._step_errors:
            draws = draws * factors(chosen)
        names = sorted({name for _, unknown in drawn for name in unknown})
        shares = {name: self._share(name, [unknown.get(name, 0.0) for _, unknown in drawn]) for name in names}
        return Timed(
            seconds=makespan / graph.steps,
            draws=draws,
            unknown={name: share for name, share in shares.items() if share > 0},
        )

    def _share(self, term: str, seconds: list[float]) -> float:
        """How much the makespan grows when the term takes twice its time, over the makespan."""
        durations = [np.array([s, s + more]) for s, more in zip(self._prediction.seconds, seconds, strict=True)]
        once, twice = self._replayed(durations)
        return float(twice / once - 1.0)

    def _beyond_operators(self) -> tuple[Chosen, ...]:
        rpeg, book = self._prediction.graph.rpeg, self._book
        columns = {op.name: book.row(self._assignments[op.name], op.name) for op in rpeg.operators}
        batches = [batch for name, column in columns.items() for batch in book.batches(name, column)]
        all_named = all(batch.execution.framework != "" for batch in batches if batch.model is not None)
        return error_of_step(
            [a.term for a in book.terms],
            book.hardware,
            [op.role for op in rpeg.operators],
            mixture=any(b.model is not None and b.model.moe is not None for b in batches),
            named=all_named and self._prices_steps(columns),
        )

    def _prices_steps(self, columns: Mapping[str, int]) -> bool:
        """Whether the terms that tell the error of whole steps price anything here.

        Where they have nothing to say of the named frameworks, nobody measured a whole step of those.
        """
        tables = {name: self._book.operators[name].whole for name in columns}
        return any(
            table.values[i, columns[name]] > 0
            for name, table in tables.items()
            for i, term in enumerate(table.terms)
            if any(error.of_step for error in term.errors)
        )

    def _node(self, node: Node) -> tuple[Floats, Mapping[str, float]]:
        """Draws of a node's duration, and the seconds of terms that were never validated."""
        if node.kind is NodeKind.OP:
            key: object = (node.operator, node.phase)
        else:
            key = (node.kind, node.payload_bytes, node.source, node.allocation)
        if key not in self._nodes:
            self._nodes[key] = self._priced(node)
        return self._nodes[key]

    def _priced(self, node: Node) -> tuple[Floats, Mapping[str, float]]:
        errors: Mapping[str, Chosen | None]
        if node.kind is NodeKind.OP:
            table = self._book.operators[node.operator].seconds(node.phase)
            column, errors = self._book.row(node, node.operator), self._chosen[node.operator]
        else:
            table, column, errors = self._transfer(node), 0, self._transfer_errors
        total, unknown = np.zeros(DRAWS), {}
        for term, seconds in zip(table.terms, table.values[:, column].tolist(), strict=True):
            chosen = errors[term.name]
            total = total + seconds * factors(chosen)
            if chosen is None and seconds > 0:
                unknown[term.name] = seconds
        return total, unknown

    def _transfer(self, node: Node) -> TermValues:
        tier = self._book.machine.tier_between(node.allocation, node.source)
        return self._book.transfer_table(
            node.kind is NodeKind.RESHARD,
            np.array([node.payload_bytes]),
            np.array([node.source.size]),
            np.array([node.allocation.size]),
            np.array([int(tier)]),
        )

    def _replayed(self, durations: list[Floats]) -> Floats:
        """The makespans when nodes take other times in the planned order; one array per node, all of one shape."""
        graph, planned = self._prediction.graph, self._prediction.schedule
        predecessors = graph.predecessors()
        finish: dict[int, Floats] = {}
        holder: dict[int, int] = {}
        end = np.zeros_like(durations[0])
        for index in planned.order:
            before = {*predecessors[index], *(holder[s] for s in planned.held[index] if s in holder)}
            start = np.zeros_like(end)
            for other in sorted(before):
                start = np.maximum(start, finish[other])
            finish[index] = start + durations[index]
            for segment in planned.held[index]:
                holder[segment] = index
            end = np.maximum(end, finish[index])
        return end


def _sum(parts: Mapping[str, Timed]) -> Timed:
    seconds = sum(part.seconds for part in parts.values())
    draws = np.zeros(DRAWS)
    for part in parts.values():
        draws = draws + part.draws
    unknown = {name: part.seconds / seconds for name, part in parts.items() if part.unknown}
    return Timed(seconds=seconds, draws=draws, unknown=unknown)
