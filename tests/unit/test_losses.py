"""Building blocks of policy-gradient losses: drawn by hand, and invariant to how a batch is split."""

import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.errors import SettingsError
from rpeg_core.runtime.losses import (
    clipped_policy_loss,
    clipped_value_loss,
    gae_advantages,
    group_advantages,
    kl_estimate,
    masked,
    mean_over,
    scores_at_end,
    token_mean,
    whiten,
)
from rpeg_core.runtime.semantics import Counts
from rpeg_core.testing.semantics import on_ranks

torch = pytest.importorskip("torch", reason="the losses are functions of torch tensors")


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def close(found, expected):
    torch.testing.assert_close(found, tensor(expected) if isinstance(expected, list | float) else expected)


MASK = torch.tensor([[True, True, True], [True, False, False]])


def test_what_is_masked_does_not_count_even_when_it_is_not_finite():
    close(masked(tensor([[1, 2, 3], [4, math.nan, math.inf]]), MASK), [[1.0, 2.0, 3.0], [4.0, 0.0, 0.0]])


def test_means_of_per_token_losses():
    losses, counts = tensor([[1, 2, 3], [6, 99, 99]]), Counts(rows=2, tokens=4)
    close(mean_over(losses, MASK, counts, "token-mean"), 12 / 4)
    close(mean_over(losses, MASK, counts, "sequence-mean"), (2 + 6) / 2)
    close(mean_over(losses, MASK, counts, "length-normalised"), (6 / 3 + 6 / 3) / 2)
    with pytest.raises(SettingsError, match="aggregation is 'sum'"):
        mean_over(losses, MASK, counts, "sum")


def test_scores_are_the_rewards_of_last_tokens():
    close(scores_at_end(tensor([5, 7]), MASK), [[0.0, 0.0, 5.0], [7.0, 0.0, 0.0]])


def test_scores_of_empty_responses_vanish():
    close(scores_at_end(tensor([5]), torch.zeros(1, 2, dtype=torch.bool)), [[0.0, 0.0]])


def test_gae_by_hand():
    # gamma 0.5, lambda 0.5; last token: delta = 2 - 4 = -2; middle: 0 + 0.5*4 - 2 = 0, A = 0 + 0.25*-2 = -0.5;
    # first: 1 + 0.5*2 - 1 = 1, A = 1 + 0.25*-0.5 = 0.875. One token: 3 - 1 = 2.
    rewards, values = tensor([[1, 0, 2], [3, 50, 50]]), tensor([[1, 2, 4], [1, 60, 60]])
    advantages, returns = gae_advantages(rewards, values, MASK, gamma=0.5, gae_lambda=0.5)
    close(advantages, [[0.875, -0.5, -2.0], [2.0, 0.0, 0.0]])
    close(returns, [[1.875, 1.5, 2.0], [3.0, 0.0, 0.0]])


def test_gae_without_discount_at_lambda_1_is_the_reward_to_go():
    rewards, values = tensor([[1, 2, 4]]), tensor([[10, 20, 30]])
    mask = torch.ones(1, 3, dtype=torch.bool)
    _, returns = gae_advantages(rewards, values, mask, gamma=1.0, gae_lambda=1.0)
    close(returns, [[7.0, 6.0, 4.0]])


def test_group_advantages_by_hand():
    scores = tensor([1, 3, 2, 2])
    close(group_advantages(scores, 2, standardise=False), [-1.0, 1.0, 0.0, 0.0])
    root = math.sqrt(2)  # of the sample variance of 1 and 3
    close(group_advantages(scores, 2, standardise=True), [-1 / (root + 1e-6), 1 / (root + 1e-6), 0.0, 0.0])


def test_whitened_tokens_have_mean_0_and_variance_1():
    found = whiten(tensor([[1, 2, 3], [6, 99, 99]]), MASK, lambda x: x)
    kept = found[MASK]
    close(kept.mean(), 0.0)
    close(kept.var(), 1.0)
    close(found[~MASK], [0.0, 0.0])


def test_kl_estimators():
    ours, reference = tensor([-1.0]), tensor([-1.5])
    close(kl_estimate(ours, reference, "k1"), [0.5])
    close(kl_estimate(ours, reference, "k2"), [0.125])
    close(kl_estimate(ours, reference, "k3"), [math.exp(-0.5) - 1 + 0.5])
    with pytest.raises(SettingsError, match="the KL estimator is 'k4'"):
        kl_estimate(ours, reference, "k4")


