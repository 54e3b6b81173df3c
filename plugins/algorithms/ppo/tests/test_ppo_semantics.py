"""PPO at run time: drawn by hand, independent of the split into ranks and microbatches, and no matter for plans."""

import math

import attrs
import pytest
from rpeg_plugin_ppo import TEMPLATE
from rpeg_plugin_ppo.settings import Settings

from rpeg_core.errors import ExperimentError
from rpeg_core.ir import violations
from rpeg_core.planning.structures import Structure
from rpeg_core.runtime.semantics import ModelOutputs, load_semantics
from rpeg_core.spec.models import Head
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.semantics import train_once
from rpeg_core.testing.toys import toy_model

torch = pytest.importorskip("torch", reason="semantics are functions of torch tensors")

SEMANTICS = load_semantics(TEMPLATE)
LM = toy_model("actor")
SCALAR = toy_model("critic").with_head(Head.SCALAR)
WORKLOAD = Workload(prompts=4, rollouts_per_prompt=2, prompt_tokens=5, response_tokens=7)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def drawn(prompts=8, rollouts=2, tokens=5, seed=0):
    """Random rows of a step, responses of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n = prompts * rollouts
    mask = torch.arange(tokens)[None] < torch.randint(1, tokens + 1, (n, 1), generator=generator)
    old, values = random(n, tokens) - 2, random(n, tokens)
    rows = {
        "completions": torch.zeros(n, 3 + tokens, dtype=torch.int32),
        "actor_logprobs": old * mask,
        "reference_logprobs": (old + random(n, tokens) / 10) * mask,
        "values": values * mask,
        "rewards": random(n),
    }
    outputs = ModelOutputs(
        logprobs=old + random(n, tokens) / 5,
        values=values + random(n, tokens) / 3,
        entropy=random(n, tokens).abs(),
    )
    workload = Workload(prompts=prompts, rollouts_per_prompt=rollouts, prompt_tokens=3, response_tokens=tokens)
    return rows, mask, outputs, workload


def heads(outputs, operator):
    """What the model of a training operator has."""
    if operator == "actor_training":
        return attrs.evolve(outputs, values=None)
    return attrs.evolve(outputs, logprobs=None, entropy=None) if operator == "critic_training" else outputs


ROWS = {
    "actor_logprobs": tensor([[-1, -2], [-1, 0]]),
    "reference_logprobs": tensor([[-1.5, -2], [-1, 0]]),
    "values": tensor([[1, 2], [0.5, 0]]),
    "rewards": tensor([4, 1]),
}
MASK = torch.tensor([[True, True], [True, False]])
TWO = Workload(prompts=2, rollouts_per_prompt=1, prompt_tokens=1, response_tokens=2)


def test_advantages_and_returns_by_hand():
    # gamma 1, lambda 0.5: row 0: delta = (0 + 2 - 1, 4 - 2) = (1, 2), A = (1 + 0.5 * 2, 2) = (2, 2); row 1: A = 0.5.
    settings = Settings(gae_lambda=0.5, whiten_advantages=False)
    outputs = ModelOutputs(logprobs=ROWS["actor_logprobs"])
    found = train_once(SEMANTICS, "actor_training", ROWS, MASK, outputs, settings, TWO).prepared
    assert found.rows["advantages"].tolist() == [[2.0, 2.0], [0.5, 0.0]]
    assert found.rows["returns"].tolist() == [[3.0, 4.0], [1.0, 0.0]]
    assert {name: float(value) for name, value in found.metrics.items()} == pytest.approx(
        {
            "reward": 2.5,
            "response_tokens": 1.5,
            "kl": (math.exp(-0.5) - 1 + 0.5) / 3,
            "value": 3.5 / 3,
            "return": 8 / 3,
        }
    )


def test_the_divergence_as_part_of_the_reward_by_hand():
    # k1 of the first token is 0.5, weighed with 2: rewards (-1, 4) and (1,).
    settings = Settings(
        gae_lambda=0.0, whiten_advantages=False, kl_penalty="reward", kl_estimator="k1", kl_coefficient=2.0
    )
    outputs = ModelOutputs(logprobs=ROWS["actor_logprobs"])
    found = train_once(SEMANTICS, "actor_training", ROWS, MASK, outputs, settings, TWO)
    assert found.prepared.rows["advantages"].tolist() == [[-1 + 2 - 1, 4 - 2], [0.5, 0.0]]
    assert "kl_loss" not in found.metrics[0]


def test_the_critics_loss_by_hand():
    # Returns (3, 4), (1); new values 2 (clipped to 1.2), 5 (to 2.2), 1 (to 0.7).
    outputs = ModelOutputs(values=tensor([[2, 5], [1, 9]]))
    settings = Settings(gae_lambda=0.5)
    rows = {name: value for name, value in ROWS.items() if name != "actor_logprobs"}
    found = train_once(SEMANTICS, "critic_training", rows, MASK, outputs, settings, TWO)
    expected = (1.8**2 + 1.8**2 + 0.3**2) / 2 / 3
    assert found.losses == pytest.approx((expected,))
    assert found.metrics[0]["value_clip_fraction"] == pytest.approx(1.0)
    found = train_once(SEMANTICS, "critic_training", rows, MASK, outputs, attrs.evolve(settings, value_clip=None), TWO)
    assert found.losses == pytest.approx(((1 + 1 + 0) / 2 / 3,))


def test_a_shared_model_has_both_losses():
    rows, mask, outputs, workload = drawn()
    settings = Settings(value_coefficient=0.25, entropy_coefficient=0.1)

    def losses(operator):
        return train_once(SEMANTICS, operator, rows, mask, heads(outputs, operator), settings, workload).losses[0]

    both = losses("actor_critic_training")
    assert both == pytest.approx(losses("actor_training") + 0.25 * losses("critic_training"))


@pytest.mark.parametrize("operator", ["actor_training", "critic_training", "actor_critic_training"])
@pytest.mark.parametrize(("ranks", "microbatches", "minibatches"), [(1, 4, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2)])
@pytest.mark.parametrize("kl_penalty", ["loss", "reward"])
def test_the_split_does_not_matter(operator, ranks, microbatches, minibatches, kl_penalty):
    rows, mask, outputs, workload = drawn()
    settings = Settings(minibatches=minibatches, entropy_coefficient=0.1, kl_coefficient=0.1, kl_penalty=kl_penalty)
    arguments = (SEMANTICS, operator, rows, mask, heads(outputs, operator), settings, workload)
    whole = train_once(*arguments)
    split = train_once(*arguments, ranks=ranks, microbatches=microbatches)
    assert split.losses == pytest.approx(whole.losses, rel=1e-9)
    assert whole.gradients
    for name, gradient in whole.gradients.items():
        torch.testing.assert_close(split.gradients[name], gradient)
    for ours, theirs in zip(split.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)
    for name, value in whole.prepared.rows.items():
        torch.testing.assert_close(split.prepared.rows[name], value)
    for name, value in whole.prepared.metrics.items():
        torch.testing.assert_close(split.prepared.metrics[name], value)


def test_the_critic_needs_no_log_probabilities_of_the_actor():
    rows, mask, outputs, workload = drawn()
    del rows["actor_logprobs"]
    operator = "critic_training"
    train_once(SEMANTICS, operator, rows, mask, heads(outputs, operator), Settings(), workload)


def test_hyperparameters_of_the_paper_and_of_the_critic():
    settings = Settings(critic_learning_rate=1e-5, warmup_steps=3)
    actor, critic = (SEMANTICS.recipe(f"{model}_training", settings) for model in ("actor", "critic"))
    assert (actor.optimizer.learning_rate, critic.optimizer.learning_rate) == (1e-6, 1e-5)
    assert (actor.optimizer.warmup_steps, critic.optimizer.warmup_steps) == (3, 3)
    assert (settings.clip, settings.gamma, settings.gae_lambda, settings.kl_coefficient) == (0.2, 1.0, 0.95, 0.01)
    assert (settings.gradient_clip, settings.weight_decay, settings.epochs) == (1.0, 0.0, 1)


def build(settings=None, *, shared=False, reward=True, structure=None):
    models = {"actor": LM, "critic": SCALAR, "reference": LM} | ({"reward": SCALAR} if reward else {})
    structure = structure or Structure(staleness=(), actor_critic_sharing=shared)
    return TEMPLATE.build(WORKLOAD, models, structure, settings or Settings())


OTHERWISE = {
    "learning_rate": 0.1,
    "critic_learning_rate": 0.1,
    "clip": 0.3,
    "clip_high": 0.4,
    "gamma": 0.9,
    "gae_lambda": 0.9,
    "whiten_advantages": False,
    "kl_coefficient": 0.0,
    "kl_estimator": "k1",
    "value_clip": None,
    "value_coefficient": 0.5,
    "entropy_coefficient": 0.1,
    "epochs": 2,
    "aggregation": "sequence-mean",
    "minibatches": 2,
    "gradient_clip": 0.0,
    "objective": "decoupled",
    "weight_cap": None,
    "weight_beyond_cap": "drop",
}


@pytest.mark.parametrize(("name", "value"), OTHERWISE.items())
def test_hyperparameters_do_not_change_the_graph(name, value):
    assert build(Settings(**{name: value})) == build()


def test_a_penalty_in_the_reward_lets_the_critic_read_the_actors_log_probabilities_and_nothing_else_changes():
    plain, changed = build(), build(Settings(kl_penalty="reward"))
    assert not violations(changed)
    critic = changed.operator("critic_training")
    assert critic.inputs == plain.operator("critic_training").inputs | {"actor_logprobs"}
    operators = tuple(op if op.name != "critic_training" else plain.operator(op.name) for op in changed.operators)
    assert attrs.evolve(changed, operators=operators) == plain


def test_a_function_may_take_the_place_of_the_reward_model():
    graph = build(Settings(reward_seconds_per_sample=0.25), reward=False)
    assert not violations(graph)
    function = graph.operator("reward_function")
    assert (function.model, function.seconds_per_sample) == (None, 0.25)
    assert (function.inputs, function.outputs) == ({"completions"}, {"rewards"})
    assert {model.name for model in graph.models} == {"actor", "critic", "reference"}
    shared = build(Settings(reward_seconds_per_sample=0.25), reward=False, shared=True)
    assert [operator.name for operator in shared.operators] == [
        "actor_critic_generation",
        "reference_inference",
        "reward_function",
        "actor_critic_inference",
        "actor_critic_training",
    ]


def test_neither_or_both_rewards_are_refused():
    with pytest.raises(ExperimentError, match=r"models\.reward is missing"):
        build(reward=False)
    with pytest.raises(ExperimentError, match=r"models\.reward is critic and .* is 0\.25"):
        build(Settings(reward_seconds_per_sample=0.25))


def test_data_of_4_bytes_beside_weights_of_2():
    graph = build(Settings(data_bytes_per_element=4))
    assert {c.bytes_per_element for c in graph.containers if c.model is None} == {4}
    assert {c.bytes_per_element for c in graph.containers if c.model is not None} == {2}


@pytest.mark.parametrize("operator", ["actor_training", "actor_critic_training"])
def test_the_decoupled_policy_loss_is_that_of_areal(operator):
    """Weight pi_prox / pi_behaviour, ratio pi / pi_prox: gradient by autograd of the objective as it is printed."""
    rows, mask, outputs, workload = drawn()
    proximal = (
        rows["actor_logprobs"] + torch.randn(*mask.shape, generator=torch.Generator().manual_seed(1)) / 5
    ) * mask
    settings = Settings(objective="decoupled", weight_cap=1.1, kl_coefficient=0.0, minibatches=2, value_coefficient=0.0)
    assert SEMANTICS.recipe(operator, settings).proximal
    assert not SEMANTICS.recipe("critic_training", settings).proximal
    given = {**rows, "proximal_logprobs": proximal}
    # Both minibatches together, each a mean over its own tokens, see the same outputs.
    found = train_once(SEMANTICS, operator, given, mask, heads(outputs, operator), settings, workload)
    logprobs, advantages = outputs.logprobs.clone().requires_grad_(), found.prepared.rows["advantages"]
    ratio = (logprobs - proximal).exp()
    objective = torch.minimum(ratio * advantages, ratio.clamp(0.8, 1.2) * advantages)
    weights = (proximal - rows["actor_logprobs"]).exp().clamp(max=1.1)
    expected = 0.0
    for number in range(2):
        part = mask & ((torch.arange(len(mask)) // workload.rollouts_per_prompt) % 2 == number)[:, None]
        expected = expected - (weights * objective)[part].sum() / part.sum()
    expected.backward()
    assert sum(found.losses) == pytest.approx(float(expected))
    torch.testing.assert_close(found.gradients["logprobs"], logprobs.grad)
