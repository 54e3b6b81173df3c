"""Rows by step from files and tasks, their errors, and the rewards of responses."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from rpeg_plugin_megatron import rewards
from rpeg_plugin_megatron.dataset import Data, Limits, open_data
from rpeg_plugin_megatron.rows import right_pad, strip_prompt, strip_response
from rpeg_plugin_megatron.tasks import task_named, task_names

from rpeg_core.errors import DataError, ExecutionError, ExperimentError, SettingsError


def data_of(tmp_path: Path, rows: list[Any] | None = None, **changes: Any) -> Data:
    values: dict[str, Any] = {
        "data": None,
        "task": None,
        "tokenizer": "characters",
        "chat_template": False,
        "reward": None,
        "seed": 3,
        "prompts": 4,
        "limits": Limits(prompt_tokens=8, response_tokens=6),
        "pairs": False,
        "base_dir": tmp_path,
    }
    if rows is not None:
        lines = [row if isinstance(row, str) else json.dumps(row) for row in rows]
        (tmp_path / "rows.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")
        values["data"] = "rows.jsonl"
    return open_data(**(values | changes))


def test_every_epoch_has_every_line_once_and_its_own_order(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"prompt": f"q{i}", "answer": i} for i in range(10)])
    served = [text for step in range(5) for text in data.dataset.batch(step, 0, 4).texts]
    epochs = [served[:10], served[10:]]
    assert [sorted(epoch) for epoch in epochs] == [sorted(f"q{i}" for i in range(10))] * 2
    assert epochs[0] != epochs[1]


def test_rows_depend_on_seed_and_step_alone(tmp_path: Path) -> None:
    rows = [{"prompt": f"q{i}", "answer": i} for i in range(9)]
    for changes in ({}, {"data": None, "task": "sort"}):
        data = data_of(tmp_path, rows, **changes)
        whole = data.dataset.batch(7, 0, 4)
        halves = [data.dataset.batch(7, 0, 2), data.dataset.batch(7, 2, 4)]
        assert torch.equal(torch.cat([half.prompts for half in halves]), whole.prompts)
        assert whole.texts != data.dataset.batch(8, 0, 4).texts
        assert whole.texts != data_of(tmp_path, rows, seed=4, **changes).dataset.batch(7, 0, 4).texts


def test_prompts_are_padded_on_the_left(tmp_path: Path) -> None:
    data = data_of(tmp_path, [{"prompt": "ab", "answer": ""}], prompts=1)
    batch = data.dataset.batch(0, 0, 1)
    assert batch.prompts.tolist() == [[0] * 6 + data.tokenizer.encode("ab")]
    assert batch.prompts.dtype == torch.int32


def test_pairs_are_the_chosen_and_then_the_rejected_row(tmp_path: Path) -> None:
    rows = [{"prompt": "2+2=", "chosen": "4", "rejected": "five"}]
    data = data_of(tmp_path, rows, prompts=1, pairs=True)
    pairs = data.dataset.batch(0, 0, 1).pairs
    assert pairs is not None
    assert pairs.shape == (2, 14)
    assert [data.tokenizer.decode(strip_prompt(row[:8], 0)) for row in pairs] == ["2+2="] * 2
    assert [data.tokenizer.decode(strip_response(row[8:], [1])) for row in pairs] == ["4", "five"]
    assert data.reward is None


@pytest.mark.parametrize(
    ("line", "pairs", "expected"),
    [
        ("{", False, "line 3 is not JSON"),
        ("[1]", False, r"line 3 is a list\n  allowed: a JSON object"),
        ('{"question": 1}', False, r"line 3 has no key 'prompt', only 'question'\n  allowed: a key 'prompt'"),
        ('{"prompt": 5}', False, r"line 3 has a prompt that is the number 5\n  allowed: text, or a list of chat"),
        ('{"prompt": ""}', False, r"line 3 has an empty prompt\n  allowed: at least one token"),
        (
            '{"prompt": [{"role": "user", "content": "a"}]}',
            False,
            r"line 3 has chat messages as prompt, but megatron\.chat_template is false",
        ),
        (
            '{"prompt": "123456789"}',
            False,
            r"line 3: prompt has 9 tokens\n  allowed: at most 8 \(workload\.prompt_tokens\)",
        ),
        (
            '{"prompt": "é"}',
            False,
            r"character 'é' of 'é' is not in the alphabet\n  in: .*rows\.jsonl, line 3\n  allowed",
        ),
        ('{"prompt": "a", "chosen": "b"}', True, r"line 3 has no key 'rejected'\n  allowed: text under each of"),
        ('{"prompt": "a", "chosen": 1, "rejected": "b"}', True, "line 3 has a 'chosen' that is the number 1"),
        (
            '{"prompt": "a", "chosen": "123456", "rejected": "b"}',
            True,
            r"line 3: 'chosen', end token included, has 7 tokens\n  allowed: at most 6 \(workload\.response_tokens\)",
        ),
    ],
)
def test_a_bad_line_is_named_with_what_is_allowed(tmp_path: Path, line: str, pairs: bool, expected: str) -> None:
    good = {"prompt": "a", "chosen": "b", "rejected": "c"}
    with pytest.raises(DataError, match=expected) as caught:
        data_of(tmp_path, [good, "", line, good], pairs=pairs)
    assert "rows.jsonl, line 3" in str(caught.value)
    assert caught.value.exit_code == 4


def test_files_and_settings_that_name_nothing_are_refused(tmp_path: Path) -> None:
    for changes, error, expected in (
        ({"data": "none.jsonl"}, DataError, r"cannot read .*none\.jsonl"),
        ({}, SettingsError, "neither is given"),
        ({"data": "a", "task": "copy"}, SettingsError, "both are given"),
        ({"task": "copi"}, SettingsError, "did you mean 'copy'"),
        ({"task": "copy", "limits": Limits(prompt_tokens=1, response_tokens=9)}, ExperimentError, "does not fit"),
        ({"task": "copy", "tokenizer": "characters:012"}, SettingsError, "does not write each of '0123456789='"),
    ):
        with pytest.raises(error, match=expected):
            data_of(tmp_path, **changes)
    with pytest.raises(DataError, match="has no rows"):
        data_of(tmp_path, [""])


def test_a_file_may_begin_with_a_mark_and_must_be_utf_8(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'\xef\xbb\xbf{"prompt": "a"}\r\n{"prompt": "b"}\r\n')
    assert sorted(data_of(tmp_path, data="rows.jsonl", prompts=2).dataset.batch(0, 0, 2).texts) == ["a", "b"]
    path.write_bytes(b'{"prompt": "a"}\n\n{"prompt": "\xe9"}\n')
    with pytest.raises(DataError, match=r"rows\.jsonl, line 3 is not UTF-8"):
        data_of(tmp_path, data="rows.jsonl")


def test_a_reward_that_nobody_named_is_asked_for(tmp_path: Path) -> None:
    rows = [{"prompt": "a", "answer": "b"}, {"prompt": "a"}]
    assert data_of(tmp_path, rows[:1]).require_reward().path.endswith(":exact_match")
    with pytest.raises(SettingsError, match="no reward function is named"):
        data_of(tmp_path, rows).require_reward()


@pytest.mark.parametrize(
    ("name", "solution"),
    [("copy", lambda x: x), ("reverse", lambda x: x[::-1]), ("sort", lambda x: "".join(sorted(x)))],
)
def test_a_task_has_right_answers_wrong_pairs_and_prompts_of_several_lengths(
    tmp_path: Path, name: str, solution: Any
) -> None:
    data = data_of(tmp_path, task=name, pairs=True)
    batch = data.dataset.batch(0, 0, 200)
    assert batch.pairs is not None
    for text, row, chosen, rejected in zip(batch.texts, batch.rows, batch.pairs[::2], batch.pairs[1::2], strict=True):
        assert row["answer"] == solution(text.removesuffix("="))
        answers = [data.tokenizer.decode(strip_response(pair[8:], [1])) for pair in (chosen, rejected)]
        assert answers[0] == row["answer"] != answers[1]
        assert len(answers[0]) == len(answers[1])
    assert {len(text) - 1 for text in batch.texts} == {3, 4, 5}
    assert name in task_names()


def test_responses_are_scored_without_their_end_and_by_prompt(tmp_path: Path) -> None:
    data = data_of(tmp_path, task="copy")
    batch = data.dataset.batch(0, 0, 2)
    encode = data.tokenizer.encode
    answers = [row["answer"] for row in batch.rows]
    responses = [[*encode(answers[0]), 1], [*encode(answers[0][:-1]), 1], [1], [*encode(answers[1]), 1]]
    scores = data.rewards(batch, right_pad(responses, 6, 0), rollouts=2)
    assert scores.dtype == torch.float32
    assert scores.tolist() == pytest.approx([1.0, 1.0 - 1 / len(answers[0]), 0.0, 1.0])


def test_built_in_rewards() -> None:
    row = {"answer": 12}
    assert rewards.exact_match("", " 12\n", row) == 1.0
    assert rewards.exact_match("", "12.", row) == 0.0
    assert rewards.matching_characters("", "12", row) == 1.0
    assert rewards.matching_characters("", "1234", row) == 0.5
    assert rewards.matching_characters("", "", row) == 0.0
    assert rewards.last_number("", "5 + 7 is 12.", row) == 1.0
    assert rewards.last_number("", "12, no: 13", row) == 0.0
    assert rewards.last_number("", "1,200", {"answer": "1200"}) == 1.0
    assert rewards.last_number("", "none", row) == 0.0


def failing(prompt: str, response: str, row: Any) -> float:
    if prompt == "exit":
        raise SystemExit(2)
    values = {"nan": float("nan"), "none": None, "raise": 1 / len(response), "large": 10**400, "fp32": 1e39}
    return values[prompt]  # type: ignore[return-value]


def test_a_reward_that_raises_or_is_no_number_names_the_response() -> None:
    reward = rewards.Reward("mine:failing", failing)
    for prompt, response, expected in (
        ("raise", "", "raised ZeroDivisionError"),
        ("nan", "ab", "returned nan"),
        ("none", "ab", "returned None"),
        ("large", "ab", "returned 1000"),
        ("fp32", "ab", r"returned 1e\+39"),
        ("exit", "ab", "raised SystemExit: 2"),
    ):
        with pytest.raises(ExecutionError, match=rf"reward mine:failing {expected}.*\n  prompt: '{prompt}'"):
            reward(prompt, response, {})


@pytest.mark.parametrize(
    ("path", "expected"),
    [
        ("rpeg_plugin_megatron.rewards", "allowed: package.module:name"),
        ("no_such_module:f", "No module named 'no_such_module'"),
        (".rewards:f", "allowed: package.module:name"),
        ("rpeg_plugin_megatron.rewards:nothing", "has no such name"),
        ("rpeg_plugin_megatron.rewards:_SIGNATURE", "is not a function"),
    ],
)
def test_a_reward_that_cannot_be_loaded_is_refused(path: str, expected: str) -> None:
    with pytest.raises(SettingsError, match=expected):
        rewards.load_reward(path)
    assert task_named("copy").reward == "rpeg_plugin_megatron.rewards:matching_characters"


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        ("raise KeyError('x')", r"importing mine raised KeyError: 'x'\n  at: .*mine\.py, line 1"),
        ("def f(:", r"importing mine raised SyntaxError: .*mine\.py, line 1"),
        ("import sys; sys.exit(3)", "importing mine raised SystemExit: 3"),
    ],
)
def test_a_module_of_rewards_that_raises_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, expected: str
) -> None:
    (tmp_path / "mine.py").write_text(source + "\n", encoding="utf-8")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(SettingsError, match=expected):
        rewards.load_reward("mine:f")


def test_a_model_needs_an_embedding_for_every_token_of_the_rows(tmp_path: Path) -> None:
    files = {"tokenizer": "characters:ab"}
    pairs = data_of(tmp_path, [{"prompt": "a", "chosen": "b", "rejected": "a"}], pairs=True, **files)
    for data, needed in (
        (data_of(tmp_path, task="copy"), 13),
        (data_of(tmp_path, [{"prompt": "aa"}], **files), 3),
        (pairs, 4),
    ):
        data.check_vocabulary("actor", needed)
        with pytest.raises(
            ExperimentError, match=f"'actor' has a vocabulary of {needed - 1}, the rows have token {needed - 1}"
        ):
            data.check_vocabulary("actor", needed - 1)
