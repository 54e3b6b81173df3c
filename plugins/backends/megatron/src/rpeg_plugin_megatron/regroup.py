"""Moving rows of data between places: from one data-parallel degree to another, from part to part, from parts to whole.

*Whole* rows lie in their own order, equal shares on the replicas. The rows of a *part* (what one length phase made) lie
replica by replica of the generation, in ascending order of their numbers within each; another place splits that order
evenly. How many rows of a replica a part has follows from the workload, which ones it has does not: their numbers
travel with them, eight bytes each, which nobody charges. To put parts together to whole rows, the numbers go to all
ranks concerned first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import attrs
import torch
from torch import Tensor

from rpeg_core.spec.workload import Workload
from rpeg_plugin_megatron.flow import Rows, part_rows
from rpeg_plugin_megatron.places import Place
from rpeg_plugin_megatron.shards import Fragment
from rpeg_plugin_megatron.store import RowsValue
from rpeg_plugin_megatron.transfer import Route, move, route

__all__ = ["RowMover", "RowShape", "Shipped", "home_rows"]

Span = tuple[int, int]


@attrs.frozen
class RowShape:
    """A container's rows: how many a step has, and what one of them is."""

    rows: int
    row: tuple[int, ...]
    dtype: torch.dtype


@attrs.frozen
class Shipped:
    """What this rank had of a shipment.

    Attributes:
        values: for each pair, what arrived: whole rows or the parts in order; None on a rank that wanted nothing.
        elements: for each pair, the unique elements delivered here.
        wire_bytes: sent to other ranks.
    """

    values: tuple[tuple[RowsValue, ...] | None, ...]
    elements: tuple[int, ...]
    wire_bytes: int


def home_rows(rows: int, place: Place, rank: int) -> Span:
    """First and last (excluded) of the whole rows that a rank holds at a place."""
    share = rows // place.layout.data
    start = place.coordinates(rank).dp * share
    return start, start + share


