"""The text forms of the algorithms' graphs, byte for byte.

A refactoring leaves these files as they are. After a change that is meant to show in them::

    UPDATE_GOLDENS=1 pytest tests/goldens

and read the diff.
"""

import os
from pathlib import Path

import pytest
import rpeg_plugin_dpo
import rpeg_plugin_grpo
import rpeg_plugin_ppo

from rpeg_core.ir import from_text, to_text, violations
from rpeg_core.planning.structures import Structure
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.workload import Workload

FOLDER = Path(__file__).parent

POLICY = ModelSpec(
    name="small",
    family="llama",
    layers=4,
    hidden=64,
    heads=8,
    kv_heads=4,
    head_dim=8,
    ffn=128,
    gated_ffn=True,
    vocab=256,
    tied_embeddings=False,
    source="inline",
)
JUDGE = POLICY.with_head(Head.SCALAR)


def graph(template, roles, structure, **settings):
    workload = Workload(prompts=16, rollouts_per_prompt=2, prompt_tokens=20, response_tokens=40)
    return template.build(workload, roles, structure, template.settings(**settings))


PPO = {"actor": POLICY, "critic": JUDGE, "reward": JUDGE, "reference": POLICY}
GOLDENS = {
    "ppo-tau1": graph(rpeg_plugin_ppo.TEMPLATE, PPO, Structure(staleness=(("actor", 1), ("critic", 1)))),
    "ppo-shared": graph(
        rpeg_plugin_ppo.TEMPLATE,
        PPO,
        Structure(staleness=(("actor_critic", 0),), actor_critic_sharing=True),
    ),
    "grpo-model": graph(
        rpeg_plugin_grpo.TEMPLATE,
        {"actor": POLICY, "reward": JUDGE, "reference": POLICY},
        Structure(staleness=(("actor", 0),)),
    ),
    "grpo-function": graph(
        rpeg_plugin_grpo.TEMPLATE,
        {"actor": POLICY, "reference": POLICY},
        Structure(staleness=(("actor", 1),)),
        reward_seconds_per_sample=0.02,
    ),
    "dpo": graph(
        rpeg_plugin_dpo.TEMPLATE,
        {"actor": POLICY, "reference": POLICY},
        Structure(staleness=(("actor", 0),)),
    ),
}


@pytest.mark.parametrize("name", GOLDENS)
def test_golden(name):
    path = FOLDER / f"{name}.rpeg.txt"
    text = to_text(GOLDENS[name])
    if os.environ.get("UPDATE_GOLDENS"):
        path.write_bytes(text.encode())
    assert text.encode() == path.read_bytes()


@pytest.mark.parametrize("name", GOLDENS)
def test_golden_can_be_read(name):
    read = from_text((FOLDER / f"{name}.rpeg.txt").read_text())
    assert violations(read) == []
    assert read == GOLDENS[name]


def test_every_golden_is_compared():
    assert {path.name for path in FOLDER.glob("*.rpeg.txt")} == {f"{name}.rpeg.txt" for name in GOLDENS}
