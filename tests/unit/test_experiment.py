"""The experiment file: what is read, what is refused and in which words, and the resolved form."""

from __future__ import annotations

import copy
import json

import pytest

from rpeg_core.errors import RpegError
from rpeg_core.passes.score import Objective
from rpeg_core.planning.structures import StructureChoices
from rpeg_core.spec.experiment import Cluster, SearchChoice, load_experiment, parse_experiment
from rpeg_core.spec.models import Head
from rpeg_core.spec.workload import LengthQuantile

DIMENSIONS = {
    "layers": 4,
    "hidden": 64,
    "heads": 4,
    "kv_heads": 2,
    "ffn": 128,
    "vocab": 1000,
}

SMALL = {
    "algorithm": "ppo",
    "models": {"actor": {"config": DIMENSIONS}, "reference": {"same_as": "actor"}},
    "workload": {"prompts": 8, "prompt_tokens": 10, "response_tokens": 20},
    "cluster": {"hardware": "gh200"},
}


def changed(path: str, value: object) -> dict:
    """SMALL with the value at a dotted path replaced; ``...`` removes it."""
    document = copy.deepcopy(SMALL)
    section, *keys = path.split(".")
    place, key = document, section
    for following in keys:
        place = place.setdefault(key, {})
        key = following
    if value is ...:
        del place[key]
    else:
        place[key] = value
    return document


def test_what_is_left_out_has_the_documented_defaults() -> None:
    experiment = parse_experiment(SMALL)
    assert experiment.cluster == Cluster(hardware="gh200", racks=1, nodes_per_rack=1)
    assert experiment.workload.rollouts_per_prompt == 1
    assert experiment.workload.bytes_per_element == 2
    assert experiment.structure == StructureChoices(staleness=(0,), actor_critic_sharing=(False,), fusion=(False,))
    assert experiment.objective == Objective(kind="throughput", max_throughput_loss=0.1)
    assert (experiment.horizon_steps, experiment.split_lengths) == (8, True)
    assert experiment.search == SearchChoice(strategy="annealing", seed=0)
    assert (experiment.search.seconds, experiment.search.evaluations) == (None, None)
    assert (experiment.pins, experiment.costs, experiment.settings) == ({}, None, {})


FULL = {
    **SMALL,
    "models": {"critic": {"same_as": "actor", "head": "scalar"}, **SMALL["models"]},
    "workload": {
        "prompts": 8,
        "rollouts_per_prompt": 4,
        "prompt_tokens": 10,
        "response_tokens": 20,
        "response_lengths": [[0.5, 5], [1.0, 20]],
        "bytes_per_element": 4,
        "shared_prefix": True,
    },
    "cluster": {
        "hardware": "h100",
        "racks": 2,
        "nodes_per_rack": 3,
        "gpus_per_node": 8,
        "memory_gb": 80.5,
        "price_per_gpu_hour": 2.5,
        "host_memory_gb": 1007.5,
    },
    "structure": {"staleness": [0, 2], "actor_critic_sharing": [False, True], "fusion": True},
    "objective": {
        "kind": "cost_per_token",
        "max_throughput_loss": 0.2,
        "horizon_steps": 4,
        "split_lengths": False,
    },
    "search": {"strategy": "greedy", "seconds": 1.5, "evaluations": 7, "seed": 3},
    "pin": {"actor_training": {"gpus": "0-7", "dp": 2, "pp": 2, "tp": 2, "microbatches": 4}, "x": {"gpus": 3}},
    "costs": ["analytical", "acme.launch"],
    "settings": {"ppo": {"explicit_rollout_edges": True}},
}


@pytest.mark.parametrize("document", [SMALL, FULL])
def test_the_resolved_form_parses_to_an_equal_experiment(document) -> None:
    experiment = parse_experiment(document)
    resolved = json.loads(json.dumps(experiment.document()))
    assert parse_experiment(resolved) == experiment
    assert parse_experiment(resolved).document() == resolved


