"""Random runs: they finish, and keep every promise of the engine; compared with a naive reading of the policy."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.ir import Role, Rpeg
from rpeg_core.passes.lower import Node, NodeKind, lower
from rpeg_core.passes.schedule import reserved
from rpeg_core.passes.unroll import unroll
from rpeg_core.runtime.protocol import Dispatch
from rpeg_core.runtime.window import Window
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import SKEWED, on, toy_plan, toy_ppo, toy_workload

Execute = Callable[..., object]

RANDOM_RUNS = 1000


def drawn_seconds(seed: int, *, halves: bool = False) -> Callable[[Node], float]:
    """Seconds keyed by the node; with ``halves`` from {0, 0.5, 1}, so that many ends coincide and some take no time."""

    def seconds_of(node: Node) -> float:
        draw = random.Random(f"{seed} {node.label}")
        return draw.randrange(3) / 2 if halves else draw.uniform(0.0, 2.0)

    return seconds_of


def broken(run: object, window: Window, rpeg: Rpeg, steps: int) -> list[str]:
    """The promises that a run broke: completeness, precedence, exclusivity, versions, releases."""
    found = []
    start = {d.node.index: t for t, d in run.dispatches}
    nodes = {d.node.index: d.node for _, d in run.dispatches}
    expected = {node.index for k in range(steps) for node in window.nodes(k)}
    if set(start) != expected or len(run.dispatches) != len(expected) or set(run.end_s) != expected:
        found.append("not every node ran exactly once")
    for k in range(steps):
        for before, after in window.edges(k):
            if run.end_s[before] > start[after]:
                found.append(f"{nodes[after].label} ran before {nodes[before].label} was done")
    users: dict[int, list[tuple[float, float, str]]] = {}
    for time, dispatch in run.dispatches:
        for gpu in {gpu for a in dispatch.held for gpu in range(a.start, a.stop)}:
            users.setdefault(gpu, []).append((time, run.end_s[dispatch.node.index], dispatch.node.label))
        if set(dispatch.held) != {a for a in (dispatch.node.allocation, dispatch.node.source) if a is not None}:
            found.append(f"{dispatch.node.label} does not hold both ends")
    for gpu, intervals in users.items():  # in the order of dispatch
        for (_, end, a), (begin, _, b) in itertools.pairwise(intervals):
            if begin < end:
                found.append(f"{a} and {b} use GPU {gpu} at one time")
    for node in nodes.values():
        model = rpeg.model_of(node.operator)
        if node.kind is NodeKind.OP and model is not None:
            training = rpeg.operator(node.operator).role is Role.TRAINING
            stale = node.step if training else max(0, node.step - model.staleness)
            if node.version != (stale if model.trainable else 0):
                found.append(f"{node.label} is bound to version {node.version}")
    return found + broken_releases(run, rpeg, steps)


def broken_releases(run: object, rpeg: Rpeg, steps: int) -> list[str]:
    """An artifact is read only between its making and its release, released once, and after its last reader's end."""
    found, made, released, last_read = [], set(), {}, {}
    for time, instruction in run.given:
        if isinstance(instruction, Dispatch):
            for artifact in instruction.inputs:
                if artifact in released:
                    found.append(f"{instruction.node.label} reads what was released: {artifact}")
                last_read[artifact] = max(last_read.get(artifact, 0.0), run.end_s[instruction.node.index])
                made.add(artifact)
        elif hasattr(instruction, "artifact"):
            if instruction.artifact in released:
                found.append(f"released twice: {instruction.artifact}")
            released[instruction.artifact] = time
    for artifact, time in released.items():
        if time != last_read.get(artifact, run.end_s.get(artifact.node)):
            found.append(f"{artifact} was not released when its last reader was done")
    results = [training for op in rpeg.operators for training in op.trainings]
    kept = [a for a in made if a not in released]
    if kept or run.left.artifacts != len(results):
        found.append(f"kept {kept}, {run.left.artifacts} artifacts in all")
    return found


@settings(max_examples=150, deadline=None)
@given(configurations(), st.integers(1, 6), st.integers(0, 2**16), st.booleans())
def test_every_run_finishes_and_keeps_its_promises(
    execute: Execute, case: Configuration, steps: int, seed: int, halves: bool
) -> None:
    window = Window(case.rpeg, case.plan, case.workload)
    run = execute(window, steps, drawn_seconds(seed, halves=halves))
    assert broken(run, window, case.rpeg, steps) == []


