"""``rpeg predict``: a pinned layout, a partly pinned one, and a plan file evaluated again."""

from __future__ import annotations

import json
import re
import signal
from pathlib import Path

import attrs
import pytest
import yaml

from rpeg_core.planning.plan import load_plan

WHOLE = {"gpus": "0-31", "dp": 32, "pp": 1, "tp": 1, "microbatches": 1}
OPERATORS = (
    "actor_generation",
    "reference_inference",
    "reward_inference",
    "critic_inference",
    "actor_training",
    "critic_training",
)


def pinned(**changed: dict[str, object]) -> dict[str, dict[str, object]]:
    return {name: changed.get(name, WHOLE) for name in OPERATORS}


def test_a_complete_pin_needs_no_search(rpeg, experiment) -> None:
    generation = {"gpus": "0-31", "dp": 8, "pp": 1, "tp": 4, "microbatches": 1}
    path = experiment(pin=pinned(actor_generation=generation), search={"strategy": "not-installed"})
    ran = rpeg("predict", path, "-o", "mine.json")
    assert (ran.code, ran.err) == (0, "")
    assert ran.out.splitlines()[1].startswith("fits: ")
    plan = load_plan("mine.json")
    assert {name: pin.document() for name, pin in plan.experiment.pins.items()} == pinned(actor_generation=generation)
    assert ran.table("plan")[1][1:6] == ["0-31", "8", "1", "4", "1"]
    step = sum(sum(phases) for phases in plan.prediction.operator_s.values()) + plan.prediction.transfers_s
    assert plan.prediction.step_s == pytest.approx(step, rel=0.02)  # everything on all GPUs runs one after another


def test_a_layout_that_does_not_fit(rpeg, experiment) -> None:
    alone = {"gpus": "0", "dp": 1, "pp": 1, "tp": 1, "microbatches": 1}
    ran = rpeg("predict", experiment(pin=pinned(actor_training=alone)))
    lines = ran.err.splitlines()
    assert ran.code == 1
    assert ran.out.splitlines()[1].startswith("does not fit: ")
    rows = {row[0]: row for row in ran.table("peak memory per GPU")[1:]}
    assert list(rows) == ["0", "1-31"]
    assert lines[0] == "error[no-feasible-plan]: this plan does not fit"
    assert re.fullmatch(
        r"  GPU 0 needs [\d,.]+ GB of 91.8 GB while actor_training computes gradients: "
        r"actor_training activations .*",
        lines[1],
    )


def test_the_same_layout_as_json(rpeg, experiment) -> None:
    alone = {"gpus": "0", "dp": 1, "pp": 1, "tp": 1, "microbatches": 1}
    document = json.loads(rpeg("predict", experiment(pin=pinned(actor_training=alone)), "--json").out)
    assert (document["schema"], document["feasible"]) == (1, False)
    segment = document["memory"][0]
    assert sum(term["bytes"] for term in segment["terms"]) == pytest.approx(segment["peak_bytes"])
    assert {"remedies", "tried_in_vain"} <= set(document)


def test_the_best_structure_of_a_complete_pin_is_predicted(rpeg, experiment) -> None:
    rpeg("predict", experiment(pin=pinned(), structure={"staleness": [0, 1]}), "-o", "both.json")
    rpeg("predict", experiment(pin=pinned(), structure={"staleness": [0]}), "-o", "sync.json")
    assert load_plan("both.json").prediction.tokens_per_s >= load_plan("sync.json").prediction.tokens_per_s


def test_what_is_not_pinned_is_searched(rpeg, experiment) -> None:
    ran = rpeg("predict", experiment(pin={"actor_training": {"gpus": "0-15"}}), "-o", "mine.json")
    assert ran.code == 0
    assert re.fullmatch(r"what is not pinned was searched; \w+: 1 evaluation in [\d.]+ (ms|µs)\n", ran.err)
    assert str(load_plan("mine.json").assignments["actor_training"].allocation) == "0-15"


@pytest.fixture
def plan(rpeg, experiment) -> Path:
    assert rpeg("plan", experiment()).code == 0
    return Path("plan.json")


