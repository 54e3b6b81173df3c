"""Verification accepts what the engine runs: many plans, stopped runs, long runs; and its answer."""

from __future__ import annotations

import re
import tracemalloc
from pathlib import Path

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpeg_plugin_simulator import simulate

from rpeg_core.errors import TraceFileError
from rpeg_core.ir import Rpeg
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.trace import Ended, Record, Started, Stopped, Trace, TraceHeader, TraceWriter, read_lines
from rpeg_core.runtime.verify import RULES, Verdict, verify
from rpeg_core.runtime.verify.findings import LIMIT
from rpeg_core.runtime.window import Window
from rpeg_core.spec.workload import Workload
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import SKEWED, on, toy_actor_critic, toy_mini, toy_plan, toy_ppo, toy_workload

DIGEST = "sha256:of the plan"
PAGE = (Path(__file__).parents[2] / "docs" / "verification.md").read_text(encoding="utf-8")
PPO = {
    "actor_generation": on(0, 2),
    "reference_inference": on(2),
    "reward_inference": on(3),
    "critic_inference": on(2),
    "actor_training": on(0, 2),
    "critic_training": on(2, 4),
}


def seconds_of(node: Node) -> float:
    return 1.5 if node.kind is NodeKind.OP else 0.25


def header(steps: int) -> TraceHeader:
    return TraceHeader(plan=DIGEST, backend="simulator", steps=steps, clock="virtual")


def records_of(rpeg: Rpeg, plan: ExecutionPlan, workload: Workload, steps: int, **options: object) -> list[Record]:
    records: list[Record] = []
    simulate(rpeg, plan, workload, seconds_of, steps=steps, record=records.append, **options)
    return records


def judge(path: Path, window: Window, steps: int, records: list[Record]) -> Verdict:
    Trace(header(steps), tuple(records)).write(path)
    return verify(read_lines(path), window, DIGEST)


@pytest.mark.parametrize(
    ("rpeg", "plan", "workload"),
    [
        (toy_ppo(tau=0), PPO, toy_workload()),
        (toy_ppo(tau=1), PPO, toy_workload()),
        (toy_ppo(tau=2, critic_tau=0), {**PPO, "actor_generation": on(0, 4, tensor=2)}, toy_workload()),
        (toy_ppo(tau=1), {**PPO, "actor_training": on(4, 8)}, toy_workload(response_lengths=SKEWED)),
        (
            toy_actor_critic(tau=1),
            dict.fromkeys(("generation", "value_inference", "training"), on(0, 2)),
            toy_workload(),
        ),
        (
            toy_actor_critic(),
            toy_plan(generation=on(0, 4, tensor=4), value_inference=on(0, 4, tensor=2), training=on(0, 4)),
            toy_workload(),
        ),
        (toy_mini(tau=3), toy_plan(actor_generation=on(0, 2), actor_training=on(0, 4)), toy_workload()),
    ],
    ids=["separate", "one step stale", "mixed staleness", "phases", "shared", "resharding", "partial overlap"],
)
@pytest.mark.parametrize("steps", [1, 2, 7])
def test_what_the_engine_runs_is_accepted(
    tmp_path: Path, rpeg: Rpeg, plan: ExecutionPlan, workload: Workload, steps: int
) -> None:
    window = Window(rpeg, plan, workload)
    records = records_of(rpeg, plan, workload, steps, noise=0.3)
    verdict = judge(tmp_path / "run.jsonl", window, steps, records)
    assert verdict.findings == ()
    assert verdict.complete
    assert (verdict.steps_complete, verdict.stopped, verdict.unfinished) == (steps, None, ())
    assert verdict.nodes == sum(isinstance(record, Ended) for record in records)
    assert verdict.lines == len(records) + 2


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large])
@given(configurations(max_operators=6), st.integers(1, 7), st.integers(0, 9))
def test_any_plan_of_any_graph_is_accepted(
    tmp_path_factory: pytest.TempPathFactory, configuration: Configuration, steps: int, seed: int
) -> None:
    rpeg, plan, workload = configuration.rpeg, configuration.plan, configuration.workload
    records = records_of(rpeg, plan, workload, steps, noise=0.5, seed=seed)
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    assert judge(path, Window(rpeg, plan, workload), steps, records).findings == ()


