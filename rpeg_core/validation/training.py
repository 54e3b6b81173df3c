"""Rows of training tables as batches of one training operator."""

from __future__ import annotations

import re

import attrs
import numpy as np

from rpeg_core.costing.batches import Layouts, OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Execution, Precision, Recompute, Sharding
from rpeg_core.spec.frameworks import FRAMEWORK_DEFAULTS, FrameworkDefaults
from rpeg_core.spec.machine import DeviceSpace, HardwareProfile
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload
from rpeg_core.validation.architectures import model_of_row
from rpeg_core.validation.rows import Row, Unusable

__all__ = ["Setup", "expert_degree", "layouts_of", "setup_of_row", "training_batch"]


@attrs.frozen(kw_only=True)
class Setup:
    """One training run of a table."""

    model: ModelSpec
    hardware: HardwareProfile
    machine: DeviceSpace
    workload: Workload
    layouts: Layouts
    execution: Execution


_PRECISIONS = {
    "bf16": Precision.BF16,
    "fp16": Precision.BF16,
    "fp8": Precision.FP8,
    "fp8-cs": Precision.FP8,
    "fp8 tensorwise": Precision.FP8,
    "fp8-mx": Precision.MXFP8,
    "mxfp8": Precision.MXFP8,
    "nvfp4": Precision.NVFP4,
}

_RECOMPUTE = (
    (r"^full", Recompute.FULL),
    (r"offload", Recompute.FULL),
    (r"selective \(op|every 2nd", Recompute.OPERATOR),
    (r"^selective|core_attn", Recompute.SELECTIVE),
    (r"^none|mla_up_proj|moe_act|^mlp", Recompute.NONE),
)


_FRAMEWORKS = (
    ("notes", r"maxtext", "maxtext"),
    ("source", r"torchtitan", "torchtitan"),
    ("notes", r"flash_attention_2.*fsdp2", "prime-rl-fa2"),
    ("source", r"prime-rl", "prime-rl"),
    ("source", r"nanotron", "nanotron"),
    ("source", r"automodel", "automodel"),
    ("source", r"sc21|2020 table", "megatron-2021"),
    ("source", r"2205\.05198", "megatron-2022"),
    ("source", r"megatron-bridge.* 26\.(0[6-9]|1)", "megatron-bridge-26.06"),
    ("source", r"megatron-bridge", "megatron-bridge"),
    ("source", r"nemo framework", "nemo-2024"),
    ("source", r"nemo|dgxc", "nemo"),
    ("source", r"megatron-lm", "megatron-core"),
)


def framework_of_row(row: Row) -> str:
    """The framework column, or what the source says.

    Raises:
        Unusable: neither names one that is known.
    """
    if row.known("framework"):
        name = row.text("framework").lower()
        if name in FRAMEWORK_DEFAULTS:
            return name
        raise Unusable(f"framework {name!r} is not known; allowed: {', '.join(FRAMEWORK_DEFAULTS)}")
    for column, pattern, name in _FRAMEWORKS:
        if re.search(pattern, row.text(column, "").lower()):
            return name
    raise Unusable("no framework column, and the source names no known framework")


