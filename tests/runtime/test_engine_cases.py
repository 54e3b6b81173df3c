"""Hand-drawn runs with exact times, ends and failures of the engine."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from rpeg_core.errors import ExecutionError
from rpeg_core.ir import Rpeg, RpegBuilder
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import Dispatch, NodeFinished, Release, Stop, Tick, WorkerLost
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import SKEWED, on, toy_mini, toy_model, toy_plan, toy_ppo, toy_workload

Execute = Callable[..., object]


def times(**by_operator: float) -> Callable[[Node], float]:
    """Seconds by operator, for transfers by container; a transfer of anything else takes 1 s."""

    def seconds_of(node: Node) -> float:
        return by_operator[node.operator] if node.kind is NodeKind.OP else by_operator.get(node.container, 1.0)

    return seconds_of


def window_of(rpeg: Rpeg, plan: ExecutionPlan, **workload: object) -> Window:
    return Window(rpeg, plan, toy_workload(**workload))


APART = toy_plan(actor_generation=on(0), actor_training=on(1))
TOGETHER = toy_plan(actor_generation=on(0, 2, tensor=2), actor_training=on(0, 2))


def test_synchronous_and_apart_one_thing_after_the_other(execute: Execute) -> None:
    run = execute(window_of(toy_mini(), APART), 2, times(actor_generation=4.0, actor_training=2.0))
    assert run.starts == [
        ("actor_generation@0", 0.0, 4.0),
        ("COMM completions->actor_training@0", 4.0, 5.0),
        ("actor_training@0", 5.0, 7.0),
        ("COMM W_actor->actor_generation@1", 7.0, 8.0),
        ("actor_generation@1", 8.0, 12.0),
        ("COMM completions->actor_training@1", 12.0, 13.0),
        ("actor_training@1", 13.0, 15.0),
    ]


def test_asynchronous_and_apart_generation_overlaps_training(execute: Execute) -> None:
    """tau = 1: generation of step 1 needs nothing; the weights for step 2 wait for both ends to be free."""
    run = execute(window_of(toy_mini(tau=1), APART), 3, times(actor_generation=4.0, actor_training=2.0))
    assert run.starts == [
        ("actor_generation@0", 0.0, 4.0),
        ("COMM completions->actor_training@0", 4.0, 5.0),
        ("actor_training@0", 5.0, 7.0),
        ("actor_generation@1", 5.0, 9.0),  # the transfer held the source until 5
        ("COMM W_actor->actor_generation@2", 9.0, 10.0),  # made in step 0, so before the data of step 1
        ("COMM completions->actor_training@1", 10.0, 11.0),
        ("actor_training@1", 11.0, 13.0),
        ("actor_generation@2", 11.0, 15.0),
        ("COMM completions->actor_training@2", 15.0, 16.0),
        ("actor_training@2", 16.0, 18.0),
    ]


def test_colocated_layouts_alternate_through_resharding(execute: Execute) -> None:
    run = execute(window_of(toy_mini(), TOGETHER), 2, times(actor_generation=4.0, actor_training=2.0, W_actor=3.0))
    assert run.starts == [
        ("actor_generation@0", 0.0, 4.0),
        ("RESHARD W_actor->actor_training@0", 4.0, 7.0),
        ("actor_training@0", 7.0, 9.0),
        ("RESHARD W_actor->actor_generation@1", 9.0, 12.0),
        ("actor_generation@1", 12.0, 16.0),
        ("RESHARD W_actor->actor_training@1", 16.0, 19.0),
        ("actor_training@1", 19.0, 21.0),
    ]


def test_length_phases_pipeline_generation_and_inference(execute: Execute) -> None:
    b = RpegBuilder("scored")
    b.model("actor", toy_model("actor"), trainable=True)
    b.model("reward", toy_model("reward"), trainable=False)
    b.data("prompts", elements=16, bytes_per_element=2)
    b.data("completions", elements=16, bytes_per_element=2)
    b.data("rewards", elements=16, bytes_per_element=2)
    b.generation("generation", "actor", reads=["prompts"], writes=["completions"])
    b.inference("scoring", "reward", reads=["completions"], writes=["rewards"])
    b.training("training", "actor", reads=["completions", "rewards"])
    b.connect("generation", "completions", "scoring")
    b.connect("scoring", "rewards", "training")
    b.publish("training", "generation")
    plan = toy_plan(generation=on(0), scoring=on(1), training=on(0))
    window = window_of(b.build(), plan, response_lengths=SKEWED)
    run = execute(window, 1, times(generation=2.0, scoring=3.0, training=5.0, completions=1.0, rewards=0.5))
    assert run.starts == [
        ("generation@0.0", 0.0, 2.0),
        ("COMM completions->scoring@0.0", 2.0, 3.0),
        ("generation@0.1", 3.0, 5.0),
        ("scoring@0.0", 3.0, 6.0),
        ("generation@0.2", 5.0, 7.0),  # the transfer of part 1 needs the GPU of the scoring
        ("COMM completions->scoring@0.1", 7.0, 8.0),
        ("COMM completions->scoring@0.2", 8.0, 9.0),
        ("scoring@0.1", 9.0, 12.0),
        ("scoring@0.2", 12.0, 15.0),
        ("COMM rewards->training@0", 15.0, 15.5),
        ("training@0", 15.5, 20.5),
    ]


def test_a_split_generation_reads_all_parts_of_another() -> None:
    b = RpegBuilder("drafts")
    for name in ("first", "second", "judge"):
        b.model(name, toy_model(name), trainable=False)
    for name in ("prompts", "drafts", "answers", "scores"):
        b.data(name, elements=16, bytes_per_element=2)
    b.generation("drafting", "first", reads=["prompts"], writes=["drafts"])
    b.generation("answering", "second", reads=["drafts"], writes=["answers"])
    b.inference("judging", "judge", reads=["drafts", "answers"], writes=["scores"])
    b.connect("drafting", "drafts", "answering", "judging")
    b.connect("answering", "answers", "judging")
    plan = toy_plan(drafting=on(0), answering=on(0), judging=on(1))
    shape = window_of(b.build(), plan, response_lengths=SKEWED).shape(0)

    def made(operator: str, phase: int) -> list[str]:
        (position,) = (p for p, n in enumerate(shape.nodes) if n.label == f"{operator}@0.{phase}")
        return [shape.nodes[maker].label.partition("#")[0] for _, maker, _ in shape.reads[position]]

    for phase in range(3):
        assert made("answering", phase) == ["drafting@0.0", "drafting@0.1", "drafting@0.2"]
        assert made("judging", phase) == [f"COMM {what}->judging@0.{phase}" for what in ("drafts", "answers")]


def test_order_earlier_step_then_transfers_then_topological() -> None:
    """Everything on one GPU, so that each choice among the ready nodes shows."""
    b = RpegBuilder("choices")
    b.model("actor", toy_model("actor"), trainable=True, staleness=1)
    for name in ("prompts", "texts", "scores"):
        b.data(name, elements=1, bytes_per_element=2)
    b.training("training", "actor", reads=["texts", "scores"])
    b.function("last_declared_first", reads=["texts"], writes=["scores"], seconds_per_sample=0.0)
    b.generation("generation", "actor", reads=["prompts"], writes=["texts"])
    b.connect("generation", "texts", "training", "last_declared_first")
    b.connect("last_declared_first", "scores", "training")
    b.publish("training", "generation")
    graph = b.build()
    plan = toy_plan(training=on(0), last_declared_first=on(0), generation=on(0))
    engine = Engine(Window(graph, plan, toy_workload()), 3)
    order, out, now = [], engine.start(), 0.0
    while not engine.stopped:
        dispatched = [i for i in out if isinstance(i, Dispatch)]
        assert len(dispatched) == 1
        order.append(dispatched[0].node.label)
        now += 1.0
        out = engine.handle(NodeFinished(dispatched[0].node.index, now))
    steps = [(f"generation@{k}", f"last_declared_first@{k}", f"training@{k}") for k in range(3)]
    assert [label for step in steps for label in step] == order


def test_a_blocked_node_does_not_keep_others_off_the_gpus_it_could_have(execute: Execute) -> None:
    """The transfers to training come first, but wait for GPU 2; GPU 3 meanwhile takes up the critic."""
    plan = toy_plan(
        actor_generation=on(0),
        reference_inference=on(1),
        reward_inference=on(2),
        critic_inference=on(3),
        actor_training=on(0, 4),
        critic_training=on(0, 4),
    )
    run = execute(
        window_of(toy_ppo(tau=1), plan),
        1,
        times(
            actor_generation=1.0,
            reference_inference=1.0,
            reward_inference=5.0,
            critic_inference=1.0,
            actor_training=2.0,
            critic_training=2.0,
        ),
    )
    starts = {name: start for name, start, _ in run.starts}
    assert starts["critic_inference@0"] == 4.0  # three sends leave GPU 0 one after the other
    assert starts["reward_inference@0"] == 3.0
    assert min(t for name, t in starts.items() if name.startswith("COMM") and "training" in name) == 8.0


def test_inputs_versions_and_devices_of_a_dispatch() -> None:
    engine = Engine(window_of(toy_mini(tau=1), APART), 3)
    (first,) = engine.start()
    assert (first.node.label, first.node.model, first.node.version) == ("actor_generation@0", "actor", 0)
    assert [(a.container, a.node) for a in first.inputs] == [("W_actor", -1)]
    (transfer,) = engine.handle(NodeFinished(first.node.index, 4.0))
    assert ("completions", first.node.index) == (transfer.inputs[0].container, transfer.inputs[0].node)
    assert [str(a) for a in transfer.held] == ["1", "0"]


def test_artifacts_are_released_when_their_last_reader_is_done(execute: Execute) -> None:
    run = execute(window_of(toy_mini(), APART), 2, times(actor_generation=4.0, actor_training=2.0))
    names = {-1: "initial", -2: "initial"}
    names |= {d.node.index: d.node.label.partition("#")[0] for _, d in run.dispatches}
    assert [(t, names[r.artifact.node], r.artifact.container) for t, r in run.releases] == [
        (4.0, "initial", "W_actor"),  # of the generation
        (5.0, "actor_generation@0", "completions"),  # sent
        (7.0, "COMM completions->actor_training@0", "completions"),
        (7.0, "initial", "W_actor"),  # of the training
        (12.0, "COMM W_actor->actor_generation@1", "W_actor"),
        (13.0, "actor_generation@1", "completions"),
        (15.0, "actor_training@0", "W_actor"),  # training at step 1 started from it
        (15.0, "COMM completions->actor_training@1", "completions"),
    ]
    assert run.left.artifacts == 1  # the trained weights are the result


def test_an_output_that_nothing_reads_is_released_at_once(execute: Execute) -> None:
    b = RpegBuilder("log")
    b.model("actor", toy_model("actor"), trainable=True)
    for name in ("prompts", "texts", "statistics"):
        b.data(name, elements=1, bytes_per_element=2)
    b.generation("generation", "actor", reads=["prompts"], writes=["texts", "statistics"])
    b.training("training", "actor", reads=["texts"])
    b.connect("generation", "texts", "training")
    b.publish("training", "generation")
    window = window_of(b.build(), toy_plan(generation=on(0), training=on(0)))
    run = execute(window, 1, times(generation=4.0, training=2.0))
    assert [(t, r.artifact.container) for t, r in run.releases][:1] == [(4.0, "statistics")]


def test_an_operator_that_waits_for_nothing_is_held_back(execute: Execute) -> None:
    """The reference model of DPO reads the dataset only; its outputs must not pile up over 50 steps."""
    b = RpegBuilder("dpo")
    b.model("policy", toy_model("policy"), trainable=True)
    b.model("reference", toy_model("reference"), trainable=False)
    for name in ("pairs", "logprobs"):
        b.data(name, elements=1, bytes_per_element=2)
    b.inference("inference", "reference", reads=["pairs"], writes=["logprobs"])
    b.training("training", "policy", reads=["pairs", "logprobs"])
    b.connect("inference", "logprobs", "training")
    window = window_of(b.build(), toy_plan(inference=on(0), training=on(1)))
    run = execute(window, 50, times(inference=1.0, training=10.0))
    assert 2 == window.depth == run.largest["open_steps"]
    assert max(run.end_s.values()) == 0.0 + 1 + 1 + 50 * 10 + 49 * 1  # each training waits for one transfer


# Ends


def test_the_run_stops_when_all_steps_are_done() -> None:
    engine = Engine(window_of(toy_mini(), toy_plan(actor_generation=on(0), actor_training=on(0))), 1)
    (first,) = engine.start()
    *_, second = engine.handle(NodeFinished(first.node.index, 1.0))
    out = engine.handle(NodeFinished(second.node.index, 2.0))
    assert [Stop("all 1 steps are done", failed=False)] == [i for i in out if isinstance(i, Stop)]
    assert not any(isinstance(i, Release) and i.artifact.node == second.node.index for i in out)
    assert engine.stopped
    assert engine.handle(WorkerLost(0, "gone", 3.0)) == []


def running() -> Engine:
    """Step 0 is generated and its completions are being sent from GPU 0 to GPU 1."""
    engine = Engine(window_of(toy_mini(), APART), 2, limit_s=60.0)
    (first,) = engine.start(100.0)
    engine.handle(NodeFinished(first.node.index, 104.0))
    return engine


def test_a_lost_worker_stops_the_run_with_what_it_was_doing() -> None:
    (stop,) = running().handle(WorkerLost(1, "no heartbeat for 30 s", 140.0))
    assert (
        Stop(
            "the worker of GPU 1 was lost: no heartbeat for 30 s",
            failed=True,
            facts=(
                "it was running COMM completions->actor_training@0#2 (operator actor_training, step 0, GPUs 1)",
                "at 104 s: ready",
                "at 104 s: dispatched",
                "running",
                "steps done: 0 of 2",
            ),
        )
        == stop
    )


def test_a_lost_worker_without_work_is_named_with_its_last_instruction() -> None:
    engine = running()
    engine.handle(NodeFinished(2, 105.0))
    (stop,) = engine.handle(WorkerLost(0, "exit status -9", 106.0))
    assert "its last instruction was COMM completions->actor_training@0#2" in stop.facts[0]
    assert "GPUs 1" in stop.facts[0]
    (stop,) = Engine(window_of(toy_mini(), APART), 1).handle(WorkerLost(1, "died", 1.0))
    assert stop.facts[0] == "no instruction was given to GPU 1 before"
    (stop,) = Engine(window_of(toy_mini(), APART), 1).handle(WorkerLost(77, "died", 1.0))
    assert stop.facts[0] == "no instruction was given to GPU 77 before"


def test_a_node_over_the_limit_stops_the_run_at_the_next_tick() -> None:
    engine = running()
    assert engine.handle(Tick(164.0)) == []
    (stop,) = engine.handle(Tick(164.5))
    assert stop.failed
    assert stop.reason.startswith("COMM completions->actor_training@0#2 (operator actor_training, step 0, GPUs 1)")
    assert stop.reason.endswith("has been running for 60.5 s")
    assert stop.facts[0] == "the limit is 60 s"


def test_without_a_limit_a_tick_changes_nothing() -> None:
    engine = Engine(window_of(toy_mini(), APART), 2)
    engine.start()
    assert engine.handle(Tick(1e9)) == []


def test_a_node_cannot_finish_twice() -> None:
    engine = running()
    with pytest.raises(ExecutionError, match="node 0 was reported finished, but it is not running"):
        engine.handle(NodeFinished(0, 105.0))


@pytest.mark.parametrize(
    ("label", "last_lines"),
    [
        ("actor_generation@0", ["at 104 s: finished", "done"]),
        ("COMM completions->actor_training@0", ["at 104 s: dispatched", "running"]),
        ("actor_training@0", ["waits for COMM completions->actor_training@0#2", "waiting"]),
        ("actor_generation@1", ["waits for COMM W_actor->actor_generation@1#6", "waiting"]),
    ],
)
def test_the_story_of_a_node(label: str, last_lines: list[str]) -> None:
    engine, window = running(), window_of(toy_mini(), APART)
    nodes = [*window.nodes(0), *window.nodes(1)]
    index = next(node.index for node in nodes if node.label.partition("#")[0] == label)
    assert last_lines == list(engine.story(index))[-2:]


def test_the_story_of_a_ready_node_names_who_holds_its_gpus() -> None:
    plan = toy_plan(actor_generation=on(0), actor_training=on(1))
    engine = Engine(window_of(toy_mini(tau=1), plan), 2)
    (first,) = engine.start()
    second = next(n for n in window_of(toy_mini(tau=1), plan).nodes(1) if n.label == "actor_generation@1")
    assert engine.story(second.index)[1:] == ("at 0 s: ready", "waits for the GPUs of actor_generation@0", "ready")
    assert first.node.label == "actor_generation@0"


def test_steps_and_depth_are_at_least_one() -> None:
    window = window_of(toy_mini(), APART)
    for bad in ({"steps": 0}, {"steps": 1, "depth": 0}):
        with pytest.raises(ValueError, match="allowed: at least 1"):
            Engine(window, **bad)
