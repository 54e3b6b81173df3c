"""Length phases: rows that finish early are assessed while the rest is decoded, and nothing else changes."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import attrs
import numpy as np
import pytest
import test_megatron_equivalence as equivalence
import torch
from megatron_plans import at, make_plan, ranks_of, run_plan, settings
from megatron_world import run_world
from rpeg_plugin_megatron.flow import due_bytes, part_rows
from rpeg_plugin_megatron.metrics import charged_bytes
from rpeg_plugin_megatron.operators import _Phased
from rpeg_plugin_megatron.session import open_session

from rpeg_core.passes.lower import NodeKind
from rpeg_core.planning.assignment import Assignment
from rpeg_core.planning.plan import Plan
from rpeg_core.runtime.session import TRACE_FILE, RunRequest
from rpeg_core.runtime.trace import Dispatched, Ended, Started
from rpeg_core.runtime.verify import verify_plan
from rpeg_core.runtime.window import Window
from rpeg_core.spec.workload import LengthQuantile, Workload

SKEWED = [[0.3, 2], [0.7, 5], [1.0, 12]]
"""Shares of 16, 32 and 8 rows that are no whole rows."""

PESSIMIST = [[0.5, 11], [1.0, 12]]
"""Half of the rows are expected to end at the last moment; they end much sooner."""

OPTIMIST = [[0.9, 1], [1.0, 12]]
"""Almost all rows are expected to end at once; they do not."""

TINY_SHARES = [[0.02, 1], [0.05, 2], [1.0, 12]]
"""Phases without a single row."""

Case = tuple[str, dict[str, Assignment], list[list[float]]]

CASES: dict[str, Case] = {
    "ppo on two workers": (
        "ppo",
        {
            "actor_generation": at("0"),
            "reference_inference": at("1"),
            "reward_inference": at("1"),
            "critic_inference": at("1"),
            "actor_training": at("0"),
            "critic_training": at("1"),
        },
        SKEWED,
    ),
    "ppo assessed by two layouts of the same workers, and by generation's own": (
        "ppo",
        {
            "actor_generation": at("0-1", dp=2),
            "reference_inference": at("2-3", tp=2),
            "reward_inference": at("2-3", dp=2),
            "critic_inference": at("0-1", tp=2),
            "actor_training": at("2-3", tp=2),
            "critic_training": at("0-1", dp=2),
        },
        SKEWED,
    ),
    "ppo assessed on a part of generation's workers as well": (
        "ppo",
        {
            "actor_generation": at("0-1", dp=2),
            "reference_inference": at("2"),
            "reward_inference": at("3"),
            "critic_inference": at("0"),
            "actor_training": at("0-3", dp=2, tp=2),
            "critic_training": at("2-3", pp=2, mb=2),
        },
        PESSIMIST,
    ),
    "grpo on two workers, rows late": (
        "grpo",
        {
            "actor_generation": at("0"),
            "reference_inference": at("1"),
            "reward_function": at("1"),
            "actor_training": at("0"),
        },
        OPTIMIST,
    ),
    "grpo in a pipeline, rows early": (
        "grpo",
        {
            "actor_generation": at("0-1", pp=2, mb=2),
            "reference_inference": at("2-3", dp=2),
            "reward_function": at("3"),
            "actor_training": at("0-3", dp=4),
        },
        PESSIMIST,
    ),
    "grpo with phases of no row": (
        "grpo",
        {
            "actor_generation": at("0-1", dp=2),
            "reference_inference": at("2-3", dp=2),
            "reward_function": at("2-3", dp=2),
            "actor_training": at("2-3", tp=2),
        },
        TINY_SHARES,
    ),
    "ppo with a shared backbone": (
        "ppo-ac",
        {
            "": at("0-1", dp=2),
            "reference_inference": at("2-3", tp=2),
            "actor_critic_inference": at("2-3", dp=2),
        },
        SKEWED,
    ),
    "grpo a step behind, trained elsewhere": (
        "grpo",
        {"actor_generation": at("0"), "": at("1")},
        SKEWED,
    ),
    "grpo a step behind, trained where it generates": (
        "grpo",
        {"": at("0-1", tp=2), "reference_inference": at("2"), "reward_function": at("2")},
        SKEWED,
    ),
}


def document(algorithm: str) -> dict[str, Any]:
    """Few tokens, so that a random model ends some responses at once and some never."""
    found = equivalence.document(algorithm)
    found["models"]["actor"]["config"] |= {"vocab": 14, "layers": 2}
    found["workload"] |= {"prompts": 8, "rollouts_per_prompt": 4, "prompt_tokens": 6, "response_tokens": 12}
    return found


def plan_of(case: Case, **staleness: int) -> Plan:
    algorithm, assignments, lengths = case
    chosen = document(algorithm)
    if lengths:
        chosen["workload"]["response_lengths"] = lengths
    return make_plan(chosen, assignments, **staleness)


@pytest.fixture(scope="module")
def oracle() -> Callable[..., Any]:
    """The plain loop's outcome by algorithm and staleness, run once."""
    found: dict[Any, Any] = {}

    def of(algorithm: str, **staleness: int) -> Any:
        key = (algorithm, *staleness.items())
        if key not in found:
            found[key] = equivalence.plain(plan_of((algorithm, {"": at("0")}, []), **staleness))
        return found[key]

    return of


