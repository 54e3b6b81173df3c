"""Advantages and losses against implementations that nobody here wrote: verl's core_algos and OpenRLHF's losses.

Both are installed without their dependencies into a temporary folder, and called in a process of their own.
"""

import subprocess
import sys
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from rpeg_core import Registry
from rpeg_core.runtime.semantics import ModelOutputs, load_semantics
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.semantics import train_once

torch = pytest.importorskip("torch", reason="losses are functions of torch tensors")
pytest.importorskip("transformers", reason="verl's functions import it")

pytestmark = pytest.mark.slow

PACKAGES = (
    "verl==0.4.1",
    "openrlhf==0.6.4",
    *("tensordict==0.15.3", "pyvers==0.2.3", "cloudpickle", "orjson", "importlib_metadata"),  # of verl
)
VERL, OPENRLHF = "verl.trainer.ppo.core_algos", "openrlhf.models.loss"

# Parent packages are entered without their __init__, which would import ray, deepspeed and others.
DRIVER = """
import importlib, sys, types
import torch

folder = sys.argv[1]
sys.path.append(folder)
for name in ("verl", "verl.utils", "verl.trainer", "verl.trainer.ppo", "openrlhf", "openrlhf.models"):
    package = types.ModuleType(name)
    package.__path__ = [f"{folder}/{name.replace('.', '/')}"]
    sys.modules[name] = package


def call(module, name, made_with, arguments, differentiate):
    function = getattr(importlib.import_module(module), name)
    if made_with is not None:
        function = function(**made_with)
    arguments = dict(arguments)
    if differentiate is not None:
        arguments[differentiate] = arguments[differentiate].clone().requires_grad_()
    result = function(**arguments)
    if differentiate is not None:
        first = result[0] if isinstance(result, tuple) else result
        result = (first, torch.autograd.grad(first, arguments[differentiate])[0])
    return result


for line in sys.stdin:
    calls, results = line.split("|")
    torch.save([call(*each) for each in torch.load(calls, weights_only=False)], results.strip())
    print("done", flush=True)
"""

ROWS, GROUP, TOKENS = 32, 4, 9
CLOSE = {"rtol": 1e-6, "atol": 1e-6}


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Callable[..., list]]:
    """Calls published functions: (module, name, arguments of a class or None, arguments, what to differentiate by)."""
    target, work = (tmp_path_factory.mktemp(name) for name in ("published", "work"))
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--target", str(target), *PACKAGES]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
    driver = subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(target)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )

    def call(*calls: tuple) -> list:
        torch.save(calls, work / "calls")
        driver.stdin.write(f"{work / 'calls'}|{work / 'results'}\n")
        driver.stdin.flush()
        assert driver.stdout.readline() == "done\n"
        return torch.load(work / "results", weights_only=False)

    yield call
    driver.stdin.close()
    assert driver.wait(timeout=60) == 0


@pytest.fixture(scope="module")
def data():
    """fp32 rows as a run has them: several responses without their full length, one with a single token."""
    generator = torch.Generator().manual_seed(7)

    def random(*shape):
        return torch.randn(*shape, generator=generator)

    lengths = torch.randint(2, TOKENS + 1, (ROWS, 1), generator=generator)
    lengths[5] = 1
    mask = torch.arange(TOKENS)[None] < lengths
    old, values = random(ROWS, TOKENS) / 2 - 2, random(ROWS, TOKENS)
    rows = {
        "completions": torch.zeros(ROWS, 2 + TOKENS, dtype=torch.int32),
        "actor_logprobs": old * mask,
        "reference_logprobs": (old + random(ROWS, TOKENS) / 5) * mask,
        "values": values * mask,
        "rewards": random(ROWS),
    }
    now = ModelOutputs(logprobs=(old + random(ROWS, TOKENS) / 4) * mask)
    critic = ModelOutputs(values=(values + random(ROWS, TOKENS) / 3) * mask)
    return rows, mask, now, critic


def algorithm(name, **settings):
    template = Registry(disabled=frozenset()).get("algorithm", name).record
    return load_semantics(template), template.settings(**settings)


