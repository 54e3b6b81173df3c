"""The conformance checks of algorithms and cost terms: each one finds what it is there to find."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest

from rpeg_core import AlgorithmTemplate, CostTerm, MemoryKind, ModelRole, RpegBuilder, Target, TermError
from rpeg_core.errors import ExperimentError
from rpeg_core.testing.conformance import Outcome, checks_for, conformance


def failure(record: Any, name: str) -> str:
    """The message of a check that must fail."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  # what the plugin raised counts too
        dict(checks_for(record))[name]()
    return str(caught.value)


def failed(record: Any) -> set[str]:
    return {result.check for result in conformance(record) if result.outcome is Outcome.FAILED}


# Algorithms


def graph(workload: Any, models: Any, structure: Any, settings: Any, *, staleness: int | None = None) -> Any:
    b = RpegBuilder("mini")
    tau = structure.tau("actor") if staleness is None else staleness
    b.model("actor", models["actor"], trainable=True, staleness=tau)
    b.model("reward", models["reward"], trainable=False)
    prompts = b.data("prompts", elements=workload.prompts, bytes_per_element=2)
    completions = b.data("completions", elements=workload.tokens_per_step, bytes_per_element=2)
    rewards = b.data("rewards", elements=workload.sequences, bytes_per_element=2)
    b.generation("actor_generation", "actor", reads=[prompts], writes=[completions])
    b.inference("reward_inference", "reward", reads=[completions], writes=[rewards])
    b.training("actor_training", "actor", reads=[completions, rewards])
    b.connect("actor_generation", completions, "reward_inference")
    b.connect("reward_inference", rewards, "actor_training")
    b.publish("actor_training", "actor_generation")
    return b.build()


ROLES = (ModelRole(name="actor", trainable=True, head="lm"), ModelRole(name="reward", trainable=False, head="scalar"))


def template(build: Callable[..., Any] = graph, **changes: Any) -> AlgorithmTemplate:
    return AlgorithmTemplate(**{"name": "mini", "summary": "Mini.", "roles": ROLES, "build": build, **changes})


def test_a_template_made_in_a_test_conforms_but_for_what_a_new_process_cannot_find() -> None:
    results = {result.check: result for result in conformance(template(lambda *arguments: graph(*arguments)))}
    skipped = results.pop("hash-order")
    assert skipped.outcome is Outcome.SKIPPED
    assert skipped.message.startswith("a new process cannot find it by name: ")
    assert results.pop("semantics").message == "the template names no semantics: it can be planned, not executed"
    assert {result.outcome for result in results.values()} == {Outcome.PASSED}


def test_a_build_that_raises_fails() -> None:
    def build(workload: Any, models: Any, structure: Any, settings: Any) -> Any:
        return models["critic"]

    assert failure(template(build), "builds").startswith("build raised KeyError: 'critic' for nothing trained, ")


def test_a_build_that_returns_something_else_fails() -> None:
    def build(*arguments: Any) -> Any:
        return attrs.make_class("Graph", {"models": attrs.field(default=())})()

    assert failure(template(build), "builds").startswith("build returned Graph, not Rpeg, for nothing trained")


def test_a_build_that_changes_the_models_fails() -> None:
    def build(workload: Any, models: Any, structure: Any, settings: Any) -> Any:
        models["actor"] = models["reward"]
        return graph(workload, models, structure, settings)

    assert "build raised TypeError" in failure(template(build), "builds")


def test_a_graph_that_is_not_well_formed_fails() -> None:
    def build(*arguments: Any) -> Any:
        return attrs.evolve(graph(*arguments), publication_edges=())

    assert "W2" in failure(template(build), "builds")


def test_a_structure_that_is_always_refused_fails() -> None:
    def build(workload: Any, models: Any, structure: Any, settings: Any) -> Any:
        if structure.fusion:
            raise ExperimentError("structure.fusion is not built yet")
        return graph(workload, models, structure, settings)

    record = template(build, structures=("fusion",))
    assert "staleness 1, fusion is always refused: structure.fusion is not built yet" in failure(record, "builds")


