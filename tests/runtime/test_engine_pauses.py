"""Pauses at step boundaries, runs that begin at one, and cancelling: the same nodes, versions and inputs."""

from __future__ import annotations

import random
from collections.abc import Iterator

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.errors import ExecutionError
from rpeg_core.passes.lower import Node, lower
from rpeg_core.passes.unroll import unroll
from rpeg_core.runtime.artifacts import ArtifactReads
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import (
    Artifact,
    Cancel,
    Dispatch,
    Instruction,
    NodeFinished,
    Pause,
    Proceed,
    Release,
    Stop,
    Tick,
)
from rpeg_core.runtime.window import Window
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import on, toy_mini, toy_plan, toy_ppo, toy_workload

FEW = settings(max_examples=100, deadline=None)


@attrs.define
class Run:
    """Everything an engine said, and what was live at each pause."""

    given: list[Instruction] = attrs.field(factory=list)
    live: dict[int, tuple[Artifact, ...]] = attrs.field(factory=dict)
    left: tuple[Artifact, ...] = ()

    def dispatches(self, first_step: int = 0) -> list[Dispatch]:
        """By node, those of steps from ``first_step`` on."""
        found = [i for i in self.given if isinstance(i, Dispatch) and i.node.step >= first_step]
        return sorted(found, key=lambda dispatch: dispatch.node.index)

    @property
    def stop(self) -> Stop:
        (stop,) = [i for i in self.given if isinstance(i, Stop)]
        return stop


def drive(engine: Engine, seed: int, cancel_after: int | None = None) -> Run:
    """Run to the end with random durations; checks at each pause that nothing runs and nothing later was begun."""
    draw, run, running = random.Random(seed), Run(), {}
    now, out, handled = 0.0, engine.start(), 0
    while True:
        run.given += out
        for instruction in out:
            if isinstance(instruction, Dispatch):
                running[instruction.node.index] = (now + draw.uniform(0.0, 2.0), instruction.node)
        if engine.stopped:
            run.left = engine.live
            assert not running or run.stop.failed
            return run
        pauses = [i for i in out if isinstance(i, Pause)]
        if pauses:
            (pause,) = pauses
            assert not running
            assert all(i.node.step < pause.step for i in run.given if isinstance(i, Dispatch))
            run.live[pause.step] = engine.live
            assert engine.handle(Tick(now)) == []
            out = engine.handle(Proceed(now))
            continue
        handled += 1
        if handled == cancel_after:
            before = len(running)
            out = engine.handle(Cancel("Ctrl-C", now))
            assert not any(isinstance(i, Dispatch) for i in out)
            assert len(running) == before
            continue
        now, node = min(running.values(), key=lambda pair: pair[0])
        del running[node.index]
        out = engine.handle(NodeFinished(node.index, now))


def window_of(case: Configuration) -> Window:
    return Window(case.rpeg, case.plan, case.workload)


def needed(case: Configuration, step: int) -> set[tuple[int, str]]:
    """(step of the maker or -1, container) of what nodes from ``step`` on read and earlier ones, or none, made."""
    graph = lower(unroll(case.rpeg, step + 6), case.plan, case.workload)
    reads = ArtifactReads(graph)
    found = set()
    for node in graph.nodes:
        for maker, container in reads.by_node[node.index]:
            made_in = -1 if maker < 0 else graph.nodes[maker].step
            if node.step >= step > made_in:
                found.add((made_in, container))
    return found


@FEW
@given(configurations(max_operators=6), st.integers(1, 6), st.integers(1, 4), st.integers(0, 2**16))
def test_pauses_and_resumes_change_no_node_no_version_and_no_input(
    case: Configuration, steps: int, every: int, seed: int
) -> None:
    window = window_of(case)
    plain = drive(Engine(window, steps), seed)
    paused = drive(Engine(window, steps, pause_every=every), seed + 1)
    assert paused.dispatches() == plain.dispatches()
    assert list(paused.live) == [*range(every, steps, every), steps]
    for step in paused.live:
        if step == steps:
            continue
        resumed = drive(Engine(window, steps, first_step=step, pause_every=every), seed + 2)
        assert resumed.dispatches() == plain.dispatches(step)
        assert {k: v for k, v in paused.live.items() if k > step} == resumed.live
        assert set(resumed.left) == set(plain.left)


@FEW
@given(configurations(max_operators=6), st.integers(1, 5), st.integers(0, 2**16))
def test_what_is_live_at_a_pause_is_what_later_steps_need_and_what_a_resumed_run_starts_with(
    case: Configuration, step: int, seed: int
) -> None:
    window = window_of(case)
    live = drive(Engine(window, step, pause_every=step), seed).live[step]
    steps_of = {(-1 if a.node < 0 else window.locate(a.node)[0], a.container) for a in live}
    assert steps_of == needed(case, step)
    later = Engine(window, step + 3, first_step=step)
    later.start()
    assert later.live == live


@FEW
@given(configurations(max_operators=6), st.integers(1, 4), st.integers(1, 30), st.integers(0, 2**16), st.booleans())
def test_a_cancelled_run_finishes_what_runs_and_stops(
    case: Configuration, steps: int, after: int, seed: int, pausing: bool
) -> None:
    engine = Engine(window_of(case), steps, pause_every=1 if pausing else None)
    run = drive(engine, seed, cancel_after=after)
    assert not run.stop.failed
    assert engine.counters.running == 0
    if run.stop.reason == "Ctrl-C":
        assert engine.steps_done < steps or pausing
    else:
        assert engine.steps_done == steps


