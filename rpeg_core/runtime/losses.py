"""Building blocks of policy-gradient losses, for the semantics of any algorithm.

Everything is written with methods of the tensors that come in, so that nothing here imports torch. Per-token tensors
are [rows, Lr], masks are bool of that shape, and whatever stands where the mask is False has no influence.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Literal

from rpeg_core.errors import SettingsError

if TYPE_CHECKING:
    import torch

    from rpeg_core.runtime.semantics import Counts

__all__ = [
    "Aggregation",
    "BeyondCap",
    "KlEstimator",
    "behaviour_weights",
    "clipped_policy_loss",
    "clipped_value_loss",
    "gae_advantages",
    "group_advantages",
    "kl_estimate",
    "masked",
    "mean_over",
    "scores_at_end",
    "token_mean",
    "whiten",
]

Aggregation = Literal["token-mean", "sequence-mean", "length-normalised"]
KlEstimator = Literal["k1", "k2", "k3"]
BeyondCap = Literal["truncate", "drop"]

_LARGEST_LOG_RATIO = 20.0
"""Log-ratios are cut off there, as in verl and OpenRLHF: exp of more overflows, and such tokens are clipped anyway."""


def masked(values: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """``values`` where the mask is True, 0 elsewhere, also where they are not finite."""
    return values.masked_fill(~mask, 0.0)


def mean_over(per_token: torch.Tensor, mask: torch.Tensor, counts: Counts, aggregation: Aggregation) -> torch.Tensor:
    """A microbatch's part of the mean over the minibatch that ``counts`` describes; scalar.

    ``token-mean``: every token weighs the same (DAPO, arXiv:2503.14476; the default of verl and TRL).
    ``sequence-mean``: the mean over sequences of their means over tokens (DeepSeekMath, arXiv:2402.03300, eq. 3).
    ``length-normalised``: the mean over sequences of their sums divided by Lr (Dr. GRPO, arXiv:2503.20783).

    Raises:
        SettingsError: another aggregation.
    """
    kept = masked(per_token, mask)
    if aggregation == "token-mean":
        return kept.sum() / max(1, counts.tokens)
    if aggregation == "sequence-mean":
        return (kept.sum(1) / mask.sum(1).clamp(min=1)).sum() / counts.rows
    if aggregation == "length-normalised":
        return kept.sum() / (counts.rows * mask.shape[1])
    raise SettingsError(
        f"aggregation is {aggregation!r}", facts=["allowed: token-mean, sequence-mean, length-normalised"]
    )


def token_mean(
    per_token: torch.Tensor, mask: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """The mean over all tokens of the step; scalar, equal on all ranks."""
    return total(masked(per_token, mask).sum()) / total(mask.sum()).clamp(min=1)


def scores_at_end(scores: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    """Token rewards [rows, Lr]: the score [rows] of a response at its last token, 0 elsewhere."""
    last = (mask.sum(1) - 1).clamp(min=0)
    return masked(scores.new_zeros(mask.shape).scatter(1, last[:, None], scores[:, None]), mask)


def gae_advantages(
    rewards: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, *, gamma: float, gae_lambda: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Generalised advantage estimation on tokens (Schulman et al., arXiv:1506.02438, eq. 16).

    delta_t = r_t + gamma * V_{t+1} - V_t, A_t = delta_t + gamma * lambda * A_{t+1}; behind the last token both are 0.

    Args:
        rewards: per token.
        values: V of the state before each token.
        mask: of the response; True on a prefix of each row.
        gamma, gae_lambda: discount and lambda.

    Returns:
        advantages and returns (advantage + value), each [rows, Lr] and 0 outside of the mask.
    """
    rewards, values = masked(rewards, mask), masked(values, mask)
    advantages = values.new_zeros(values.shape)
    next_value = values.new_zeros(values.shape[0])
    running = next_value
    for t in reversed(range(values.shape[1])):
        running = rewards[:, t] + gamma * next_value - values[:, t] + gamma * gae_lambda * running
        advantages[:, t] = running
        next_value = values[:, t]
    return masked(advantages, mask), masked(advantages + values, mask)


def group_advantages(scores: torch.Tensor, group: int, *, standardise: bool, epsilon: float = 1e-6) -> torch.Tensor:
    """Scores [rows] relative to their group of ``group`` consecutive rows (DeepSeekMath, section 4.1.2).

    The mean of the group is subtracted; ``standardise`` also divides by its standard deviation (of the sample, with
    ``group - 1``) plus ``epsilon``, both as in verl.
    """
    grouped = scores.reshape(-1, group)
    centred = grouped - grouped.mean(1, keepdim=True)
    if standardise:
        centred = centred / (grouped.std(1, keepdim=True) + epsilon)
    return centred.reshape(-1)


