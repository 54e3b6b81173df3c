"""Rows of token ids: masks, positions and lengths, all pure functions on tensors.

A row is a prompt padded on the left to Lp tokens followed by a response padded on the right to Lr tokens. What is
padding follows from the tokens alone: the leading run of pad ids of a prompt, and everything after the first end token
of a response. A model may therefore use the pad id as end token, or generate it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = [
    "attention_mask",
    "clean_response",
    "join",
    "last_response_index",
    "left_pad",
    "position_ids",
    "prompt_mask",
    "response_mask",
    "right_pad",
    "row_mask",
    "strip_prompt",
    "strip_response",
]


def prompt_mask(prompts: Tensor, pad_id: int) -> Tensor:
    """True where a token of a left-padded prompt counts: all but the leading run of ``pad_id``.

    Args:
        prompts: [n, Lp] token ids.

    Returns:
        bool [n, Lp].
    """
    return (prompts != pad_id).cumsum(dim=1) > 0


def response_mask(responses: Tensor, end_ids: Sequence[int]) -> Tensor:
    """True up to and including the first end token of each response, everywhere when there is none.

    Args:
        responses: [n, Lr] token ids.
        end_ids: the tokens that end a response.

    Returns:
        bool [n, Lr].
    """
    ended = is_any(responses, end_ids)
    # The tokens before a position, itself excluded, hold no end.
    return ended.cumsum(dim=1) - ended.to(torch.int64) == 0


def is_any(tokens: Tensor, ids: Sequence[int]) -> Tensor:
    """True where ``tokens`` is one of ``ids``; a few comparisons are faster than `torch.isin`."""
    found = torch.zeros_like(tokens, dtype=torch.bool)
    for item in ids:
        found |= tokens == item
    return found


def row_mask(rows: Tensor, prompt_tokens: int, pad_id: int, end_ids: Sequence[int]) -> Tensor:
    """`prompt_mask` and `response_mask` side by side: bool [n, Lp + Lr] of rows [n, Lp + Lr]."""
    prompts, responses = rows[:, :prompt_tokens], rows[:, prompt_tokens:]
    return torch.cat([prompt_mask(prompts, pad_id), response_mask(responses, end_ids)], dim=1)


def position_ids(mask: Tensor) -> Tensor:
    """Positions that count from 0 at the first token of each row; padding on the left has position 0.

    Args:
        mask: bool [n, L], as from `row_mask`; the padding on the right continues the count, which no one reads.

    Returns:
        int64 [n, L].
    """
    return (mask.cumsum(dim=1) - 1).clamp_min(0)


def attention_mask(mask: Tensor) -> Tensor:
    """Which keys each query may see: itself and the counting tokens before it.

    A padded query sees itself alone, so that its softmax is defined; no one reads its result.

    Args:
        mask: bool [n, L], True where a token counts.

    Returns:
        bool [n, 1, L, L], True where query (third dimension) may see key (fourth): the sense of
        `torch.nn.functional.scaled_dot_product_attention`, the opposite of Megatron's own masks.
    """
    length = mask.shape[1]
    causal = torch.ones(length, length, dtype=torch.bool, device=mask.device).tril()
    diagonal = torch.eye(length, dtype=torch.bool, device=mask.device)
    return ((causal & mask[:, None, :]) | diagonal)[:, None]


def last_response_index(responses: Tensor, end_ids: Sequence[int]) -> Tensor:
    """Index in the response of its last counting token, where a reward model's score is read; int64 [n]."""
    return response_mask(responses, end_ids).sum(dim=1) - 1


def clean_response(responses: Tensor, pad_id: int, end_ids: Sequence[int]) -> Tensor:
    """The responses with ``pad_id`` after the first end token; same shape and type."""
    return responses.masked_fill(~response_mask(responses, end_ids), pad_id)


def join(prompts: Tensor, responses: Tensor) -> Tensor:
    """Rows int32 [n, Lp + Lr] of prompts [n, Lp] and responses [n, Lr]."""
    return torch.cat([prompts.to(torch.int32), responses.to(torch.int32)], dim=1)


def left_pad(sequences: Sequence[Sequence[int]], length: int, pad_id: int) -> Tensor:
    """int32 [n, length]: each sequence at the right end of its row. Sequences are at most ``length`` long."""
    padded = [[pad_id] * (length - len(sequence)) + list(sequence) for sequence in sequences]
    return torch.tensor(padded, dtype=torch.int32).reshape(len(sequences), length)


def right_pad(sequences: Sequence[Sequence[int]], length: int, pad_id: int) -> Tensor:
    """int32 [n, length]: each sequence at the left end of its row. Sequences are at most ``length`` long."""
    padded = [list(sequence) + [pad_id] * (length - len(sequence)) for sequence in sequences]
    return torch.tensor(padded, dtype=torch.int32).reshape(len(sequences), length)


def strip_prompt(prompt: Tensor, pad_id: int) -> list[int]:
    """The counting tokens of one left-padded prompt [Lp]."""
    return [int(token) for token in prompt[prompt_mask(prompt[None], pad_id)[0]].tolist()]


def strip_response(response: Tensor, end_ids: Sequence[int]) -> list[int]:
    """The tokens of one response [Lr] before its end token: what a reward function reads as text."""
    tokens: list[int] = []
    for token in response.tolist():
        if token in end_ids:
            break
        tokens.append(int(token))
    return tokens
