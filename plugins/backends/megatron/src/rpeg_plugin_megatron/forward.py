"""Teacher-forced forward passes: log-probabilities, values and scores of rows that exist already.

A replica's rows go through its pipeline in microbatches, by Megatron's own schedule. All ranks of a replica call these
functions with the same rows and get the same results.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor

from rpeg_core.errors import ExecutionError
from rpeg_core.runtime.semantics import ModelOutputs
from rpeg_core.spec.models import Head
from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.logprobs import token_logprobs
from rpeg_plugin_megatron.model import HeadOutputs, ModelShard

__all__ = ["Rows", "infer", "microbatches_of", "outputs_of", "run_schedule", "score"]


@attrs.frozen(eq=False)
class Rows:
    """Sequences of a replica.

    Attributes:
        tokens: int ``[n, L]``: prompts padded on the left, responses padded on the right.
        mask: bool ``[n, L]``, True where a token counts (`rows.row_mask`).
        prompt_tokens: Lp, columns of the prompt.
    """

    tokens: Tensor
    mask: Tensor
    prompt_tokens: int

    @property
    def response_tokens(self) -> int:
        """Lr, columns of the response."""
        return self.tokens.shape[1] - self.prompt_tokens

    @property
    def response_mask(self) -> Tensor:
        """bool ``[n, Lr]``."""
        return self.mask[:, self.prompt_tokens :]

    def __len__(self) -> int:
        return self.tokens.shape[0]

    def __getitem__(self, index: Any) -> Rows:
        """Some of the rows, by a slice or a tensor of indices."""
        return Rows(self.tokens[index], self.mask[index], self.prompt_tokens)


def microbatches_of(rows: Rows, count: int) -> tuple[Rows, ...]:
    """``count`` equal parts of consecutive rows.

    Raises:
        ExecutionError: the rows cannot be divided equally.
    """
    if count < 1 or len(rows) % count:
        raise ExecutionError(
            f"{len(rows)} rows of a replica in {count} microbatches", facts=["allowed: a number that divides the rows"]
        )
    size = len(rows) // count
    return tuple(rows[i * size : (i + 1) * size] for i in range(count))


def infer(
    shard: ModelShard, rows: Rows, *, microbatches: int, temperature: float = 1.0, entropy: bool = False
) -> ModelOutputs:
    """What the model says about the response tokens of this replica's rows, without gradients.

    Args:
        shard: of the model; all ranks of the replica call this.
        rows: of this replica.
        microbatches: of the pipeline.
        temperature: of the distribution whose log-probabilities and entropies are returned.
        entropy: whether entropies are wanted.

    Returns:
        fp32 ``[n, Lr]`` each, 0 where the mask is; what the model has no head for is None.
    """
    start = rows.prompt_tokens - 1
    collect = partial(_masked, shard, temperature=temperature, entropy=entropy)
    found = _collect(shard, rows, microbatches, slice(start, rows.tokens.shape[1] - 1), collect)
    shape = (len(rows), rows.response_tokens)

    def whole(name: str) -> Tensor:
        return _from_last_stage(shard, None if found is None else torch.cat([getattr(o, name) for o in found]), shape)

    has_lm, has_scalar = shard.spec.head is not Head.SCALAR, shard.spec.head is not Head.LM
    return ModelOutputs(
        logprobs=whole("logprobs") if has_lm else None,
        values=whole("values") if has_scalar else None,
        entropy=whole("entropy") if has_lm and entropy else None,
    )


def score(shard: ModelShard, rows: Rows, *, microbatches: int) -> Tensor:
    """The scalar head at the last response token of each row, as a reward model is read: fp32 ``[n]``."""

    def collect(batch: Rows, output: HeadOutputs) -> Tensor:
        if output.values is None:
            raise ExecutionError(f"{shard.spec.name} has no scalar head to score with")
        last = (batch.response_mask.sum(dim=1) - 1).clamp_min(0)
        return output.values.gather(1, last.unsqueeze(1)).squeeze(1)

    found = _collect(shard, rows, microbatches, slice(rows.prompt_tokens, rows.tokens.shape[1]), collect)
    return _from_last_stage(shard, None if found is None else torch.cat(found), (len(rows),))


def outputs_of(
    shard: ModelShard, batch: Rows, output: HeadOutputs, *, temperature: float, entropy: bool
) -> ModelOutputs:
    """The last stage's output on the columns before each response token as `ModelOutputs`; masked entries are 0."""
    logprobs = entropies = values = None
    mask = batch.response_mask
    if output.logits is not None:
        targets = batch.tokens[:, batch.prompt_tokens :]
        logprobs, entropies = token_logprobs(
            output.logits, targets, shard.groups.tp, temperature=temperature, entropy=entropy
        )
        logprobs = torch.where(mask, logprobs, 0.0)
        entropies = None if entropies is None else torch.where(mask, entropies, 0.0)
    if output.values is not None:
        values = torch.where(mask, output.values, 0.0)
    return ModelOutputs(logprobs=logprobs, values=values, entropy=entropies)


