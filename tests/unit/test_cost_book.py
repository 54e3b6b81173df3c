"""The cost book: what terms are given, how their results are added and refused."""

from __future__ import annotations

import numpy as np
import pytest

from rpeg_core.costing.book import CostBook
from rpeg_core.errors import CostTermError
from rpeg_core.ir import Role, RpegBuilder
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.records import CostTerm, MemoryKind, Target
from rpeg_core.spec.machine import DeviceSpace, Tier
from rpeg_core.testing.toys import (
    SKEWED,
    active,
    on,
    toy_book,
    toy_hardware,
    toy_memory_terms,
    toy_mini,
    toy_model,
    toy_ppo,
    toy_transfer_term,
    toy_workload,
)

MACHINE = DeviceSpace(racks=1, nodes_per_rack=2, gpus_per_node=2)


def term(function, target=Target.OPERATOR, name="toy.bad", memory=None):
    return CostTerm(name=name, summary="", target=target, quantity="q", function=function, memory=memory)


def refused(function, target=Target.OPERATOR, memory=None):
    def price():
        book = toy_book(toy_mini(), MACHINE, extra=[term(function, target, memory=memory)])
        book.transfer_seconds(False, 100.0, 1, 2, 0)

    with pytest.raises(CostTermError) as caught:
        price()
    return str(caught.value)


HINT = "hint: leave it out of costs:, or report it to the distribution"


def raising(batch):
    raise KeyError("no such table")


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (raising, "KeyError: 'no such table'"),
        (lambda b: np.ones(len(b.layouts)) / 0.0, "FloatingPointError: divide by zero encountered in divide"),
        (lambda b: np.log(-np.ones(len(b.layouts))), "FloatingPointError: invalid value encountered in log"),
        (lambda b: "fast", "ValueError: could not convert string to float: 'fast'"),
        (lambda b: b.settings.speed, "AttributeError: 'NoSettings' object has no attribute 'speed'"),
    ],
)
def test_a_term_that_raises(function, text):
    assert refused(function) == (
        "error[cost-term]: cost term 'toy.bad' failed for operator 'actor_generation'\n"
        f"  distribution: toys 1\n  {text}\n{HINT}"
    )


@pytest.mark.parametrize(
    ("function", "text"),
    [
        (lambda n: np.ones(n + 1), "it returned shape (8,), allowed: (7,)"),
        (lambda n: 1.0, "it returned shape (), allowed: (7,)"),
        (lambda n: np.ones((n, 1)), "it returned shape (7, 1), allowed: (7,)"),
        (lambda n: np.full(n, np.nan), "it returned a number that is not finite"),
        (lambda n: np.full(n, np.inf), "it returned a number that is not finite"),
        (lambda n: np.full(n, -np.inf), "it returned a number that is not finite"),
        (lambda n: np.where(np.arange(n) == 3, -2.5, 1.0), "it returned -2.5, allowed: numbers >= 0"),
        (lambda n: np.full(n, -1e-9), "it returned -1e-09, allowed: numbers >= 0"),
    ],
)
def test_a_term_that_returns_something_else(function, text):
    assert len(toy_book(toy_mini(), MACHINE).operators["actor_generation"].layouts) == 7
    assert refused(lambda batch: function(len(batch.layouts))) == (
        "error[cost-term]: cost term 'toy.bad' gave an invalid result for operator 'actor_generation'\n"
        f"  distribution: toys 1\n  {text}\n{HINT}"
    )


def test_memory_terms_are_checked_too():
    text = refused(lambda b: -b.layouts.gpus, Target.MEMORY, MemoryKind.WEIGHTS)
    assert text.startswith(
        "error[cost-term]: cost term 'toy.bad' gave an invalid result for operator 'actor_generation'\n"
    )
    assert "it returned -4, allowed: numbers >= 0" in text


def test_transfer_terms_are_checked_when_a_transfer_is_priced():
    assert refused(lambda b: np.full(len(b.bytes), np.nan), Target.TRANSFER) == (
        "error[cost-term]: cost term 'toy.bad' gave an invalid result for a transfer\n"
        f"  distribution: toys 1\n  it returned a number that is not finite\n{HINT}"
    )


def test_the_cause_is_kept():
    with pytest.raises(CostTermError) as caught:
        toy_book(toy_mini(), MACHINE, extra=[term(raising)])
    assert isinstance(caught.value.__cause__, KeyError)


def test_an_underflow_is_no_error():
    book = toy_book(
        toy_mini(), MACHINE, extra=[term(lambda b: np.full(len(b.layouts), 1e-300) * 1e-300, name="toy.tiny")]
    )
    assert book.operators["actor_generation"].whole.total.max() == 0.0


