"""Wrong inputs of ``rpeg plan``: the whole text and the exit code of each."""

from __future__ import annotations

import json
import re

import pytest

PIN_HINT = "hint: change the pin, or leave the key out and let the search choose it\n"


@pytest.mark.parametrize(
    ("sections", "code", "text"),
    [
        (
            {"models": {"actor": {"config": "meta-llama/Lama-3.1-8B"}}},
            4,
            "error[unknown-model]: model 'meta-llama/Lama-3.1-8B' is neither a bundled public model nor a config.json\n"
            "  closest bundled names: meta-llama/Llama-3.1-8B, meta-llama/Llama-3.1-70B, meta-llama/Llama-3.1-405B\n"
            "hint: name a bundled model, the path of a config.json, or give inline dimensions\n",
        ),
        (
            {"objektive": {}},
            4,
            "error[unknown-key]: unknown key 'objektive' at the top level\n"
            "  allowed: algorithm, models, workload, cluster, structure, objective, search, pin, space, "
            "costs, settings\n"
            "hint: did you mean 'objective'?\n",
        ),
        (
            {"cluster": {"rack": 2}},
            4,
            "error[unknown-key]: unknown key 'rack' in cluster\n"
            "  allowed: hardware, racks, nodes_per_rack, gpus_per_node, memory_gb, price_per_gpu_hour, host_memory_gb\n"
            "hint: did you mean 'racks'?\n",
        ),
        (
            {"cluster": {"gpus_per_node": 0}},
            4,
            "error[experiment]: cluster.gpus_per_node is 0\n  allowed: a whole number >= 1\n",
        ),
        (
            {"cluster": {"hardware": "./nope.yaml"}},
            4,
            re.compile(
                r"error\[experiment\]: cannot read \S*/nope\.yaml\n  No such file or directory\n"
                r"hint: `rpeg calibrate --output FILE` writes one\n"
            ),
        ),
        (
            {"space": {"training": None}},
            4,
            "error[experiment]: space.training is empty\n  allowed: a mapping of keys to values\n",
        ),
        (
            {"pin": {"actor_training": None}},
            4,
            "error[experiment]: pin.actor_training is empty\n  allowed: a mapping of keys to values\n",
        ),
        (
            {"pin": {"actor_training": {"recompute": ["none"]}}},
            4,
            "error[experiment]: pin.actor_training.recompute is ['none']\n"
            "  allowed: one of none, selective, operator, full\n",
        ),
        ({"cluster": {"racks": -1}}, 4, "error[experiment]: cluster.racks is -1\n  allowed: a whole number >= 1\n"),
        (
            {"workload": {"prompts": 0}},
            4,
            "error[experiment]: workload.prompts is 0\n  allowed: a whole number >= 1\n",
        ),
        (
            {"objective": {"kind": "speed"}},
            4,
            "error[experiment]: objective.kind is 'speed'\n"
            "  allowed: throughput, throughput_x_utilization, cost_per_token\n",
        ),
        (
            {"structure": {"actor_critic_sharing": True, "fusion": True}},
            4,
            "error[experiment]: structure.actor_critic_sharing and structure.fusion are both [True]\n"
            "  a shared backbone has one training, which fuses with nothing\n"
            "  allowed: one of them at a time\n"
            "hint: set structure.fusion: [false]\n",
        ),
        (
            {"models": {"kritic": {"same_as": "actor"}}},
            4,
            "error[unknown-key]: models.kritic is no model of algorithm 'ppo'\n"
            "  allowed: actor, critic, reward, reference\n"
            "hint: did you mean 'critic'?\n",
        ),
        (
            {"models": {"actor": None}},
            4,
            "error[experiment]: models.actor is empty\n  allowed: a mapping of keys to values\n",
        ),
        (
            {"settings": {"greedy": {"structure": "all"}}},
            2,
            "error[settings]: settings.greedy.structure is not a setting\n"
            "  from: settings.greedy\n"
            "  allowed: structures\n"
            "hint: did you mean 'structures'?\n",
        ),
        (
            {"pin": {"actor_trainin": {"tp": 1}}},
            4,
            "error[unknown-key]: pin.actor_trainin names no operator of 'ppo'\n"
            "  allowed: actor_generation, actor_training, critic_inference, critic_training, reference_inference, "
            "reward_inference\n"
            "hint: did you mean 'actor_training'?\n",
        ),
        (
            {"pin": {"actor_training": {"gpus": "7-3"}}},
            4,
            "error[experiment]: pin.actor_training.gpus is '7-3'\n"
            '  allowed: one contiguous range of GPU numbers, e.g. "0-15", or one number\n',
        ),
    ],
)
def test_a_wrong_experiment(rpeg, experiment, sections, code, text) -> None:
    ran = rpeg("plan", experiment(**sections))
    assert (ran.code, ran.out) == (code, "")
    assert text.fullmatch(ran.err) if isinstance(text, re.Pattern) else ran.err == text


