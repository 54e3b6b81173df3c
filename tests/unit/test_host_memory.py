"""Host memory of a plan's trainings, by hand."""

from __future__ import annotations

import attrs
import numpy as np
import pytest

from rpeg_core.costing.host import HostState, host_memory
from rpeg_core.errors import CostTermError
from rpeg_core.ir import Role
from rpeg_core.report.host import host_document, host_sentence
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.toys import on, toy_book, toy_memory_terms, toy_plan, toy_ppo

MACHINE = DeviceSpace(racks=1, nodes_per_rack=2, gpus_per_node=4)
STATE = {("actor", "training"): 480.0, ("critic", "training"): 120.0}
PLAN = toy_plan(
    actor_generation=on(0),
    reference_inference=on(0),
    reward_inference=on(0),
    critic_inference=on(0),
    actor_training=on(0, 8),
    critic_training=on(4, 6),
)


def book(*, on_host: bool):
    """Each GPU's share of the state, and on the host twice that."""

    def host(batch):
        whole = STATE[batch.model.name, "training"] if batch.role is Role.TRAINING else 0.0
        return np.full(len(batch.layouts), 2.0 * whole) / batch.layouts.gpus

    terms = toy_memory_terms(training_state=STATE)
    if on_host:
        terms = [attrs.evolve(term, host=host) if term.quantity == "training state" else term for term in terms]
    return toy_book(toy_ppo(), MACHINE, memory=terms)


def test_a_term_that_returns_nonsense_is_named() -> None:
    terms = [attrs.evolve(term, host=lambda batch: np.full(1, -1.0)) for term in toy_memory_terms(training_state=STATE)]
    with pytest.raises(CostTermError, match="the host of 'actor_training'"):
        host_memory(toy_ppo(), PLAN, toy_book(toy_ppo(), MACHINE, memory=terms))


def test_the_fullest_node_holds_what_its_processes_hold() -> None:
    """Actor: 8 GPUs of 60 bytes, 120 each on the host. Critic: 2 GPUs of 60, 120 each, both in the second node."""
    found = host_memory(toy_ppo(), PLAN, book(on_host=True))
    assert found.states == (
        HostState(operator="actor_training", freed_bytes=60.0, process_bytes=120.0),
        HostState(operator="critic_training", freed_bytes=60.0, process_bytes=120.0),
    )
    assert found.node_bytes == 4 * 120.0 + 2 * 120.0


def test_without_a_word_of_the_cost_terms_nothing_is_known() -> None:
    found = host_memory(toy_ppo(), PLAN, book(on_host=False))
    assert (found.states, found.node_bytes) == ((), 0.0)
    assert host_sentence(found, 1e9).startswith("host memory: no cost term says")


@pytest.mark.parametrize(("limit", "end"), [(721e9, "721.0 GB"), (719e9, "719.0 GB, more than it has")])
def test_the_sentence_says_whether_the_node_has_it(limit: float, end: str) -> None:
    found = host_memory(toy_ppo(), PLAN, book(on_host=True))
    large = attrs.evolve(
        found,
        node_bytes=720e9,
        states=tuple(attrs.evolve(s, freed_bytes=1e9 * s.freed_bytes) for s in found.states),
    )
    assert host_sentence(large, limit) == (
        "host memory: keeping optimizer states there would free 60.0 GB per GPU of actor_training, 60.0 GB per GPU of "
        f"critic_training and take 720.0 GB of a node's {end}"
    )
    assert host_document(large, limit)["fits"] is (limit > 720e9)