def test_k1_and_k3_estimate_the_divergence():
    policy, reference = tensor([0.5, 0.3, 0.2]), tensor([0.2, 0.2, 0.6])
    exact = (policy * (policy / reference).log()).sum()
    for estimator in ("k1", "k3"):
        close((policy * kl_estimate(policy.log(), reference.log(), estimator)).sum(), exact)


def test_the_clipped_surrogate_by_hand():
    # ratios 1.5 and 0.5 with both signs of the advantage
    log_ratio = tensor([math.log(1.5), math.log(1.5), math.log(0.5), math.log(0.5)])
    advantages = tensor([2, -2, 2, -2])
    loss, clipped = clipped_policy_loss(log_ratio, torch.zeros(4), advantages, low=0.2, high=0.2)
    close(loss, [-2.4, 3.0, -1.0, 1.6])
    assert clipped.tolist() == [True, False, False, True]
    loss, _ = clipped_policy_loss(log_ratio, torch.zeros(4), advantages, low=0.2, high=0.3)
    close(loss, [-2.6, 3.0, -1.0, 1.6])


def test_ratios_too_large_to_write_down_stay_finite():
    loss, _ = clipped_policy_loss(tensor([1e4]), tensor([0]), tensor([-1]), low=0.2, high=0.2)
    assert torch.isfinite(loss).all()
    assert torch.isfinite(kl_estimate(tensor([-1e4]), tensor([0]), "k3")).all()


def test_the_value_loss_by_hand():
    values, old, returns = tensor([3, 3, 1]), tensor([1, 1, 1]), tensor([4, 0, 0])
    loss, clipped = clipped_value_loss(values, old, returns, clip=0.5)
    close(loss, [3.125, 4.5, 0.5])  # (1.5 - 4)^2 / 2; (3 - 0)^2 / 2; (1 - 0)^2 / 2
    assert clipped.tolist() == [True, False, False]
    loss, clipped = clipped_value_loss(values, old, returns, clip=None)
    close(loss, [0.5, 4.5, 0.5])
    assert not clipped.any()


@st.composite
def batches(draw):
    """Per-token numbers and a mask of whole prefixes, some of them empty."""
    rows, length = draw(st.integers(1, 6)), draw(st.integers(1, 5))
    seed = draw(st.integers(0, 2**31))
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(0, length + 1, (rows,), generator=generator)
    mask = torch.arange(length)[None] < lengths[:, None]
    return torch.randn(rows, length, generator=generator, dtype=torch.float64), mask


@given(batches(), st.sampled_from(["token-mean", "sequence-mean", "length-normalised"]), st.data())
@settings(deadline=None)
def test_means_are_sums_over_any_split(batch, aggregation, data):
    values, mask = batch
    counts = Counts(rows=len(mask), tokens=int(mask.sum()))
    cut = data.draw(st.integers(0, len(mask)))
    parts = [mean_over(values[s], mask[s], counts, aggregation) for s in (slice(cut), slice(cut, None))]
    close(sum(parts), mean_over(values, mask, counts, aggregation))


@given(batches(), st.data())
@settings(deadline=None)
def test_whitening_does_not_depend_on_the_ranks(batch, data):
    values, mask = batch
    cut = data.draw(st.integers(0, len(mask)))
    ranks = [slice(cut), slice(cut, None)]

    found = torch.cat(on_ranks(2, lambda rank, total: whiten(values[ranks[rank]], mask[ranks[rank]], total)))
    close(found, whiten(values, mask, lambda x: x))
    means = on_ranks(2, lambda rank, total: token_mean(values[ranks[rank]], mask[ranks[rank]], total))
    close(means[0], means[1])
    close(means[0], token_mean(values, mask, lambda x: x))


@given(batches(), st.floats(0, 1), st.floats(0, 1))
@settings(deadline=None)
def test_gae_is_the_sum_of_discounted_differences(batch, gamma, gae_lambda):
    values, mask = batch
    rewards = values.flip(1)
    found, _ = gae_advantages(rewards, values, mask, gamma=gamma, gae_lambda=gae_lambda)
    for row in range(len(mask)):
        length = int(mask[row].sum())
        v = [*values[row, :length].tolist(), 0.0]
        delta = [float(rewards[row, t]) + gamma * v[t + 1] - v[t] for t in range(length)]
        expected = [sum((gamma * gae_lambda) ** (k - t) * delta[k] for k in range(t, length)) for t in range(length)]
        close(found[row, :length], tensor(expected))