@FEW
@given(configurations(max_operators=6), st.integers(1, 4), st.integers(0, 2**16))
def test_everything_but_the_result_is_released_once_also_with_pauses(
    case: Configuration, steps: int, seed: int
) -> None:
    window = window_of(case)
    runs = [drive(Engine(window, steps, pause_every=every), seed) for every in (None, 1)]
    released = [sorted(map(repr, (i.artifact for i in run.given if isinstance(i, Release)))) for run in runs]
    assert released[0] == sorted(set(released[0]))
    assert released[1] == sorted(set(released[1]))
    assert set(released[0]) <= set(released[1])  # initial weights that only steps beyond the end would read
    assert all(".node=-" in text or "node=-" in text for text in set(released[1]) - set(released[0]))
    assert runs[0].left == runs[1].left


def labels(instructions: list[Instruction]) -> Iterator[str]:
    for instruction in instructions:
        if isinstance(instruction, Dispatch):
            yield instruction.node.label.partition("#")[0]
        elif isinstance(instruction, Pause):
            yield f"pause before {instruction.step}"


def test_one_step_stale_the_pause_holds_up_the_generation_that_could_overlap() -> None:
    plan = toy_plan(actor_generation=on(0), actor_training=on(1))
    window = Window(toy_mini(tau=1), plan, toy_workload())
    run = drive(Engine(window, 4, pause_every=2), 0)
    order = list(labels(run.given))
    assert order.index("pause before 2") < order.index("actor_generation@2")
    assert order.index("pause before 2") < order.index("COMM W_actor->actor_generation@2")
    # Step 2 generates with the weights of step 0, step 3 with those of step 1, from which training goes on too.
    assert [(window.locate(a.node)[0], a.container) for a in run.live[2]] == [(0, "W_actor"), (1, "W_actor")]


def test_a_run_can_be_continued_with_more_steps() -> None:
    plan = toy_plan(actor_generation=on(0), actor_training=on(1))
    window = Window(toy_mini(tau=2), plan, toy_workload())
    short = drive(Engine(window, 3, pause_every=3), 1)
    more = drive(Engine(window, 6, first_step=3), 2)
    whole = drive(Engine(window, 6), 3)
    assert short.dispatches() + more.dispatches() == whole.dispatches()
    assert {a for d in more.dispatches() for a in d.inputs if window.locate(max(a.node, 0))[0] < 3} <= set(
        short.live[3]
    )


def test_a_cancel_during_a_pause_stops_at_once() -> None:
    plan = toy_plan(actor_generation=on(0), actor_training=on(0))
    engine = Engine(Window(toy_mini(), plan, toy_workload()), 2, pause_every=1)
    out = engine.start()
    while not any(isinstance(i, Pause) for i in out):
        (dispatch,) = [i for i in out if isinstance(i, Dispatch)]
        out = engine.handle(NodeFinished(dispatch.node.index, 1.0))
    assert engine.handle(Cancel("Ctrl-C", 2.0)) == [Stop("Ctrl-C", failed=False)]
    assert engine.handle(Proceed(3.0)) == []


def test_only_a_paused_engine_proceeds() -> None:
    plan = toy_plan(actor_generation=on(0), actor_training=on(0))
    engine = Engine(Window(toy_mini(), plan, toy_workload()), 2, pause_every=1)
    engine.start()
    with pytest.raises(ExecutionError, match="it is not paused"):
        engine.handle(Proceed(0.0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"steps": 2, "first_step": 2}, "first_step is 2 of 2 steps; allowed: 0 to 1"),
        ({"steps": 2, "first_step": -1}, "first_step is -1 of 2 steps"),
        ({"steps": 2, "pause_every": 0}, "pause_every is 0; allowed: at least 1"),
    ],
)
def test_limits_of_the_arguments(options: dict[str, int], message: str) -> None:
    plan = toy_plan(actor_generation=on(0), actor_training=on(0))
    with pytest.raises(ValueError, match=message):
        Engine(Window(toy_mini(), plan, toy_workload()), **options)


def test_a_long_run_with_pauses_keeps_as_little_as_one_without() -> None:
    plan = toy_plan(
        actor_generation=on(0, 2),
        reference_inference=on(2),
        reward_inference=on(3),
        critic_inference=on(2),
        actor_training=on(0, 2),
        critic_training=on(2, 4),
    )
    window = Window(toy_ppo(tau=1), plan, toy_workload())
    most = []
    for steps in (10, 100):
        engine, largest = Engine(window, steps, pause_every=3), 0
        out: list[Instruction] = engine.start()
        waiting: list[Node] = []
        while not engine.stopped:
            waiting += [i.node for i in out if isinstance(i, Dispatch)]
            largest = max(largest, engine.counters.artifacts)
            if any(isinstance(i, Pause) for i in out):
                out = engine.handle(Proceed(0.0))
            else:
                out = engine.handle(NodeFinished(waiting.pop(0).index, 0.0))
        most.append(largest)
    assert most[0] == most[1]
