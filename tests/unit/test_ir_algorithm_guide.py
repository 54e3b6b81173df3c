"""docs/algorithms.md: its plugin is installed, loaded by the registry, and builds the graph that it shows."""

import re
import tomllib
from pathlib import Path

import pytest

from rpeg_core.errors import ExperimentError
from rpeg_core.plugins.kinds import ALGORITHM

GUIDE = Path(__file__).parents[2] / "docs" / "algorithms.md"


def blocks(language):
    return re.findall(rf"^```{language}\n(.*?)^```$", GUIDE.read_text(), flags=re.MULTILINE | re.DOTALL)


@pytest.fixture
def template(installed):
    (pyproject,) = blocks("toml")
    project = tomllib.loads(pyproject)["project"]
    ((group, entries),) = project["entry-points"].items()
    ((name, module),) = entries.items()
    assert group == ALGORITHM.group
    assert f"`src/{module}/__init__.py`" in GUIDE.read_text()
    installed.add(
        project["name"],
        group,
        name,
        blocks("python")[0],
        version=project["version"],
        requires=project["dependencies"],
        module="fake_guide",
    )
    registry = installed.registry()
    record = registry.get("algorithm", name).record
    assert registry.problems == ()
    return record


@pytest.fixture
def text():
    namespace = {}
    exec(blocks("python")[1], namespace)
    return namespace["text"]


def test_the_graph_is_the_one_shown(template, text):
    lines = text(template).splitlines(keepends=True)
    (shown,) = blocks("text")
    assert "".join(line for line in lines if not line.startswith("model ")) == shown


def test_its_setting_adds_an_edge(template, text):
    added = set(text(template, explicit_rollout_edges=True).splitlines()) - set(text(template).splitlines())
    assert added == {"edge actor_generation -completions-> actor_training"}


def test_its_error(template, text):
    with pytest.raises(ExperimentError) as caught:
        text(template, rollouts_per_prompt=1)
    assert str(caught.value) == (
        "error[experiment]: workload.rollouts_per_prompt is 1\n"
        "  allowed for rloo: at least 2, the baseline of a rollout is the mean of the others\n"
        "hint: set workload.rollouts_per_prompt, e.g. to 4"
    )
