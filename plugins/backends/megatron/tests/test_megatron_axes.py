"""What a plan may choose beyond degrees and microbatches for this backend; without workers."""

from __future__ import annotations

import attrs
import pytest
from megatron_plans import TINY, at, experiment, make_plan
from rpeg_plugin_megatron.layouts import ELSEWHERE, Refusal, check_axes, refusals
from rpeg_plugin_megatron.session import open_session
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.errors import BackendError
from rpeg_core.planning.assignment import Assignment, Layout, Mode
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.machine import Allocation
from rpeg_core.testing.checks.samples import sample_plan

ONE = Layout(1, 1, 1)


def assigned(layout: Layout = ONE, **mode: object) -> dict[str, Assignment]:
    return {"actor_training": Assignment(Allocation(0, layout.gpus), layout, 1, Mode(**mode))}


@pytest.mark.parametrize("recompute", [None, Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL])
def test_recomputation_is_executed(recompute) -> None:
    check_axes(assigned(recompute=recompute))


REFUSED = [
    (assigned(Layout(1, 1, 1, 2)), "actor_training has cp=2; allowed: 1"),
    (assigned(Layout(2, 1, 1, 1, 2)), "actor_training has ep=2; allowed: 1"),
    (assigned(Layout(1, 1, 2), sequence_parallel=True), "actor_training has sequence_parallel: true; allowed: false"),
    (assigned(precision=Precision.FP8), "actor_training has precision fp8; allowed: bf16"),
    (
        assigned(recompute=Recompute.OPERATOR),
        "actor_training has recompute operator; allowed: none, selective, full",
    ),
]


@pytest.mark.parametrize(("plan", "fact"), REFUSED, ids=lambda v: v if isinstance(v, str) else "")
def test_the_rest_is_refused(plan, fact) -> None:
    with pytest.raises(BackendError) as caught:
        check_axes(plan)
    assert caught.value.facts == (fact,)


def test_a_session_refuses_before_it_starts_anything() -> None:
    plan = sample_plan()
    name, own = next(iter(plan.assignments.items()))
    halved = attrs.evolve(own, mode=Mode(precision=Precision.FP8))
    with pytest.raises(BackendError) as caught:
        open_session(attrs.evolve(plan, assignments={**plan.assignments, name: halved}), Settings())
    assert str(caught.value) == (
        "error[backend]: backend megatron cannot execute this plan\n"
        f"  {name} has precision fp8; allowed: bf16\n"
        "hint: plan without these in space: and pin:, or use --backend simulator"
    )


def plan_of(**changes: object):
    """A GRPO plan on one GPU whose every operator's assignment has the changes; two models of different names."""
    document = experiment("grpo")
    document["models"]["reference"] = {"config": dict(TINY)}
    plan = make_plan(document, {"": at("0")})
    own = {name: attrs.evolve(assignment, **changes) for name, assignment in plan.assignments.items()}
    return attrs.evolve(plan, assignments=own)


@pytest.mark.parametrize(
    ("changes", "reason", "hint"),
    [
        ({"layout": Layout(1, 1, 1, 2)}, "cp=2; allowed: 1", "leave cp out of space: and pin:"),
        ({"layout": Layout(1, 1, 1, 1, 2)}, "ep=2; allowed: 1", "leave ep out of space: and pin:"),
        (
            {"mode": Mode(precision=Precision.FP8)},
            "precision fp8; allowed: bf16",
            "leave precision out of space: and pin:",
        ),
        (
            {"layout": Layout(1, 1, 4)},
            "tp=4 does not divide the 2 KV heads of actor, reference",
            "pin another tp",
        ),
        ({"layout": Layout(1, 4, 1)}, "pp=4 does not divide the 2 layers of actor, reference", "pin another pp"),
    ],
    ids=str,
)
def test_a_warning_has_a_hint_of_its_own(changes, reason, hint) -> None:
    plan = plan_of(**changes)
    models = [op.name for op in plan.rpeg.operators if plan.rpeg.models_of(op.name)]
    (found,) = refusals(plan)
    names = models if reason.startswith(("tp", "pp")) else list(plan.assignments)
    assert found == Refusal(", ".join(names), reason, f"{hint}, or {ELSEWHERE}")


def test_models_that_cannot_be_run_for_the_same_reason_are_one_warning() -> None:
    plan = plan_of()
    models = tuple(attrs.evolve(m, spec=attrs.evolve(m.spec, family="gemma2")) for m in plan.rpeg.models)
    (found,) = refusals(attrs.evolve(plan, rpeg=attrs.evolve(plan.rpeg, models=models)))
    assert found.reason == (
        "models actor, reference have family 'gemma2', which is not one of inline, llama, mistral, qwen2, qwen3"
    )
    assert found.hint == f"plan for other models, or {ELSEWHERE}"
