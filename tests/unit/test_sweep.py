"""The points of a sweep: cluster shapes, products of axes, costs, and plans of smaller clusters on larger ones."""

from __future__ import annotations

import random
from types import SimpleNamespace

import attrs
import pytest

from rpeg_core.planning.planner import Planner
from rpeg_core.planning.search import Progress, Solution
from rpeg_core.planning.solve import Contender, predict, solve
from rpeg_core.planning.sweep import Found, Point, Row, default_gpus, found, sized, sweep_points
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.experiment import parse_experiment

MODEL = {"config": "meta-llama/Llama-3.1-8B"}


def experiment(workload=None, objective=None, **cluster):
    return parse_experiment(
        {
            "algorithm": "ppo",
            "models": {"actor": MODEL, "critic": MODEL, "reward": MODEL, "reference": {"same_as": "actor"}},
            "workload": {"prompts": 256, "prompt_tokens": 512, "response_tokens": 1024, **(workload or {})},
            "cluster": {"hardware": "gh200", **cluster},
            "structure": {"staleness": [0, 1]},
            "objective": objective or {},
            "search": {"strategy": "greedy"},
        }
    )


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def profile(registry, name="gh200"):
    return registry.get("hardware", name).record


@pytest.mark.parametrize(
    ("racks", "nodes", "gpus", "shape"),
    [
        (1, 4, 4, (1, 1)),
        (1, 4, 16, (1, 4)),
        (1, 4, 64, (1, 16)),
        (2, 4, 12, (1, 3)),
        (2, 4, 16, (1, 4)),
        (2, 4, 32, (2, 4)),
        (2, 4, 64, (4, 4)),
        (2, 4, 6, "6 GPUs are not whole nodes of 4"),
        (2, 4, 24, "24 GPUs are 6 nodes, more than a rack of 4 nodes and not whole racks"),
    ],
)
def test_the_shape_follows_from_the_number_of_gpus(registry, racks, nodes, gpus, shape) -> None:
    cluster = sized(experiment(racks=racks, nodes_per_rack=nodes), profile(registry), gpus)
    assert shape == (cluster if isinstance(cluster, str) else (cluster.racks, cluster.nodes_per_rack))
    if not isinstance(cluster, str):
        assert cluster.racks * cluster.nodes_per_rack * cluster.gpus_per_node == gpus


def test_what_the_user_says_of_his_gpus_stays_with_them(registry) -> None:
    base = experiment(gpus_per_node=2, memory_gb=50, price_per_gpu_hour=2.0)
    own, other = (sized(base, profile(registry, name), 8) for name in ("gh200", "h100"))
    assert (own.gpus_per_node, own.memory_gb, own.price_per_gpu_hour) == (2, 50, 2.0)
    assert (other.gpus_per_node, other.memory_gb, other.price_per_gpu_hour) == (8, None, None)


def test_without_an_axis_the_neighbourhood_of_the_experiment_is_swept(registry) -> None:
    gh200 = profile(registry)
    assert default_gpus(experiment(racks=2, nodes_per_rack=4), gh200, several=True) == (8, 16, 32, 64)
    assert default_gpus(experiment(racks=3, nodes_per_rack=2), gh200, several=True) == (24, 48)
    assert default_gpus(experiment(), gh200, several=True) == (4, 8)
    assert default_gpus(experiment(nodes_per_rack=4), gh200, several=False) == (16,)


def test_points_are_the_product_of_the_axes_with_gpus_innermost(registry) -> None:
    points = sweep_points(
        experiment(),
        [profile(registry), profile(registry, "h100")],
        gpus=(16, 8),
        prompts=(128, 256),
        prices={"h100": 3.0},
    )
    assert [(p.hardware, p.prompts, p.gpus) for p in points] == [
        (hardware, prompts, gpus) for hardware in ("gh200", "h100") for prompts in (128, 256) for gpus in (8, 16)
    ]
    assert {p.hardware: p.price_per_gpu_hour for p in points} == {"gh200": None, "h100": 3.0}
    for point in points:
        assert point.experiment.workload.prompts == point.prompts
        assert point.experiment.cluster.hardware == point.hardware


def test_the_price_is_the_command_lines_else_the_files_else_the_profiles(registry) -> None:
    priced = attrs.evolve(profile(registry), price_per_gpu_hour=1.0)

    def price(base, prices=None):
        return sweep_points(base, [priced], gpus=(8,), prices=prices)[0].price_per_gpu_hour

    assert price(experiment()) == 1.0
    assert price(experiment(price_per_gpu_hour=2.0)) == 2.0
    assert price(experiment(price_per_gpu_hour=2.0), {"gh200": 3.0}) == 3.0