@pytest.mark.parametrize("entry", [{"framework": "trl"}, {"cp": [2]}], ids=str)
def test_a_space_of_a_function_is_refused(rpeg, experiment, entry) -> None:
    path = experiment(
        algorithm="grpo",
        settings={"grpo": {"reward_seconds_per_sample": 0.1}},
        workload={"rollouts_per_prompt": 8},
        space={"reward_function": entry},
    )
    text = path.read_text()
    path.write_text(re.sub(r"  (critic|reward):\n    config: \S+\n", "", text))
    ran = rpeg("plan", path)
    assert (ran.code, ran.out, ran.err) == (
        4,
        "",
        "error[experiment]: space.reward_function: reward_function is a function without a model\n"
        f"  it has no axis, and no framework prices it\n  in the file: {next(iter(entry))}\n"
        "hint: remove space.reward_function\n",
    )


@pytest.mark.parametrize("seconds", ["1e300", "86401"])
def test_a_reward_function_takes_a_day_at_most(rpeg, experiment, seconds) -> None:
    ran = rpeg("plan", experiment(), "--set", f"ppo.reward_seconds_per_sample={seconds}")
    assert (ran.code, ran.out) == (2, "")
    assert "settings.ppo.reward_seconds_per_sample is " in ran.err
    assert "allowed: a finite number of at least 0.0 and at most 86400.0, or null" in ran.err


@pytest.mark.parametrize(
    ("pin", "reason"),
    [
        ({"tp": 3}, "P1: tp=3 does not divide the 4 GPUs of a node"),
        ({"pp": 3}, "P2: pp=3 does not divide the 32 layers of meta-llama/Llama-3.1-8B"),
        ({"dp": 3}, "P3: dp=3 does not divide the 256 prompts of a step"),
        ({"pp": 1, "microbatches": 4}, "P4: without a pipeline there is 1 microbatch, not 4"),
        ({"pp": 4, "microbatches": 2}, "P5: 2 microbatches do not fill a pipeline of 4 stages"),
        (
            {"dp": 8, "pp": 4, "tp": 1, "microbatches": 8},
            "P5: 32 sequences in 8 microbatches are fewer than 8 each",
        ),
        ({"dp": 16, "pp": 1, "tp": 1}, "P6: 4 nodes are more than a rack of 3 and not whole racks"),
        ({"gpus": "0-63"}, "P7: GPUs 0-63 are outside the cluster's 0-31"),
        (
            {"dp": 4, "pp": 1, "tp": 1, "gpus": "2-5"},
            "P7: dp4 pp1 tp1 cannot start at GPU 2; its aligned starts are 0, 4, 8, 12, 16, 20, 24, 28",
        ),
        (
            {"dp": 4, "pp": 1, "tp": 1, "gpus": "0-7"},
            "P8: no legal degrees with dp=4, pp=1, tp=1 use exactly the 8 GPUs 0-7",
        ),
        ({"dp": 4, "tp": 4, "cp": 2, "gpus": "0-15"}, "P8: dp=4 * cp=2 * tp=4 needs 32 GPUs, gpus: 0-15 are 16"),
        ({"dp": 8, "tp": 4, "cp": 2}, "P8: dp=8 * cp=2 * tp=4 needs 64 GPUs, the cluster has 32"),
    ],
)
def test_a_pin_that_breaks_a_rule(rpeg, experiment, pin, reason) -> None:
    cluster = {"nodes_per_rack": 3} if reason.startswith("P6") else {}
    ran = rpeg("plan", experiment(pin={"actor_training": pin}, cluster=cluster))
    assert (ran.code, ran.err) == (4, f"error[pin]: pin.actor_training cannot be met\n  {reason}\n{PIN_HINT}")


def test_a_space_without_a_layout(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(space={"training": {"cp": [64]}}))
    assert (ran.code, ran.out) == (4, "")
    assert ran.err.splitlines()[:2] == [
        "error[experiment]: space: leaves operator 'actor_training' no layout",
        "  CP: cp=64 divides a sequence over 64 GPUs, the cluster has 32",
    ]


