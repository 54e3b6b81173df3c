"""Where output goes wrong: errors as JSON, a full disk, a closed descriptor, a reader that went away."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

COMMAND = [sys.executable, "-m", "rpeg_core"]


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["plan", "missing.yaml"], 4, "experiment"),
        (["plan"], 2, "usage"),
        (["plan", "missing.yaml", "--set", "x"], 2, "usage"),
        (["plam"], 2, "usage"),
        (["show", "hardware", "nothing"], 3, "missing-plugin"),
        (["run", "missing.json"], 4, "plan-file"),
    ],
)
def test_an_error_is_one_json_document(rpeg: Callable[..., Any], arguments: list[str], code: int, error: str) -> None:
    ran = rpeg(*arguments, "--json")
    document = json.loads(ran.out)
    assert ran.code == code
    assert document["schema"] == 1
    assert (document["error"]["code"], document["error"]["exit_code"]) == (error, code)
    assert f"error[{error}]: {document['error']['what']}" in ran.err
    assert set(document["error"]) == {"code", "what", "facts", "hint", "exit_code"}
    assert rpeg(*arguments).out == ""


def test_a_plan_that_fits_nowhere_is_one_json_document(rpeg: Callable[..., Any], experiment: Any) -> None:
    ran = rpeg("plan", experiment(cluster={"memory_gb": 4}), "--json", "--evaluations", 10)
    document = json.loads(ran.out)
    assert (ran.code, document["feasible"], document["error"]["code"]) == (1, False, "no-feasible-plan")
    assert "search" in document


def test_interrupted_is_a_json_document(rpeg: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def pressed(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("rpeg_core.cli.context.CommandContext.registry", property(pressed))
    ran = rpeg("list-plugins", "--json")
    assert (ran.code, json.loads(ran.out)["error"]["code"]) == (130, "interrupted")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_is_an_error_and_not_a_defect() -> None:
    with open("/dev/full", "w") as full:
        done = subprocess.run([*COMMAND, "show", "model"], stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert done.returncode == 74
    assert done.stderr == "error[output]: cannot write the result to standard output\n  No space left on device\n"


def test_a_closed_standard_output_is_an_error_and_closed_standard_error_is_none() -> None:
    done = subprocess.run(
        ["sh", "-c", '"$@" >&-', "sh", *COMMAND, "show", "model"], stderr=subprocess.PIPE, check=False
    )
    assert (done.returncode, done.stderr) == (74, b"error[output]: standard output is closed\n")
    done = subprocess.run(["sh", "-c", '"$@" 2>&-', "sh", *COMMAND, "show", "nothing"], check=False)
    assert done.returncode == 2


def test_a_reader_that_went_away_is_told_by_the_exit_code() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run([*COMMAND, "show", "model"], stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (141, b"")
