"""Replaying measured rows: what is read, what is refused and why, and how errors are counted."""

from __future__ import annotations

import math

import attrs
import numpy as np
import pytest

from rpeg_core.errors import ExperimentError
from rpeg_core.spec.execution import Precision, Recompute, Sharding
from rpeg_core.spec.workload import LengthQuantile
from rpeg_core.testing.toys import toy_hardware
from rpeg_core.validation.architectures import model_of_row
from rpeg_core.validation.cases import memory_cases, training_cases
from rpeg_core.validation.generation import generation_cases
from rpeg_core.validation.profiles import profile_of_gpu
from rpeg_core.validation.replay import spearman
from rpeg_core.validation.rl import exponential_quantiles, rl_cases
from rpeg_core.validation.rows import Row, Unusable, read_rows

TOY = toy_hardware()
PROFILES = {
    "h100": attrs.evolve(TOY, name="h100", gpus_per_node=8, device=attrs.evolve(TOY.device, memory_bytes=80 * 2**30))
}
TRAINING = {
    "id": "T1",
    "source": "NeMo Framework",
    "gpu": "H100-SXM-80GB",
    "n_gpus": "64",
    "gpus_per_node": "8",
    "model": "Llama-3-70B",
    "layers": "80",
    "hidden": "8192",
    "ffn": "28672",
    "heads": "64",
    "kv_heads": "8",
    "vocab": "128256",
    "head_dim": "128",
    "seq_len": "8192",
    "global_batch": "128",
    "micro_batch": "1",
    "tp": "4",
    "pp": "4",
    "vp": "5",
    "cp": "2",
    "precision": "fp8",
    "step_time_s": "10",
    "memory_gb": "50",
    "memory_kind": "peak GiB",
    "notes": "",
    "recompute": "",
    "task": "pretrain",
}
GENERATION = {
    **{key: TRAINING[key] for key in ("id", "gpu", "model", "layers", "hidden", "ffn", "heads", "kv_heads", "vocab")},
    "source": "s",
    "framework": "vllm",
    "head_dim": "128",
    "tp": "8",
    "dtype": "fp8",
    "isl": "1000",
    "osl": "100",
    "mode": "closed loop",
    "batch_or_concurrency": "4",
    "tpot_ms": "20",
    "ttft_ms": "100",
    "output_tokens_per_s": "200",
    "notes": "",
}


def table(tmp_path, rows, name="table.csv"):
    columns = list(rows[0])
    lines = [",".join(columns), *(",".join(str(row.get(c, "")) for c in columns) for row in rows)]
    path = tmp_path / name
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def training(tmp_path, **changes):
    found = training_cases(table(tmp_path, [{**TRAINING, **changes}]), PROFILES)
    return found.cases[0] if found.cases else found.skipped[0]


def test_a_training_row_becomes_its_layout(tmp_path):
    case = training(tmp_path)
    setup = case.setup
    layouts = (setup.layouts.data, setup.layouts.pipeline, setup.layouts.tensor, setup.layouts.microbatches)
    assert [int(x[0]) for x in layouts] == [2, 4, 4, 64]
    execution = setup.execution
    assert (execution.context, execution.virtual_stages, execution.precision) == (2, 5, Precision.FP8)
    assert (execution.recompute, execution.sequence_parallel) == (Recompute.NONE, True)
    assert case.kind == "training-8bit"
    assert setup.machine.gpus == 64
    assert setup.workload.tokens_per_step == 128 * 8192


