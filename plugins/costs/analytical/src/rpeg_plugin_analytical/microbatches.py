"""How an OP node's work comes: passes of microbatches through the pipeline.

Inference and training are one pass of mb microbatches over whole sequences, of their mean length: short responses are
computed as short, packed or with others of like length. Generation is a prefill and, for each length phase, decode
steps of one token per sequence still alive; every step again takes mb microbatches.
"""

from __future__ import annotations

import attrs
import numpy as np
from numpy.typing import NDArray

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_plugin_analytical.frameworks import used_by
from rpeg_plugin_analytical.work import causal_context

__all__ = ["Pass", "passes"]

Floats = NDArray[np.float64]


@attrs.frozen(kw_only=True, eq=False)
class Pass:
    """Microbatches of equal shape that follow each other through the pipeline.

    Attributes:
        steps: 1 for full sequences, the number of token steps for decode.
        tokens: tokens of one microbatch on one replica, shape (n,).
        head_tokens: tokens of one microbatch that the head is applied to, shape (n,).
        context: mean number of tokens that a token attends to.
        decode: tokens are one per sequence, against a KV cache.
    """

    steps: int
    tokens: Floats
    head_tokens: Floats
    context: float
    decode: bool


def passes(batch: OperatorBatch, *, first_token_from_prefill: bool, padded: bool = False) -> tuple[Pass, ...]:
    """The passes of one node, in order.

    Args:
        batch: the node.
        padded: outside generation every sequence is computed as one of Lp + Lr tokens, whatever its length.
        first_token_from_prefill: True counts what an engine executes: the prefill's last position yields the
            first response token, so the head is applied once per prefilled sequence and Lr - 1 token
            steps follow, as in the paper's count of decode AllReduces (D-D a). False counts what the
            paper's W_G stands for: a prefill without head and Lr decoded tokens (model.md, section 3).
    """
    workload, layouts = batch.workload, batch.layouts
    if batch.role is not Role.GENERATION:
        return (_sequences(batch, ((1.0, workload.response_tokens),) if padded else batch.response_lengths),)
    found = []
    if batch.prefill:
        length = workload.prompt_tokens
        share = workload.rollouts_per_prompt if workload.shared_prefix else 1
        prompts = batch.sequences_per_microbatch / share
        head_tokens = prompts if first_token_from_prefill else np.zeros(len(layouts))
        found.append(
            Pass(
                steps=1,
                tokens=prompts * length,
                head_tokens=head_tokens,
                context=causal_context(length),
                decode=False,
            )
        )
    for phase in batch.phases:
        first = max(phase.first_token, 1) if first_token_from_prefill else phase.first_token
        if first >= phase.last_token:
            continue
        alive = batch.sequences_per_microbatch * phase.alive
        # Step j attends to the prompt and j response tokens; as printed, token j to half a token more.
        mean_token = (first + phase.last_token - (1 if first_token_from_prefill else 0)) / 2.0
        found.append(
            Pass(
                steps=phase.last_token - first,
                tokens=alive,
                head_tokens=alive,
                context=workload.prompt_tokens + mean_token,
                decode=True,
            )
        )
    return tuple(found)


def _sequences(batch: OperatorBatch, lengths: tuple[tuple[float, int], ...]) -> Pass:
    """Whole sequences; (share of them, response tokens). A token's mean context is that of all their tokens."""
    prompt = batch.workload.prompt_tokens
    response = sum(share * tokens for share, tokens in lengths)
    length = sum(share * (prompt + tokens) for share, tokens in lengths)
    attended = sum(share * (prompt + tokens) * causal_context(prompt + tokens) for share, tokens in lengths)
    tokens = batch.sequences_per_microbatch * length
    scored = batch.sequences_per_microbatch * response if used_by(batch).scores_responses else tokens
    return Pass(steps=1, tokens=tokens, head_tokens=scored, context=attended / length, decode=False)
