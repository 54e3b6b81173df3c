"""What a run reads: its data, the semantics and settings of its algorithm, how tokens are chosen.

Every worker opens it for itself. The command opens it before it starts any, so that mistakes in files and settings are
found at once and by one process. No torch in this module.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import attrs

from rpeg_core.ir import ContainerKind
from rpeg_core.planning.plan import Plan
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.semantics import Content, Semantics, load_semantics
from rpeg_core.settings import build_settings
from rpeg_plugin_megatron.dataset import Data, Limits, open_data
from rpeg_plugin_megatron.settings import Sampling, Settings

__all__ = ["Inputs", "open_inputs"]


@attrs.frozen(kw_only=True, eq=False)
class Inputs:
    """What a run reads.

    Attributes:
        data: rows, tokenizer and reward function.
        semantics: of the algorithm.
        algorithm: its settings.
        sampling: how tokens are chosen.
    """

    data: Data
    semantics: Semantics
    algorithm: Any
    sampling: Sampling

    @property
    def notes(self) -> tuple[str, ...]:
        """What is allowed and hardly meant, a sentence each."""
        equal = self.data.dataset.equal_pairs
        if not equal:
            return ()
        are = "pair has" if len(equal) == 1 else "pairs have"
        return (f"warning: {len(equal)} {are} the same text chosen and rejected, the first in {equal[0]}",)


def open_inputs(plan: Plan, settings: Settings) -> Inputs:
    """Open and check everything that the plan and the settings name; relative paths start in the working directory.

    Raises:
        SettingsError: a setting names something that is not there, or has a value that is not allowed.
        DataError: a line of the file cannot be used.
        ExperimentError: the rows do not fit the workload, or a model has no embedding for a token of theirs.
    """
    workload, name = plan.workload, plan.experiment.algorithm
    template = Registry().get("algorithm", name).record
    semantics = load_semantics(template)
    read = [c.name for c in plan.rpeg.containers if c.kind is ContainerKind.DATA and c.name in plan.rpeg.inputs]
    data = open_data(
        data=settings.data,
        task=settings.task,
        tokenizer=settings.tokenizer,
        chat_template=settings.chat_template,
        reward=settings.reward,
        seed=settings.seed,
        prompts=workload.prompts,
        limits=Limits(prompt_tokens=workload.prompt_tokens, response_tokens=workload.response_tokens),
        pairs=any(semantics.contents[container] is Content.SEQUENCES for container in read),
        base_dir=Path.cwd(),
    )
    if any(op.model is None for op in plan.rpeg.operators):
        data.require_reward()
    for model in plan.rpeg.models:
        data.check_vocabulary(model.name, model.spec.vocab)
    values = plan.experiment.settings.get(name, {})
    return Inputs(
        data=data,
        semantics=semantics,
        algorithm=build_settings(template.settings, values, where=f"settings.{name}"),
        sampling=settings.sampling,
    )
