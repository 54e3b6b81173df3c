"""The conformance check of run-time semantics: bundled algorithms fit their graphs, misfits are named."""

import sys
import types
from typing import Any

import pytest

from rpeg_core import AlgorithmTemplate, ModelRole, NoSettings, Registry, RpegBuilder
from rpeg_core.errors import BackendError, PluginError
from rpeg_core.ir import to_text
from rpeg_core.planning.structures import Structure
from rpeg_core.runtime.semantics import (
    Content,
    OptimizerSettings,
    Recipe,
    Semantics,
    load_semantics,
    minibatch_rows,
    sequences_of,
)
from rpeg_core.testing.conformance import CheckFailedError, CheckSkippedError, checks_for
from rpeg_core.testing.toys import toy_model, toy_workload

CONTENTS = {"prompts": Content.PROMPTS, "completions": Content.SEQUENCES, "rewards": Content.SCORES}


class Minimal:
    """Semantics as a stranger may write them."""

    def __init__(self, contents: Any = CONTENTS, recipe: Any = None) -> None:
        self.contents = contents
        self._recipe = recipe or Recipe(optimizer=OptimizerSettings(learning_rate=1e-6))

    def recipe(self, operator: str, settings: NoSettings) -> Any:
        return self._recipe

    def prepare(self, *arguments: Any) -> Any:
        raise AssertionError

    def loss(self, *arguments: Any) -> Any:
        raise AssertionError


def graph(workload: Any, models: Any, structure: Any, settings: Any) -> Any:
    b = RpegBuilder("mini")
    b.model("actor", models["actor"], trainable=True, staleness=structure.tau("actor"))
    prompts = b.data("prompts", elements=workload.prompts, bytes_per_element=2)
    completions = b.data("completions", elements=workload.tokens_per_step, bytes_per_element=2)
    rewards = b.data("rewards", elements=workload.sequences, bytes_per_element=2)
    b.generation("actor_generation", "actor", reads=[prompts], writes=[completions])
    b.function("reward_function", reads=[completions], writes=[rewards], seconds_per_sample=1.0)
    b.training("actor_training", "actor", reads=[completions, rewards])
    b.connect("actor_generation", completions, "reward_function")
    b.connect("reward_function", rewards, "actor_training")
    b.publish("actor_training", "actor_generation")
    return b.build()


@pytest.fixture
def template(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A template whose semantics are the given object."""

    def make(semantics: Any, name: str = "rpeg_stranger.semantics:OURS") -> AlgorithmTemplate:
        module = types.ModuleType("rpeg_stranger.semantics")
        module.OURS = semantics
        monkeypatch.setitem(sys.modules, "rpeg_stranger.semantics", module)
        monkeypatch.setitem(sys.modules, "rpeg_stranger", types.ModuleType("rpeg_stranger"))
        roles = (ModelRole(name="actor", trainable=True, head="lm"),)
        return AlgorithmTemplate(name="mini", summary="Mini.", roles=roles, build=graph, semantics=name)

    return make


def check(record: AlgorithmTemplate) -> None:
    dict(checks_for(record))["semantics"]()


def refusal(record: AlgorithmTemplate) -> str:
    with pytest.raises(CheckFailedError) as caught:
        check(record)
    return str(caught.value)


@pytest.mark.parametrize("name", ["dpo", "grpo", "ppo"])
def test_bundled_semantics_fit_and_do_not_import_torch(name: str) -> None:
    record = Registry(disabled=frozenset()).get("algorithm", name).record
    check(record)
    assert isinstance(load_semantics(record), Semantics)


def test_a_strangers_semantics_fit(template: Any) -> None:
    check(template(Minimal()))


def test_a_container_that_contents_lacks(template: Any) -> None:
    contents = {key: CONTENTS[key] for key in ("prompts", "completions")}
    assert refusal(template(Minimal(contents))) == "contents does not say what rewards of mini holds"


def test_contents_that_no_operator_of_that_role_can_make(template: Any) -> None:
    message = refusal(template(Minimal(CONTENTS | {"rewards": Content.VALUES})))
    assert message == "reward_function, inference, writes rewards, which holds values"


def test_scores_from_the_dataset_are_refused(template: Any) -> None:
    message = refusal(template(Minimal(CONTENTS | {"prompts": Content.SCORES})))
    assert message == "prompts comes from the dataset, but holds scores"


def test_training_on_no_sequences_is_refused(template: Any) -> None:
    message = refusal(template(Minimal(CONTENTS | {"completions": Content.LOGPROBS})))
    assert "operator 'actor_training' reads 0 containers of token sequences" in message


def test_a_recipe_of_another_type_is_refused(template: Any) -> None:
    message = refusal(template(Minimal(recipe={"lr": 1})))
    assert message == "recipe('actor_training') returned dict, not Recipe"


def test_an_object_that_lacks_members_is_refused(template: Any) -> None:
    message = refusal(template(object()))
    assert message.endswith("is no rpeg_core.runtime.semantics.Semantics: it lacks: contents, recipe, prepare, loss")


def test_a_name_that_cannot_be_imported_is_refused(template: Any) -> None:
    assert "No module named 'rpeg_nowhere'" in refusal(template(Minimal(), "rpeg_nowhere.semantics:OURS"))
    assert "has no attribute 'THEIRS'" in refusal(template(Minimal(), "rpeg_stranger.semantics:THEIRS"))


def test_semantics_that_need_torch_are_skipped_without_it(template: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    record = template(Minimal(), "torch:THEIRS")
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(sys, "meta_path", [])
    with pytest.raises(CheckSkippedError, match="it needs torch"):
        check(record)


def test_a_template_without_semantics_cannot_be_executed(template: Any) -> None:
    with pytest.raises(BackendError) as caught:
        load_semantics(template(Minimal(), None))
    assert caught.value.what == "algorithm 'mini' has no run-time semantics"


def test_minibatches_have_the_same_rows_on_any_number_of_ranks() -> None:
    whole = minibatch_rows(12, 2, 3)
    assert whole[1] == (2, 3, 8, 9, 14, 15, 20, 21)
    for ranks in (2, 4):
        prompts = 12 // ranks
        for number in range(3):
            found = [
                row + rank * prompts * 2
                for rank in range(ranks)
                for row in minibatch_rows(prompts, 2, 3, first_prompt=rank * prompts)[number]
            ]
            assert tuple(found) == whole[number]


def test_minibatches_that_do_not_divide_the_prompts_are_refused() -> None:
    with pytest.raises(BackendError, match="3 minibatches of 4 prompts"):
        minibatch_rows(4, 2, 3)


def test_the_learning_rate_rises_to_its_value() -> None:
    warm = OptimizerSettings(learning_rate=8.0, warmup_steps=4)
    assert [warm.learning_rate_at(update) for update in range(6)] == [2.0, 4.0, 6.0, 8.0, 8.0, 8.0]
    assert OptimizerSettings(learning_rate=8.0).learning_rate_at(0) == 8.0


def test_sequences_of_an_operator() -> None:
    models = {"actor": toy_model("actor")}
    built = graph(toy_workload(), models, Structure(staleness=()), NoSettings())
    assert "completions" in to_text(built)
    assert sequences_of(built, built.operator("actor_training"), CONTENTS) == "completions"
    with pytest.raises(PluginError, match="reads 2 containers"):
        sequences_of(built, built.operator("actor_training"), CONTENTS | {"rewards": Content.SEQUENCES})
