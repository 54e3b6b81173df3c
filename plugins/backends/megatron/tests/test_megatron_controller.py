"""The controller with a crew in this process, whose every report is chosen here; links; metrics of a step."""

from __future__ import annotations

import itertools
import json
import math
import socket
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
from megatron_fake import FAKE
from megatron_plans import at, experiment, make_plan
from rpeg_plugin_megatron.controller import Controller
from rpeg_plugin_megatron.crew import Lost
from rpeg_plugin_megatron.links import Listener, connect, parse_address
from rpeg_plugin_megatron.messages import Done, Drop, Execute, FromWorker, Saved, ToWorker
from rpeg_plugin_megatron.metrics import MetricsFiles, StepMetrics, charged_bytes, combine
from rpeg_plugin_megatron.session import MegatronSession
from rpeg_plugin_megatron.settings import Settings

from rpeg_core.errors import BackendError, ExecutionError
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.session import RunRequest
from rpeg_core.runtime.trace import Dispatched, Ended, Record, Released, Stopped, Trace, TraceHeader, Transferred
from rpeg_core.runtime.verify import verify
from rpeg_core.runtime.window import Window
from rpeg_core.spec.machine import Allocation
from rpeg_core.testing.toys import on, toy_mini, toy_plan, toy_workload

OVERHEAD_S = 0.002
"""Of a node on the local launcher."""

PLAN = toy_plan(actor_generation=on(0, 2), actor_training=on(2, 4))
WINDOW = Window(toy_mini(), PLAN, toy_workload())


class Script:
    """A crew of four that answers each message as it is told; ``script`` may change or hold back an answer."""

    world = 4

    def __init__(self) -> None:
        self.sent: list[tuple[int, ToWorker]] = []
        self.waiting: list[FromWorker | Lost] = []
        self.lost: list[Lost] = []
        self.now_s = 100.0

    def clock(self) -> float:
        return self.now_s

    def send(self, ranks: Iterator[int], message: ToWorker) -> None:
        for rank in ranks:
            self.sent.append((rank, message))
            self.waiting += self.answer(rank, message)

    def answer(self, rank: int, message: ToWorker) -> list[FromWorker | Lost]:
        if not isinstance(message, Execute):
            return [] if isinstance(message, Drop) else [Saved(rank, message.folder)]
        node = message.node
        mine = node.kind is not NodeKind.OP and node.allocation.start <= rank < node.allocation.stop
        whole = next(c.bytes for c in WINDOW.rpeg.containers if c.name == (node.container or "completions"))
        return [Done(rank=rank, node=node.index, seconds=1.0, bytes=whole // 2 if mine else 0, wire_bytes=7)]

    def receive(self, timeout_s: float = 0.0) -> list[FromWorker | Lost]:
        """One report at a time, a second after the other, the last one first."""
        self.now_s += 1.0
        found = [self.waiting.pop()] if self.waiting else []
        return found + self.lost

    def device(self, rank: int) -> str:
        return f"made up {rank}"

    def last_words(self, rank: int, lines: Sequence[str] = ()) -> list[str]:
        return list(lines)

    def dump_stacks(self) -> None:
        self.sent.append((-1, "dump"))


class Notes(list[Record]):
    def write(self, record: Record) -> None:
        self.append(record)

    def flush(self) -> None:
        pass


def drive(crew: Script, *, steps: int = 2, pause_every: int | None = None, **options: object) -> Notes:
    notes = Notes()
    values = {
        "due_bytes": lambda node: None,
        "checkpoint": lambda step, save: save(Path(f"/checkpoint-{step}")),
        "step_finished": lambda step, metrics: None,
        "cancelled": lambda: False,
        "status": lambda text: None,
        "limit_s": 50.0,
    } | options
    controller = Controller(
        engine=Engine(WINDOW, steps, pause_every=pause_every, limit_s=50.0),
        window=WINDOW,
        steps=steps,
        crew=crew,
        journal=notes,
        metrics=StepMetrics(3200),
        clock=crew.clock,
        **values,
    )
    try:
        controller.run()
    except ExecutionError as error:
        crew.error = error
    return notes


def judge(notes: Notes, steps: int, tmp_path: Path) -> object:
    from rpeg_core.runtime.trace import read_lines

    header = TraceHeader(plan="sha256:toy", backend="toy", steps=steps, clock="wall")
    Trace(header, tuple(notes)).write(tmp_path / "trace.jsonl")
    return verify(read_lines(tmp_path / "trace.jsonl"), WINDOW, "sha256:toy")


def test_a_node_goes_to_the_ranks_that_hold_it_and_ends_with_the_last_of_them(tmp_path: Path) -> None:
    crew = Script()
    notes = drive(crew)
    assert judge(notes, 2, tmp_path).complete
    executed: dict[str, list[int]] = {}
    for rank, message in crew.sent:
        if isinstance(message, Execute):
            executed.setdefault(message.node.label.partition("#")[0], []).append(rank)
    assert executed["actor_generation@0"] == [0, 1]
    assert executed["actor_training@0"] == [2, 3]
    assert executed["COMM completions->actor_training@0"] == [0, 1, 2, 3]  # source and destination
    first = next(record for record in notes if isinstance(record, Dispatched))
    end = next(record for record in notes if isinstance(record, Ended))
    assert (first.time_s, end.time_s, end.node) == (0.0, 2.0, first.node)


def test_bytes_are_charged_as_lowering_predicts_and_measured_beside_it() -> None:
    notes = drive(Script())
    moved = [record for record in notes if isinstance(record, Transferred)]
    assert [record.bytes for record in moved] == [6400.0, 40_000.0, 6400.0]
    assert [record.wire_bytes for record in moved] == [28.0, 28.0, 28.0]


def test_released_artifacts_are_dropped_everywhere_before_what_follows() -> None:
    crew = Script()
    notes = drive(crew)
    dropped = [
        artifact
        for rank, message in crew.sent
        if rank == 3 and isinstance(message, Drop)
        for artifact in message.artifacts
    ]
    assert [record.artifact for record in notes if isinstance(record, Released)] == dropped
    kinds = [type(message).__name__ for rank, message in crew.sent if rank == 2]
    assert kinds[:4] == ["Drop", "Execute", "Drop", "Execute"]  # initial weights of the generation, completions, ...


def test_partial_overlap_is_charged_for_the_share_that_moves() -> None:
    node = Node(
        index=0,
        kind=NodeKind.COMM,
        operator="generation",
        step=1,
        allocation=Allocation(0, 4),
        source=Allocation(2, 4),
        container="W",
        payload_bytes=500.0,
        model="actor",
    )
    assert charged_bytes(node, 1000, 1000) == 500.0
    assert charged_bytes(node, 900, 1000) == pytest.approx(450.0)


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (Done(rank=3, node=0, seconds=0.0), "worker 3 reported node 0, which it was not given"),
        (Done(rank=0, node=5, seconds=0.0), "worker 0 reported node 5, which it was not given"),
        (Saved(0, "/somewhere"), "worker sent Saved, which nobody asked for"),
    ],
)
def test_a_report_that_nobody_asked_for_ends_the_run(report: FromWorker, message: str, tmp_path: Path) -> None:
    crew = Script()
    crew.lost = [report]
    notes = drive(crew)
    assert crew.error.what == message
    assert judge(notes, 2, tmp_path).stopped == message


