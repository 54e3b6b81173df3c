"""DPO at run time: drawn by hand, independent of the split into ranks and microbatches, and no matter for plans."""

import math

import pytest
from rpeg_plugin_dpo import TEMPLATE
from rpeg_plugin_dpo.settings import Settings

from rpeg_core.planning.structures import Structure
from rpeg_core.runtime.semantics import ModelOutputs, load_semantics
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.semantics import train_once
from rpeg_core.testing.toys import toy_model

torch = pytest.importorskip("torch", reason="semantics are functions of torch tensors")

SEMANTICS = load_semantics(TEMPLATE)


def tensor(values):
    return torch.tensor(values, dtype=torch.float64)


def drawn(pairs=8, tokens=5, seed=0):
    """Random pairs, responses of different lengths."""
    generator = torch.Generator().manual_seed(seed)

    def random(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    n = 2 * pairs
    mask = torch.arange(tokens)[None] < torch.randint(1, tokens + 1, (n, 1), generator=generator)
    reference = random(n, tokens) - 2
    rows = {
        "pairs": torch.zeros(n, 3 + tokens, dtype=torch.int32),
        "actor_logprobs": (reference + random(n, tokens)) * mask,
        "reference_logprobs": reference * mask,
    }
    workload = Workload(prompts=pairs, rollouts_per_prompt=2, prompt_tokens=3, response_tokens=tokens)
    return rows, mask, ModelOutputs(logprobs=reference + random(n, tokens)), workload


def one_pair(settings):
    """Chosen: -1 - 1 against a reference of -2 - 1; rejected: -4 against -2. Differences 1 and -2."""
    rows = {
        "actor_logprobs": tensor([[-1, -1], [-4, 0]]),
        "reference_logprobs": tensor([[-2, -1], [-2, 0]]),
    }
    mask = torch.tensor([[True, True], [True, False]])
    outputs = ModelOutputs(logprobs=tensor([[-1, -1], [-4, -77]]))
    workload = Workload(prompts=1, rollouts_per_prompt=2, prompt_tokens=1, response_tokens=2)
    return train_once(SEMANTICS, "actor_training", rows, mask, outputs, settings, workload)


def test_one_pair_by_hand():
    found = one_pair(Settings(beta=0.5))
    assert found.losses == pytest.approx((math.log(1 + math.exp(-1.5)),))
    assert found.metrics[0] == pytest.approx(
        {
            "preference_loss": math.log(1 + math.exp(-1.5)),
            "accuracy": 1.0,
            "margin": 1.5,
            "chosen_reward": 0.5,
            "rejected_reward": -1.0,
        }
    )
    slope = -0.5 / (1 + math.exp(1.5))
    torch.testing.assert_close(found.gradients["logprobs"], tensor([[slope, slope], [-slope, 0]]))
    assert float(found.prepared.metrics["log_ratio"]) == -0.5


def test_smoothed_labels_by_hand():
    found = one_pair(Settings(beta=0.5, label_smoothing=0.1))
    assert found.losses == pytest.approx((0.9 * math.log(1 + math.exp(-1.5)) + 0.1 * math.log(1 + math.exp(1.5)),))


def test_without_reference_by_hand():
    found = one_pair(Settings(beta=0.5, reference_free=True))
    assert found.losses == pytest.approx((math.log(1 + math.exp(-0.5 * (-2 + 4))),))


def test_margins_too_large_to_write_down_stay_finite():
    assert one_pair(Settings(beta=1e5, label_smoothing=0.1)).losses == pytest.approx((3e4,))


@pytest.mark.parametrize(("ranks", "microbatches", "minibatches"), [(1, 4, 1), (2, 1, 1), (4, 2, 1), (2, 2, 2)])
def test_the_split_does_not_matter(ranks, microbatches, minibatches):
    rows, mask, outputs, workload = drawn()
    settings = Settings(minibatches=minibatches, label_smoothing=0.1)
    arguments = (SEMANTICS, "actor_training", rows, mask, outputs, settings, workload)
    whole = train_once(*arguments)
    split = train_once(*arguments, ranks=ranks, microbatches=microbatches)
    assert split.losses == pytest.approx(whole.losses, rel=1e-12)
    torch.testing.assert_close(split.gradients["logprobs"], whole.gradients["logprobs"])
    for ours, theirs in zip(split.metrics, whole.metrics, strict=True):
        assert ours == pytest.approx(theirs, rel=1e-9, abs=1e-12)


def test_a_pair_stays_together():
    assert SEMANTICS.recipe("actor_training", Settings()).rows_together == 2


def test_hyperparameters_of_the_paper_and_of_published_implementations():
    optimizer = SEMANTICS.recipe("actor_training", Settings()).optimizer
    assert (optimizer.learning_rate, optimizer.weight_decay, optimizer.clip_norm) == (1e-6, 0.0, 1.0)
    assert (Settings().beta, Settings().label_smoothing, Settings().reference_free) == (0.1, 0.0, False)


def graph(settings):
    models = {"actor": toy_model("actor"), "reference": toy_model("reference")}
    workload = Workload(prompts=4, rollouts_per_prompt=2, prompt_tokens=5, response_tokens=7)
    return TEMPLATE.build(workload, models, Structure(staleness=()), settings)


@pytest.mark.parametrize(
    ("name", "value"),
    [("learning_rate", 0.1), ("beta", 0.5), ("label_smoothing", 0.1), ("reference_free", True), ("epochs", 2)],
)
def test_hyperparameters_do_not_change_the_graph(name, value):
    assert graph(Settings(**{name: value})) == graph(Settings())


def test_data_of_4_bytes_beside_weights_of_2():
    found = graph(Settings(data_bytes_per_element=4))
    assert {c.bytes_per_element for c in found.containers if c.model is None} == {4}
    assert {c.bytes_per_element for c in found.containers if c.model is not None} == {2}
