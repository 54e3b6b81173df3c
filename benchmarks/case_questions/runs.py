"""Questions about runs that go on from a checkpoint: is staleness still bounded, and may another plan take over?"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import attrs
from rpeg_plugin_megatron.checkpoints import Checkpoints
from rpeg_plugin_megatron.settings import Settings

from case_questions.asker import Answer, Asker, Facts
from rpeg_core.errors import BackendError
from rpeg_core.passes.lower import NodeKind
from rpeg_core.planning.pins import Pin, parse_gpus
from rpeg_core.planning.plan import Plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.solve import only_choice
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import Dispatch, NodeFinished, Pause, Proceed, Release
from rpeg_core.runtime.trace import (
    Bound,
    Ended,
    Record,
    Started,
    Trace,
    TraceHeader,
    Transferred,
    dispatch_records,
    read_lines,
    release_record,
)
from rpeg_core.runtime.verify import Verdict, verify
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import on, toy_mini, toy_plan, toy_workload

__all__ = ["resume", "staleness"]

DIGEST = "sha256:of the plan"


def staleness(asker: Asker, facts: Facts) -> Answer:
    """Is a bound on staleness kept across a resume, and is a trace that breaks it found out?"""
    kept, broken = _judged(facts["tau"], facts["first_step"], facts["steps"])
    verdict = "the bound is broken" if kept.accepted and not broken.accepted else "not noticed"
    rules = ", ".join(sorted(rule.id for rule in broken.counts))
    return Answer(verdict, f"RPEG's resumed run accepted, such a trace refused by {rules}")


def resume(asker: Asker, facts: Facts) -> Answer:
    """Does a run go on with a plan for another number of GPUs?"""
    with tempfile.TemporaryDirectory() as folder:
        reason = _resumes(asker.planner, facts["experiment"], facts["before"], facts["after"], Path(folder))
    return Answer("does not load" if reason else "loads", reason or "as the same plan")


def _judged(tau: int, first_step: int, steps: int) -> tuple[Verdict, Verdict]:
    """Verification of a run with staleness ``tau`` that goes on at ``first_step``, as RPEG's engine does it and as a
    counter that restarts at 0 would do it: every serving operator one version further behind than allowed."""
    window = Window(toy_mini(tau=tau), toy_plan(actor_generation=on(0, 2), actor_training=on(2, 4)), toy_workload())
    trace = _run(window, steps, first_step)
    serving = {
        record.node
        for record in trace.records
        if isinstance(record, Bound) and record.version != window.locate(record.node)[0]
    }
    behind = [
        attrs.evolve(record, version=record.version - 1)
        if isinstance(record, Bound) and record.node in serving and record.version > 0
        else record
        for record in trace.records
    ]
    return _verdict(trace, window), _verdict(attrs.evolve(trace, records=tuple(behind)), window)


def _run(window: Window, steps: int, first_step: int) -> Trace:
    """A trace of the engine; nodes end one second after each other in the order of their dispatch."""
    engine = Engine(window, steps, first_step=first_step)
    records: list[Record] = []
    running: list[Dispatch] = []
    now, out = 0.0, engine.start()
    while not engine.stopped:
        for instruction in out:
            if isinstance(instruction, Dispatch):
                running.append(instruction)
                records += [*dispatch_records(instruction, now), Started(now, instruction.node.index)]
            elif isinstance(instruction, Release):
                records.append(release_record(instruction, now))
        if any(isinstance(instruction, Pause) for instruction in out):
            out = engine.handle(Proceed(now))
            continue
        now += 1.0
        node = running.pop(0).node
        if node.kind is not NodeKind.OP:
            records.append(Transferred(now, node.index, node.payload_bytes, node.payload_bytes))
        records.append(Ended(now, node.index))
        out = engine.handle(NodeFinished(node.index, now))
    records += [release_record(instruction, now) for instruction in out if isinstance(instruction, Release)]
    header = TraceHeader(plan=DIGEST, backend="engine", steps=steps, clock="virtual", first_step=first_step)
    return Trace(header, tuple(records))


def _verdict(trace: Trace, window: Window) -> Verdict:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.jsonl"
        trace.write(path)
        return verify(read_lines(path), window, DIGEST)


def _resumes(
    planner: Callable[..., Planner],
    experiment: Facts,
    before: Facts,
    after: Facts,
    folder: Path,
) -> str | None:
    """Why the plan on ``after`` cannot go on from a checkpoint of the plan on ``before``; None when it can.

    ``before`` and ``after`` have ``cluster`` keys and the ``gpus`` that every operator is pinned to.
    """
    plans = [_plan(planner(experiment, **side["cluster"]), side["gpus"]) for side in (before, after)]
    stores = [Checkpoints(folder, plan, Settings(), plan.machine.gpus) for plan in plans]
    stores[0].begin(1)
    stores[0].complete(1)
    try:
        stores[1].latest()
    except BackendError as error:
        return str(error).partition("\n")[0].rpartition("/")[2]
    return None


def _plan(planner: Planner, gpus: str) -> Plan:
    """Every operator data parallel over ``gpus``."""
    where = parse_gpus(gpus, "gpus")
    pin = Pin(allocation=where, data=where.size, pipeline=1, tensor=1, microbatches=1)
    graph = planner.graph(planner.structures()[0])
    problem = planner.problem({operator.name: pin for operator in graph.operators if operator.model is not None})
    structure = problem.structures[0]
    return planner.plan(structure, structure.plan(only_choice(problem).choice), {"strategy": None})
