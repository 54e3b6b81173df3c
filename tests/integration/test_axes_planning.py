"""Plans that choose among the axes beyond dp, pp and tp: from the experiment to the report."""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rpeg_core.errors import ExperimentError, UnknownKeyError
from rpeg_core.passes.score import usable_bytes
from rpeg_core.planning.plan import load_plan
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.problem import Problem, ReadableEvaluator
from rpeg_core.planning.search import Progress
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.execution import Precision, Recompute
from rpeg_core.spec.experiment import parse_experiment

SMALL_MIXTURE = {
    "layers": 4,
    "hidden": 512,
    "heads": 8,
    "vocab": 4096,
    "moe": {"experts": 8, "active_experts": 2, "expert_ffn": 1024},
}


def grpo(model: object, **sections: Any) -> dict[str, Any]:
    return {
        "algorithm": "grpo",
        "models": {"actor": {"config": model}, "reference": {"same_as": "actor"}},
        "workload": {"prompts": 16, "rollouts_per_prompt": 8, "prompt_tokens": 256, "response_tokens": 768},
        "cluster": {"hardware": "h100", "nodes_per_rack": 1, "gpus_per_node": 8},
        "settings": {"grpo": {"reward_seconds_per_sample": 0.001}},
        **sections,
    }


def problem_of(document: dict[str, Any]) -> Problem:
    return Planner(parse_experiment(document), Registry()).problem()


def choices(problem: Problem, operator: str):
    """The candidates of an operator in the first structure, and the memory that each needs alone."""
    structure = problem.structures[0]
    candidates = structure.candidates[structure.operators.index(operator)]
    alone = structure.book.operators[operator].isolated[candidates.layout]
    return [candidates.assignment(i) for i in range(len(candidates))], alone


# What an axis makes possible


def test_expert_parallelism_makes_a_mixture_fit() -> None:
    """Qwen3-30B-A3B holds 61 GB of 16-bit weights, 57 GB of them experts: with tp 1 and pp 1 no H100 has room for them
    and for its part of 12 bytes of state, but for an eighth of the experts."""
    few = {"prompts": 8, "rollouts_per_prompt": 4, "prompt_tokens": 128, "response_tokens": 384}
    pin = {"actor_training": {"tp": 1, "pp": 1}}
    without = problem_of(grpo("Qwen/Qwen3-30B-A3B", pin=pin, workload=few))
    assignments, alone = choices(without, "actor_training")
    assert (alone > usable_bytes(80e9)).all()
    spread = problem_of(grpo("Qwen/Qwen3-30B-A3B", pin=pin, workload=few, space={"training": {"ep": [1, 8]}}))
    assignments, alone = choices(spread, "actor_training")
    assert {(a.layout.data, a.layout.expert) for a in assignments} == {(8, 8)}
    assert (alone <= usable_bytes(80e9)).all()


def long_sequences(nodes: int, memory_gb: float, **training: Any) -> dict[str, Any]:
    """Case 17 of the public cases: Qwen 1.5B, sequences of 32,768 tokens, tp 1, one sequence at a time.

    Without a pipeline a microbatch is all sequences of a replica (P4), so that there are as many replicas as sequences.
    The GPU is not stated there.
    """
    cluster = {"hardware": "h100", "nodes_per_rack": nodes, "gpus_per_node": 8, "memory_gb": memory_gb}
    return {
        "algorithm": "ppo",
        "models": {
            "actor": {"config": "Qwen/Qwen2.5-1.5B"},
            **{role: {"same_as": "actor"} for role in ("critic", "reference", "reward")},
        },
        "workload": {"prompts": 128, "prompt_tokens": 768, "response_tokens": 32000},
        "cluster": cluster,
        "pin": {"actor_training": {"tp": 1, "pp": 1}},
        "space": {"actor_training": {"cp": [1, 2, 4], **training}},
    }


