"""Remedies: each one is verified, the smallest of its kind, and what does not help is said."""

from __future__ import annotations

import time

import attrs
import pytest

from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.remedies import _prompts, find_remedies
from rpeg_core.planning.structures import StructureChoices
from rpeg_core.plugins.registry import Registry
from rpeg_core.spec.experiment import Experiment, parse_experiment
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.workload import Workload

PRIME = Workload(prompts=509, prompt_tokens=512, response_tokens=1024)
MODEL = {"config": "meta-llama/Llama-3.1-8B"}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def experiment(**cluster: object) -> Experiment:
    return parse_experiment(
        {
            "algorithm": "ppo",
            "models": {"actor": MODEL, "critic": MODEL, "reward": MODEL, "reference": {"same_as": "actor"}},
            "workload": {"prompts": 256, "prompt_tokens": 512, "response_tokens": 1024},
            "cluster": {"hardware": "gh200", "gpus_per_node": 4, **cluster},
            "search": {"strategy": "greedy"},
        }
    )


def fits(registry: Registry, changed: Experiment) -> bool:
    return least_memory(Planner(changed, registry).problem()) is not None


def changed(base: Experiment, key: str, value: str) -> Experiment:
    if key == "workload.prompts":
        return attrs.evolve(base, workload=attrs.evolve(base.workload, prompts=int(value)))
    if key == "structure.actor_critic_sharing":
        return attrs.evolve(base, structure=attrs.evolve(base.structure, actor_critic_sharing=(True,)))
    if key == "structure.staleness":
        return attrs.evolve(base, structure=attrs.evolve(base.structure, staleness=(0,)))
    number = float(value) if key == "cluster.memory_gb" else int(value)
    return attrs.evolve(base, cluster=attrs.evolve(base.cluster, **{key.partition(".")[2]: number}))


def make(registry: Registry):
    return lambda one: Planner(one, registry)


@pytest.mark.parametrize("memory_gb", [40, 60, 80])
def test_every_remedy_makes_it_fit_and_less_of_it_does_not(registry, memory_gb) -> None:
    base = experiment(memory_gb=memory_gb)
    assert not fits(registry, base)
    found = find_remedies(base, make(registry)).found
    assert found == tuple(sorted(found, key=lambda remedy: (remedy.extent, remedy.key)))
    for remedy in found:
        assert remedy.tokens_per_s > 0
        assert fits(registry, changed(base, remedy.key, remedy.value))
    less = {
        "workload.prompts": lambda value: str(2 * int(value)),
        "cluster.nodes_per_rack": lambda value: str(int(value) // 2),
        "cluster.memory_gb": lambda value: str(float(value) - 0.2),
    }
    for remedy in found:
        if remedy.key in less:
            assert not fits(registry, changed(base, remedy.key, less[remedy.key](remedy.value)))


def least_peak(registry: Registry, one: Experiment) -> float:
    problem = Planner(one, registry).problem()
    solution = least_memory(problem, any_size=True)
    structure = problem.structures[solution.structure]
    return structure.predict(structure.plan(solution.choice)).memory.peak.peak_bytes


def test_staleness_zero_is_proposed_where_a_second_copy_of_the_weights_is_too_much(registry) -> None:
    """Actor and critic swap GPUs: each half holds the training state of one and, when stale, a copy of the other."""
    halves = {name: Pin(allocation=Allocation(0, 2)) for name in ("actor_generation", "critic_training")}
    halves |= {name: Pin(allocation=Allocation(2, 4)) for name in ("actor_training", "critic_inference")}
    stale, synchronous = (
        attrs.evolve(experiment(memory_gb=200), pins=halves, structure=StructureChoices(staleness=(tau,)))
        for tau in (1, 0)
    )
    peaks = least_peak(registry, synchronous), least_peak(registry, stale)
    assert peaks[0] < peaks[1]
    tight = attrs.evolve(stale.cluster, memory_gb=sum(peaks) / 2 / 0.9 / 1e9)
    found = find_remedies(attrs.evolve(stale, cluster=tight), make(registry)).found
    assert [(r.key, r.value, r.instead_of) for r in found if r.extent == 0] == [("structure.staleness", "[0]", "[1]")]


def test_a_prime_number_of_prompts_gives_way_to_one_that_degrees_divide(registry) -> None:
    """509 prompts make one replica only, which fits nowhere; an even number close by makes two, no half is needed."""
    base = experiment(nodes_per_rack=4, memory_gb=40)
    prime = attrs.evolve(base, workload=attrs.evolve(base.workload, prompts=509))
    remedies = [r for r in find_remedies(prime, make(registry)).found if r.key == "workload.prompts"]
    assert not fits(registry, prime)
    (remedy,) = remedies
    assert int(remedy.value) in (508, 510, 512)
    assert fits(registry, changed(prime, remedy.key, remedy.value))


def test_close_numbers_come_before_halves() -> None:
    values = [int(change.value) for change in _prompts(attrs.evolve(experiment(), workload=PRIME), 8)]
    assert values[:4] == [508, 510, 512, 504]
    assert values[4:] == [256, 128, 64, 32, 16, 8, 4, 2, 1]
    assert [int(change.value) for change in _prompts(experiment(), 4)] == [128, 64, 32, 16, 8, 4, 2, 1]


def test_several_racks_are_doubled_as_racks(registry) -> None:
    base = experiment(memory_gb=20, racks=2)
    remedies = find_remedies(base, make(registry))
    assert {"cluster.racks"} & {*(remedy.key for remedy in remedies.found), *remedies.tried}
    assert "cluster.nodes_per_rack" not in {*(remedy.key for remedy in remedies.found), *remedies.tried}


def test_the_time_is_kept(registry) -> None:
    began = time.monotonic()
    remedies = find_remedies(experiment(memory_gb=40), make(registry), seconds=0.0)
    assert time.monotonic() - began < 2
    assert remedies.found == ()
