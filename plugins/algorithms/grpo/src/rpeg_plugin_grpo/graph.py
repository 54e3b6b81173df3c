"""The graph of one GRPO step (paper, section A-E: PPO without the critic's vertices)."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rpeg_core import Rpeg, RpegBuilder
from rpeg_core.errors import ExperimentError
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload
from rpeg_plugin_grpo.settings import Settings

__all__ = ["build"]

_SECONDS = "settings.grpo.reward_seconds_per_sample"


def build(workload: Workload, models: Mapping[str, ModelSpec], structure: Structure, settings: Settings) -> Rpeg:
    """One step of GRPO, 4 operators.

    Args:
        workload: gives B, R >= 2 (the group), Lp, Lr and s_b, the bytes of an element of every container, of weights
            alone when ``data_bytes_per_element`` is set.
        models: specs of ``actor``, ``reference`` and, unless the reward is a function, ``reward``.
        structure: the staleness of ``actor``.
        settings: ``reward_seconds_per_sample`` is the cost of the reward function that takes the place of the
            reward model; ``explicit_rollout_edges`` connects generation and training, as for PPO.

    Raises:
        ExperimentError: a group of one rollout; neither a reward model nor the cost of a function, or both.
    """
    _check(workload, models, settings)
    per_token = workload.sequences * workload.response_tokens

    b = RpegBuilder("grpo", weight_bytes_per_element=workload.bytes_per_element)
    b.model("actor", models["actor"], trainable=True, staleness=structure.tau("actor"))
    if "reward" in models:
        b.model("reward", models["reward"], trainable=False)
    b.model("reference", models["reference"], trainable=False)

    width = settings.data_bytes_per_element or workload.bytes_per_element
    data = functools.partial(b.data, bytes_per_element=width)
    prompts = data("prompts", elements=workload.prompts * workload.prompt_tokens)
    completions = data("completions", elements=workload.tokens_per_step)
    actor_logprobs = data("actor_logprobs", elements=per_token)
    reference_logprobs = data("reference_logprobs", elements=per_token)
    rewards = data("rewards", elements=workload.sequences)

    rollout = b.generation("actor_generation", "actor", reads=[prompts], writes=[completions, actor_logprobs])
    reference = b.inference("reference_inference", "reference", reads=[completions], writes=[reference_logprobs])
    if settings.reward_seconds_per_sample is None:
        reward = b.inference("reward_inference", "reward", reads=[completions], writes=[rewards])
    else:
        reward = b.function(
            "reward_function",
            reads=[completions],
            writes=[rewards],
            seconds_per_sample=settings.reward_seconds_per_sample,
        )
    training = b.training("actor_training", "actor", reads=[completions, actor_logprobs, reference_logprobs, rewards])

    b.connect(rollout, completions, reference, reward)
    b.connect(reference, reference_logprobs, training)
    b.connect(reward, rewards, training)
    if settings.explicit_rollout_edges:
        b.connect(rollout, completions, training)
        b.connect(rollout, actor_logprobs, training)
    b.publish(training, rollout)
    return b.build()


def _check(workload: Workload, models: Mapping[str, ModelSpec], settings: Settings) -> None:
    if workload.rollouts_per_prompt < 2:
        raise ExperimentError(
            f"workload.rollouts_per_prompt is {workload.rollouts_per_prompt}",
            facts=["allowed for grpo: at least 2, advantages are relative to the prompt's other rollouts"],
            hint="set workload.rollouts_per_prompt, e.g. to 8",
        )
    seconds = settings.reward_seconds_per_sample
    if "reward" not in models and seconds is None:
        raise ExperimentError(
            f"models.reward is missing and {_SECONDS} is not set",
            facts=["allowed: a reward model, or a reward function whose cost is stated"],
            hint="add models.reward, or settings: {grpo: {reward_seconds_per_sample: SECONDS}}",
        )
    if "reward" in models and seconds is not None:
        raise ExperimentError(
            f"models.reward is {models['reward'].name} and {_SECONDS} is {seconds}",
            facts=["allowed: a reward model or a reward function, not both"],
            hint=f"remove models.reward or {_SECONDS}",
        )
