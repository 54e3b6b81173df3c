"""What a rank keeps between nodes: names, places, parts, and when a version is needed no more."""

from __future__ import annotations

import pytest
import torch
from rpeg_plugin_megatron.places import Place
from rpeg_plugin_megatron.store import RowsKey, RowsValue, Store, WeightsKey

from rpeg_core.errors import ExecutionError
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.machine import Allocation

HERE = Place(Allocation(0, 2), Layout(2, 1, 1))
THERE = Place(Allocation(0, 2), Layout(1, 1, 2))


def test_one_artifact_may_lie_at_several_places() -> None:
    store = Store()
    for place, value in ((HERE, 1.0), (THERE, 2.0)):
        store.put_rows(RowsKey(4, "values", place), RowsValue(torch.full((2,), value)))
    assert [store.rows(RowsKey(4, "values", place)).tensor.tolist() for place in (HERE, THERE)] == [[1, 1], [2, 2]]
    assert len(store) == 1
    assert store.bytes == 16
    store.drop(4, "values")
    assert len(store) == 0


def test_missing_rows_are_named() -> None:
    store = Store()
    part = RowsValue(torch.zeros(1), torch.zeros(1, dtype=torch.int64))
    store.put_rows(RowsKey(4, "values", HERE, whole=False), part)
    with pytest.raises(ExecutionError, match="rows of 'values', made by node 4, should be at") as caught:
        store.rows(RowsKey(4, "values", HERE))
    assert caught.value.facts == ("this rank has of them: a part at devices 0-1 as dp2 pp1 tp1",)


def test_a_version_is_unused_when_its_last_artifact_is_dropped() -> None:
    store, key = Store(), WeightsKey("actor", HERE, 3)
    store.put_weights(7, "W_actor", key, readers=1)
    store.put_weights(8, "W_actor", key, readers=1)
    assert store.drop(7, "W_actor") is None
    assert store.drop(8, "W_actor") == key
    assert store.drop(8, "W_actor") is None


def test_a_version_is_awaited_until_all_its_readers_have_read() -> None:
    store, key = Store(), WeightsKey("actor", HERE, 3)
    store.put_weights(7, "W_actor", key, readers=2)
    store.read_weights(7, "W_actor")
    assert store.is_awaited(key)
    store.read_weights(7, "W_actor")
    assert not store.is_awaited(key)
    store.read_weights(9, "W_actor")  # not here


def test_unknown_weights_are_named() -> None:
    store = Store()
    store.put_weights(7, "W_actor", WeightsKey("actor", HERE, 3), readers=2)
    with pytest.raises(ExecutionError, match="weights 'W_critic' made by node 7 are not here") as caught:
        store.weights(7, "W_critic")
    assert caught.value.facts == ("this rank has: W_actor of node 7",)
