"""Random initial weights that depend on a seed and the parameter's name, never on the layout.

Matrices are normal with standard deviation 0.02, norms 1 and biases 0: ``initializer_range`` and the initialisation of
llama, mistral and qwen models in ``transformers``, and of GPT-2 before them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor

from rpeg_plugin_megatron.shards import Fragment

if TYPE_CHECKING:
    from rpeg_plugin_megatron.model import ModelShard

__all__ = ["STANDARD_DEVIATION", "fill", "initial_tensor", "random_reader"]

STANDARD_DEVIATION = 0.02

_ROWS_PER_BLOCK = 256


def initial_tensor(name: str, shape: tuple[int, ...], seed: int) -> Tensor:
    """The initial value of a whole parameter, fp32."""
    return _box(Fragment(name, shape, (0,) * len(shape), shape), seed)


def random_reader(seed: int) -> Callable[[Fragment], Tensor]:
    """A source for `fill`: boxes of `initial_tensor`, without making the rest."""
    return lambda fragment: _box(fragment, seed)


def fill(shard: ModelShard, read: Callable[[Fragment], Tensor]) -> None:
    """Set all weights of a shard; ``read`` returns the box of a global parameter in any type, on any device."""
    with torch.no_grad():
        for fragment, view in shard.fragments:
            view.copy_(read(fragment))


def _box(fragment: Fragment, seed: int) -> Tensor:
    if fragment.name.endswith("layernorm.weight"):
        return torch.ones(fragment.size)
    if fragment.name.partition("#")[0].endswith("bias"):
        return torch.zeros(fragment.size)
    first, last = fragment.start[0] // _ROWS_PER_BLOCK, (fragment.stop[0] - 1) // _ROWS_PER_BLOCK
    rows = np.concatenate([_block(fragment, seed, block) for block in range(first, last + 1)])
    origin = first * _ROWS_PER_BLOCK
    index = (slice(fragment.start[0] - origin, fragment.stop[0] - origin), *fragment.slices[1:])
    return torch.from_numpy(np.ascontiguousarray(rows[index])) * STANDARD_DEVIATION


def _block(fragment: Fragment, seed: int, block: int) -> np.ndarray:
    """Standard normal rows ``block * 256 ..`` of the whole parameter."""
    rows = min(_ROWS_PER_BLOCK, fragment.shape[0] - block * _ROWS_PER_BLOCK)
    digest = hashlib.sha256(f"{seed}/{fragment.name}/{block}".encode()).digest()
    generator = np.random.Generator(np.random.Philox(key=int.from_bytes(digest[:16], "little")))
    return generator.standard_normal((rows, *fragment.shape[1:]), dtype=np.float32)
