"""What is wrong with a run before it begins is found before any worker is started."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
from megatron_plans import at, experiment, make_plan, settings
from rpeg_plugin_megatron import MEGATRON, host
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import BackendError, RpegError
from rpeg_core.planning.plan import Plan
from rpeg_core.settings import build_settings

ROW = {"prompt": "1+2=", "answer": "3"}
SMALL = "characters:0123456789+="
"""The models of these plans have a vocabulary of 64."""


@pytest.fixture(scope="module")
def grpo() -> Plan:
    return make_plan(experiment("grpo"), {"": at("0")})


@pytest.fixture(scope="module")
def dpo() -> Plan:
    return make_plan(experiment("dpo"), {"": at("0")})


@pytest.fixture
def data(tmp_path: Path) -> Callable[..., Path]:
    """``data(row, ...)``: a file with these rows."""

    def write(*rows: Any) -> Path:
        path = tmp_path / "data.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
        return path

    return write


def refused(plan: Plan, **values: Any) -> RpegError:
    """Why a session is not opened; no process is started by opening one."""
    with pytest.raises(RpegError) as caught:
        MEGATRON.open(plan, Settings(device="cpu", **values))
    return caught.value


@pytest.mark.parametrize(
    ("changes", "exit_code", "text"),
    [
        ({}, ExitCode.USAGE, "megatron.data and megatron.task: neither is given"),
        ({"task": "cpoy"}, ExitCode.USAGE, "did you mean 'copy'?"),
        ({"task": "copy", "reward": "nowhere:score"}, ExitCode.USAGE, "No module named 'nowhere'"),
        ({"task": "copy", "reward": "rpeg_plugin_megatron.rewards:exact"}, ExitCode.USAGE, "has no such name"),
        ({"task": "copy", "tokenizer": "no/folder"}, ExitCode.USAGE, "cannot be opened: no such folder"),
        ({"task": "copy", "tokenizer": "characters:01"}, ExitCode.USAGE, "does not write each of '0123456789='"),
        ({"data": "nowhere.jsonl"}, ExitCode.BAD_INPUT, "cannot read"),
    ],
)
def test_a_wrong_name_is_found_at_once(grpo: Plan, changes: Any, exit_code: ExitCode, text: str) -> None:
    error = refused(grpo, **changes)
    assert (error.exit_code, text in str(error)) == (exit_code, True), str(error)


@pytest.mark.parametrize(
    ("rows", "changes", "text"),
    [
        ([ROW, {"answer": "3"}], {}, "line 2 has no key 'prompt', only 'answer'"),
        ([ROW, {"prompt": "2="}], {"reward": "rpeg_plugin_megatron.rewards:exact_match"}, "line 2 has no key 'answer'"),
        (
            [ROW, {"prompt": "2=", "answer": "two"}],
            {"reward": "rpeg_plugin_megatron.rewards:last_number"},
            "line 2 has the answer 'two', which is not a number",
        ),
        ([{"prompt": "\u20ac="}], {}, "is not in the alphabet"),
    ],
)
def test_a_line_that_cannot_be_used_is_found_at_once(
    grpo: Plan, data: Callable[..., Path], rows: Any, changes: Any, text: str
) -> None:
    error = refused(grpo, data=str(data(*rows)), **changes)
    assert (error.exit_code, text in str(error)) == (ExitCode.BAD_INPUT, True), str(error)


def test_a_reward_of_ones_own_may_read_what_it_likes(grpo: Plan, data: Callable[..., Path]) -> None:
    path = str(data({"prompt": "2="}))
    MEGATRON.open(grpo, Settings(device="cpu", data=path, tokenizer=SMALL, reward="builtins:len"))


def test_equal_pairs_are_remarked_on(dpo: Plan, data: Callable[..., Path]) -> None:
    same, other = ({"prompt": "2=", "chosen": "2", "rejected": rejected} for rejected in ("2", "3"))
    session = MEGATRON.open(dpo, Settings(device="cpu", tokenizer=SMALL, data=str(data(other, same, same))))
    (note,) = session._notes
    assert note.startswith("warning: 2 pairs have the same text chosen and rejected, the first in ")
    assert note.endswith("data.jsonl, line 2")
    assert MEGATRON.open(dpo, Settings(device="cpu", tokenizer=SMALL, data=str(data(other))))._notes == ()


def test_settings_that_are_out_of_range_are_a_usage_error() -> None:
    with pytest.raises(RpegError) as caught:
        build_settings(Settings, {"top_p": 0.0}, where="settings.megatron")
    assert caught.value.exit_code == ExitCode.USAGE
    assert "top_p is 0.0; allowed: a number in (0, 1]" in str(caught.value)


def many(plan: Plan, workers: int) -> Plan:
    """The plan with its last operator on the last of so many GPUs."""
    last = {"reference_inference": at(str(workers - 1))}
    return attrs.evolve(plan, assignments={**plan.assignments, **last})


def test_more_workers_than_the_cores_bear_are_refused(grpo: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "cores", lambda: 2)
    monkeypatch.setattr(host, "available_bytes", lambda: 10**12)
    for workers in (1, 2, 4, 8):
        MEGATRON.open(many(grpo, workers), settings())
    with pytest.raises(BackendError) as caught:
        MEGATRON.open(many(grpo, 32), settings())
    assert str(caught.value) == (
        "error[backend]: the plan has 32 workers, this machine 2 cores and no GPU that is used\n"
        "  allowed: 8, 4 for each core\n"
        "hint: run it where it fits, or start them all the same with --set megatron.oversubscribe=true"
    )
    MEGATRON.open(many(grpo, 32), settings(oversubscribe=True))
    monkeypatch.setattr(host, "available_bytes", lambda: 10**9)
    with pytest.raises(BackendError, match="4 workers do not fit the memory of this machine"):
        MEGATRON.open(many(grpo, 4), settings())


def test_gpus_and_widths_that_are_not_there(grpo: Plan, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "shown_gpus", lambda: 2)
    with pytest.raises(BackendError, match="the plan needs 4 GPUs, this machine has 2"):
        MEGATRON.open(many(grpo, 4), settings(device="auto"))
    with pytest.raises(BackendError, match="for weights of 4 bytes, workers here compute with 2"):
        MEGATRON.open(grpo, settings(device="auto"))
    MEGATRON.open(grpo, settings(device="auto", precision="fp32"))


def test_the_command_reads_the_data_without_torch(grpo: Plan, tmp_path: Path) -> None:
    grpo.save(tmp_path / "plan.json")
    code = (
        "import sys\nfrom rpeg_core.planning.plan import load_plan\n"
        "from rpeg_plugin_megatron import MEGATRON, Settings\n"
        "MEGATRON.open(load_plan(sys.argv[1]), Settings(task='copy', device='cpu')); assert 'torch' not in sys.modules"
    )
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)}
    subprocess.run([sys.executable, "-c", code, tmp_path / "plan.json"], check=True, env=environment)
