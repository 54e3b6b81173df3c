"""Rows of generation tables as batches of one generation operator.

Static batches: all sequences start together, one prefill and the decode of all. A closed loop of c requests with
continuous batching: every request's prefill delays the c - 1 others once, so that a token takes

    TPOT = t_decode(c) + (c - 1) T_prefill / tokens

(the engine works through c prefills and the tokens' steps in the time that a request stays). Tables that print the
median latency of a token rather than the mean see steps without a prefill.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Execution, Precision, Sharding
from rpeg_core.spec.machine import DeviceSpace, HardwareProfile
from rpeg_core.spec.workload import Workload
from rpeg_core.validation.architectures import model_of_row
from rpeg_core.validation.cases import Case, Part, Skipped, Table
from rpeg_core.validation.profiles import profile_of_gpu
from rpeg_core.validation.rows import Row, Unusable, read_rows, usable
from rpeg_core.validation.training import Setup, expert_degree, layouts_of

__all__ = ["engine_batch", "generation_cases"]

COLUMNS = (
    "framework",
    "gpu",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "vocab",
    "dtype",
    "isl",
    "osl",
    "mode",
    "batch_or_concurrency",
)

_PRECISIONS = {
    "fp16": Precision.BF16,
    "bf16": Precision.BF16,
    "fp8": Precision.FP8,
    "fp8_block": Precision.FP8,
    "nvfp4": Precision.NVFP4,
}
_ENGINES = (
    (r"tensorrt-llm|^trtllm-2024", "trtllm-2024"),
    (r"^trtllm-2023", "trtllm-2023"),
    (r"trtllm", "trtllm"),
    (r"vllm", "vllm"),
    (r"sglang", "sglang"),
    (r"lmdeploy", "lmdeploy"),
)
_EIGHT_BIT_CACHE = ("trtllm", "trtllm-2023", "trtllm-2024", "vllm")
"""Engines whose published FP8 and FP4 runs keep K and V in FP8 (TensorRT-LLM performance pages; the InferenceMAX
recipes pass ``kv_cache_config.dtype: fp8`` and ``--kv-cache-dtype fp8``)."""


def engine_of_row(row: Row) -> str:
    """The engine; TensorRT-LLM's own tables of 2023 and 2024 (C++ static batches) are told from serving."""
    name = row.text("framework").lower()
    for pattern, engine in _ENGINES:
        if re.search(pattern, name):
            old = engine == "trtllm-2024" and re.match(r"0\.[1-6](\.|$)", row.text("version", ""))
            return "trtllm-2023" if old else engine
    raise Unusable(f"framework {name!r} is not known; allowed: trtllm, vllm, sglang, lmdeploy")


def engine_batch(
    setup: Setup, *, sequences: int, prompt: int, response: int, prefill: bool, decode: bool
) -> OperatorBatch:
    """A generation of ``sequences`` sequences; with or without its prefill and its token steps."""
    workload = Workload(prompts=sequences, prompt_tokens=prompt, response_tokens=max(response, 1))
    return OperatorBatch(
        role=Role.GENERATION,
        model=setup.model,
        seconds_per_sample=None,
        workload=workload,
        machine=setup.machine,
        hardware=setup.hardware,
        layouts=setup.layouts,
        settings=None,
        execution=setup.execution,
        sequences=sequences,
        prefill=prefill,
        phases=workload.phases if decode and response > 1 else (),
    )


def generation_cases(path: Path, profiles: Mapping[str, HardwareProfile]) -> Table:
    """The generation runs of a table: TPOT of closed loops, seconds of static batches, first-token latencies."""
    cases: list[Case] = []
    skipped: list[Skipped] = []
    for number, row in enumerate(read_rows(path, COLUMNS), start=2):
        name, source = row.text("id", f"line {number}"), row.text("source", "")
        try:
            cases.append(usable(lambda: _case(row, name, source, profiles)))  # noqa: B023
        except Unusable as reason:
            skipped.append(Skipped(id=name, source=source, reason=str(reason)))
    return Table(path=path, cases=tuple(cases), skipped=tuple(skipped))


