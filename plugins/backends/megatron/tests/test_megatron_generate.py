"""Generation against transformers: tokens and log-probabilities, in every layout and in every way to batch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from megatron_world import run_world
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.generate import Decoding
from rpeg_plugin_megatron.groups import Place, build_groups
from rpeg_plugin_megatron.huggingface import reader
from rpeg_plugin_megatron.initial import fill
from rpeg_plugin_megatron.model import build_shard
from rpeg_plugin_megatron.rows import join, left_pad, position_ids, prompt_mask, response_mask, row_mask
from rpeg_plugin_megatron.settings import Sampling
from transformers import AutoModelForCausalLM, LlamaConfig, Qwen2Config, Qwen3Config

from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.public_models import load_model

PAD, END = 0, 1
COMMON: dict[str, Any] = {
    "vocab_size": 24,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "initializer_range": 0.4,
    "pad_token_id": PAD,
    "eos_token_id": END,
    "bos_token_id": None,
}
CONFIGS = {
    "llama": LlamaConfig(**COMMON),
    "qwen2": Qwen2Config(**COMMON, tie_word_embeddings=True),
    "qwen3": Qwen3Config(**COMMON, head_dim=16),
}
LAYOUTS = (
    (Layout(1, 1, 1), 1),
    (Layout(1, 1, 2), 1),
    (Layout(1, 2, 1), 2),
    (Layout(2, 1, 1), 1),
)
LARGER_LAYOUTS = (
    (Layout(1, 2, 2), 4),
    (Layout(1, 4, 1), 4),
    (Layout(2, 2, 1), 2),
)
RESPONSE = 12


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    found = {}
    for index, (name, config) in enumerate(CONFIGS.items()):
        torch.manual_seed(index)
        model = AutoModelForCausalLM.from_config(config)
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.dim() == 1:  # biases and norms that are not 0 and 1
                    parameter.add_(0.3 * torch.randn_like(parameter))
        found[name] = tmp_path_factory.mktemp(name)
        model.save_pretrained(found[name])
    return found


def prompts_of(count: int, length: int = 7) -> torch.Tensor:
    """Left-padded prompts of 2 to ``length`` tokens."""
    random = torch.Generator().manual_seed(count)
    sizes = torch.randint(2, length + 1, (count,), generator=random).tolist()
    sizes[0] = length
    return left_pad([torch.randint(2, 24, (size,), generator=random).tolist() for size in sizes], length, PAD)


def world(rank: int, ranks: int, folder: Path, runs: list[dict[str, Any]]) -> list[Any]:
    """Per run, the responses of this rank's replica; several runs share one start of processes."""
    device = choose_device("cpu")
    spec = load_model(str(folder / "config.json"), base_dir=folder)
    places = [Place(Allocation(0, run["layout"].gpus), run["layout"]) for run in runs]
    groups = build_groups(places)
    results = []
    for place, run in zip(places, runs, strict=True):
        if place not in groups:
            results.append(None)
            continue
        shard = build_shard(spec, groups[place], device=device)
        fill(shard, reader(folder, spec))
        values = {key: value for key, value in run.items() if key not in ("layout", "prompts", "pauses")}
        data, dp = run["layout"].data, groups[place].coordinates.dp
        prompts = run["prompts"].chunk(data)[dp]
        count = run["prompts"].shape[0] * run["rollouts"] // data
        decoding = Decoding(
            shard, prompts, first_row=dp * count, response_tokens=RESPONSE, pad_id=PAD, end_ids=(END,), **values
        )
        for pause in (*run.get("pauses", ()), RESPONSE):
            decoding.advance(pause)
        done = decoding.result()
        results.append((dp, done.tokens.numpy(), done.logprobs.numpy(), done.finished.numpy()))
    return results