def test_of_several_lost_workers_the_first_is_the_cause_and_the_others_are_named(tmp_path: Path) -> None:
    crew = Script()
    crew.answer = lambda rank, message: []
    crew.lost = [Lost(1, "killed"), Lost(0, "connection reset", ("connection reset", "in all_reduce"))]
    notes = drive(crew)
    assert crew.error.what == "the worker of GPU 1 was lost: killed"
    assert crew.error.facts[0] == "worker 1: made up 1"
    assert "it was running actor_generation@0 (operator actor_generation, step 0, GPUs 0-1)" in crew.error.facts
    assert crew.error.facts[-1] == "lost with it: the worker of GPU 0: connection reset"
    assert "in all_reduce" not in crew.error.facts
    assert judge(notes, 2, tmp_path).stopped == crew.error.what


def test_a_node_over_the_limit_names_the_ranks_that_did_not_report() -> None:
    crew = Script()
    answer = crew.answer
    crew.answer = lambda rank, message: [] if rank == 1 else answer(rank, message)
    drive(crew)
    assert crew.error.what.startswith(
        "actor_generation@0 (operator actor_generation, step 0, GPUs 0-1) has been running"
    )
    assert crew.error.facts[0] == "without a report: the workers of GPUs 1"
    assert crew.sent[-1] == (-1, "dump")


def test_what_ended_before_a_loss_counts(tmp_path: Path) -> None:
    """The last report of a step and the loss of a worker come together: the step is complete."""
    crew, told = Script(), []
    answer = crew.answer

    def lose_with_the_end(rank: int, message: ToWorker) -> list[FromWorker | Lost]:
        if isinstance(message, Execute) and message.node.operator == "actor_training" and message.node.source is None:
            crew.lost = [Lost(3, "killed")]
        return answer(rank, message)

    def receive(timeout_s: float = 0.0) -> list[FromWorker | Lost]:
        crew.now_s += 1.0
        found, crew.waiting = crew.waiting, []
        return found + crew.lost

    crew.answer, crew.receive = lose_with_the_end, receive
    notes = drive(crew, step_finished=lambda step, metrics: told.append(step))
    assert isinstance(notes[-1], Stopped)
    assert notes[-1].steps_done == 1
    verdict = judge(notes, 2, tmp_path)
    assert verdict.findings == ()
    assert verdict.steps_complete == 1


