"""Peak memory per GPU: the placements of model.md, section 4, with byte sums by hand.

A toy term's bytes are divided by the GPUs of the operator's layout. ``where`` lists segments as
``{"GPUs": (persistent, moment, transient)}``.
"""

from __future__ import annotations

import itertools

import attrs
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.costing.memory import Phase, device_memory, serving_copies
from rpeg_core.ir import RpegBuilder
from rpeg_core.records import CostTerm, MemoryKind, Target
from rpeg_core.spec.machine import DeviceSpace
from rpeg_core.testing.strategies import configurations
from rpeg_core.testing.toys import (
    on,
    toy_book,
    toy_memory_terms,
    toy_model,
)

MACHINE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=4)

BYTES = toy_memory_terms(
    training_state={("m", "training"): 600},
    weights={
        ("m", "training"): 100,
        ("m", "generation"): 100,
        ("m", "inference"): 60,
        ("frozen", "inference"): 40,
    },
    transient={
        ("m", "training"): 30,
        ("m", "generation"): 10,
        ("m", "inference"): 4,
        ("frozen", "inference"): 200,
        ("", "inference"): 77,
    },
)


def where(rpeg, plan):
    memory = device_memory(rpeg, plan, toy_book(rpeg, MACHINE, memory=BYTES))
    found = {}
    for segment in memory.segments:
        persistent = sum(i.bytes for i in segment.items if i.persistent)
        transient = sum(i.bytes for i in segment.items if not i.persistent)
        assert segment.peak_bytes == persistent + transient
        others = {"t"} if segment.phase is Phase.ARRIVAL else set()
        assert {i.operator for i in segment.items if not i.persistent} <= {segment.moment, *others}
        found[str(segment.gpus)] = (persistent, segment.moment, transient)
    return found


def pair(tau):
    """g -Y-> t of one trainable model m."""
    b = RpegBuilder("pair")
    b.model("m", toy_model("m"), trainable=True, staleness=tau)
    x = b.data("X", elements=1, bytes_per_element=2)
    y = b.data("Y", elements=1, bytes_per_element=2)
    b.generation("g", "m", reads=[x], writes=[y])
    b.training("t", "m", reads=[y])
    b.connect("g", y, "t")
    b.publish("t", "g")
    return b.build()


def beside_a_frozen_model(tau):
    """g -Y-> r -L-> t; r serves a frozen model and has large transients."""
    b = RpegBuilder("with-reference")
    b.model("m", toy_model("m"), trainable=True, staleness=tau)
    b.model("frozen", toy_model("frozen"), trainable=False)
    x = b.data("X", elements=1, bytes_per_element=2)
    y = b.data("Y", elements=1, bytes_per_element=2)
    z = b.data("L", elements=1, bytes_per_element=2)
    b.generation("g", "m", reads=[x], writes=[y])
    b.inference("r", "frozen", reads=[y], writes=[z])
    b.training("t", "m", reads=[z])
    b.connect("g", y, "r")
    b.connect("r", z, "t")
    b.publish("t", "g")
    return b.build()


# --- the five placements of one trainable model on two GPUs


def test_synchronous_disjoint_serving_holds_weights_only_while_it_runs():
    assert where(pair(tau=0), {"g": on(0), "t": on(1)}) == {
        "0": (0, "g", 100 + 10),
        "1": (600, "t", 100 + 30),
        "2-3": (0, None, 0),
    }


def test_asynchronous_disjoint_serving_keeps_a_shadow_copy():
    assert where(pair(tau=1), {"g": on(0), "t": on(1)}) == {
        "0": (100, "g", 10),
        "1": (600, "t", 100 + 30),
        "2-3": (0, None, 0),
    }


@pytest.mark.parametrize(("tau", "persistent", "peak"), [(0, 40, 240), (1, 140, 340)])
def test_only_the_shadow_copy_adds_to_the_peak_of_another_operator(tau, persistent, peak):
    # r's 200 bytes are the larger transient on GPU 0: g's weights count there only as a shadow copy
    rpeg, plan = beside_a_frozen_model(tau), {"g": on(0), "r": on(0), "t": on(1)}
    assert where(rpeg, plan)["0"] == (persistent, "r", 200)
    memory = device_memory(rpeg, plan, toy_book(rpeg, MACHINE, memory=BYTES))
    assert memory.segments[0].peak_bytes == peak


def test_synchronous_serving_around_training():
    # g on 0-1 (half each), t on 1: when its weights arrive, GPU 1 holds the shards of both
    assert where(pair(0), {"g": on(0, 2), "t": on(1)}) == {
        "0": (0, "g", 50 + 5),
        "1": (600, "g", 100 + 50),
        "2-3": (0, None, 0),
    }


@pytest.mark.parametrize("tau", [1, 2])
def test_asynchronous_serving_around_training_keeps_copies_on_all_its_gpus(tau):
    assert where(pair(tau), {"g": on(0, 2), "t": on(1)}) == {
        "0": (tau * 50, "g", 5),
        "1": (600 + tau * 50, "g", 100 + 50),
        "2-3": (0, None, 0),
    }


