"""Fragments: which part of which global parameter a rank holds.

A global parameter is named in Megatron's spelling with the global layer number; a local tensor holds one box of it, or
two when a gated ``linear_fc1`` stacks gate and up projection: those are parameters of their own here, ``…#gate`` and
``…#up``, so that every fragment is one box and any two layouts can be intersected box by box.
"""

from __future__ import annotations

import math

import attrs
import torch

__all__ = ["Fragment", "fragments_of", "split_dimension", "unique_elements"]

_COLUMN = ("linear_qkv.weight", "linear_qkv.bias", "word_embeddings.weight", "output_layer.weight")
_ROW = ("linear_proj.weight", "linear_fc2.weight")
_GATED = ("linear_fc1.weight", "linear_fc1.bias")


@attrs.frozen
class Fragment:
    """A box of one global parameter.

    Attributes:
        name: e.g. ``decoder.layers.7.mlp.linear_fc1.weight#gate``; layers count from 0 over the whole model.
        shape: of the whole parameter.
        start, stop: the box, per dimension.
    """

    name: str
    shape: tuple[int, ...]
    start: tuple[int, ...]
    stop: tuple[int, ...]

    @property
    def size(self) -> tuple[int, ...]:
        """Shape of the box."""
        return tuple(stop - start for start, stop in zip(self.start, self.stop, strict=True))

    @property
    def elements(self) -> int:
        """Number of elements in the box."""
        return math.prod(self.size)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into the whole parameter."""
        return tuple(slice(start, stop) for start, stop in zip(self.start, self.stop, strict=True))

    def intersection(self, other: Fragment) -> Fragment | None:
        """The common box of two fragments of the same parameter, None when there is none."""
        if self.name != other.name:
            return None
        start = tuple(map(max, self.start, other.start))
        stop = tuple(map(min, self.stop, other.stop))
        if any(a >= b for a, b in zip(start, stop, strict=True)):
            return None
        return attrs.evolve(self, start=start, stop=stop)

    def within(self, outer: Fragment) -> tuple[slice, ...]:
        """This box as an index into the tensor that holds ``outer``, which contains it."""
        return tuple(
            slice(start - origin, stop - origin)
            for start, stop, origin in zip(self.start, self.stop, outer.start, strict=True)
        )


def fragments_of(
    name: str, tensor: torch.Tensor, *, tensor_rank: int, tensor_ranks: int, gated: bool
) -> tuple[tuple[Fragment, torch.Tensor], ...]:
    """The fragments of one local parameter, each with its view into ``tensor``.

    Args:
        name: the parameter's name with the global layer number.
        tensor: the local shard.
        tensor_rank, tensor_ranks: position in and size of the tensor-parallel group.
        gated: whether ``linear_fc1`` stacks two projections.
    """
    if gated and name.endswith(_GATED):
        half = tensor.shape[0] // 2
        return (
            (_split(f"{name}#gate", tensor[:half], 0, tensor_rank, tensor_ranks), tensor[:half]),
            (_split(f"{name}#up", tensor[half:], 0, tensor_rank, tensor_ranks), tensor[half:]),
        )
    dimension = split_dimension(name)
    if dimension is not None:
        return ((_split(name, tensor, dimension, tensor_rank, tensor_ranks), tensor),)
    shape = tuple(tensor.shape)
    return ((Fragment(name, shape, (0,) * len(shape), shape), tensor),)


def split_dimension(name: str) -> int | None:
    """The dimension of a parameter that tensor parallelism divides; None when every rank has all of it."""
    if name.endswith((*_COLUMN, *_GATED)):
        return 0
    return 1 if name.endswith(_ROW) else None


def _split(name: str, tensor: torch.Tensor, dimension: int, rank: int, ranks: int) -> Fragment:
    shape = list(tensor.shape)
    start, stop = [0] * len(shape), list(shape)
    start[dimension], stop[dimension] = rank * shape[dimension], (rank + 1) * shape[dimension]
    shape[dimension] *= ranks
    return Fragment(name, tuple(shape), tuple(start), tuple(stop))


def unique_elements(fragments: list[Fragment]) -> int:
    """Elements that a set of fragments covers, copies counted once.

    Boxes of one parameter are equal or disjoint here, as they are within one place.
    """
    return sum(fragment.elements for fragment in set(fragments))