def naive_order(case: Configuration, steps: int, seconds_of: Callable[[Node], float], depth: int) -> list[Node]:
    """The policy read literally: at each end, over and over, the first ready node whose GPUs are all free."""
    graph = lower(unroll(case.rpeg, steps), case.plan, case.workload)
    predecessors = graph.predecessors()
    window = Window(case.rpeg, case.plan, case.workload)
    position = [sum(1 for other in graph.nodes[: n.index] if other.step == n.step) for n in graph.nodes]
    named = [attrs.evolve(n, index=window.index(n.step, position[n.index])) for n in graph.nodes]
    gpus = [{g for a in reserved(n, reserve_source=True) for g in range(a.start, a.stop)} for n in graph.nodes]
    ends: dict[int, float] = {}
    running: dict[int, float] = {}
    order: list[Node] = []

    def made_in(node: Node) -> int:
        """The step of an operator, for a transfer that of what it carries."""
        sources = [graph.nodes[p].step for p in predecessors[node.index]]
        return node.step if node.kind is NodeKind.OP else min(sources, default=node.step)

    now = 0.0
    while len(ends) < len(graph.nodes):
        while True:
            busy = set().union(*(gpus[i] for i in running))
            done = [all(n.index in ends for n in graph.nodes if n.step == k) for k in range(steps)]
            complete = next((k for k in range(steps) if not done[k]), steps)
            ready = [
                n
                for n in graph.nodes
                if n.index not in ends
                and n.index not in running
                and n.step < complete + depth
                and all(p in ends for p in predecessors[n.index])
                and not gpus[n.index] & busy
            ]
            if not ready:
                break
            chosen = min(ready, key=lambda n: (made_in(n), window.shape(n.step).rank[position[n.index]], n.step))
            running[chosen.index] = now + seconds_of(named[chosen.index])
            order.append(named[chosen.index])
        now = min(running.values())
        ends.update({i: running.pop(i) for i in [i for i, end in running.items() if end == now]})
    return order


@settings(max_examples=60, deadline=None)
@given(configurations(max_operators=6), st.integers(1, 4), st.integers(0, 2**16), st.booleans(), st.integers(1, 4))
def test_the_order_is_that_of_the_policy_read_literally(
    execute: Execute, case: Configuration, steps: int, seed: int, halves: bool, depth: int
) -> None:
    seconds_of = drawn_seconds(seed, halves=halves)
    run = execute(Window(case.rpeg, case.plan, case.workload), steps, seconds_of, depth)
    assert naive_order(case, steps, seconds_of, depth) == [d.node for _, d in run.dispatches]


@settings(max_examples=30, deadline=None)
@given(configurations(), st.integers(0, 2**16))
def test_what_is_kept_does_not_grow_with_the_number_of_steps(execute: Execute, case: Configuration, seed: int) -> None:
    window = Window(case.rpeg, case.plan, case.workload)
    nodes = len(window.shape(window.steady_step).nodes)
    run = execute(window, 60, drawn_seconds(seed))
    assert run.largest["open_steps"] <= window.depth
    assert run.largest["open_nodes"] <= window.depth * nodes
    containers = len(case.rpeg.containers) * len(case.workload.phases) + nodes
    assert run.largest["artifacts"] <= (window.depth + window.steady_step) * containers


def test_the_depth_of_the_window_holds_up_nothing_in_ppo(execute: Execute) -> None:
    """Its two models wait for each other, so that a deeper window changes no time."""
    draw = random.Random(1)
    blocks = [(size * i, size * (i + 1)) for size in (1, 2, 4) for i in range(8 // size)]
    for seed in range(40):
        graph = toy_ppo(tau=draw.randrange(3), critic_tau=draw.randrange(3))
        window = Window(
            graph, toy_plan(**{op.name: on(*draw.choice(blocks)) for op in graph.operators}), toy_workload()
        )
        runs = [execute(window, 12, drawn_seconds(seed), depth) for depth in (window.depth, 12)]
        assert runs[0].given == runs[1].given


@pytest.mark.slow
def test_a_thousand_random_executions(execute: Execute) -> None:
    """PPO on 8 GPUs: random placements, staleness, phases and durations."""
    draw = random.Random(0)
    blocks = [(size * i, size * (i + 1)) for size in (1, 2, 4, 8) for i in range(8 // size)]
    for seed in range(RANDOM_RUNS):
        graph = toy_ppo(tau=draw.randrange(3), critic_tau=draw.randrange(3))
        plan = toy_plan(**{op.name: on(*draw.choice(blocks)) for op in graph.operators})
        workload = toy_workload(response_lengths=draw.choice(((), SKEWED)))
        window = Window(graph, plan, workload)
        run = execute(window, 4, drawn_seconds(seed))
        assert broken(run, window, graph, 4) == []
