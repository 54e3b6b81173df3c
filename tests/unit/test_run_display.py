"""What a terminal and a pipe show of a run, step by step."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from rpeg_core.cli import run_display
from rpeg_core.cli.run_display import RunDisplay, metric
from rpeg_core.planning.plan import Plan
from rpeg_core.testing.checks.samples import sample_plan


@pytest.fixture(scope="module")
def plan() -> Plan:
    return sample_plan()


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_display, "REDRAW_S", 0.0)
    monkeypatch.setattr(run_display.ui, "is_terminal_for_progress", lambda: True)


def test_a_metric_is_found_by_its_name_or_by_its_last_part() -> None:
    assert metric({"reward": 1.0, "a/reward": 2.0}, "reward") == 1.0
    assert metric({"b/reward": 3.0, "a/reward": 2.0}, "reward") == 2.0
    assert metric({"a/policy_loss": 0.5}, "loss") == 0.5
    assert metric({"a/reward_spread": 0.5}, "reward") is None


def test_a_terminal_shows_progress_the_curve_values_and_every_operator(
    plan: Plan, terminal: None, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = iter(
        [100.0, *(value for pair in zip(range(110, 200, 2), range(110, 200, 2), strict=True) for value in pair)]
    )
    monkeypatch.setattr(run_display.time, "monotonic", lambda: next(clock))
    shown: list[Sequence[str]] = []
    display = RunDisplay(plan, "megatron runs plan.json", 4, shown.append)
    name = next(iter(plan.assignments))
    for step in range(2):
        display.step_finished(step, {"a/reward": step / 2, "a/kl": 0.25, "seconds": 2.0, f"seconds/{name}": 1.5})
    first, last = shown
    assert "step 1 of 4" in first[0]
    assert "left" not in first[0]
    assert last[0].startswith("megatron runs plan.json  ████████████░░░░░░░░░░░░ step 2 of 4, 0:")
    assert last[0].endswith(" left")
    assert last[1] == "▁█"
    assert last[2] == "reward 0.5  KL 0.25"
    assert "2.00 s (predicted " in last[3]
    assert last[4].startswith(f"  {name}")
    assert "1.50 s (predicted " in last[4]
    assert len(last) == 5
    assert capsys.readouterr().err == ""


def test_the_status_before_the_first_step(plan: Plan, terminal: None) -> None:
    shown: list[Sequence[str]] = []
    RunDisplay(plan, "megatron runs plan.json", None, shown.append).status("starting 2 workers")
    assert shown == [["megatron runs plan.json: starting 2 workers"]]


def test_virtual_steps_are_no_lines_in_a_pipe(plan: Plan, capsys: pytest.CaptureFixture[str]) -> None:
    display = RunDisplay(plan, "simulator runs plan.json", 4, lambda lines: None)
    display.step_finished(0, {"seconds": 2.0, "time_s": 2.0})
    assert capsys.readouterr().err == ""
    assert display.metrics == {0: {"seconds": 2.0, "time_s": 2.0}}
