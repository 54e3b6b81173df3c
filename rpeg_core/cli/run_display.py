"""What ``rpeg run`` shows while it runs: a few lines that change on a terminal, one line per step elsewhere.

A step of a backend that measures nothing but time, in virtual time, is not worth a line in a pipe.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

from rpeg_core.cli import ui
from rpeg_core.report import curve, words

if TYPE_CHECKING:
    from rpeg_core.planning.plan import Plan

__all__ = ["CURVES", "RunDisplay", "metric"]

SHOWN: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("reward", ("reward", "reward_mean")),
    ("accuracy", ("accuracy",)),
    ("margin", ("margin",)),
    ("loss", ("loss", "policy_loss", "preference_loss")),
    ("value loss", ("value_loss",)),
    ("KL", ("kl", "kl_loss")),
)
"""Label, and the names of the metric under which it is looked for."""

CURVES = ("reward", "accuracy", "loss")
"""Of these labels the first that a run has is drawn by step."""

TIMES = ("seconds", "time_s")
OPERATOR = "seconds/"
BAR_WIDTH = 24
CURVE_WIDTH = 60
REDRAW_S = 0.1


def metric(metrics: Mapping[str, float], label: str) -> float | None:
    """The value for a label of :data:`SHOWN`: under one of its names, or under one whose last part it is."""
    for name in dict(SHOWN)[label]:
        if name in metrics:
            return metrics[name]
        for key in sorted(metrics):
            if key.endswith(f"/{name}"):
                return metrics[key]
    return None


class RunDisplay:
    """Collects the metrics of every step and shows them.

    Args:
        plan: what runs, for the predicted times.
        title: e.g. ``running plan.json on megatron``.
        steps: RL steps that were asked for, None when only the backend knows.
        show: replaces the lines on the terminal.
    """

    def __init__(self, plan: Plan, title: str, steps: int | None, show: Callable[[Sequence[str]], None]) -> None:
        self._plan, self._title, self._steps, self._show = plan, title, steps, show
        self._line_each = not ui.is_terminal_for_progress()
        self._began = time.monotonic()
        self._first: tuple[int, float] | None = None  # the first step that ended, and when
        self._shown = -math.inf
        self._curve: list[float] = []
        self.metrics: dict[int, dict[str, float]] = {}

    def status(self, text: str) -> None:
        """What happens outside the steps."""
        self._show([f"{self._title}: {text}"])
        if self._line_each:
            ui.print_note(text)

    def step_finished(self, step: int, metrics: Mapping[str, float]) -> None:
        """A step and all before it are done."""
        self.metrics[step] = dict(metrics)
        value = next((found for label in CURVES if (found := metric(metrics, label)) is not None), None)
        if value is not None:
            self._curve.append(value)
        if time.monotonic() - self._shown >= REDRAW_S or step + 1 == self._steps:
            self._show(self._lines(step, metrics))
            self._shown = time.monotonic()
        if self._line_each and any(name not in TIMES for name in metrics):
            ui.print_note(self._line(step, metrics))

    def _line(self, step: int, metrics: Mapping[str, float]) -> str:
        of = "" if self._steps is None else f" of {self._steps}"
        return "  ".join([f"step {step + 1}{of}", *self._values(metrics), *self._time(metrics)])

    def _lines(self, step: int, metrics: Mapping[str, float]) -> list[str]:
        lines = [f"{self._title}  {self._progress(step)}"]
        if self._curve:
            lines.append(curve.sparkline(self._curve, width=CURVE_WIDTH))
        values, times = self._values(metrics), self._time(metrics)
        lines += ["  ".join(values)] if values else []
        lines += ["  ".join(times)] if times else []
        rows = [(name, metrics.get(OPERATOR + name)) for name in self._plan.assignments]
        width = max(len(name) for name, _ in rows)
        for name, measured in rows:
            if measured is not None:
                predicted = sum(self._plan.prediction.operator_s[name])
                lines.append(f"  {name:<{width}}  {_beside(measured, predicted)}")
        return lines

    def _progress(self, step: int) -> str:
        elapsed_s = time.monotonic() - self._began
        if self._steps is None:
            return f"step {step + 1}, {words.duration(elapsed_s)}"
        bar = words.bar((step + 1) / self._steps, BAR_WIDTH)
        shown = f"{bar} step {step + 1} of {self._steps}, {words.duration(elapsed_s)}"
        now = time.monotonic()
        if self._first is None:  # it, and what came before it, says nothing about the others
            self._first = (step, now)
            return shown
        first, since = self._first
        return f"{shown}, {words.duration((self._steps - step - 1) * (now - since) / (step - first))} left"

    def _values(self, metrics: Mapping[str, float]) -> list[str]:
        found = [(label, metric(metrics, label)) for label, _ in SHOWN]
        return [f"{label} {value:.4g}" for label, value in found if value is not None]

    def _time(self, metrics: Mapping[str, float]) -> list[str]:
        seconds = metrics.get("seconds")
        if seconds is None or not math.isfinite(seconds) or seconds <= 0:
            return []
        rate = metrics.get("tokens_per_s", self._plan.workload.tokens_per_step / seconds)
        return [words.tokens_per_s(rate), _beside(seconds, self._plan.prediction.step_s)]


def _beside(measured: float, predicted: float) -> str:
    return f"{words.seconds(measured)} (predicted {words.seconds(predicted)})"
