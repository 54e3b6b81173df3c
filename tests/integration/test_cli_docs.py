"""docs/cli.md is what the commands say; docs/experiment-file.md and the examples are what the parser reads."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import UnknownKeyError
from rpeg_core.spec.experiment import parse_experiment

REPOSITORY = Path(__file__).parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
PAGE = (REPOSITORY / "docs" / "experiment-file.md").read_text()


@pytest.fixture(scope="module")
def make_cli() -> ModuleType:
    spec = importlib.util.spec_from_file_location("make_cli", REPOSITORY / "docs" / "make_cli.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_page_of_commands_is_current(make_cli) -> None:
    assert make_cli.PAGE.read_text(encoding="utf-8") == make_cli.render(), "run: python docs/make_cli.py"


def test_every_exit_code_has_a_meaning(make_cli) -> None:
    assert set(make_cli.MEANINGS) == set(ExitCode)


def allowed_keys(document: dict, *path: str) -> set[str]:
    """The keys that the parser names when it meets one that does not exist."""
    section = document
    for key in path:
        section = section.setdefault(key, {})
    section["no such key"] = 1
    with pytest.raises(UnknownKeyError) as caught:
        parse_experiment(document)
    return set(caught.value.facts[0].removeprefix("allowed: ").split(", "))


def complete() -> dict:
    return yaml.safe_load(re.search(r"```yaml\n(algorithm: .*?)```", PAGE, re.DOTALL)[1])


def test_the_example_of_the_page_parses() -> None:
    assert parse_experiment(complete()).cluster.racks == 2


def test_every_section_is_described() -> None:
    assert set(re.findall(r"^## `(\w+)`", PAGE, re.MULTILINE)) == allowed_keys(complete())


@pytest.mark.parametrize(
    ("heading", "path"),
    [
        ("models", ("models", "actor")),
        ("workload", ("workload",)),
        ("cluster", ("cluster",)),
        ("structure", ("structure",)),
        ("objective", ("objective",)),
        ("search", ("search",)),
        ("pin", ("pin", "actor_training")),
    ],
)
def test_every_key_is_described(heading, path) -> None:
    section = PAGE.split(f"## `{heading}`")[1].split("\n## ")[0]
    rows = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == allowed_keys(complete(), *path)


def test_every_inline_dimension_is_described() -> None:
    document = complete()
    document["models"]["actor"] = {"config": {"no such key": 1}}
    with pytest.raises(UnknownKeyError) as caught:
        parse_experiment(document)
    allowed = next(fact for fact in caught.value.facts if fact.startswith("allowed: "))
    section = PAGE.split("## Inline dimensions")[1]
    rows = "".join(line.split("|")[1] for line in section.splitlines() if line.startswith("| `"))
    assert set(re.findall(r"`(\w+)`", rows)) == set(allowed.removeprefix("allowed: ").split(", "))
    assert parse_experiment(complete() | yaml.safe_load(re.search(r"```yaml\n(.*?)```", section, re.DOTALL)[1]))


@pytest.mark.parametrize("path", EXAMPLES, ids=[path.stem for path in EXAMPLES])
def test_every_example_plans(rpeg, path) -> None:
    assert rpeg("plan", path, "--strategy", "concurrent").code == 0
    assert f"({path.name})" in (REPOSITORY / "examples" / "README.md").read_text()


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 3
