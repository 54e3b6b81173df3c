"""Riders: whatever an operator reads is on its GPUs when it is dispatched, for any plan of any graph."""

from __future__ import annotations

import random

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from rpeg_plugin_megatron.riders import Places

from rpeg_core.ir import ContainerKind
from rpeg_core.passes.lower import NodeKind
from rpeg_core.planning.assignment import ExecutionPlan
from rpeg_core.runtime.engine import Engine
from rpeg_core.runtime.protocol import Dispatch, NodeFinished, Release
from rpeg_core.runtime.window import Window
from rpeg_core.spec.machine import Allocation
from rpeg_core.testing.strategies import Configuration, configurations
from rpeg_core.testing.toys import SKEWED, on, toy_plan, toy_ppo, toy_workload


class Rooms:
    """What is where, read naively: a transfer delivers its artifact and its riders, and needs the riders to send."""

    def __init__(self, window: Window) -> None:
        self.window, self.held, self.missing, self.sent = window, {}, [], []

    def room(self, allocation: Allocation) -> set[tuple[int, str]]:
        return self.held.setdefault(allocation, set())

    def begin(self, dispatch: Dispatch, riders: tuple) -> None:
        node, rpeg = dispatch.node, self.window.rpeg
        data = {c.name for c in rpeg.containers if c.kind is ContainerKind.DATA}
        if node.kind is NodeKind.OP:
            room = self.room(node.allocation)
            for artifact in dispatch.inputs:
                if artifact.container in data and (artifact.node, artifact.container) not in room:
                    self.missing.append(f"{node.label} lacks {artifact}")
        for rider in riders:
            if (rider.node, rider.container) not in self.room(node.source):
                self.missing.append(f"{node.label} cannot send {rider}")
            self.sent.append((node.label.partition("#")[0], rider.container))

    def end(self, index: int, riders: tuple) -> None:
        step, position = self.window.locate(index)
        shape = self.window.shape(step)
        room = self.room(shape.nodes[position].allocation)
        room.update((index, container) for container in shape.writes[position])
        room.update((rider.node, rider.container) for rider in riders)


def drive(window: Window, steps: int, seed: int) -> tuple[Rooms, Places]:
    engine, places, rooms, draw = Engine(window, steps), Places(window), Rooms(window), random.Random(seed)
    running: dict[int, tuple] = {}
    out = engine.start()
    while True:
        for instruction in out:
            if isinstance(instruction, Dispatch):
                riders = places.riders(instruction)
                rooms.begin(instruction, riders)
                running[instruction.node.index] = riders
            elif isinstance(instruction, Release):
                found = places.released(instruction.artifact)
                key = (instruction.artifact.node, instruction.artifact.container)
                holders = {allocation for allocation, room in rooms.held.items() if key in room}
                assert holders <= found
                for allocation in holders:
                    rooms.held[allocation].discard(key)
        if engine.stopped:
            return rooms, places
        index = draw.choice(sorted(running))
        rooms.end(index, running.pop(index))
        places.finished(index)
        out = engine.handle(NodeFinished(index, 0.0))


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(configurations(), st.integers(1, 4), st.integers(0, 2**16))
def test_every_operator_has_what_it_reads(case: Configuration, steps: int, seed: int) -> None:
    rooms, _ = drive(Window(case.rpeg, case.plan, case.workload), steps, seed)
    assert rooms.missing == []


def ppo(**places: object) -> ExecutionPlan:
    return toy_plan(
        **{
            "actor_generation": on(0, 2),
            "reference_inference": on(2),
            "reward_inference": on(3),
            "critic_inference": on(2),
            "actor_training": on(4, 6),
            "critic_training": on(6, 8),
            **places,
        }
    )


def test_completions_reach_ppo_training_with_what_was_made_of_them() -> None:
    """By hand: log-probs, rewards and values go to both trainings; the first to arrive takes the completions."""
    rooms, _ = drive(Window(toy_ppo(), ppo(), toy_workload()), 1, 0)
    first = [(label.rpartition("->")[2], container) for label, container in rooms.sent]
    to_training = sorted(pair for pair in first if "training" in pair[0])
    assert [pair for pair in to_training if pair[1] == "completions"] == [
        ("actor_training@0", "completions"),
        ("critic_training@0", "completions"),
    ]


def test_nothing_rides_where_the_maker_and_the_reader_share_gpus() -> None:
    plan = ppo(actor_training=on(0, 2), critic_training=on(0, 2))
    rooms, _ = drive(Window(toy_ppo(), plan, toy_workload()), 2, 0)
    assert rooms.sent == []


def test_parts_of_length_phases_ride_one_by_one_and_nothing_is_kept_for_good() -> None:
    window = Window(toy_ppo(tau=1), ppo(), toy_workload(response_lengths=SKEWED))
    rooms, places = drive(window, 12, 3)
    assert rooms.missing == []
    assert sum(container == "completions" for label, container in rooms.sent if "actor_training@5" in label) == 3
    assert len(places) == 2  # the weights that result
