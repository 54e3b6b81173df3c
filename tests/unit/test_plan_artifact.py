"""``plan.json``: nothing is lost, changes are noticed, wall-clock times do not count."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import attrs
import pytest

from rpeg_core.accuracy.draws import Interval
from rpeg_core.accuracy.intervals import plan_intervals
from rpeg_core.errors import PlanFileError
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.planning.plan import NOT_DIGESTED, Plan, PluginUse, load_plan, summarize
from rpeg_core.planning.problem import build_structure
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import (
    SKEWED,
    active,
    on,
    toy_hardware,
    toy_memory_terms,
    toy_plan,
    toy_ppo,
    toy_seconds_term,
    toy_transfer_term,
    toy_workload,
)

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
OPTIONS = EvaluationOptions(steps=3)
DIMENSIONS = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 1000}


@pytest.fixture
def plan() -> Plan:
    """PPO on four GPUs, generation in three length phases beside the inference of the reward."""
    workload = toy_workload(response_lengths=SKEWED)
    graph = toy_ppo(tau=1)
    structure = build_structure(
        structure=Structure(staleness=(("actor", 1), ("critic", 1))),
        rpeg=graph,
        machine=MACHINE,
        hardware=toy_hardware(),
        workload=workload,
        terms=[
            active(
                toy_seconds_term(
                    {
                        ("actor", "generation"): 4.0,
                        ("actor", "training"): 2.0,
                        ("critic", "training"): 1.0,
                        ("reward", "inference"): 0.5,
                    }
                )
            ),
            active(toy_transfer_term(bytes_per_s=1e6)),
            *(active(term) for term in toy_memory_terms(training_state={("actor", "training"): 800.0})),
        ],
        options=OPTIONS,
    )
    assignments = toy_plan(
        actor_generation=on(0, 2),
        reference_inference=on(2, 4),
        reward_inference=on(2, 4),
        critic_inference=on(2, 4),
        actor_training=on(0, 2),
        critic_training=on(2, 4, data=1, tensor=2),
    )
    experiment = parse_experiment(
        {
            "algorithm": "ppo",
            "models": {"actor": {"config": DIMENSIONS}},
            "workload": {
                "prompts": 16,
                "prompt_tokens": 100,
                "response_tokens": 100,
                "response_lengths": [[0.5, 25], [0.75, 50], [1.0, 100]],
            },
            "cluster": {"hardware": "toy", "gpus_per_node": 4},
        }
    )
    return Plan(
        experiment=experiment,
        structure=structure.structure,
        rpeg=graph,
        assignments=assignments,
        machine=MACHINE,
        options=OPTIONS,
        prediction=summarize(structure.predict(assignments), OPTIONS, 1000),
        plugins=(PluginUse(kind="cost", name="toy.seconds", distribution="toys", version="1"),),
        search={"strategy": "greedy", "seconds": 1.25},
        intervals=plan_intervals(structure.book, assignments, structure.predict(assignments)),
    )


def test_the_summary_is_of_one_step_in_steady_state(plan) -> None:
    prediction = plan.prediction
    assert prediction.operator_s["actor_generation"] == (1.0, 1.0, 2.0)  # 25, 25 and 50 of 100 decode steps
    assert prediction.operator_s["reward_inference"] == (0.25, 0.125, 0.125)
    assert prediction.operator_s["actor_training"] == (2.0,)
    assert prediction.step_s == prediction.makespan_s / 3
    assert prediction.tokens_per_s == pytest.approx(3200 / prediction.step_s)
    assert [row[:2] for row in prediction.memory] == [("0-1", 400.0), ("2-3", 0.0)]
    assert prediction.memory[0][2] == "actor_generation"  # nothing is transient: the first operator
    assert (prediction.usable_bytes, prediction.capacity_bytes, prediction.feasible) == (900.0, 1000, True)


def test_a_plan_survives_the_file(plan, tmp_path) -> None:
    plan.save(tmp_path / "plan.json")
    loaded = load_plan(tmp_path / "plan.json")
    assert loaded == plan
    assert loaded.document() == plan.document()


def test_the_file_is_the_document(plan, tmp_path) -> None:
    plan.save(tmp_path / "plan.json")
    document = json.loads((tmp_path / "plan.json").read_text())
    assert document == json.loads(json.dumps(plan.document()))
    assert next(iter(document)) == "schema"
    assert document["plan"]["critic_training"] == {"gpus": "2-3", "dp": 1, "pp": 1, "tp": 2, "microbatches": 1}


def test_the_digest_does_not_depend_on_how_the_plan_was_found(plan) -> None:
    other = attrs.evolve(plan, search={"strategy": "annealing", "seconds": 99.0})
    assert other.digest == plan.digest


@pytest.mark.parametrize(
    "change",
    [
        {"rpeg_version": "9"},
        {"plugins": ()},
        {"structure": Structure(staleness=(("actor", 0), ("critic", 1)))},
        {"options": EvaluationOptions(steps=4)},
        {"machine": DeviceSpace(racks=1, nodes_per_rack=2, gpus_per_node=4)},
    ],
)
def test_the_digest_depends_on_everything_else(plan, change) -> None:
    assert attrs.evolve(plan, **change).digest != plan.digest


def leaves(value: object, path: tuple = ()) -> list[tuple]:
    if isinstance(value, dict):
        return [leaf for key, item in value.items() for leaf in leaves(item, (*path, key))]
    if isinstance(value, list):
        return [leaf for i, item in enumerate(value) for leaf in leaves(item, (*path, i))]
    return [path]


def test_any_change_in_the_file_is_noticed(plan, tmp_path) -> None:
    path = tmp_path / "plan.json"
    original = plan.document()
    for leaf in leaves(original):
        if leaf[0] in ("search", "intervals"):
            continue
        document = json.loads(json.dumps(original))
        place = document
        for key in leaf[:-1]:
            place = place[key]
        place[leaf[-1]] = "changed"
        path.write_text(json.dumps(document))
        with pytest.raises(PlanFileError):
            load_plan(path)


def test_intervals_are_kept_beside_the_digest(plan, tmp_path) -> None:
    """Better validation changes what a plan says of its sureness, not which plan it is."""
    path = tmp_path / "plan.json"
    plan.save(path)
    assert load_plan(path).intervals == plan.intervals
    sure = attrs.evolve(plan, intervals=attrs.evolve(plan.intervals, step_s=Interval(1.0, 2.0)))
    assert sure.digest == plan.digest
    document = json.loads(path.read_text())
    path.write_text(json.dumps({**document, "intervals": sure.intervals.document()}))
    assert load_plan(path).intervals == sure.intervals
    del document["intervals"]  # as files of versions before intervals are
    path.write_text(json.dumps(document))
    assert load_plan(path) == attrs.evolve(plan, intervals=None)
    path.write_text(json.dumps({**document, "intervals": {"step_s": "soon"}}))
    with pytest.raises(PlanFileError, match="is not a plan"):
        load_plan(path)


def resigned(path: Path, plan: Plan, key: str, value: object) -> None:
    """A file whose digest is right although ``key`` makes no sense."""
    from rpeg_core.planning.plan import _digest

    body = {k: v for k, v in plan.document().items() if k not in NOT_DIGESTED}
    body[key] = value
    path.write_text(json.dumps({**body, "search": {}, "digest": _digest(body)}))


@pytest.mark.parametrize(
    ("key", "value"),
    [("machine", {"racks": 1}), ("plan", {"a": {}}), ("prediction", {}), ("plugins", [3])],
)
def test_a_signed_document_that_is_no_plan_is_refused(plan, tmp_path, key, value) -> None:
    path = tmp_path / "plan.json"
    resigned(path, plan, key, value)
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert caught.value.what == f"{path} is not a plan"


@pytest.mark.parametrize(
    ("content", "what", "fact"),
    [
        ("", "is not a JSON document", "Expecting value: line 1 column 1 (char 0)"),
        ("[]", "has schema None", "allowed: 1"),
        ("{}", "has schema None", "allowed: 1"),
        ('{"schema": 2}', "has schema 2", "allowed: 1"),
    ],
)
def test_a_file_that_is_no_plan(tmp_path, content, what, fact) -> None:
    path = tmp_path / "plan.json"
    path.write_text(content)
    with pytest.raises(PlanFileError) as caught:
        load_plan(path)
    assert (caught.value.what, caught.value.facts) == (f"{path} {what}", (fact,))


def test_a_missing_file(tmp_path) -> None:
    with pytest.raises(PlanFileError) as caught:
        load_plan(tmp_path / "no.json")
    assert str(caught.value) == (
        f"error[plan-file]: cannot read {tmp_path / 'no.json'}\n"
        "  No such file or directory\n"
        "hint: `rpeg plan FILE` writes a plan"
    )


def test_a_folder_that_cannot_be_written(plan, tmp_path) -> None:
    with pytest.raises(PlanFileError) as caught:
        plan.save(tmp_path / "no" / "plan.json")
    assert caught.value.what == f"cannot write {tmp_path / 'no' / 'plan.json'}"


def test_the_schedule_of_a_fused_training_is_part_of_the_plan(plan: Plan, tmp_path: Path) -> None:
    assert "microtasks" not in plan.document()
    places = {name: place for name, place in plan.assignments.items() if not name.endswith("_training")}
    fused = attrs.evolve(
        plan,
        structure=attrs.evolve(plan.structure, fusion=True),
        rpeg=toy_ppo(tau=1, fused=True),
        assignments=places | {"fused_training": on(0, 2, pipeline=2, microbatches=2)},
    )
    stated = fused.document()["microtasks"]
    assert list(stated) == ["fused_training"]
    assert stated["fused_training"][1][:3] == ["F0 actor_training", "B0 actor_training", "F0 critic_training"]
    path = tmp_path / "plan.json"
    fused.save(path)
    assert load_plan(path).digest == fused.digest

    document = json.loads(path.read_text())
    document["microtasks"]["fused_training"][0].reverse()
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match="was changed after it was written"):
        load_plan(path)
    body = {key: value for key, value in document.items() if key not in NOT_DIGESTED}
    text = json.dumps(body, sort_keys=True, separators=(",", ":"))
    document["digest"] = "sha256:" + hashlib.sha256(text.encode()).hexdigest()
    path.write_text(json.dumps(document))
    with pytest.raises(PlanFileError, match="has another schedule of microtasks"):
        load_plan(path)
