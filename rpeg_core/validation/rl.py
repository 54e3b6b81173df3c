"""Rows of reinforcement-learning tables: whole GRPO steps of frameworks that generate and train on known GPUs.

A step is the generation of all samples, the log-probabilities of the policy and of the reference, and the training in
``samples / train_global_batch`` updates. On the same GPUs they follow each other; on separate ones, one step off
policy, the longer of generation and the rest sets the pace.

Response lengths are published by their mean only. They are taken as exponential, cut off at the longest that the
context allows: the distribution of largest entropy for a mean **[choice]**.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from pathlib import Path

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Execution, Recompute, Sharding
from rpeg_core.spec.machine import DeviceSpace, HardwareProfile
from rpeg_core.spec.workload import LengthQuantile, Workload
from rpeg_core.validation.architectures import model_of_row
from rpeg_core.validation.cases import Case, Part, Skipped, Table
from rpeg_core.validation.profiles import profile_of_gpu
from rpeg_core.validation.rows import LARGEST_COUNT, Row, Unusable, read_rows, usable
from rpeg_core.validation.training import Setup, expert_degree, layouts_of

__all__ = ["exponential_quantiles", "rl_cases"]

COLUMNS = (
    "framework",
    "algorithm",
    "gpu",
    "n_gpus",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "vocab",
    "placement",
    "samples_per_step",
    "response_len_mean",
    "gen_parallelism",
    "train_parallelism",
    "step_time_s",
)
LEAVING = 0.2


def exponential_quantiles(mean: float, longest: int, sequences: int) -> tuple[LengthQuantile, ...]:
    """Quantiles of ``sequences`` exponential lengths cut off at ``longest`` tokens whose mean is ``mean``.

    With the cut at M, ``mean = theta (1 - exp(-M/theta))``; theta by bisection. Groups of a fifth of those still alive
    leave together at their mean length, until less than one sequence is left or the cut is reached.
    """
    if mean >= 0.98 * longest:
        return (LengthQuantile(1.0, longest),)
    low, high = mean, 1e3 * longest
    for _ in range(80):
        theta = math.sqrt(low * high)
        low, high = (theta, high) if theta * -math.expm1(-longest / theta) < mean else (low, theta)
    width = -math.log1p(-LEAVING)
    inside = 1.0 - width * (1.0 - LEAVING) / LEAVING  # mean of an exponential within an interval of that width
    found: list[LengthQuantile] = []
    alive, index = 1.0, 0
    while alive * sequences > 1.0:
        tokens = round(theta * (index * width + inside))
        if tokens >= longest:
            break
        alive *= 1.0 - LEAVING
        if tokens > 0 and (not found or tokens > found[-1].tokens):
            found.append(LengthQuantile(1.0 - alive, tokens))
        index += 1
    last = min(longest, max(round(theta * (index * width + inside)), found[-1].tokens + 1 if found else 1))
    return (*found, LengthQuantile(1.0, last))


def rl_cases(path: Path, profiles: Mapping[str, HardwareProfile]) -> Table:
    """The steps of a table.

    Raises:
        ExperimentError: the file cannot be read or lacks required columns.
    """
    cases, skipped = [], []
    for number, row in enumerate(read_rows(path, COLUMNS), start=2):
        name, source = row.text("id", f"line {number}"), row.text("source", "")
        try:
            cases.append(usable(lambda: _case(row, name, source, profiles)))  # noqa: B023
        except Unusable as reason:
            skipped.append(Skipped(id=name, source=source, reason=str(reason)))
    return Table(path=path, cases=tuple(cases), skipped=tuple(skipped))


def _degrees(row: Row, column: str) -> dict[str, int]:
    found = {name.lower(): int(value) for name, value in re.findall(r"(TP|PP|CP|EP)\s*(\d+)", row.text(column))}
    if not found or not all(1 <= degree <= LARGEST_COUNT for degree in found.values()):
        raise Unusable(f"{column} is {row.text(column)!r}; allowed: degrees of at least 1 such as TP4 PP2")
    return found


def _case(row: Row, name: str, source: str, profiles: Mapping[str, HardwareProfile]) -> Case:
    if not re.search(r"megatron", row.text("framework").lower()):
        raise Unusable("only steps that train with Megatron are replayed")
    profile = profile_of_gpu(row.text("gpu"), profiles)
    model = model_of_row(row)
    gpus = row.whole("n_gpus")
    apart = "disaggregated" in row.text("placement").lower()
    generating = row.whole("gen_gpus", default=gpus)
    training = row.whole("train_gpus", default=gpus)
    samples = row.whole("samples_per_step")
    measured = row.number("step_time_s")
    response = row.number("response_len_mean")
    # Tokens per second are published for prompt and response; their difference is the prompt.
    total = row.number("tokens_per_s_per_gpu") * gpus * measured / samples
    prompt = max(1, round(total - response))
    longest = row.whole("max_seq_len") - prompt
    if longest < response:
        raise Unusable(f"a mean response of {response:g} tokens exceeds the context")
    per_node = row.whole("gpus_per_node", default=profile.gpus_per_node)
    machine = DeviceSpace(racks=1, nodes_per_rack=max(1, -(-gpus // per_node)), gpus_per_node=per_node)
    generation = _generation(row, profile, machine, generating, samples, prompt, response, longest, per_node)
    rest = _training(row, profile, machine, training, samples, prompt + response, per_node)
    setup = Setup(
        model=model,
        hardware=profile,
        machine=machine,
        workload=generation.workload,
        layouts=generation.layouts,
        execution=Execution(framework="nemo-rl"),
    )
    return Case(
        id=name,
        source=source,
        gpu=row.text("gpu"),
        model=row.text("model"),
        precision=row.text("precision_train", "bf16"),
        grade=row.text("grade", ""),
        kind="rl-step",
        measured=measured,
        setup=setup,
        parts=(Part(generation, 1.0), *rest),
        apart=apart,
    )


def _generation(
    row: Row,
    profile: HardwareProfile,
    machine: DeviceSpace,
    gpus: int,
    samples: int,
    prompt: int,
    response: float,
    longest: int,
    per_node: int,
) -> OperatorBatch:
    degrees = _degrees(row, "gen_parallelism")
    tp, pp = degrees.get("tp", 1), degrees.get("pp", 1)
    if gpus % (tp * pp):
        raise Unusable(f"{gpus} generating GPUs are not divisible by tp {tp} * pp {pp}")
    replicas = gpus // (tp * pp)
    lengths = exponential_quantiles(response, longest, samples)
    workload = Workload(
        prompts=samples, prompt_tokens=prompt, response_tokens=lengths[-1].tokens, response_lengths=lengths
    )
    return OperatorBatch(
        role=Role.GENERATION,
        model=model_of_row(row),
        seconds_per_sample=None,
        workload=workload,
        machine=machine,
        hardware=profile,
        layouts=layouts_of(replicas, pp, tp, 1, per_node),
        settings=None,
        execution=Execution(framework="nemo-rl-vllm", sharding=Sharding.NONE),
        sequences=samples,
        prefill=True,
        phases=workload.phases,
    )


def _training(
    row: Row, profile: HardwareProfile, machine: DeviceSpace, gpus: int, samples: int, tokens: float, per_node: int
) -> tuple[Part, ...]:
    degrees = _degrees(row, "train_parallelism")
    tp, pp, cp = degrees.get("tp", 1), degrees.get("pp", 1), degrees.get("cp", 1)
    if gpus % (tp * pp * cp):
        raise Unusable(f"{gpus} training GPUs are not divisible by tp {tp} * pp {pp} * cp {cp}")
    dp = gpus // (tp * pp * cp)
    model = model_of_row(row)
    checkpointing = row.text("activation_ckpt", "").lower() == "true"
    execution = Execution(
        framework="nemo-rl",
        recompute=Recompute.FULL if checkpointing else Recompute.NONE,
        sequence_parallel=tp > 1,
        context=cp,
        expert=expert_degree(degrees.get("ep", 1), model),
        sharding=Sharding.OPTIMIZER,
        pipeline_outermost=True,
    )
    length = max(2, round(tokens))
    # With packing, a microbatch is filled up to the context's length.
    packed = row.text("seq_packing", "").lower() == "true"
    filled = max(1.0, row.whole("max_seq_len") / length) if packed else 1.0
    batch = row.whole("train_global_batch")

    def operator(role: Role, sequences: int, micro: float) -> OperatorBatch:
        microbatches = max(1, round(sequences / (dp * micro * filled)))
        workload = Workload(prompts=sequences, prompt_tokens=length // 2, response_tokens=length - length // 2)
        return OperatorBatch(
            role=role,
            model=model,
            seconds_per_sample=None,
            workload=workload,
            machine=machine,
            hardware=profile,
            layouts=layouts_of(dp, pp, tp, microbatches, per_node),
            settings=None,
            execution=execution,
            sequences=sequences,
            prefill=False,
            phases=(),
        )

    updates = samples / batch
    forward = operator(Role.INFERENCE, samples, row.whole("logprob_batch", default=1))
    passes = 2.0 if row.text("kl_ref_logprob", "true").lower() != "false" else 1.0
    step = operator(Role.TRAINING, batch, row.whole("train_micro_batch", default=1))
    return (Part(forward, passes), Part(step, updates))
