"""What a user gets who installs wheels: core alone, with one plugin, with all, with one that somebody else wrote.

Environments lie outside the checkout and hold only what the wheels declare, see conftest.py.
"""

from __future__ import annotations

import json
import resource
import textwrap
import tomllib
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from rpeg_core.plugins.kinds import KINDS

pytestmark = pytest.mark.install

REPOSITORY = Path(__file__).parents[2]
PLUGINS = sorted(path.parent for path in REPOSITORY.glob("plugins/*/*/pyproject.toml"))
NAMES = {folder.name for folder in PLUGINS}
HEADER = ["kind", "name", "distribution", "version", "status", "message"]
DEFAULT_STRATEGY = "annealing"
LIST_SECONDS = 0.3

EXPERIMENT = {
    "algorithm": "grpo",
    "models": {
        "actor": {"config": "Qwen/Qwen2.5-0.5B"},
        "reward": {"config": "Qwen/Qwen2.5-0.5B", "head": "scalar"},
        "reference": {"same_as": "actor"},
    },
    "workload": {"prompts": 32, "rollouts_per_prompt": 2, "prompt_tokens": 128, "response_tokens": 128},
    "cluster": {"hardware": "gh200"},
}

REMAX = '''
"""ReMax (Li et al., 2023): REINFORCE whose baseline is the reward of the greedy response to the same prompt."""

from rpeg_core import AlgorithmTemplate, ModelRole, RpegBuilder, hookimpl


def build(workload, models, structure, settings):
    size = workload.bytes_per_element
    b = RpegBuilder("remax", weight_bytes_per_element=size)
    b.model("actor", models["actor"], trainable=True, staleness=structure.tau("actor"))
    b.model("reward", models["reward"], trainable=False)
    b.model("reference", models["reference"], trainable=False)

    per_token = workload.sequences * workload.response_tokens
    prompts = b.data("prompts", elements=workload.prompts * workload.prompt_tokens, bytes_per_element=size)
    completions = b.data("completions", elements=workload.tokens_per_step, bytes_per_element=size)
    greedy = b.data("greedy_completions", elements=workload.tokens_per_step, bytes_per_element=size)
    rewards = b.data("rewards", elements=workload.sequences, bytes_per_element=size)
    baselines = b.data("baselines", elements=workload.sequences, bytes_per_element=size)
    logprobs = b.data("reference_logprobs", elements=per_token, bytes_per_element=size)

    b.generation("actor_generation", "actor", reads=[prompts], writes=[completions])
    b.generation("greedy_generation", "actor", reads=[prompts], writes=[greedy])
    b.inference("reward_inference", "reward", reads=[completions], writes=[rewards])
    b.inference("baseline_inference", "reward", reads=[greedy], writes=[baselines])
    b.inference("reference_inference", "reference", reads=[completions], writes=[logprobs])
    b.training("actor_training", "actor", reads=[completions, rewards, baselines, logprobs])

    b.connect("actor_generation", completions, "reward_inference", "reference_inference")
    b.connect("greedy_generation", greedy, "baseline_inference")
    b.connect("reward_inference", rewards, "actor_training")
    b.connect("baseline_inference", baselines, "actor_training")
    b.connect("reference_inference", logprobs, "actor_training")
    b.publish("actor_training", "actor_generation", "greedy_generation")
    return b.build()


@hookimpl
def rpeg_algorithms():
    yield AlgorithmTemplate(
        name="remax",
        summary="ReMax: REINFORCE with the greedy response as the baseline.",
        roles=(
            ModelRole(name="actor", trainable=True, head="lm"),
            ModelRole(name="reward", trainable=False, head="scalar"),
            ModelRole(name="reference", trainable=False, head="lm"),
        ),
        build=build,
    )
'''


def package(folder: Path, name: str, group: str, source: str, *, requires: str = "rpeg-core>=0.1,<0.2") -> Path:
    """Write the project of the distribution ``rpeg-plugin-<name>`` as its author would."""
    module = f"rpeg_plugin_{name}"
    root = folder / f"rpeg-plugin-{name}"
    root.joinpath("src", module).mkdir(parents=True)
    root.joinpath("src", module, "__init__.py").write_text(source)
    root.joinpath("pyproject.toml").write_text(
        textwrap.dedent(
            f"""
            [build-system]
            requires = ["hatchling>=1.26"]
            build-backend = "hatchling.build"

            [project]
            name = "rpeg-plugin-{name}"
            version = "1.2.3"
            requires-python = ">=3.11"
            dependencies = ["{requires}"]
            entry-points."rpeg.{group}".{name} = "{module}"
            """
        )
    )
    return root