class RowMover:
    """Moves rows; one for each rank.

    Args:
        rank: this rank.
        workload: of the experiment.
        shapes: of a container's rows, by its name.
        device: where rows lie.
    """

    def __init__(self, rank: int, workload: Workload, shapes: Callable[[str], RowShape], device: torch.device) -> None:
        self._rank, self._workload, self._shapes, self._device = rank, workload, shapes, device
        self._routes: dict[tuple[tuple[Rows, Rows], ...], _Static] = {}

    def ship(self, pairs: Sequence[tuple[Rows, Rows]], read: Callable[[Rows], Sequence[RowsValue]]) -> Shipped:
        """Move rows from where they are to where they shall be, all pairs in the same messages.

        All ranks of all the places call this with the same pairs.

        Args:
            pairs: (source, target); a source of parts and a target of whole rows puts them together.
            read: what this rank has of a source: whole rows, or the parts in order.
        """
        mine = [read(source) if self._is_in(source.place) else () for source, _ in pairs]
        merging = [index for index, (source, target) in enumerate(pairs) if target.whole and not source.whole]
        plain = tuple(pair for index, pair in enumerate(pairs) if index not in merging)
        numbered = tuple((pairs[index][0], pairs[index][1]) for index in merging)
        static = self._static(plain, numbered)
        held = [tensor for index, values in enumerate(mine) if index not in merging for tensor in _tensors(values)]
        held += [value.numbers for index in merging for value in mine[index]]
        wanted = [torch.empty(box.size, dtype=dtype, device=self._device) for box, dtype in static.wanted]
        moved = move(static.way, held, wanted)
        wire_bytes = moved.wire_bytes
        values: list[tuple[RowsValue, ...] | None] = [None] * len(pairs)
        elements = [0] * len(pairs)
        arrived = iter(zip(wanted, static.way.delivered, strict=True))
        for index, (_, target) in enumerate(pairs):
            if index not in merging and self._is_in(target.place):
                values[index], elements[index] = _values(target, arrived)
        for index in merging:
            source, target = pairs[index]
            if self._is_in(source.place) or self._is_in(target.place):
                numbers = [next(arrived)[0] for _ in source.phases]
                values[index], elements[index], sent = self._merge(source, target, mine[index], numbers)
                wire_bytes += sent
        return Shipped(tuple(values), tuple(elements), wire_bytes)

    def _is_in(self, place: Place) -> bool:
        return place.allocation.start <= self._rank < place.allocation.stop

    # Known from the start: whole rows, single parts, and the numbers of parts that are put together

    def _static(self, plain: tuple[tuple[Rows, Rows], ...], numbered: tuple[tuple[Rows, Rows], ...]) -> _Static:
        key = (*plain, *numbered)
        if key not in self._routes:
            held: dict[int, list[Fragment]] = {}
            wanted: dict[int, list[Fragment]] = {}
            types: list[torch.dtype] = []
            for index, (source, target) in enumerate(plain):
                for side, rows in ((held, source), (wanted, target)):
                    for rank in rows.place.ranks:
                        side.setdefault(rank, []).extend(self._boxes(index, rows, rank))
                if self._is_in(target.place):
                    dtype = self._shapes(target.container).dtype
                    types += [dtype] if target.whole else [dtype, torch.int64] * len(target.phases)
            for index, (source, target) in enumerate(numbered, start=len(plain)):
                spans = {rank: self._part_spans(source, rank) for rank in source.place.ranks}
                for rank, mine in spans.items():
                    held.setdefault(rank, []).extend(_numbers(index, mine))
                for rank in sorted({*source.place.ranks, *target.place.ranks}):
                    everything = [((0, total), total) for _, total in next(iter(spans.values()))]
                    wanted.setdefault(rank, []).extend(_numbers(index, everything))
                    types += [torch.int64] * len(everything) if rank == self._rank else []
            way = route(self._rank, held, wanted)
            mine = wanted.get(self._rank, [])
            self._routes[key] = _Static(way, tuple(zip(mine, types, strict=True)))
        return self._routes[key]

    def _boxes(self, index: int, rows: Rows, rank: int) -> list[Fragment]:
        """What a rank holds of some rows, in the order of :func:`_tensors`."""
        shape = self._shapes(rows.container)
        if rows.whole:
            span = home_rows(shape.rows, rows.place, rank)
            return [_box(f"{index}", span, shape.rows, shape.row)]
        found = []
        for part, (span, total) in enumerate(self._part_spans(rows, rank)):
            found.append(_box(f"{index}.{part}", span, total, shape.row))
            found.append(_box(f"{index}.{part}#numbers", span, total, ()))
        return found

    def _part_spans(self, rows: Rows, rank: int) -> list[tuple[Span, int]]:
        """For each part the rank's share of its rows, and their number."""
        degree, replica = rows.place.layout.data, rows.place.coordinates(rank).dp
        found = []
        for phase in rows.phases:
            total = rows.replicas * part_rows(self._workload, phase, rows.replicas)
            found.append(((replica * total // degree, (replica + 1) * total // degree), total))
        return found

    # From parts to whole rows

    def _merge(
        self, source: Rows, target: Rows, mine: Sequence[RowsValue], numbers: Sequence[Tensor]
    ) -> tuple[tuple[RowsValue, ...] | None, int, int]:
        """Put parts together once everyone knows the ``numbers`` of each part's rows.

        A replica of the source sends its rows in ascending order; so what it has for a replica of the target is one
        piece of them.
        """
        shape = self._shapes(source.container)
        ordered = [self._sorted_numbers(source, replica, numbers) for replica in range(source.place.layout.data)]
        firsts = [0]
        for found in ordered:
            firsts.append(firsts[-1] + len(found))
        held: dict[int, list[Fragment]] = {}
        wanted: dict[int, list[Fragment]] = {}
        for rank in source.place.ranks:
            replica = source.place.coordinates(rank).dp
            held[rank] = [_box("rows", (firsts[replica], firsts[replica + 1]), shape.rows, shape.row)]
        for rank in target.place.ranks:
            start, stop = home_rows(shape.rows, target.place, rank)
            wanted[rank] = [
                _box("rows", (first + int(low), first + int(high)), shape.rows, shape.row)
                for first, found in zip(firsts, ordered, strict=False)
                for low, high in [torch.searchsorted(found, torch.tensor([start, stop])).tolist()]
            ]
        way = route(self._rank, held, wanted)
        sources = []
        if mine:
            order = torch.cat([value.numbers for value in mine]).argsort()
            sources = [torch.cat([value.tensor for value in mine])[order]]
        into = [torch.empty(box.size, dtype=shape.dtype, device=self._device) for box in wanted.get(self._rank, ())]
        moved = move(way, sources, into)
        if not self._is_in(target.place):
            return None, 0, moved.wire_bytes
        start, stop = home_rows(shape.rows, target.place, self._rank)
        kept = torch.cat([found[(found >= start) & (found < stop)] for found in ordered])
        value = RowsValue(torch.cat(into)[kept.argsort().to(self._device)])
        return (value,), moved.elements, moved.wire_bytes

    def _sorted_numbers(self, source: Rows, replica: int, numbers: Sequence[Tensor]) -> Tensor:
        """Numbers of all rows that a replica of the source has, ascending, on the CPU."""
        rank = source.place.rank_of(replica, 0, 0)
        spans = self._part_spans(source, rank)
        return torch.cat([part[a:b] for part, ((a, b), _) in zip(numbers, spans, strict=True)]).cpu().sort().values


@attrs.frozen(eq=False)
class _Static:
    """A route that is always the same, and what this rank wants: boxes and types."""

    way: Route
    wanted: tuple[tuple[Fragment, torch.dtype], ...]


def _box(name: str, span: Span, rows: int, row: tuple[int, ...]) -> Fragment:
    origin = (0,) * len(row)
    return Fragment(name, (rows, *row), (span[0], *origin), (span[1], *row))


def _numbers(index: int, spans: Sequence[tuple[Span, int]]) -> list[Fragment]:
    return [_box(f"{index}.{part}#numbers", span, total, ()) for part, (span, total) in enumerate(spans)]


def _tensors(values: Sequence[RowsValue]) -> list[Tensor]:
    """Rows, each followed by their numbers when they have some."""
    return [tensor for value in values for tensor in (value.tensor, value.numbers) if tensor is not None]


def _values(target: Rows, arrived: Iterator[tuple[Tensor, int]]) -> tuple[tuple[RowsValue, ...], int]:
    """Take what arrived for one target from the iterator over (tensor, elements delivered)."""
    found, elements = [], 0
    for _ in range(1 if target.whole else len(target.phases)):
        tensor, delivered = next(arrived)
        elements += delivered
        found.append(RowsValue(tensor) if target.whole else RowsValue(tensor, next(arrived)[0]))
    return tuple(found), elements
