"""What an experiment file may name: tables of lengths, folders with weights; and keys that are there twice."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from rpeg_core.errors import RpegError
from rpeg_core.spec.experiment import Experiment, load_experiment, parse_experiment
from rpeg_core.spec.workload import LengthQuantile

CONFIG = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "vocab_size": 1000,
}
QUANTILES = (LengthQuantile(0.5, 5), LengthQuantile(1.0, 20))


@pytest.fixture
def load(tmp_path: Path) -> Callable[..., Experiment]:
    """Write and read an experiment with these models and this text after the workload's lengths."""

    def write(models: str = "{actor: {config: tiny}}", lengths: str = "") -> Experiment:
        folder = tmp_path / "tiny"
        folder.mkdir(exist_ok=True)
        folder.joinpath("config.json").write_text(json.dumps(CONFIG))
        path = tmp_path / "x.yaml"
        path.write_text(
            f"algorithm: ppo\nmodels: {models}\n"
            f"workload: {{prompts: 8, prompt_tokens: 10, response_tokens: 20{lengths}}}\n"
            "cluster: {hardware: gh200}\n"
        )
        return load_experiment(path)

    return write


def refused(read: Callable[[], object]) -> str:
    with pytest.raises(RpegError) as caught:
        read()
    return str(caught.value)


def test_a_key_that_is_there_twice_is_refused_with_both_lines(tmp_path: Path) -> None:
    path = tmp_path / "x.yaml"
    path.write_text("algorithm: ppo\nsearch: {seed: 1}\nalgorithm: grpo\n")
    assert refused(lambda: load_experiment(path)) == (
        f"error[experiment]: the key 'algorithm' is there twice\n  in {path}, lines 1 and 3\nhint: remove one of them"
    )
    path.write_text("models:\n  actor: {config: a}\n  actor: {config: b}\n")
    assert "the key 'actor' is there twice" in refused(lambda: load_experiment(path))


def test_a_merged_mapping_may_be_overridden(tmp_path: Path, load: Callable[..., Experiment]) -> None:
    found = load("{actor: &a {config: tiny}, critic: {<<: *a, head: scalar}, reference: {<<: *a}}")
    assert list(found.models) == ["actor", "critic", "reference"]


@pytest.mark.parametrize(
    "text",
    [
        "fraction,tokens\n0.5,5\n1.0,20\n",
        "\ufefffraction,tokens\r\n0.5,5\r\n1.0,20\r\n",
        "fraction;tokens\n0,5;5\n1,0;20\n",
        "Tokens, Fraction, note\n5,0.5,half\n20,1.0,all\n",
    ],
    ids=["plain", "byte-order mark", "semicolons", "other order and a column more"],
)
def test_a_table_of_lengths_may_come_from_a_spreadsheet(
    tmp_path: Path, load: Callable[..., Experiment], text: str
) -> None:
    tmp_path.joinpath("lengths.csv").write_bytes(text.encode())
    assert load(lengths=", response_lengths: lengths.csv").workload.response_lengths == QUANTILES


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("", "no column 'fraction'\n  its first line names: nothing"),
        ("share,tokens\n", "no column 'fraction'\n  its first line names: 'share', 'tokens'"),
        ("fraction,tokens\n", "workload.response_lengths has no pair"),
        ("fraction,tokens\n0.5,5\n\nhalf,20\n", "line 4 of {path} is ('half', '20')"),
        ("fraction,tokens\n0.5\n", "line 2 of {path} is ('0.5', None)"),
    ],
)
def test_a_table_that_is_wrong_is_refused_with_its_line(
    tmp_path: Path, load: Callable[..., Experiment], text: str, expected: str
) -> None:
    path = tmp_path / "lengths.csv"
    path.write_text(text)
    assert expected.format(path=path) in refused(lambda: load(lengths=", response_lengths: lengths.csv"))


def test_an_empty_list_of_lengths_is_refused(load: Callable[..., Experiment]) -> None:
    assert refused(lambda: load(lengths=", response_lengths: []")).startswith(
        "error[experiment]: workload.response_lengths has no pair\n"
    )


def test_weights_are_inherited_and_their_folder_may_be_the_architecture(
    tmp_path: Path, load: Callable[..., Experiment]
) -> None:
    found = load("{reference: {same_as: actor}, actor: {weights: tiny}, critic: {same_as: actor, head: scalar}}")
    folder = str(tmp_path / "tiny")
    assert found.weights == {"reference": folder, "actor": folder, "critic": folder}
    assert found.same_as == {"reference": "actor", "critic": "actor"}
    assert found.models["reference"].layers == 2

    other = tmp_path / "other"
    other.mkdir()
    own = load("{actor: {config: tiny, weights: ./tiny}, reference: {same_as: actor, weights: other}}")
    assert own.weights == {"actor": folder, "reference": str(other)}


def test_a_plan_keeps_the_weights_wherever_it_is_read(tmp_path: Path, load: Callable[..., Experiment]) -> None:
    found = load("{actor: {weights: tiny}, reference: {same_as: actor}, reward: {config: tiny}}")
    document = json.loads(json.dumps(found.document()))
    tmp_path.joinpath("tiny", "config.json").unlink()
    tmp_path.joinpath("tiny").rmdir()
    again = parse_experiment(document, base_dir=tmp_path / "elsewhere")
    assert again == found
    assert (again.weights, again.same_as) == (found.weights, {"reference": "actor"})


@pytest.mark.parametrize(("name", "reason"), [("missing", "there is no folder"), ("x.yaml", "not a folder")])
def test_weights_that_are_not_there_are_one_error(
    tmp_path: Path, load: Callable[..., Experiment], name: str, reason: str
) -> None:
    assert refused(lambda: load(f"{{actor: {{config: tiny, weights: {name}}}}}")) == (
        f"error[experiment]: models.actor.weights is {name!r}\n  {reason}: {tmp_path / name}\n"
        "  allowed: a folder in the format of Hugging Face: config.json, *.safetensors"
    )
