"""Measured lengths as quantiles, and the generation operator alone."""

from __future__ import annotations

import attrs
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpeg_core.errors import UsageError
from rpeg_core.ir import Role, require_well_formed
from rpeg_core.runtime.lengths import generation_alone, quantiles
from rpeg_core.spec.workload import LengthQuantile, Workload
from rpeg_core.testing.toys import toy_actor_critic, toy_ppo

FRACTIONS = (0.5, 0.85, 1.0)


def pairs(tokens: list[int], fractions: tuple[float, ...] = FRACTIONS, limit: int = 10) -> list[tuple[float, int]]:
    return [(pair.fraction, pair.tokens) for pair in quantiles(tokens, fractions, limit)]


def test_by_hand() -> None:
    assert pairs([1, 2, 3, 4, 5, 6, 7, 8, 9, 10]) == [(0.5, 5), (0.85, 9), (1.0, 10)]
    assert pairs([3]) == [(0.85, 3), (1.0, 10)]
    assert pairs([1, 2, 3, 4], (0.25, 0.5)) == [(0.25, 1), (0.5, 2), (1.0, 10)]


def test_shares_with_the_same_tokens_are_one_and_the_limit_is_the_last() -> None:
    assert pairs([2, 2, 2, 2, 2, 2, 2, 2, 2, 9]) == [(0.85, 2), (1.0, 10)]
    assert pairs([10, 10, 10]) == [(1.0, 10)]
    assert pairs([1, 10, 10, 10]) == [(1.0, 10)]


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=60),
    st.lists(st.floats(0.01, 1.0), min_size=1, max_size=6, unique=True),
)
def test_the_pairs_are_a_workload_and_numpy_agrees(tokens: list[int], fractions: list[float]) -> None:
    found = quantiles(tokens, sorted(fractions), 50)
    Workload(prompts=1, prompt_tokens=1, response_tokens=50, response_lengths=found)
    for pair in found[:-1]:
        assert pair.tokens == np.quantile(tokens, pair.fraction, method="inverted_cdf")
        assert sum(t <= pair.tokens for t in tokens) >= pair.fraction * len(tokens) - 1e-6
    assert found[-1] == LengthQuantile(1.0, 50)


def test_the_generation_alone_is_a_graph() -> None:
    graph = generation_alone(toy_ppo(tau=1))
    require_well_formed(graph)
    assert [operator.role for operator in graph.operators] == [Role.GENERATION]
    assert [(model.name, model.trainable) for model in graph.models] == [("actor", False)]
    assert generation_alone(toy_actor_critic(tau=0)).operators[0].name == "generation"


def test_an_algorithm_without_a_generation_has_no_lengths() -> None:
    graph = toy_ppo(tau=0)
    without = attrs.evolve(graph, operators=tuple(op for op in graph.operators if op.role is not Role.GENERATION))
    with pytest.raises(UsageError, match="generates no responses"):
        generation_alone(without)