@pytest.mark.parametrize(
    ("changes", "kind"),
    [
        ({"precision": "fp16"}, "training-16bit"),
        ({"precision": "mxfp8"}, "training-8bit"),
        ({"experts": "8", "topk": "2"}, "training-moe"),
    ],
)
def test_rows_are_counted_where_they_belong(tmp_path, changes, kind):
    assert training(tmp_path, **changes).kind == kind


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hidden": ""}, "hidden is not known"),
        ({"micro_batch": ""}, "micro_batch is not known"),
        ({"step_time_s": ""}, "step_time_s is not known"),
        ({"step_time_s": "-1"}, "step_time_s is -1; allowed: more than 0"),
        *(
            ({name: "0"}, f"{name} is 0; allowed: 1 to 2147483647")
            for name in ("tp", "pp", "cp", "n_gpus", "micro_batch")
        ),
        ({"tp": "-4"}, "tp is -4; allowed: 1 to 2147483647"),
        ({"seq_len": "0"}, "seq_len is 0"),
        ({"step_time_s": "0"}, "step_time_s is 0; allowed: more than 0"),
        ({"n_gpus": "1e30"}, "n_gpus is 1e+30; allowed"),
        ({"n_gpus": "131072", "global_batch": "4096"}, "the cluster has 131,072 GPUs"),
        ({"ep": "7"}, "ep is 7: the model has no experts"),
        ({"ep": "3", "experts": "8", "topk": "2"}, "ep is 3: it does not divide the 8 experts"),
        ({"layers": "many"}, "layers is 'many', not a number"),
        ({"layers": "1.5"}, "layers is 1.5, not a whole number"),
        ({"vocab": "nan"}, "vocab is 'nan', not a finite number"),
        ({"gpu": "TPU"}, "no installed profile is called 'tpu'"),
        ({"precision": "int3"}, "precision 'int3' is not known"),
        ({"recompute": "sometimes"}, "recompute 'sometimes' is not known"),
        ({"source": "somebody"}, "no framework column, and the source names no known framework"),
        ({"framework": "mine"}, "framework 'mine' is not known"),
        ({"n_gpus": "63"}, "63 GPUs are not divisible by tp 4 * pp 4 * cp 2"),
        ({"global_batch": "127"}, "a batch of 127 is not divisible by 2 replicas * 1 sequences"),
        ({"kv_heads": "7"}, "its dimensions are no model"),
    ],
)
def test_a_row_that_cannot_be_used_says_why(tmp_path, changes, reason):
    skipped = training(tmp_path, **changes)
    assert skipped.id == "T1"
    assert reason in skipped.reason


def test_nothing_is_dropped_silently(tmp_path):
    rows = [TRAINING, {**TRAINING, "id": "T2", "gpu": "?"}, {**TRAINING, "id": "", "hidden": ""}]
    found = training_cases(table(tmp_path, rows), PROFILES)
    assert [case.id for case in found.cases] == ["T1"]
    assert [row.id for row in found.skipped] == ["T2", "line 4"]


def test_a_missing_column_is_named(tmp_path):
    row = {key: value for key, value in TRAINING.items() if key != "hidden"}
    with pytest.raises(ExperimentError, match="lacks columns") as caught:
        training_cases(table(tmp_path, [row]), PROFILES)
    assert "missing: hidden" in str(caught.value)


def test_a_file_that_is_none_is_an_error(tmp_path):
    with pytest.raises(ExperimentError, match="cannot be read as CSV"):
        read_rows(tmp_path / "no.csv", ())


def test_fully_sharded_and_adapters(tmp_path):
    case = training(tmp_path, source="torchtitan", fsdp="8", tp="1", pp="1", cp="1", task="LoRA r16", vp="")
    execution = case.setup.execution
    assert (execution.framework, execution.sharding, execution.shard_ranks) == ("torchtitan", Sharding.FULL, 8)
    assert execution.frozen_base


def test_memory_is_in_the_unit_of_its_kind(tmp_path):
    rows = [
        TRAINING,
        {**TRAINING, "id": "T2", "memory_kind": "peak allocated MiB->GB"},
        {**TRAINING, "id": "T3", "memory_gb": ""},
    ]
    cases = memory_cases(table(tmp_path, rows), PROFILES).cases
    assert [case.measured for case in cases] == [50 * 2**30, 50e9]
    assert [case.without for case in cases] == [(), ("reserve",)]


