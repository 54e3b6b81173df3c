"""What algorithms share that train a policy on responses it generated: the clipped surrogate with its penalties.

Nothing here imports torch, see :mod:`rpeg_core.runtime.losses`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from rpeg_core.runtime.losses import behaviour_weights, clipped_policy_loss, kl_estimate, mean_over, token_mean
from rpeg_core.runtime.semantics import Counts, LossParts, ModelOutputs, PolicySettings

if TYPE_CHECKING:
    import torch

__all__ = ["policy_loss", "rollout_metrics"]


def policy_loss(
    outputs: ModelOutputs,
    *,
    generated: torch.Tensor,
    proximal: torch.Tensor | None,
    advantages: torch.Tensor,
    reference: torch.Tensor | None,
    mask: torch.Tensor,
    counts: Counts,
    settings: PolicySettings,
) -> LossParts:
    """The clipped surrogate, plus the KL divergence from the reference, minus the entropy, where they have a weight.

    The surrogate is decoupled where the settings say so: the log-probabilities of the version that generated then only
    weigh the tokens.

    Args:
        outputs: of the model in training; ``logprobs``, and ``entropy`` where it has a weight.
        generated: float [m, Lr], log-probabilities of the version that generated.
        proximal: the same of the version before the step's first update; None where that is the one in training.
        advantages: [m, Lr], or [m, 1] for one of each response.
        reference: the reference's log-probabilities; None where the divergence is no part of the loss.
        mask: bool [m, Lr].
        counts: of the minibatch.
        settings: of the algorithm.
    """
    logprobs, old = outputs.logprobs, generated
    metrics: dict[str, torch.Tensor] = {}
    weights = None
    if settings.decoupled:
        old = logprobs.detach() if proximal is None else proximal
        weights, capped = behaviour_weights(old, generated, cap=settings.weight_cap, beyond=settings.weight_beyond_cap)
        metrics |= {
            "behaviour_weight": mean_over(weights, mask, counts, "token-mean"),
            "behaviour_capped": mean_over(capped.to(old.dtype), mask, counts, "token-mean"),
            "behaviour_change": mean_over(kl_estimate(generated, old, "k1"), mask, counts, "token-mean"),
        }
    per_token, clipped = clipped_policy_loss(logprobs, old, advantages, low=settings.clip, high=settings.clip_upper)
    if weights is not None:
        per_token = weights * per_token
    loss = mean_over(per_token, mask, counts, settings.aggregation)
    metrics |= {
        "policy_loss": loss.detach(),
        "clip_fraction": mean_over(clipped.to(old.dtype), mask, counts, "token-mean"),
        "policy_change": mean_over(kl_estimate(old, logprobs.detach(), "k1"), mask, counts, "token-mean"),
    }
    if reference is not None and settings.kl_coefficient != 0.0:
        penalty = kl_estimate(logprobs, reference, settings.kl_estimator)
        kl_loss = mean_over(penalty, mask, counts, settings.aggregation)
        loss = loss + settings.kl_coefficient * kl_loss
        metrics["kl_loss"] = kl_loss.detach()
    if settings.entropy_coefficient != 0.0:
        entropy = mean_over(outputs.entropy, mask, counts, settings.aggregation)
        loss = loss - settings.entropy_coefficient * entropy
        metrics["entropy"] = entropy.detach()
    return LossParts(loss=loss, metrics=metrics)


def rollout_metrics(
    scores: torch.Tensor,
    generated: torch.Tensor,
    reference: torch.Tensor,
    mask: torch.Tensor,
    total: Callable[[torch.Tensor], torch.Tensor],
) -> dict[str, torch.Tensor]:
    """Mean reward and length of the whole batch's responses, and the KL divergence of their policy from the reference.

    Args:
        scores: one of each response of this rank.
        generated, reference: float [rows, Lr], log-probabilities.
        mask: bool [rows, Lr].
        total: sums over the data-parallel ranks.
    """
    sequences = total(scores.new_tensor(float(scores.numel())))
    return {
        "reward": total(scores.sum()) / sequences,
        "response_tokens": total(mask.sum()) / sequences,
        "kl": token_mean(kl_estimate(generated, reference, "k3"), mask, total),
    }
