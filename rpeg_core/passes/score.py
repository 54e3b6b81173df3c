"""Score: tokens per second, memory penalty, objectives (paper, IV-E and A-I)."""

from __future__ import annotations

import math

import attrs

from rpeg_core.errors import ExperimentError

__all__ = [
    "OOM_STEEPNESS",
    "RUNTIME_RESERVE",
    "THROUGHPUT_FLOOR_FACTOR",
    "Evaluation",
    "Objective",
    "memory_penalty",
    "usable_bytes",
]

RUNTIME_RESERVE = 0.10
"""epsilon_rt: share of GPU memory kept for the runtime and fragmentation (paper, IV-E)."""

OOM_STEEPNESS = 40.0
"""beta_oom (paper, A-I1)."""

THROUGHPUT_FLOOR_FACTOR = 1e-12
"""lambda_floor: what a plan below the throughput floor is worth (paper, IV-E)."""


@attrs.frozen(kw_only=True)
class Evaluation:
    """What one configuration is worth under the model.

    Attributes:
        makespan_s: MS of the unrolled horizon, seconds.
        tokens_per_s: K * B * R * (Lp + Lr) / MS.
        peak_ratio: max over GPUs of peak(d) / M_eff; feasible iff <= 1.
        utilization: mean over all GPUs of the cluster of reserved time / MS.
        used_gpus: GPUs that at least one operator is placed on.
    """

    makespan_s: float
    tokens_per_s: float
    peak_ratio: float
    utilization: float
    used_gpus: int

    @property
    def feasible(self) -> bool:
        return self.peak_ratio <= 1.0


def usable_bytes(memory_bytes: float) -> float:
    """M_eff = (1 - epsilon_rt) * M_GPU."""
    return (1.0 - RUNTIME_RESERVE) * memory_bytes


def memory_penalty(peak_ratio: float) -> float:
    """exp(-beta_oom * max(0, peak / M_eff - 1))."""
    return math.exp(-OOM_STEEPNESS * max(0.0, peak_ratio - 1.0))


@attrs.frozen(kw_only=True)
class Objective:
    """What search maximises.

    Attributes:
        kind: ``throughput`` (tokens/s), ``throughput_x_utilization`` (Score_eff of the paper) or
            ``cost_per_token`` (tokens/s per GPU that the plan uses **[choice]**).
        max_throughput_loss: zeta, the share of the best throughput that the last two may give up.

    Raises:
        ExperimentError: unknown kind, or a loss outside [0, 1).
    """

    KINDS = ("throughput", "throughput_x_utilization", "cost_per_token")

    kind: str = "throughput"
    max_throughput_loss: float = 0.10

    def __attrs_post_init__(self) -> None:
        if self.kind not in self.KINDS:
            raise ExperimentError(f"objective.kind is {self.kind!r}", facts=[f"allowed: {', '.join(self.KINDS)}"])
        if not 0 <= self.max_throughput_loss < 1:
            raise ExperimentError(
                f"objective.max_throughput_loss is {self.max_throughput_loss!r}",
                facts=["allowed: a number in [0, 1)"],
            )

    def value(self, evaluation: Evaluation, best_tokens_per_s: float) -> float:
        """The value to maximise, without the memory penalty.

        Args:
            evaluation: of one configuration.
            best_tokens_per_s: highest throughput of a feasible configuration so far.
        """
        if self.kind == "throughput":
            return evaluation.tokens_per_s
        if evaluation.tokens_per_s < (1.0 - self.max_throughput_loss) * best_tokens_per_s:
            return evaluation.tokens_per_s * THROUGHPUT_FLOOR_FACTOR
        if self.kind == "throughput_x_utilization":
            return evaluation.tokens_per_s * evaluation.utilization
        return evaluation.tokens_per_s / evaluation.used_gpus

    def penalized(self, evaluation: Evaluation, best_tokens_per_s: float) -> float:
        """The value times the memory penalty (equation 5)."""
        return self.value(evaluation, best_tokens_per_s) * memory_penalty(evaluation.peak_ratio)
