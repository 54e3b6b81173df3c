"""Teacher-forced forward passes: log-probabilities, values and scores of rows that exist already.

A replica's rows go through its pipeline in microbatches, by Megatron's own schedule. All ranks of a replica call these
functions with the same rows and get the same results.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import torch
import torch.distributed as dist
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from megatron.core.pipeline_parallel.schedules import get_forward_backward_func
from torch import Tensor
from torch.nn import functional

from rpeg_core.errors import ExecutionError
from rpeg_core.runtime.semantics import ModelOutputs
from rpeg_core.spec.models import Head
from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.logprobs import token_logprobs
from rpeg_plugin_megatron.model import HeadOutputs, ModelShard

__all__ = [
    "Rows",
    "forward_pass",
    "infer",
    "microbatches_of",
    "outputs_of",
    "run_schedule",
    "score",
    "scored_columns",
    "trimmed",
]


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

    def collect(_: int, batch: Rows, output: HeadOutputs) -> ModelOutputs:
        return outputs_of(shard, batch, output, rows.response_tokens, temperature=temperature, entropy=entropy)

    found = _collect(shard, rows, microbatches, collect, at_token=False)
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

    def collect(_: int, batch: Rows, output: HeadOutputs) -> Tensor:
        if output.values is None:
            raise ExecutionError(f"{shard.spec.name} has no scalar head to score with")
        last = (batch.response_mask.sum(dim=1) - 1).clamp_min(0)
        return output.values.gather(1, last.unsqueeze(1)).squeeze(1)

    found = _collect(shard, rows, microbatches, collect, at_token=True)
    return _from_last_stage(shard, None if found is None else torch.cat(found), (len(rows),))


def outputs_of(
    shard: ModelShard,
    batch: Rows,
    output: HeadOutputs,
    response_tokens: int,
    *,
    temperature: float,
    entropy: bool,
) -> ModelOutputs:
    """The last stage's output as `ModelOutputs` ``[m, response_tokens]``; masked and trimmed entries are 0."""
    mask = batch.response_mask

    def placed(tensor: Tensor) -> Tensor:
        kept = torch.where(mask, tensor, 0.0)
        return functional.pad(kept, (0, response_tokens - kept.shape[1]))

    logprobs = entropies = values = None
    if output.logits is not None:
        targets = batch.tokens[:, batch.prompt_tokens :]
        logprobs, entropies = token_logprobs(
            output.logits, targets, shard.groups.tp, temperature=temperature, entropy=entropy
        )
        logprobs = placed(logprobs)
        entropies = None if entropies is None else placed(entropies)
    if output.values is not None:
        values = placed(output.values)
    return ModelOutputs(logprobs=logprobs, values=values, entropy=entropies)


def trimmed(batches: Sequence[Rows]) -> tuple[Rows, ...]:
    """The microbatches without the columns on the left and right in which no row has a token.

    At least one column of prompt and one of response stay. All microbatches get the same shape.
    """
    prompt_tokens = batches[0].prompt_tokens
    used = torch.stack([batch.mask.any(dim=0) for batch in batches]).any(dim=0).nonzero().flatten().tolist()
    first, last = (used[0], used[-1]) if used else (prompt_tokens - 1, prompt_tokens)
    first, stop = min(first, prompt_tokens - 1), max(last, prompt_tokens) + 1
    return tuple(
        Rows(batch.tokens[:, first:stop], batch.mask[:, first:stop], prompt_tokens - first) for batch in batches
    )


def scored_columns(short: Sequence[Rows], *, at_token: bool) -> slice:
    """Where the heads are applied: to each response token, or to the token before it."""
    columns, prompt_tokens = short[0].tokens.shape[1], short[0].prompt_tokens
    return slice(prompt_tokens, columns) if at_token else slice(prompt_tokens - 1, columns - 1)


def forward_pass(model: torch.nn.Module, batch: Rows, scored: slice) -> Any:
    """What a stage makes of a trimmed microbatch: hidden states ``[s, b, hidden]``, or the heads' output."""
    # Padding on the right needs no mask: no token that counts comes after it.
    unpadded = bool(batch.mask[:, : batch.prompt_tokens].all())
    mask = None if unpadded else rows_of.attention_mask(batch.mask)
    return model(batch.tokens, rows_of.position_ids(batch.mask), mask, scored)


def run_schedule(
    shard: ModelShard,
    module: torch.nn.Module,
    batches: Sequence[Rows],
    last_stage: Callable[[int, Rows, HeadOutputs], Any],
    *,
    at_token: bool,
    forward_only: bool,
) -> list[Any]:
    """Megatron's schedule over microbatches of equal size, which are `trimmed`.

    Args:
        shard: the model.
        module: ``shard.module``, or what wraps it for training.
        batches: the microbatches of this replica.
        last_stage: called with a microbatch's index, its trimmed rows and the heads' output: returns with
            ``forward_only`` what to collect; else (loss, a token count that is ignored, what to collect).
        at_token: whether the heads are applied to each response token, or to the token before it.
        forward_only: no backward passes.

    Returns:
        On the last stage what was collected, in the order of the microbatches; elsewhere nothing.
    """
    short = trimmed(batches)
    scored = scored_columns(short, at_token=at_token)

    def forward(iterator: Iterator[int], model: torch.nn.Module) -> tuple[Any, Any]:
        index = next(iterator)
        output = forward_pass(model, short[index], scored)
        return output, lambda out, non_loss_data=False: last_stage(index, short[index], out)

    layout = shard.groups.place.layout
    schedule = get_forward_backward_func(pp_size=layout.pipeline, vp_size=None)
    communicator = (
        P2PCommunicator(pp_group=shard.groups.pp, config=shard.module.config) if layout.pipeline > 1 else None
    )
    with shard.device.megatron():
        collected: list[Any] = schedule(
            forward_step_func=forward,
            data_iterator=iter(range(len(short))),
            model=module,
            num_microbatches=len(short),
            seq_length=short[0].tokens.shape[1],
            micro_batch_size=len(short[0]),
            forward_only=forward_only,
            collect_non_loss_data=forward_only,
            p2p_communicator=communicator,
            pg_collection=shard.groups.collection,
        )
    return collected


def _collect(
    shard: ModelShard,
    rows: Rows,
    microbatches: int,
    collect: Callable[[int, Rows, HeadOutputs], Any],
    *,
    at_token: bool,
) -> list[Any] | None:
    """What ``collect`` made of each microbatch on the last stage, without gradients; None elsewhere."""
    batches = microbatches_of(rows, microbatches)
    shard.module.eval()
    with torch.no_grad():
        found = run_schedule(shard, shard.module, batches, collect, at_token=at_token, forward_only=True)
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
