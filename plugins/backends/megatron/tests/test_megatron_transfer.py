"""Routing of boxes between ranks: against slicing whole tensors, for random layouts and for hand-drawn ones."""

from __future__ import annotations

import itertools
import random

import attrs
import pytest
import torch
from megatron_world import run_world
from rpeg_plugin_megatron.places import Place
from rpeg_plugin_megatron.shards import Fragment
from rpeg_plugin_megatron.transfer import move, route

from rpeg_core.errors import ExecutionError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation

WHOLE = {"matrix": (8, 12), "other": (12, 4), "norm": (7,), "cube": (4, 2, 2)}
SPLIT = {"matrix": 0, "other": 1}
"""Dimension over which tensor ranks split a parameter; the others are replicated."""

STAGES = {"matrix": 0.0, "norm": 0.0, "other": 1.0, "cube": 1.0}


def place(start: int, dp: int, pp: int, tp: int) -> Place:
    return Place(Allocation(start, start + dp * pp * tp), Layout(dp, pp, tp))


def fragments(where: Place, rank: int) -> list[Fragment]:
    """What a rank of a made-up model holds: its stage's parameters, split over tensor ranks or replicated."""
    at = where.coordinates(rank)
    found = []
    for name, shape in WHOLE.items():
        if where.layout.pipeline > 1 and int(STAGES[name] * (where.layout.pipeline - 1)) != at.pp:
            continue
        start, stop = [0] * len(shape), list(shape)
        if name in SPLIT:
            part = shape[SPLIT[name]] // where.layout.tensor
            start[SPLIT[name]], stop[SPLIT[name]] = at.tp * part, (at.tp + 1) * part
        found.append(Fragment(name, shape, tuple(start), tuple(stop)))
    return found


def held_by(where: Place) -> dict[int, list[Fragment]]:
    return {rank: fragments(where, rank) for rank in where.ranks}


def value(fragment: Fragment) -> torch.Tensor:
    """A box of the global tensor whose elements are all different."""
    number = list(WHOLE).index(fragment.name)
    count = torch.Size(fragment.shape).numel()
    return (1000.0 * number + torch.arange(count, dtype=torch.float32).view(fragment.shape))[fragment.slices]


LAYOUTS = [(1, 1, 1), (2, 1, 1), (1, 2, 1), (1, 1, 2), (2, 1, 2), (1, 2, 2), (4, 1, 1), (1, 1, 4), (2, 2, 1)]
PLACES = [
    place(start, *layout)
    for layout in LAYOUTS
    for start in range(5 - layout[0] * layout[1] * layout[2])
    if start % (layout[0] * layout[1] * layout[2]) == 0
]


def _lacked(wanted: Fragment, held: list[Fragment]) -> int:
    """Elements of a box that a rank does not hold itself."""
    mask = torch.ones(wanted.shape, dtype=torch.bool)
    for fragment in held:
        if fragment.name == wanted.name:
            mask[fragment.slices] = False
    return int(mask[wanted.slices].sum())


def _through(rank: int, world: int, pairs: list[tuple[Place, Place]], bucket_bytes: int) -> list[tuple[bool, int, int]]:
    """For each pair: all is right and nothing is sent that is here already, elements delivered, bytes sent."""
    found = []
    for source, target in pairs:
        held, wanted = held_by(source), held_by(target)
        way = route(rank, held, wanted, largest=5)
        mine = [value(fragment).clone() for fragment in held.get(rank, ())]
        into = [torch.full(fragment.size, -1.0) for fragment in wanted.get(rank, ())]
        moved = move(way, mine, into, bucket_bytes=bucket_bytes)
        right = all(
            torch.equal(tensor, value(fragment)) for fragment, tensor in zip(wanted.get(rank, ()), into, strict=True)
        )
        received = sum(cut.elements for _, cuts in way.receives for cut in cuts)
        lacked = sum(_lacked(fragment, held.get(rank, [])) for fragment in wanted.get(rank, ()))
        found.append((right and received == lacked, moved.elements, moved.wire_bytes))
    return found


@pytest.mark.parametrize("bucket_bytes", [1, 64, 2**20])
def test_every_rank_gets_its_boxes_whatever_the_two_layouts(bucket_bytes: int) -> None:
    pairs = random.Random(bucket_bytes).sample(list(itertools.product(PLACES, repeat=2)), 40)
    results = run_world(_through, 4, pairs, bucket_bytes)
    elements = sum(torch.Size(shape).numel() for shape in WHOLE.values())
    for number, (source, target) in enumerate(pairs):
        per_rank = [result[number] for result in results]
        assert all(right for right, *_ in per_rank), f"{source} to {target}"
        assert sum(delivered for _, delivered, _ in per_rank) == elements, f"{source} to {target}"
        if source == target:
            assert sum(wire for *_, wire in per_rank) == 0


def test_a_rank_that_holds_a_piece_copies_it() -> None:
    source, target = place(0, 2, 1, 1), place(0, 1, 1, 2)
    way = route(0, held_by(source), held_by(target))
    assert (way.sends, way.receives) == ((), ())
    assert len(way.local) == len(WHOLE)


def test_holders_take_turns() -> None:
    held = {rank: [Fragment("norm", (7,), (0,), (7,))] for rank in (0, 1)}
    wanted = {rank: [Fragment("norm", (7,), (0,), (7,))] for rank in (2, 3, 4, 5)}
    assert [[peer for peer, _ in route(rank, held, wanted).sends] for rank in (0, 1)] == [[2, 4], [3, 5]]


def test_copies_of_a_tied_parameter_are_both_filled_and_counted_once() -> None:
    box = Fragment("matrix", (8, 12), (0, 0), (8, 12))
    ways = [route(rank, {0: [box]}, {1: [box], 2: [box, box]}) for rank in range(3)]
    assert [sum(way.delivered) for way in ways] == [0, 96, 0]
    assert [sum(len(cuts) for _, cuts in way.receives) for way in ways] == [0, 1, 2]


def test_what_nobody_holds_is_an_error() -> None:
    half = Fragment("matrix", (8, 12), (0, 0), (4, 12))
    with pytest.raises(ExecutionError, match=r"rank 1 wants 'matrix' from \(0, 0\) to \(8, 12\), which no rank holds"):
        route(0, {0: [half]}, {1: [attrs.evolve(half, stop=(8, 12))]})
