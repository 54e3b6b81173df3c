"""Hand-drawn simulations with exact virtual times, and the record that core sees."""

import random
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rpeg_plugin_simulator import SIMULATOR, Simulation, causes, simulate

from rpeg_core.passes.evaluate import EvaluationOptions, evaluate
from rpeg_core.passes.lower import Node
from rpeg_core.plugins.registry import Registry
from rpeg_core.runtime.trace import Bound, Dispatched, Record, Released, Trace, TraceHeader, Transferred
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import SKEWED, on, toy_book, toy_mini, toy_plan, toy_ppo, toy_workload

FOUR_GPUS = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
APART = toy_plan(actor_generation=on(0), actor_training=on(1))
SECONDS = {("actor", "generation"): 4.0, ("actor", "training"): 2.0}


def mini(tau: int, steps: int, plan=APART, **kwargs: object) -> Simulation:
    graph = toy_mini(tau=tau)
    return simulate(
        graph, plan, toy_workload(), toy_book(graph, FOUR_GPUS, seconds=SECONDS).node_seconds, steps=steps, **kwargs
    )


def test_the_registry_offers_it() -> None:
    loaded = Registry().get("backend", "simulator")
    assert loaded.record is SIMULATOR
    assert loaded.distribution == "rpeg-plugin-simulator"
    assert (SIMULATOR.can, SIMULATOR.probe()) == (frozenset({"execute"}), None)


def test_synchronous_steps_add_up() -> None:
    """4 s generation, 64 s for 6400 bytes of completions, 2 s training, 400 s for 40,000 bytes of weights."""
    found = mini(tau=0, steps=3)
    assert found == Simulation(steps=3, makespan_s=3 * (4 + 64 + 2) + 2 * 400.0, nodes=11)
    assert found.step_s == found.makespan_s / 3


def test_without_transfers_to_contend_for_it_equals_the_prediction() -> None:
    """Everything on the same GPUs in the same layout: one order is possible, whatever the policy."""
    graph, plan = toy_mini(), toy_plan(actor_generation=on(0, 4), actor_training=on(0, 4))
    book = toy_book(graph, FOUR_GPUS, seconds=SECONDS)
    predicted = evaluate(graph, plan, book, EvaluationOptions()).schedule.makespan_s
    found = simulate(graph, plan, toy_workload(), book.node_seconds, steps=8)
    assert found.makespan_s == predicted == 8 * 6.0


def test_the_trace_of_two_steps() -> None:
    records: list[Record] = []
    found = mini(tau=0, steps=2, record=records.append)
    assert Counter(type(r) for r in records)[Dispatched] == found.nodes == 7
    assert [(r.time_s, r.bytes) for r in records if isinstance(r, Transferred)] == [
        (68.0, 6400.0),
        (470.0, 40_000.0),
        (538.0, 6400.0),
    ]
    assert [(r.time_s, r.version) for r in records if isinstance(r, Bound)] == [
        (0.0, 0),
        (68.0, 0),
        (70.0, 1),
        (470.0, 1),
        (538.0, 1),
    ]
    assert [r.time_s for r in records] == sorted(r.time_s for r in records)
    assert sum(isinstance(r, Released) for r in records) == 8
    trace = Trace(TraceHeader(plan=None, backend="simulator", steps=2, clock="virtual"), tuple(records))
    assert trace.makespan_s == found.makespan_s


def test_steps_are_reported_in_order_when_they_and_all_before_are_done() -> None:
    seen: list[tuple[int, float]] = []
    mini(tau=1, steps=4, step_finished=lambda step, time_s: seen.append((step, time_s)))
    assert [step for step, _ in seen] == [0, 1, 2, 3]
    assert seen[0] == (0, 70.0)


