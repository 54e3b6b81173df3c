"""What DPO computes at run time (Rafailov et al., arXiv:2305.18290, eq. 7; label smoothing: Mitchell, cDPO).

Rows come in pairs: row 2i is the chosen, row 2i + 1 the rejected response of pair i.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from rpeg_core.runtime.losses import masked
from rpeg_core.runtime.semantics import Content, Counts, LossParts, ModelOutputs, Prepared, Recipe
from rpeg_plugin_dpo.settings import Settings

if TYPE_CHECKING:
    import torch

    from rpeg_core.spec.workload import Workload

__all__ = ["SEMANTICS", "DpoSemantics"]


class DpoSemantics:
    """DPO, see :class:`rpeg_core.runtime.semantics.Semantics`."""

    contents: Mapping[str, Content] = {
        "pairs": Content.SEQUENCES,
        "actor_logprobs": Content.LOGPROBS,
        "reference_logprobs": Content.LOGPROBS,
    }

    def recipe(self, operator: str, settings: Settings) -> Recipe:
        """Both responses of a pair enter the loss together."""
        return settings.recipe(rows_together=2)

    def prepare(
        self,
        operator: str,
        rows: Mapping[str, torch.Tensor],
        mask: torch.Tensor,
        total: Callable[[torch.Tensor], torch.Tensor],
        settings: Settings,
        workload: Workload,
    ) -> Prepared:
        """The reference's log-probability of each response, and how far the policy has moved from it."""
        policy = masked(rows["actor_logprobs"], mask).sum(1)
        reference = masked(rows["reference_logprobs"], mask).sum(1)
        sequences = total(policy.new_tensor(float(policy.numel())))
        if settings.reference_free:
            reference = reference.new_zeros(reference.shape)
        return Prepared(
            rows={"reference_score": reference},
            metrics={
                "response_tokens": total(mask.sum()) / sequences,
                "log_ratio": total((policy - reference).sum()) / sequences,
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
        """-log sigmoid(margin), smoothed; the margin is the difference of the implicit rewards of a pair."""
        pairs = counts.rows / 2
        implicit = settings.beta * (masked(outputs.logprobs, mask).sum(1) - rows["reference_score"])
        chosen, rejected = implicit[0::2], implicit[1::2]
        margin = chosen - rejected
        zero = margin.new_zeros(margin.shape)
        # log(exp(-x) + exp(0)) is -log sigmoid(x), without overflow.
        right, wrong = (-margin).logaddexp(zero), margin.logaddexp(zero)
        loss = ((1 - settings.label_smoothing) * right + settings.label_smoothing * wrong).sum() / pairs
        chosen, rejected, margin = chosen.detach(), rejected.detach(), margin.detach()
        return LossParts(
            loss=loss,
            metrics={
                "preference_loss": loss.detach(),
                "accuracy": (margin > 0).to(margin.dtype).sum() / pairs,
                "margin": margin.sum() / pairs,
                "chosen_reward": chosen.sum() / pairs,
                "rejected_reward": rejected.sum() / pairs,
            },
        )


SEMANTICS = DpoSemantics()
