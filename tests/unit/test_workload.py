"""Workloads: what follows from them, length phases by hand, and what is refused."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpeg_core.errors import ExperimentError
from rpeg_core.spec.workload import LengthPhase, LengthQuantile, Workload
from rpeg_core.testing.strategies import workloads


def workload(**changes):
    values = {
        "prompts": 512,
        "rollouts_per_prompt": 4,
        "prompt_tokens": 128,
        "response_tokens": 384,
    }
    return Workload(**(values | changes))


def quantiles(*pairs):
    return tuple(LengthQuantile(fraction, tokens) for fraction, tokens in pairs)


def test_counts():
    w = workload()
    assert w.sequences == 2048  # 512 * 4
    assert w.sequence_tokens == 512  # 128 + 384
    assert w.tokens_per_step == 1_048_576  # 2048 * 512
    assert (w.bytes_per_element, w.shared_prefix) == (2, False)
    assert Workload(prompts=8, prompt_tokens=1, response_tokens=1).sequences == 8


def test_without_quantiles_there_is_one_phase():
    phase = LengthPhase(index=0, first_token=0, last_token=384, alive=1.0, finishing=1.0)
    assert workload().phases == (phase,)
    assert phase.tokens == 384


def test_the_phases_of_the_paper():
    # (0.50, 0.85, 1.0) at (Lr/4, Lr/2, Lr): all decode the first quarter, half the second, 15 % the second half
    phases = workload(response_lengths=quantiles((0.5, 96), (0.85, 192), (1.0, 384))).phases
    assert [(p.index, p.first_token, p.last_token, p.tokens) for p in phases] == [
        (0, 0, 96, 96),
        (1, 96, 192, 96),
        (2, 192, 384, 192),
    ]
    assert [p.alive for p in phases] == [1.0, 0.5, pytest.approx(0.15)]
    assert [p.finishing for p in phases] == [0.5, pytest.approx(0.35), pytest.approx(0.15)]


@given(workloads())
def test_phases_tile_the_response_and_every_sequence_finishes_once(w):
    phases = w.phases
    assert [token for p in phases for token in range(p.first_token, p.last_token)] == list(range(w.response_tokens))
    assert sum(p.finishing for p in phases) == pytest.approx(1.0)
    assert all(p.finishing > 0 and p.tokens > 0 for p in phases)
    for before, after in itertools.pairwise(phases):
        assert after.alive == pytest.approx(before.alive - before.finishing)
    assert phases[-1].alive == pytest.approx(phases[-1].finishing)


def refused(**changes):
    with pytest.raises(ExperimentError) as caught:
        workload(**changes)
    return str(caught.value)


@pytest.mark.parametrize("key", ["prompts", "rollouts_per_prompt", "prompt_tokens", "response_tokens"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "8", True, None])
def test_counts_are_positive_integers(key, value):
    assert refused(**{key: value}) == (
        f"error[experiment]: workload.{key} is {value!r}\n  allowed: an integer of at least 1"
    )


@pytest.mark.parametrize("value", [1, 8, True, "2"])
def test_bytes_per_element(value):
    assert refused(bytes_per_element=value) == (
        f"error[experiment]: workload.bytes_per_element is {value!r}\n  allowed: 2 (BF16 or FP16) or 4 (FP32)"
    )


@pytest.mark.parametrize(
    ("pairs", "text"),
    [
        (
            [(0.0, 96), (1.0, 384)],
            "workload.response_lengths[0].fraction is 0.0\n  allowed: strictly increasing values in (0, 1]",
        ),
        (
            [(0.5, 96), (0.5, 192), (1.0, 384)],
            "workload.response_lengths[1].fraction is 0.5\n  allowed: strictly increasing values in (0, 1]",
        ),
        (
            [(0.5, 96), (1.5, 384)],
            "workload.response_lengths[1].fraction is 1.5\n  allowed: strictly increasing values in (0, 1]",
        ),
        (
            [(0.5, 192), (0.8, 96), (1.0, 384)],
            "workload.response_lengths[1].tokens is 96\n  allowed: strictly increasing integers of at least 1",
        ),
        (
            [(0.5, 0), (1.0, 384)],
            "workload.response_lengths[0].tokens is 0\n  allowed: strictly increasing integers of at least 1",
        ),
        (
            [(0.5, 96.5), (1.0, 384)],
            "workload.response_lengths[0].tokens is 96.5\n  allowed: strictly increasing integers of at least 1",
        ),
        (
            [(0.5, 96), (0.9, 384)],
            "workload.response_lengths ends at fraction 0.9\n  allowed: the last fraction is 1.0",
        ),
        (
            [(0.5, 96), (1.0, 200)],
            "workload.response_lengths ends at 200 tokens, workload.response_tokens is 384\n"
            "  allowed: both equal, all responses are finished at response_tokens\n"
            "hint: set workload.response_tokens to 200",
        ),
    ],
)
def test_refused_quantiles(pairs, text):
    assert refused(response_lengths=quantiles(*pairs)) == f"error[experiment]: {text}"


def test_a_fraction_that_is_no_number_is_refused():
    assert "fraction is nan" in refused(response_lengths=quantiles((float("nan"), 96), (1.0, 384)))


@given(st.integers(1, 400))
def test_one_quantile_is_one_phase(tokens):
    w = workload(response_tokens=tokens, response_lengths=quantiles((1.0, tokens)))
    assert w.phases == workload(response_tokens=tokens).phases
