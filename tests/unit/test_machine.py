"""The device space and intervals against coordinates and sets of GPUs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rpeg_core.errors import ExperimentError
from rpeg_core.spec.machine import Allocation, AlphaBeta, DeviceSpace, LinkTier, Tier
from rpeg_core.testing.strategies import machines

SPACE = DeviceSpace(racks=2, nodes_per_rack=3, gpus_per_node=4)


@st.composite
def intervals(draw, gpus=24):
    start = draw(st.integers(0, gpus - 1))
    return Allocation(start, draw(st.integers(start + 1, gpus)))


def gpus(allocation):
    return set(range(allocation.start, allocation.stop))


def test_sizes_and_text():
    assert (SPACE.gpus, SPACE.gpus_per_rack) == (24, 12)
    assert SPACE.whole() == Allocation(0, 24)
    assert str(SPACE) == "2x3x4"
    assert str(Allocation(0, 4)) == "0-3"
    assert str(Allocation(7, 8)) == "7"


@given(intervals(), intervals())
def test_overlap_is_the_size_of_the_intersection(a, b):
    assert a.size == len(gpus(a))
    assert a.overlap(b) == b.overlap(a) == len(gpus(a) & gpus(b))
    assert a.disjoint(b) is gpus(a).isdisjoint(gpus(b))


@given(machines(), st.data())
def test_the_tier_is_the_largest_distance_between_two_gpus(machine, data):
    sizes = (machine.racks, machine.nodes_per_rack, machine.gpus_per_node)
    places = list(itertools.product(*map(range, sizes)))

    def distance(chosen):
        racks, nodes = {places[g][0] for g in chosen}, {places[g][:2] for g in chosen}
        return Tier.INTER_RACK if len(racks) > 1 else Tier.INTER_NODE if len(nodes) > 1 else Tier.INTRA_NODE

    a, b = data.draw(intervals(machine.gpus)), data.draw(intervals(machine.gpus))
    assert machine.tier(a.start, a.stop) is distance(gpus(a))
    assert machine.tier_between(a, b) is machine.tier_between(b, a) is distance(gpus(a) | gpus(b))


@pytest.mark.parametrize(
    ("start", "stop", "tier"),
    [
        (0, 4, Tier.INTRA_NODE),
        (3, 5, Tier.INTER_NODE),
        (8, 12, Tier.INTRA_NODE),
        (0, 12, Tier.INTER_NODE),
        (11, 13, Tier.INTER_RACK),
        (0, 24, Tier.INTER_RACK),
    ],
)
def test_tiers_by_hand(start, stop, tier):
    assert SPACE.tier(start, stop) is tier


def test_slower_tiers_are_larger():
    assert Tier.INTRA_NODE < Tier.INTER_NODE < Tier.INTER_RACK
    assert [int(tier) for tier in Tier] == [0, 1, 2]  # indices of HardwareProfile.tiers


@pytest.mark.parametrize("key", ["racks", "nodes_per_rack", "gpus_per_node"])
@pytest.mark.parametrize("value", [0, -2, 2.0, "4", True, None])
def test_dimensions_are_positive_integers(key, value):
    with pytest.raises(ExperimentError) as caught:
        DeviceSpace(**({"racks": 1, "nodes_per_rack": 2, "gpus_per_node": 4} | {key: value}))
    assert str(caught.value) == (f"error[experiment]: cluster.{key} is {value!r}\n  allowed: an integer of at least 1")


@pytest.mark.parametrize(
    ("latency", "bandwidth", "text"),
    [
        (-1e-6, 1e9, "latency_s is -1e-06; allowed: a finite number >= 0"),
        (float("nan"), 1e9, "latency_s is nan; allowed: a finite number >= 0"),
        (float("inf"), 1e9, "latency_s is inf; allowed: a finite number >= 0"),
        (0.0, 0.0, "bandwidth_bytes_per_s is 0.0; allowed: a finite number > 0"),
        (0.0, float("nan"), "bandwidth_bytes_per_s is nan; allowed: a finite number > 0"),
        (0.0, float("inf"), "bandwidth_bytes_per_s is inf; allowed: a finite number > 0"),
    ],
)
def test_link_parameters(latency, bandwidth, text):
    with pytest.raises(ValueError, match=f"^{text}$"):
        AlphaBeta(latency, bandwidth)


def test_a_tier_keeps_collective_and_point_to_point_apart():
    tier = LinkTier(collective=AlphaBeta(1e-6, 1e9), p2p=AlphaBeta(2e-6, 5e8))
    assert (tier.collective.latency_s, tier.p2p.latency_s) == (1e-6, 2e-6)