def test_a_plan_file_is_evaluated_again(rpeg, plan) -> None:
    ran = rpeg("predict", plan, "--json")
    document = json.loads(ran.out)
    assert (ran.code, ran.err, document["differences"]) == (0, "", [])
    assert document["plan"]["prediction"] == json.loads(plan.read_text())["prediction"]


def test_a_plan_made_by_other_versions_says_so(rpeg, plan) -> None:
    made = load_plan(plan)
    older = tuple(attrs.evolve(use, version="0.0.9") if use.kind == "hardware" else use for use in made.plugins)
    prediction = attrs.evolve(made.prediction, tokens_per_s=made.prediction.tokens_per_s / 2)
    attrs.evolve(made, plugins=older, prediction=prediction, rpeg_version="0.0.1").save("old.json")
    warnings = rpeg("predict", "old.json").err.splitlines()
    assert re.fullmatch(r"warning: the plan was made with rpeg-core 0\.0\.1, installed is \S+", warnings[0])
    assert re.fullmatch(
        r"warning: hardware 'gh200' came from rpeg-plugin-gh200 0\.0\.9, installed is rpeg-plugin-gh200 \S+",
        warnings[1],
    )
    assert re.fullmatch(r"warning: tokens_per_s was predicted as \d+\.?\d*, is now \d+\.?\d*", warnings[2])
    assert len(warnings) == 3


def test_a_plan_of_a_missing_plugin_is_an_error(rpeg, plan, monkeypatch) -> None:
    monkeypatch.setenv("RPEG_DISABLE_PLUGINS", "gh200")
    ran = rpeg("predict", plan)
    assert ran.code == 3
    assert ran.err.startswith("error[plugin]: hardware 'gh200' cannot be used\n")


def test_a_searched_plan_predicts_after_its_strategy_is_gone(rpeg, plan, monkeypatch) -> None:
    monkeypatch.setenv("RPEG_DISABLE_PLUGINS", "heuristics")
    ran = rpeg("predict", plan)
    assert (ran.code, ran.err) == (0, "")


def test_host_memory_is_said_when_the_cluster_has_a_number(rpeg, experiment) -> None:
    """PPO on 32 GPUs, four per node: actor and critic, 16 bytes per parameter, an eighth of them in each node."""
    base = {"pin": pinned(), "search": {"strategy": "not-installed"}}
    assert "host memory" not in rpeg("predict", experiment(**base)).out
    path = experiment(**base, cluster={"host_memory_gb": 2})
    [line] = [line for line in rpeg("predict", path).out.splitlines() if line.startswith("host memory: ")]
    document = json.loads(rpeg("predict", path, "--json").out)["host_memory"]
    states = {state["operator"]: state for state in document["states"]}
    assert set(states) == {"actor_training", "critic_training"}
    per_process = sum(state["process_bytes"] for state in states.values())
    assert document["node_bytes"] == pytest.approx(4 * per_process)
    assert document["fits"] is False
    assert line.endswith(f"take {document['node_bytes'] / 1e9:,.1f} GB of a node's 2.0 GB, more than it has")


def test_memory_over_a_step_is_shown_and_in_the_document(rpeg, experiment) -> None:
    generation = {"gpus": "0-31", "dp": 8, "pp": 1, "tp": 4, "microbatches": 1}
    path = experiment(pin=pinned(actor_generation=generation))
    ran, document = rpeg("predict", path), json.loads(rpeg("predict", path, "--json").out)
    rows = ran.table("memory over a step")
    assert rows[0] == ["GPUs", "operator", "moment", "step 1", "later", "share"]
    kinds = {(row[1], row[2]) for row in rows[1:]}
    assert {(name, "runs") for name in OPERATORS if not name.endswith("training")} <= kinds
    assert {(f"{model}_training", what) for model in ("actor", "critic") for what in ("computes gradients",)} <= kinds
    assert ("actor_generation", "gets new weights") in kinds
    assert ("critic_inference", "gets new weights") not in kinds, "served in the place where it is trained"
    peaks = {segment["gpus"]: segment["peak_bytes"] for segment in document["memory"]}
    for gpus, peak in peaks.items():
        assert max(moment["bytes"] for moment in document["moments"] if moment["gpus"] == gpus) == peak
    (first,) = [line for line in ran.out.splitlines() if line.startswith("step 1 peaks at ")]
    assert first.endswith("a one-step smoke test proves nothing")
    assert any(line.startswith("reserved: 10% of a GPU, 10.2 GB: CUDA context ") for line in ran.out.splitlines())
    assert any(line.startswith("actor_generation on GPUs 0-31: ") for line in ran.out.splitlines())