def workload(rollouts):
    return Workload(prompts=ROWS // rollouts, rollouts_per_prompt=rollouts, prompt_tokens=2, response_tokens=TOKENS)


def at_end(scores, mask):
    rewards = torch.zeros(mask.shape)
    rewards[torch.arange(len(mask)), mask.sum(1) - 1] = scores
    return rewards


def close(found, expected):
    torch.testing.assert_close(torch.as_tensor(found, dtype=torch.float32), torch.as_tensor(expected), **CLOSE)


@pytest.mark.parametrize("gamma", [1.0, 0.9])
@pytest.mark.parametrize("whitened", [True, False])
def test_advantages_of_ppo_are_verls(published, data, gamma, whitened):
    rows, mask, now, _ = data
    semantics, settings = algorithm("ppo", gamma=gamma, whiten_advantages=whitened)
    ours = train_once(semantics, "actor_training", rows, mask, now, settings, workload(1)).prepared.rows
    arguments = {
        "token_level_rewards": at_end(rows["rewards"], mask),
        "values": rows["values"],
        "response_mask": mask.float(),
        "gamma": gamma,
        "lam": settings.gae_lambda,
    }
    ((advantages, returns),) = published((VERL, "compute_gae_advantage_return", None, arguments, None))
    close(ours["returns"][mask], returns[mask])
    if whitened:
        close(ours["advantages"][mask], advantages[mask])
    else:
        close(ours["advantages"][mask], (returns - rows["values"])[mask])


def test_advantages_of_ppo_with_a_penalty_in_the_reward_are_verls(published, data):
    rows, mask, now, _ = data
    semantics, settings = algorithm("ppo", kl_penalty="reward", kl_estimator="k1", kl_coefficient=0.2)
    ours = train_once(semantics, "actor_training", rows, mask, now, settings, workload(1)).prepared.rows
    pair = {"logprob": rows["actor_logprobs"], "ref_logprob": rows["reference_logprobs"], "kl_penalty": "kl"}
    (penalty,) = published((VERL, "kl_penalty", None, pair, None))
    arguments = {
        "token_level_rewards": at_end(rows["rewards"], mask) - 0.2 * penalty * mask,
        "values": rows["values"],
        "response_mask": mask.float(),
        "gamma": settings.gamma,
        "lam": settings.gae_lambda,
    }
    ((advantages, returns),) = published((VERL, "compute_gae_advantage_return", None, arguments, None))
    close(ours["advantages"][mask], advantages[mask])
    close(ours["returns"][mask], returns[mask])


@pytest.mark.parametrize("standardised", [True, False])
def test_advantages_of_grpo_are_verls(published, data, standardised):
    rows, mask, now, _ = data
    semantics, settings = algorithm("grpo", standardise_advantages=standardised)
    ours = train_once(semantics, "actor_training", rows, mask, now, settings, workload(GROUP)).prepared.rows
    arguments = {
        "token_level_rewards": at_end(rows["rewards"], mask),
        "response_mask": mask.float(),
        "index": np.repeat(np.arange(ROWS // GROUP), GROUP),
        "norm_adv_by_std_in_grpo": standardised,
    }
    ((advantages, _),) = published((VERL, "compute_grpo_outcome_advantage", None, arguments, None))
    close((ours["advantages"][:, None] * mask), advantages)


@pytest.mark.parametrize(
    ("ours", "theirs", "scale"),
    [
        ("token-mean", "token-mean", 1),
        ("sequence-mean", "seq-mean-token-mean", 1),
        ("length-normalised", "seq-mean-token-sum-norm", ROWS),  # this version does not divide by the sequences
    ],
)
@pytest.mark.parametrize("name", ["ppo", "grpo"])
def test_policy_losses_and_their_gradients_are_verls(published, data, name, ours, theirs, scale):
    rows, mask, now, _ = data
    semantics, settings = algorithm(name, aggregation=ours, clip=0.15, clip_high=0.25, kl_coefficient=0.0)
    found = train_once(semantics, "actor_training", rows, mask, now, settings, workload(GROUP))
    advantages = found.prepared.rows["advantages"]
    arguments = {
        "old_log_prob": rows["actor_logprobs"],
        "log_prob": now.logprobs,
        "advantages": (advantages if advantages.dim() == 2 else advantages[:, None]) * mask,
        "response_mask": mask.float(),
        "cliprange_low": 0.15,
        "cliprange_high": 0.25,
        "cliprange": 0.15,
        "clip_ratio_c": 1e9,  # we have no lower bound for negative advantages
        "loss_agg_mode": theirs,
    }
    ((loss, gradient),) = published((VERL, "compute_policy_loss", None, arguments, "log_prob"))
    close(found.losses[0], loss / scale)
    close(found.gradients["logprobs"], gradient / scale)


def test_policy_losses_and_their_gradients_are_openrlhfs(published, data):
    rows, mask, now, _ = data
    semantics, settings = algorithm("ppo", kl_coefficient=0.0, aggregation="sequence-mean")
    found = train_once(semantics, "actor_training", rows, mask, now, settings, workload(1))
    arguments = {
        "log_probs": now.logprobs,
        "old_log_probs": rows["actor_logprobs"],
        "advantages": found.prepared.rows["advantages"],
        "action_mask": mask,
    }
    ((loss, gradient),) = published((OPENRLHF, "PolicyLoss", {"clip_eps": 0.2}, arguments, "log_probs"))
    close(found.losses[0], loss)
    close(found.gradients["logprobs"], gradient)


@pytest.mark.parametrize(("estimator", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_divergences_in_the_loss_are_verls(published, data, estimator, theirs):
    rows, mask, now, _ = data
    semantics, settings = algorithm("grpo", kl_estimator=estimator, kl_coefficient=1.0)
    _, without = algorithm("grpo", kl_coefficient=0.0)
    arguments = (semantics, "actor_training", rows, mask, now)
    found = train_once(*arguments, settings, workload(GROUP))
    plain = train_once(*arguments, without, workload(GROUP))
    pair = {"logprob": now.logprobs, "ref_logprob": rows["reference_logprobs"], "kl_penalty": theirs}
    (per_token,) = published((VERL, "kl_penalty", None, pair, None))
    mean = {"loss_mat": per_token, "loss_mask": mask.float(), "loss_agg_mode": "token-mean"}
    ((divergence, _),) = published((VERL, "agg_loss", None, mean, "loss_mat"))
    close(found.metrics[0]["kl_loss"], divergence)
    close(found.losses[0] - plain.losses[0], divergence)


@pytest.mark.parametrize("clip", [0.2, 0.5])
@pytest.mark.parametrize("library", ["verl", "openrlhf"])
def test_value_losses_and_their_gradients_are_published_ones(published, data, library, clip):
    rows, mask, _, critic = data
    aggregation = "token-mean" if library == "verl" else "sequence-mean"
    semantics, settings = algorithm("ppo", value_clip=clip, aggregation=aggregation)
    found = train_once(semantics, "critic_training", rows, mask, critic, settings, workload(1))
    returns, old = found.prepared.rows["returns"], rows["values"]
    if library == "verl":
        arguments = {"vpreds": critic.values, "values": old, "response_mask": mask.float(), "cliprange_value": clip}
        call = (VERL, "compute_value_loss", None, arguments | {"returns": returns}, "vpreds")
    else:
        arguments = {"values": critic.values, "old_values": old, "action_mask": mask}
        call = (OPENRLHF, "ValueLoss", {"clip_eps": clip}, arguments | {"returns": returns}, "values")
    ((loss, gradient),) = published(call)
    close(found.losses[0], loss)
    close(found.gradients["values"], gradient)


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_loss_of_dpo_and_its_gradient_are_openrlhfs(published, data, smoothing):
    rows, mask, now, _ = data
    semantics, settings = algorithm("dpo", label_smoothing=smoothing, beta=0.3)
    given = {"pairs": rows["completions"]} | {k: rows[k] for k in ("actor_logprobs", "reference_logprobs")}
    found = train_once(semantics, "actor_training", given, mask, now, settings, workload(2))
    policy, reference = (now.logprobs * mask).sum(1), rows["reference_logprobs"].sum(1)
    arguments = {
        "policy_chosen_logps": policy[0::2],
        "policy_rejected_logps": policy[1::2],
        "reference_chosen_logps": reference[0::2],
        "reference_rejected_logps": reference[1::2],
    }
    made_with = {"beta": 0.3, "label_smoothing": smoothing}
    (loss, gradient), (_, chosen, rejected) = published(
        (OPENRLHF, "DPOLoss", made_with, arguments, "policy_chosen_logps"),
        (OPENRLHF, "DPOLoss", made_with, arguments, None),
    )
    close(found.losses[0], loss)
    close(found.gradients["logprobs"][0::2], gradient[:, None] * mask[0::2])
    close(found.gradients["logprobs"][1::2], -gradient[:, None] * mask[1::2])
    close(found.metrics[0]["chosen_reward"], chosen.mean())
    close(found.metrics[0]["rejected_reward"], rejected.mean())
    close(found.metrics[0]["accuracy"], (chosen > rejected).float().mean())