@pytest.mark.parametrize(
    ("memory_gb", "training"),
    [
        (48, {"recompute": "none"}),  # the plan's own subset: 2 bytes and 4 of FP32 per logit
        (80, {"recompute": "none", "framework": "torchtitan"}),  # losses of PyTorch operators: 14 bytes per logit
    ],
)
def test_long_sequences_fit_with_context_parallelism_of_four_and_not_of_two(memory_gb, training) -> None:
    for nodes in (64, 128):  # more nodes do not help: there are no more sequences to spread over them
        assignments, alone = choices(problem_of(long_sequences(nodes, memory_gb, **training)), "actor_training")
        fitting = {
            a.layout.context
            for a, bytes_ in zip(assignments, alone, strict=True)
            if bytes_ <= usable_bytes(memory_gb * 1e9)
        }
        assert fitting == {4}


def test_recomputing_less_is_faster_and_holds_more() -> None:
    """Megatron-LM's order: none, selective, full in time, the reverse in memory (arXiv:2205.05198, table 4)."""
    space = {"training": {"recompute": ["none", "selective", "full"]}}
    problem = problem_of(grpo("Qwen/Qwen2.5-1.5B", space=space))
    structure = problem.structures[0]
    v = structure.operators.index("actor_training")
    candidates, costs = structure.candidates[v], structure.book.operators["actor_training"]
    seconds = structure.seconds(v)
    alike: dict[tuple[Any, ...], dict[Recompute, tuple[float, float]]] = {}
    for i in range(len(candidates)):
        a = candidates.assignment(i)
        values = float(seconds[i]), float(costs.isolated[candidates.layout[i]])
        alike.setdefault((a.allocation, a.layout, a.microbatches), {})[a.mode.recompute] = values
    compared = [found for found in alike.values() if len(found) == 3]
    assert len(compared) > 10
    for found in compared:
        none, selective, full = (found[mode] for mode in (Recompute.NONE, Recompute.SELECTIVE, Recompute.FULL))
        assert none[0] < selective[0] < full[0]
        assert none[1] >= selective[1] > full[1]


# The search


def two_gpus() -> dict[str, Any]:
    """Everything but generation and training is pinned, so that every configuration can be evaluated."""
    pins = {
        "reference_inference": {"gpus": "0-1", "dp": 2, "pp": 1, "tp": 1},
        "reward_function": {"gpus": "0-1", "dp": 2},
        "actor_training": {"pp": 1},
        "actor_generation": {"pp": 1},
    }
    space = {
        "training": {"cp": [1, 2], "ep": [1, 2], "sequence_parallel": [False, True], "recompute": ["none", "full"]},
        "generation": {"ep": [1, 2], "precision": ["bf16", "fp8"]},
    }
    cluster = {"hardware": "h100", "nodes_per_rack": 1, "gpus_per_node": 2}
    return grpo(SMALL_MIXTURE, pin=pins, space=space, cluster=cluster, objective={"horizon_steps": 3})


@pytest.mark.parametrize("strategy", ["exhaustive", "annealing"])
def test_the_search_finds_the_best_of_all_configurations(strategy) -> None:
    planner = Planner(parse_experiment({**two_gpus(), "search": {"evaluations": 3000}}), Registry())
    problem = planner.problem()
    best, spread = 0.0, set()
    for structure in problem.structures:
        evaluator = ReadableEvaluator(structure)
        for choice in itertools.product(*(range(len(c)) for c in structure.candidates)):
            found = evaluator.evaluate(choice)
            if found.peak_ratio <= 1.0:
                best = max(best, found.tokens_per_s)
            spread.add((structure.plan(choice)["actor_training"].layout, structure.plan(choice)["actor_training"].mode))
    assert len(spread) >= 12
    result = planner.search(problem, Progress(), strategy)
    assert result.evaluation.tokens_per_s == best
    chosen = problem.structures[result.best.structure].plan(result.best.choice)
    assert chosen["actor_generation"].mode.precision is Precision.FP8


# Documents and reports

SPACE = {
    "training": {"cp": [1, 2], "sequence_parallel": [False, True], "recompute": ["none", "full"]},
    "generation": {"precision": ["bf16", "fp8"], "framework": "vllm"},
}


@pytest.fixture
def planned(rpeg, experiment):
    """A pinned plan with two axes, and one left to the search."""
    cluster = {"hardware": "h100", "racks": 1, "nodes_per_rack": 2, "gpus_per_node": 8}
    pin = {
        "actor_training": {"gpus": "0-15", "dp": 4, "pp": 1, "tp": 2, "cp": 2, "sequence_parallel": True},
        "actor_generation": {"precision": "fp8"},
    }
    path = experiment(cluster=cluster, pin=pin, space=SPACE)
    ran = rpeg("predict", path, "-o", "plan.json", "--evaluations", 300)
    assert ran.code == 0, ran.err
    return ran