def test_terms_are_added_per_layout_and_kept_apart():
    double = term(lambda b: 2.0 * b.layouts.gpus, name="toy.double")
    book = toy_book(toy_mini(), MACHINE, seconds={("actor", "generation"): 5.0}, extra=[double])
    costs = book.operators["actor_generation"]
    assert [t.name for t in costs.whole.terms] == ["toy.seconds", "toy.double"]
    for row, gpus in enumerate(costs.layouts.gpus):
        assert costs.whole.values[:, row].tolist() == [5.0, 2.0 * gpus]
        assert costs.whole.total[row] == 5.0 + 2.0 * gpus


def test_a_row_is_found_by_degrees_and_microbatches():
    book = toy_book(toy_mini(), MACHINE, extra=[term(lambda b: 100.0 * b.layouts.pipeline + b.layouts.microbatches)])
    layouts = book.operators["actor_training"].layouts
    for assignment in (on(0), on(0, 2, tensor=2), on(0, 2, pipeline=2, microbatches=2)):
        row = book.row(assignment, "actor_training")
        assert layouts.layout(row) == assignment.layout
        assert layouts.microbatches[row] == assignment.microbatches
    with pytest.raises(KeyError):
        book.row(on(0, 3), "actor_training")  # 3 does not divide 16 prompts


def test_what_an_operator_term_is_told():
    batches = []

    def spy(batch):
        batches.append(batch)
        return np.zeros(len(batch.layouts))

    workload = toy_workload(prompts=8, rollouts_per_prompt=2, response_lengths=SKEWED)
    book = toy_book(toy_mini(), MACHINE, workload, extra=[term(spy)])
    told = [(b.role.value, b.sequences, b.prefill, [p.index for p in b.phases]) for b in batches]
    assert told == [
        ("generation", 16, True, [0, 1, 2]),
        ("generation", 16, True, [0]),  # the first phase prefills
        ("generation", 16, False, [1]),
        ("generation", 16, False, [2]),
        ("training", 16, False, [0, 1, 2]),
    ]
    assert all(b.model.name == "actor" for b in batches)
    assert len(book.operators["actor_generation"].phases) == 3
    assert book.operators["actor_training"].phases == ()
    assert batches[0].sequences_per_microbatch.tolist() == [
        16 / (d * mb) for d, mb in zip(batches[0].layouts.data, batches[0].layouts.microbatches, strict=True)
    ]


def test_an_inference_phase_is_told_its_share_of_the_sequences():
    told = []

    def spy(batch):
        told.append((batch.sequences, batch.prefill, batch.phases, batch.seconds_per_sample, batch.model))
        return np.zeros(len(batch.layouts))

    b = RpegBuilder("function")
    x = b.data("X", elements=1, bytes_per_element=2)
    y = b.data("Y", elements=1, bytes_per_element=2)
    b.function("f", reads=[x], writes=[y], seconds_per_sample=0.5)
    toy_book(b.build(), MACHINE, toy_workload(response_lengths=SKEWED), extra=[term(spy)])
    phases = toy_workload(response_lengths=SKEWED).phases
    parts = [(16, phases), *((sequences, (phase,)) for sequences, phase in zip((8, 4, 4), phases, strict=True))]
    assert told == [(sequences, False, part, 0.5, None) for sequences, part in parts]


def test_one_phase_needs_no_tables_of_its_own():
    assert toy_book(toy_mini(), MACHINE).operators["actor_generation"].phases == ()


def test_memory_is_summed_by_kind():
    key = ("actor", "training")
    terms = [
        *toy_memory_terms(training_state={key: 600}, weights={key: 100}, transient={key: 30}),
        *toy_memory_terms(transient={key: 12}),
    ]
    costs = toy_book(toy_mini(), MACHINE, memory=terms).operators["actor_training"]
    for row, gpus in enumerate(costs.layouts.gpus):
        assert costs.training_state[row] == 600 / gpus
        assert costs.weights[row] == 100 / gpus
        assert costs.transient[row] == pytest.approx(42 / gpus)
        assert costs.isolated[row] == pytest.approx(742 / gpus)


def test_a_memory_term_is_told_whether_the_model_is_trained():
    told = {}

    def spy(batch):
        told[batch.model.name] = batch.trainable
        return np.zeros(len(batch.layouts))

    b = RpegBuilder("two")
    b.model("m", toy_model("m"), trainable=True)
    b.model("ref", toy_model("ref"), trainable=False)
    x = b.data("X", elements=1, bytes_per_element=2)
    y = b.data("Y", elements=1, bytes_per_element=2)
    b.inference("r", "ref", reads=[x], writes=[y])
    b.training("t", "m", reads=[y])
    b.connect("r", y, "t")
    toy_book(b.build(), MACHINE, extra=[term(spy, Target.MEMORY, memory=MemoryKind.WEIGHTS)])
    assert told == {"m": True, "ref": False}


