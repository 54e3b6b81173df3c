"""docs/algorithms.md: its plugin is installed, loaded by the registry, and builds the graph that it shows."""

import re
import sys
import tomllib
import types
from pathlib import Path

import pytest

from rpeg_core.errors import ExperimentError
from rpeg_core.plugins.kinds import ALGORITHM
from rpeg_core.runtime.semantics import load_semantics
from rpeg_core.testing.conformance import checks_for

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
    exec(blocks("python")[2], namespace)
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


@pytest.fixture
def semantics(template, monkeypatch):
    """What the record names, from the page."""
    name, _, attribute = template.semantics.partition(":")
    assert f"`src/{name.replace('.', '/')}.py`" in GUIDE.read_text()
    module = types.ModuleType(name)
    exec(blocks("python")[1], module.__dict__)
    monkeypatch.setitem(sys.modules, name.partition(".")[0], types.ModuleType(name.partition(".")[0]))
    monkeypatch.setitem(sys.modules, name, module)
    return getattr(module, attribute)


def test_its_semantics_fit_its_graphs(template, semantics):
    dict(checks_for(template))["semantics"]()
    assert load_semantics(template) is semantics
    assert semantics.recipe("actor_training", template.settings()).optimizer.learning_rate == 1e-6


def test_its_losses_do_not_depend_on_the_split(template, semantics):
    torch = pytest.importorskip("torch", reason="losses are functions of torch tensors")
    namespace = {}
    exec(blocks("python")[3], namespace)
    generator = torch.Generator().manual_seed(0)
    rows = {"rewards": torch.randn(8, generator=generator)}
    mask = torch.arange(5)[None] < torch.randint(1, 6, (8, 1), generator=generator)
    logprobs = torch.randn(8, 5, generator=generator)
    arguments = (semantics, template.settings(), rows, mask, logprobs)
    whole, split = namespace["trained"](*arguments), namespace["trained"](*arguments, ranks=2, microbatches=2)
    assert split.losses == pytest.approx(whole.losses, rel=1e-5)
    torch.testing.assert_close(split.gradients["logprobs"], whole.gradients["logprobs"])
    # Of two rollouts each has the other as its baseline.
    first, second = rows["rewards"][:2].tolist()
    assert whole.prepared.rows["advantages"][:2].tolist() == pytest.approx([first - second, second - first])
