"""Generation: one prefill, then one token per row and step, with the keys and values of earlier tokens kept.

All ranks of a replica call this with the same arguments. The hidden states of a token step go from stage to stage; the
last stage gathers the logits of its tensor ranks, its first rank chooses the tokens, and all ranks of the replica hear
them, so that each knows which rows are finished and what its next input is. Replicas do not talk to each other.

With a pipeline the rows come in microbatches that follow each other through the stages: while the last stage chooses
the tokens of one, the stages before it work on the next ones, and no stage waits as long as there is a microbatch per
stage. Sends and the last stage's broadcasts are therefore asynchronous; a stage hears of a microbatch's tokens when it
next needs them.

Rows that are finished stay in their microbatch, unread, until half of it is finished; then they are dropped from it. A
microbatch whose rows are all finished is not decoded any further.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from rpeg_plugin_megatron import rows as rows_of
from rpeg_plugin_megatron.layers import KVCache, attached
from rpeg_plugin_megatron.model import HeadOutputs, ModelShard
from rpeg_plugin_megatron.sampling import choose, uniforms
from rpeg_plugin_megatron.settings import Sampling

__all__ = ["Decoding", "Generated", "generate"]


@attrs.frozen(eq=False)
class Generated:
    """Responses of a replica, on the device of the shard.

    Attributes:
        tokens: int32 [n, Lr], the pad id after a row's end token and in columns that were not decoded.
        logprobs: fp32 [n, Lr], of the tokens up to and including the end token; see `Sampling`. 0 elsewhere.
        finished: bool [n], whether the row has an end token.
    """

    tokens: Tensor
    logprobs: Tensor
    finished: Tensor


@attrs.define(eq=False)
class _Microbatch:
    """Rows that are decoded together, and where they are.

    Attributes:
        rows: int64 [b] on the CPU, the rows of the replica that are still in it.
        prompt_rows: int64 [p] on the CPU, the prompts that its prefill reads.
        expansion: int64 [b], which of these prompts each row continues.
        cache: None before the prefill.
        prompt_mask: bool [b, columns] on the device, which columns of the prompts count; None when all do.
        positions: int64 [b, 1] on the device, of the next input.
        inputs: int64 [b, 1] on the device, the tokens chosen last; None before the prefill.
        decoded: response tokens so far.
        message: fp64 [2, b] on the CPU, tokens and log-probabilities on their way; None when there are none.
        broadcast: of ``message``, begun on the last stage only: the others hear when they need to.
        sends: this rank's unfinished sends, with what they send.
        done: all rows are finished.
    """

    rows: Tensor
    prompt_rows: Tensor
    expansion: Tensor
    cache: KVCache | None = None
    prompt_mask: Tensor | None = None
    positions: Tensor | None = None
    inputs: Tensor | None = None
    decoded: int = 0
    message: Tensor | None = None
    broadcast: dist.Work | None = None
    sends: list[tuple[dist.Work, Tensor]] = attrs.field(factory=list)
    done: bool = False


class Decoding:
    """A generation that can pause after any response token: length phases are `advance` with their last tokens.

    Args:
        shard: this rank's part of a model with an LM head; its weights must stay the same until the end.
        prompts: int [p, Lp] of this replica, left-padded; on any device.
        rollouts: R, responses per prompt; row ``prompt * R + rollout`` continues ``prompt``.
        first_row: the first row's index in the whole batch, which its randomness is keyed by.
        seed, step: of the run, and the RL step.
        sampling: how tokens are chosen.
        response_tokens: Lr.
        pad_id: of the prompts, and of responses after their end.
        end_ids: tokens that end a response.
        shared_prefix: prefill each prompt once for all its rollouts that are in one microbatch.
        microbatches: how many to cut the rows into; it divides ``p * R``.
    """

    def __init__(
        self,
        shard: ModelShard,
        prompts: Tensor,
        *,
        rollouts: int,
        first_row: int,
        seed: int,
        step: int,
        sampling: Sampling,
        response_tokens: int,
        pad_id: int,
        end_ids: Sequence[int],
        shared_prefix: bool = False,
        microbatches: int = 1,
    ) -> None:
        self._shard = shard
        self._device = shard.device.torch
        self._prompts = prompts.to(self._device, torch.int64)
        self._sampling = sampling
        self._response_tokens = response_tokens
        self._pad_id = pad_id
        self._end_ids = tuple(end_ids)
        count = prompts.shape[0] * rollouts
        # What a row's tokens are is bookkeeping of a few integers: it stays on the CPU, where decisions are made.
        self._tokens = torch.full((count, response_tokens), pad_id, dtype=torch.int32)
        self._logprobs = torch.zeros(count, response_tokens, dtype=torch.float32)
        self._finished = torch.zeros(count, dtype=torch.bool)
        self._uniforms = None
        if self._is_last and not sampling.greedy:
            drawn = uniforms(seed, step, range(first_row, first_row + count), response_tokens)
            self._uniforms = torch.from_numpy(drawn).to(self._device)
        self._microbatches = [
            _microbatch(rows, rollouts, shared_prefix) for rows in torch.arange(count).chunk(microbatches)
        ]

    @property
    def response_tokens(self) -> int:
        """Lr."""
        return self._response_tokens

    @property
    def finished(self) -> np.ndarray:
        """Which rows have an end token; bool [n]."""
        return self._finished.numpy()

    def advance(self, stop: int, until: Callable[[], bool] | None = None) -> None:
        """Decode until every row has ``stop`` response tokens or is finished; all ranks of the replica call this.

        End before that once ``until`` says so, which is asked before every token step about what :attr:`finished` is
        then; in a pipeline that lags a token behind, on all ranks alike.
        """
        with torch.no_grad():
            for _ in range(self._decoded(), min(stop, self._response_tokens)):
                if until is not None and self._ended(until):
                    break
                for microbatch in self._microbatches:
                    self._hear(microbatch)
                    if not microbatch.done:
                        self._step(microbatch)
            for microbatch in self._microbatches:
                self._hear(microbatch)

    def _ended(self, until: Callable[[], bool]) -> bool:
        if self._shard.groups.place.layout.pipeline == 1:  # nothing is worked on meanwhile that hearing would hold up
            for microbatch in self._microbatches:
                self._hear(microbatch)
        return until()

    def result(self) -> Generated:
        """The responses so far."""
        return Generated(
            self._tokens.to(self._device), self._logprobs.to(self._device), self._finished.to(self._device)
        )

    def _decoded(self) -> int:
        return min((item.decoded for item in self._microbatches if not item.done), default=self._response_tokens)

    @property
    def _is_last(self) -> bool:
        return self._shard.groups.last_stage

    # One token step of one microbatch

    def _step(self, microbatch: _Microbatch) -> None:
        """Run this stage, and pass on what comes out of it."""
        tokens, positions, mask = self._prefill(microbatch) if microbatch.cache is None else self._decode(microbatch)
        assert microbatch.cache is not None
        groups, module = self._shard.groups, self._shard.module
        if not groups.first_stage:
            module.set_input_tensor(self._receive(tokens.shape[1], tokens.shape[0]))
        with attached(module, microbatch.cache):
            output = module(tokens, positions, mask, scored=slice(-1, None))
        first = microbatch.decoded == 0
        if first:
            self._expand(microbatch)
        if isinstance(output, HeadOutputs):
            assert output.logits is not None
            logits = output.logits[:, 0]
            self._choose(microbatch, logits[microbatch.expansion.to(self._device)] if first else logits)
        else:
            self._send(microbatch, output)
            microbatch.message = torch.empty(2, len(microbatch.rows), dtype=torch.float64)

    def _prefill(self, microbatch: _Microbatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs of the prefill: prompts without the columns that are padding in all of them."""
        prompts = self._prompts[microbatch.prompt_rows.to(self._device)]
        counts = rows_of.prompt_mask(prompts, self._pad_id)
        skipped = int((~counts).all(dim=0).sum())
        prompts, counts = prompts[:, skipped:], counts[:, skipped:]
        room = prompts.shape[1] + self._response_tokens
        microbatch.cache = KVCache.of(self._shard, rows=prompts.shape[0], tokens=room)
        microbatch.prompt_mask = None if bool(counts.all()) else counts
        mask = None if microbatch.prompt_mask is None else rows_of.attention_mask(counts)
        microbatch.positions = counts.sum(dim=1, keepdim=True)
        return prompts, rows_of.position_ids(counts), mask

    def _expand(self, microbatch: _Microbatch) -> None:
        """After the prefill: from prompts to rows, which may share them."""
        assert microbatch.cache is not None
        if len(microbatch.rows) != len(microbatch.prompt_rows):
            self._select(microbatch, microbatch.expansion)

    def _decode(self, microbatch: _Microbatch) -> tuple[Tensor, Tensor, Tensor | None]:
        """Inputs of a token step: the tokens chosen last."""
        assert microbatch.cache is not None
        assert microbatch.inputs is not None
        assert microbatch.positions is not None
        mask = None
        if microbatch.prompt_mask is not None:
            mask = torch.nn.functional.pad(microbatch.prompt_mask, (0, microbatch.decoded), value=True)[:, None, None]
        positions = microbatch.positions
        microbatch.positions = positions + 1
        return microbatch.inputs, positions, mask

    def _choose(self, microbatch: _Microbatch, logits: Tensor) -> None:
        """On the last stage: gather the vocabulary, choose, and tell the replica what its first rank chose."""
        logits = self._gather(logits.float())
        uniform = None
        if self._uniforms is not None:
            uniform = self._uniforms[microbatch.rows.to(self._device), microbatch.decoded]
        tokens, logprobs = choose(logits, uniform, self._sampling)
        microbatch.message = torch.stack([tokens.double(), logprobs.double()]).cpu()
        if self._replica_size > 1:
            microbatch.broadcast = dist.broadcast(
                microbatch.message, self._chooser, group=self._shard.groups.mp, async_op=True
            )

    def _gather(self, logits: Tensor) -> Tensor:
        """[b, V] from this rank's slice of the vocabulary [b, V / Pt]."""
        ranks = self._shard.groups.place.layout.tensor
        if ranks == 1:
            return logits
        parts = [torch.empty_like(logits) for _ in range(ranks)]
        dist.all_gather(parts, logits.contiguous(), group=self._shard.groups.tp)
        return torch.cat(parts, dim=1)

    def _hear(self, microbatch: _Microbatch) -> None:
        """Take the tokens that are on their way, on every rank of the replica."""
        if microbatch.message is None:
            return
        if microbatch.broadcast is not None:
            microbatch.broadcast.wait()
        elif self._replica_size > 1:
            dist.broadcast(microbatch.message, self._chooser, group=self._shard.groups.mp)
        for work, _ in microbatch.sends:
            work.wait()
        microbatch.sends.clear()
        message, microbatch.message, microbatch.broadcast = microbatch.message, None, None
        self._record(microbatch, message[0].to(torch.int32), message[1].to(torch.float32))

    def _record(self, microbatch: _Microbatch, tokens: Tensor, logprobs: Tensor) -> None:
        """Write what was chosen for the rows that were not finished before."""
        rows, column = microbatch.rows, microbatch.decoded
        finished = self._finished[rows]
        self._tokens[rows, column] = tokens.masked_fill(finished, self._pad_id)
        self._logprobs[rows, column] = logprobs.masked_fill(finished, 0.0)
        finished = finished | rows_of.is_any(tokens, self._end_ids)
        self._finished[rows] = finished
        microbatch.decoded += 1
        microbatch.inputs = tokens.to(self._device, torch.int64)[:, None]
        left = len(rows) - int(finished.sum())
        microbatch.done = left == 0
        if microbatch.done:
            microbatch.cache = microbatch.inputs = microbatch.positions = microbatch.prompt_mask = None
        elif 2 * left <= len(rows):
            self._drop(microbatch, (~finished).nonzero()[:, 0])

    def _drop(self, microbatch: _Microbatch, kept: Tensor) -> None:
        """Go on with some rows of the microbatch; ``kept`` are their positions in it."""
        assert microbatch.inputs is not None
        microbatch.rows = microbatch.rows[kept]
        microbatch.inputs = microbatch.inputs[kept.to(self._device)]
        self._select(microbatch, kept)

    def _select(self, microbatch: _Microbatch, indices: Tensor) -> None:
        """Take these rows of everything that is kept per row of the last forward pass."""
        assert microbatch.cache is not None
        assert microbatch.positions is not None
        indices = indices.to(self._device)
        microbatch.cache.keep(indices)
        microbatch.positions = microbatch.positions[indices]
        if microbatch.prompt_mask is not None:
            microbatch.prompt_mask = microbatch.prompt_mask[indices]

    # Between stages

    @property
    def _replica_size(self) -> int:
        layout = self._shard.groups.place.layout
        return layout.pipeline * layout.tensor

    @property
    def _chooser(self) -> int:
        """Global rank of the replica that chooses tokens: the last stage's first tensor rank."""
        groups = self._shard.groups
        return groups.place.rank_of(groups.coordinates.dp, groups.place.layout.pipeline - 1, 0)

    def _neighbour(self, stages: int) -> int:
        at = self._shard.groups.coordinates
        return self._shard.groups.place.rank_of(at.dp, at.pp + stages, at.tp)

    def _receive(self, columns: int, rows: int) -> Tensor:
        hidden = torch.empty(columns, rows, self._shard.spec.hidden, dtype=self._shard.dtype, device=self._device)
        dist.recv(hidden, self._neighbour(-1), group=self._shard.groups.pp)
        return hidden

    def _send(self, microbatch: _Microbatch, hidden: Tensor) -> None:
        hidden = hidden.contiguous()
        work = dist.isend(hidden, self._neighbour(1), group=self._shard.groups.pp)
        microbatch.sends.append((work, hidden))


