"""The graph of one PPO step (paper, section A-D: tables VII to IX and the edges below them)."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import attrs

from rpeg_core import Rpeg, RpegBuilder
from rpeg_core.errors import ExperimentError
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.workload import Workload
from rpeg_plugin_ppo.settings import Settings

__all__ = ["build"]

_SECONDS = "settings.ppo.reward_seconds_per_sample"


def build(workload: Workload, models: Mapping[str, ModelSpec], structure: Structure, settings: Settings) -> Rpeg:
    """One step of PPO: 6 operators, or 5 when actor and critic share a backbone.

    Args:
        workload: gives B, R, Lp, Lr and s_b, the bytes of an element of every container (paper, table VIII), of
            weights alone when ``data_bytes_per_element`` is set.
        models: specs of ``actor``, ``critic``, ``reference`` and, unless the reward is a function, ``reward``.
        structure: ``actor_critic_sharing`` selects PPO-AC, whose one trainable model is ``actor_critic``: the
            actor with a language-model and a scalar head. **[choice]** Its inference recomputes the values.
            ``fusion`` makes one invocation ``fused_training`` of both trainings, which keep their parameters and
            optimizers; a shared backbone has a single training already.
        settings: with ``explicit_rollout_edges`` training gets what generation writes over edges of its own;
            otherwise it reaches training through the assessment operators (paper, table IX).
            ``reward_seconds_per_sample`` is the cost of the reward function that takes the place of the reward
            model. With ``kl_penalty`` "reward" the critic's training reads ``actor_logprobs`` too, which its
            returns then depend on; the paper's interface of that operator lacks it.

    Raises:
        ExperimentError: actor and critic are to share a backbone but differ in architecture; neither a reward
            model nor the cost of a function, or both.
    """
    _check_reward(models, settings)
    per_token = workload.sequences * workload.response_tokens
    shared = structure.actor_critic_sharing

    b = RpegBuilder("ppo-ac" if shared else "ppo", weight_bytes_per_element=workload.bytes_per_element)
    if shared:
        actor = critic = "actor_critic"
        b.model(actor, _shared_backbone(models), trainable=True, staleness=structure.tau(actor))
    else:
        actor, critic = "actor", "critic"
        for name in (actor, critic):
            b.model(name, models[name], trainable=True, staleness=structure.tau(name))
    if "reward" in models:
        b.model("reward", models["reward"], trainable=False)
    b.model("reference", models["reference"], trainable=False)

    width = settings.data_bytes_per_element or workload.bytes_per_element
    data = functools.partial(b.data, bytes_per_element=width)
    prompts = data("prompts", elements=workload.prompts * workload.prompt_tokens)
    completions = data("completions", elements=workload.tokens_per_step)
    actor_logprobs = data("actor_logprobs", elements=per_token)
    reference_logprobs = data("reference_logprobs", elements=per_token)
    values = data("values", elements=per_token)
    rewards = data("rewards", elements=workload.sequences)

    rollout = b.generation(f"{actor}_generation", actor, reads=[prompts], writes=[completions, actor_logprobs])
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
    value = b.inference(f"{critic}_inference", critic, reads=[completions], writes=[values])
    signals = (completions, reference_logprobs, rewards, values)
    names = {f"{actor}_training": actor, f"{critic}_training": critic}
    if structure.fusion and not shared:
        trainings = [b.fused_training("fused_training", names, reads=[*signals, actor_logprobs])]
    else:
        trainings = [b.training(f"{actor}_training", actor, reads=[*signals, actor_logprobs])]
        if not shared:
            also = [actor_logprobs] if settings.kl_penalty == "reward" else []
            trainings.append(b.training(f"{critic}_training", critic, reads=[*signals, *also]))

    b.connect(rollout, completions, reference, reward, value)
    b.connect(reference, reference_logprobs, *trainings)
    b.connect(reward, rewards, *trainings)
    b.connect(value, values, *trainings)
    if settings.explicit_rollout_edges:
        b.connect(rollout, completions, *trainings)
        b.connect(rollout, actor_logprobs, trainings[0])
    b.publish(trainings[0], rollout)
    b.publish(trainings[-1], value)
    return b.build()


def _check_reward(models: Mapping[str, ModelSpec], settings: Settings) -> None:
    seconds = settings.reward_seconds_per_sample
    if "reward" not in models and seconds is None:
        raise ExperimentError(
            f"models.reward is missing and {_SECONDS} is not set",
            facts=["allowed: a reward model, or a reward function whose cost is stated"],
            hint="add models.reward, or settings: {ppo: {reward_seconds_per_sample: SECONDS}}",
        )
    if "reward" in models and seconds is not None:
        raise ExperimentError(
            f"models.reward is {models['reward'].name} and {_SECONDS} is {seconds}",
            facts=["allowed: a reward model or a reward function, not both"],
            hint=f"remove models.reward or {_SECONDS}",
        )


def _shared_backbone(models: Mapping[str, ModelSpec]) -> ModelSpec:
    """The actor with both heads (paper, A-J2b, S1)."""
    actor, critic = models["actor"], models["critic"]
    differences = [
        f"{field.name}: actor {getattr(actor, field.name)!r}, critic {getattr(critic, field.name)!r}"
        for field in attrs.fields(ModelSpec)
        if field.eq
        and field.name not in ("name", "source", "head")
        and getattr(actor, field.name) != getattr(critic, field.name)
    ]
    if differences:
        raise ExperimentError(
            f"structure.actor_critic_sharing is true, but models.actor ({actor.name}) and models.critic "
            f"({critic.name}) have different architectures",
            facts=[*differences, "allowed: one backbone, which may differ in its head only"],
            hint="set structure.actor_critic_sharing: [false]",
        )
    return actor.with_head(Head.LM_AND_SCALAR)
