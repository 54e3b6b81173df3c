"""Places and their process groups: where an invocation runs, and who talks to whom there.

A place is an allocation in a layout. Device ``i`` of the plan is rank ``i`` of the torch world, and the ranks of a
place are numbered replica-major, then stage, then tensor rank (`rpeg_core.planning.assignment.Layout`)::

    rank = start + (dp * pipeline + pp) * tensor + tp

Megatron-Core keeps one set of groups per process in ``megatron.core.parallel_state``. Here one process holds models in
several layouts, so that module is never initialised: every part of Megatron that is used takes its groups from a
``ProcessGroupCollection``.
"""

from __future__ import annotations

import datetime
from collections.abc import Iterator, Mapping, Sequence

import attrs
import torch.distributed as dist
from megatron.core.process_groups_config import ProcessGroupCollection

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation

__all__ = ["Coordinates", "Place", "PlaceGroups", "build_groups"]


@attrs.frozen(order=True)
class Coordinates:
    """Where a rank is in a place: replica, pipeline stage, tensor rank."""

    dp: int
    pp: int
    tp: int


@attrs.frozen(order=True)
class Place:
    """An allocation in a layout.

    Raises:
        BackendError: the allocation does not have one device per rank of the layout.
    """

    allocation: Allocation
    layout: Layout

    def __attrs_post_init__(self) -> None:
        if self.allocation.size != self.layout.gpus:
            raise BackendError(
                f"devices {self.allocation} are {self.allocation.size}, {self.layout} needs {self.layout.gpus}"
            )

    @property
    def ranks(self) -> tuple[int, ...]:
        """Global ranks, ascending."""
        return tuple(range(self.allocation.start, self.allocation.stop))

    def coordinates(self, rank: int) -> Coordinates:
        """Where global ``rank`` is.

        Raises:
            BackendError: the rank is not in this place.
        """
        if not self.allocation.start <= rank < self.allocation.stop:
            raise BackendError(f"rank {rank} is not among the devices {self.allocation}")
        rest, tp = divmod(rank - self.allocation.start, self.layout.tensor)
        dp, pp = divmod(rest, self.layout.pipeline)
        return Coordinates(dp, pp, tp)

    def rank_of(self, dp: int, pp: int, tp: int) -> int:
        """The global rank at these coordinates."""
        return self.allocation.start + (dp * self.layout.pipeline + pp) * self.layout.tensor + tp

    def replica(self, dp: int) -> tuple[int, ...]:
        """Global ranks of one replica, by stage and tensor rank."""
        first = self.rank_of(dp, 0, 0)
        return tuple(range(first, first + self.layout.pipeline * self.layout.tensor))

    def __str__(self) -> str:
        return f"devices {self.allocation} as {self.layout}"


@attrs.frozen(eq=False)
class PlaceGroups:
    """The process groups of this rank in one place.

    Attributes:
        place, rank, coordinates: what and where; ``rank`` is global.
        collection: what Megatron asks for; ``embd`` is None on ranks that hold neither embedding nor head.
        tp, pp, dp: along one dimension; ranks ascend with the coordinate.
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

    @property
    def first_stage(self) -> bool:
        return self.coordinates.pp == 0

    @property
    def last_stage(self) -> bool:
        return self.coordinates.pp == self.place.layout.pipeline - 1


def build_groups(places: Sequence[Place], *, timeout: datetime.timedelta | None = None) -> Mapping[Place, PlaceGroups]:
    """Create the groups of all places; collective over the torch world.

    Every rank calls this with the same sequence. Equal sets of ranks share one group: the engine never lets two
    collectives interleave on a rank. The result has the places that this rank is in.

    Args:
        places: the distinct places of the plan; repetitions are allowed.
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
    return {place: _of_rank(place, rank, own_groups) for place in distinct if rank in place.ranks}


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


def _of_rank(place: Place, rank: int, groups: Mapping[tuple[int, ...], dist.ProcessGroup]) -> PlaceGroups:
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
    )