def test_a_workload_that_is_refused_is_fine_when_another_is_not() -> None:
    def build(workload: Any, models: Any, structure: Any, settings: Any) -> Any:
        if workload.rollouts_per_prompt != 2:
            raise ExperimentError("workload.rollouts_per_prompt must be 2")
        return graph(workload, models, structure, settings)

    assert failed(template(build)) == set()


def test_a_structural_option_that_does_not_exist_fails() -> None:
    assert failure(template(structures=("fussion",)), "builds") == "'fussion' in structures is no structural option"


def test_a_head_that_does_not_exist_fails() -> None:
    roles = (attrs.evolve(ROLES[0], head="lmm"), ROLES[1])
    assert "'lmm' is not a valid Head" in failure(template(roles=roles), "builds")


def test_staleness_that_is_left_out_fails() -> None:
    record = template(lambda *arguments: graph(*arguments, staleness=0))
    assert failed(record) == {"staleness"}
    assert "the staleness of 'actor' is 0, not 1" in failure(record, "staleness")


def test_a_model_that_nothing_uses_fails() -> None:
    record = template(roles=(*ROLES, ModelRole(name="critic", trainable=False, head="scalar")))
    assert failure(record, "roles") == "no operator uses the model of role 'critic'"


def test_a_frozen_role_that_is_trained_fails() -> None:
    roles = (attrs.evolve(ROLES[0], trainable=False), attrs.evolve(ROLES[1], trainable=True))
    assert "role 'actor' has trainable=False, its model 'actor' True" in failure(template(roles=roles), "roles")


def test_a_graph_that_differs_from_call_to_call_fails() -> None:
    counter = itertools.count()

    def build(*arguments: Any) -> Any:
        return attrs.evolve(graph(*arguments), name=f"mini-{next(counter)}")

    assert failed(template(build)) == {"repeatable"}


def test_a_graph_in_the_order_of_the_models_fails() -> None:
    def build(workload: Any, models: Any, structure: Any, settings: Any) -> Any:
        return attrs.evolve(graph(workload, models, structure, settings), name=f"mini-{next(iter(models))}")

    assert "the graph depends on the order of the models" in failure(template(build), "repeatable")


def test_a_graph_in_the_order_of_a_set_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tmp_path.joinpath("fake_unordered.py").write_text(
        "from rpeg_core import AlgorithmTemplate, ModelRole, RpegBuilder\n\n"
        "def build(workload, models, structure, settings):\n"
        "    b = RpegBuilder('unordered')\n"
        "    b.model('actor', models['actor'], trainable=True, staleness=structure.tau('actor'))\n"
        "    for name in {'prompts', 'images', 'sounds', 'videos', 'pages', 'maps', 'books'}:\n"
        "        b.data(name, elements=1, bytes_per_element=1)\n"
        "    b.training('actor_training', 'actor', reads=['prompts'])\n"
        "    return b.build()\n\n"
        "TEMPLATE = AlgorithmTemplate(name='unordered', summary='.', build=build,\n"
        "                             roles=(ModelRole(name='actor', trainable=True, head='lm'),))\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    import fake_unordered

    message = "the graph depends on the order of a set or of hashes"
    assert failure(fake_unordered.TEMPLATE, "hash-order") == message


# Cost terms


def term(function: Callable[[Any], Any], target: Target = Target.OPERATOR, **changes: Any) -> CostTerm:
    memory = MemoryKind.TRANSIENT if target is Target.MEMORY else None
    values = {"name": "acme.term", "summary": "A term.", "quantity": "work", "memory": memory}
    return CostTerm(**{**values, "target": target, "function": function, **changes})


def test_a_term_of_each_target_conforms() -> None:
    records = [
        term(lambda batch: 1.0 / batch.layouts.gpus),
        term(lambda batch: batch.bytes / batch.p2p_links.bandwidth_bytes_per_s, Target.TRANSFER),
        term(lambda batch: 1e9 / batch.layouts.gpus, Target.MEMORY),
    ]
    assert [failed(record) for record in records] == [set(), set(), set()]


def known(**given: Any) -> TermError:
    return TermError(**{"log_std": 0.1, "rows": 5, "source": "made up", **given})


@pytest.mark.parametrize(
    ("errors", "message"),
    [
        ((known(roles=("train",)),), "errors[0].roles has 'train'; allowed: generation, inference, training"),
        ((known(ranges={"gpu": (1.0, 8.0)}),), "errors[0].ranges has 'gpu'; allowed: gpus, data, "),
        ((known(source=" "),), "errors[0].source is empty"),
        (
            (known(rows=0),),
            "errors[0].rows is 0, yet it states an error; allowed: the number of measured rows",
        ),
        ((known(), known(roles=("training",))), "errors[1] is never chosen: an error before it has the same or wider"),
    ],
)
def test_errors_that_mean_nothing_fail(errors: tuple[TermError, ...], message: str) -> None:
    assert message in failure(term(lambda batch: 1.0 / batch.layouts.gpus, errors=errors), "errors")


def test_errors_that_can_all_be_chosen_conform() -> None:
    own = (known(roles=("training",)), known(mixture=True), known(named_framework=True))
    errors = (*own, known(), known(of_step=True))
    assert failed(term(lambda batch: 1.0 / batch.layouts.gpus, errors=errors)) == set()


def test_a_term_of_memory_has_no_error_of_seconds() -> None:
    record = term(lambda batch: 1e9 / batch.layouts.gpus, Target.MEMORY, errors=(known(),))
    assert failure(record, "errors") == "errors are of seconds; a term that prices memory has none"


@pytest.mark.parametrize("target", Target)
@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1.0, "it returned -1, allowed: numbers >= 0"),
        (float("nan"), "it returned a number that is not finite"),
        (float("inf"), "it returned a number that is not finite"),
    ],
)
def test_a_forbidden_number_fails(target: Target, value: float, message: str) -> None:
    def function(batch: Any) -> Any:
        return np.full(len(batch.bytes if target is Target.TRANSFER else batch.layouts), value)

    results = {result.check: result for result in conformance(term(function, target))}
    assert results["values"].outcome is Outcome.FAILED
    assert message in results["values"].message