def transfer(kind, source, destination, payload):
    return Node(
        index=0,
        kind=kind,
        operator="actor_training",
        step=0,
        allocation=destination.allocation,
        source=source.allocation,
        container="completions",
        payload_bytes=payload,
    )


@pytest.mark.parametrize(
    ("source", "destination", "tier"),
    [
        (on(0), on(1), Tier.INTRA_NODE),
        (on(0, 2), on(2), Tier.INTER_NODE),
        (on(3), on(4), Tier.INTER_RACK),
        (on(1), on(7), Tier.INTER_RACK),
    ],
)
def test_what_a_transfer_term_is_told(source, destination, tier):
    told = []

    def spy(batch):
        told.append((batch.reshard, *(x.item() for x in (batch.bytes, batch.source_gpus, batch.destination_gpus))))
        told.append(Tier(batch.tier.item()))
        return np.zeros(1)

    machine = DeviceSpace(racks=2, nodes_per_rack=2, gpus_per_node=2)
    book = toy_book(toy_mini(), machine, extra=[term(spy, Target.TRANSFER)])
    book.node_seconds(transfer(NodeKind.COMM, source, destination, 99.0))
    assert told == [(False, 99.0, source.allocation.size, destination.allocation.size), tier]


def test_equal_transfers_are_priced_once_different_ones_apart():
    calls = []

    def spy(batch):
        calls.append(batch.bytes.item())
        return np.zeros(1)

    book = toy_book(toy_mini(), MACHINE, extra=[term(spy, Target.TRANSFER)], transfer=toy_transfer_term())
    assert book.node_seconds(transfer(NodeKind.COMM, on(0), on(1), 500.0)) == 5.0
    assert book.node_seconds(transfer(NodeKind.COMM, on(2), on(3), 500.0)) == 5.0
    assert calls == [500.0]
    assert book.node_seconds(transfer(NodeKind.RESHARD, on(0), on(0), 500.0)) == 10.0
    assert book.node_seconds(transfer(NodeKind.COMM, on(0), on(1), 600.0)) == 6.0
    assert calls == [500.0, 500.0, 600.0]


def test_an_op_node_takes_its_own_column():
    slow = term(lambda b: 10.0 * b.layouts.tensor + b.layouts.data)
    book = toy_book(toy_mini(), MACHINE, toy_workload(response_lengths=SKEWED), extra=[slow])
    for assignment, expected in ((on(0), 11.0), (on(0, 2, tensor=2), 21.0), (on(0, 4, tensor=2), 22.0)):
        for phase in (None, 2):
            node = Node(
                index=0,
                kind=NodeKind.OP,
                operator="actor_generation",
                step=0,
                phase=phase,
                allocation=assignment.allocation,
                layout=assignment.layout,
                microbatches=1,
            )
            assert book.node_seconds(node) == expected


def test_a_book_without_times_is_refused():
    graph, only = toy_mini(), toy_memory_terms()
    layouts = toy_book(graph, MACHINE).operators["actor_training"].layouts
    with pytest.raises(CostTermError) as caught:
        CostBook(
            rpeg=graph,
            machine=MACHINE,
            hardware=toy_hardware(),
            workload=toy_workload(),
            layouts={operator.name: layouts for operator in graph.operators},
            terms=[active(term) for term in only],
        )
    assert str(caught.value) == (
        "error[cost-term]: no cost term prices operators\n"
        "  selected: toy.training_state, toy.weights, toy.gradients, toy.transient\n"
        "hint: name a cost model under costs:, e.g. costs: [analytical]"
    )


def test_terms_see_the_length_phases_of_every_node():
    seen = []

    def watch(batch):
        lengths = [(round(share, 9), tokens) for share, tokens in batch.response_lengths]
        seen.append((batch.role, batch.sequences, lengths))
        return np.ones(len(batch.layouts))

    toy_book(toy_ppo(), MACHINE, toy_workload(response_lengths=SKEWED), extra=[term(watch)])
    whole = [(0.5, 25), (0.25, 50), (0.25, 100)]
    assert (Role.TRAINING, 16, whole) in seen
    assert (Role.INFERENCE, 16, whole) in seen
    for share, (_, tokens) in zip((8.0, 4.0, 4.0), whole, strict=True):
        assert (Role.INFERENCE, share, [(1.0, tokens)]) in seen
    seen.clear()
    toy_book(toy_ppo(), MACHINE, extra=[term(watch)])
    assert {tuple(lengths) for _, _, lengths in seen} == {((1.0, 100),)}