def test_synchronous_training_around_serving():
    # t on 0-1 (half each), g on 1
    assert where(pair(0), {"g": on(1), "t": on(0, 2)}) == {
        "0": (300, "t", 50 + 15),
        "1": (300, "g", 50 + 100),
        "2-3": (0, None, 0),
    }


def test_asynchronous_training_around_serving_keeps_a_copy_where_both_are():
    assert where(pair(1), {"g": on(1), "t": on(0, 2)}) == {
        "0": (300, "t", 50 + 15),
        "1": (300 + 100, "g", 50 + 100),
        "2-3": (0, None, 0),
    }


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_full_colocation_keeps_tau_copies_beside_the_training_state(tau):
    assert where(pair(tau), {"g": on(0, 2), "t": on(0, 2, tensor=2)}) == {
        "0-1": (300 + tau * 50, "g", 50 + 50),
        "2-3": (0, None, 0),
    }


def test_weights_that_need_not_move_are_not_held_twice():
    """Trained and served in the same place: the trainer's shard is the one that is served."""
    assert where(pair(0), {"g": on(0, 2, tensor=2), "t": on(0, 2, tensor=2)})["0-1"] == (300, "t", 50 + 15)


def test_arriving_weights_are_below_the_peak_where_a_cache_is_larger_than_a_shard():
    terms = toy_memory_terms(
        training_state={("m", "training"): 600},
        weights={("m", "training"): 100, ("m", "generation"): 100},
        transient={("m", "training"): 30, ("m", "generation"): 102},
    )
    rpeg, plan = pair(0), {"g": on(0, 2), "t": on(0, 2, tensor=2)}
    peak = device_memory(rpeg, plan, toy_book(rpeg, MACHINE, memory=terms)).peak
    assert (peak.moment, peak.phase, peak.peak_bytes) == ("g", Phase.RUN, 300 + 50 + 51)


# --- other placements


def test_a_frozen_model_stays_on_its_gpus():
    assert where(beside_a_frozen_model(0), {"g": on(0), "r": on(2, 4), "t": on(1)}) == {
        "0": (0, "g", 110),
        "1": (600, "t", 130),
        "2-3": (20, "r", 100),
    }


def test_a_frozen_model_on_training_gpus_adds_to_the_training_state():
    assert where(beside_a_frozen_model(0), {"g": on(0), "r": on(1), "t": on(1)})["1"] == (640, "r", 200)


def test_a_shadow_copy_does_not_spread_to_gpus_of_other_operators():
    found = where(beside_a_frozen_model(1), {"g": on(0, 2), "r": on(1, 3, data=2), "t": on(3)})
    assert found == {
        "0": (50, "g", 5),
        "1": (50 + 20, "r", 100),
        "2": (20, "r", 100),
        "3": (600, "t", 130),
    }


def two_servings(tau, trainable=True):
    """g -Y-> i -V-> t of one model (or g, i of a frozen one)."""
    b = RpegBuilder("two")
    b.model("m", toy_model("m"), trainable=trainable, staleness=tau)
    x = b.data("X", elements=1, bytes_per_element=2)
    y = b.data("Y", elements=1, bytes_per_element=2)
    v = b.data("V", elements=1, bytes_per_element=2)
    b.generation("g", "m", reads=[x], writes=[y])
    b.inference("i", "m", reads=[y], writes=[v])
    b.connect("g", y, "i")
    if trainable:
        b.training("t", "m", reads=[v])
        b.connect("i", v, "t")
        b.publish("t", "g", "i")
    return b.build()


@pytest.mark.parametrize(("tau", "trainable"), [(1, True), (0, False)], ids=["shadow", "frozen"])
def test_two_servings_of_one_model_keep_the_largest_shard(tau, trainable):
    # g on 0: 100, i on 0-1: 30 per GPU; the copy of 100 serves both on GPU 0
    plan = {"g": on(0), "i": on(0, 2), **({"t": on(3)} if trainable else {})}
    found = where(two_servings(tau, trainable), plan)
    assert found["0"] == (100, "g", 10)
    assert found["1"] == (30, "i", 2)


def test_two_synchronous_servings_hold_their_own_weights_one_after_the_other():
    found = where(two_servings(0), {"g": on(0), "i": on(0, 2), "t": on(3)})
    assert found["0"] == (0, "g", 110)
    assert found["1"] == (0, "i", 32)


def test_every_gpu_keeps_copies_of_the_layout_that_serves_there():
    assert where(two_servings(1), {"g": on(0, 2), "i": on(2), "t": on(1)}) == {
        "0": (50, "g", 5),
        "1": (600 + 50, "g", 100 + 50),
        "2": (60, "i", 4),
        "3": (0, None, 0),
    }