def test_a_plan_keeps_its_axes(rpeg, planned) -> None:
    document = json.loads(Path("plan.json").read_text())
    training = document["plan"]["actor_training"]
    assert {key: training[key] for key in ("cp", "sequence_parallel")} == {"cp": 2, "sequence_parallel": True}
    assert training["recompute"] in ("none", "full")
    assert document["plan"]["actor_generation"]["precision"] == "fp8"
    assert document["experiment"]["space"]["generation"] == {"precision": ["bf16", "fp8"], "framework": "vllm"}
    plan = load_plan("plan.json")
    assert plan.digest == document["digest"]
    again = rpeg("predict", "plan.json", "--json")
    assert (again.code, json.loads(again.out)["differences"]) == (0, [])


def test_the_tables_show_axes_where_there_are_any(rpeg, planned) -> None:
    table = planned.table("plan")
    assert table[0] == ["operator", "GPUs", "dp", "pp", "tp", "cp", "microbatches", "time"]
    row = dict(zip(table[0], next(row for row in table if row[0] == "actor_training"), strict=True))
    assert (row["dp"], row["tp"], row["cp"]) == ("4", "2", "2")
    execution = planned.table("execution")
    assert execution[0] == ["operator", "sequence parallel", "recompute", "precision", "framework"]
    rows = {row[0]: row for row in execution[1:]}
    assert rows["actor_training"][1] == "yes"
    assert rows["actor_generation"][3:] == ["fp8", "vllm"]
    assert "reference_inference" not in rows


def test_explain_says_what_each_axis_bought(rpeg, planned) -> None:
    """Against the plan with the pin's own value changed, which ``predict`` prices too."""
    document = json.loads(rpeg("explain", "plan.json", "--json").out)
    said = {choice["chosen"]: choice for choice in document["axis_choices"]}
    assert {
        "cp=2 of actor_training",
        "sequence parallelism of actor_training",
        "precision fp8 of actor_generation",
    } <= set(said)
    text = rpeg("explain", "plan.json").out
    for choice in said.values():
        assert f"- {choice['sentence']}" in text
    slower = said["precision fp8 of actor_generation"]
    assert slower["other"] == "bf16"
    plan = json.loads(Path("plan.json").read_text())
    plan["plan"]["actor_generation"].pop("precision")
    experiment = {**plan["experiment"], "pin": plan["plan"], "space": {"generation": {"framework": "vllm"}}}
    staleness = [plan["structure"]["staleness"]["actor"]]
    Path("other.yaml").write_text(json.dumps({**experiment, "structure": {"staleness": staleness}}))
    other = json.loads(rpeg("predict", "other.yaml", "--json").out)
    assert other["plan"]["prediction"]["step_s"] == pytest.approx(slower["other_step_s"])
    assert slower["other_step_s"] > slower["step_s"]


def test_explain_says_why_the_default_of_an_axis_is_not_legal(rpeg) -> None:
    """4 prompts cannot be spread over 8 replicas, and 4 replicas of one GPU have no 8 ranks for the experts."""
    pin = {
        "actor_training": {"gpus": "0-7", "dp": 4, "pp": 1, "tp": 1, "cp": 2, "ep": 8},
        "actor_generation": {"gpus": "0-3", "dp": 4, "pp": 1, "tp": 1},
        "reference_inference": {"gpus": "0-3", "dp": 4, "pp": 1, "tp": 1},
        "reward_function": {"gpus": "0-3", "dp": 4},
    }
    workload = {"prompts": 4, "rollouts_per_prompt": 8, "prompt_tokens": 256, "response_tokens": 768}
    Path("few.yaml").write_text(json.dumps(grpo(SMALL_MIXTURE, pin=pin, workload=workload)))
    assert rpeg("predict", "few.yaml", "-o", "plan.json").code == 0
    context, expert = json.loads(rpeg("explain", "plan.json", "--json").out)["axis_choices"]
    assert context["sentence"] == (
        "cp=2 of actor_training: cp=1 is not legal in these places: P3: dp=8 does not divide the 4 prompts of a step"
    )
    assert (expert["chosen"], expert["other"]) == ("ep=8 of actor_training", "ep=1")