def test_a_wrong_shape_fails() -> None:
    record = term(lambda batch: np.ones((len(batch.layouts), 1)))
    assert "gave an invalid result" in failure(record, "values")


def test_a_term_that_forgets_functions_fails() -> None:
    record = term(lambda batch: batch.model.layers / batch.layouts.gpus)
    message = failure(record, "values")
    assert "failed for operator 'verifier'" in message
    assert "AttributeError" in message


def test_a_term_that_forgets_a_kind_of_model_fails() -> None:
    def function(batch: Any) -> Any:
        experts = 0 if batch.model is None else batch.model.moe.experts
        return np.full(len(batch.layouts), float(experts))

    assert "failed for operator 'dense_generation'" in failure(term(function), "values")


def test_a_term_that_writes_to_its_batch_fails() -> None:
    def function(batch: Any) -> Any:
        batch.layouts.data[:] = 1
        return 1.0 / batch.layouts.data

    assert "read-only" in failure(term(function), "values")


def test_a_term_with_memory_of_earlier_calls_fails() -> None:
    calls = itertools.count(1)
    record = term(lambda batch: next(calls) / batch.layouts.gpus)
    assert "two calls differ for " in failure(record, "pure")


def test_a_term_that_looks_at_its_neighbours_fails() -> None:
    record = term(lambda batch: np.cumsum(1.0 / batch.layouts.gpus))
    assert failed(record) == {"elementwise"}


@pytest.mark.parametrize("kind", [MemoryKind.WEIGHTS, MemoryKind.TRAINING_STATE])
def test_a_function_with_weights_fails(kind: MemoryKind) -> None:
    record = term(lambda batch: 1e9 / batch.layouts.gpus, Target.MEMORY, memory=kind)
    assert failed(record) == {"function-memory"}
    assert failure(record, "function-memory").startswith("a function without a model holds 1e+09 B of ")


def test_a_state_that_shrinks_after_the_first_step_fails() -> None:
    def state(batch):
        return (batch.model is not None) * 1.0 / batch.layouts.gpus

    record = term(state, Target.MEMORY, memory=MemoryKind.TRAINING_STATE)
    fine = attrs.evolve(record, first_step=lambda batch: 0.5 * state(batch))
    assert failed(fine) == set()
    record = attrs.evolve(record, first_step=lambda batch: 2.0 * state(batch))
    assert failed(record) == {"first-step"}
    assert failure(record, "first-step").endswith(" holds more before the first optimizer step than after it")
