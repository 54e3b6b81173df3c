"""Places: where an invocation runs. No torch in this module, so that the controller can use it.

A place is an allocation in a layout. Device ``i`` of the plan is rank ``i`` of the torch world, and the ranks of a
place are numbered replica-major, then stage, then tensor rank (`rpeg_core.planning.assignment.Layout`)::

    rank = start + (dp * pipeline + pp) * tensor + tp
"""

from __future__ import annotations

import attrs

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation

__all__ = ["Coordinates", "Place"]


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
