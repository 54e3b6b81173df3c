"""What a plan may choose beyond degrees and microbatches for this backend; without workers."""

from __future__ import annotations

import attrs
import pytest
from rpeg_plugin_megatron.layouts import check_axes
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
