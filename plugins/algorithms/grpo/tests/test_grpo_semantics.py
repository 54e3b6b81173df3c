"""GRPO at run time: drawn by hand, independent of the split into ranks and microbatches, and no matter for plans."""

import math

import attrs
import pytest
from rpeg_plugin_grpo import TEMPLATE
from rpeg_plugin_grpo.settings import Settings

from rpeg_core.planning.structures import Structure
from rpeg_core.runtime.semantics import Content, ModelOutputs, UpdateSettings, load_semantics
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.semantics import train_once
from rpeg_core.testing.toys import toy_model

torch = pytest.importorskip("torch", reason="semantics are functions of torch tensors")

SEMANTICS = load_semantics(TEMPLATE)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def drawn(prompts=8, rollouts=4, tokens=5, seed=0):
    """Random rows of a step, responses of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n = prompts * rollouts
    mask = torch.arange(tokens)[None] < torch.randint(1, tokens + 1, (n, 1), generator=generator)
    old = random(n, tokens) - 2
    rows = {
        "completions": torch.zeros(n, 3 + tokens, dtype=torch.int32),
        "actor_logprobs": old * mask,
        "reference_logprobs": (old + random(n, tokens) / 10) * mask,
        "rewards": random(n),
    }
    outputs = ModelOutputs(logprobs=old + random(n, tokens) / 5, entropy=random(n, tokens).abs())
    workload = Workload(prompts=prompts, rollouts_per_prompt=rollouts, prompt_tokens=3, response_tokens=tokens)
    return rows, mask, outputs, workload


def test_one_group_by_hand():
    # Rewards 0 and 2: mean 1, deviations -1 and 1. Ratios 1 and e^0.1 (token 1 of row 1), the others 1.
    rows = {
        "actor_logprobs": tensor([[-1, -1], [-1, 0]]),
        "reference_logprobs": tensor([[-1, -1], [-1.5, 0]]),
        "rewards": tensor([0, 2]),
    }
    mask = torch.tensor([[True, True], [True, False]])
    outputs = ModelOutputs(logprobs=tensor([[-1, -1], [-0.9, 0]]))
    workload = Workload(prompts=1, rollouts_per_prompt=2, prompt_tokens=1, response_tokens=2)
    settings = Settings(standardise_advantages=False, kl_coefficient=0.5)
    found = train_once(SEMANTICS, "actor_training", rows, mask, outputs, settings, workload)
    kl = math.exp(-0.6) - 1 + 0.6
    policy = (1 + 1 - math.exp(0.1)) / 3
    assert found.prepared.rows["advantages"].tolist() == [-1.0, 1.0]
    assert found.losses == pytest.approx((policy + 0.5 * kl / 3,))
    assert found.metrics[0] == pytest.approx(
        {"policy_loss": policy, "kl_loss": kl / 3, "clip_fraction": 0.0, "policy_change": -0.1 / 3}
    )
    metrics = {name: float(value) for name, value in found.prepared.metrics.items()}
    assert metrics == pytest.approx(
        {
            "reward": 1.0,
            "reward_spread": math.sqrt(2),
            "response_tokens": 1.5,
            "kl": (math.exp(-0.5) - 1 + 0.5) / 3,
        }
    )


def test_equal_rewards_teach_nothing_but_the_divergence():
    rows, mask, outputs, workload = drawn()
    rows["rewards"] = torch.ones_like(rows["rewards"])
    settings = Settings(kl_coefficient=0.0)
    found = train_once(SEMANTICS, "actor_training", rows, mask, outputs, settings, workload)
    assert found.losses == (0.0,)
    assert not found.gradients["logprobs"].any()


def test_the_first_update_follows_the_policy_gradient():
    """Where the policy has not moved, the gradient is -advantage / tokens of each response token."""
    rows, mask, _, workload = drawn()
    outputs = ModelOutputs(logprobs=rows["actor_logprobs"])
    found = train_once(SEMANTICS, "actor_training", rows, mask, outputs, Settings(kl_coefficient=0.0), workload)
    expected = -(found.prepared.rows["advantages"][:, None] * mask) / mask.sum()
    torch.testing.assert_close(found.gradients["logprobs"], expected)


@pytest.mark.parametrize("aggregation", ["token-mean", "sequence-mean", "length-normalised"])
@pytest.mark.parametrize(("ranks", "microbatches", "minibatches"), [(1, 4, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_the_split_does_not_matter(aggregation, ranks, microbatches, minibatches):
    rows, mask, outputs, workload = drawn()
    settings = Settings(
        aggregation=aggregation, minibatches=minibatches, entropy_coefficient=0.1, kl_coefficient=0.1, clip_high=0.3
    )
    whole = train_once(SEMANTICS, "actor_training", rows, mask, outputs, settings, workload)
    split = train_once(
        SEMANTICS, "actor_training", rows, mask, outputs, settings, workload, ranks=ranks, microbatches=microbatches
    )
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    assert set(whole.gradients) == {"logprobs", "entropy"}
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(split.gradients[name], gradient)
    for ours, theirs in zip(split.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    for name, value in whole.prepared.metrics.items():
        torch.testing.assert_close(split.prepared.metrics[name], value)


def test_entropy_is_asked_for_where_it_counts():
    assert not SEMANTICS.recipe("actor_training", Settings()).entropy
    assert SEMANTICS.recipe("actor_training", Settings(entropy_coefficient=0.1)).entropy


def test_the_optimizer_has_the_papers_hyperparameters():
    recipe = SEMANTICS.recipe("actor_training", Settings())
    chosen = recipe.optimizer
    assert (chosen.learning_rate, chosen.weight_decay, chosen.clip_norm) == (1e-6, 0.0, 1.0)
    assert (recipe.epochs, recipe.minibatches) == (1, 1)
    assert (Settings().clip, Settings().kl_coefficient) == (0.2, 0.01)


def test_contents_name_what_generation_and_assessment_make():
    assert SEMANTICS.contents["actor_logprobs"] is Content.LOGPROBS
    assert SEMANTICS.contents["rewards"] is Content.SCORES


OTHERWISE = {
    "learning_rate": 0.1,
    "clip": 0.3,
    "clip_high": 0.4,
    "standardise_advantages": False,
    "kl_coefficient": 0.0,
    "kl_estimator": "k1",
    "entropy_coefficient": 0.1,
    "aggregation": "sequence-mean",
    "epochs": 2,
    "minibatches": 2,
    "gradient_clip": 0.0,
    "objective": "decoupled",
    "weight_cap": None,
    "weight_beyond_cap": "drop",
}


@pytest.mark.parametrize(("name", "value"), OTHERWISE.items())
def test_hyperparameters_do_not_change_the_graph(name, value):
    def graph(settings):
        models = {"actor": toy_model("actor"), "reference": toy_model("reference")}
        workload = Workload(prompts=4, rollouts_per_prompt=4, prompt_tokens=5, response_tokens=7)
        return TEMPLATE.build(workload, models, Structure(staleness=()), settings)

    plain = Settings(reward_seconds_per_sample=0.1)
    assert graph(attrs.evolve(plain, **{name: value})) == graph(plain)


def test_updates_have_the_settings_of_every_algorithm():
    assert issubclass(Settings, UpdateSettings)


def test_data_of_4_bytes_beside_weights_of_2():
    spec: ModelSpec = toy_model("actor")
    workload = Workload(prompts=4, rollouts_per_prompt=4, prompt_tokens=5, response_tokens=7)
    settings = Settings(reward_seconds_per_sample=0.1, data_bytes_per_element=4)
    graph = TEMPLATE.build(workload, {"actor": spec, "reference": spec}, Structure(staleness=()), settings)
    assert {c.bytes_per_element for c in graph.containers if c.model is None} == {4}
    assert {c.bytes_per_element for c in graph.containers if c.model is not None} == {2}


def by_token(rows, proximal, logprobs, mask, advantages, settings):
    """The decoupled loss, its gradient and its weights, written out token by token from AReaL's equation."""
    loss, gradient, weights, over = 0.0, torch.zeros_like(logprobs), [], 0
    tokens = int(mask.sum())
    for row, token in torch.nonzero(mask).tolist():
        new, near = float(logprobs[row, token]), float(proximal[row, token])
        weight = math.exp(near - float(rows["actor_logprobs"][row, token]))
        if settings.weight_cap is not None and weight > settings.weight_cap:
            weight = settings.weight_cap if settings.weight_beyond_cap == "truncate" else 0.0
            over += 1
        ratio, advantage = math.exp(new - near), float(advantages[row])
        bounded = min(max(ratio, 1 - settings.clip), 1 + settings.clip)
        loss -= weight * min(ratio * advantage, bounded * advantage) / tokens
        if ratio * advantage <= bounded * advantage:
            gradient[row, token] = -weight * ratio * advantage / tokens
        weights.append(weight)
    return loss, gradient, sum(weights) / tokens, over / tokens


