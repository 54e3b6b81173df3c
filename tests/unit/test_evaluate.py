"""Whole evaluations computed on paper."""

from __future__ import annotations

import pytest

from rpeg_core.errors import CostTermError
from rpeg_core.ir import RpegBuilder
from rpeg_core.passes.evaluate import EvaluationOptions, evaluate
from rpeg_core.planning.problem import critical_seconds
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import (
    SKEWED,
    on,
    toy_book,
    toy_hardware,
    toy_memory_terms,
    toy_mini,
    toy_model,
    toy_plan,
    toy_ppo,
    toy_transfer_term,
    toy_workload,
)

NODE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)
TRANSFER = toy_transfer_term(bytes_per_s=3200.0)  # Y (6400 bytes) 2 s, L (3200) 1 s, weights (40000) 12.5 s


def three_operators():
    """g -Y-> r -L-> t; r is frozen."""
    b = RpegBuilder("three")
    b.model("m", toy_model("m"), trainable=True)
    b.model("ref", toy_model("ref"), trainable=False)
    x = b.data("X", elements=1600, bytes_per_element=2)
    y = b.data("Y", elements=3200, bytes_per_element=2)
    z = b.data("L", elements=1600, bytes_per_element=2)
    b.generation("g", "m", reads=[x], writes=[y])
    b.inference("r", "ref", reads=[y], writes=[z])
    b.training("t", "m", reads=[z])
    b.connect("g", y, "r")
    b.connect("r", z, "t")
    b.publish("t", "g")
    return b.build()


def times(prediction):
    schedule = prediction.schedule
    return {
        node.label.split("#")[0]: (schedule.start_s[node.index], schedule.finish_s[node.index])
        for node in prediction.graph.nodes
    }


def test_two_synchronous_steps_on_two_of_four_gpus():
    # g on GPU 0 (10 s), r on GPU 1 (4 s), t on GPUs 0-1 (6 s); r needs Y (2 s), t needs L (1 s). After t@0, GPU 0
    # gets the half of the weights that it lacks for g: 40000 * (2 - 1) / 2 bytes, 6.25 s.
    #
    #         0         10  12   16  17    23     29.25     39.25 41.25  45.25 46.25  52.25
    # GPU 0   g@0───────        │COMM│t@0──│COMM──│g@1──────            │COMM │t@1────
    # GPU 1             │COMM│r@0│COMM│t@0─│                │COMM │r@1───│COMM │t@1────
    rpeg = three_operators()
    plan = {"g": on(0), "r": on(1), "t": on(0, 2)}
    book = toy_book(
        rpeg,
        NODE,
        seconds={("m", "generation"): 10, ("ref", "inference"): 4, ("m", "training"): 6},
        transfer=TRANSFER,
        memory=toy_memory_terms(
            training_state={("m", "training"): 1000},
            weights={("m", "training"): 200, ("m", "generation"): 200, ("ref", "inference"): 120},
            transient={("m", "training"): 100, ("m", "generation"): 60, ("ref", "inference"): 30},
        ),
        hardware=toy_hardware(memory_bytes=1000),
    )
    prediction = evaluate(rpeg, plan, book, EvaluationOptions(steps=2))
    assert times(prediction) == {
        "g@0": (0, 10),
        "COMM Y->r@0": (10, 12),
        "r@0": (12, 16),
        "COMM L->t@0": (16, 17),
        "t@0": (17, 23),
        "COMM W_m->g@1": (23, 29.25),
        "g@1": (29.25, 39.25),
        "COMM Y->r@1": (39.25, 41.25),
        "r@1": (41.25, 45.25),
        "COMM L->t@1": (45.25, 46.25),
        "t@1": (46.25, 52.25),
    }
    result = prediction.evaluation
    assert result.makespan_s == 52.25
    assert result.tokens_per_s == pytest.approx(2 * 16 * 200 / 52.25)
    # GPU 0: 2 * (10 + 1 + 6) + 6.25 = 40.25; GPU 1: 2 * (2 + 4 + 1 + 6) = 26; GPUs 2 and 3: 0
    assert result.utilization == pytest.approx((40.25 + 26) / (4 * 52.25))
    assert result.used_gpus == 2
    # GPU 0: state 500 + max(g 200 + 60, t 100 + 50, weights arriving 200 + 100) = 800
    # GPU 1: 500 + ref 120 + max(r 30, t 150) = 770
    assert [s.peak_bytes for s in prediction.memory.segments] == [800, 770, 0]
    assert result.peak_ratio == pytest.approx(800 / 900)
    assert result.feasible


def test_three_stale_steps_overlap():
    # tau = 1, g on 0 and t on 1, 10 s each; Y takes 2 s; g@2 needs the weights of t@0 (12.5 s)
    #
    #         0       10  12   20  22  24     34 34.5    44.5 46.5    56.5
    # GPU 0   g@0────│g@1──────│   │COMM W───────│g@2─────│
    # GPU 1          │C │t@0───────│C │t@1───│            │C  │t@2────│
    rpeg = toy_mini(tau=1)
    book = toy_book(
        rpeg,
        NODE,
        seconds={("actor", "generation"): 10, ("actor", "training"): 10},
        transfer=TRANSFER,
    )
    plan = toy_plan(actor_generation=on(0), actor_training=on(1))
    prediction = evaluate(rpeg, plan, book, EvaluationOptions(steps=3))
    assert times(prediction) == {
        "actor_generation@0": (0, 10),
        "actor_generation@1": (10, 20),
        "COMM completions->actor_training@0": (10, 12),
        "actor_training@0": (12, 22),
        "COMM W_actor->actor_generation@2": (22, 34.5),
        "COMM completions->actor_training@1": (22, 24),
        "actor_training@1": (24, 34),
        "actor_generation@2": (34.5, 44.5),
        "COMM completions->actor_training@2": (44.5, 46.5),
        "actor_training@2": (46.5, 56.5),
    }
    # synchronous: g 10, C 2, t 10, W 12.5 between steps: 3 * 22 + 2 * 12.5
    sync = toy_mini(tau=0)
    sync_book = toy_book(
        sync, NODE, seconds={("actor", "generation"): 10, ("actor", "training"): 10}, transfer=TRANSFER
    )
    assert evaluate(sync, plan, sync_book, EvaluationOptions(steps=3)).evaluation.makespan_s == 91


