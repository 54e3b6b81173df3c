"""What training frameworks do when nobody says otherwise; their coefficients are the cost plugin's business."""

from __future__ import annotations

from collections.abc import Mapping

import attrs

from rpeg_core.spec.execution import Recompute, Sharding

__all__ = ["FRAMEWORK_DEFAULTS", "FrameworkDefaults", "defaults_of"]


@attrs.frozen(kw_only=True)
class FrameworkDefaults:
    """What a framework does when a table of runs, or of sharding a plan, is silent."""

    recompute: Recompute = Recompute.NONE
    sequence_parallel: bool = True
    sharding: Sharding = Sharding.OPTIMIZER
    single_sequence_stages: bool = False  # with a pipeline, the local batch runs one sequence at a time


FRAMEWORK_DEFAULTS: Mapping[str, FrameworkDefaults] = {
    "megatron-2021": FrameworkDefaults(recompute=Recompute.FULL, sequence_parallel=False, sharding=Sharding.NONE),
    "megatron-2022": FrameworkDefaults(sequence_parallel=False, sharding=Sharding.NONE),
    "megatron-core": FrameworkDefaults(),
    "nemo": FrameworkDefaults(),
    "nemo-2024": FrameworkDefaults(),
    "megatron-bridge": FrameworkDefaults(),
    "megatron-bridge-26.06": FrameworkDefaults(),
    "torchtitan": FrameworkDefaults(sharding=Sharding.FULL, single_sequence_stages=True),
    "maxtext": FrameworkDefaults(recompute=Recompute.OPERATOR, sharding=Sharding.FULL),
    "prime-rl": FrameworkDefaults(recompute=Recompute.FULL, sharding=Sharding.FULL),
    "prime-rl-fa2": FrameworkDefaults(recompute=Recompute.FULL, sharding=Sharding.FULL),
    "nanotron": FrameworkDefaults(sequence_parallel=False),
    "automodel": FrameworkDefaults(sharding=Sharding.FULL),
}


def defaults_of(framework: str) -> FrameworkDefaults:
    """The defaults of a framework, those of :class:`FrameworkDefaults` for one that is not listed or not named."""
    return FRAMEWORK_DEFAULTS.get(framework, FrameworkDefaults())
