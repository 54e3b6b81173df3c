"""Alpha-beta formulas, and COMM and RESHARD built on them."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rpeg_plugin_analytical.collectives import (
    all_gather_s,
    all_reduce_s,
    all_to_all_s,
    point_to_point_s,
    reduce_scatter_s,
)

from rpeg_core.costing.batches import Links

LINKS = Links(np.array([2.0]), np.array([10.0]))  # 2 s and 10 bytes/s
ALL = (all_gather_s, all_reduce_s, all_to_all_s, reduce_scatter_s)


def test_four_ranks_by_hand():
    # 100 bytes take 10 s; three steps of 2 s; a ring moves 3/4 of the bytes per half.
    assert reduce_scatter_s(100.0, 4, LINKS) == [3 * 2 + 0.75 * 10]
    assert all_gather_s(100.0, 4, LINKS) == [3 * 2 + 0.75 * 10]
    assert all_reduce_s(100.0, 4, LINKS) == [6 * 2 + 1.5 * 10]
    assert all_to_all_s(100.0, 4, LINKS) == [3 * 2 + 10]
    assert point_to_point_s(100.0, LINKS) == [2 + 10]


@pytest.mark.parametrize("collective", ALL)
def test_one_rank_sends_nothing(collective):
    assert collective(100.0, 1, LINKS) == [0.0]


@given(
    few=st.floats(0, 1e12),
    more=st.floats(0, 1e12),
    ranks=st.integers(1, 2048),
)
def test_more_bytes_never_take_less_time(few, more, ranks):
    for collective in ALL:
        assert collective(few, ranks, LINKS) <= collective(few + more, ranks, LINKS)


@pytest.mark.parametrize("model", ["analytical", "paper"])
def test_comm_is_limited_by_the_smaller_side(tiny, model):
    # 80 bytes over 2 pairs, between nodes: 4 s + 40 / 8
    batch = tiny.transfer(reshard=False, payload=80.0, source=2, destination=4, tier=1)
    assert tiny.price(f"{model}.communicate", batch) == 4 + 40 / 8
    assert tiny.price(f"{model}.reshard", batch) == 0.0


@pytest.mark.parametrize("model", ["analytical", "paper"])
def test_reshard_is_an_all_to_all_of_the_shards(tiny, model):
    # 80 bytes over 4 GPUs in a node: 3 * 1 s + 20 / 10
    batch = tiny.transfer(reshard=True, payload=80.0, source=4, destination=4, tier=0)
    assert tiny.price(f"{model}.reshard", batch) == 3 + 20 / 10
    assert tiny.price(f"{model}.communicate", batch) == 0.0
    alone = tiny.transfer(reshard=True, payload=80.0, source=1, destination=1, tier=0)
    assert tiny.price(f"{model}.reshard", alone) == 0.0
