"""Fragments of parameters, and initial weights that no layout changes."""

from __future__ import annotations

import math

import pytest
import torch
from megatron_world import run_world
from rpeg_plugin_megatron.device import choose_device
from rpeg_plugin_megatron.groups import Place, build_groups
from rpeg_plugin_megatron.initial import STANDARD_DEVIATION, fill, initial_tensor, random_reader
from rpeg_plugin_megatron.model import build_shard
from rpeg_plugin_megatron.shards import Fragment, fragments_of, unique_elements

from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation
from rpeg_core.spec.models import Head, ModelSpec


def test_a_gated_projection_is_two_parameters() -> None:
    # gate and up have 6 rows each; rank 1 of 2 holds rows 3-5 of both.
    local = torch.arange(12.0).reshape(6, 2)
    name = "decoder.layers.3.mlp.linear_fc1.weight"
    (gate, gate_view), (up, up_view) = fragments_of(name, local, tensor_rank=1, tensor_ranks=2, gated=True)
    assert gate == Fragment(f"{name}#gate", (6, 2), (3, 0), (6, 2))
    assert up == Fragment(f"{name}#up", (6, 2), (3, 0), (6, 2))
    up_view.zero_()
    assert local[3:].abs().sum() == 0
    assert gate_view.sum() == 15


def test_columns_rows_and_replicated_parameters() -> None:
    local = torch.zeros(4, 6)

    def box(name: str) -> Fragment:
        ((fragment, _),) = fragments_of(name, local, tensor_rank=1, tensor_ranks=3, gated=True)
        return fragment

    assert box("output_layer.weight") == Fragment("output_layer.weight", (12, 6), (4, 0), (8, 6))
    projection = "decoder.layers.0.self_attention.linear_proj.weight"
    assert box(projection) == Fragment(projection, (4, 18), (0, 6), (4, 12))
    assert box("score.weight") == Fragment("score.weight", (4, 6), (0, 0), (4, 6))


def test_boxes_intersect() -> None:
    a, b = Fragment("w", (8, 8), (0, 0), (4, 8)), Fragment("w", (8, 8), (2, 4), (8, 8))
    common = Fragment("w", (8, 8), (2, 4), (4, 8))
    assert a.intersection(b) == common
    assert common.elements == 8
    assert common.within(b) == (slice(0, 2), slice(0, 4))
    assert a.intersection(Fragment("w", (8, 8), (4, 0), (8, 8))) is None
    assert a.intersection(Fragment("v", (8, 8), (0, 0), (8, 8))) is None
    assert unique_elements([a, a, Fragment("w", (8, 8), (4, 0), (8, 8))]) == 64


def test_initial_weights_are_keyed_by_seed_and_name() -> None:
    whole = initial_tensor("output_layer.weight", (700, 30), seed=3)
    assert whole.std().item() == pytest.approx(STANDARD_DEVIATION, rel=0.03)
    assert whole.mean().item() == pytest.approx(0.0, abs=4 * STANDARD_DEVIATION / math.sqrt(whole.numel()))
    assert not torch.equal(whole, initial_tensor("output_layer.weight", (700, 30), seed=4))
    assert not torch.equal(whole, initial_tensor("embedding.word_embeddings.weight", (700, 30), seed=3))
    assert whole.unique().numel() > 0.99 * whole.numel()  # no block repeats another
    box = Fragment("output_layer.weight", (700, 30), (250, 10), (600, 20))
    assert torch.equal(random_reader(3)(box), whole[box.slices])
    assert torch.equal(initial_tensor("decoder.final_layernorm.weight", (5,), 0), torch.ones(5))
    assert torch.equal(initial_tensor("decoder.layers.0.mlp.linear_fc1.bias#up", (5,), 0), torch.zeros(5))


PLACES = tuple(
    Place(Allocation(0, layout.gpus), layout)
    for layout in (Layout(1, 1, 1), Layout(1, 1, 2), Layout(1, 2, 1), Layout(2, 1, 1))
)


def _spec(head: Head, *, tied: bool) -> ModelSpec:
    return ModelSpec(
        name="tiny",
        family="inline",
        layers=2,
        hidden=16,
        heads=4,
        kv_heads=2,
        head_dim=8,
        ffn=24,
        gated_ffn=True,
        vocab=32,
        tied_embeddings=tied,
        head=head,
        qkv_bias=True,
        qk_norm=True,
    )


def _filled(rank: int, world: int) -> list[tuple[int, int, str, torch.Tensor, Fragment]]:
    groups = build_groups(PLACES)
    found = []
    for index, (head, tied) in enumerate((head, tied) for head in Head for tied in (False, True)):
        for place in PLACES:
            if place not in groups:
                continue
            shard = build_shard(_spec(head, tied=tied), groups[place], device=choose_device("cpu"))
            fill(shard, random_reader(7))
            found += [(index, PLACES.index(place), f.name, view.clone(), f) for f, view in shard.fragments]
    return found


def test_places_hold_every_parameter_once_and_start_alike() -> None:
    held = [item for result in run_world(_filled, 2) for item in result]
    for index, (head, tied) in enumerate((head, tied) for head in Head for tied in (False, True)):
        total = _spec(head, tied=tied).total_parameters
        for place in range(len(PLACES)):
            assert total == unique_elements([f for i, p, _, _, f in held if (i, p) == (index, place)])
    for _, _, name, value, fragment in held:
        assert torch.equal(value, initial_tensor(name, fragment.shape, 7)[fragment.slices])
