"""Settings of ``grpo``: what shapes the graph, then what a run computes.

Hyperparameters with the mark (paper) are the ones of its appendix B for PPO; where it names none, the defaults are
those of DeepSeekMath (arXiv:2402.03300) and of published implementations (verl, TRL). Plans do not depend on them.
"""

from __future__ import annotations

import attrs

from rpeg_core import setting
from rpeg_core.runtime.losses import Aggregation, KlEstimator
from rpeg_core.runtime.semantics import PolicySettings

__all__ = ["Settings"]


@attrs.frozen(kw_only=True)
class Settings(PolicySettings):
    """Settings of ``grpo``."""

    explicit_rollout_edges: bool = setting(
        False,
        help="Charge the transfer of completions and actor log-probabilities from generation to training.",
    )
    reward_seconds_per_sample: float | None = setting(
        None,
        help="Time of the reward function for one response on one worker; needed without a reward model.",
        unit="s",
        minimum=0.0,
    )
    data_bytes_per_element: int | None = setting(
        None,
        help="Width of token ids, log-probabilities and rewards; null is workload.bytes_per_element, as in the paper's "
        "table VIII. Backends that move them as int32 and float32 want 4.",
        unit="B",
        allowed=(2, 4),
    )

    clip: float = setting(
        0.2, help="How far below 1 the probability ratio counts, and above unless clip_high (paper).", minimum=0.0
    )
    clip_high: float | None = setting(
        None, help="How far above 1 the ratio counts (clip-higher of DAPO, 0.28 there); null is clip.", minimum=0.0
    )
    standardise_advantages: bool = setting(
        True, help="Divide by the standard deviation of the group's rewards (DeepSeekMath); Dr. GRPO does not."
    )
    kl_coefficient: float = setting(0.01, help="Weight of the KL divergence from the reference (paper).", minimum=0.0)
    kl_estimator: KlEstimator = setting(
        "k3", help="Of the KL divergence from one sample (joschu.net/blog/kl-approx.html); k3 is DeepSeekMath's."
    )
    entropy_coefficient: float = setting(0.0, help="Weight of the policy's entropy in the loss (verl).", minimum=0.0)
    aggregation: Aggregation = setting(
        "token-mean", help="How per-token losses become one: see rpeg_core.runtime.losses.mean_over (verl, TRL)."
    )

    @property
    def clip_upper(self) -> float:
        """``clip_high``, or ``clip`` when it is null."""
        return self.clip if self.clip_high is None else self.clip_high
