"""``rpeg profile-lengths`` on real workers: the lengths are those of the plain loop's responses."""

from __future__ import annotations

from typing import Any

import attrs
import pytest
import test_megatron_equivalence as equivalence
from megatron_plans import at, experiment, make_plan, settings
from rpeg_plugin_megatron.lengths import profile_lengths, profile_plan

from rpeg_core.errors import BackendError
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.lengths import LengthsRequest, Response, generation_alone


def plan_of(**workload: Any) -> Plan:
    chosen = experiment("ppo")
    chosen["models"]["actor"]["config"] |= {"vocab": 14}
    chosen["workload"] |= {"prompts": 8, "rollouts_per_prompt": 1, "response_tokens": 12} | workload
    return make_plan(chosen, {"": at("0")})


def request_of(plan: Plan, **changes: Any) -> tuple[LengthsRequest, list[list[Response]]]:
    batches: list[list[Response]] = []
    values: dict[str, Any] = {
        "experiment": plan.experiment,
        "graph": generation_alone(plan.rpeg),
        "responses": 8,
        "workers": None,
        "tensor": 1,
        "measured": lambda found: batches.append(list(found)),
        "cancelled": lambda: False,
        "status": lambda text: None,
    }
    return LengthsRequest(**values | changes), batches


@pytest.mark.parametrize(("workers", "tensor"), [(2, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_the_lengths_of_the_plain_loop(workers: int, tensor: int) -> None:
    """Planned for two bytes and many rollouts: neither changes what one response to a prompt is."""
    plan = plan_of()
    (rows,) = equivalence.plain(plan, 1).rows
    (sequences,) = [value for name, value in rows.items() if name == "completions"]
    responses = sequences[:, plan.workload.prompt_tokens :].tolist()
    end = 1  # the character tokenizer's, after padding
    expected = [
        Response(row.index(end) + 1, cut=False) if end in row else Response(len(row), cut=True) for row in responses
    ]
    assert {response.cut for response in expected} == {True, False}
    request, batches = request_of(plan_of(bytes_per_element=2), workers=workers, tensor=tensor)
    profile_lengths(request, settings())
    assert batches == [expected]


def test_a_cancelled_measurement_keeps_whole_rounds() -> None:
    request, batches = request_of(plan_of(), workers=1, responses=20)
    request = attrs.evolve(request, cancelled=lambda: bool(batches))
    profile_lengths(request, settings())
    assert [len(batch) for batch in batches] == [7]  # 20 responses are three rounds of at most 8


@pytest.mark.parametrize(
    ("responses", "workers", "tensor", "degrees", "rows"),
    [(128, 2, 1, (2, 1, 1), 16), (20, 2, 1, (2, 1, 1), 10), (3, 8, 1, (3, 1, 1), 3), (50, 4, 2, (2, 1, 2), 14)],
)
def test_rounds_are_equal_and_no_larger_than_needed(
    responses: int, workers: int, tensor: int, degrees: tuple[int, int, int], rows: int
) -> None:
    request, _ = request_of(plan_of(), responses=responses, workers=workers, tensor=tensor)
    plan = profile_plan(request, settings())
    (assignment,) = plan.assignments.values()
    layout = assignment.layout
    assert (layout.data, layout.pipeline, layout.tensor) == degrees
    assert plan.workload.sequences == rows
    rounds = -(-responses // rows)
    assert 0 <= rounds * rows - responses < rounds * degrees[0]


def test_weights_that_do_not_fit_this_machine_are_refused() -> None:
    request, _ = request_of(plan_of())
    (model,) = request.graph.models
    huge = attrs.evolve(model, spec=attrs.evolve(model.spec, layers=10**9))
    request = attrs.evolve(request, graph=attrs.evolve(request.graph, models=(huge,)))
    with pytest.raises(BackendError, match="the weights of model 'actor' do not fit the memory of this machine"):
        profile_plan(request, settings())


@pytest.mark.parametrize(("workers", "tensor", "text"), [(3, 2, "replicas of 2"), (3, 3, "tp=3 does not divide")])
def test_workers_that_cannot_be_arranged(workers: int, tensor: int, text: str) -> None:
    request, _ = request_of(plan_of(), workers=workers, tensor=tensor)
    with pytest.raises(BackendError) as caught:
        profile_plan(request, settings())
    assert text in str(caught.value)
