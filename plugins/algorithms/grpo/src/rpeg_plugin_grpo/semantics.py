"""What GRPO computes at run time (Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1).

The advantage of every token of a response is the response's reward relative to those of its prompt's other rollouts;
the KL divergence from the reference is part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rpeg_core.runtime.losses import (
    behaviour_weights,
    clipped_policy_loss,
    group_advantages,
    kl_estimate,
    mean_over,
    token_mean,
)
from rpeg_core.runtime.semantics import (
    PROXIMAL_LOGPROBS,
    Content,
    Counts,
    LossParts,
    ModelOutputs,
    Prepared,
    Recipe,
)
from rpeg_plugin_grpo.settings import Settings

if TYPE_CHECKING:
    import torch

    from rpeg_core.spec.workload import Workload

__all__ = ["SEMANTICS", "GrpoSemantics"]


class GrpoSemantics:
    """GRPO, see :class:`rpeg_core.runtime.semantics.Semantics`."""

    contents: Mapping[str, Content] = {
        "prompts": Content.PROMPTS,
        "completions": Content.SEQUENCES,
        "actor_logprobs": Content.LOGPROBS,
        "reference_logprobs": Content.LOGPROBS,
        "rewards": Content.SCORES,
    }

    def recipe(self, operator: str, settings: Settings) -> Recipe:
        """Entropy and the proximal policy only where they count."""
        return settings.recipe(entropy=settings.entropy_coefficient != 0.0, proximal=settings.reads_proximal)

    def prepare(
        self,
        operator: str,
        rows: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        total: Callable[[torch.Tensor], torch.Tensor],
        settings: Settings,
        workload: Workload,
    ) -> Prepared:
        """The advantage of each row; reward, its spread in the groups, length and KL of the whole batch."""
        scores, group = rows["rewards"], workload.rollouts_per_prompt
        advantages = group_advantages(scores, group, standardise=settings.standardise_advantages)
        spread = scores.reshape(-1, group).std(1)
        sequences = total(scores.new_tensor(float(scores.numel())))
        kl = kl_estimate(rows["actor_logprobs"], rows["reference_logprobs"], "k3")
        return Prepared(
            rows={"advantages": advantages},
            metrics={
                "reward": total(scores.sum()) / sequences,
                "reward_spread": total(spread.sum()) / (sequences / group),
                "response_tokens": total(mask.sum()) / sequences,
                "kl": token_mean(kl, mask, total),
            },
        )

    def loss(
        self,
        operator: str,
        outputs: ModelOutputs,
        rows: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        counts: Counts,
        settings: Settings,
    ) -> LossParts:
        """The clipped surrogate, plus the KL divergence, minus the entropy where it has a weight.

        The surrogate is decoupled where the settings say so: ``actor_logprobs`` are those of the version that
        generated, which then only weigh the tokens.
        """
        logprobs, old = outputs.logprobs, rows["actor_logprobs"]
        correction: dict[str, torch.Tensor] = {}
        weights = None
        if settings.decoupled:
            behaviour, old = old, rows.get(PROXIMAL_LOGPROBS, logprobs.detach())
            weights, capped = behaviour_weights(
                old, behaviour, cap=settings.weight_cap, beyond=settings.weight_beyond_cap
            )
            correction = {
                "behaviour_weight": mean_over(weights, mask, counts, "token-mean"),
                "behaviour_capped": mean_over(capped.to(old.dtype), mask, counts, "token-mean"),
                "behaviour_change": mean_over(kl_estimate(behaviour, old, "k1"), mask, counts, "token-mean"),
            }
        per_token, clipped = clipped_policy_loss(
            logprobs, old, rows["advantages"][:, None], low=settings.clip, high=settings.clip_upper
        )
        if weights is not None:
            per_token = weights * per_token
        loss = mean_over(per_token, mask, counts, settings.aggregation)
        metrics = correction | {
            "policy_loss": loss.detach(),
            "clip_fraction": mean_over(clipped.to(old.dtype), mask, counts, "token-mean"),
            "policy_change": mean_over(kl_estimate(old, logprobs.detach(), "k1"), mask, counts, "token-mean"),
        }
        if settings.kl_coefficient != 0.0:
            penalty = kl_estimate(logprobs, rows["reference_logprobs"], settings.kl_estimator)
            kl_loss = mean_over(penalty, mask, counts, settings.aggregation)
            loss = loss + settings.kl_coefficient * kl_loss
            metrics["kl_loss"] = kl_loss.detach()
        if settings.entropy_coefficient != 0.0:
            entropy = mean_over(outputs.entropy, mask, counts, settings.aggregation)
            loss = loss - settings.entropy_coefficient * entropy
            metrics["entropy"] = entropy.detach()
        return LossParts(loss=loss, metrics=metrics)


SEMANTICS = GrpoSemantics()