def setup_of_row(row: Row, profile: HardwareProfile) -> Setup:
    """One row on one profile.

    Raises:
        Unusable: something that the replay needs is not known or contradicts itself.
    """
    model = model_of_row(row)
    framework = framework_of_row(row)
    defaults = FRAMEWORK_DEFAULTS[framework]
    gpus, tp, pp = row.whole("n_gpus"), row.whole("tp"), row.whole("pp")
    cp = row.whole("cp", default=1)
    if gpus % (tp * pp * cp):
        raise Unusable(f"{gpus} GPUs are not divisible by tp {tp} * pp {pp} * cp {cp}")
    dp = gpus // (tp * pp * cp)
    batch, micro = row.whole("global_batch"), row.whole("micro_batch")
    if pp > 1 and defaults.single_sequence_stages:
        micro = 1
    if batch % (dp * micro):
        raise Unusable(f"a batch of {batch} is not divisible by {dp} replicas * {micro} sequences")
    if model.layers < pp:
        raise Unusable(f"{model.layers} layers are fewer than {pp} stages")
    length = row.whole("seq_len")
    per_node = row.whole("gpus_per_node", default=profile.gpus_per_node)
    task = row.text("task", "pretrain").lower()
    layouts = layouts_of(dp, pp, tp, batch // (dp * micro), per_node, context=cp)
    fsdp = row.whole("fsdp", default=0)
    sharding = defaults.sharding
    if fsdp > 1:
        sharding = Sharding.FULL
    execution = Execution(
        framework=framework,
        precision=_precision(row),
        recompute=_recompute(row, defaults),
        sequence_parallel=_sequence_parallel(row, defaults) and tp > 1,
        context=cp,
        expert=expert_degree(row.whole("ep", default=1), model),
        expert_tensor=_expert_tensor(row),
        virtual_stages=min(_virtual_stages(row), max(1, model.layers // pp)) if pp > 1 else 1,
        sharding=sharding,
        shard_ranks=fsdp * cp if fsdp > 1 else 0,
        short_moments=_short_moments(row, framework),
        frozen_base="lora" in task,
        fixed_capacity="tokendrop" in row.text("model").lower(),
        offloaded="offload" in row.text("recompute", ""),
        chunked_loss="rl-trainer" in task,
        pipeline_outermost=True,
    )
    return Setup(
        model=model,
        hardware=profile,
        machine=DeviceSpace(racks=1, nodes_per_rack=-(-gpus // per_node), gpus_per_node=per_node),
        workload=Workload(prompts=batch, prompt_tokens=length // 2, response_tokens=length - length // 2),
        layouts=layouts,
        execution=execution,
    )


def expert_degree(degree: int, model: ModelSpec) -> int:
    """The expert-parallel degree of a row.

    Raises:
        Unusable: the model has no experts, or not a multiple of the degree.
    """
    experts = 1 if model.moe is None else model.moe.experts
    if experts % degree:
        why = "the model has no experts" if model.moe is None else f"it does not divide the {experts} experts"
        raise Unusable(f"ep is {degree}: {why}")
    return degree


def training_batch(setup: Setup) -> OperatorBatch:
    """The batch that cost terms price."""
    return OperatorBatch(
        role=Role.TRAINING,
        model=setup.model,
        seconds_per_sample=None,
        workload=setup.workload,
        machine=setup.machine,
        hardware=setup.hardware,
        layouts=setup.layouts,
        settings=None,
        execution=setup.execution,
        sequences=setup.workload.sequences,
        prefill=False,
        phases=(),
    )


def layouts_of(dp: int, pp: int, tp: int, microbatches: int, per_node: int, *, context: int = 1) -> Layouts:
    """One layout as arrays of length 1."""

    def one(value: int) -> np.ndarray:
        return np.array([value], np.int64)

    return Layouts(
        data=one(dp),
        pipeline=one(pp),
        tensor=one(tp),
        microbatches=one(microbatches),
        gpus=one(dp * context * pp * tp),
        data_tier=one(int(dp * pp * tp > per_node)),
        stage_tier=one(int(dp * pp * tp > per_node)),
        stages_per_node=one(max(1, min(pp, per_node // tp))),
        context=one(context),
    )


def _precision(row: Row) -> Precision:
    name = row.text("precision").lower()
    if name not in _PRECISIONS:
        raise Unusable(f"precision {name!r} is not known; allowed: {', '.join(_PRECISIONS)}")
    return _PRECISIONS[name]


def _recompute(row: Row, defaults: FrameworkDefaults) -> Recompute:
    text = row.text("recompute", "").lower()
    if not text:
        return defaults.recompute
    for pattern, found in _RECOMPUTE:
        if re.search(pattern, text):
            return found
    raise Unusable(f"recompute {text!r} is not known; allowed: none, selective, operator, full")


def _virtual_stages(row: Row) -> int:
    """The vp column; where the publication left it out, what it says of the same recipe in other releases."""
    elsewhere = re.search(r"vp listed na in this release \((\d+) in", row.text("notes", "").lower())
    return row.whole("vp", default=int(elsewhere.group(1)) if elsewhere else 1)


def _sequence_parallel(row: Row, defaults: FrameworkDefaults) -> bool:
    return defaults.sequence_parallel or "seq-parallel" in row.text("recompute", "")


def _expert_tensor(row: Row) -> int | None:
    found = re.search(r"\betp\s*=\s*(\d+)", row.text("notes", "").lower())
    return int(found.group(1)) if found else None


def _short_moments(row: Row, framework: str) -> bool:
    """The recipe of Megatron-Bridge for Moonlight has BF16 moments and gradients: ``exp_avg_dtype``,
    ``exp_avg_sq_dtype`` and ``main_grads_dtype`` of src/megatron/bridge/recipes/moonlight/moonlight_16b.py."""
    return framework.startswith("megatron-bridge") and "moonlight" in row.text("model").lower()