def test_a_function_has_transients_only():
    b = RpegBuilder("function")
    x = b.data("X", elements=1, bytes_per_element=2)
    y = b.data("Y", elements=1, bytes_per_element=2)
    b.function("f", reads=[x], writes=[y], seconds_per_sample=1.0)
    assert where(b.build(), {"f": on(1)}) == {"0": (0, None, 0), "1": (0, "f", 77), "2-3": (0, None, 0)}


def test_the_peak_is_the_largest_segment_and_the_first_of_equals():
    rpeg = pair(0)
    memory = device_memory(rpeg, {"g": on(0), "t": on(1)}, toy_book(rpeg, MACHINE, memory=BYTES))
    assert (str(memory.peak.gpus), memory.peak.peak_bytes) == ("1", 730)
    frozen = two_servings(0, trainable=False)
    equal = device_memory(frozen, {"g": on(2), "i": on(2)}, toy_book(frozen, MACHINE))
    assert str(equal.peak.gpus) == "0-1"


def test_items_name_model_operator_and_quantity():
    rpeg = pair(1)
    memory = device_memory(rpeg, {"g": on(0), "t": on(1)}, toy_book(rpeg, MACHINE, memory=BYTES))
    assert [(i.model, i.operator, i.quantity, i.bytes, i.persistent) for i in memory.segments[0].items] == [
        ("m", "g", "weights", 100, True),
        ("m", "g", "transient", 10, False),
    ]
    assert [(i.operator, i.quantity, i.bytes, i.persistent) for i in memory.segments[1].items] == [
        ("t", "training state", 600, True),
        ("t", "weights", 100, False),
        ("t", "transient", 30, False),
    ]


@pytest.mark.parametrize("tau", [0, 1, 2])
def test_copies_that_are_kept_to_serve_a_model(tau):
    rpeg = beside_a_frozen_model(tau)
    assert (serving_copies(rpeg, "m"), serving_copies(rpeg, "frozen")) == (tau, 1)


# --- any configuration


def random_book(configuration, draw):
    """A book with one drawn number of bytes per operator kind and memory kind, halved per doubling of GPUs."""
    rpeg, machine, workload = configuration.rpeg, configuration.machine, configuration.workload
    sizes = {
        (model, role, kind): draw(st.integers(0, 50))
        for model in [m.name for m in rpeg.models] + [None]
        for role in ("generation", "inference", "training")
        for kind in MemoryKind
    }

    def term(kind):
        def function(batch):
            name = None if batch.model is None else batch.model.name
            known = 0 if name is None and kind is MemoryKind.WEIGHTS else sizes[name, batch.role.value, kind]
            return known / batch.layouts.gpus  # a function has no weights

        return CostTerm(
            name=kind.name, summary="", target=Target.MEMORY, quantity=kind.value, function=function, memory=kind
        )

    return toy_book(rpeg, machine, workload, memory=[term(kind) for kind in MemoryKind], axes=configuration.axes)


@given(configurations(max_operators=5), st.data())
@settings(max_examples=40, deadline=None)
def test_any_placement(configuration, data):
    rpeg, plan = configuration.rpeg, configuration.plan
    book = random_book(configuration, data.draw)
    memory = device_memory(rpeg, plan, book)

    covered = [gpu for s in memory.segments for gpu in range(s.gpus.start, s.gpus.stop)]
    assert covered == list(range(configuration.machine.gpus)), "segments tile the cluster"
    for segment in memory.segments:
        assert sum(i.bytes for i in segment.items) == pytest.approx(segment.peak_bytes)
        here = [op for op in rpeg.operators if not plan[op.name].allocation.disjoint(segment.gpus)]
        assert (segment.moment is None) == (not here)
        for op in here:  # an operator that runs alone on its GPUs is a lower bound
            costs, row = book.operators[op.name], book.row(plan[op.name], op.name)
            alone = costs.weights[row] + costs.transient[row]
            if op.role.value == "training":
                alone += costs.training_state[row]
            assert segment.peak_bytes >= alone - 1e-9
        everything = sum(
            book.operators[op.name].isolated[book.row(plan[op.name], op.name)]
            + max(0, rpeg.model_of(op.name).staleness - 1 if op.model else 0)
            * book.operators[op.name].weights[book.row(plan[op.name], op.name)]
            for op in here
        )
        if segment.phase is Phase.ARRIVAL:  # one version more than the copies that are kept
            everything += book.operators[segment.moment].weights[book.row(plan[segment.moment], segment.moment)]
        assert segment.peak_bytes <= everything + 1e-9

    # asynchrony adds copies and never removes state
    def with_tau(tau):
        models = tuple(attrs.evolve(m, staleness=tau if m.trainable else 0) for m in rpeg.models)
        return device_memory(attrs.evolve(rpeg, models=models), plan, book)

    peaks = [[segment.peak_bytes for segment in with_tau(tau).segments] for tau in range(4)]
    for less, more in itertools.pairwise(peaks):
        assert all(a <= b + 1e-9 for a, b in zip(less, more, strict=True))
    for one, two, three in zip(*peaks[1:], strict=True):
        assert three - two == pytest.approx(two - one)