def test_same_as_may_point_forward_and_takes_the_architecture_only() -> None:
    experiment = parse_experiment(FULL)
    assert list(experiment.models) == ["critic", "actor", "reference"]
    assert experiment.models["critic"].head is Head.SCALAR
    assert experiment.models["critic"].with_head(Head.LM) == experiment.models["actor"]
    assert experiment.heads_given == {"critic"}


def test_a_single_value_is_a_list_of_one() -> None:
    assert parse_experiment(changed("structure.staleness", 2)).structure.staleness == (2,)
    assert parse_experiment(changed("costs", "paper")).costs == ("paper",)


def test_files_are_taken_from_the_folder_of_the_experiment(tmp_path) -> None:
    folder = tmp_path / "data"
    folder.mkdir()
    folder.joinpath("lengths.csv").write_text("fraction,tokens\n0.5,5\n1.0,20\n")
    folder.joinpath("config.json").write_text(
        json.dumps(
            {
                "model_type": "llama",
                "num_hidden_layers": 2,
                "hidden_size": 64,
                "num_attention_heads": 4,
                "intermediate_size": 128,
                "vocab_size": 1000,
            }
        )
    )
    tmp_path.joinpath("x.yaml").write_text(
        "algorithm: ppo\n"
        "models: {actor: {config: data}}\n"
        "workload: {prompts: 8, prompt_tokens: 10, response_tokens: 20, response_lengths: data/lengths.csv}\n"
        "cluster: {hardware: gh200}\n"
    )
    experiment = load_experiment(tmp_path / "x.yaml")
    assert experiment.models["actor"].layers == 2
    assert experiment.workload.response_lengths == (LengthQuantile(0.5, 5), LengthQuantile(1.0, 20))


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        ("algorithm", ..., "error[experiment]: algorithm is missing\n  allowed: a name"),
        ("algorithm", 3, "error[experiment]: algorithm is 3\n  allowed: a name"),
        (
            "workload",
            ...,
            "error[experiment]: workload is missing\nhint: `rpeg init` writes a commented experiment file",
        ),
        ("workload", 3, "error[experiment]: workload is 3\n  allowed: a mapping of keys to values"),
        (
            "workload.prompts",
            ...,
            "error[experiment]: workload.prompts is missing\n  allowed: a whole number >= 1",
        ),
        (
            "workload.prompts",
            "many",
            "error[experiment]: workload.prompts is 'many'\n  allowed: a whole number >= 1",
        ),
        (
            "workload.prompts",
            True,
            "error[experiment]: workload.prompts is True\n  allowed: a whole number >= 1",
        ),
        (
            "workload.bytes_per_element",
            1,
            "error[experiment]: workload.bytes_per_element is 1\n  allowed: 2 (BF16 or FP16) or 4 (FP32)",
        ),
        (
            "workload.shared_prefix",
            1,
            "error[experiment]: workload.shared_prefix is 1\n  allowed: true or false",
        ),
        (
            "workload.response_lengths",
            3,
            "error[experiment]: workload.response_lengths is 3\n"
            "  allowed: a list of [fraction, tokens] pairs, or a CSV file with the columns fraction,tokens",
        ),
        (
            "workload.response_lengths",
            [[0.5, 5], [1.0]],
            "error[experiment]: workload.response_lengths[1] is [1.0]\n"
            "  allowed: a list of [fraction, tokens] pairs, or a CSV file with the columns fraction,tokens",
        ),
        (
            "workload.response_lengths",
            [[0.5, 5], [1.0, 10]],
            "error[experiment]: workload.response_lengths ends at 10 tokens, workload.response_tokens is 20\n"
            "  allowed: both equal, all responses are finished at response_tokens\n"
            "hint: set workload.response_tokens to 10",
        ),
        (
            "workload.response_lengths",
            "no.csv",
            "error[experiment]: workload.response_lengths: cannot read no.csv\n"
            "  No such file or directory\n"
            "  allowed: a list of [fraction, tokens] pairs, or a CSV file with the columns fraction,tokens\n"
            "hint: `rpeg profile-lengths` writes such a file; leave workload.response_lengths out until then",
        ),
        (
            "cluster.price_per_gpu_hour",
            0,
            "error[experiment]: cluster.price_per_gpu_hour is 0\n  allowed: a number > 0",
        ),
        ("cluster.host_memory_gb", 0, "error[experiment]: cluster.host_memory_gb is 0\n  allowed: a number > 0"),
        ("cluster.memory_gb", -1, "error[experiment]: cluster.memory_gb is -1\n  allowed: a number > 0"),
        (
            "cluster.memory_gb",
            1e-300,
            "error[experiment]: cluster.memory_gb is 1e-300\n  allowed: a number from 0.001 to 100,000, in GB",
        ),
        (
            "cluster.memory_gb",
            1e300,
            "error[experiment]: cluster.memory_gb is 1e+300\n  allowed: a number from 0.001 to 100,000, in GB",
        ),
        (
            "cluster.memory_gb",
            float("nan"),
            "error[experiment]: cluster.memory_gb is nan\n  allowed: a number > 0",
        ),
        (
            "structure.staleness",
            [0, -1],
            "error[experiment]: structure.staleness is [0, -1]\n  allowed: whole numbers >= 0",
        ),
        (
            "structure.staleness",
            [],
            "error[experiment]: structure.staleness is []\n  allowed: whole numbers >= 0",
        ),
        (
            "structure.actor_critic_sharing",
            ["yes"],
            "error[experiment]: structure.actor_critic_sharing is ['yes']\n  allowed: true, false or both",
        ),
        (
            "objective.max_throughput_loss",
            1.0,
            "error[experiment]: objective.max_throughput_loss is 1.0\n  allowed: a number in [0, 1)",
        ),
        ("search.seconds", 0, "error[experiment]: search.seconds is 0\n  allowed: a number > 0"),
        ("search.evaluations", 0, "error[experiment]: search.evaluations is 0\n  allowed: a whole number >= 1"),
        (
            "models.actor",
            {"head": "lm"},
            "error[experiment]: models.actor has no architecture\n"
            "  allowed: exactly one of config (a public name, a path or dimensions) and same_as (another role)",
        ),
        (
            "models.actor",
            {"config": DIMENSIONS, "same_as": "reference"},
            "error[experiment]: models.actor has config, same_as\n"
            "  allowed: exactly one of config (a public name, a path or dimensions) and same_as (another role)",
        ),
        (
            "models.reference.same_as",
            "reference",
            "error[experiment]: models.reference.same_as is 'reference'\n  allowed: actor",
        ),
        (
            "models.reference.head",
            "both",
            "error[experiment]: models.reference.head is 'both'\n  allowed: lm, scalar, lm+scalar",
        ),
        (
            "pin.actor_training.tp",
            0,
            "error[experiment]: pin.actor_training.tp is 0\n  allowed: a whole number >= 1",
        ),
        (
            "pin.actor_training.gpu",
            "0-3",
            "error[unknown-key]: unknown key 'gpu' in pin.actor_training\n"
            "  allowed: gpus, dp, pp, tp, microbatches, cp, ep, sequence_parallel, recompute, precision\n"
            "hint: did you mean 'gpus'?",
        ),
        ("costs", [3], "error[experiment]: costs is [3]\n  allowed: names of cost models or terms"),
        ("settings.ppo", 3, "error[experiment]: settings.ppo is 3\n  allowed: a mapping of keys to values"),
    ],
)
def test_what_is_refused(path, value, text) -> None:
    with pytest.raises(RpegError) as caught:
        parse_experiment(changed(path, value))
    assert str(caught.value) == text
    assert caught.value.exit_code == 4


@pytest.mark.parametrize("config", [3, ["a"], True, ""])
def test_a_config_of_another_type_is_refused(config) -> None:
    with pytest.raises(RpegError) as caught:
        parse_experiment(changed("models.actor.config", config))
    assert str(caught.value) == (
        f"error[experiment]: models.actor.config is {config!r}\n  allowed: a public name, a path or dimensions"
    )
