"""``rpeg init``: what it writes parses and plans as it is."""

from __future__ import annotations

from pathlib import Path

import attrs
import pytest

from rpeg_core.cli.init import _rollouts
from rpeg_core.planning.plan import load_plan
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.experiment import load_experiment


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dpo"])
@pytest.mark.parametrize("hardware", ["gh200", "a100-80gb"])
def test_an_initialised_file_plans(rpeg, algorithm, hardware) -> None:
    ran = rpeg("init", "x.yaml", "--algorithm", algorithm, "--hardware", hardware)
    assert (ran.code, ran.out, ran.err) == (0, "x.yaml written\nnext: rpeg plan x.yaml\n", "")
    experiment = load_experiment("x.yaml")
    assert (experiment.algorithm, experiment.cluster.hardware) == (algorithm, hardware)
    assert rpeg("plan", "x.yaml", "--strategy", "greedy").code == 0
    assert load_plan("plan.json").machine.gpus == 16


@pytest.mark.parametrize("algorithm", ["ppo", "grpo", "dpo"])
def test_the_comments_hold(rpeg, algorithm) -> None:
    """Every commented-out key is accepted when it is uncommented."""
    rpeg("init", "x.yaml", "--algorithm", algorithm)
    lines = Path("x.yaml").read_text().splitlines()
    keys = ("response_lengths:", "memory_gb:", "evaluations:", "pin:", "actor_training:", "costs:")
    opened = [
        line.replace("# ", "", 1) if line.strip().startswith("#") and line.strip(" #").startswith(keys) else line
        for line in lines
    ]
    assert opened != lines
    Path("y.yaml").write_text("\n".join(opened))
    assert rpeg("predict", "y.yaml", "--strategy", "greedy").code == 0


def test_an_algorithm_that_nobody_knows_gets_rollouts_that_it_accepts() -> None:
    grpo = attrs.evolve(Registry().get("algorithm", "grpo").record, name="mine")
    assert _rollouts(grpo) == 8
    assert _rollouts(attrs.evolve(Registry().get("algorithm", "dpo").record, name="mine")) == 2
    assert _rollouts(Registry().get("algorithm", "ppo").record) == 1


def test_an_existing_file_is_kept(rpeg) -> None:
    Path("experiment.yaml").write_text("mine")
    ran = rpeg("init")
    assert (ran.code, ran.err) == (2, "error[usage]: experiment.yaml exists\nhint: --force overwrites it\n")
    assert Path("experiment.yaml").read_text() == "mine"
    assert rpeg("init", "--force").code == 0
    assert load_experiment("experiment.yaml").algorithm == "ppo"


def test_an_algorithm_that_is_not_installed(rpeg) -> None:
    ran = rpeg("init", "--algorithm", "ppoo")
    assert ran.code == 3
    assert ran.err.splitlines()[-1] == "hint: did you mean 'ppo'?"
    assert not Path("experiment.yaml").exists()
