"""A driver for the engine that knows nothing of the simulator plugin."""

from __future__ import annotations

from collections.abc import Callable

import attrs
import pytest

from rpeg_core.passes.lower import Node
from rpeg_core.runtime.engine import Counters, Engine
from rpeg_core.runtime.protocol import Dispatch, Instruction, NodeFinished, Release, Stop
from rpeg_core.runtime.window import Window


@attrs.define
class Execution:
    """What a run did: (time, instruction) in order, end times by node index, and the largest counters seen."""

    given: list[tuple[float, Instruction]] = attrs.field(factory=list)
    end_s: dict[int, float] = attrs.field(factory=dict)
    largest: dict[str, int] = attrs.field(factory=dict)
    left: Counters | None = None

    @property
    def dispatches(self) -> list[tuple[float, Dispatch]]:
        return [(t, i) for t, i in self.given if isinstance(i, Dispatch)]

    @property
    def releases(self) -> list[tuple[float, Release]]:
        return [(t, i) for t, i in self.given if isinstance(i, Release)]

    @property
    def starts(self) -> list[tuple[str, float, float]]:
        """(operator@step, or container->operator@step for a transfer; start; end) in the order of dispatch."""
        return [(_short(d.node), t, self.end_s[d.node.index]) for t, d in self.dispatches]


def _short(node: Node) -> str:
    return node.label.partition("#")[0]


@pytest.fixture(scope="session")
def execute() -> Callable[..., Execution]:
    """``execute(window, steps, seconds_of, depth=None)``: run to the end, ends at one time reported together."""

    def run(window: Window, steps: int, seconds_of: Callable[[Node], float], depth: int | None = None) -> Execution:
        engine, seen = Engine(window, steps, depth=depth), Execution()
        running: dict[int, float] = {}
        now, out = 0.0, engine.start()
        while True:
            for instruction in out:
                seen.given.append((now, instruction))
                if isinstance(instruction, Dispatch):
                    running[instruction.node.index] = now + seconds_of(instruction.node)
                elif isinstance(instruction, Stop):
                    assert not instruction.failed
                    seen.left = engine.counters
                    return seen
            for name, value in attrs.asdict(engine.counters).items():
                seen.largest[name] = max(seen.largest.get(name, 0), value)
            now = min(running.values())
            finished = sorted(index for index, end in running.items() if end == now)
            for index in finished:
                seen.end_s[index] = running.pop(index)
            out = engine.handle(*(NodeFinished(index, now) for index in finished))

    return run
