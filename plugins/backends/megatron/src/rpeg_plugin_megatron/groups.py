"""The process groups of places: who talks to whom there (:mod:`rpeg_plugin_megatron.places`).

Megatron-Core keeps one set of groups per process in ``megatron.core.parallel_state``. Here one process holds models in
several layouts, so that module is never initialised: every part of Megatron that is used takes its groups from a
``ProcessGroupCollection``.
"""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterator, Mapping, Sequence

import attrs
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rpeg_core.errors import BackendError
from rpeg_plugin_megatron.places import Coordinates, Place

__all__ = ["Coordinates", "Place", "PlaceGroups", "build_groups"]


@attrs.frozen(eq=False)
class PlaceGroups:
    """The process groups of this rank in one place.

    Attributes:
        place, rank, coordinates: what and where; ``rank`` is global.
        collection: what Megatron asks for; ``embd`` is None on ranks that hold neither embedding nor head.
        tp, pp, dp: along one dimension; ranks ascend with the coordinate.
        pp_back: a second group of the ranks of ``pp``, in fused places; None elsewhere.
        mp: the replica, ``pp x tp``.
        all: the whole place.
        own: this rank alone.
    """

    place: Place
    rank: int
    coordinates: Coordinates
    collection: ProcessGroupCollection
    tp: dist.ProcessGroup
    pp: dist.ProcessGroup
    dp: dist.ProcessGroup
    mp: dist.ProcessGroup
    all: dist.ProcessGroup
    own: dist.ProcessGroup
    pp_back: dist.ProcessGroup | None = None

    @property
    def first_stage(self) -> bool:
        return self.coordinates.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.coordinates.pp == self.place.layout.pipeline - 1


def build_groups(
    places: Sequence[Place], *, fused: Collection[Place] = (), timeout: datetime.timedelta | None = None
) -> Mapping[Place, PlaceGroups]:
    """Create the groups of all places; collective over the torch world.

    Every rank calls this with the same sequence. Equal sets of ranks share one group: the engine never lets two
    collectives interleave on a rank. The result has the places that this rank is in.

    Args:
        places: the distinct places of the plan; repetitions are allowed.
        fused: those of them where fused operators run, whose pipelines get two groups (:mod:`.fused`).
        timeout: of the collectives in these groups, None for that of the default group.

    Raises:
        BackendError: a place needs ranks that the world does not have.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    distinct = list(dict.fromkeys(places))
    for place in distinct:
        if place.allocation.stop > world:
            raise BackendError(f"{place} needs rank {place.allocation.stop - 1}, but the world has {world} ranks")
    own_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
    wanted = dict.fromkeys(ranks for place in distinct for ranks in _memberships(place))
    for ranks in wanted:
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            own_groups[ranks] = group
    back: dict[tuple[int, ...], dist.ProcessGroup] = {}
    pipelines = (_pp(place, place.coordinates(r)) for place in distinct if place in fused for r in place.ranks)
    for ranks in dict.fromkeys(pipelines):
        group = dist.new_group(list(ranks), timeout=timeout)
        if rank in ranks:
            back[ranks] = group
    return {place: _of_rank(place, rank, own_groups, back) for place in distinct if rank in place.ranks}


def _memberships(place: Place) -> Iterator[tuple[int, ...]]:
    """Every set of ranks that forms a group of the place, in a fixed order."""
    yield place.ranks
    for dp in range(place.layout.data):
        yield place.replica(dp)
    for rank in place.ranks:
        yield (rank,)
        at = place.coordinates(rank)
        yield from (_tp(place, at), _pp(place, at), _dp(place, at), _embedding(place, at))


def _tp(place: Place, at: Coordinates) -> tuple[int, ...]:
    return tuple(place.rank_of(at.dp, at.pp, tp) for tp in range(place.layout.tensor))


def _pp(place: Place, at: Coordinates) -> tuple[int, ...]:
    return tuple(place.rank_of(at.dp, pp, at.tp) for pp in range(place.layout.pipeline))


def _dp(place: Place, at: Coordinates) -> tuple[int, ...]:
    return tuple(place.rank_of(dp, at.pp, at.tp) for dp in range(place.layout.data))


def _embedding(place: Place, at: Coordinates) -> tuple[int, ...]:
    """First and last stage, which both hold a tied embedding."""
    stages = sorted({0, place.layout.pipeline - 1})
    return tuple(place.rank_of(at.dp, pp, at.tp) for pp in stages)


def _of_rank(
    place: Place,
    rank: int,
    groups: Mapping[tuple[int, ...], dist.ProcessGroup],
    back: Mapping[tuple[int, ...], dist.ProcessGroup],
) -> PlaceGroups:
    at = place.coordinates(rank)
    tp, pp, dp = groups[_tp(place, at)], groups[_pp(place, at)], groups[_dp(place, at)]
    mp, everyone, own = groups[place.replica(at.dp)], groups[place.ranks], groups[(rank,)]
    embedding = _embedding(place, at)
    collection = ProcessGroupCollection(
        tp=tp,
        pp=pp,
        mp=mp,
        embd=groups[embedding] if rank in embedding else None,
        pos_embd=None,  # positions are rotary, no parameter is shared
        cp=own,  # no context and no expert parallelism
        tp_cp=tp,
        ep=own,
        expt_tp=own,
        tp_ep=tp,
        tp_ep_pp=mp,
        dp=dp,
        dp_cp=dp,
        expt_dp=dp,
        intra_dp_cp=dp,
        intra_expt_dp=dp,
        intra_dist_opt=everyone,  # the ranks over which the norm of all gradients is summed
    )
    return PlaceGroups(
        place=place,
        rank=rank,
        coordinates=at,
        collection=collection,
        tp=tp,
        pp=pp,
        dp=dp,
        mp=mp,
        all=everyone,
        own=own,
        pp_back=back.get(_pp(place, at)),
    )