def test_causes_go_from_the_predicted_to_the_simulated_time() -> None:
    graph, options = toy_mini(tau=1), EvaluationOptions(steps=2)
    book = toy_book(graph, FOUR_GPUS, seconds=SECONDS)
    simulated = mini(tau=1, steps=3)
    found = causes(
        graph, APART, toy_workload(), FOUR_GPUS, book.node_seconds, options, simulated, predicted_step_s=67.0
    )
    # Predicted: the transfers of steps 0 and 1 follow each other, 4-68 and 70-134 after training, then 2 s.
    # Holding the source, generation 1 runs from 68 to 72 beside training, and the second transfer starts at 72.
    assert [(cause.name, cause.step_s * steps) for cause, steps in zip(found, (2, 2, 2, 2, 3, 3), strict=True)] == [
        ("predicted", 134.0),
        ("plugins that changed since the plan was made", 4 + 64 + 2 + 64 + 2.0),
        ("transfers hold their source GPUs", 4 + 64 + 4 + 64 + 2.0),
        ("order of the engine", 4 + 64 + 4 + 64 + 2.0),
        ("3 instead of 2 steps", simulated.makespan_s),
        ("noise and sampled lengths", simulated.makespan_s),
    ]


# Properties


def with_seconds(case: Configuration, times: int, *, factor: float = 1.0, **kwargs: object) -> Simulation:
    def seconds_of(node: Node) -> float:
        return factor * random.Random(f"{times} {node.kind} {node.operator} {node.phase}").uniform(0.1, 2.0)

    return simulate(case.rpeg, case.plan, case.workload, seconds_of, **kwargs)


@settings(max_examples=60, deadline=None)
@given(configurations(), st.integers(1, 6), st.integers(0, 99))
def test_scaling_every_duration_scales_the_makespan(case: Configuration, steps: int, seed: int) -> None:
    one = with_seconds(case, seed, steps=steps)
    two = with_seconds(case, seed, steps=steps, factor=2.0)
    assert two.makespan_s == 2 * one.makespan_s  # exact: powers of two


@settings(max_examples=60, deadline=None)
@given(configurations(), st.integers(0, 99), st.floats(0.0, 1.0))
def test_a_seed_makes_a_noisy_run_reproducible(case: Configuration, seed: int, noise: float) -> None:
    runs = [with_seconds(case, 0, steps=3, noise=noise, seed=seed) for _ in range(2)]
    assert runs[0] == runs[1]


@settings(max_examples=60, deadline=None)
@given(configurations(), st.integers(0, 99))
def test_no_run_is_shorter_than_its_longest_step_or_longer_than_everything_in_a_row(
    case: Configuration, seed: int
) -> None:
    busy: list[Record] = []
    found = with_seconds(case, seed, steps=3, record=busy.append)
    trace = Trace(TraceHeader(plan=None, backend="", steps=3, clock="virtual"), tuple(busy))
    lengths = [end - start for _, start, end in trace.intervals()]
    assert max(lengths) <= found.makespan_s * (1 + 1e-12)
    assert found.makespan_s <= sum(lengths) * (1 + 1e-12)


@pytest.mark.parametrize("lengths", [(), SKEWED])
@pytest.mark.parametrize("tau", [0, 1])
def test_ppo_is_within_reason_of_the_prediction(tau: int, lengths: tuple) -> None:
    """The same graph in two orders; on this plan neither loses more than a tenth."""
    graph, workload = toy_ppo(tau=tau), toy_workload(response_lengths=lengths)
    plan = toy_plan(
        actor_generation=on(0, 2),
        reference_inference=on(2),
        reward_inference=on(3),
        critic_inference=on(2),
        actor_training=on(0, 2),
        critic_training=on(2, 4),
    )
    seconds = {
        (model, role): 50.0 * (1 + index)
        for index, (model, role) in enumerate(
            [
                ("actor", "generation"),
                ("reference", "inference"),
                ("reward", "inference"),
                ("critic", "inference"),
                ("actor", "training"),
                ("critic", "training"),
            ]
        )
    }
    book = toy_book(graph, FOUR_GPUS, workload, seconds=seconds)
    options = EvaluationOptions(reserve_source=True)
    predicted = evaluate(graph, plan, book, options).schedule.makespan_s
    found = simulate(graph, plan, workload, book.node_seconds, steps=8).makespan_s
    assert found == pytest.approx(predicted, rel=0.10)