def whiten(
    values: torch.Tensor, mask: torch.Tensor, total: Callable[[torch.Tensor], torch.Tensor], *, epsilon: float = 1e-8
) -> torch.Tensor:
    """Mean 0 and variance 1 over all tokens of the step, on all ranks together; 0 outside of the mask.

    The variance is that of the sample (``tokens - 1``); ``epsilon`` is added to it.
    """
    tokens = total(mask.sum()).to(values.dtype)
    mean = total(masked(values, mask).sum()) / tokens.clamp(min=1)
    centred = masked(values - mean, mask)
    variance = total(centred.square().sum()) / (tokens - 1).clamp(min=1)
    return centred * (variance + epsilon).rsqrt()


def kl_estimate(logprobs: torch.Tensor, reference: torch.Tensor, estimator: KlEstimator) -> torch.Tensor:
    """Per-token estimate of KL(policy || reference) from tokens that the policy drew (joschu.net/blog/kl-approx.html).

    With d = logprobs - reference: k1 = d; k2 = d^2 / 2; k3 = exp(-d) - 1 + d, never negative.

    Raises:
        SettingsError: another estimator.
    """
    if estimator == "k1":
        return logprobs - reference
    if estimator == "k2":
        return (logprobs - reference).square() / 2
    if estimator == "k3":
        back = (reference - logprobs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO)
        return back.exp() - back - 1
    raise SettingsError(f"the KL estimator is {estimator!r}", facts=["allowed: k1, k2, k3"])


def clipped_policy_loss(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, low: float, high: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """PPO's clipped surrogate per token, negated (Schulman et al., arXiv:1707.06347, eq. 7).

    -min(ratio * A, clip(ratio, 1 - low, 1 + high) * A); ``high`` > ``low`` is DAPO's clip-higher.

    Returns:
        the loss, and bool: where the clipped term was chosen.
    """
    ratio = (logprobs - old_logprobs).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1 - low, 1 + high)
    return plain.maximum(clipped), clipped > plain


def behaviour_weights(
    proximal: torch.Tensor, behaviour: torch.Tensor, *, cap: float | None, beyond: BeyondCap
) -> tuple[torch.Tensor, torch.Tensor]:
    """How much likelier a token is under the policy that is improved than under the one that drew it, per token.

    w = exp(proximal - behaviour), the importance weight that turns an expectation over the behaviour policy into one
    over the proximal policy: of the decoupled PPO objective (Hilton et al., arXiv:2110.00641, eq. 5; AReaL,
    arXiv:2505.24298, eq. 5). Beyond the cap, ``truncate`` makes it the cap (truncated importance sampling, as IMPALA,
    arXiv:1802.01561, and verl), ``drop`` makes it 0, so that the token does not count (AReaL's code).

    Args:
        proximal: log-probabilities under the policy that is improved, without gradient.
        behaviour: under the policy that generated.
        cap: the largest weight; None for any.
        beyond: what a larger weight becomes.

    Returns:
        the weights, and bool: where the cap was exceeded.

    Raises:
        SettingsError: another word for ``beyond``.
    """
    weights = (proximal - behaviour).clamp(-_LARGEST_LOG_RATIO, _LARGEST_LOG_RATIO).exp()
    if beyond not in ("truncate", "drop"):
        raise SettingsError(f"beyond is {beyond!r}", facts=["allowed: truncate, drop"])
    if cap is None:
        return weights, weights < 0
    exceeded = weights > cap
    return weights.masked_fill(exceeded, cap if beyond == "truncate" else 0.0), exceeded


def clipped_value_loss(
    values: torch.Tensor, old_values: torch.Tensor, returns: torch.Tensor, *, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Half the squared error per token, or the larger one of it and that of the value kept near the old one.

    max((V - R)^2, (clip(V, V_old - clip, V_old + clip) - R)^2) / 2, as in OpenAI's baselines, TRL and verl.

    Args:
        clip: None for the plain squared error.

    Returns:
        the loss, and bool: where the clipped term was chosen.
    """
    plain = (values - returns).square()
    if clip is None:
        return plain / 2, (plain < 0)
    moved = values - old_values
    clipped = (old_values + moved.clamp(-clip, clip) - returns).square()
    # Within the range both terms are the same number but for rounding.
    return plain.maximum(clipped) / 2, (moved.abs() > clip) & (clipped > plain)