def _case(row: Row, name: str, source: str, profiles: Mapping[str, HardwareProfile]) -> Case:
    setup = _setup(row, profile_of_gpu(row.text("gpu"), profiles))
    count = row.whole("batch_or_concurrency")
    # Benchmarks that draw lengths between a ratio r and 1 of the nominal ones have (1 + r) / 2 of them in the mean.
    drawn = re.search(r"range ratio (0\.\d+)", row.text("notes", ""))
    scale = (1.0 + float(drawn.group(1))) / 2.0 if drawn else 1.0
    prompt = max(1, round(scale * row.whole("isl")))
    response = max(1, round(scale * row.whole("osl")))
    mode = row.text("mode").lower()
    if "static" in mode:
        kind = "generation-static"
        measured = count * response / row.number("output_tokens_per_s")
        whole = engine_batch(setup, sequences=count, prompt=prompt, response=response, prefill=True, decode=True)
        parts = [Part(whole, 1.0)]
    elif "prefill" in mode:
        kind = "generation-prefill"
        measured = row.number("ttft_ms") / 1e3
        first = engine_batch(setup, sequences=count, prompt=prompt, response=1, prefill=True, decode=False)
        parts = [Part(first, 1.0)]
    else:
        kind = "generation-tpot"
        measured = row.number("tpot_ms") / 1e3
        if response < 2:
            raise Unusable("osl is 1: there is no time per output token")
        count = min(count, _sequences_that_fit(setup, prompt + response // 2))
        steps = engine_batch(setup, sequences=count, prompt=prompt, response=response, prefill=False, decode=True)
        parts = [Part(steps, 1.0 / (response - 1))]
        if "median" not in row.text("notes", ""):
            alone = engine_batch(setup, sequences=1, prompt=prompt, response=1, prefill=True, decode=False)
            parts.append(Part(alone, (count - 1) / response))
    return Case(
        id=name,
        source=source,
        gpu=row.text("gpu"),
        model=row.text("model"),
        precision=row.text("dtype"),
        grade=row.text("grade", ""),
        kind=kind,
        measured=measured,
        setup=setup,
        parts=tuple(parts),
    )


ENGINE_MEMORY_SHARE = 0.9
"""Share of the GPU's memory that an engine uses (``gpu_memory_utilization`` of vllm, ``free_gpu_memory_fraction`` of
TensorRT-LLM)."""


def _sequences_that_fit(setup: Setup, tokens: int) -> int:
    """Sequences of ``tokens`` tokens whose K and V fit beside the weights; at least one. More of them wait."""
    layouts, execution, model = setup.layouts, setup.execution, setup.model
    gpus = int(layouts.tensor[0] * layouts.pipeline[0])
    weight = {Precision.BF16: 2.0, Precision.NVFP4: 0.5625}.get(execution.precision, 1.0)
    weights = weight * model.matrix_parameters + 2.0 * (model.embedding_parameters + model.head_parameters)
    free = ENGINE_MEMORY_SHARE * setup.hardware.device.memory_bytes - weights / gpus
    element = execution.cache_bytes_per_element or 2.0
    per_token = model.kv_elements_per_token_per_layer(int(layouts.tensor[0])) * element * model.layers
    return max(1, int(free / (per_token / int(layouts.pipeline[0]) * tokens)))


def _setup(row: Row, profile: HardwareProfile) -> Setup:
    engine = engine_of_row(row)
    dtype = row.text("dtype").lower()
    if dtype not in _PRECISIONS:
        raise Unusable(f"dtype {dtype!r} is not known; allowed: {', '.join(_PRECISIONS)}")
    tp, pp = row.whole("tp", default=1), row.whole("pp", default=1)
    model = model_of_row(row)
    precision = _PRECISIONS[dtype]
    small = precision is not Precision.BF16 and engine in _EIGHT_BIT_CACHE
    execution = Execution(
        framework=engine,
        precision=precision,
        expert=expert_degree(row.whole("ep", default=1), model),
        sharding=Sharding.NONE,
        cache_bytes_per_element=1.0 if small else None,
    )
    per_node = max(profile.gpus_per_node, tp)
    return Setup(
        model=model,
        hardware=profile,
        machine=DeviceSpace(racks=1, nodes_per_rack=max(1, -(-tp * pp // per_node)), gpus_per_node=per_node),
        workload=Workload(prompts=1, prompt_tokens=1, response_tokens=1),
        layouts=layouts_of(1, pp, tp, 1, per_node),
        execution=execution,
    )