QUICK = ("ppo on two workers",)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.slow, id=name) for name in CASES]
)
def test_a_split_plan_computes_what_the_plain_loop_computes(name: str, oracle: Callable[..., Any]) -> None:
    staleness = {"actor": 1} if "a step behind" in name else {}
    plan, expected = plan_of(CASES[name], **staleness), oracle(CASES[name][0], **staleness)
    assert any(node.phase is not None for node in _nodes(plan)), "nothing is split"
    lengths = response_lengths(plan, expected)
    assert (lengths < 12).mean() > 0.3, "rows that end early"
    assert (lengths == 12).any(), "rows that end at the limit"
    results = run_world(run_plan, ranks_of(plan), plan, settings(), equivalence.STEPS, True, timeout_s=300.0)
    worst = equivalence.check(plan, results, expected)
    assert max(worst.values()) <= equivalence.TOLERANCE, worst
    equivalence.check_transfers(plan, results)


def response_lengths(plan: Plan, expected: Any) -> np.ndarray:
    """Tokens of the responses of all steps, the end token included."""
    found = []
    for rows in expected.rows:
        (sequences,) = [value for value in rows.values() if value.dtype == torch.int32 and value.shape[1] == 18]
        found.append((sequences[:, plan.workload.prompt_tokens :] != 0).sum(dim=1).numpy())
    return np.concatenate(found)


def _nodes(plan: Plan) -> list[Any]:
    window = Window(plan.rpeg, plan.assignments, plan.workload, split_lengths=plan.options.split_lengths)
    return list(window.nodes(0))


# The rows of a phase


@attrs.define
class Script:
    """A decoding whose rows end after so many tokens."""

    ends: list[int]
    response_tokens: int = 12
    decoded: int = 0

    @property
    def finished(self) -> np.ndarray:
        return np.array([end <= self.decoded for end in self.ends])

    def advance(self, stop: int, until: Callable[[], bool] | None = None) -> None:
        while self.decoded < stop and not (until is not None and until()):
            self.decoded += 1


