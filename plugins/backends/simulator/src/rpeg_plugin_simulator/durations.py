"""How long a node takes in virtual time: the predicted seconds, noise, and the response lengths of the step.

Every draw is keyed by (seed, step, position in the step), never by the order of execution, so that two runs with the
same seed differ only by what was changed between them.

Sampled lengths. Each step draws the length bin of every one of its B*R responses from the quantiles of the workload.
The cost model lets all sequences that finish in a phase decode until its end, so where in the bin a response ends does
not matter. With ``n_q`` of N responses finishing in phase q,

* a generation sub-node takes its predicted time times (share alive in the phase, drawn) / (share alive, expected);
* an unsplit generation takes its predicted time times (sequences * decode steps, drawn) / (expected), prefill included;
* an inference sub-node takes its predicted time times (n_q / N) / (share that finishes, expected).

All three factors have mean 1. Everything else, transfers included, keeps its predicted time: training and unsplit
inference work on the whole batch, whose mean length varies little.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rpeg_core.ir import Role
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.runtime.window import Window
from rpeg_core.spec.workload import Workload

__all__ = ["Durations"]

Floats = NDArray[np.float64]

_NOISE, _LENGTHS = 0, 1
"""Independent random streams of a step."""


class Durations:
    """Seconds of every node of a window.

    Args:
        window: the executable graph.
        workload: gives N = B*R and the length phases.
        seconds_of: predicted seconds of a node; must not depend on its step. Asked once per node of each shape.
        noise: relative standard deviation of a lognormal factor with mean 1, independent for each node.
        sample_lengths: draw response lengths.
        seed: of all draws.
    """

    def __init__(
        self,
        window: Window,
        workload: Workload,
        seconds_of: Callable[[Node], float],
        *,
        noise: float = 0.0,
        sample_lengths: bool = False,
        seed: int = 0,
    ) -> None:
        self._window, self._workload = window, workload
        self._noise, self._sample_lengths, self._seed = noise, sample_lengths, seed
        shapes = [window.shape(step) for step in range(window.steady_step + 1)]
        self._predicted = [np.array([seconds_of(node) for node in shape.nodes]) for shape in shapes]
        self._by_step: dict[int, list[float]] = {}

    def seconds(self, step: int, position: int) -> float:
        """Duration of a node. Remembers as many steps as can be in progress."""
        if step not in self._by_step:
            if len(self._by_step) > self._window.depth:
                del self._by_step[min(self._by_step)]
            self._by_step[step] = self._draw(step).tolist()
        return self._by_step[step][position]

    def _draw(self, step: int) -> Floats:
        seconds = self._predicted[min(step, self._window.steady_step)]
        if self._noise:
            variance = math.log1p(self._noise**2)
            rng = np.random.default_rng((self._seed, step, _NOISE))
            seconds = seconds * rng.lognormal(-variance / 2, math.sqrt(variance), len(seconds))
        if self._sample_lengths:
            seconds = seconds * self._length_factors(step)
        return seconds

    def _length_factors(self, step: int) -> Floats:
        phases = self._workload.phases
        expected = np.array([phase.finishing for phase in phases])
        rng = np.random.default_rng((self._seed, step, _LENGTHS))
        drawn = rng.multinomial(self._workload.sequences, expected) / self._workload.sequences
        alive = 1.0 - np.concatenate(([0.0], np.cumsum(drawn)[:-1]))
        expected_alive = np.array([phase.alive for phase in phases])
        decode_steps = np.array([phase.tokens for phase in phases])
        whole = float(alive @ decode_steps / (expected_alive @ decode_steps))
        by_phase = {Role.GENERATION: alive / expected_alive, Role.INFERENCE: drawn / expected}

        def factor(node: Node) -> float:
            role = self._window.rpeg.operator(node.operator).role
            if node.kind is not NodeKind.OP:
                return 1.0
            if node.phase is not None:
                return float(by_phase[role][node.phase])
            return whole if role is Role.GENERATION else 1.0

        return np.array([factor(node) for node in self._window.shape(step).nodes])