def rows(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def experiment(path: Path, **changes: object) -> Path:
    path.write_text(yaml.safe_dump({**EXPERIMENT, **changes}))
    return path


def test_wheels_hold_their_package_and_no_more(wheels) -> None:
    for wheel in (wheels.core, *wheels.plugins):
        distribution = wheel.name.partition("-")[0]
        with zipfile.ZipFile(wheel) as archive:
            names = archive.namelist()
        assert {name.split("/")[0] for name in names} == {distribution, f"{distribution}-0.1.0.dist-info"}
        assert [name for name in names if "__pycache__" in name or "/test_" in name] == []


def test_the_wheel_of_core_holds_its_data(wheels) -> None:
    with zipfile.ZipFile(wheels.core) as archive:
        assert "rpeg_core/spec/data/public_models.json" in archive.namelist()


def test_core_alone_lists_nothing_and_says_how_to_get_plugins(wheels, environment) -> None:
    done = environment(wheels.core).rpeg("list-plugins")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "",
        "no plugins are installed\nhint: pip install 'rpeg-core[all]'\n",
    )


def test_a_plugin_adds_itself_to_an_installed_core(wheels, environment) -> None:
    env = environment(wheels.core)
    env.install(*wheels.named("rpeg-plugin-gh200"), index=wheels.folder)
    done = env.rpeg("list-plugins")
    assert (done.returncode, done.stderr) == (0, "")
    assert rows(done.stdout) == [HEADER, ["hardware", "gh200", "rpeg-plugin-gh200", "0.1.0", "available", ""]]


@pytest.mark.parametrize("folder", PLUGINS, ids=lambda folder: folder.name)
def test_a_plugin_works_alone_with_core(folder: Path, wheels, environment) -> None:
    env = environment(wheels.of(folder))
    done = env.rpeg("list-plugins", "--load")
    assert (done.returncode, done.stderr) == (0, "")
    assert {row[2] for row in rows(done.stdout)[1:]} == {f"rpeg-plugin-{folder.name}"}
    assert {row[4] for row in rows(done.stdout)[1:]} == {"ok"}
    for kind in {row[0] for row in rows(done.stdout)[1:]}:
        plural = next(k.plural for k in KINDS if k.name == kind)
        offered = json.loads(env.rpeg("show", kind, "--json").stdout)[plural]
        assert offered
        shown = env.rpeg("show", kind, offered[0]["name"])
        assert (shown.returncode, shown.stderr.startswith("measuring this machine")) == (0, folder.name == "host")
        assert folder.name == "host" or shown.stderr == ""
        assert f"distribution\trpeg-plugin-{folder.name}\n" in shown.stdout


def test_a_plugin_can_be_checked_without_test_tools(wheels, environment) -> None:
    env = environment(*wheels.named("rpeg-plugin-gh200", "rpeg-plugin-dpo"))
    done = env.rpeg("check")
    assert (done.returncode, done.stderr) == (0, "")
    assert {row[0] for row in rows(done.stdout)[1:]} == {"hardware:gh200", "algorithm:dpo"}


def test_all_plugins_are_installed_together(wheels, everything) -> None:
    done = everything.rpeg("list-plugins", "--load")
    assert (done.returncode, done.stderr) == (0, "")
    listed = {row[2]: row[4] for row in rows(done.stdout)[1:]}
    assert listed == {f"rpeg-plugin-{name}": "ok" for name in NAMES}


