"""A fused training is bound to a version of each of its models: traces that lack or change one are refused."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import attrs
import pytest
from rpeg_plugin_simulator import Durations, run_window

from rpeg_core.passes.lower import NodeKind
from rpeg_core.runtime.trace import Bound, Dispatched, Record, TraceHeader, TraceWriter, read_lines
from rpeg_core.runtime.verify import Verdict, verify
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import on, toy_plan, toy_ppo, toy_workload

DIGEST, STEPS = "sha256:of the plan", 3
WINDOW = Window(
    toy_ppo(tau=1, critic_tau=0, fused=True),
    toy_plan(
        actor_generation=on(0, 2, tensor=2),
        reference_inference=on(2),
        reward_inference=on(3),
        critic_inference=on(2, 4),
        fused_training=on(2, 4, pipeline=2, microbatches=2),
    ),
    toy_workload(),
)


def records() -> list[Record]:
    found: list[Record] = []
    durations = Durations(WINDOW, toy_workload(), lambda node: 1.5 if node.kind is NodeKind.OP else 0.25)
    run_window(WINDOW, durations, STEPS, record=found.append)
    return found


def judged(path: Path, found: list[Record]) -> Verdict:
    header = TraceHeader(plan=DIGEST, backend="simulator", steps=STEPS, clock="virtual")
    with TraceWriter(path, header) as writer:
        for record in found:
            writer.write(record)
    return verify(read_lines(path), WINDOW, DIGEST)


def is_critics(record: Record, found: list[Record]) -> bool:
    trained = {r.node for r in found if isinstance(r, Dispatched) and r.operator == "fused_training" and r.kind == "OP"}
    return isinstance(record, Bound) and record.node in trained and record.model == "critic"


def left_out(found: list[Record]) -> list[Record]:
    return [record for record in found if not is_critics(record, found)]


def older(found: list[Record]) -> list[Record]:
    return [attrs.evolve(r, version=max(0, r.version - 1)) if is_critics(r, found) else r for r in found]


def other_model(found: list[Record]) -> list[Record]:
    return [attrs.evolve(r, model="reward") if is_critics(r, found) else r for r in found]


def twice(found: list[Record]) -> list[Record]:
    return [copy for r in found for copy in ([r, r] if is_critics(r, found) else [r])]


def test_a_run_as_planned_is_verified(tmp_path: Path) -> None:
    found = records()
    assert sum(is_critics(record, found) for record in found) == STEPS
    assert judged(tmp_path / "trace.jsonl", found).complete


@pytest.mark.parametrize(("tamper", "rule"), [(left_out, "V6"), (older, "V6"), (other_model, "V6"), (twice, "V4")])
def test_a_changed_binding_of_the_second_model_is_refused(
    tmp_path: Path, tamper: Callable[[list[Record]], list[Record]], rule: str
) -> None:
    verdict = judged(tmp_path / "trace.jsonl", tamper(records()))
    assert not verdict.accepted
    assert rule in {found.id for found in verdict.counts}
