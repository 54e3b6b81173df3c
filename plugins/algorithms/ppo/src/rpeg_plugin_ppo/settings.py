"""Settings of ``ppo``: what shapes the graph, then what a run computes.

Hyperparameters with the mark (paper) are the ones of its appendix B; where it names none, the defaults are those of
published implementations (TRL's PPOConfig, verl, OpenRLHF). Plans do not depend on them.
"""

from __future__ import annotations

from typing import Literal

import attrs

from rpeg_core import setting
from rpeg_core.runtime.semantics import PolicySettings

__all__ = ["Settings"]


@attrs.frozen(kw_only=True)
class Settings(PolicySettings):
    """Settings of ``ppo``."""

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
        help="Width of token ids, log-probabilities, values and rewards; null is workload.bytes_per_element, as in "
        "the paper's table VIII. Backends that move them as int32 and float32 want 4.",
        unit="B",
        allowed=(2, 4),
    )

    critic_learning_rate: float = setting(1e-6, help="Of a critic with its own model (paper).", minimum=0.0)
    gamma: float = setting(1.0, help="Discount per token (paper).", minimum=0.0, maximum=1.0)
    gae_lambda: float = setting(0.95, help="Lambda of generalised advantage estimation (paper).", minimum=0, maximum=1)
    whiten_advantages: bool = setting(
        True, help="Advantages get mean 0 and variance 1 over the whole batch (TRL, verl, OpenRLHF)."
    )
    kl_penalty: Literal["loss", "reward"] = setting(
        "loss",
        help="Where the KL divergence counts: in the actor's loss, or in the reward of each token (InstructGPT); "
        "training the critic then reads the actor's log-probabilities too.",
    )
    value_clip: float | None = setting(
        0.2, help="How far a value may move from the old one in the value loss (TRL); null for any.", minimum=0.0
    )
    value_coefficient: float = setting(
        0.1, help="Weight of the value loss where actor and critic share a model (TRL's vf_coef).", minimum=0.0
    )
