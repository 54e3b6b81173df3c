"""Flat arrays for the compiled evaluator: everything about a structure problem that no choice changes.

Operators, models and publications are numbered by their position in the graph. Allocations enter transfer times by
their size, the tier that two of them span and, for publications, how many GPUs they share; those times are tables over
the sizes that occur among the candidates. Integers about one kind of item share an array, whose columns have names:
numba's compile time grows with the number of arrays.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from rpeg_core.costing.batches import Floats, Ints, Layouts
from rpeg_core.costing.memory import serving_copies
from rpeg_core.ir import Role, Rpeg, data_order, training_operator
from rpeg_core.passes.score import usable_bytes
from rpeg_core.spec.machine import DeviceSpace, Tier

if TYPE_CHECKING:
    from rpeg_core.planning.problem import StructureProblem

__all__ = ["KERNEL_FINGERPRINT", "Tables", "Workspace", "build_tables", "build_workspace"]

KERNEL_FINGERPRINT = hashlib.sha256(
    b"".join(Path(__file__).with_name(name).read_bytes() for name in ("kernel.py", "tables.py"))
).hexdigest()
"""Changes with the compiled code and with the arrays it reads.

Numba's cache on disk looks at the file of the cached function and at the types of its arguments only. As part of those,
the fingerprint outdates every cached function over :class:`Tables` or :class:`Workspace`, in whatever file it is.
"""

# Columns of Tables.candidates. Sixteen 4-byte columns are one cache line per candidate.
START, STOP, FIRST_NODE, LAST_NODE, FIRST_RACK, LAST_RACK, SIZE, DEGREES, COSTS = range(9)
CANDIDATE_COLUMNS = 16

# Further columns of Workspace.placed, which begins with those of the chosen candidate: its segments, its nodes in the
# template, and how lowering treats the operator.
SEGMENT_FIRST, SEGMENT_STOP, CHAIN_FIRST, CHAIN_LAST, SPLIT = range(9, 14)
PLACED_COLUMNS = 14

# Columns of Tables.costs.
WHOLE, TRAINING_STATE, WEIGHTS, TRANSIENT, FIRST_PHASE = range(5)

# Columns of Tables.operators. X_FIRST and X_STOP delimit a part of Tables.lists, DATA_* rows of Tables.data_edges,
# PAIRS_* of Tables.pairs.
(
    FIRST_CANDIDATE,
    TRAINS,
    MODEL,  # NONE for a function; the first of a fused operator, whose state and transients are those of all its models
    FEEDERS_FIRST,  # for an inference: the generations that feed it
    FEEDERS_STOP,
    DATA_FIRST,
    DATA_STOP,
    PAIRS_FIRST,  # for each of its models that another operator has before it in the step
    PAIRS_STOP,
) = range(9)
OPERATOR_COLUMNS = 9

# Columns of Tables.pairs (Stage 3 of lowering), which are grouped by their second operator: the first one, the model,
# whether it has staleness (disjoint allocations need nothing, and training no weights of the other), and the position
# in the order in which lowering visits them.
PAIR_BEFORE, PAIR_MODEL, PAIR_SHADOW, PAIR_INDEX = range(4)
PAIR_COLUMNS = 4

# Columns of Tables.models: the operators that invoke one, whether it is frozen, the copies kept to serve it, and the
# operator that trains it, NONE for a frozen model.
USERS_FIRST, USERS_STOP, FROZEN, COPIES, TRAINER = range(5)
MODEL_COLUMNS = 5

# Columns of Tables.data_edges, which are grouped by target: the source, whether a generation's rows go to an inference
# (phase by phase if both are split), and the position among the graph's data edges.
DATA_SOURCE, DATA_GENERATED, DATA_INDEX = range(3)

# Columns of Tables.publications; SHIFT is the number of steps from source to target, the rivals are earlier
# publications of the same model, which may have installed the version already.
PUBLICATION_SOURCE, PUBLICATION_TARGET, SHIFT, PUBLICATION_INDEX, RIVALS_FIRST, RIVALS_STOP = range(6)
PUBLICATION_COLUMNS = 6

# Columns of Workspace.slots.
OPERATOR, SOURCE, IS_OP, SINCE, LABEL, SUCCESSORS_FIRST, CURSOR = range(7)
SLOT_COLUMNS = 7

# Columns of Workspace.edges, .successors, .published, .redistributed and .ready.
FROM, TO, STEPS_LATER = range(3)
SUCCESSOR_SLOT, SUCCESSOR_OFFSET = range(2)
KIND, SLOT = range(2)
READY_NODE, READY_SLOT = range(2)

# Entries of Workspace.counts.
EDGE_COUNT, SLOT_COUNT, SCHEDULED_COUNT = range(3)

TIERS = len(Tier)
NONE = -1
"""Index of an operator, model or slot that does not exist."""


class Tables(NamedTuple):
    """What a choice is evaluated against; a tuple, because that is how numba takes many arrays at once."""

    steps: int
    phases: int  # length phases of a split operator; 1 when nothing is ever split
    reserve_source: bool
    gpus: int
    tokens: float  # of the whole horizon
    usable_bytes: float
    operators: Ints
    order: Ints  # operators in topological order of the data edges
    candidates: np.ndarray  # int32 (candidates of all operators, CANDIDATE_COLUMNS)
    costs: Floats  # (layouts of all operators, FIRST_PHASE + phases)
    models: Ints
    lists: Ints
    data_edges: Ints
    data_seconds: Floats  # (edges, whole then each phase, source size, target size, tier)
    pairs: Ints
    reshard_seconds: Floats  # (models, size, tier)
    publications: Ints
    overlap_ranges: Ints  # (publications, source size, target size, first and stop row of overlaps)
    overlaps: Ints  # GPUs shared by source and target
    overlap_seconds: Floats  # (overlaps, tier)
    fingerprint: np.ndarray  # empty; its dtype names KERNEL_FINGERPRINT, see there


class Workspace(NamedTuple):
    """Scratch arrays of one thread; the kernel leaves the template and the schedule of the last choice in them.

    A *slot* is a node of one step; node ``step * slots + slot`` is its instance in a step. Slots are in topological
    order.
    """

    counts: Ints
    # Placement
    placed: Ints
    bounds: Ints  # ends of the segments
    disjoint: Ints  # (operators, operators)
    shares: Floats  # (operators, operators): 1 where two share GPUs
    # Template of one step
    published: Ints
    redistributed: Ints  # by pair
    data_slot: Ints  # first slot that carries a data edge, NONE for mere precedence
    slots: Ints
    slot_seconds: Floats
    edges: Ints
    successors: Ints
    # Schedule, by node
    rank: Floats
    urgency: Ints
    waiting: Ints  # predecessors that are not scheduled yet
    released: Floats  # latest finish of the predecessors
    start: Floats
    finish: Floats
    ready: Ints
    sequence: Ints  # nodes in the order of selection
    available: Floats  # by operator: when its GPUs are free
    busy: Floats  # by segment
    resident: Ints  # by model: whether serving copies stay on the segment
    fingerprint: np.ndarray  # as in Tables


def build_tables(problem: StructureProblem) -> Tables:
    """The tables of a structure problem.

    Raises:
        CostTermError: a cost term fails for a transfer.
    """
    rpeg, book, options = problem.rpeg, problem.book, problem.options
    sizes = np.unique(np.concatenate([c.stop - c.start for c in problem.candidates]))
    # Only splitting looks at phases; without it one (whole) phase is left.
    phases = book.workload.phases if options.split_lengths else book.workload.phases[:1]
    lists: list[int] = []
    operators = np.zeros((len(rpeg.operators), OPERATOR_COLUMNS), np.int64)
    candidates, costs = _candidates(problem, sizes, len(phases), operators)
    data_edges, data_seconds = _data_edges(problem, sizes, [phase.finishing for phase in phases], operators)
    _roles(rpeg, operators, lists)
    pairs = _pairs(rpeg, operators)
    publications = _publications(problem, lists)
    overlap_ranges, overlaps, overlap_seconds = _overlaps(problem, sizes, publications)
    return Tables(
        steps=options.steps,
        phases=len(phases),
        reserve_source=options.reserve_source,
        gpus=book.machine.gpus,
        tokens=float(options.steps * book.workload.tokens_per_step),
        usable_bytes=usable_bytes(book.hardware.device.memory_bytes),
        operators=operators,
        order=np.array([rpeg.index(name) for name in data_order(rpeg)], np.int64),
        candidates=candidates,
        costs=costs,
        models=_models(rpeg, lists),
        data_edges=data_edges,
        data_seconds=data_seconds,
        pairs=pairs,
        reshard_seconds=_redistribution(problem, sizes),
        publications=publications,
        overlap_ranges=overlap_ranges,
        overlaps=overlaps,
        overlap_seconds=overlap_seconds,
        lists=np.array([*lists, NONE], np.int64),  # never empty
        fingerprint=np.zeros(0, [(f"kernel_{KERNEL_FINGERPRINT}", np.uint8)]),
    )


def _candidates(problem: StructureProblem, sizes: Ints, phases: int, operators: Ints) -> tuple[np.ndarray, Floats]:
    """Rows of all candidates and costs of all layouts, operator after operator."""
    rpeg, book, machine = problem.rpeg, problem.book, problem.book.machine
    rows = np.zeros((sum(len(c) for c in problem.candidates), CANDIDATE_COLUMNS), np.int32)
    costs: list[Floats] = []
    degrees: dict[tuple[int, int, int, int], int] = {}
    first_row = first_cost = 0
    for v, (op, candidates) in enumerate(zip(rpeg.operators, problem.candidates, strict=True)):
        table, layouts = book.operators[op.name], candidates.layouts
        identity = np.array([degrees.setdefault(key, len(degrees)) for key in _degrees(layouts)], np.int64)
        block, last = rows[first_row : first_row + len(candidates)], candidates.stop - 1
        block[:, START], block[:, STOP] = candidates.start, candidates.stop
        block[:, FIRST_NODE] = candidates.start // machine.gpus_per_node
        block[:, LAST_NODE] = last // machine.gpus_per_node
        block[:, FIRST_RACK] = candidates.start // machine.gpus_per_rack
        block[:, LAST_RACK] = last // machine.gpus_per_rack
        block[:, SIZE] = np.searchsorted(sizes, candidates.stop - candidates.start)
        block[:, DEGREES] = identity[candidates.layout]
        block[:, COSTS] = first_cost + candidates.layout
        values = np.full((len(layouts), FIRST_PHASE + phases), np.nan)
        values[:, WHOLE] = table.whole.total
        values[:, TRAINING_STATE] = table.training_state
        values[:, WEIGHTS] = table.weights
        values[:, TRANSIENT] = table.transient
        for phase, seconds in enumerate(table.phases[:phases]):
            values[:, FIRST_PHASE + phase] = seconds.total
        costs.append(values)
        operators[v, FIRST_CANDIDATE] = first_row
        first_row, first_cost = first_row + len(candidates), first_cost + len(layouts)
    return rows, np.concatenate(costs)


def _degrees(layouts: Layouts) -> list[tuple[int, int, int, int]]:
    """What decides, on given GPUs, which part of a model each holds."""
    return [layouts.layout(row).weights for row in range(len(layouts))]


def _roles(rpeg: Rpeg, operators: Ints, lists: list[int]) -> None:
    number = {model.name: index for index, model in enumerate(rpeg.models)}
    for v, op in enumerate(rpeg.operators):
        sources = (edge.source for edge in rpeg.data_edges if edge.target == op.name)
        feeders = [rpeg.index(u) for u in sources if rpeg.operator(u).role is Role.GENERATION]
        operators[v, TRAINS] = op.role is Role.TRAINING
        operators[v, MODEL] = NONE if op.model is None else number[op.model]
        operators[v, FEEDERS_FIRST : FEEDERS_STOP + 1] = _append(lists, feeders if op.role is Role.INFERENCE else [])


def _models(rpeg: Rpeg, lists: list[int]) -> Ints:
    models = np.zeros((len(rpeg.models), MODEL_COLUMNS), np.int64)
    for m, model in enumerate(rpeg.models):
        users = [v for v, op in enumerate(rpeg.operators) if op.model == model.name]
        models[m, USERS_FIRST : USERS_STOP + 1] = _append(lists, users)
        models[m, FROZEN] = not model.trainable
        models[m, COPIES] = serving_copies(rpeg, model.name)
        trainer = training_operator(rpeg, model.name)
        models[m, TRAINER] = NONE if trainer is None else rpeg.index(trainer)
    return models


def _append(lists: list[int], items: Sequence[int]) -> tuple[int, int]:
    """Put items at the end of ``lists``; returns where they begin and end."""
    first = len(lists)
    lists.extend(items)
    return first, len(lists)


def _data_edges(
    problem: StructureProblem, sizes: Ints, shares: Sequence[float], operators: Ints
) -> tuple[Ints, Floats]:
    rpeg = problem.rpeg
    grouped = sorted(enumerate(rpeg.data_edges), key=lambda item: (rpeg.index(item[1].target), item[0]))
    rows = np.zeros((len(grouped), 3), np.int64)
    seconds = np.full((len(grouped), 1 + len(shares), len(sizes), len(sizes), TIERS), np.nan)
    for e, (index, edge) in enumerate(grouped):
        roles = [rpeg.operator(end).role for end in (edge.source, edge.target)]
        generated = roles == [Role.GENERATION, Role.INFERENCE]
        rows[e] = rpeg.index(edge.source), generated, index
        size = rpeg.container(edge.container).bytes
        for i, payload in enumerate([float(size), *(size * share for share in (shares if generated else ()))]):
            seconds[e, i] = _communication(problem, sizes, payload)
    targets = [rpeg.index(edge.target) for _, edge in grouped]
    for v in range(len(rpeg.operators)):
        operators[v, DATA_FIRST : DATA_STOP + 1] = np.searchsorted(targets, [v, v + 1])
    return rows, seconds


def _communication(problem: StructureProblem, sizes: Ints, payload: float) -> Floats:
    """Seconds of a COMM of ``payload`` bytes by (source size, target size, tier); NaN where no two allocations are."""
    seconds = np.full((len(sizes), len(sizes), TIERS), np.nan)
    source, target, tier = np.meshgrid(sizes, sizes, np.arange(TIERS), indexing="ij")
    possible = _reachable(problem.book.machine, np.maximum(source, target), tier)
    payloads = np.full(possible.sum(), payload)
    seconds[possible] = _transfers(problem, False, payloads, source[possible], target[possible], tier[possible])
    return seconds


def _transfers(
    problem: StructureProblem, reshard: bool, payload: Floats, source: Ints, target: Ints, tier: Ints
) -> Floats:
    """Seconds of transfers; cost terms are not asked about none, as when no candidate fits."""
    return problem.book.transfer_table(reshard, payload, source, target, tier).total if len(payload) else payload


def _reachable(machine: DeviceSpace, size: Ints, tier: Ints) -> np.ndarray:
    """Whether allocations of ``size`` GPUs at most can span ``tier``."""
    inside = np.array([machine.gpus_per_node, machine.gpus_per_rack, machine.gpus])
    # A slower tier than the smallest is spanned only when the machine has one.
    exists = np.array([True, machine.nodes_per_rack > 1, machine.racks > 1])
    return (size <= inside[tier]) & exists[tier]


def _pairs(rpeg: Rpeg, operators: Ints) -> Ints:
    """Consecutive operators of each trainable model; numbered in the order in which lowering visits them."""
    found: list[tuple[int, tuple[int, ...]]] = []  # (second operator, row)
    for m, model in enumerate(rpeg.models):
        owners = [rpeg.index(name) for name in data_order(rpeg) if model.name in rpeg.operator(name).models]
        for first, second in itertools.pairwise(owners) if model.trainable else ():
            found.append((second, (first, m, model.staleness > 0, len(found))))
    found.sort(key=lambda pair: pair[0])  # stable
    targets = [second for second, _ in found]
    for v in range(len(rpeg.operators)):
        operators[v, PAIRS_FIRST : PAIRS_STOP + 1] = np.searchsorted(targets, [v, v + 1])
    return np.array([row for _, row in found], np.int64).reshape(-1, PAIR_COLUMNS)


def _redistribution(problem: StructureProblem, sizes: Ints) -> Floats:
    rpeg, book = problem.rpeg, problem.book
    seconds = np.full((len(rpeg.models), len(sizes), TIERS), np.nan)
    size, tier = np.meshgrid(sizes, np.arange(TIERS), indexing="ij")
    possible = _reachable(book.machine, size, tier)
    gpus, tiers = size[possible], tier[possible]
    for m, model in enumerate(rpeg.models):
        if model.trainable:
            container = next(c for c in rpeg.containers if c.model == model.name)
            payload = np.full(len(gpus), float(container.bytes))
            seconds[m][possible] = _transfers(problem, True, payload, gpus, gpus, tiers)
    return seconds


def _publications(problem: StructureProblem, lists: list[int]) -> Ints:
    """The publications that fall inside the horizon."""
    rpeg = problem.rpeg
    rows: list[tuple[int, ...]] = []
    models: list[str] = []
    for index, edge in enumerate(rpeg.publication_edges):
        model = rpeg.model(rpeg.container(edge.container).model)
        if model.staleness + 1 < problem.options.steps:
            rivals = _append(lists, [p for p, other in enumerate(models) if other == model.name])
            ends = rpeg.index(edge.source), rpeg.index(edge.target)
            rows.append((*ends, model.staleness + 1, index, *rivals))
            models.append(model.name)
    return np.array(rows, np.int64).reshape(-1, PUBLICATION_COLUMNS)


def _overlaps(problem: StructureProblem, sizes: Ints, publications: Ints) -> tuple[Ints, Ints, Floats]:
    """COMM of weights: their payload depends on the GPUs that source and target share."""
    rpeg, book = problem.rpeg, problem.book
    ranges = np.zeros((len(publications), len(sizes), len(sizes), 2), np.int64)
    shared: list[Ints] = [np.zeros(0, np.int64)]
    payload: list[Floats] = [np.zeros(0)]
    larger: list[tuple[int, int, int]] = []  # (source size, target size, rows)
    total = 0
    for p, row in enumerate(publications):
        edge = rpeg.publication_edges[row[PUBLICATION_INDEX]]
        weight_bytes = rpeg.container(edge.container).bytes
        source_starts = _starts_by_size(problem, row[PUBLICATION_SOURCE], sizes)
        target_starts = _starts_by_size(problem, row[PUBLICATION_TARGET], sizes)
        for a, b in np.ndindex(len(sizes), len(sizes)):
            if len(source_starts[a]) and len(target_starts[b]):
                ends = int(sizes[a]), int(sizes[b])
                values = _shared_gpus(source_starts[a], ends[0], target_starts[b], ends[1])
                ranges[p, a, b] = total, total + len(values)
                total += len(values)
                shared.append(values)
                # The same operations in the same order as in lowering.
                payload.append(weight_bytes * ((max(ends) - values) / max(ends)))
                larger.append((*ends, len(values)))
    source = np.repeat([a for a, _, _ in larger], [n for _, _, n in larger]).astype(np.int64)
    target = np.repeat([b for _, b, _ in larger], [n for _, _, n in larger]).astype(np.int64)
    all_payload = np.concatenate(payload)
    seconds = np.full((total, TIERS), np.nan)
    for tier in range(TIERS):
        tiers = np.full(total, tier)
        possible = _reachable(book.machine, np.maximum(source, target), tiers)
        seconds[possible, tier] = _transfers(
            problem, False, all_payload[possible], source[possible], target[possible], tiers[possible]
        )
    return ranges, np.concatenate(shared), seconds


def _starts_by_size(problem: StructureProblem, operator: int, sizes: Ints) -> list[Ints]:
    """For each size the distinct starts of the operator's candidates, ascending."""
    candidates = problem.candidates[operator]
    size = candidates.stop - candidates.start
    return [np.unique(candidates.start[size == s]) for s in sizes]