def test_little_room_is_said_with_what_gives_more(rpeg, experiment) -> None:
    fits = json.loads(rpeg("predict", experiment(pin=pinned()), "--json").out)
    assert "headroom" not in fits
    peak = max(segment["peak_bytes"] for segment in fits["memory"])
    tight = {"memory_gb": 1.03 * peak / 0.9 / 1e9}
    path = experiment(pin=pinned(), cluster=tight)
    ran, document = rpeg("predict", path), json.loads(rpeg("predict", path, "--json").out)
    assert ran.code == 0
    assert "little room: the fullest GPU takes 97% of what is usable" in ran.out
    assert document["headroom"]["compared_with"]["is"] == "the plan"
    for remedy in document["headroom"]["remedies"]:
        assert remedy["peak_bytes"] <= 0.9 * remedy["usable_bytes"]
        assert remedy["key"].partition(".")[0] != "cluster"


def test_a_pin_of_a_further_axis_is_compared_with_what_has_none(rpeg, experiment) -> None:
    """``recompute`` is in the present pin only: the change that gives it up says so."""
    wasteful = {**WHOLE, "recompute": "none"}
    ran = rpeg("predict", experiment(pin=pinned(actor_training=wasteful, critic_training=wasteful)))
    assert ran.code == 1
    assert re.search(r"\w+_training [^;:]*recompute none -> [^;:]*recompute left out", ran.err)


def test_pins_that_are_given_up_leave_what_space_says(rpeg, experiment) -> None:
    """DPO with 132k tokens a sequence, everything pinned to tp 8: on these GPUs it fits with context parallelism."""
    on_all = {"gpus": "0-31", "dp": 4, "pp": 1, "tp": 8}
    pins = dict.fromkeys(("actor_inference", "reference_inference", "actor_training"), on_all)
    long = {
        "algorithm": "dpo",
        "workload": {"prompts": 4, "rollouts_per_prompt": 2, "prompt_tokens": 1024, "response_tokens": 131072},
        "cluster": {"hardware": "h100", "racks": 1, "nodes_per_rack": 4, "gpus_per_node": 8},
        "space": {name: {"cp": [1, 2, 4, 8], "sequence_parallel": [False]} for name in ("training", "inference")},
    }
    path = experiment(pin=pins, **long)
    asked = yaml.safe_load(path.read_text())
    asked["models"] = {name: asked["models"][name] for name in ("actor", "reference")}
    path.write_text(yaml.safe_dump(asked))
    document = json.loads(rpeg("predict", path, "--json").out)
    assert not document["feasible"]
    values = [r["value"] for r in document["remedies"] if r["key"] == "pin.actor_training"]
    assert values, document["tried_in_vain"]
    assert set(re.findall(r"cp (\d+)", values[0])) <= {"2", "4", "8"}
    given = {key: int(value) for key, value in (part.split(" ") for part in values[0].split(", "))}
    asked["pin"] = {**pins, "actor_training": {**on_all, **given}}
    path.write_text(yaml.safe_dump(asked))
    assert rpeg("predict", path).code == 0


def test_explain_lists_what_would_make_a_plan_fit(rpeg, experiment) -> None:
    alone = {"gpus": "0", "dp": 1, "pp": 1, "tp": 1, "microbatches": 1}
    assert rpeg("predict", experiment(pin=pinned(actor_training=alone)), "-o", "full.json").code == 1
    ran = rpeg("explain", "full.json")
    assert ran.code == 0
    assert "this plan does not fit\ncheapest changes:\n" in ran.out


