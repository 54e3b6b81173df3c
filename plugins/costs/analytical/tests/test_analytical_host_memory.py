"""Host memory of offloaded state, against what Ray printed of runs that others made."""

from __future__ import annotations

from pathlib import Path

import pytest
from rpeg_plugin_analytical.host_memory import PROCESS_BYTES, Offloaded, host_memory

from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.public_models import load_model

BAICHUAN_13B = {
    "layers": 40,
    "hidden": 5120,
    "heads": 40,
    "ffn": 13696,
    "vocab": 64000,
}  # baichuan-inc/Baichuan-13B-Base config.json


def moe() -> ModelSpec:
    return load_model("Qwen/Qwen3-30B-A3B", base_dir=Path())


def per_rank(trainer: Offloaded) -> float:
    return sum(trainer.rank_bytes().values()) / 1e9


def test_slime_with_the_optimizer_on_the_host() -> None:
    """THUDM/slime#1851: eight trainers of 101.87 to 102.70 GB."""
    trainer = Offloaded(model=moe(), data=2, tensor=4, expert=8, ranks=8, optimizer=True, buffers=True, versions=2)
    assert per_rank(trainer) == pytest.approx(102.3, rel=0.01)


def test_the_same_on_four_gpus() -> None:
    """vllm-project/vime#56: TP2 on 4 GPUs, about 196 GB each."""
    trainer = Offloaded(model=moe(), data=2, tensor=2, expert=4, ranks=4, optimizer=True, buffers=True, versions=2)
    assert per_rank(trainer) == pytest.approx(196.0, rel=0.05)


def test_deepspeed_with_the_optimizer_on_the_host() -> None:
    """OpenRLHF/OpenRLHF#171: an actor of 211.81 GB on one GPU, 13B with Adam offload."""
    actor = load_model(BAICHUAN_13B, base_dir=Path(), name="Baichuan-13B")
    assert actor.total_parameters == pytest.approx(13.26e9, rel=1e-3)
    assert per_rank(Offloaded(model=actor, optimizer=True)) == pytest.approx(211.81, rel=0.01)


def test_a_node_adds_up_its_processes_engines_and_object_store() -> None:
    """By hand: 8 trainers and 4 engine workers of 1.67 GB, 10 GB of sleeping weights, 30 % of 500 GB for Ray."""
    node = host_memory(
        [Offloaded(model=moe(), data=8, expert=8, ranks=8)], 500e9, engine_processes=4, engine_weights=10e9, ray=True
    )
    assert node.terms == pytest.approx({"process": 12 * PROCESS_BYTES, "sleeping engines": 10e9, "object store": 150e9})
    assert node.fits
    assert not host_memory([Offloaded(model=moe(), data=8, optimizer=True, ranks=8)], 400e9).fits


def test_the_object_store_stops_growing() -> None:
    assert host_memory([], 2e12, ray=True).terms == {"object store": 200e9}
    assert host_memory([], 2e12).terms == {}


def test_what_is_sharded_exists_once_and_what_is_mirrored_on_every_rank() -> None:
    spec = load_model("Qwen/Qwen2.5-7B", base_dir=Path())
    one, four = (Offloaded(model=spec, data=d, ranks=d, optimizer=True, versions=1).rank_bytes() for d in (1, 4))
    assert one["optimizer state"] == pytest.approx(12 * 7615616512)
    assert 4 * four["optimizer state"] == pytest.approx(one["optimizer state"])
    assert four["versions of the weights"] == one["versions of the weights"] == pytest.approx(2 * 7615616512)
