"""What the planner says about a selection without a meaning: costs counted twice or never, a head without words."""

from __future__ import annotations

import copy
from typing import Any

import pytest

from rpeg_core.errors import ExperimentError, GraphError
from rpeg_core.ir.text import from_text
from rpeg_core.planning.planner import Planner
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.experiment import parse_experiment

TINY = {"layers": 4, "hidden": 64, "heads": 4, "ffn": 128, "vocab": 1000}
EXPERIMENT: dict[str, Any] = {
    "algorithm": "ppo",
    "models": {"actor": {"config": TINY}, "critic": {"config": TINY}, "reward": {"config": TINY}},
    "workload": {"prompts": 8, "prompt_tokens": 10, "response_tokens": 20},
    "cluster": {"hardware": "gh200"},
}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def planner(registry: Registry, models: dict[str, Any] | None = None, **sections: Any) -> Planner:
    document = copy.deepcopy(EXPERIMENT) | sections
    document["models"] |= {"reference": {"same_as": "actor"}, **(models or {})}
    return Planner(parse_experiment(document), registry)


def test_two_models_that_price_the_same_are_not_added(registry: Registry) -> None:
    with pytest.raises(ExperimentError) as caught:
        planner(registry, costs=["analytical", "paper"])
    assert str(caught.value) == (
        "error[experiment]: costs counts activations twice\n"
        "  analytical.activations and paper.activations are both selected\n"
        "hint: name one of analytical and paper, or single terms"
    )


def test_single_terms_of_two_models_may_be_combined(registry: Registry) -> None:
    found = planner(registry, costs=["paper.gemm", "analytical.tensor_parallel"])
    assert [active.term.name for active in found.terms] == ["paper.gemm", "analytical.tensor_parallel"]


def test_a_selection_that_leaves_out_memory_or_transfers_is_remarked_on(registry: Registry) -> None:
    assert planner(registry).remarks == ()
    assert planner(registry, costs=["analytical.gemm"]).remarks == (
        "no selected cost term prices memory (analytical.gemm): every plan counts as one that fits",
        "no selected cost term prices transfers: they count as taking no time",
    )


def test_a_model_that_generates_has_a_head_of_words(registry: Registry) -> None:
    with pytest.raises(ExperimentError) as caught:
        planner(registry, models={"actor": {"config": TINY, "head": "scalar"}})
    assert str(caught.value) == (
        "error[experiment]: models.actor.head is 'scalar'\n"
        "  allowed: lm; algorithm 'ppo' needs the probabilities of its tokens"
    )
    assert planner(registry, models={"critic": {"config": TINY, "head": "scalar"}})


def test_the_text_of_no_graph_is_refused() -> None:
    for text in ("", "\n", "input W\n"):
        with pytest.raises(GraphError):
            from_text(text)


def test_an_option_that_the_algorithm_does_not_offer_is_refused(registry: Registry) -> None:
    document = copy.deepcopy(EXPERIMENT) | {"algorithm": "grpo", "structure": {"fusion": True}}
    del document["models"]["critic"]
    document["models"]["reference"] = {"same_as": "actor"}
    with pytest.raises(ExperimentError) as caught:
        Planner(parse_experiment(document), registry).structures()
    assert str(caught.value) == (
        "error[experiment]: structure.fusion is [True]\n"
        "  allowed: [False]; algorithm 'grpo' offers: none\n"
        "hint: remove structure.fusion"
    )
