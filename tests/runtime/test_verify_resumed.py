"""Traces of runs that pause for checkpoints, go on from one, or are cancelled: accepted as they are."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpeg_core.passes.lower import NodeKind
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import Cancel, Dispatch, NodeFinished, Pause, Proceed, Release, Stop
from rpeg_core.runtime.trace import (
    Dispatched,
    Ended,
    Record,
    Released,
    Started,
    Stopped,
    Trace,
    TraceHeader,
    Transferred,
    dispatch_records,
    read_lines,
    release_record,
)
from rpeg_core.runtime.verify import Verdict, verify
from rpeg_core.runtime.window import Window
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import on, toy_plan, toy_ppo, toy_workload

DIGEST = "sha256:of the plan"
PLAN = toy_plan(
    actor_generation=on(0, 2, tensor=2),
    reference_inference=on(2),
    reward_inference=on(3),
    critic_inference=on(2),
    actor_training=on(0, 2),
    critic_training=on(2, 4),
)
WINDOW = Window(toy_ppo(tau=2), PLAN, toy_workload())


def run(
    window: Window, steps: int, *, first_step: int = 0, pause_every: int | None = None, cancel_after: int | None = None
) -> Trace:
    """A trace of the engine; nodes end one second after each other in the order of their dispatch."""
    engine = Engine(window, steps, first_step=first_step, pause_every=pause_every)
    records: list[Record] = []
    running: list[Dispatch] = []
    now, ended, out = 0.0, 0, engine.start()
    while True:
        for instruction in out:
            if isinstance(instruction, Dispatch):
                running.append(instruction)
                records += [*dispatch_records(instruction, now), Started(now, instruction.node.index)]
            elif isinstance(instruction, Release):
                records.append(release_record(instruction, now))
            elif isinstance(instruction, Stop) and engine.steps_done < steps:
                records.append(Stopped(now, instruction.reason, engine.steps_done))
        if engine.stopped:
            header = TraceHeader(plan=DIGEST, backend="toy", steps=steps, clock="wall", first_step=first_step)
            return Trace(header, tuple(records))
        if ended == cancel_after:
            cancel_after = None
            out = engine.handle(Cancel("Ctrl-C", now))
        elif any(isinstance(i, Pause) for i in out):
            out = engine.handle(Proceed(now))
        else:
            now, ended = now + 1.0, ended + 1
            node = running.pop(0).node
            if node.kind is not NodeKind.OP:
                records.append(Transferred(now, node.index, node.payload_bytes, 3 * node.payload_bytes))
            records.append(Ended(now, node.index))
            out = engine.handle(NodeFinished(node.index, now))


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Verdict]:
    def answer(trace: Trace, window: Window = WINDOW) -> Verdict:
        trace.write(tmp_path / "run.jsonl")
        return verify(read_lines(tmp_path / "run.jsonl"), window, DIGEST)

    return answer


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(configurations(max_operators=6), st.integers(1, 6), st.integers(1, 3), st.integers(0, 5))
def test_any_run_with_pauses_and_any_resumed_run_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, case: Configuration, steps: int, every: int, first_step: int
) -> None:
    window = Window(case.rpeg, case.plan, case.workload)
    path = tmp_path_factory.getbasetemp() / "resumed.jsonl"
    for trace in (run(window, steps, pause_every=every), run(window, first_step + steps, first_step=first_step)):
        trace.write(path)
        verdict = verify(read_lines(path), window, DIGEST)
        assert verdict.findings == ()
        assert verdict.complete
        assert trace.steps == steps


@pytest.mark.parametrize("first_step", [0, 1, 4])
def test_a_cancelled_run_is_accepted_as_far_as_it_went(judge: Callable[..., Verdict], first_step: int) -> None:
    seen = set()
    for after in range(0, 60, 3):
        trace = run(WINDOW, first_step + 3, first_step=first_step, pause_every=2, cancel_after=after)
        verdict = judge(trace)
        assert verdict.findings == ()
        assert verdict.unfinished == ()  # what ran was finished
        assert verdict.steps_complete == first_step + trace.steps
        assert verdict.complete == (verdict.stopped is None)
        seen.add(trace.steps)
    assert {0, 1, 2} <= seen


def resumed() -> Trace:
    return run(WINDOW, 6, first_step=3)


def test_a_resumed_run_that_claims_another_beginning_is_refused(judge: Callable[..., Verdict]) -> None:
    trace = resumed()
    for first_step in (0, 2, 4, 5):
        verdict = judge(attrs.evolve(trace, header=attrs.evolve(trace.header, first_step=first_step)))
        assert "V4" in {rule.id for rule in verdict.counts}


def test_nodes_of_the_run_before_have_no_place_in_a_resumed_one(judge: Callable[..., Verdict]) -> None:
    trace, whole = resumed(), run(WINDOW, 6)
    old = next(r for r in whole.records if isinstance(r, Dispatched) and r.step == 2)
    verdict = judge(attrs.evolve(trace, records=(attrs.evolve(old, time_s=0.0), *trace.records)))
    assert [finding.message for finding in verdict.findings] == [f"node {old.node}: its step was complete before"]
    assert [finding.rule.id for finding in verdict.findings] == ["V4"]


def test_what_an_earlier_run_left_is_released_once_and_after_its_last_reader(judge: Callable[..., Verdict]) -> None:
    trace = resumed()
    first = next(iter(WINDOW.nodes(3))).index
    at, release = next(
        (i, r) for i, r in enumerate(trace.records) if isinstance(r, Released) and 0 <= r.artifact.node < first
    )
    without = (*trace.records[:at], *trace.records[at + 1 :])
    cases = {
        "is never released": without,
        "again": (*trace.records[: at + 1], *trace.records[at:]),
        "before its reader": (attrs.evolve(release, time_s=0.0), *without),
    }
    for words, records in cases.items():
        verdict = judge(attrs.evolve(trace, records=records))
        assert "V12" in {rule.id for rule in verdict.counts}
        assert any(words in finding.message for finding in verdict.findings)


def test_weights_that_the_earlier_run_did_not_leave_are_not_there(judge: Callable[..., Verdict]) -> None:
    """In step 3 the actor is served with version 1, made in step 0; its data of step 1 are long gone."""
    trace = resumed()
    at, dispatched = next(
        (i, r) for i, r in enumerate(trace.records) if isinstance(r, Dispatched) and r.container == "completions"
    )
    gone = attrs.evolve(dispatched.inputs[0], node=next(n.index for n in WINDOW.nodes(1)))
    records = list(trace.records)
    records[at] = attrs.evolve(dispatched, inputs=(gone,))
    assert "V11" in {rule.id for rule in judge(attrs.evolve(trace, records=tuple(records))).counts}
