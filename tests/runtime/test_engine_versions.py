"""What the weights contain that a consumer gets: followed through training and transfers, also across kill and resume.

Nothing here looks at the version that a node is bound to. Weights are a number, how often they were updated; training
adds one to what it reads, a transfer hands on what it reads.
"""

from __future__ import annotations

import random

import attrs
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from rpeg_core.costing.memory import serving_copies
from rpeg_core.ir import ContainerKind, Role
from rpeg_core.passes.lower import NodeKind
from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import Artifact, Dispatch, NodeFinished, Pause, Proceed, Release, Stop
from rpeg_core.runtime.window import Window
from rpeg_core.spec.machine import Allocation
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import SKEWED, on, toy_actor_critic, toy_mini, toy_plan, toy_ppo, toy_workload

EXECUTIONS = 1000


@attrs.define
class Cluster:
    """Artifacts that exist, with the number of updates in those of weights; what consumers got of each model."""

    window: Window
    updates: dict[Artifact, int] = attrs.field(factory=dict)
    most: dict[tuple[str, Allocation, Layout | None], int] = attrs.field(factory=dict)
    served: dict[tuple[str, int], set[int]] = attrs.field(factory=dict)
    moving: dict[int, dict[Artifact, int]] = attrs.field(factory=dict)

    def __attrs_post_init__(self) -> None:
        self.updates.update(dict.fromkeys(self.window.initial, 0))

    def count(self) -> None:
        """Versions that transfers brought, or are bringing, to each place: the most there were at one time."""
        graph, found = self.window.rpeg, {}
        for contents in (self.updates, *self.moving.values()):
            for artifact, version in contents.items():
                model = graph.container(artifact.container).model
                if model is not None and not self.is_trained(artifact):
                    found.setdefault((model, artifact.allocation, artifact.layout), set()).add(version)
        for place, versions in found.items():
            self.most[place] = max(self.most.get(place, 0), len(versions))

    def is_trained(self, artifact: Artifact) -> bool:
        """Whether training made it, so that it is the trainer's own."""
        return artifact.node >= 0 and self.window.node(*self.window.locate(artifact.node)).kind is NodeKind.OP

    def run(self, dispatch: Dispatch) -> dict[Artifact, int]:
        """What a node makes of what is there."""
        node, graph = dispatch.node, self.window.rpeg
        contents = {a: self.updates[a] for a in dispatch.inputs}  # KeyError: read before it was made, or once released
        weights = {count for a, count in contents.items() if graph.container(a.container).kind is ContainerKind.WEIGHTS}
        step, position = self.window.locate(node.index)
        made = self.window.shape(step).writes[position]
        after = 0
        if node.kind is not NodeKind.OP:
            after = max(weights, default=0)
        elif node.model is not None and graph.model(node.model).trainable:
            self.served.setdefault((node.operator, node.step), set()).update(weights)
            after = max(weights) + 1
        return {self.window.artifact(step, position, container): after for container in made}

    def wrong(self) -> list[str]:
        """Consumers that got other weights than theirs: k to train, max(0, k - tau) to serve."""
        graph, found = self.window.rpeg, []
        for (operator, step), counts in sorted(self.served.items()):
            training = graph.operator(operator).role is Role.TRAINING
            allowed = step if training else max(0, step - graph.model_of(operator).staleness)
            if counts != {allowed}:
                found.append(f"{operator}@{step} got {sorted(counts)}, not {allowed}")
        return found


def execute(
    cluster: Cluster, steps: int, seed: int, *, first: int = 0, every: int | None = None, kill_after: int | None = None
) -> tuple[int, dict[Artifact, int]] | None:
    """Run with random durations; with ``kill_after`` events, leave all at once: the last checkpoint and its step."""
    draw, running, saved = random.Random(seed), {}, (first, dict(cluster.updates))
    engine = Engine(cluster.window, steps, first_step=first, pause_every=every)
    now, out, handled = 0.0, engine.start(), 0
    while True:
        for instruction in out:
            if isinstance(instruction, Dispatch):
                made = cluster.run(instruction)
                if instruction.node.kind is not NodeKind.OP:
                    cluster.moving[instruction.node.index] = made
                cluster.count()
                running[instruction.node.index] = (now + draw.choice((0.0, 0.5, draw.uniform(0, 2))), made)
            elif isinstance(instruction, Release):
                del cluster.updates[instruction.artifact]
            elif isinstance(instruction, Stop):
                assert not instruction.failed
                assert not running
                return None
        if any(isinstance(i, Pause) for i in out):
            saved = (engine.steps_done, {a: cluster.updates[a] for a in engine.live})
            out = engine.handle(Proceed(now))
            continue
        if handled == kill_after:
            return saved
        handled += 1
        assert running, "deadlock"
        index = min(running, key=lambda i: (running[i][0], i))
        now, made = running.pop(index)
        cluster.moving.pop(index, None)
        cluster.updates.update(made)
        out = engine.handle(NodeFinished(index, now))