def test_a_start_may_be_written_late(tmp_path: Path) -> None:
    """A controller that learns of start and end together writes the start just before the transfer or the end."""
    records = records_of(toy_ppo(tau=1), PPO, toy_workload(), 3)
    starts = {record.node: record for record in records if isinstance(record, Started)}
    late: list[Record] = []
    for record in records:
        if not isinstance(record, Started):
            if getattr(record, "bytes", None) is not None or isinstance(record, Ended):
                late += [starts.pop(record.node)] if record.node in starts else []
            late.append(record)
    assert late != records
    assert judge(tmp_path / "run.jsonl", Window(toy_ppo(tau=1), PPO, toy_workload()), 3, late).complete


def test_a_run_that_was_stopped_anywhere_is_accepted_as_far_as_it_went(tmp_path: Path) -> None:
    rpeg, steps = toy_ppo(tau=1), 3
    window = Window(rpeg, PPO, toy_workload())
    records = records_of(rpeg, PPO, toy_workload(), steps, noise=0.3)
    seen = []
    for count in range(0, len(records), 5):
        made = records[:count]
        now_s = made[-1].time_s if made else 0.0
        ended = {record.node for record in made if isinstance(record, Ended)}
        whole = [step for step in range(steps) if {node.index for node in window.nodes(step)} <= ended]
        verdict = judge(tmp_path / "run.jsonl", window, steps, [*made, Stopped(now_s, "Ctrl-C", len(whole))])
        assert verdict.findings == ()
        assert verdict.stopped == "Ctrl-C"
        assert verdict.steps_complete == len(whole)
        assert verdict.complete == (len(whole) == steps)
        started = {window.node(*window.locate(r.node)).label for r in made if isinstance(r, Started)}
        done = {window.node(*window.locate(node)).label for node in ended}
        assert started - done <= set(verdict.unfinished)
        seen.append(verdict.steps_complete)
    assert sorted(set(seen)) == [0, 1, 2, 3]
    assert judge(tmp_path / "run.jsonl", window, steps, records[: len(records) // 2]).counts  # without the stop


def test_the_memory_of_a_long_run_is_that_of_a_short_one(tmp_path: Path) -> None:
    rpeg, plan = toy_mini(tau=1), toy_plan(actor_generation=on(0), actor_training=on(1))
    window, peaks, sizes = Window(rpeg, plan, toy_workload()), [], []
    for steps in (30, 300):
        path = tmp_path / f"{steps}.jsonl"
        with TraceWriter(path, header(steps)) as writer:
            simulate(rpeg, plan, toy_workload(), seconds_of, steps=steps, record=writer.write)
        tracemalloc.start()
        assert verify(read_lines(path), window, DIGEST).complete
        peaks.append(tracemalloc.get_traced_memory()[1])
        tracemalloc.stop()
        sizes.append(path.stat().st_size)
    assert peaks[1] - peaks[0] < (sizes[1] - sizes[0]) / 5


def test_many_breaks_of_one_rule_are_counted_and_some_are_kept(tmp_path: Path) -> None:
    records = records_of(toy_mini(), toy_plan(actor_generation=on(0), actor_training=on(1)), toy_workload(), 9)
    other = toy_plan(actor_generation=on(2), actor_training=on(3))
    verdict = judge(tmp_path / "run.jsonl", Window(toy_mini(), other, toy_workload()), 9, records)
    count = {rule.id: count for rule, count in verdict.counts.items()}
    assert set(count) == {"V5", "V10", "V11", "V12", "V13"}
    assert count["V5"] == 18
    assert count["V10"] == 2 * (9 + 8)
    assert sum(finding.rule.id == "V10" for finding in verdict.findings) == LIMIT
    assert [finding.rule for finding in verdict.findings] == sorted(
        (finding.rule for finding in verdict.findings), key=RULES.index
    )


def test_files_that_cannot_be_judged(tmp_path: Path) -> None:
    window = Window(toy_mini(), toy_plan(actor_generation=on(0), actor_training=on(1)), toy_workload())
    path = tmp_path / "run.jsonl"
    with pytest.raises(TraceFileError, match="cannot read"):
        verify(read_lines(path), window, DIGEST)
    path.write_text("")
    with pytest.raises(TraceFileError, match="is empty"):
        verify(read_lines(path), window, DIGEST)
    Trace(attrs.evolve(header(1), schema=2), ()).write(path)
    with pytest.raises(TraceFileError, match="has schema 2"):
        verify(read_lines(path), window, DIGEST)


def test_the_page_lists_the_rules_of_the_code() -> None:
    rows = re.findall(r"^\| (V\d+) \| (\w+) \| (.*?) \|$", PAGE, re.MULTILINE)
    assert rows == [(rule.id, rule.name, rule.statement) for rule in RULES]
    assert [rule.id for rule in RULES] == [f"V{number + 1}" for number in range(len(RULES))]