def test_a_closed_loop_pays_for_the_other_prefills(tmp_path):
    (case,) = generation_cases(table(tmp_path, [GENERATION]), PROFILES).cases
    steps, prefill = case.parts
    assert case.measured == 0.02
    assert (steps.times, prefill.times) == (1 / 99, 3 / 100)
    assert (steps.batch.sequences, prefill.batch.sequences) == (4, 1)
    assert steps.batch.execution.cache_bytes_per_element == 1.0


def test_a_median_sees_steps_without_prefill(tmp_path):
    (case,) = generation_cases(table(tmp_path, [{**GENERATION, "notes": "median"}]), PROFILES).cases
    assert len(case.parts) == 1


def test_drawn_lengths_are_shorter_than_nominal(tmp_path):
    (case,) = generation_cases(table(tmp_path, [{**GENERATION, "notes": "range ratio 0.8"}]), PROFILES).cases
    assert case.parts[0].batch.workload.prompt_tokens == 900


def test_a_static_batch_is_one_generation(tmp_path):
    (case,) = generation_cases(table(tmp_path, [{**GENERATION, "mode": "static batch"}]), PROFILES).cases
    assert (case.kind, case.measured) == ("generation-static", 4 * 100 / 200)
    assert case.parts[0].batch.prefill


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"framework": "other"}, "framework 'other' is not known"),
        ({"dtype": "int4"}, "dtype 'int4' is not known"),
        ({"osl": "1"}, "osl is 1"),
        ({"tpot_ms": ""}, "tpot_ms is not known"),
        ({"tpot_ms": "nan"}, "tpot_ms is 'nan', not a finite number"),
        ({"tpot_ms": "-1"}, "tpot_ms is -1; allowed: more than 0"),
        ({"tp": "0"}, "tp is 0"),
        ({"isl": "0"}, "isl is 0"),
        ({"batch_or_concurrency": "-4"}, "batch_or_concurrency is -4"),
        ({"mode": "static batch", "output_tokens_per_s": "0"}, "output_tokens_per_s is 0; allowed: more than 0"),
        ({"ep": "8"}, "ep is 8: the model has no experts"),
    ],
)
def test_a_generation_row_that_cannot_be_used_says_why(tmp_path, changes, reason):
    (skipped,) = generation_cases(table(tmp_path, [{**GENERATION, **changes}]), PROFILES).skipped
    assert reason in skipped.reason


RL = {
    **{key: TRAINING[key] for key in ("id", "source", "gpu", "model", "layers", "hidden", "ffn", "heads", "kv_heads")},
    "vocab": "128256",
    "head_dim": "128",
    "framework": "NeMo-RL (Megatron-core + vLLM)",
    "algorithm": "GRPO",
    "n_gpus": "16",
    "gpus_per_node": "8",
    "placement": "colocated",
    "gen_gpus": "16",
    "train_gpus": "16",
    "samples_per_step": "64",
    "train_global_batch": "32",
    "max_seq_len": "4096",
    "response_len_mean": "1000",
    "gen_parallelism": "TP4 PP1",
    "train_parallelism": "TP4 CP1 EP1 PP2",
    "tokens_per_s_per_gpu": "47",
    "step_time_s": "100",
    "activation_ckpt": "True",
    "seq_packing": "True",
}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"n_gpus": "0"}, "n_gpus is 0"),
        ({"samples_per_step": "0"}, "samples_per_step is 0"),
        ({"step_time_s": "nan"}, "step_time_s is 'nan', not a finite number"),
        ({"response_len_mean": "-5"}, "response_len_mean is -5; allowed: more than 0"),
        ({"tokens_per_s_per_gpu": "1e308"}, "its numbers are out of range"),
        ({"gen_parallelism": "TP0 PP1"}, "gen_parallelism is 'TP0 PP1'; allowed: degrees of at least 1"),
        ({"train_parallelism": "TP4 CP0 PP2"}, "train_parallelism is 'TP4 CP0 PP2'"),
        ({"train_parallelism": "TP4 EP7 PP2"}, "ep is 7: the model has no experts"),
        ({"train_global_batch": "0"}, "train_global_batch is 0"),
    ],
)
def test_a_step_that_cannot_be_used_says_why(tmp_path, changes, reason):
    (skipped,) = rl_cases(table(tmp_path, [{**RL, **changes}]), PROFILES).skipped
    assert reason in skipped.reason


