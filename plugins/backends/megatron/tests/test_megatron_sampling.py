"""Sampling: distribution, filters against transformers' own, log-probabilities, and keyed randomness."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from rpeg_plugin_megatron.sampling import choose, filter_logits, uniforms
from rpeg_plugin_megatron.settings import Sampling
from transformers import TemperatureLogitsWarper, TopKLogitsWarper, TopPLogitsWarper

from rpeg_core.errors import SettingsError


def logits_of(n: int, vocab: int, seed: int = 0) -> torch.Tensor:
    return 3.0 * torch.randn(n, vocab, generator=torch.Generator().manual_seed(seed))


def chi_square(sampling: Sampling, expected: torch.Tensor, logits: torch.Tensor, n: int = 40_000) -> tuple[float, int]:
    """Pearson's statistic of ``n`` samples of one row against ``expected`` [V], and its degrees of freedom."""
    uniform = torch.from_numpy(uniforms(7, 3, range(n), 1)[:, 0])
    tokens, _ = choose(logits.expand(n, -1), uniform, sampling)
    counts = torch.bincount(tokens, minlength=expected.numel()).double()
    possible = expected > 0
    assert counts[~possible].sum() == 0
    means = n * expected[possible].double()
    return float(((counts[possible] - means) ** 2 / means).sum()), int(possible.sum()) - 1


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(),
        Sampling(temperature=0.7),
        Sampling(temperature=1.5, top_k=5),
        Sampling(top_p=0.8),
        Sampling(temperature=1.3, top_k=6, top_p=0.9),
    ],
)
def test_samples_follow_the_distribution_that_transformers_filters(sampling: Sampling) -> None:
    logits = logits_of(1, 12) / 3
    scores = TemperatureLogitsWarper(sampling.temperature)(None, logits)
    if sampling.top_k:
        scores = TopKLogitsWarper(sampling.top_k)(None, scores)
    if sampling.top_p < 1:
        scores = TopPLogitsWarper(sampling.top_p)(None, scores)
    statistic, degrees = chi_square(sampling, torch.softmax(scores, dim=1)[0], logits)
    assert degrees >= 3
    # Wilson-Hilferty: the cube root of chi-square / degrees is nearly normal; 3.7 is a chance of 1 in 10,000.
    spread = 2 / (9 * degrees)
    assert ((statistic / degrees) ** (1 / 3) - (1 - spread)) / math.sqrt(spread) < 3.7


@pytest.mark.parametrize("top_k", [0, 1, 3, 50])
@pytest.mark.parametrize("top_p", [0.05, 0.5, 0.95, 1.0])
def test_filters_keep_the_tokens_that_transformers_keeps(top_k: int, top_p: float) -> None:
    logits = logits_of(200, 40, seed=1)
    expected = logits
    if top_k:
        expected = TopKLogitsWarper(min(top_k, 40))(None, expected)
    if top_p < 1:
        expected = TopPLogitsWarper(top_p)(None, expected)
    assert torch.equal(filter_logits(logits, Sampling(top_k=top_k, top_p=top_p)), expected)


def test_greedy_takes_the_most_likely_token_at_temperature_one() -> None:
    logits = logits_of(50, 30)
    tokens, logprobs = choose(logits, torch.zeros(50, dtype=torch.float64), Sampling(temperature=0.0, top_k=3))
    assert torch.equal(tokens, logits.argmax(dim=1))
    torch.testing.assert_close(logprobs, torch.log_softmax(logits, dim=1).max(dim=1).values)


def test_logprobs_are_tempered_but_not_filtered() -> None:
    logits = logits_of(50, 30)
    uniform = torch.from_numpy(uniforms(0, 0, range(50), 1)[:, 0])
    tokens, logprobs = choose(logits, uniform, Sampling(temperature=0.5, top_k=2, top_p=0.9))
    expected = torch.log_softmax(logits / 0.5, dim=1).gather(1, tokens[:, None])[:, 0]
    torch.testing.assert_close(logprobs, expected)


@pytest.mark.parametrize("uniform", [0.0, math.nextafter(1.0, 0.0)])
def test_the_ends_of_the_unit_interval_give_possible_tokens(uniform: float) -> None:
    logits = torch.tensor([[-math.inf, 1.0, 2.0, -math.inf]]).expand(3, -1)
    tokens, _ = choose(logits, torch.full((3,), uniform, dtype=torch.float64), Sampling())
    assert tokens.tolist() == [1 if uniform == 0.0 else 2] * 3


def test_randomness_is_keyed_by_seed_step_and_row_alone() -> None:
    whole = uniforms(5, 2, range(100), 8)
    assert np.array_equal(uniforms(5, 2, range(40, 60), 8), whole[40:60])
    assert np.array_equal(uniforms(5, 2, [99, 3], 5), whole[[99, 3], :5])
    others = [uniforms(6, 2, range(100), 8), uniforms(5, 3, range(100), 8), uniforms(5, 2, range(100, 200), 8)]
    assert all(not np.isin(other, whole).any() for other in others)
    assert ((whole >= 0) & (whole < 1)).all()
    assert len(np.unique(whole)) == whole.size


@pytest.mark.parametrize(
    ("values", "allowed"),
    [
        ({"temperature": -1.0}, "finite number, at least 0"),
        ({"temperature": math.inf}, "finite number, at least 0"),
        ({"top_k": -2}, "at least 0"),
        ({"top_p": 0.0}, r"\(0, 1\]"),
        ({"top_p": 1.5}, r"\(0, 1\]"),
    ],
)
def test_values_out_of_range_are_refused(values: dict[str, float], allowed: str) -> None:
    with pytest.raises(SettingsError, match=allowed):
        Sampling(**values)
