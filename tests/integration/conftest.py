"""Run the command line in this process, in a folder of its own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import pytest
import yaml

from rpeg_core.cli.main import main


@attrs.frozen
class Ran:
    """What a command did."""

    code: int
    out: str
    err: str

    def table(self, title: str) -> list[list[str]]:
        """The rows under a title, the heading first."""
        lines = self.out.splitlines()
        rows = lines[lines.index(title) + 1 :]
        return [line.split("\t") for line in rows[: [*rows, ""].index("")]]


@pytest.fixture
def rpeg(capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Ran]:
    """``rpeg("plan", "experiment.yaml")`` in ``tmp_path``."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments: object) -> Ran:
        capsys.readouterr()
        code = main([str(argument) for argument in arguments])
        captured = capsys.readouterr()
        return Ran(code, captured.out, captured.err)

    return run


MODEL = "meta-llama/Llama-3.1-8B"


@pytest.fixture
def experiment(tmp_path: Path) -> Callable[..., Path]:
    """Write ``experiment.yaml``: PPO on 32 GH200 and the greedy baseline; a keyword changes keys of its section."""

    def write(**sections: Any) -> Path:
        document: dict[str, Any] = {
            "algorithm": "ppo",
            "models": {
                "actor": {"config": MODEL},
                "critic": {"config": MODEL},
                "reward": {"config": MODEL},
                "reference": {"same_as": "actor"},
            },
            "workload": {"prompts": 256, "prompt_tokens": 512, "response_tokens": 1000},
            "cluster": {"hardware": "gh200", "racks": 2, "nodes_per_rack": 4, "gpus_per_node": 4},
            "search": {"strategy": "greedy"},
        }
        for name, value in sections.items():
            present = document.get(name)
            document[name] = {**present, **value} if isinstance(present, dict) else value
        path = tmp_path / "experiment.yaml"
        path.write_text(yaml.safe_dump(document, sort_keys=False))
        return path

    return write