def run_schedule(
    shard: ModelShard,
    module: torch.nn.Module,
    batches: Sequence[Rows],
    scored: slice,
    loss: Any,
    *,
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule over microbatches of equal size.

    Args:
        shard: the model.
        module: ``shard.module``, or what wraps it for training.
        batches: the microbatches of this replica.
        scored: columns that the heads are applied to.
        loss: ``loss(index, output)`` on the last stage: with ``forward_only`` what to collect; else (loss, token count
            that is ignored, what to collect).
        forward_only: no backward passes.

    Returns:
        On the last stage what was collected, in the order of the microbatches; elsewhere nothing.
    """

    def forward(iterator: Iterator[int], model: torch.nn.Module) -> tuple[Any, Any]:
        index = next(iterator)
        batch = batches[index]
        output = model(batch.tokens, rows_of.position_ids(batch.mask), rows_of.attention_mask(batch.mask), scored)
        return output, lambda out, non_loss_data=False: loss(index, out)

    layout = shard.groups.place.layout
    schedule = get_forward_backward_func(pp_size=layout.pipeline, vp_size=None)
    communicator = (
        P2PCommunicator(pp_group=shard.groups.pp, config=shard.module.config) if layout.pipeline > 1 else None
    )
    with shard.device.megatron():
        collected: list[Any] = schedule(
            forward_step_func=forward,
            data_iterator=iter(range(len(batches))),
            model=module,
            num_microbatches=len(batches),
            seq_length=batches[0].tokens.shape[1],
            micro_batch_size=len(batches[0]),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=communicator,
            pg_collection=shard.groups.collection,
        )
    return collected


def _masked(shard: ModelShard, batch: Rows, output: HeadOutputs, *, temperature: float, entropy: bool) -> ModelOutputs:
    return outputs_of(shard, batch, output, temperature=temperature, entropy=entropy)


def _collect(shard: ModelShard, rows: Rows, microbatches: int, scored: slice, collect: Any) -> list[Any] | None:
    """What ``collect(batch, output)`` made of each microbatch on the last stage; None elsewhere."""
    batches = microbatches_of(rows, microbatches)
    shard.module.eval()
    with torch.no_grad():
        found = run_schedule(
            shard,
            shard.module,
            batches,
            scored,
            lambda index, output: collect(batches[index], output),
            forward_only=True,
        )
    return found if shard.groups.last_stage else None


def _from_last_stage(shard: ModelShard, tensor: Tensor | None, shape: tuple[int, ...]) -> Tensor:
    """The last stage's fp32 tensor on all stages of the replica."""
    if tensor is None:
        tensor = torch.empty(shape, dtype=torch.float32, device=shard.device.torch)
    groups = shard.groups
    if groups.place.layout.pipeline > 1:
        tensor = tensor.contiguous()
        source = dist.get_global_rank(groups.pp, groups.place.layout.pipeline - 1)
        dist.broadcast(tensor, src=source, group=groups.pp)
    return tensor
