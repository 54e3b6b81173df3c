"""Settings of ``grpo``: what shapes the graph, then what a run computes.

Hyperparameters with the mark (paper) are the ones of its appendix B for PPO; where it names none, the defaults are
those of DeepSeekMath (arXiv:2402.03300) and of published implementations (verl, TRL). Plans do not depend on them.
"""

from __future__ import annotations

import attrs

from rpeg_core import setting
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
        maximum=86400.0,  # a day
    )
    data_bytes_per_element: int | None = setting(
        None,
        help="Width of token ids, log-probabilities and rewards; null is workload.bytes_per_element, as in the paper's "
        "table VIII. Backends that move them as int32 and float32 want 4.",
        unit="B",
        allowed=(2, 4),
    )

    standardise_advantages: bool = setting(
        True, help="Divide by the standard deviation of the group's rewards (DeepSeekMath); Dr. GRPO does not."
    )