def test_without_a_space_plans_and_experiments_are_what_they_were(rpeg, experiment) -> None:
    pin = {"actor_training": {"gpus": "0-31", "dp": 8, "pp": 1, "tp": 4, "microbatches": 1}}
    ran = rpeg("predict", experiment(pin=pin), "-o", "plan.json", "--evaluations", 300)
    assert ran.table("plan")[0] == ["operator", "GPUs", "dp", "pp", "tp", "microbatches", "time"]
    assert "execution" not in ran.out.splitlines()
    document = json.loads(Path("plan.json").read_text())
    assert "space" not in document["experiment"]
    for entry in document["plan"].values():
        assert set(entry) == {"gpus", "dp", "pp", "tp", "microbatches"}
    assert "axis_choices" not in json.loads(rpeg("explain", "plan.json", "--json").out)


# What is refused

REFUSED = [
    (
        {"space": {"training": {"framework": "vllm"}}},
        ExperimentError,
        "space.training.framework is 'vllm'",
        "allowed for training with the selected cost terms: automodel, ",
    ),
    (
        {"space": {"actor_trainin": {"cp": [2]}}},
        UnknownKeyError,
        "space.actor_trainin names no role and no operator of 'grpo'",
        "allowed: generation, inference, training, actor_generation",
    ),
    (
        {"costs": ["paper"], "space": {"training": {"cp": [1, 2]}}},
        ExperimentError,
        "space names cp, which some of the selected cost terms do not know",
        "they would give every value the same price: paper.activations",
    ),
    (
        {"costs": ["paper"], "pin": {"actor_training": {"recompute": "none"}}},
        ExperimentError,
        "pin names recompute, which some of the selected cost terms do not know",
        "they would give every value the same price: paper.activations",
    ),
    (
        {"space": {"actor_training": {"ep": [8]}}},
        ExperimentError,
        "space.actor_training.ep has no value that operator 'actor_training' can have",
        "ep: Qwen/Qwen2.5-1.5B is no mixture of experts",
    ),
]


@pytest.mark.parametrize(("sections", "error", "what", "fact"), REFUSED, ids=lambda v: str(v)[:30])
def test_what_cannot_be_is_refused_with_what_is_allowed(sections, error, what, fact) -> None:
    with pytest.raises(error) as caught:
        problem_of(grpo("Qwen/Qwen2.5-1.5B", **sections))
    assert caught.value.what == what
    assert caught.value.facts[0].startswith(fact)


def test_paper_accepts_the_default_of_an_axis() -> None:
    problem_of(grpo("Qwen/Qwen2.5-1.5B", costs=["paper"], space={"training": {"cp": [1]}}))


def test_a_precision_that_the_gpu_does_not_have_is_said_and_left_out() -> None:
    document = grpo("Qwen/Qwen2.5-1.5B", space={"training": {"precision": ["bf16", "fp8"]}})
    document["cluster"]["hardware"] = "a100-80gb"
    planner = Planner(parse_experiment(document), Registry())
    assert "space.training.precision: a100-80gb has no peak of fp8 matrix products; it is left out" in planner.remarks
    modes = planner.problem().structures[0].book.operators["actor_training"].layouts.modes
    assert {mode.precision for mode in modes} == {Precision.BF16}
    document["space"]["training"]["precision"] = ["fp8"]
    with pytest.raises(ExperimentError):
        Planner(parse_experiment(document), Registry()).problem()


def test_a_framework_prices_with_its_own_coefficients() -> None:
    """vLLM hides nothing of what it takes between two token steps, the plan's own subset counts none of it."""
    plain, vllm = (
        problem_of(grpo("Qwen/Qwen2.5-1.5B", space=space))
        for space in ({}, {"generation": {"framework": "vllm"}, "training": {"framework": "megatron-bridge"}})
    )
    seconds = [p.structures[0].book.operators["actor_generation"].whole.total for p in (plain, vllm)]
    assert len(seconds[0]) == len(seconds[1])
    assert not np.allclose(*seconds)
    reference = [p.structures[0].book.operators["reference_inference"].whole.total for p in (plain, vllm)]
    assert np.array_equal(*reference)
