"""Why a structure won: the sentences hold against both structures evaluated by hand."""

from __future__ import annotations

import attrs
import pytest

from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.recheck import recheck
from rpeg_core.planning.structures import Structure
from rpeg_core.plugins.registry import Registry
from rpeg_core.report.structure import reasons, rivals
from rpeg_core.spec.experiment import parse_experiment
from rpeg_core.spec.machine import Allocation

DIMENSIONS = {"layers": 8, "hidden": 1024, "heads": 8, "kv_heads": 8, "ffn": 4096, "vocab": 32000}
EXPERIMENT = {
    "algorithm": "ppo",
    "models": {
        "actor": {"config": DIMENSIONS},
        "critic": {"same_as": "actor", "head": "scalar"},
        "reward": {"same_as": "actor", "head": "scalar"},
        "reference": {"same_as": "actor"},
    },
    "workload": {"prompts": 64, "rollouts_per_prompt": 1, "prompt_tokens": 128, "response_tokens": 128},
    "cluster": {"hardware": "h100", "nodes_per_rack": 1, "gpus_per_node": 8},
    "structure": {"staleness": [0, 1, 2], "actor_critic_sharing": [False, True]},
}
LOW, HIGH = (Assignment(Allocation(start, start + 4), Layout(4, 1, 1), 1) for start in (0, 4))


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def made(registry: Registry, structure: Structure) -> Plan:
    """Generation and assessment on the lower GPUs, training on the upper ones."""
    planner = Planner(parse_experiment(EXPERIMENT), registry)
    graph = planner.graph(structure)
    places = {op.name: HIGH if op.role.value == "training" else LOW for op in graph.operators}
    empty = Plan(
        experiment=planner.experiment,
        structure=structure,
        rpeg=graph,
        assignments=places,
        machine=planner.machine,
        options=planner.options,
        prediction=None,
        plugins=(),
    )
    return planner.plan(planner.structure_problem(empty), places, {})


def test_staleness_saves_time_and_adds_a_copy(registry: Registry) -> None:
    separate = Structure(staleness=(("actor", 1), ("critic", 1)))
    checked = recheck(made(registry, separate), registry)
    found = list(rivals(checked))
    assert [(r.chosen, r.other) for r in found] == [
        ("staleness 1 of actor", "staleness 0"),
        ("staleness 1 of actor", "staleness 2"),
        ("staleness 1 of critic", "staleness 0"),
        ("staleness 1 of critic", "staleness 2"),
        ("a model each for actor and critic", "one backbone for actor and critic"),
    ]
    sync = made(registry, attrs.evolve(separate, staleness=(("actor", 0), ("critic", 1))))
    assert found[0].step_s == sync.prediction.step_s
    assert found[0].own_step_s == checked.plan.prediction.step_s
    gpus, before, after = found[0].most_added
    own, theirs = ({g: peak for g, peak, _ in p.prediction.memory} for p in (checked.plan, sync))
    assert (before, after) == (theirs[str(gpus)], own[str(gpus)])
    assert str(gpus) == "0-3"
    assert after > before
    assert f"adds {(after - before) / 1e6:.0f} MB" in found[0].sentence()


def test_a_shared_backbone_is_compared_with_two_models_in_its_places(registry: Registry) -> None:
    checked = recheck(made(registry, Structure(staleness=(("actor_critic", 1),), actor_critic_sharing=True)), registry)
    found = {r.chosen: r for r in rivals(checked) if r.other != "staleness 2"}
    assert list(found) == ["staleness 1 of actor_critic", "one backbone for actor and critic"]
    rival = found["one backbone for actor and critic"]
    separate = made(registry, Structure(staleness=(("actor", 1), ("critic", 1))))
    assert rival.structure == separate.structure
    assert rival.step_s == separate.prediction.step_s
    text = rival.sentence()
    saved, factor = rival.step_s - rival.own_step_s, rival.step_s / rival.own_step_s
    assert saved > 0
    assert rival.ratio.low <= factor <= rival.ratio.high
    sure = f"90% interval {rival.ratio.low:.2f}-{rival.ratio.high:.2f}"
    assert f"(×{factor:.2f}, {sure}) against a model each for actor and critic" in text
    assert "; it frees " in text  # the critic's state, on the GPUs that train
    assert len(reasons(checked)) == 3


def test_fusion_is_compared_with_one_training_after_the_other(registry: Registry) -> None:
    fused = Structure(staleness=(("actor", 1), ("critic", 1)), fusion=True)
    checked = recheck(made(registry, fused), registry)
    (found,) = [rival for rival in rivals(checked) if rival.chosen == "fused training of actor and critic"]
    apart = made(registry, attrs.evolve(fused, fusion=False))
    assert found.step_s == apart.prediction.step_s
    # Without a pipeline there is no bubble to fill: the trainings take as long, only their places in the step differ.
    together, alone = checked.plan.prediction.operator_s, apart.prediction.operator_s
    assert together["fused_training"][0] == pytest.approx(alone["actor_training"][0] + alone["critic_training"][0])
    gpus, before, after = found.most_added
    assert gpus == HIGH.allocation
    assert after > before  # gradients and weights of both models at once
    word = "saves" if found.own_step_s < found.step_s else "costs"
    assert found.sentence().startswith(f"fused training of actor and critic {word} ")
