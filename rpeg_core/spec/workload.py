"""What one RL step processes: batch, lengths, length quantiles, precision."""

from __future__ import annotations

from collections.abc import Sequence

import attrs

from rpeg_core.errors import ExperimentError

__all__ = ["LengthPhase", "LengthQuantile", "Workload"]


MOST = 10**9
"""Larger workloads are mistakes; their divisors would take too long to list."""


@attrs.frozen
class LengthQuantile:
    """``fraction`` of all responses are finished after ``tokens`` generated tokens (paper, Def. A.9)."""

    fraction: float
    tokens: int


@attrs.frozen(kw_only=True)
class LengthPhase:
    """The decode steps between two quantiles.

    Attributes:
        index: 0-based position.
        first_token, last_token: decode steps ``first_token .. last_token - 1`` (response tokens).
        alive: fraction of the sequences that are decoded in this phase, ``1 - f_{q-1}``.
        finishing: fraction that finishes at the end of the phase, ``f_q - f_{q-1}``.
    """

    index: int
    first_token: int
    last_token: int
    alive: float
    finishing: float

    @property
    def tokens(self) -> int:
        """Number of decode steps."""
        return self.last_token - self.first_token


@attrs.frozen(kw_only=True)
class Workload:
    """One RL step's work (paper, Table I).

    Attributes:
        prompts: B, prompts per step.
        rollouts_per_prompt: R.
        prompt_tokens: Lp, mean prompt length.
        response_tokens: Lr; with ``response_lengths`` the length at which every response is finished (t_Q = Lr).
        response_lengths: (f_q, t_q) with f_Q = 1 and t_Q = Lr; empty means one phase.
        bytes_per_element: s_b, 2 for BF16.
        cache_bytes_per_element: of keys and values in a generation's cache; None is s_b.
        shared_prefix: prefill each prompt once for all its rollouts **[choice]** (model.md, section 3).

    Raises:
        ExperimentError: a value is out of range.
    """

    prompts: int
    rollouts_per_prompt: int = 1
    prompt_tokens: int
    response_tokens: int
    response_lengths: tuple[LengthQuantile, ...] = ()
    bytes_per_element: int = 2
    cache_bytes_per_element: int | None = None
    shared_prefix: bool = False

    def __attrs_post_init__(self) -> None:
        for name in ("prompts", "rollouts_per_prompt", "prompt_tokens", "response_tokens"):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise ExperimentError(f"workload.{name} is {value!r}", facts=["allowed: an integer of at least 1"])
            if value > MOST:
                raise ExperimentError(f"workload.{name} is {value!r}", facts=[f"allowed: at most {MOST:,}"])
        if self.bytes_per_element not in (2, 4):
            raise ExperimentError(
                f"workload.bytes_per_element is {self.bytes_per_element!r}",
                facts=["allowed: 2 (BF16 or FP16) or 4 (FP32)"],
            )
        if self.cache_bytes_per_element not in (None, 1, 2, 4):
            raise ExperimentError(
                f"workload.cache_bytes_per_element is {self.cache_bytes_per_element!r}",
                facts=["allowed: 1 (FP8 or INT8), 2 (BF16 or FP16) or 4 (FP32)"],
            )
        if self.response_lengths:
            _check_quantiles(self.response_lengths, self.response_tokens)

    @property
    def sequences(self) -> int:
        """B * R."""
        return self.prompts * self.rollouts_per_prompt

    @property
    def sequence_tokens(self) -> int:
        """l = Lp + Lr."""
        return self.prompt_tokens + self.response_tokens

    @property
    def tokens_per_step(self) -> int:
        """B * R * (Lp + Lr), the numerator of the score for one step."""
        return self.sequences * self.sequence_tokens

    @property
    def phases(self) -> tuple[LengthPhase, ...]:
        """The decode phases; one phase over all tokens when no quantiles are given."""
        quantiles = self.response_lengths or (LengthQuantile(1.0, self.response_tokens),)
        phases, done, start = [], 0.0, 0
        for index, quantile in enumerate(quantiles):
            phases.append(
                LengthPhase(
                    index=index,
                    first_token=start,
                    last_token=quantile.tokens,
                    alive=1.0 - done,
                    finishing=quantile.fraction - done,
                )
            )
            done, start = quantile.fraction, quantile.tokens
        return tuple(phases)


def _check_quantiles(quantiles: Sequence[LengthQuantile], response_tokens: int) -> None:
    where = "workload.response_lengths"
    fraction, tokens = 0.0, 0
    for i, quantile in enumerate(quantiles):
        if not fraction < quantile.fraction <= 1.0:
            raise ExperimentError(
                f"{where}[{i}].fraction is {quantile.fraction!r}",
                facts=["allowed: strictly increasing values in (0, 1]"],
            )
        if not isinstance(quantile.tokens, int) or quantile.tokens <= tokens:
            raise ExperimentError(
                f"{where}[{i}].tokens is {quantile.tokens!r}",
                facts=["allowed: strictly increasing integers of at least 1"],
            )
        fraction, tokens = quantile.fraction, quantile.tokens
    if fraction != 1.0:
        raise ExperimentError(f"{where} ends at fraction {fraction!r}", facts=["allowed: the last fraction is 1.0"])
    if tokens != response_tokens:
        raise ExperimentError(
            f"{where} ends at {tokens} tokens, workload.response_tokens is {response_tokens}",
            facts=["allowed: both equal, all responses are finished at response_tokens"],
            hint=f"set workload.response_tokens to {tokens}",
        )
