"""What a rank keeps between nodes: rows of data, and which weights an artifact stands for.

An artifact has the name (index of the node that made it, container). The rows of one artifact may lie on a rank more
than once, for several places, and in two forms: *whole*, each replica with its own consecutive rows of the step, or a
*part*, what one length phase made, with the numbers of its rows. Weights are not kept here but in their installation;
the store knows model, place and version, and says when a version is needed no more.

Nothing leaves the store but by :meth:`Store.drop`, so that it is empty when everything that was made was released.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import attrs
from torch import Tensor

from rpeg_core.errors import ExecutionError
from rpeg_plugin_megatron.places import Place

__all__ = ["RowsKey", "RowsValue", "Store", "WeightsKey"]


@attrs.frozen(order=True)
class RowsKey:
    """Rows of an artifact at a place.

    Attributes:
        node: index over the run of the node that made them, of the first one when several phases did.
        container: what they are.
        place: whose replicas hold them.
        whole: False for a part.
    """

    node: int
    container: str
    place: Place
    whole: bool = True


@attrs.frozen(eq=False)
class RowsValue:
    """The rows on this rank: ``tensor`` [rows, ...]; for a part, ``numbers`` int64 [rows] in the step's batch."""

    tensor: Tensor
    numbers: Tensor | None = None


@attrs.frozen(order=True)
class WeightsKey:
    """A version of a model at a place."""

    model: str
    place: Place
    version: int


@attrs.define(eq=False)
class _Weights:
    """An artifact of weights, and how many nodes will still read it here."""

    key: WeightsKey
    readers: int


class Store:
    """The artifacts of one rank."""

    def __init__(self) -> None:
        self._rows: dict[tuple[int, str], dict[RowsKey, RowsValue]] = {}
        self._weights: dict[tuple[int, str], _Weights] = {}

    def __len__(self) -> int:
        """Number of artifacts."""
        return len(self._rows) + len(self._weights)

    @property
    def bytes(self) -> int:
        """Size of all rows; rows that two artifacts share are counted twice."""
        values = (value for by_key in self._rows.values() for value in by_key.values())
        return sum(value.tensor.numel() * value.tensor.element_size() for value in values)

    # Rows

    def put_rows(self, key: RowsKey, value: RowsValue) -> None:
        """Keep rows; those that are kept under the same key are replaced."""
        self._rows.setdefault((key.node, key.container), {})[key] = value

    def rows(self, key: RowsKey) -> RowsValue:
        """Rows that were put here.

        Raises:
            ExecutionError: this rank does not have them.
        """
        found = self._rows.get((key.node, key.container), {})
        if key not in found:
            what = f"{'rows' if key.whole else 'a part'} of {key.container!r}"
            raise ExecutionError(
                f"{what}, made by node {key.node}, should be at {key.place}",
                facts=[f"this rank has of them: {_list(found)}"],
            )
        return found[key]

    # Weights

    def put_weights(self, node: int, container: str, key: WeightsKey, readers: int) -> None:
        """Note that an artifact stands for a version that ``readers`` nodes will read here."""
        self._weights[node, container] = _Weights(key, readers)

    def weights(self, node: int, container: str) -> WeightsKey:
        """What an artifact stands for.

        Raises:
            ExecutionError: this rank does not have it.
        """
        if (node, container) not in self._weights:
            raise ExecutionError(
                f"the weights {container!r} made by node {node} are not here",
                facts=[f"this rank has: {', '.join(f'{c} of node {n}' for n, c in self._weights) or 'none'}"],
            )
        return self._weights[node, container].key

    def read_weights(self, node: int, container: str) -> None:
        """Note that one of the readers of an artifact is about to read it; nothing when it is not here."""
        found = self._weights.get((node, container))
        if found is not None:
            found.readers -= 1

    def is_awaited(self, key: WeightsKey) -> bool:
        """Whether nodes that have not run yet will read this version here."""
        return any(found.key == key and found.readers > 0 for found in self._weights.values())

    # All

    def drop(self, node: int, container: str) -> WeightsKey | None:
        """Forget an artifact, which need not be here.

        Returns:
            the version that no artifact stands for any more.
        """
        self._rows.pop((node, container), None)
        found = self._weights.pop((node, container), None)
        if found is None or any(other.key == found.key for other in self._weights.values()):
            return None
        return found.key

    def all_rows(self) -> Iterator[tuple[RowsKey, RowsValue]]:
        """Everything that :meth:`put_rows` kept, in a fixed order."""
        for name in sorted(self._rows):
            yield from sorted(self._rows[name].items(), key=lambda item: item[0])

    def all_weights(self) -> Mapping[tuple[int, str], tuple[WeightsKey, int]]:
        """(node, container) -> version and number of readers left."""
        return {name: (found.key, found.readers) for name, found in sorted(self._weights.items())}


def _list(keys: Mapping[RowsKey, RowsValue]) -> str:
    return ", ".join(f"{'rows' if key.whole else 'a part'} at {key.place}" for key in keys) or "nothing"