def test_checkpoints_are_written_between_steps_and_told_after_them() -> None:
    crew, order, seconds = Script(), [], []

    def checkpoint(step: int, save: Callable[[Path], None]) -> None:
        order.append(f"checkpoint {step}")
        crew.now_s += 1000.0
        save(Path("/there"))

    def step_finished(step: int, metrics: Mapping[str, float]) -> None:
        order.append(step)
        seconds.append(metrics["seconds"])

    drive(crew, steps=3, pause_every=2, checkpoint=checkpoint, step_finished=step_finished)
    assert order == [0, 1, "checkpoint 2", 2, "checkpoint 3"]
    assert max(seconds) < 100.0  # writing it is no part of a step


def test_a_cancel_is_given_once_and_the_trace_says_so(tmp_path: Path) -> None:
    crew, words = Script(), []
    notes = drive(crew, cancelled=lambda: crew.now_s > 103.0, status=words.append)
    assert words == ["interrupted; finishing what runs"]
    assert notes[-1] == Stopped(notes[-1].time_s, "interrupted", 0)
    assert judge(notes, 2, tmp_path).findings == ()


def test_a_cancel_while_a_checkpoint_is_written_stops_at_that_boundary(tmp_path: Path) -> None:
    crew, pressed = Script(), threading.Event()
    notes = drive(crew, steps=3, pause_every=1, cancelled=pressed.is_set, checkpoint=lambda step, save: pressed.set())
    assert notes[-1] == Stopped(notes[-1].time_s, "interrupted", 1)
    assert {record.step for record in notes if isinstance(record, Dispatched)} == {0}
    assert judge(notes, 3, tmp_path).findings == ()


# Links


def test_only_who_knows_the_key_is_let_in_and_nobody_waits_for_strangers() -> None:
    listener = Listener(("127.0.0.1", 0), b"k" * 32, send_limit_s=0.5)
    assert listener.accept() is None
    host, port = listener.address
    assert host == "127.0.0.1"
    answers: list[object] = []

    def call(key: bytes) -> None:
        try:
            answers.append(connect((host, port), key, patience_s=1.0))
        except BackendError as error:
            answers.append(error.what)

    for key in (b"x" * 32, b"k" * 32):
        caller = threading.Thread(target=call, args=(key,))
        caller.start()
        time.sleep(0.2)
        connection = listener.accept()
        caller.join()
        assert (connection is None) == (key != b"k" * 32)
    assert answers[0] == f"the controller at 127.0.0.1:{port} has another key"
    with socket.create_connection((host, port)):  # says nothing
        begin = time.monotonic()
        time.sleep(0.05)
        assert listener.accept() is None
        assert time.monotonic() - begin < 7.0
    answers[1].send("hello")
    assert connection.recv() == "hello"
    answers[1]._send(b"\0\0")  # half a message
    begin = time.monotonic()
    with pytest.raises(OSError, match="Resource temporarily unavailable"):
        connection.recv()
    assert 0.3 < time.monotonic() - begin < 3.0
    listener.close()
    with pytest.raises(BackendError, match="does not answer"):
        connect((host, port), b"k" * 32, patience_s=0.2)


def test_an_address_in_use_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(BackendError, match=f"cannot listen on 127.0.0.1:{port}"):
            Listener(("127.0.0.1", port), b"k" * 32, send_limit_s=1.0)
    assert parse_address("[::1]:80", "there") == ("::1", 80)
    for bad in ("", "80", ":80", "host:", "host:x", "host:70000"):
        with pytest.raises(BackendError, match="there is"):
            parse_address(bad, "there")


# Metrics


def test_ranks_and_phases_become_one_value() -> None:
    reports = [{"loss": 1.0, "memory_max": 3.0}, {"loss": 2.0, "memory_max": 5.0, "reward": 0.5}, {}]
    assert combine(reports) == {"loss": 1.5, "memory_max": 5.0, "reward": 0.5}


def test_metrics_lines_survive_a_resume_and_a_cut(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFiles(path, None, 0) as files:
        for step in range(3):
            files.write(step, {"loss": math.nan if step == 1 else float(step)})
    path.write_text(path.read_text() + '{"step": 3, "lo')
    with MetricsFiles(path, None, 2) as files:
        files.write(2, {"loss": 5.0})
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    assert lines == [{"step": 0, "loss": 0.0}, {"step": 1, "loss": None}, {"step": 2, "loss": 5.0}]
    with MetricsFiles(path, None, 0):
        assert path.read_text() == ""


# Overhead


@pytest.mark.slow
def test_the_overhead_of_a_node_on_the_local_launcher(tmp_path: Path) -> None:
    """Nodes that do nothing, two processes; the lower quartile, since others use this machine too."""
    plan = make_plan(experiment("grpo"), {"actor_generation": at("0"), "": at("0-1", dp=2)})
    with MegatronSession(plan, Settings(), worker=FAKE) as session:
        trace = session.run(RunRequest(steps=200, output=tmp_path))
    ends = [record.time_s for record in trace.records if isinstance(record, Ended)]
    gaps = [after - before for before, after in itertools.pairwise(ends)]
    assert statistics.quantiles(gaps, n=4)[0] < OVERHEAD_S
