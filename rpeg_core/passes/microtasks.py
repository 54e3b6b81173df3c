"""The microtasks of a fused training: one schedule of the forward and backward passes of several models.

The models' microbatches form one sequence, in turn (actor 0, critic 0, actor 1, ...), and every pipeline stage runs one
forward, one backward over it, as over the microbatches of a single model: stage p begins with ``Pp - 1 - p`` forward
passes, then alternates, then ends with the backward passes that are left. So

* the pipeline fills and drains once, not once for each model: with equal stages and models ``M mb + Pp - 1`` slots
  instead of ``M (mb + Pp - 1)`` for M models;
* a stage holds the activations of at most Pp microbatches, of all models together;
* of both kinds of messages a stage gets and sends those of ever later microbatches, so that no order of the stages can
  make two of them wait for each other.

Without a pipeline there is nothing to fill: the models' passes follow one another.

**[choice]** RLHFuse (Zhong et al., arXiv:2409.13221) lets the two pipelines run in opposite directions and looks for an
order by annealing. Here both run in the same direction, because the layouts of the training are then the ones that
serving has too, and the order follows from Pp and mb alone.
"""

from __future__ import annotations

from collections.abc import Sequence

import attrs
import numpy as np
from numpy.typing import NDArray

__all__ = ["Microtask", "interleaved_s", "live_microbatches", "microtasks"]

Floats = NDArray[np.float64]


@attrs.frozen(order=True)
class Microtask:
    """A forward or backward pass of one microbatch of one model on one stage."""

    training: str
    microbatch: int
    backward: bool

    def __str__(self) -> str:
        return f"{'B' if self.backward else 'F'}{self.microbatch} {self.training}"


def microtasks(trainings: Sequence[str], pipeline: int, microbatches: int) -> tuple[tuple[Microtask, ...], ...]:
    """What each pipeline stage does, in order.

    Args:
        trainings: names of what is interleaved, one model each.
        pipeline: Pp.
        microbatches: mb of each model.
    """
    sequence = [(name, index) for index in range(microbatches) for name in trainings]
    count = len(sequence)
    stages = []
    for stage in range(pipeline):
        ahead = min(pipeline - 1 - stage, count)
        order = [(i, False) for i in range(ahead)]
        for i in range(ahead, count):
            order += [(i, False), (i - ahead, True)]
        order += [(i, True) for i in range(count - ahead, count)]
        stages.append(tuple(Microtask(*sequence[i], backward) for i, backward in order))
    return tuple(stages)


def live_microbatches(models: int, pipeline: int, microbatches: int) -> tuple[int, ...]:
    """How many microbatches the first stage holds at most, by how large their model's are: the largest first.

    Any ``min(M mb, Pp)`` consecutive ones of the sequence, the model with the largest among them most often.
    """
    held = min(models * microbatches, pipeline)
    return tuple((held + models - 1 - place) // models for place in range(models))


def interleaved_s(
    pipeline: NDArray[np.int64], microbatches: NDArray[np.int64], forward_s: Floats, backward_s: Floats
) -> Floats:
    """Seconds from the first to the last microtask, when each starts as soon as its stage and its input are there.

    Args:
        pipeline, microbatches: Pp and mb of n layouts, shape (n,).
        forward_s, backward_s: of a microbatch, shape (models, 2, n): on every stage but the last, and on the last.
    """
    from rpeg_core.passes.microtask_time import lengths  # numba, which takes a second to import

    return lengths(
        np.array(pipeline, np.int64),
        np.array(microbatches, np.int64),
        np.array(forward_s, np.float64),
        np.array(backward_s, np.float64),
    )
