"""``rpeg verify`` on traces of ``rpeg run``: what it prints, refuses, and its exit codes."""

from __future__ import annotations

import json
import re
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

from rpeg_core.planning.plan import load_plan
from rpeg_core.runtime.trace import Ended, Stopped, Trace

STEPS = 4
LENGTHS = [[0.5, 256], [0.85, 512], [1.0, 1024]]
SMALL = {"prompts": 64, "rollouts_per_prompt": 8, "prompt_tokens": 512, "response_tokens": 1024}
MODEL = "meta-llama/Llama-3.1-8B"
THREE = {"actor": {"config": MODEL}, "reward": {"config": MODEL}, "reference": {"same_as": "actor"}}
PAIR = {"actor": {"config": MODEL}, "reference": {"same_as": "actor"}}


@pytest.fixture
def traced(rpeg: Callable[..., Any], experiment: Callable[..., Path]) -> Callable[..., str]:
    """Plan an experiment and run it; returns the digest of the plan. The files are plan.json and run.jsonl."""

    def make(*settings: str, models: dict[str, Any] | None = None, **sections: Any) -> str:
        path = experiment(**sections)
        if models is not None:  # instead of those of PPO
            path.write_text(yaml.safe_dump({**yaml.safe_load(path.read_text()), "models": models}))
        assert rpeg("plan", path).code == 0
        assert rpeg("run", "plan.json", "--steps", STEPS, "--trace", "run.jsonl", *settings).code == 0
        return load_plan("plan.json").digest

    return make


@pytest.mark.parametrize(
    "sections",
    [
        {"structure": {"staleness": [0]}},
        {"structure": {"staleness": [1]}, "search": {"strategy": "concurrent"}},
        {"structure": {"staleness": [1], "actor_critic_sharing": [True]}, "search": {"strategy": "concurrent"}},
        {"structure": {"staleness": [0], "actor_critic_sharing": [True]}},
        {
            "algorithm": "grpo",
            "models": THREE,
            "workload": {**SMALL, "response_lengths": LENGTHS},
            "structure": {"staleness": [1]},
            "search": {"strategy": "concurrent"},
        },
        {"algorithm": "grpo", "models": THREE, "workload": SMALL},
        {
            "algorithm": "dpo",
            "models": PAIR,
            "workload": {**SMALL, "rollouts_per_prompt": 2},
            "search": {"strategy": "concurrent"},
        },
    ],
    ids=["ppo", "ppo stale", "shared stale", "shared", "grpo phases", "grpo greedy", "dpo"],
)
def test_every_run_of_the_simulator_is_accepted(
    rpeg: Callable[..., Any], traced: Callable[..., str], sections: dict[str, Any]
) -> None:
    traced("--set", "simulator.noise=0.2", **sections)
    ran = rpeg("verify", "plan.json", "run.jsonl")
    trace = Trace.read("run.jsonl")
    nodes = sum(isinstance(record, Ended) for record in trace.records)
    assert (ran.code, ran.err) == (0, "")
    extent = f"{STEPS} steps, {nodes} nodes, {len(trace.records) + 2} records"
    assert ran.out == f"run.jsonl: what ran is what plan.json planned: {extent}\n"


def test_a_changed_trace_is_refused_with_the_rule_and_the_line(
    rpeg: Callable[..., Any], traced: Callable[..., str]
) -> None:
    traced(structure={"staleness": [1]})
    path = Path("run.jsonl")
    lines = path.read_text().splitlines(keepends=True)
    number = next(i for i, line in enumerate(lines) if '"microbatches": 1' in line)
    label = json.loads(lines[number])["label"]
    lines[number] = lines[number].replace('"microbatches": 1', '"microbatches": 8', 1)
    path.write_text("".join(lines))
    ran = rpeg("verify", "plan.json", "run.jsonl")
    assert (ran.code, ran.err) == (1, "")
    assert ran.out == textwrap.dedent(f"""\
        run.jsonl: refused
        V2 seal: No line was changed, added, removed or moved after it was written.
          line {number + 1}: does not follow from the lines before it; it or its neighbour was changed
        V5 binding: An operator runs on the planned GPUs, with the planned degrees and microbatches, in its step and length phase.
          line {number + 1}: {label}: microbatches: 8 in the trace, 1 planned
        """)  # fmt: skip  # noqa: E501
    document = json.loads(rpeg("verify", "plan.json", "run.jsonl", "--json").out)
    assert (document["accepted"], document["broken"]) == (False, {"V2": 1, "V5": 1})
    assert document["findings"][1] == {
        "rule": "V5",
        "name": "binding",
        "node": label,
        "lines": [number + 1],
        "message": "microbatches: 8 in the trace, 1 planned",
    }
    refused = rpeg("verify", "run.jsonl", "run.jsonl")
    assert (refused.code, refused.err.splitlines()[0]) == (4, "error[plan-file]: run.jsonl is not a JSON document")


def test_a_stopped_run_says_how_far_it_went(rpeg: Callable[..., Any], traced: Callable[..., str]) -> None:
    digest = traced(structure={"staleness": [0]})
    trace = Trace.read("run.jsonl")
    training = [i for i, r in enumerate(trace.records) if getattr(r, "label", None) == "actor_training@1"]
    records = trace.records[: training[0] + 3]  # dispatch, bind, start
    Trace(trace.header, (*records, Stopped(records[-1].time_s, "Ctrl-C", 1))).write("run.jsonl")
    ran = rpeg("verify", "plan.json", "run.jsonl")
    assert ran.code == 0
    extent = rf"stopped \(Ctrl-C\) with 1 of {STEPS} steps complete, \d+ nodes, {len(records) + 3} records"
    running = r"not finished: actor_training@1\b.*\n"
    assert re.fullmatch(f"run.jsonl: what ran is what plan.json planned: {extent}; {running}", ran.out)
    document = json.loads(rpeg("verify", "plan.json", "run.jsonl", "--json").out)
    assert (document["plan"], document["accepted"], document["complete"]) == (digest, True, False)
    assert (document["stopped"], document["steps_complete"], document["steps"]) == ("Ctrl-C", 1, STEPS)
    assert "actor_training@1" in document["unfinished"]


def test_a_trace_of_another_plan_is_refused(rpeg: Callable[..., Any], traced: Callable[..., str]) -> None:
    first = traced(structure={"staleness": [0]})
    Path("run.jsonl").rename("first.jsonl")
    second = traced(structure={"staleness": [1]})
    ran = rpeg("verify", "plan.json", "first.jsonl")
    assert ran.code == 1
    assert f"  line 1: names plan {first}; this one is {second}\n" in ran.out


def test_files_that_are_no_plan_or_no_trace(rpeg: Callable[..., Any], traced: Callable[..., str]) -> None:
    traced()
    missing = rpeg("verify", "plan.json", "missing.jsonl")
    assert (missing.code, missing.out) == (4, "")
    assert missing.err == "error[trace-file]: cannot read missing.jsonl\n  No such file or directory\n"
    Path("plan.json").write_text(Path("plan.json").read_text().replace('"seed": 0', '"seed": 1'))
    changed = rpeg("verify", "plan.json", "run.jsonl")
    assert changed.code == 4
    assert changed.err.startswith("error[plan-file]: plan.json was changed after it was written\n")