@pytest.mark.parametrize(
    ("ends", "counts", "expected"),
    [
        pytest.param([2, 9, 2, 5], [2, 2], [([0, 2], 2), ([1, 3], 12)], id="in the order of their ends"),
        pytest.param([1, 1, 1, 1], [2, 2], [([0, 1], 1), ([2, 3], 12)], id="all early"),
        pytest.param([99, 99, 99, 99], [3, 1], [([0, 1, 2], 12), ([3], 12)], id="none ends"),
        pytest.param([99, 99, 4, 99], [2, 2], [([0, 2], 12), ([1, 3], 12)], id="too few end"),
        pytest.param([3, 1, 2, 4], [0, 1, 0, 3], [([], 0), ([1], 1), ([], 1), ([0, 2, 3], 12)], id="phases of no row"),
    ],
)
def test_a_phase_ends_when_its_share_is_finished(
    ends: list[int], counts: list[int], expected: list[tuple[list[int], int]]
) -> None:
    decoding = Script(ends)
    phased, found = _Phased(decoding, torch.zeros(len(ends), 1)), []
    for phase, count in enumerate(counts):
        chosen = phased.finish(count, phase == len(counts) - 1).tolist()
        found.append((chosen, decoding.decoded))
    assert found == expected


@pytest.mark.parametrize("replicas", [1, 2, 4, 8])
@pytest.mark.parametrize("fractions", [(0.5, 1.0), (0.3, 0.7, 1.0), (0.02, 0.05, 1.0), (1 / 3, 2 / 3, 1.0)])
def test_all_phases_together_have_every_row_once(replicas: int, fractions: tuple[float, ...]) -> None:
    quantiles = tuple(LengthQuantile(fraction, 4 * (i + 1)) for i, fraction in enumerate(fractions))
    work = Workload(prompts=8, prompt_tokens=4, response_tokens=4 * len(fractions), response_lengths=quantiles)
    found = [part_rows(work, phase.index, replicas) for phase in work.phases]
    assert sum(found) == work.sequences // replicas
    for rows, phase in zip(found, work.phases, strict=True):
        assert abs(rows - phase.finishing * work.sequences / replicas) <= 1.0


def test_the_share_of_a_phase_is_charged_for_exactly_its_whole_rows() -> None:
    """0.3 of 32 rows are 9.6: ten rows of 18 tokens of four bytes."""
    plan = plan_of(CASES["ppo on two workers"])
    node = next(n for n in _nodes(plan) if n.kind is NodeKind.COMM and n.phase == 0)
    due = due_bytes(node, plan.rpeg, plan.assignments, plan.workload)
    assert due == 10 * 18 * 4
    assert node.payload_bytes == pytest.approx(0.3 * 32 * 18 * 4)
    whole = plan.rpeg.container(node.container).bytes
    assert charged_bytes(node, due, whole, due) == node.payload_bytes
    for wrong in (due - 18 * 4, due + 18 * 4, round(node.payload_bytes), whole, 0):
        assert charged_bytes(node, wrong, whole, due) != node.payload_bytes


# Whole sessions


@pytest.fixture(scope="module")
def sessions(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, tuple[Plan, Path, Mapping[int, Any]]]:
    """A run in length phases and the same one unsplit: plan, folder, metrics of its steps."""
    algorithm, assignments, lengths = CASES["ppo on two workers"]
    found = {}
    for name in ("phases", "unsplit"):
        chosen = document(algorithm)
        chosen["workload"]["response_lengths"] = lengths
        chosen["objective"] = {"split_lengths": name == "phases"}
        plan, folder = make_plan(chosen, assignments), tmp_path_factory.mktemp(name)
        steps: dict[int, Any] = {}
        with open_session(plan, settings(export=False)) as session:
            session.run(RunRequest(steps=2, output=folder, step_finished=steps.__setitem__))
        found[name] = (plan, folder, steps)
    return found


@pytest.mark.slow
def test_split_and_unsplit_runs_have_the_same_losses(sessions: Any) -> None:
    (_, _, split), (_, _, whole) = sessions["phases"], sessions["unsplit"]
    assert set(split) == set(whole) == {0, 1}
    for step, metrics in whole.items():
        for name, value in metrics.items():
            if name.startswith(("actor_training/", "critic_training/")):
                assert abs(split[step][name] - value) <= 1e-4 * max(abs(value), equivalence.SMALL), name


