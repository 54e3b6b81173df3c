"""Teacher-forced forward passes: log-probabilities, values and scores of rows that exist already.

A replica's rows go through its pipeline in microbatches, by Megatron's own schedule. All ranks of a replica call these
functions with the same rows and get the same results.

Rows of like length are computed together (`by_length`), and a microbatch is as wide as its longest row, so that little
of what a pass computes is padding.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import attrs
import numpy as np
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
    "by_length",
    "forward_pass",
    "hidden_shape",
    "infer",
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


def by_length(rows: Rows, count: int, *, pipeline: int, together: int = 1) -> tuple[Tensor, ...]:
    """Which rows are computed together: ``count`` equal parts of the rows in order of length, the longest first.

    Where no other stage waits for parts of equal size, a part is cut further, before each row that is less than half as
    wide as the first: less than half of what is computed is then padding on the right.

    Args:
        rows: of this replica.
        count: parts of equal size.
        pipeline: stages.
        together: consecutive rows that stay together; it divides the rows of a part.

    Returns:
        Indices of rows, int64 on the CPU; every row is in one of them.

    Raises:
        ExecutionError: the rows cannot be divided equally.
    """
    if count < 1 or len(rows) % (count * together):
        raise ExecutionError(
            f"{len(rows)} rows of a replica in {count} microbatches", facts=["allowed: a number that divides the rows"]
        )
    used = rows.mask.cpu().numpy()
    first = min(int(used.any(axis=0).argmax()), rows.prompt_tokens)
    widths = used[:, rows.prompt_tokens :].sum(axis=1) + rows.prompt_tokens - first
    blocks = widths.reshape(-1, together).max(axis=1)
    order = np.argsort(-blocks, kind="stable")
    parts: list[list[int]] = []
    for part in np.split(order, count):
        parts.append([])
        for block in part.tolist():
            if pipeline == 1 and parts[-1] and 2 * blocks[block] < blocks[parts[-1][0]]:
                parts.append([])
            parts[-1].append(block)
    blocks_of_rows = torch.arange(len(rows)).reshape(-1, together)
    return tuple(blocks_of_rows[part].flatten() for part in parts)


def infer(
    shard: ModelShard, rows: Rows, *, microbatches: int, temperature: float = 1.0, entropy: bool = False
) -> ModelOutputs:
    """What the model says about the response tokens of this replica's rows, without gradients.

    Args:
        shard: of the model; all ranks of the replica call this.
        rows: of this replica.
        microbatches: that the plan states, see `by_length`.
        temperature: of the distribution whose log-probabilities and entropies are returned.
        entropy: whether entropies are wanted.

    Returns:
        fp32 ``[n, Lr]`` each, 0 where the mask is; what the model has no head for is None.
    """

    def collect(_: int, batch: Rows, output: HeadOutputs) -> ModelOutputs:
        return outputs_of(shard, batch, output, rows.response_tokens, temperature=temperature, entropy=entropy)

    found, order = _collect(shard, rows, microbatches, collect, at_token=False)
    shape = (len(rows), rows.response_tokens)

    def whole(name: str) -> Tensor:
        parts = None if found is None else [getattr(outputs, name) for outputs in found]
        return _in_order(shard, parts, order, shape)

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

    found, order = _collect(shard, rows, microbatches, collect, at_token=True)
    return _in_order(shard, found, order, (len(rows),))


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


def trimmed(batch: Rows) -> Rows:
    """The microbatch without the columns on the left and right in which no row has a token.

    At least one column of prompt and one of response stay.
    """
    prompt_tokens = batch.prompt_tokens
    used = batch.mask.any(dim=0).nonzero().flatten().tolist()
    first, last = (used[0], used[-1]) if used else (prompt_tokens - 1, prompt_tokens)
    first, stop = min(first, prompt_tokens - 1), max(last, prompt_tokens) + 1
    return Rows(batch.tokens[:, first:stop], batch.mask[:, first:stop], prompt_tokens - first)


def scored_columns(short: Rows, *, at_token: bool) -> slice:
    """Where the heads are applied: to each response token, or to the token before it."""
    columns, prompt_tokens = short.tokens.shape[1], short.prompt_tokens
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
    """Megatron's schedule over microbatches, each `trimmed`.

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
    short = [trimmed(batch) for batch in batches]

    def forward(iterator: Iterator[int], model: torch.nn.Module) -> tuple[Any, Any]:
        index = next(iterator)
        output = forward_pass(model, short[index], scored_columns(short[index], at_token=at_token))
        return output, lambda out, non_loss_data=False: last_stage(index, short[index], out)

    layout = shard.groups.place.layout
    schedule = get_forward_backward_func(pp_size=layout.pipeline, vp_size=None)
    communicator = None
    if layout.pipeline > 1:
        shapes = [hidden_shape(shard, batch) for batch in short]
        communicator = _Communicator(shard.groups.pp, shard.module.config, shapes)
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


def hidden_shape(shard: ModelShard, short: Rows) -> tuple[int, int, int]:
    """Of the hidden states of a trimmed microbatch between stages: tokens, rows, width."""
    rows, columns = short.tokens.shape
    return columns, rows, shard.spec.hidden


class _Communicator(P2PCommunicator):
    """Megatron's messages between stages, for microbatches of different shapes, which all stages know.

    Inputs and gradients arrive in the order of the microbatches; Megatron states one shape for all of them.
    """

    def __init__(self, group: dist.ProcessGroup, config: Any, shapes: Sequence[tuple[int, int, int]]) -> None:
        super().__init__(pp_group=group, config=config)
        self._inputs, self._gradients = iter(shapes), iter(shapes)

    def recv_forward(self, tensor_shapes: Any, is_first_stage: bool) -> Any:
        return super().recv_forward([next(self._inputs)], is_first_stage)

    def recv_backward(self, tensor_shapes: Any, is_last_stage: bool) -> Any:
        return super().recv_backward([next(self._gradients)], is_last_stage)

    def send_forward_recv_backward(self, output_tensors: Any, tensor_shapes: Any, is_last_stage: bool) -> Any:
        return super().send_forward_recv_backward(output_tensors, [next(self._gradients)], is_last_stage)

    def send_backward_recv_forward(self, input_tensor_grads: Any, tensor_shapes: Any, is_first_stage: bool) -> Any:
        return super().send_backward_recv_forward(input_tensor_grads, [next(self._inputs)], is_first_stage)


def _collect(
    shard: ModelShard,
    rows: Rows,
    microbatches: int,
    collect: Callable[[int, Rows, HeadOutputs], Any],
    *,
    at_token: bool,
) -> tuple[list[Any] | None, Tensor]:
    """What ``collect`` made of each microbatch on the last stage, None elsewhere, without gradients; and their rows."""
    parts = by_length(rows, microbatches, pipeline=shard.groups.place.layout.pipeline)
    shard.module.eval()
    with torch.no_grad():
        batches = [rows[part.to(rows.tokens.device)] for part in parts]
        found = run_schedule(shard, shard.module, batches, collect, at_token=at_token, forward_only=True)
    return found if shard.groups.last_stage else None, torch.cat(parts)


def _in_order(shard: ModelShard, parts: Sequence[Tensor] | None, order: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The last stage's microbatches, put where their rows were, on all stages of the replica; fp32 of ``shape``."""
    whole = None
    if parts is not None:
        whole = torch.empty(shape, dtype=torch.float32, device=shard.device.torch)
        whole[order.to(whole.device)] = torch.cat(list(parts))
    return _from_last_stage(shard, whole, shape)


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