@pytest.mark.parametrize(
    ("kind", "sections", "hint"),
    [
        ("algorithm 'pppo'", {"algorithm": "pppo"}, "did you mean 'ppo'?"),
        ("hardware 'gh2000'", {"cluster": {"hardware": "gh2000"}}, "did you mean 'gh200'?"),
        ("search 'greedi'", {"search": {"strategy": "greedi"}}, "did you mean 'greedy'?"),
        ("search 'z3000'", {"search": {"strategy": "z3000"}}, "pip install rpeg-plugin-z3000"),
    ],
)
def test_a_missing_plugin(rpeg, experiment, kind, sections, hint) -> None:
    ran = rpeg("plan", experiment(**sections))
    lines = ran.err.splitlines()
    assert ran.code == 3
    assert lines[0] == f"error[missing-plugin]: no installed plugin offers {kind}"
    assert lines[1].startswith("  installed: ")
    assert lines[2:] == [f"hint: {hint}"]


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "greedy",
            "error[usage]: --set 'greedy' cannot be read\n  allowed: NAME.SETTING=VALUE, e.g. annealing.seed=3\n",
        ),
        (
            "greedy.structures=none",
            "error[settings]: settings.greedy.structures is 'none'\n"
            "  from: --set greedy.structures=none\n"
            "  allowed: one of 'all', 'synchronous'\n",
        ),
        (
            "greedy.structure=all",
            "error[settings]: settings.greedy.structure is not a setting\n"
            "  from: --set greedy.structure=all\n"
            "  allowed: structures\n"
            "hint: did you mean 'structures'?\n",
        ),
    ],
)
def test_a_wrong_override(rpeg, experiment, override, text) -> None:
    ran = rpeg("plan", experiment(), "--set", override)
    assert (ran.code, ran.out, ran.err) == (2, "", text)


def test_a_setting_of_no_plugin_names_its_origin(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(), "--set", "gredy.structures=all")
    first, second, hint = ran.err.splitlines()
    assert ran.code == 2
    assert first == "error[usage]: --set gredy.structures=all names no plugin"
    assert re.fullmatch(r"  allowed: analytical\.activations, .*\bgreedy\b.*", second)
    assert hint == "hint: did you mean 'greedy'?"


def test_a_section_of_settings_that_names_no_plugin(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(settings={"gredy": {"structures": "all"}}))
    assert ran.code == 4
    assert ran.err.startswith("error[unknown-key]: settings.gredy names no plugin\n  allowed: analytical.")


@pytest.mark.parametrize(
    ("content", "text"),
    [
        (
            "a: [1\n",
            "error[experiment]: x.yaml is not valid YAML\n"
            "  line 2, column 1: expected ',' or ']', but got '<stream end>'\n",
        ),
        ("[1]", "error[experiment]: the experiment is [1]\n  allowed: a mapping of keys to values\n"),
        (
            "a: 1\0\n",
            "error[experiment]: x.yaml is not valid YAML\n  character 5: #x0000 is not allowed in YAML\n",
        ),
        ("", "error[experiment]: the experiment is empty\n  allowed: a mapping of keys to values\n"),
    ],
)
def test_a_file_that_is_no_experiment(rpeg, tmp_path, content, text) -> None:
    tmp_path.joinpath("x.yaml").write_text(content)
    ran = rpeg("plan", "x.yaml")
    assert (ran.code, ran.out, ran.err) == (4, "", text)


@pytest.mark.parametrize("command", ["plan", "predict"])
def test_a_file_that_cannot_be_read(rpeg, command) -> None:
    ran = rpeg(command, "nofile.yaml")
    assert (ran.code, ran.err) == (
        4,
        "error[experiment]: cannot read nofile.yaml\n"
        "  No such file or directory\n"
        "hint: `rpeg init` writes a commented experiment file\n",
    )


def test_an_output_that_cannot_be_written_is_refused_before_the_search(rpeg, experiment) -> None:
    ran = rpeg("plan", experiment(), "-o", "nowhere/plan.json")
    assert (ran.code, ran.out, ran.err) == (
        4,
        "",
        "error[plan-file]: cannot write nowhere/plan.json\n  there is no folder nowhere\n",
    )


