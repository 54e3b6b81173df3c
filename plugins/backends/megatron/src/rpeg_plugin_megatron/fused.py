"""Updates of several models at once, microtask by microtask: what a fused operator does on its ranks.

Megatron's schedules run one model. This executor runs a list of microtasks (:mod:`rpeg_core.passes.microtasks`) over
the stages of several: Megatron's model parts, data-parallel wrappers and optimizers, and point-to-point messages
between neighbouring stages. A stage waits for an input when its list comes to it, and never for what it sent; inputs of
forward passes and gradients travel in groups of their own, each in the order of the microbatches on both ends. For one
model it does what Megatron's 1F1B does.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import attrs
import torch
import torch.distributed as dist
from torch import Tensor

from rpeg_core.passes.microtasks import microtasks
from rpeg_core.runtime.semantics import LossParts, ModelOutputs
from rpeg_plugin_megatron.forward import Rows, forward_pass, hidden_shape, scored_columns, trimmed
from rpeg_plugin_megatron.groups import PlaceGroups
from rpeg_plugin_megatron.train import Trainer, Update

__all__ = ["Links", "Minibatch", "update_fused"]


@attrs.frozen(kw_only=True, eq=False)
class Minibatch:
    """One model's part of a fused update; the attributes are those of :meth:`Trainer.update`."""

    trainer: Trainer
    batches: Sequence[Rows]
    loss: Callable[[int, ModelOutputs], LossParts]
    temperature: float = 1.0
    entropy: bool = False


class Links:
    """The messages of a stage with its neighbours.

    Args:
        groups: of a fused place. Inputs travel in ``groups.pp``, gradients in ``groups.pp_back``: on one communicator
            the messages of both directions would wait for each other.
    """

    def __init__(self, groups: PlaceGroups) -> None:
        at, place = groups.coordinates, groups.place
        ranks = [place.rank_of(at.dp, stage, at.tp) for stage in range(place.layout.pipeline)]
        self._before = None if groups.first_stage else ranks[at.pp - 1]
        self._after = None if groups.last_stage else ranks[at.pp + 1]
        self._forward = groups.pp
        self._backward = groups.pp_back
        self._sent: list[tuple[dist.Work, Tensor]] = []

    def input(self, room: Callable[[], Tensor]) -> Tensor | None:
        """The hidden states of the stage before, in what ``room`` makes; None on the first stage."""
        return self._receive(room, self._before, self._forward)

    def output(self, hidden: Tensor) -> None:
        self._send(hidden, self._after, self._forward)

    def gradient(self, room: Callable[[], Tensor]) -> Tensor | None:
        """Of this stage's output; None on the last stage."""
        return self._receive(room, self._after, self._backward)

    def input_gradient(self, gradient: Tensor | None) -> None:
        if gradient is not None:
            self._send(gradient, self._before, self._backward)

    def finish(self) -> None:
        """Wait until all messages have left."""
        for work, _ in self._sent:
            work.wait()
        self._sent.clear()

    @staticmethod
    def _receive(room: Callable[[], Tensor], source: int | None, group: dist.ProcessGroup | None) -> Tensor | None:
        if source is None:
            return None
        tensor = room()
        dist.recv(tensor, src=source, group=group)
        return tensor

    def _send(self, tensor: Tensor, target: int | None, group: dist.ProcessGroup | None) -> None:
        if target is None:
            return
        self._sent = [(work, kept) for work, kept in self._sent if not work.is_completed()]
        tensor = tensor.detach().contiguous()
        self._sent.append((dist.isend(tensor, dst=target, group=group), tensor))


def update_fused(minibatches: Mapping[str, Minibatch], links: Links) -> dict[str, Update]:
    """One update of every model, in one schedule of microtasks.

    Args:
        minibatches: by training, in the order of the microtasks; equally many microbatches of each.
        links: of the place that all trainers share.

    Returns:
        The same on all ranks of the place.

    Raises:
        ExecutionError: a gradient is not finite; the weights of that model, and of those after it, are unchanged.
    """
    first = next(iter(minibatches.values()))
    shard, groups = first.trainer.shard, first.trainer.shard.groups
    stages = microtasks(list(minibatches), groups.place.layout.pipeline, len(first.batches))
    parts = {name: _Stage(minibatch, links) for name, minibatch in minibatches.items()}
    for minibatch in minibatches.values():
        minibatch.trainer.begin()
    try:
        with shard.device.megatron():
            for task in stages[groups.coordinates.pp]:
                stage = parts[task.training]
                (stage.backward if task.backward else stage.forward)(task.microbatch)
            links.finish()
            for minibatch in minibatches.values():
                minibatch.trainer.finalize()
        return {name: minibatches[name].trainer.step(stage.losses) for name, stage in parts.items()}
    finally:
        for minibatch in minibatches.values():
            minibatch.trainer.end()


class _Stage:
    """This rank's stage of one model during an update."""

    def __init__(self, minibatch: Minibatch, links: Links) -> None:
        self.losses: dict[int, LossParts] = {}
        self._minibatch, self._links = minibatch, links
        self._short = [trimmed(batch) for batch in minibatch.batches]
        self._open: dict[int, tuple[Tensor | None, Tensor]] = {}  # microbatch -> input and output, until backward

    def forward(self, index: int) -> None:
        trainer, batch = self._minibatch.trainer, self._short[index]
        hidden = self._links.input(self._hidden(index))
        if hidden is not None:
            hidden.requires_grad_()
            trainer.shard.module.set_input_tensor(hidden)
        output = forward_pass(trainer.wrapped, batch, scored_columns(batch, at_token=False))
        if trainer.shard.groups.last_stage:
            minibatch = self._minibatch
            self.losses[index] = trainer.part(
                minibatch.batches[index],
                batch,
                output,
                lambda outputs: minibatch.loss(index, outputs),
                temperature=minibatch.temperature,
                entropy=minibatch.entropy,
            )
            output = self.losses[index].loss
        else:
            self._links.output(output)
        self._open[index] = hidden, output

    def backward(self, index: int) -> None:
        hidden, output = self._open.pop(index)
        torch.autograd.backward(output, self._links.gradient(self._hidden(index)))
        self._links.input_gradient(None if hidden is None else hidden.grad)

    def _hidden(self, index: int) -> Callable[[], Tensor]:
        """Room for the hidden states of a microbatch between stages."""
        shard = self._minibatch.trainer.shard
        shape = hidden_shape(shard, self._short[index])
        return lambda: torch.empty(shape, dtype=shard.dtype, device=shard.device.torch)