@pytest.mark.parametrize("memory", ["-5", "0", "nan", "inf"])
def test_a_memory_that_is_none_is_listed_as_skipped(tmp_path, memory):
    found = memory_cases(table(tmp_path, [{**TRAINING, "memory_gb": memory}]), PROFILES)
    assert found.cases == ()
    assert found.skipped[0].reason.startswith("memory: memory_gb is ")


def test_a_step_is_generation_two_forward_passes_and_updates(tmp_path):
    (case,) = rl_cases(table(tmp_path, [RL]), PROFILES).cases
    generation, forward, update = case.parts
    assert not case.apart
    assert (generation.times, forward.times, update.times) == (1.0, 2.0, 2.0)
    assert generation.batch.workload.prompt_tokens == 47 * 16 * 100 / 64 - 1000
    assert update.batch.execution.recompute is Recompute.FULL
    apart = rl_cases(table(tmp_path, [{**RL, "placement": "disaggregated"}]), PROFILES).cases
    assert apart[0].apart


@pytest.mark.parametrize("mean", [100.0, 1000.0, 2500.0, 3900.0])
def test_exponential_lengths_have_the_mean(mean):
    quantiles = exponential_quantiles(mean, 4000, 1000)
    shares = np.diff([0.0, *(q.fraction for q in quantiles)])
    found = sum(share * q.tokens for share, q in zip(shares, quantiles, strict=True))
    assert found == pytest.approx(mean, rel=0.03)
    assert quantiles[-1].fraction == 1.0


def test_the_longest_of_few_sequences_is_shorter_than_the_cut():
    # the last of 1000 exponential lengths of mean 100 is near 100 (ln 1000 + 0.58)
    assert exponential_quantiles(100.0, 4000, 1000)[-1].tokens == pytest.approx(750, rel=0.1)
    assert exponential_quantiles(2500.0, 4000, 1000)[-1].tokens == 4000
    assert exponential_quantiles(3990.0, 4000, 1000) == (LengthQuantile(1.0, 4000),)


def test_equal_values_share_a_rank():
    assert spearman([1, 2, 3, 4], [10, 20, 30, 40]) == 1.0
    assert spearman([1, 2, 3], [3, 2, 1]) == -1.0
    # ranks 1, 2.5, 2.5, 4 against 1, 2, 3, 4
    assert spearman([1, 2, 2, 4], [1, 2, 3, 4]) == pytest.approx(4.5 / math.sqrt(4.5 * 5))
    assert math.isnan(spearman([1, 2], [1, 2]))


def test_gpu_names_are_aliases_of_profiles():
    assert profile_of_gpu("H100-SXM-80GB", PROFILES).name == "h100"
    with pytest.raises(Unusable):
        profile_of_gpu("H20", PROFILES)


def test_what_columns_cannot_say_is_looked_up():
    deepseek = model_of_row(
        Row(
            {
                **TRAINING,
                "model": "DeepSeekV3",
                "layers": "61",
                "heads": "128",
                "kv_heads": "",
                "head_dim": "",
                "hidden": "7168",
                "ffn": "2048",
                "experts": "256",
                "topk": "8",
                "vocab": "129280",
            }
        )
    )
    assert deepseek.latent_attention is not None
    assert deepseek.moe.dense_layers == 3
    assert deepseek.layers == 62  # with the multi-token prediction module
    assert not model_of_row(Row({**TRAINING, "model": "Nemotron-4-15B"})).gated_ffn