@settings(max_examples=150, deadline=None)
@given(configurations(max_operators=7), st.integers(1, 8), st.integers(0, 2**16))
def test_no_consumer_sees_another_version_than_its_own(case: Configuration, steps: int, seed: int) -> None:
    cluster = Cluster(Window(case.rpeg, case.plan, case.workload))
    execute(cluster, steps, seed)
    assert cluster.wrong() == []
    for (model, *_), versions in cluster.most.items():
        if case.rpeg.staleness.get(model, 0):
            assert versions <= serving_copies(case.rpeg, model)
    users = [op for op in case.rpeg.operators if op.model is not None and case.rpeg.model(op.model).trainable]
    assert len(cluster.served) == steps * len(users)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    configurations(max_operators=7),
    st.integers(1, 8),
    st.integers(1, 3),
    st.lists(st.integers(0, 60), min_size=1, max_size=3),
    st.integers(0, 2**16),
)
def test_the_bound_holds_across_kills_and_resumes(
    case: Configuration, steps: int, every: int, kills: list[int], seed: int
) -> None:
    window = Window(case.rpeg, case.plan, case.workload)
    cluster, first = Cluster(window), 0
    for number, kill_after in enumerate([*kills, None]):
        left = execute(cluster, steps, seed + number, first=first, every=every, kill_after=kill_after)
        assert cluster.wrong() == []
        if left is None or left[0] == steps:
            break
        first, updates = left
        if first == 0:
            updates = dict.fromkeys(window.initial, 0)
        cluster = Cluster(window)  # new workers, with what the checkpoint has and nothing else
        cluster.updates = updates
    else:
        raise AssertionError("the last run was not killed and must end")


@pytest.mark.parametrize("tau", [1, 2])
@pytest.mark.parametrize(
    ("serving", "training"),
    [(on(0, 2), on(0, 2, tensor=2)), (on(0, 2), on(2, 4)), (on(0, 4), on(2, 4))],
    ids=["other layout", "elsewhere", "overlapping"],
)
def test_a_place_keeps_as_many_versions_as_memory_is_planned_for(
    serving: Assignment, training: Assignment, tau: int
) -> None:
    graph = toy_mini(tau=tau)
    plan = toy_plan(actor_generation=serving, actor_training=training)
    for seed in range(20):
        cluster = Cluster(Window(graph, plan, toy_workload()))
        execute(cluster, 8, seed)
        most = cluster.most["actor", serving.allocation, serving.layout]
        assert most == tau if serving.allocation == training.allocation else most <= tau


@pytest.mark.slow
def test_a_thousand_executions_of_actor_critics_end_with_the_right_versions() -> None:
    draw = random.Random(1)
    blocks = [(size * i, size * (i + 1)) for size in (1, 2, 4) for i in range(4 // size)]
    for seed in range(EXECUTIONS):
        if draw.random() < 0.5:
            graph = toy_actor_critic(tau=draw.randrange(4))
        else:
            graph = toy_ppo(tau=draw.randrange(4), critic_tau=draw.randrange(4))
        plan = toy_plan(**{op.name: on(*draw.choice(blocks)) for op in graph.operators})
        window = Window(graph, plan, toy_workload(response_lengths=draw.choice(((), SKEWED))))
        cluster = Cluster(window)
        steps, every = draw.randrange(1, 8), draw.choice((None, 1, 2))
        left = execute(cluster, steps, seed, every=every, kill_after=draw.choice((None, draw.randrange(60))))
        assert cluster.wrong() == []
        if left is not None and left[0] < steps:
            cluster = Cluster(window)
            if left[0] > 0:
                cluster.updates = left[1]
            execute(cluster, steps, seed, first=left[0], every=every)
            assert cluster.wrong() == []
