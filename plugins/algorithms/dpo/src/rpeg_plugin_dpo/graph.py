"""The graph of one DPO step (paper, section A-E: neither a reward model nor the online generation loop)."""

from __future__ import annotations

import functools
from collections.abc import Mapping

from rpeg_core import Rpeg, RpegBuilder
from rpeg_core.errors import ExperimentError
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload
from rpeg_plugin_dpo.settings import Settings

__all__ = ["build"]

RESPONSES_PER_PAIR = 2
"""Chosen and rejected."""


def build(workload: Workload, models: Mapping[str, ModelSpec], structure: Structure, settings: Settings) -> Rpeg:
    """One step of DPO, 3 operators.

    **[choice]** The paper names their count only; here they are inference of the policy for the
    log-probabilities of both responses, inference of the reference, and training (model.md, section 1).

    Args:
        workload: gives B pairs, R = 2 responses each, Lp, Lr and s_b, the bytes of an element, of weights
            alone when ``data_bytes_per_element`` is set.
        models: specs of ``actor`` (the policy) and ``reference``.
        structure: the staleness of ``actor``.
        settings: ``data_bytes_per_element``.

    Raises:
        ExperimentError: ``rollouts_per_prompt`` is not 2.
    """
    if workload.rollouts_per_prompt != RESPONSES_PER_PAIR:
        raise ExperimentError(
            f"workload.rollouts_per_prompt is {workload.rollouts_per_prompt}",
            facts=["allowed for dpo: 2, the chosen and the rejected response of a pair"],
            hint="set workload.rollouts_per_prompt: 2",
        )
    per_token = workload.sequences * workload.response_tokens

    b = RpegBuilder("dpo", weight_bytes_per_element=workload.bytes_per_element)
    b.model("actor", models["actor"], trainable=True, staleness=structure.tau("actor"))
    b.model("reference", models["reference"], trainable=False)

    width = settings.data_bytes_per_element or workload.bytes_per_element
    data = functools.partial(b.data, bytes_per_element=width)
    pairs = data("pairs", elements=workload.tokens_per_step)
    actor_logprobs = data("actor_logprobs", elements=per_token)
    reference_logprobs = data("reference_logprobs", elements=per_token)

    actor = b.inference("actor_inference", "actor", reads=[pairs], writes=[actor_logprobs])
    reference = b.inference("reference_inference", "reference", reads=[pairs], writes=[reference_logprobs])
    training = b.training("actor_training", "actor", reads=[pairs, actor_logprobs, reference_logprobs])

    b.connect(actor, actor_logprobs, training)
    b.connect(reference, reference_logprobs, training)
    b.publish(training, actor)
    return b.build()