@pytest.mark.parametrize("beyond", ["truncate", "drop"])
@pytest.mark.parametrize("cap", [None, 1.1])
def test_the_decoupled_loss_weighs_tokens_and_clips_around_the_proximal_policy(cap, beyond):
    rows, mask, outputs, workload = drawn()
    proximal = (
        rows["actor_logprobs"] + torch.randn(*mask.shape, generator=torch.Generator().manual_seed(1)) / 5
    ) * mask
    settings = Settings(
        objective="decoupled", minibatches=1, epochs=2, weight_cap=cap, weight_beyond_cap=beyond, kl_coefficient=0.0
    )
    assert SEMANTICS.recipe("actor_training", settings).proximal
    given = {**rows, "proximal_logprobs": proximal}
    found = train_once(SEMANTICS, "actor_training", given, mask, outputs, settings, workload)
    advantages = found.prepared.rows["advantages"]
    loss, gradient, weight, over = by_token(rows, proximal, outputs.logprobs, mask, advantages, settings)
    assert found.losses == pytest.approx((loss,))
    torch.testing.assert_close(found.gradients["logprobs"], gradient)
    assert found.metrics[0]["behaviour_weight"] == pytest.approx(weight)
    assert found.metrics[0]["behaviour_capped"] == pytest.approx(over)
    assert (over > 0) == (cap is not None)


def test_with_one_update_the_proximal_policy_is_the_one_in_training():
    rows, mask, outputs, workload = drawn()
    settings = Settings(objective="decoupled", kl_coefficient=0.0)
    assert not SEMANTICS.recipe("actor_training", settings).proximal
    found = train_once(SEMANTICS, "actor_training", rows, mask, outputs, settings, workload)
    advantages = found.prepared.rows["advantages"]
    loss, gradient, *_ = by_token(rows, outputs.logprobs, outputs.logprobs, mask, advantages, settings)
    assert found.losses == pytest.approx((loss,))
    torch.testing.assert_close(found.gradients["logprobs"], gradient)


def test_without_staleness_decoupled_and_plain_are_the_same():
    rows, mask, outputs, workload = drawn()
    given = {**rows, "proximal_logprobs": rows["actor_logprobs"]}
    plain, decoupled = (
        train_once(SEMANTICS, "actor_training", given, mask, outputs, Settings(objective=name, epochs=2), workload)
        for name in ("plain", "decoupled")
    )
    assert decoupled.losses == pytest.approx(plain.losses)
    torch.testing.assert_close(decoupled.gradients["logprobs"], plain.gradients["logprobs"])
