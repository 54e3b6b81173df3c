"""Remedies: each one is verified, the smallest of its kind, and what does not help is said.

Slowdowns are computed anew from the plans before and after.
"""

from __future__ import annotations

import time

import attrs
import pytest
import yaml

from rpeg_core.cli.planning import pinning
from rpeg_core.planning.changes import _prompts
from rpeg_core.planning.footprint import least_memory
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.planner import Planner
from rpeg_core.planning.remedies import find_headroom, find_remedies, present_plan
from rpeg_core.planning.structures import StructureChoices
from rpeg_core.plugins.registry import Registry
from rpeg_core.records import HardwareProfile
from rpeg_core.report.remedies import changes, first_step
from rpeg_core.spec.experiment import Experiment, parse_experiment
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.workload import Workload

PRIME = Workload(prompts=509, prompt_tokens=512, response_tokens=1024)
MODEL = {"config": "meta-llama/Llama-3.1-8B"}


@pytest.fixture(scope="module")
def registry() -> Registry:
    return Registry()


def experiment(*, space: dict[str, object] | None = None, **cluster: object) -> Experiment:
    return parse_experiment(
        {
            **({} if space is None else {"space": space}),
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
    if key == "workload.response_tokens":
        return attrs.evolve(base, workload=attrs.evolve(base.workload, response_tokens=int(value)))
    if key == "workload.cache_bytes_per_element":
        return attrs.evolve(base, workload=attrs.evolve(base.workload, cache_bytes_per_element=int(value)))
    if key == "structure.staleness":
        return attrs.evolve(base, structure=attrs.evolve(base.structure, staleness=(0,)))
    if key.startswith("space."):
        _, role, axis = key.split(".")
        return attrs.evolve(base, space=experiment(space={role: {axis: yaml.safe_load(value)}}).space)
    number = float(value) if key == "cluster.memory_gb" else int(value)
    return attrs.evolve(base, cluster=attrs.evolve(base.cluster, **{key.partition(".")[2]: number}))


def profiles(registry: Registry) -> list[HardwareProfile]:
    return [loaded.record for loaded in registry.records("hardware") if isinstance(loaded.record, HardwareProfile)]


def make(registry: Registry):
    return lambda one: Planner(one, registry)


@pytest.mark.parametrize("memory_gb", [40, 60, 80])
def test_every_remedy_makes_it_fit_and_less_of_it_does_not(registry, memory_gb) -> None:
    base = experiment(memory_gb=memory_gb)
    assert not fits(registry, base)
    found = find_remedies(base, make(registry), profiles=profiles(registry), seconds=60).found
    assert [r.asks_for for r in found] == sorted(r.asks_for for r in found), (
        "GPUs come last, with more memory after more"
    )
    for kind in range(3):
        costs = [remedy.slowdown for remedy in found if remedy.asks_for == kind]
        assert costs == sorted(costs)
    for remedy in found:
        assert remedy.tokens_per_s > 0
        assert 0 < remedy.peak_bytes <= remedy.usable_bytes
        assert fits(registry, changed(base, remedy.key, remedy.value))
    less = {
        "workload.prompts": lambda value: str(2 * int(value)),
        "cluster.nodes_per_rack": lambda value: str(int(value) // 2),
    }
    for remedy in found:
        if remedy.key in less:
            assert not fits(registry, changed(base, remedy.key, less[remedy.key](remedy.value)))
    sizes = sorted(profile.device.memory_bytes / 1e9 for profile in profiles(registry))
    wanted = next(
        size for size in sizes if size > memory_gb and fits(registry, changed(base, "cluster.memory_gb", str(size)))
    )
    [memory] = [float(remedy.value) for remedy in found if remedy.key == "cluster.memory_gb"]
    assert memory == pytest.approx(wanted, rel=1e-3)


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
    assert ("structure.staleness", "[0]", "[1]") in [(r.key, r.value, r.instead_of) for r in found]


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


# --- compared with a plan at hand


def pinned(**changed: Pin) -> dict[str, Pin]:
    """Everything on all four GPUs as a pipeline of two stages with small microbatches, but for ``changed``."""
    others = ("reference_inference", "reward_inference", "critic_inference", "actor_training", "critic_training")
    piped = Pin(allocation=Allocation(0, 4), data=1, pipeline=2, tensor=2, microbatches=16)
    whole = Pin(allocation=Allocation(0, 4), data=1, pipeline=1, tensor=4, microbatches=1)
    return {"actor_generation": whole, **dict.fromkeys(others, piped), **changed}


def predicted(registry: Registry, one: Experiment):
    problem = Planner(one, registry).problem()
    structure = problem.structures[0]
    plan = structure.plan((0,) * len(structure.candidates))
    return structure.predict(plan), plan


def test_other_degrees_of_the_operator_at_the_peak(registry) -> None:
    """A training without pipeline keeps all 64 sequences of a replica; with one it keeps microbatches."""
    wasteful = Pin(allocation=Allocation(0, 4), data=4, pipeline=1, tensor=1, microbatches=1)
    base = attrs.evolve(experiment(memory_gb=150), pins=pinned(actor_training=wasteful))
    prediction, plan = predicted(registry, base)
    assert not prediction.evaluation.feasible
    assert prediction.memory.peak.moment == "actor_training"
    present = present_plan(prediction, plan)
    remedies = find_remedies(base, make(registry), present=present, seconds=60)
    assert remedies.present is present
    remedy = next(r for r in remedies.found if r.key == "pin.actor_training")
    assert remedy.instead_of.startswith("dp 4") or remedy.instead_of.startswith("pp 1")
    parts = dict(part.split(" ", 1) for part in remedy.value.split(", "))
    fields = {"dp": "data", "pp": "pipeline", "tp": "tensor", "microbatches": "microbatches"}
    better = attrs.evolve(wasteful, **{fields[key]: int(value) for key, value in parts.items()})
    after, _ = predicted(registry, attrs.evolve(base, pins=pinned(actor_training=better)))
    assert after.evaluation.feasible
    assert after.memory.peak.peak_bytes == remedy.peak_bytes
    assert after.evaluation.tokens_per_s == remedy.tokens_per_s
    assert remedy.slowdown == pytest.approx(present.tokens_per_s / after.evaluation.tokens_per_s - 1)
    assert remedy.step_s == pytest.approx(after.evaluation.makespan_s / 8)


def test_a_cache_of_8_bits_helps_where_the_cache_is_the_peak(registry) -> None:
    long = attrs.evolve(experiment().workload, prompts=512, response_tokens=3000)
    base = attrs.evolve(experiment(memory_gb=9000), workload=long)
    replicas = Pin(allocation=Allocation(0, 4), data=4, pipeline=1, tensor=1, microbatches=1)
    small = {
        name: pin if pin.pipeline == 1 else attrs.evolve(pin, microbatches=64)
        for name, pin in pinned(actor_generation=replicas).items()
    }
    base = attrs.evolve(base, pins=small)
    prediction, plan = predicted(registry, base)
    peak = prediction.memory.peak
    assert peak.moment == "actor_generation"
    cache = 128 * (512 + 3000) * 32 * 2 * 8 * 128 * 2  # sequences, tokens, layers, K and V, KV heads, width, bytes
    assert sum(item.bytes for item in peak.items if item.quantity == "KV cache") == cache
    tight = attrs.evolve(base.cluster, memory_gb=(peak.peak_bytes - 0.4 * cache) / 0.9 / 1e9)
    remedies = find_remedies(
        attrs.evolve(base, cluster=tight), make(registry), present=present_plan(prediction, plan), seconds=60
    )
    remedy = next(r for r in remedies.found if r.key == "workload.cache_bytes_per_element")
    assert (remedy.value, remedy.instead_of) == ("1", "2")
    assert remedy.peak_bytes == pytest.approx(peak.peak_bytes - cache / 2)
    assert remedy.slowdown < 0, "decoding reads half as much"


def test_headroom_is_a_tenth_of_the_usable_memory(registry) -> None:
    wasteful = Pin(allocation=Allocation(0, 4), data=2, pipeline=1, tensor=2, microbatches=1)
    wide = attrs.evolve(experiment(memory_gb=5000), pins=pinned(actor_training=wasteful))
    peak = predicted(registry, wide)[0].memory.peak.peak_bytes
    tight = attrs.evolve(wide, cluster=attrs.evolve(wide.cluster, memory_gb=1.02 * peak / 0.9 / 1e9))
    prediction, plan = predicted(registry, tight)
    assert prediction.evaluation.feasible
    found = find_headroom(tight, make(registry), present_plan(prediction, plan), seconds=60).found
    assert found
    for remedy in found:
        assert remedy.asks_for == 0
        assert remedy.usable_bytes == pytest.approx(1.02 * peak)
        assert remedy.peak_bytes <= 0.9 * remedy.usable_bytes


def test_what_was_not_tried_is_said(registry) -> None:
    remedies = find_remedies(experiment(memory_gb=40), make(registry), cancelled=lambda: True)
    assert (remedies.found, remedies.tried, remedies.stopped) == ((), (), True)
    assert {"workload.prompts", "cluster.nodes_per_rack", "cluster.memory_gb"} <= set(remedies.untried)


# --- axes beyond the paper's plan space


ON_EIGHT = {"gpus": "0-7", "dp": 8, "pp": 1, "tp": 1}


def dpo(*, nodes: int = 1, pins: dict[str, object] | None = None, **workload: object) -> Experiment:
    """Llama-3.1-8B on H100s; pins are of the training, or of all three operators."""
    return parse_experiment(
        {
            "algorithm": "dpo",
            "models": {"actor": MODEL, "reference": {"same_as": "actor"}},
            "workload": {
                "prompts": 64,
                "rollouts_per_prompt": 2,
                "prompt_tokens": 1024,
                "response_tokens": 3072,
                **workload,
            },
            "cluster": {"hardware": "h100", "nodes_per_rack": nodes},
            **({} if pins is None else {"pin": pins}),
        }
    )


def everywhere(**training: object) -> dict[str, object]:
    return {
        "actor_inference": ON_EIGHT,
        "reference_inference": ON_EIGHT,
        "actor_training": {**ON_EIGHT, **training},
    }


@pytest.mark.parametrize("with_plan", [True, False])
def test_all_pins_are_given_up_where_no_single_one_is_enough(registry, with_plan) -> None:
    """Inference alone has 16 sequences of 4,096 tokens at once, with logits that leave no room for two models."""
    base = dpo(pins=everywhere(recompute="none"))
    prediction, plan = predicted(registry, base)
    present = present_plan(prediction, plan) if with_plan else None
    remedies = find_remedies(base, make(registry), present=present, profiles=profiles(registry), seconds=60)
    remedy = next(r for r in remedies.found if r.key == "pin")
    assert "cluster.memory_gb" not in {r.key for r in remedies.found}, "388 GB are more than any GPU has"
    assert "recompute none" in remedy.instead_of
    assert "recompute left out" in remedy.value
    pins = {name: dict(given) for name, given in everywhere(recompute="none").items()}
    for part in remedy.value.split("; "):
        name, _, texts = part.partition(" ")
        pins[name] |= dict(text.split(" ", 1) for text in texts.split(", "))
    for given in pins.values():
        if given.get("recompute") == "left out":
            del given["recompute"]
        given |= {key: int(value) for key, value in given.items() if key not in ("gpus", "recompute")}
    assert fits(registry, dpo(pins=pins))
    assert "in pin set" in first_step(remedies)


LONG = {"prompts": 4, "response_tokens": 131_072}


def test_context_parallelism_is_tried_for_a_pinned_training(registry) -> None:
    """Without ``space:``: 132k tokens per GPU at tp 8; no other degrees on these GPUs, but cp 8 has an eighth."""
    on_all = {"gpus": "0-31", "dp": 4, "pp": 1, "tp": 8}
    pins = dict.fromkeys(("actor_inference", "reference_inference", "actor_training"), on_all)
    base = dpo(nodes=4, pins=pins, **LONG)
    prediction, plan = predicted(registry, base)
    remedies = find_remedies(base, make(registry), present=present_plan(prediction, plan), seconds=60)
    remedy = next(r for r in remedies.found if r.key == "pin.actor_training" and "cp" in r.value)
    assert "cp 1" in remedy.instead_of
    given = dict(text.split(" ") for text in remedy.value.split(", "))
    better = {**on_all, **{key: yaml.safe_load(value) for key, value in given.items()}}
    assert fits(registry, dpo(nodes=4, pins={**pins, "actor_training": better}, **LONG))


def test_an_axis_that_the_cost_terms_do_not_know_is_not_tried(registry) -> None:
    base = attrs.evolve(dpo(pins=everywhere()), costs=("paper",))
    assert "space.training.cp" in find_remedies(dpo(pins=everywhere()), make(registry), seconds=60).tried
    remedies = find_remedies(base, make(registry), seconds=60)
    assert not [key for key in (*remedies.tried, *(r.key for r in remedies.found)) if key.startswith("space.")]


def test_a_plan_pins_every_axis_and_keeps_the_space(registry) -> None:
    """What ``space:`` opens stays open for pins that are given up, and nothing is open before."""
    space = {"training": {"cp": [1, 2], "recompute": ["selective", "full"], "sequence_parallel": [False, True]}}
    one = attrs.evolve(dpo(), space=experiment(space=space).space)
    planner = Planner(one, registry)
    structure = planner.problem().structures[0]
    for index in (0, -1):
        choice = [index % len(candidates) for candidates in structure.candidates]
        asked = pinning(planner.plan(structure, structure.plan(choice), {}))
        assert asked.space == one.space
        [again] = Planner(asked, registry).problem().structures
        assert [len(candidates) for candidates in again.candidates] == [1, 1, 1]
        assert again.plan((0, 0, 0)) == structure.plan(choice)


def test_response_lengths_are_scaled_with_the_limit_and_said(registry) -> None:
    lengths = [[0.5, 1000], [1.0, 3072]]
    base = dpo(pins=everywhere(), response_lengths=lengths)
    remedies = find_remedies(base, make(registry), seconds=60)
    remedy = next(r for r in remedies.found if r.key == "workload.response_tokens")
    share = int(remedy.value) / 3072
    assert remedy.note == f"every length of workload.response_lengths times {share:g}"
    shorter = [[fraction, round(share * tokens)] for fraction, tokens in lengths]
    assert fits(registry, dpo(pins=everywhere(), response_tokens=int(remedy.value), response_lengths=shorter))
    assert any(f"-> {remedy.value}, {remedy.note}: fits" in line for line in changes(remedies))
