"""Places, and the groups of several places in one world."""

from __future__ import annotations

import itertools

import pytest
from megatron_world import WorldError, run_world
from rpeg_plugin_megatron.groups import Coordinates, Place, build_groups

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation


def test_ranks_are_numbered_replica_major_then_stage_then_tensor_rank() -> None:
    place = Place(Allocation(8, 16), Layout(data=2, pipeline=2, tensor=2))
    expected = {
        8: Coordinates(0, 0, 0),
        9: Coordinates(0, 0, 1),
        10: Coordinates(0, 1, 0),
        11: Coordinates(0, 1, 1),
        12: Coordinates(1, 0, 0),
        15: Coordinates(1, 1, 1),
    }
    assert {rank: place.coordinates(rank) for rank in expected} == expected
    for dp, pp, tp in itertools.product(range(2), repeat=3):
        assert place.coordinates(place.rank_of(dp, pp, tp)) == Coordinates(dp, pp, tp)
    assert place.replica(1) == (12, 13, 14, 15)


def test_a_place_has_one_device_per_rank() -> None:
    with pytest.raises(BackendError, match="devices 0-2 are 3, dp1 pp2 tp2 needs 4"):
        Place(Allocation(0, 3), Layout(1, 2, 2))
    with pytest.raises(BackendError, match="rank 4 is not among"):
        Place(Allocation(0, 4), Layout(1, 2, 2)).coordinates(4)


PLACES = (
    Place(Allocation(0, 4), Layout(2, 1, 2)),
    Place(Allocation(0, 4), Layout(1, 4, 1)),
    Place(Allocation(1, 3), Layout(1, 2, 1)),
    Place(Allocation(3, 4), Layout(1, 1, 1)),
)


def _members(rank: int, world: int) -> list[dict[str, object]]:
    import torch
    import torch.distributed as dist

    groups = build_groups(PLACES)
    found = []
    for place in PLACES:
        if place not in groups:
            found.append({})
            continue
        g = groups[place]
        embedding = g.collection.embd
        one = torch.ones(1)
        names = ("tp", "pp", "dp", "mp", "all", "own")
        dist.all_reduce(one, group=g.all)
        found.append(
            {
                **{name: dist.get_process_group_ranks(getattr(g, name)) for name in names},
                "embd": None if embedding is None else dist.get_process_group_ranks(embedding),
                "sum": one.item(),
                "stage": (g.first_stage, g.last_stage),
            }
        )
    return found


def test_every_rank_gets_the_groups_of_its_places() -> None:
    results = run_world(_members, 4)
    by_place = [[result[i] for result in results] for i in range(len(PLACES))]
    dp2_tp2, pp4, pp2, single = by_place
    assert [m["tp"] for m in dp2_tp2] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["dp"] for m in dp2_tp2] == [[0, 2], [1, 3], [0, 2], [1, 3]]
    assert [m["mp"] for m in dp2_tp2] == [[0, 1], [0, 1], [2, 3], [2, 3]]
    assert [m["pp"] for m in dp2_tp2] == [[0], [1], [2], [3]]
    assert [m["embd"] for m in dp2_tp2] == [[0], [1], [2], [3]]
    assert {m["sum"] for m in dp2_tp2} == {4.0}
    assert [m["pp"] for m in pp4] == [[0, 1, 2, 3]] * 4
    assert [m["embd"] for m in pp4] == [[0, 3], None, None, [0, 3]]
    assert [m["stage"] for m in pp4] == [(True, False), (False, False), (False, False), (False, True)]
    assert pp2[0] == {}
    assert pp2[3] == {}
    assert [m["all"] for m in pp2[1:3]] == [[1, 2]] * 2
    assert single[3]["all"] == [3]
    assert single[:3] == [{}, {}, {}]


def _too_big(rank: int, world: int) -> None:
    build_groups([Place(Allocation(0, 2), Layout(2, 1, 1))])


def test_a_place_outside_the_world_is_refused() -> None:
    with pytest.raises(WorldError, match="needs rank 1, but the world has 1 ranks"):
        run_world(_too_big, 1)
