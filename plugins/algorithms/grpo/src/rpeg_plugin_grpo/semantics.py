"""What GRPO computes at run time (Shao et al., DeepSeekMath, arXiv:2402.03300, section 4.1).

The advantage of every token of a response is the response's reward relative to those of its prompt's other rollouts;
the KL divergence from the reference is part of the loss.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rpeg_core.runtime.losses import group_advantages
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
        groups = total(scores.new_tensor(float(len(spread))))
        metrics = rollout_metrics(scores, rows["actor_logprobs"], rows["reference_logprobs"], mask, total)
        return Prepared(
            rows={"advantages": advantages},
            metrics=metrics | {"reward_spread": total(spread.sum()) / groups},
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
        """The policy's loss; every token of a response has the response's advantage."""
        return policy_loss(
            outputs,
            generated=rows["actor_logprobs"],
            proximal=rows.get(PROXIMAL_LOGPROBS),
            advantages=rows["advantages"][:, None],
            reference=rows["reference_logprobs"],
            mask=mask,
            counts=counts,
            settings=settings,
        )


SEMANTICS = GrpoSemantics()