def test_a_layout_that_the_backend_refuses_is_said_when_planning(rpeg, experiment) -> None:
    """P1 lets tp=4 replicate 2 KV heads; the backend divides them."""
    pytest.importorskip("rpeg_plugin_megatron")
    model = {"config": {"layers": 2, "hidden": 64, "heads": 4, "kv_heads": 2, "ffn": 128, "vocab": 1000}}
    models = {"actor": model, "critic": model, "reward": model, "reference": {"same_as": "actor"}}
    generation = {"gpus": "0-31", "dp": 8, "pp": 1, "tp": 4, "microbatches": 1}
    ran = rpeg("predict", experiment(models=models, pin=pinned(actor_generation=generation)))
    assert ran.code == 0
    (warning,) = [line for line in ran.err.splitlines() if line.startswith("warning: backend megatron")]
    assert warning == (
        "warning: backend megatron cannot run actor_generation: tp=4 does not divide the 2 KV heads of actor"
        "  [backend:megatron]"
    )


def test_ctrl_c_ends_the_tries_and_not_the_answer(rpeg, experiment, monkeypatch) -> None:
    from rpeg_core.cli import planning

    tried = planning.find_remedies

    def interrupted(*arguments, **options):
        signal.raise_signal(signal.SIGINT)
        return tried(*arguments, **options)

    monkeypatch.setattr(planning, "find_remedies", interrupted)
    alone = {"gpus": "0", "dp": 1, "pp": 1, "tp": 1, "microbatches": 1}
    ran = rpeg("predict", experiment(pin=pinned(actor_training=alone)))
    lines = ran.err.splitlines()
    assert ran.code == 1
    assert lines[:2] == ["stopping; Ctrl-C again gives up", "error[no-feasible-plan]: this plan does not fit"]
    assert lines[-1].startswith("  stopped before changing pin")


STEPS_OF_NEMO_RL = {"training": "nemo-rl", "inference": "nemo-rl", "generation": "vllm"}


@pytest.mark.parametrize(
    ("frameworks", "factor"),
    [
        ({}, 1.63),
        ({"training": "nemo-rl"}, 1.63),
        (STEPS_OF_NEMO_RL, 0.99),
        ({"training": "trl", "inference": "trl", "generation": "vllm"}, 1.63),
    ],
)
def test_the_error_of_whole_steps_is_that_of_frameworks_only_where_those_were_measured(
    rpeg, experiment, frameworks, factor
) -> None:
    """Published steps took 1.63 times their operators as the plan's own coefficients price them, and 0.99 times as
    NeMo-RL's and vLLM's do (benchmarks/derive_errors.py); of other frameworks there is no published step."""
    space = {role: {"framework": name} for role, name in frameworks.items()}
    ran = rpeg("predict", experiment(pin=pinned(), **({"space": space} if space else {})))
    (line,) = [line for line in ran.out.splitlines() if line.startswith("the interval of the step counts in")]
    assert f"took ×{factor} of their operators' time" in line


def test_groups_of_context_and_expert_parallelism_are_communicators_too(rpeg, experiment) -> None:
    """Four GPUs, cp 2 in training: the world, a context group and a group of the four copies."""
    cluster = {"racks": 1, "nodes_per_rack": 1, "gpus_per_node": 4, "memory_gb": 1000}
    alone = {"gpus": "0-3", "dp": 4, "pp": 1, "tp": 1, "microbatches": 1}
    halves = {**alone, "dp": 2, "cp": 2}

    def communicators(training: dict[str, object]) -> int:
        pins = {**dict.fromkeys(OPERATORS, alone), "actor_training": training, "critic_training": training}
        space = {"training": {"cp": [1, 2]}}
        ran = rpeg("predict", experiment(cluster=cluster, pin=pins, space=space), "--json")
        return json.loads(ran.out)["reserve"]["communicators"]

    assert (communicators(alone), communicators(halves)) == (2, 3)