def generated(folder: Path, runs: list[dict[str, Any]]) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Tokens, log-probabilities and ends of whole batches; every rank of a replica must know the same."""
    ranks = max(run["layout"].gpus for run in runs)
    by_rank = run_world(world, ranks, folder, runs)
    batches = []
    for index, run in enumerate(runs):
        replicas: dict[int, tuple[torch.Tensor, ...]] = {}
        for rank in range(run["layout"].gpus):
            dp, *values = by_rank[rank][index]
            tensors = tuple(torch.from_numpy(value) for value in values)
            first = replicas.setdefault(dp, tensors)
            assert all(torch.equal(a, b) for a, b in zip(first, tensors, strict=True))
        parts = zip(*(replicas[dp] for dp in sorted(replicas)), strict=True)
        tokens, logprobs, finished = (torch.cat(part) for part in parts)
        batches.append((tokens, logprobs, finished))
    return batches


def run_of(prompts: torch.Tensor, **changes: Any) -> dict[str, Any]:
    values: dict[str, Any] = {"layout": Layout(1, 1, 1), "rollouts": 1, "seed": 5, "step": 2, "sampling": Sampling()}
    return values | {"prompts": prompts} | changes


def teacher_forced(folder: Path, prompts: torch.Tensor, responses: torch.Tensor, temperature: float) -> torch.Tensor:
    """Log-probabilities [n, Lr] of responses by transformers, 0 after the end."""
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    rows = join(prompts, responses).long()
    mask = row_mask(rows, prompts.shape[1], PAD, [END])
    with torch.no_grad():
        logits = model(rows, attention_mask=mask.long(), position_ids=position_ids(mask)).logits
    logprobs = torch.log_softmax(logits[:, prompts.shape[1] - 1 : -1] / temperature, dim=-1)
    chosen = logprobs.gather(2, responses.long()[:, :, None])[:, :, 0]
    return chosen.masked_fill(~response_mask(responses, [END]), 0.0)


def check_greedy(folder: Path, layouts: Sequence[tuple[Layout, int]]) -> None:
    prompts = prompts_of(16)
    model = AutoModelForCausalLM.from_pretrained(folder).eval()
    mask = prompt_mask(prompts, PAD).long()
    expected = model.generate(prompts.long(), attention_mask=mask, do_sample=False, max_new_tokens=RESPONSE)
    expected = torch.nn.functional.pad(expected[:, prompts.shape[1] :], (0, RESPONSE))[:, :RESPONSE]
    runs = [
        run_of(prompts, layout=layout, microbatches=microbatches, sampling=Sampling(temperature=0.0))
        for layout, microbatches in layouts
    ]
    for tokens, logprobs, finished in generated(folder, runs):
        assert tokens.tolist() == expected.tolist()
        assert finished.tolist() == (expected == END).any(dim=1).tolist()
        torch.testing.assert_close(logprobs, teacher_forced(folder, prompts, tokens, 1.0), atol=1e-4, rtol=0)
    ends = int((expected == END).sum())
    assert 0 < ends < len(prompts)  # some rows must end early


def test_greedy_decoding_equals_transformers_in_every_layout(folders: dict[str, Path]) -> None:
    check_greedy(folders["llama"], LAYOUTS)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CONFIGS))
def test_greedy_decoding_equals_transformers_for_every_family_and_larger_layouts(
    folders: dict[str, Path], name: str
) -> None:
    check_greedy(folders[name], [*LAYOUTS[1:3], *LARGER_LAYOUTS])


def test_samples_are_the_same_in_every_layout_and_way_to_batch(folders: dict[str, Path]) -> None:
    prompts = prompts_of(8)
    sampling = Sampling(temperature=1.4, top_k=20, top_p=0.97)
    ways = [
        *({"layout": layout, "microbatches": microbatches} for layout, microbatches in LAYOUTS),
        {"layout": Layout(1, 1, 1), "shared_prefix": True},
        {"layout": Layout(1, 2, 1), "shared_prefix": True, "microbatches": 3},  # cuts through a prompt's rollouts
        {"layout": Layout(1, 1, 2), "microbatches": 2, "pauses": (1, 2, 7)},
        {"layout": Layout(1, 2, 1), "microbatches": 4, "pauses": (3, 3, 8)},
    ]
    runs = [run_of(prompts, rollouts=3, sampling=sampling, **way) for way in ways]
    batches = generated(folders["llama"], runs)
    tokens, logprobs, finished = batches[0]
    repeated = prompts.repeat_interleave(3, dim=0)
    torch.testing.assert_close(logprobs, teacher_forced(folders["llama"], repeated, tokens, 1.4), atol=1e-4, rtol=0)
    assert len({tuple(row) for row in tokens.tolist()}) > 20
    assert 0 < int(finished.sum()) < 24
    after_end = ~response_mask(tokens, [END])
    assert (tokens[after_end] == PAD).all()
    for other, other_logprobs, _ in batches[1:]:
        assert other.tolist() == tokens.tolist()
        torch.testing.assert_close(other_logprobs, logprobs, atol=1e-4, rtol=0)


def test_randomness_is_keyed_by_seed_and_step(folders: dict[str, Path]) -> None:
    prompts = prompts_of(8)
    runs = [run_of(prompts, **changes) for changes in ({}, {}, {"seed": 6}, {"step": 3})]
    first, again, seed, step = (tokens.tolist() for tokens, _, _ in generated(folders["llama"], runs))
    assert first == again
    assert len({str(tokens) for tokens in (first, seed, step)}) == 3


def test_decoding_stops_when_all_rows_are_finished(folders: dict[str, Path]) -> None:
    steps = run_world(count_steps, 1, folders["llama"])[0]
    assert steps == [1, 1]


def count_steps(rank: int, ranks: int, folder: Path) -> list[int]:
    """Calls of the model when every token ends a response, for one and for two microbatches."""
    place = Place(Allocation(0, 1), Layout(1, 1, 1))
    spec = load_model(str(folder / "config.json"), base_dir=folder)
    shard = build_shard(spec, build_groups([place])[place], device=choose_device("cpu"))
    fill(shard, reader(folder, spec))
    calls: list[int] = []
    shard.module.register_forward_hook(lambda *_: calls.append(1))
    counts = []
    for microbatches in (1, 2):
        calls.clear()
        decoding = Decoding(
            shard,
            prompts_of(4),
            rollouts=1,
            first_row=0,
            seed=0,
            step=0,
            sampling=Sampling(),
            response_tokens=RESPONSE,
            pad_id=PAD,
            end_ids=tuple(range(24)),
            microbatches=microbatches,
        )
        decoding.advance(RESPONSE)
        assert decoding.finished.all()
        counts.append(len(calls) // microbatches)
    return counts