def test_planning_needs_no_framework(wheels) -> None:
    """What the extra ``all`` installs asks for no PyTorch; that takes the extra ``run``."""
    project = tomllib.loads(REPOSITORY.joinpath("pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    assert extras["run"] == ["rpeg-core[all]", "rpeg-plugin-megatron"]
    frameworks = {"torch", "megatron-core", "transformers", "tokenizers", "safetensors", "tensorboard"}
    assert not wheels.needs("rpeg-core", *extras["all"]) & frameworks
    assert "torch" in wheels.needs("rpeg-plugin-megatron")


def test_the_backend_says_on_which_machine_it_can_execute(wheels, everything, environment) -> None:
    rows_of = {row["name"]: row for row in json.loads(everything.rpeg("doctor", "--json").stdout)["backends"]}
    assert rows_of["megatron"]["usable"]
    without = environment(wheels.core)
    without.install(*wheels.named("rpeg-plugin-megatron"), index=wheels.folder, check_requirements=False)
    for link in without.path.joinpath("dependencies").iterdir():
        if link.name.partition("-")[0] in ("torch", "megatron", "megatron_core"):
            link.unlink()
    (row,) = json.loads(without.rpeg("doctor", "--json").stdout)["backends"]
    assert (row["usable"], row["reason"]) == (False, "not installed: megatron-core, torch")


def test_the_extra_all_names_distributions_of_this_repository() -> None:
    """So that the hint of ``list-plugins`` leads somewhere."""
    project = tomllib.loads(REPOSITORY.joinpath("pyproject.toml").read_text())["project"]
    assert set(project["optional-dependencies"]["all"]) <= {f"rpeg-plugin-{name}" for name in NAMES}


@pytest.mark.parametrize("strategy", ["concurrent", DEFAULT_STRATEGY])
def test_all_plugins_together_plan(strategy: str, everything, tmp_path: Path) -> None:
    options = [] if strategy == DEFAULT_STRATEGY else ["--strategy", strategy]
    file = experiment(tmp_path / "experiment.yaml")
    done = everything.rpeg("plan", str(file), "--seconds", "1", "-o", str(tmp_path / "plan.json"), *options)
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(tmp_path.joinpath("plan.json").read_text())
    assert set(plan["plan"]) == {"actor_generation", "reference_inference", "reward_inference", "actor_training"}
    used = {(use["kind"], use["distribution"]) for use in plan["plugins"]}
    assert {("algorithm", "rpeg-plugin-grpo"), ("hardware", "rpeg-plugin-gh200")} < used
    assert plan["search"]["strategy"] == strategy


@pytest.fixture
def with_remax(wheels, everything, build, tmp_path: Path) -> Iterator[Any]:
    """All plugins and one that somebody else wrote, in the environment whose search is compiled already."""
    everything.install(build(package(tmp_path, "remax", "algorithms", REMAX)), index=wheels.folder)
    yield everything
    everything.uninstall("rpeg-plugin-remax")


def test_a_third_party_algorithm_is_listed_and_plans(with_remax, tmp_path: Path) -> None:
    listed = with_remax.rpeg("list-plugins", "--kind", "algorithm")
    assert ["algorithm", "remax", "rpeg-plugin-remax", "1.2.3", "available", ""] in rows(listed.stdout)

    output = tmp_path / "plan.json"
    file = experiment(tmp_path / "experiment.yaml", algorithm="remax")
    done = with_remax.rpeg("plan", str(file), "--seconds", "1", "--strategy", "concurrent", "-o", str(output))
    assert done.returncode == 0, done.stdout + done.stderr
    plan = json.loads(output.read_text())
    assert set(plan["plan"]) == {
        "actor_generation",
        "greedy_generation",
        "reward_inference",
        "baseline_inference",
        "reference_inference",
        "actor_training",
    }
    remax = {"kind": "algorithm", "name": "remax", "distribution": "rpeg-plugin-remax", "version": "1.2.3"}
    assert remax in plan["plugins"]


def test_broken_wheels_stop_nobody(wheels, environment, build, tmp_path: Path) -> None:
    hook = "from rpeg_core import hookimpl\n\n@hookimpl\ndef rpeg_hardware():\n    return []\n"
    old = build(package(tmp_path, "old", "hardware", hook, requires="rpeg-core<0.0.1"))
    quits = build(package(tmp_path, "quits", "hardware", "import sys\n\nsys.exit(3)\n"))
    env = environment(quits, *wheels.named("rpeg-plugin-gh200"))
    env.install(old, index=wheels.folder, check_requirements=False)

    done = env.rpeg("list-plugins", "--load")
    assert done.returncode == 0
    needs = "needs rpeg-core <0.0.1, 0.1.0 is installed"
    assert rows(done.stdout) == [
        HEADER,
        ["hardware", "gh200", "rpeg-plugin-gh200", "0.1.0", "ok", ""],
        ["hardware", "old", "rpeg-plugin-old", "1.2.3", "incompatible", needs],
        ["hardware", "quits", "rpeg-plugin-quits", "1.2.3", "import-failed", "SystemExit: 3"],
    ]
    assert done.stderr.splitlines() == [
        f"warning: plugin hardware:old (rpeg-plugin-old 1.2.3) is not used: incompatible: {needs}",
        "warning: plugin hardware:quits (rpeg-plugin-quits 1.2.3) is not used: import-failed: SystemExit: 3",
    ]
    assert env.rpeg("show", "hardware", "gh200").returncode == 0
    named = env.rpeg("show", "hardware", "quits")
    assert (named.returncode, named.stdout) == (3, "")
    assert "status: import-failed" in named.stderr


def test_list_plugins_is_quick_and_imports_no_plugin(everything) -> None:
    done = everything.run_python(
        "import sys\n"
        "from rpeg_core.cli.main import main\n"
        "code = main(['list-plugins'])\n"
        "heavy = {'torch', 'numpy', 'networkx', 'numba', 'scipy', 'rich', 'yaml'}\n"
        "print('imported:', sorted(n for n in sys.modules if n in heavy or n.startswith('rpeg_plugin')))\n"
        "sys.exit(code)\n"
    )
    assert (done.returncode, done.stdout.splitlines()[-1]) == (0, "imported: []")

    best = min(seconds(lambda: everything.rpeg("list-plugins")) for _ in range(5))
    assert best < LIST_SECONDS


def seconds(work: Callable[[], object]) -> float:
    """Processor time of the processes that ``work`` starts, which other work on the machine does not stretch."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    work()
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