@pytest.mark.slow
def test_early_rows_are_assessed_while_the_rest_is_decoded(sessions: Any) -> None:
    plan, folder, _ = sessions["phases"]
    verdict = verify_plan(plan, folder / TRACE_FILE)
    assert not verdict.findings, verdict.findings
    times: dict[str, list[float]] = {}
    labels = {}
    from rpeg_core.runtime.trace import Trace

    for record in Trace.read(folder / TRACE_FILE).records:
        if isinstance(record, Dispatched):
            labels[record.node] = record.label
        if isinstance(record, Started | Ended):
            times.setdefault(labels[record.node], []).append(record.time_s)
    for step in range(2):
        assert times[f"reference_inference@{step}.0"][0] < times[f"actor_generation@{step}.2"][1]


def lines_of(path: Path) -> list[dict[str, Any]]:
    return [{k: v for k, v in json.loads(line).items() if k != "chain"} for line in path.read_text().splitlines()]


def forged(lines: list[dict[str, Any]]) -> bytes:
    """The file with a chain that fits."""
    chain, out = "", b""
    for line in lines:
        body = json.dumps(line).encode()[:-1]
        chain = hashlib.sha256(chain.encode() + body).hexdigest()[:16]
        out += body + b', "chain": "' + chain.encode() + b'"}\n'
    return out


def node_of(lines: list[dict[str, Any]], label: str) -> int:
    return next(line["node"] for line in lines if line["record"] == "dispatch" and line["label"].startswith(label))


def position(lines: list[dict[str, Any]], record: str, label: str) -> int:
    node = node_of(lines, label)
    return next(i for i, line in enumerate(lines) if line["record"] == record and line.get("node") == node)


COMM = "COMM completions->reference_inference@1.0"


def one_row_less(lines: list[dict[str, Any]]) -> None:
    lines[position(lines, "transfer", COMM)]["bytes"] -= 18 * 4


def what_the_rows_weigh(lines: list[dict[str, Any]]) -> None:
    """Not what lowering charges for them."""
    lines[position(lines, "transfer", COMM)]["bytes"] = 10 * 18 * 4


def another_phase(lines: list[dict[str, Any]]) -> None:
    lines[position(lines, "dispatch", "actor_generation@1.1")]["phase"] = 2


def no_phase(lines: list[dict[str, Any]]) -> None:
    lines[position(lines, "dispatch", "reference_inference@1.0")]["phase"] = None


def a_phase_is_missing(lines: list[dict[str, Any]]) -> None:
    node = node_of(lines, "critic_inference@1.1")
    lines[:] = [line for line in lines if line.get("node") != node]


def assessed_before_it_arrived(lines: list[dict[str, Any]]) -> None:
    start, first = position(lines, "dispatch", "reference_inference@1.0"), position(lines, "dispatch", COMM)
    line = lines.pop(start)
    lines.insert(first, line | {"time_s": lines[first]["time_s"]})


def phases_out_of_order(lines: list[dict[str, Any]]) -> None:
    first, second = node_of(lines, "actor_generation@1.0"), node_of(lines, "actor_generation@1.1")
    for line in lines:
        if line.get("node") in (first, second) and line["record"] in ("start", "end"):
            line["node"] = second if line["node"] == first else first


@pytest.mark.slow
@pytest.mark.parametrize(
    ("tamper", "rule"),
    [
        (one_row_less, "V10"),
        (what_the_rows_weigh, "V10"),
        (another_phase, "V5"),
        (no_phase, "V5"),
        (a_phase_is_missing, "V4"),
        (assessed_before_it_arrived, "V8"),
        (phases_out_of_order, "V7"),
    ],
)
def test_a_tampered_trace_is_refused(tamper: Callable[[Any], None], rule: str, sessions: Any, tmp_path: Path) -> None:
    plan, folder, _ = sessions["phases"]
    lines = copy.deepcopy(lines_of(folder / TRACE_FILE))
    tamper(lines)
    path = tmp_path / TRACE_FILE
    path.write_bytes(forged(lines))
    assert rule in {found.id for found in verify_plan(plan, path).counts}
