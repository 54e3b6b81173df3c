"""What PPO computes at run time (Schulman et al., arXiv:1707.06347; of language models: Ouyang et al., 2203.02155).

The score of a response is the reward of its last token. Advantages come from GAE on tokens. The KL divergence from the
reference is a penalty in the loss, or in the rewards. Actor and critic have an operator each, or share one: what a loss
consists of follows from the outputs that the model in training has.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rpeg_core.runtime.losses import (
    clipped_value_loss,
    gae_advantages,
    kl_estimate,
    masked,
    mean_over,
    scores_at_end,
    token_mean,
    whiten,
)
from rpeg_core.runtime.policy import policy_loss, rollout_metrics
from rpeg_core.runtime.semantics import (
    PROXIMAL_LOGPROBS,
    Content,
    Counts,
    LossParts,
    ModelOutputs,
    Prepared,
    Recipe,
)
from rpeg_plugin_ppo.settings import Settings

if TYPE_CHECKING:
    import torch

    from rpeg_core.spec.workload import Workload

__all__ = ["SEMANTICS", "PpoSemantics"]


class PpoSemantics:
    """PPO, see :class:`rpeg_core.runtime.semantics.Semantics`."""

    contents: Mapping[str, Content] = {
        "prompts": Content.PROMPTS,
        "completions": Content.SEQUENCES,
        "actor_logprobs": Content.LOGPROBS,
        "reference_logprobs": Content.LOGPROBS,
        "values": Content.VALUES,
        "rewards": Content.SCORES,
    }

    def recipe(self, operator: str, settings: Settings) -> Recipe:
        """A critic of its own has its own learning rate and neither entropy nor a policy."""
        if operator == "critic_training":
            return settings.recipe(learning_rate=settings.critic_learning_rate)
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
        """Advantages, whitened over the whole batch, and returns. The actor's part also measures reward and KL."""
        scores, values = rows["rewards"], rows["values"]
        rewards = scores_at_end(scores, mask)
        if settings.kl_penalty == "reward":
            penalty = kl_estimate(rows["actor_logprobs"], rows["reference_logprobs"], settings.kl_estimator)
            rewards = masked(rewards - settings.kl_coefficient * penalty, mask)
        advantages, returns = gae_advantages(
            rewards, values, mask, gamma=settings.gamma, gae_lambda=settings.gae_lambda
        )
        metrics = {"return": token_mean(returns, mask, total), "value": token_mean(values, mask, total)}
        if operator != "critic_training":
            metrics |= rollout_metrics(scores, rows["actor_logprobs"], rows["reference_logprobs"], mask, total)
        if settings.whiten_advantages:
            advantages = whiten(advantages, mask, total)
        return Prepared(rows={"advantages": advantages, "returns": returns}, metrics=metrics)

    def loss(
        self,
        operator: str,
        outputs: ModelOutputs,
        rows: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        counts: Counts,
        settings: Settings,
    ) -> LossParts:
        """The policy's loss where there are log-probabilities, the value's where there are values, or both."""
        parts = []
        if outputs.logprobs is not None:
            part = policy_loss(
                outputs,
                generated=rows["actor_logprobs"],
                proximal=rows.get(PROXIMAL_LOGPROBS),
                advantages=rows["advantages"],
                reference=rows["reference_logprobs"] if settings.kl_penalty == "loss" else None,
                mask=mask,
                counts=counts,
                settings=settings,
            )
            parts.append(part)
        if outputs.values is not None:
            weight = 1.0 if outputs.logprobs is None else settings.value_coefficient
            parts.append(_value_loss(outputs.values, rows, mask, counts, settings, weight))
        return LossParts(
            loss=sum(part.loss for part in parts),
            metrics={name: value for part in parts for name, value in part.metrics.items()},
        )


def _value_loss(
    values: torch.Tensor,
    rows: Mapping[str, torch.Tensor],
    mask: torch.Tensor,
    counts: Counts,
    settings: Settings,
    weight: float,
) -> LossParts:
    per_token, clipped = clipped_value_loss(values, rows["values"], rows["returns"], clip=settings.value_clip)
    loss = mean_over(per_token, mask, counts, settings.aggregation)
    return LossParts(
        loss=weight * loss,
        metrics={
            "value_loss": loss.detach(),
            "value_clip_fraction": mean_over(clipped.to(values.dtype), mask, counts, "token-mean").detach(),
        },
    )


SEMANTICS = PpoSemantics()