def test_response_lengths_scale_with_the_response(registry) -> None:
    base = experiment({"response_lengths": [[0.5, 256], [0.9, 500], [1.0, 1024]]})
    double, tiny = sweep_points(base, [profile(registry)], gpus=(8,), response_tokens=(2048, 2))
    lengths = double.experiment.workload.response_lengths
    assert [(q.fraction, q.tokens) for q in lengths] == [(0.5, 512), (0.9, 1000), (1.0, 2048)]
    assert tiny.experiment is None
    assert tiny.skipped.startswith("workload.response_lengths[0].tokens is 0")


def row(gpus, tokens_per_s, step_s=2.0, price=None):
    evaluation = SimpleNamespace(tokens_per_s=tokens_per_s, makespan_s=8 * step_s)
    prediction = SimpleNamespace(evaluation=evaluation)
    plan = Found(structure=None, assignments={}, prediction=prediction, steps=8, gap=None, limit="", intervals=None)
    point = Point(hardware="x", gpus=gpus, prompts=1, response_tokens=1, price_per_gpu_hour=price)
    return Row(point=point, found=plan)


def test_costs_are_of_the_whole_cluster() -> None:
    """8 GPUs at 3.6 $ are 0.008 $ per second; a step of 2 s costs 0.016 $ and makes 20,000 tokens, 50 in a million."""
    assert row(8, 10_000, price=3.6).usd_per_step == pytest.approx(0.016)
    assert row(8, 10_000, price=3.6).usd_per_million_tokens == pytest.approx(0.016 * 50)
    assert (row(8, 10_000).usd_per_step, row(8, 10_000).usd_per_million_tokens) == (None, None)
    assert row(8, 10_000).gpu_seconds_per_token == pytest.approx(0.0008)


def outcome_of(registry, point):
    planner = Planner(point.experiment, registry)
    problem = planner.problem()
    return solve(planner, problem, registry, Progress())


def as_winner(outcome, solution):
    prediction = predict(outcome.problem, solution)
    return attrs.evolve(outcome, winner=Contender(name="x", result=None, solution=solution, prediction=prediction))


@pytest.mark.parametrize(("racks", "nodes"), [(1, 4), (2, 4)])
def test_any_plan_for_fewer_gpus_is_one_for_more_and_as_fast(registry, racks, nodes) -> None:
    small, large = sweep_points(experiment(racks=racks, nodes_per_rack=nodes), [profile(registry)], gpus=(16, 64))
    before, after = outcome_of(registry, small), attrs.evolve(outcome_of(registry, large), winner=None)
    dice = random.Random(0)
    for _ in range(20):
        index = dice.randrange(len(before.problem.structures))
        candidates = before.problem.structures[index].candidates
        solution = Solution(index, tuple(dice.randrange(len(c)) for c in candidates))
        plan = found(small, as_winner(before, solution), [])
        taken = found(large, after, [Row(point=small, found=plan)])
        assert taken.assignments == plan.assignments
        assert taken.tokens_per_s == plan.tokens_per_s
        assert taken.plan_of_gpus == 16
        assert taken.prediction.evaluation.peak_ratio == plan.prediction.evaluation.peak_ratio


def test_the_plan_of_a_smaller_cluster_is_taken_only_where_it_is_faster(registry) -> None:
    points = sweep_points(experiment(racks=2, nodes_per_rack=4), [profile(registry)], gpus=(16, 32, 64))
    outcomes = [outcome_of(registry, point) for point in points]
    worst = as_winner(outcomes[1], Solution(0, tuple(len(c) - 1 for c in outcomes[1].problem.structures[0].candidates)))
    rows = [Row(point=points[0], found=found(points[0], outcomes[0], []))]
    rows.append(Row(point=points[1], found=found(points[1], worst, rows)))
    assert rows[1].found.plan_of_gpus == 16
    assert 0 < rows[1].found.gap < 1
    assert found(points[2], attrs.evolve(outcomes[2], winner=None), rows).plan_of_gpus == 16
    assert found(points[2], outcomes[2], rows).plan_of_gpus is None
    other_batch = [attrs.evolve(row, point=attrs.evolve(row.point, prompts=1)) for row in rows]
    assert found(points[2], attrs.evolve(outcomes[2], winner=None), other_batch) is None


def test_an_efficiency_objective_may_be_slower_with_more_gpus(registry) -> None:
    base = experiment(objective={"kind": "cost_per_token"}, nodes_per_rack=4)
    small, large = sweep_points(base, [profile(registry)], gpus=(16, 32))
    rows = [Row(point=small, found=found(small, outcome_of(registry, small), []))]
    assert found(large, attrs.evolve(outcome_of(registry, large), winner=None), rows) is None