@pytest.fixture
def plan_file(rpeg, experiment, tmp_path):
    assert rpeg("plan", experiment()).code == 0
    return tmp_path / "plan.json"


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_a_changed_plan_is_refused(rpeg, plan_file, command) -> None:
    document = json.loads(plan_file.read_text())
    before = document["digest"]
    document["plan"]["actor_training"]["microbatches"] = 77
    plan_file.write_text(json.dumps(document))
    ran = rpeg(command, "plan.json")
    lines = ran.err.splitlines()
    assert ran.code == 4
    assert lines[:2] == [
        "error[plan-file]: plan.json was changed after it was written",
        f"  digest in the file: {before}",
    ]
    assert re.fullmatch(r"  digest of its content: sha256:[0-9a-f]{64}", lines[2])
    assert lines[3:] == ["hint: change the experiment's `pin:` instead and run `rpeg predict`"]


@pytest.mark.parametrize("command", ["predict", "explain"])
def test_a_plan_of_another_schema_is_refused(rpeg, plan_file, command) -> None:
    plan_file.write_text(plan_file.read_text().replace('"schema": 1', '"schema": 9'))
    ran = rpeg(command, "plan.json")
    assert (ran.code, ran.err) == (
        4,
        "error[plan-file]: plan.json has schema 9\n  allowed: 1\nhint: make the plan again with `rpeg plan`\n",
    )


@pytest.mark.parametrize("key", ["search", "intervals"])
@pytest.mark.parametrize("command", ["predict", "explain", "run"])
def test_what_the_digest_does_not_cover_must_still_be_an_object(rpeg, plan_file, command, key) -> None:
    plan_file.write_text(json.dumps(json.loads(plan_file.read_text()) | {key: None}))
    ran = rpeg(command, "plan.json")
    assert (ran.code, ran.out, ran.err) == (
        4,
        "",
        f"error[plan-file]: plan.json is not a plan\n  {key} is null; allowed: an object\n"
        "hint: make the plan again with `rpeg plan`\n",
    )


def test_a_plan_that_is_cut_off_is_refused(rpeg, plan_file) -> None:
    plan_file.write_text(plan_file.read_text()[:100])
    ran = rpeg("predict", "plan.json")
    assert ran.code == 4
    assert ran.err.splitlines()[0] == "error[plan-file]: plan.json is not a JSON document"


def test_an_unknown_operator_is_refused(rpeg, plan_file) -> None:
    ran = rpeg("explain", "plan.json", "--operator", "actor_trainin")
    assert (ran.code, ran.err) == (
        2,
        "error[usage]: there is no operator 'actor_trainin' in plan.json\n"
        "  allowed: actor_generation, reference_inference, reward_inference, critic_inference, actor_training, "
        "critic_training\n"
        "hint: did you mean 'actor_training'?\n",
    )


@pytest.mark.parametrize("text", ["nan", "inf"])
def test_a_search_without_end_is_refused(rpeg, experiment, text) -> None:
    ran = rpeg("plan", experiment(), "--seconds", text)
    assert (ran.code, ran.out) == (2, "")
    assert f"{text} is not a finite number" in ran.err


@pytest.mark.parametrize(
    ("before", "after", "message"),
    [
        ("prompts: 64", "prompts: 100000000000000000000000", "allowed: at most 1,000,000,000"),
        ("nodes_per_rack: 1", "nodes_per_rack: 1000000", "allowed: at most 65,536"),
        ("gpus_per_node: 8", "gpus_per_node: 100000000000", "allowed: at most 65,536"),
    ],
)
def test_sizes_beyond_reason_are_refused_at_once(rpeg, tmp_path, before, after, message) -> None:
    text = (
        "algorithm: ppo\n"
        "models: {actor: {config: openai-community/gpt2}, critic: {same_as: actor}, reward: {same_as: actor}, "
        "reference: {same_as: actor}}\n"
        "workload: {prompts: 64, prompt_tokens: 128, response_tokens: 256}\n"
        "cluster: {hardware: h100, nodes_per_rack: 1, gpus_per_node: 8}\n"
    )
    path = tmp_path / "large.yaml"
    path.write_text(text.replace(before, after))
    ran = rpeg("plan", path)
    assert ran.code == 4
    assert message in ran.err


def test_a_file_nested_too_deeply_is_no_internal_error(rpeg, tmp_path) -> None:
    path = tmp_path / "deep.yaml"
    path.write_text("a: " + "[" * 5000 + "]" * 5000)
    ran = rpeg("plan", path)
    assert ran.code == 4
    assert "is nested too deeply" in ran.err