def generation_and_reward():
    b = RpegBuilder("two")
    b.model("m", toy_model("m"), trainable=False)
    b.model("rew", toy_model("rew"), trainable=False)
    x = b.data("X", elements=1600, bytes_per_element=2)
    y = b.data("Y", elements=3200, bytes_per_element=2)
    s = b.data("S", elements=16, bytes_per_element=2)
    b.generation("g", "m", reads=[x], writes=[y])
    b.inference("r", "rew", reads=[y], writes=[s])
    b.connect("g", y, "r")
    return b.build()


SPLIT = {  # g 2, 2, 4 s; Y 1, 0.5, 0.5 s; r 2, 1, 1 s
    "g@0.0": (0, 2),
    "g@0.1": (2, 4),
    "g@0.2": (4, 8),
    "COMM Y->r@0.0": (2, 3),
    "r@0.0": (3, 5),
    "COMM Y->r@0.1": (5, 5.5),  # ready at 4, but GPU 1 is busy until 5
    "r@0.1": (5.5, 6.5),
    "COMM Y->r@0.2": (8, 8.5),
    "r@0.2": (8.5, 9.5),
}
SOURCE_HELD = {  # each transfer also stops GPU 0
    "g@0.0": (0, 2),
    "COMM Y->r@0.0": (2, 3),
    "g@0.1": (3, 5),
    "r@0.0": (3, 5),
    "COMM Y->r@0.1": (5, 5.5),
    "g@0.2": (5.5, 9.5),
    "r@0.1": (5.5, 6.5),
    "COMM Y->r@0.2": (9.5, 10),
    "r@0.2": (10, 11),
}
WHOLE = {"g@0": (0, 8), "COMM Y->r@0": (8, 10), "r@0": (10, 14)}


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        (EvaluationOptions(steps=1), SPLIT),
        (EvaluationOptions(steps=1, reserve_source=True), SOURCE_HELD),
        (EvaluationOptions(steps=1, split_lengths=False), WHOLE),
    ],
    ids=["split", "source held", "not split"],
)
def test_length_phases_overlap_generation_and_reward(options, expected):
    rpeg = generation_and_reward()
    workload = toy_workload(response_lengths=SKEWED)
    book = toy_book(rpeg, NODE, workload, seconds={("m", "generation"): 8, ("rew", "inference"): 4}, transfer=TRANSFER)
    prediction = evaluate(rpeg, {"g": on(0), "r": on(1)}, book, options)
    assert times(prediction) == expected
    assert prediction.evaluation.makespan_s == max(finish for _, finish in expected.values())


def test_used_gpus_count_every_gpu_once_and_idle_ones_not_at_all():
    # two nodes of four: GPUs 2 and 3 carry three operators, 5 one; 0, 1, 4, 6 and 7 none
    rpeg, machine = toy_ppo(), DeviceSpace(racks=1, nodes_per_rack=2, gpus_per_node=4)
    plan = toy_plan(
        actor_generation=on(2, 4),
        actor_training=on(2, 4),
        critic_inference=on(3),
        critic_training=on(2),
        reference_inference=on(5),
        reward_inference=on(3),
    )
    book = toy_book(rpeg, machine, seconds={("actor", "generation"): 1.0})
    assert evaluate(rpeg, plan, book, EvaluationOptions(steps=1)).evaluation.used_gpus == 3


def test_a_fully_busy_cluster_has_utilization_one():
    rpeg = toy_mini()
    machine = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=2)
    book = toy_book(rpeg, machine, seconds={("actor", "generation"): 3.0, ("actor", "training"): 4.0})
    plan = toy_plan(actor_generation=on(0, 2), actor_training=on(0, 2))
    result = evaluate(rpeg, plan, book, EvaluationOptions(steps=4)).evaluation
    assert (result.makespan_s, result.utilization, result.used_gpus) == (28.0, 1.0, 2)


def test_the_critical_path_goes_through_gpus_that_a_transfer_reserves():
    # back from r.2: COMM Y.2, g.2, COMM Y.1 (holds GPU 0, so g.2 waits for it), r.0 (holds GPU 1), COMM Y.0, g.0
    rpeg, workload = generation_and_reward(), toy_workload(response_lengths=SKEWED)
    seconds = {("m", "generation"): 8, ("rew", "inference"): 4}
    book = toy_book(rpeg, NODE, workload, seconds=seconds, transfer=TRANSFER)
    options = EvaluationOptions(steps=1, reserve_source=True)
    prediction = evaluate(rpeg, {"g": on(0), "r": on(1)}, book, options)
    assert critical_seconds(prediction).tolist() == [4 + 2, 1 + 2]


def test_times_of_zero_are_refused():
    rpeg = toy_mini()
    plan = toy_plan(actor_generation=on(0), actor_training=on(0))
    with pytest.raises(CostTermError) as caught:
        evaluate(rpeg, plan, toy_book(rpeg, NODE), EvaluationOptions(steps=1))
    assert caught.value.what == "the cost terms give every operator 0 seconds"
