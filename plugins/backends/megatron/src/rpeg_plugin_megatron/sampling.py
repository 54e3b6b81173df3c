"""Choosing the next token: temperature, top-k, top-p, and randomness that depends on nothing but the row.

Every response position of every row has one uniform number, made by the counter-based generator Philox from
(seed, RL step, row). The token is found by inverting the cumulative distribution over the vocabulary, so the same row
gets the same token on any layout, up to logits that differ in their last bits.

Log-probabilities are those of softmax(logits / temperature) *before* top-k and top-p **[choice]**: the distribution
whose policy gradient is taken, as in verl, whose actor divides logits by the rollout's temperature. Greedy decoding
(temperature 0) reports them at temperature 1.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from rpeg_plugin_megatron.settings import Sampling

__all__ = ["choose", "filter_logits", "uniforms"]

_WORD = 2**64


def uniforms(seed: int, step: int, rows: Sequence[int], length: int) -> np.ndarray:
    """Uniform numbers in [0, 1) for every response position of some rows.

    Args:
        seed: of the run.
        step: RL step.
        rows: indices in the whole batch of the step.
        length: response positions.

    Returns:
        float64 [len(rows), length]; a row depends on (seed, step, row) only, and a shorter one is its beginning.
    """
    result = np.empty((len(rows), length))
    key = np.array([seed % _WORD, step], dtype=np.uint64)
    for index, row in enumerate(rows):
        # The low words count within a row's stream, the high word separates rows.
        counter = np.array([0, 0, 0, row], dtype=np.uint64)
        result[index] = np.random.Generator(np.random.Philox(key=key, counter=counter)).random(length)
    return result


def filter_logits(logits: Tensor, sampling: Sampling) -> Tensor:
    """Logits with -inf where top-k, then top-p, forbid a token.

    Args:
        logits: floating point [n, V], already divided by the temperature.

    Returns:
        [n, V], the given tensor itself when nothing is filtered.
    """
    if 0 < sampling.top_k < logits.shape[1]:
        kth = torch.topk(logits, sampling.top_k, dim=1).values[:, -1:]
        logits = logits.masked_fill(logits < kth, float("-inf"))
    if sampling.top_p < 1.0:
        ordered, order = torch.sort(logits, dim=1, descending=True, stable=True)
        probabilities = torch.softmax(ordered, dim=1)
        # A token stays while the more likely ones have not reached top_p; so the most likely always stays.
        before = probabilities.cumsum(dim=1) - probabilities
        forbidden = torch.zeros_like(logits, dtype=torch.bool).scatter(1, order, before >= sampling.top_p)
        logits = logits.masked_fill(forbidden, float("-inf"))
    return logits


def choose(logits: Tensor, uniform: Tensor | None, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """One token per row and its log-probability.

    Args:
        logits: [n, V] of any floating-point type; computed on in fp32.
        uniform: float64 [n] in [0, 1) on the same device; None for greedy decoding, which does not read it.
        sampling: how.

    Raises:
        ValueError: not greedy, and ``uniform`` is None.

    Returns:
        tokens int64 [n]; log-probabilities fp32 [n] under ``sampling.logprob_temperature``, before top-k and top-p.
    """
    logits = logits.float()
    if sampling.logprob_temperature != 1.0:
        logits = logits / sampling.logprob_temperature
    if sampling.greedy:
        tokens = logits.argmax(dim=1)
    elif uniform is None:
        raise ValueError("sampling needs uniform numbers")
    else:
        tokens = _invert(torch.softmax(filter_logits(logits, sampling), dim=1), uniform)
    chosen = logits.gather(1, tokens[:, None])[:, 0]
    return tokens, chosen - torch.logsumexp(logits, dim=1)


def _invert(probabilities: Tensor, uniform: Tensor) -> Tensor:
    """The first token, in order of ids, at which the cumulative distribution [n, V] exceeds ``uniform`` [n]."""
    cumulative = probabilities.cumsum(dim=1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total even after rounding, so that the search ends at a token of positive probability.
    target = torch.minimum(uniform[:, None] * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0]
