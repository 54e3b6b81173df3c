"""Traces as values, JSON lines and Chrome traces."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import attrs
import pytest

from rpeg_core.errors import TraceFileError
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.runtime.protocol import Dispatch, Release
from rpeg_core.runtime.trace import (
    Bound,
    Dispatched,
    Ended,
    Record,
    Started,
    Stopped,
    Trace,
    TraceHeader,
    TraceWriter,
    Transferred,
    dispatch_records,
    read_lines,
    release_record,
)
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import on, toy_mini, toy_plan, toy_workload


def seconds_of(node: Node) -> float:
    return {"actor_generation": 4.0, "actor_training": 2.0}[node.operator] if node.kind is NodeKind.OP else 1.0


@pytest.fixture(scope="module")
def trace(execute: Callable[..., object]) -> Trace:
    """Two synchronous steps on two GPUs, 15 s."""
    plan = toy_plan(actor_generation=on(0), actor_training=on(1))
    run = execute(Window(toy_mini(), plan, toy_workload()), 2, seconds_of)
    records: list[Record] = []
    for time, instruction in run.given:
        if isinstance(instruction, Dispatch):
            end = run.end_s[instruction.node.index]
            records += dispatch_records(instruction, time)
            records.append(Started(time, instruction.node.index))
            if instruction.node.source is not None:
                records.append(Transferred(end, instruction.node.index, instruction.node.payload_bytes))
            records.append(Ended(end, instruction.node.index))
        elif isinstance(instruction, Release):
            records.append(release_record(instruction, time))
    header = TraceHeader(plan="sha256:0", backend="toy", steps=2, clock="virtual", notes=("made up",))
    return Trace(header, tuple(records))


def test_times_and_work_per_operator(trace: Trace) -> None:
    assert (trace.makespan_s, trace.step_s) == (15.0, 7.5)
    assert trace.busy_s() == {"actor_generation": (8.0, 1.0), "actor_training": (4.0, 2.0)}


@pytest.mark.parametrize(
    ("first_step", "steps_done", "steps", "step_s"),
    [
        (0, None, 2, 7.5),
        (0, 1, 1, 7.0),  # training ends at 7; what was begun of step 1 does not count
        (0, 0, 0, float("inf")),
        (1, None, 1, 15.0),  # as if these 15 s were those of step 1 alone
        (1, 1, 0, float("inf")),
    ],
)
def test_the_time_of_a_step_counts_the_steps_that_this_run_completed(
    trace: Trace, first_step: int, steps_done: int | None, steps: int, step_s: float
) -> None:
    stop = () if steps_done is None else (Stopped(15.0, "Ctrl-C", steps_done),)
    run = Trace(attrs.evolve(trace.header, first_step=first_step), (*trace.records, *stop))
    assert (run.steps, run.step_s) == (steps, step_s)


def test_the_records_of_one_node(trace: Trace) -> None:
    own = [record for record in trace.records if getattr(record, "node", None) == 6]  # the weights for step 1
    dispatched, *others = own
    assert (dispatched.kind, dispatched.container, str(dispatched.source)) == ("COMM", "W_actor", "1")
    assert [(a.node, a.container) for a in dispatched.inputs] == [(1, "W_actor")]
    assert others == [Bound(7.0, 6, "actor", 1), Started(7.0, 6), Transferred(8.0, 6, 40_000.0), Ended(8.0, 6)]


def test_json_lines_round_trip(trace: Trace, tmp_path: Path) -> None:
    trace.write(tmp_path / "run.jsonl")
    assert Trace.read(tmp_path / "run.jsonl") == trace


def test_measured_bytes_round_trip_and_are_shown(trace: Trace, tmp_path: Path) -> None:
    records = [attrs.evolve(r, wire_bytes=2 * r.bytes) if isinstance(r, Transferred) else r for r in trace.records]
    measured = attrs.evolve(trace, records=tuple(records))
    measured.write(tmp_path / "run.jsonl")
    assert Trace.read(tmp_path / "run.jsonl") == measured
    measured.write_chrome(tmp_path / "run.perfetto.json")
    bars = json.loads((tmp_path / "run.perfetto.json").read_text())["traceEvents"]
    shown = [bar["args"]["wire_bytes"] for bar in bars if bar["name"].startswith("COMM W_actor")]
    assert shown == [80_000.0, 80_000.0]


def test_what_was_written_is_on_disk_after_a_flush(trace: Trace, tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "run.jsonl", trace.header) as writer:
        writer.write(trace.records[0])
        writer.flush()
        assert (tmp_path / "run.jsonl").read_text().count("\n") == 2


@pytest.mark.parametrize(
    ("change", "fact"),
    [
        (lambda fields: fields.pop("operator"), "operator"),
        (lambda fields: fields.update(colour="red"), "colour"),
        (lambda fields: fields.update(step="0"), "'0' is not of type int"),
        (lambda fields: fields.update(record="dispatched"), "dispatched"),
        (lambda fields: fields["allocation"].update(start=0.5), "0.5 is not of type int"),
    ],
    ids=["missing", "unknown", "type", "kind", "nested"],
)
def test_a_line_that_is_no_record_is_refused_by_number(
    trace: Trace, tmp_path: Path, change: Callable[[dict[str, object]], object], fact: str
) -> None:
    path = tmp_path / "run.jsonl"
    trace.write(path)
    lines = path.read_text().splitlines()
    fields = json.loads(lines[1])
    change(fields)
    path.write_text("\n".join([lines[0], json.dumps(fields), *lines[2:]]))
    with pytest.raises(TraceFileError) as caught:
        Trace.read(path)
    assert caught.value.what == f"line 2 of {path} is not a trace record"
    assert fact in str(caught.value)


@pytest.mark.parametrize("number", [1, 2, 9, -1])
def test_a_changed_byte_is_found_where_it_is(trace: Trace, tmp_path: Path, number: int) -> None:
    path = tmp_path / "run.jsonl"
    trace.write(path)
    lines = path.read_bytes().splitlines(keepends=True)
    assert all(line.intact for line in read_lines(path))
    lines[number] = lines[number].replace(b'": ', b'":  ', 1)
    path.write_bytes(b"".join(lines))
    changed = [line.number for line in read_lines(path) if not line.intact]
    assert changed == [number % len(lines) + 1]
    with pytest.raises(TraceFileError, match="was changed after it was written") as caught:
        Trace.read(path)
    assert caught.value.facts == (f"line {changed[0]} does not follow from the lines before it",)


def test_a_writer_that_is_left_by_an_exception_does_not_close_the_trace(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with contextlib.suppress(KeyError), TraceWriter(path, trace.header) as writer:
        writer.write(trace.records[0])
        raise KeyError
    with pytest.raises(TraceFileError, match="is incomplete"):
        Trace.read(path)
    with TraceWriter(path, trace.header) as writer:
        writer.write(trace.records[0])
        writer.write(Stopped(1.0, "Ctrl-C", 0))
    assert Trace.read(path).records == (trace.records[0], Stopped(1.0, "Ctrl-C", 0))


def test_files_that_are_no_trace(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.jsonl"
    with pytest.raises(TraceFileError, match="cannot read"):
        Trace.read(path)
    path.write_text("")
    with pytest.raises(TraceFileError, match="is empty"):
        Trace.read(path)
    trace.write(path)
    path.write_text(path.read_text().partition("\n")[2])
    with pytest.raises(TraceFileError, match=r"line 1 .* is not a trace record"):
        Trace.read(path)
    attrs.evolve(trace, header=attrs.evolve(trace.header, schema=2)).write(path)
    with pytest.raises(TraceFileError, match="has schema 2"):
        Trace.read(path)
    with pytest.raises(TraceFileError, match="cannot write"):
        trace.write(tmp_path / "missing" / "run.jsonl")


def test_chrome_trace_shows_every_node_on_every_gpu_it_held(trace: Trace, tmp_path: Path) -> None:
    path = tmp_path / "run.perfetto.json"
    trace.write_chrome(path)
    events = json.loads(path.read_text())["traceEvents"]
    tracks = {e["tid"]: e["args"]["name"] for e in events if e["name"] == "thread_name"}
    assert tracks == {0: "GPU 0", 1: "GPU 1"}
    bars = [e for e in events if e["ph"] == "X"]
    assert sum(e["dur"] for e in bars) == 1e6 * (4 + 2 + 4 + 2 + 2 * 3 * 1)  # each transfer on both of its ends
    weights = [e for e in bars if e["name"].startswith("COMM W_actor")]
    assert [(e["tid"], e["ts"], e["dur"]) for e in weights] == [(0, 7e6, 1e6), (1, 7e6, 1e6)]
    assert weights[0]["args"]["version"] == "actor 1"
    assert weights[0]["args"]["bytes"] == 40_000.0


def test_every_node_has_one_dispatch_start_and_end(trace: Trace) -> None:
    for cls in (Dispatched, Started, Ended):
        assert sorted(r.node for r in trace.records if isinstance(r, cls)) == list(range(7))