def _shared_gpus(source: Ints, source_size: int, target: Ints, target_size: int) -> Ints:
    """Every number of GPUs that an allocation of each kind can share, with 0; starts are ascending."""
    # Targets that touch source x start in (x - target_size, x + source_size).
    begin = np.searchsorted(target, source - target_size, side="right")
    end = np.searchsorted(target, source + source_size, side="left")
    touching = end - begin
    x = np.repeat(source, touching)
    position = np.arange(touching.sum()) - np.repeat(np.cumsum(touching) - touching, touching)
    y = target[np.repeat(begin, touching) + position]
    shared = np.minimum(x + source_size, y + target_size) - np.maximum(x, y)
    return np.unique(np.concatenate((np.zeros(1, np.int64), shared)))


def build_workspace(tables: Tables) -> Workspace:
    """Scratch arrays that are large enough for every choice."""
    operators, data_edges, publications = len(tables.operators), len(tables.data_edges), len(tables.publications)
    pairs = len(tables.pairs)
    transfers = data_edges * tables.phases + pairs + publications
    slots = operators * tables.phases + transfers
    # A transfer has an edge in and one out; chains and the update order have the rest.
    edges = 2 * transfers + operators * tables.phases
    nodes = tables.steps * slots
    # Ranks are read as far beyond the horizon as an edge reaches, where they are zero.
    reach = int(max(tables.publications[:, SHIFT], default=1))

    def ints(*shape: int) -> Ints:
        return np.zeros(shape, np.int64)

    def floats(*shape: int) -> Floats:
        return np.zeros(shape, np.float64)

    return Workspace(
        counts=ints(3),
        placed=ints(operators, PLACED_COLUMNS),
        bounds=ints(2 * operators + 2),
        disjoint=ints(operators, operators),
        shares=floats(operators, operators),
        published=ints(publications, 2),
        redistributed=ints(pairs, 2),
        data_slot=ints(data_edges),
        slots=ints(slots + 1, SLOT_COLUMNS),
        slot_seconds=floats(slots),
        edges=ints(edges, 3),
        successors=ints(edges, 2),
        rank=floats(nodes + reach * slots),
        urgency=ints(nodes),
        waiting=ints(nodes),
        released=floats(nodes),
        start=floats(nodes),
        finish=floats(nodes),
        ready=ints(nodes, 2),
        sequence=ints(nodes),
        available=floats(operators),
        busy=floats(2 * operators + 2),
        resident=ints(len(tables.models)),
        fingerprint=tables.fingerprint,
    )