def _microbatch(rows: Tensor, rollouts: int, shared_prefix: bool) -> _Microbatch:
    prompts = rows // rollouts
    if not shared_prefix:
        return _Microbatch(rows=rows, prompt_rows=prompts, expansion=torch.arange(len(rows)))
    distinct, expansion = torch.unique_consecutive(prompts, return_inverse=True)
    return _Microbatch(rows=rows, prompt_rows=distinct, expansion=expansion)


def generate(
    shard: ModelShard,
    prompts: Tensor,
    *,
    rollouts: int,
    first_row: int,
    seed: int,
    step: int,
    sampling: Sampling,
    response_tokens: int,
    pad_id: int,
    end_ids: Sequence[int],
    shared_prefix: bool = False,
    microbatches: int = 1,
) -> Generated:
    """Responses of up to ``response_tokens`` tokens; the arguments are those of `Decoding`."""
    decoding = Decoding(
        shard,
        prompts,
        rollouts=rollouts,
        first_row=first_row,
        seed=seed,
        step=step,
        sampling=sampling,
        response_tokens=response_tokens,
        pad_id=pad_id,
        end_ids=end_ids,
        shared_prefix=shared_prefix,
        microbatches=microbatches,
    )
    decoding.advance(response_tokens)
    return decoding.result()
