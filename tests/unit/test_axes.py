"""The axes beyond dp, pp and tp: what is legal, what the cost book prices, what plans and experiments say."""

from __future__ import annotations

import itertools

import attrs
import numpy as np
import pytest

from rpeg_core.costing.batches import OperatorBatch, execution_of
from rpeg_core.errors import ExperimentError, PinError, UnknownKeyError
from rpeg_core.ir import Role
from rpeg_core.passes.evaluate import EvaluationOptions
from rpeg_core.planning.assignment import Assignment, Layout, Mode
from rpeg_core.planning.axes import Axes, illegal_mode, illegal_value
from rpeg_core.planning.candidates import extent_or_reason, illegal_layout, legal_candidates, legal_layouts, origins
from rpeg_core.planning.pins import Pin
from rpeg_core.planning.problem import build_structure
from rpeg_core.planning.space import Choices, axes_of, read_space, without_peak
from rpeg_core.planning.structures import Structure
from rpeg_core.records import CostTerm, Target
from rpeg_core.spec.execution import Precision, Recompute, Sharding
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.spec.models import MoE
from rpeg_core.spec.sections import Section
from rpeg_core.testing.toys import active, toy_book, toy_hardware, toy_mini, toy_model, toy_workload

ONE_NODE = DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=8)
FOUR_NODES = DeviceSpace(racks=1, nodes_per_rack=4, gpus_per_node=8)
DENSE = toy_model("m", layers=8)
SPARSE = attrs.evolve(DENSE, moe=MoE(experts=8, active_experts=2, expert_ffn=16))


def machine(text: str) -> DeviceSpace:
    racks, nodes, gpus = map(int, text.split("x"))
    return DeviceSpace(racks=racks, nodes_per_rack=nodes, gpus_per_node=gpus)


# Degrees


def test_gpus_are_the_product_of_all_degrees_but_that_of_experts() -> None:
    layout = Layout(data=3, pipeline=4, tensor=2, context=5, expert=6)
    assert (layout.stage, layout.replica, layout.gpus) == (10, 40, 120)
    assert str(layout) == "dp3 pp4 tp2 cp5 ep6"
    assert str(Layout(3, 4, 2)) == "dp3 pp4 tp2"


def shard_map(layout: Layout) -> list[tuple[int, int, int]]:
    """(stage, tensor rank, expert rank) of each GPU, numbered by replica, stage, context rank and tensor rank."""
    found = []
    for replica, stage, context, tensor in itertools.product(
        range(layout.data), range(layout.pipeline), range(layout.context), range(layout.tensor)
    ):
        within_stage = (replica * layout.context + context) * layout.tensor + tensor
        found.append((stage, tensor, within_stage % layout.expert))
    return found


def test_layouts_need_no_reshard_exactly_when_every_gpu_holds_the_same_part() -> None:
    """Against the part of each of 16 GPUs, written down one by one. A tensor rank and an expert rank say nothing of
    each other's degree, so that these are compared too."""
    layouts = [
        Layout(dp, pp, tp, cp, ep)
        for dp, pp, tp, cp, ep in itertools.product((1, 2, 4, 8, 16), (1, 2, 4), (1, 2, 4), (1, 2, 4), (1, 2, 4))
        if dp * pp * tp * cp == 16 and (dp * cp * tp) % ep == 0
    ]
    for one, other in itertools.product(layouts, repeat=2):
        same_parts = shard_map(one) == shard_map(other)
        same_sizes = (one.pipeline, one.tensor, one.expert) == (other.pipeline, other.tensor, other.expert)
        assert (one.weights == other.weights) == (same_parts and same_sizes), (one, other)


PACKING = [
    # A stage of 8 GPUs is a node: two replicas of two stages are four nodes.
    ("1x4x8", Layout(2, 2, 2, 4), (1, 4, 8), (0,)),
    # Two stages of 4 GPUs fill a node.
    ("1x4x8", Layout(1, 2, 1, 4), (1, 1, 8), (0, 8, 16, 24)),
    # A stage of 16 GPUs is two nodes.
    ("1x4x8", Layout(1, 1, 2, 8), (1, 2, 8), (0, 16)),
    ("1x4x8", Layout(1, 2, 2, 8), (1, 4, 8), (0,)),
    # Half a node.
    ("1x4x8", Layout(1, 1, 2, 2), (1, 1, 4), (0, 4, 8, 12, 16, 20, 24, 28)),
    ("2x2x4", Layout(2, 1, 2, 4), (2, 2, 4), (0,)),
]


@pytest.mark.parametrize(("cluster", "layout", "extent", "starts"), PACKING, ids=lambda v: str(v))
def test_a_replica_packs_as_drawn(cluster, layout, extent, starts) -> None:
    found = extent_or_reason(machine(cluster), layout)
    assert (found.racks, found.nodes, found.gpus) == extent
    assert origins(machine(cluster), layout) == starts


REFUSED = [
    ("1x4x8", SPARSE, Layout(1, 1, 2, 3, 1), None),  # 6 of 8 GPUs of one node
    (
        "1x4x8",
        SPARSE,
        Layout(2, 1, 2, 3, 1),
        "P8: 1 replica(s) of 6 GPUs leave some of the 8 GPUs of a node idle, so dp=2 cannot continue on the next node",
    ),
    (
        "1x4x8",
        SPARSE,
        Layout(1, 1, 4, 3, 1),
        "P8: a stage of cp=3 * tp=4 GPUs is more than a node and not whole nodes",
    ),
    (
        "1x4x8",
        SPARSE,
        Layout(1, 4, 1, 3, 1),
        "P8: 2 pipeline stages of 3 GPUs leave some of the 8 GPUs of a node idle, "
        "so pp=4 cannot continue on the next node",
    ),
    ("1x4x8", DENSE, Layout(1, 1, 1, 1, 2), "EP: m is no mixture of experts"),
    ("1x4x8", SPARSE, Layout(1, 1, 3, 1, 3), "P1: tp=3 does not divide the 8 GPUs of a node"),
    ("1x4x8", SPARSE, Layout(2, 1, 2, 1, 3), "EP: ep=3 does not divide the 8 experts of m"),
    ("1x4x8", SPARSE, Layout(1, 1, 2, 1, 4), "EP: ep=4 does not divide the dp * cp * tp = 2 ranks of a stage"),
    ("1x4x8", SPARSE, Layout(2, 2, 1, 2, 4), None),
    ("1x4x8", SPARSE, Layout(1, 1, 1, 0, 1), "cp must be at least 1, not 0"),
    ("1x4x8", SPARSE, Layout(1, 1, 1, 1, 0), "ep must be at least 1, not 0"),
    ("1x4x8", None, Layout(1, 1, 1, 2, 1), "a function without a model is only data parallel: pp=1 and tp=1"),
]


@pytest.mark.parametrize(("cluster", "model", "layout", "reason"), REFUSED, ids=lambda v: str(v)[:40])
def test_the_broken_rule_is_named(cluster, model, layout, reason) -> None:
    workload = toy_workload(prompts=16, rollouts_per_prompt=8)
    count = 1 if layout.pipeline == 1 else layout.pipeline
    assert illegal_layout(machine(cluster), workload, model, layout, count) == reason


def test_a_sequence_has_two_chunks_for_each_context_rank() -> None:
    workload = attrs.evolve(toy_workload(prompts=16), prompt_tokens=4, response_tokens=3)
    assert illegal_layout(ONE_NODE, workload, DENSE, Layout(1, 1, 1, 3), 1) is None
    assert illegal_layout(ONE_NODE, workload, DENSE, Layout(1, 1, 1, 4), 1) == (
        "CP: cp=4 ranks with two chunks each have more chunks than a sequence has tokens"
    )


def test_the_default_axes_are_the_papers_space() -> None:
    workload = toy_workload(prompts=16, rollouts_per_prompt=8)
    wide = legal_layouts(FOUR_NODES, workload, SPARSE, axes=Axes(context=(1, 2), expert=(1, 4)))
    plain = legal_layouts(FOUR_NODES, workload, SPARSE)
    assert plain == tuple((layout, mb) for layout, mb in wide if layout.context == layout.expert == 1)
    assert {(layout.context, layout.expert) for layout, _ in wide} == {(1, 1), (1, 4), (2, 1), (2, 4)}


def test_batches_are_divided_by_dp_alone() -> None:
    """4 prompts on 8 GPUs: dp 8 is not legal, dp 4 with two context ranks each is."""
    workload = toy_workload(prompts=4)
    found = legal_layouts(ONE_NODE, workload, DENSE, axes=Axes(context=(1, 2)))
    on_eight = {layout for layout, _ in found if layout.gpus == 8 and layout.tensor == layout.pipeline == 1}
    assert on_eight == {Layout(4, 1, 1, 2)}


# Modes


def test_sequence_parallelism_needs_tensor_ranks() -> None:
    mode = Mode(sequence_parallel=True)
    assert illegal_mode(Layout(4, 1, 1, 2), mode) == (
        "sequence_parallel: it divides over the tensor-parallel ranks, and tp=1 has one"
    )
    assert illegal_mode(Layout(1, 1, 2), mode) is None
    found = legal_candidates("v", ONE_NODE, toy_workload(), DENSE, axes=Axes(sequence_parallel=(False, True)))
    with_it = {a.layout.tensor for a in map(found.assignment, range(len(found))) if a.mode.sequence_parallel}
    without = {a.layout.tensor for a in map(found.assignment, range(len(found))) if not a.mode.sequence_parallel}
    assert with_it == without - {1}


VALUES = [
    ("cp", 2, Role.TRAINING, [DENSE], None),
    ("cp", 2, Role.INFERENCE, [DENSE], None),
    (
        "cp",
        2,
        Role.GENERATION,
        [DENSE],
        "cp: it divides the tokens of whole sequences, and a generation makes one token",
    ),
    ("cp", 1, Role.GENERATION, [DENSE], None),
    ("cp", 2, Role.INFERENCE, [], "cp: a function without a model has none"),
    ("ep", 4, Role.GENERATION, [SPARSE], None),
    ("ep", 3, Role.GENERATION, [SPARSE], "ep: 3 does not divide the 8 experts of m"),
    ("ep", 4, Role.TRAINING, [SPARSE, DENSE], "ep: m is no mixture of experts"),
    (
        "sequence_parallel",
        True,
        Role.GENERATION,
        [DENSE],
        "sequence_parallel: it divides the tokens of whole sequences",
    ),
    ("sequence_parallel", False, Role.GENERATION, [DENSE], None),
    ("recompute", Recompute.NONE, Role.TRAINING, [DENSE], None),
    ("recompute", Recompute.NONE, Role.INFERENCE, [DENSE], "recompute: only a training has a backward pass"),
    ("precision", Precision.FP8, Role.TRAINING, [DENSE], "precision: toy has no peak of fp8 matrix products"),
    ("precision", Precision.BF16, Role.TRAINING, [DENSE], None),
]


@pytest.mark.parametrize(("axis", "value", "role", "models", "reason"), VALUES, ids=lambda v: str(v)[:20])
def test_an_axis_is_open_where_it_has_a_meaning(axis, value, role, models, reason) -> None:
    found = illegal_value(axis, value, role, models, toy_hardware())
    assert found is None if reason is None else found.startswith(reason)


PEAKS = [
    (None, None, {"fp8": False, "mxfp8": False, "nvfp4": False}),
    (1.8, None, {"fp8": True, "mxfp8": False, "nvfp4": False}),  # Hopper
    (1.8, 3.0, {"fp8": True, "mxfp8": True, "nvfp4": True}),  # Blackwell
]


@pytest.mark.parametrize(("fp8", "fp4", "allowed"), PEAKS)
def test_a_precision_needs_its_peak(fp8, fp4, allowed) -> None:
    device = attrs.evolve(toy_hardware().device, fp8_speedup=fp8, fp4_speedup=fp4)
    hardware = attrs.evolve(toy_hardware(), device=device)
    found = {
        name: illegal_value("precision", Precision(name), Role.TRAINING, [DENSE], hardware) is None for name in allowed
    }
    assert found == allowed


def test_what_the_plan_does_not_say_is_the_papers_subset() -> None:
    said = execution_of(
        toy_hardware(),
        context=4,
        expert=2,
        mode=Mode(sequence_parallel=True, recompute=Recompute.SELECTIVE, precision=Precision.FP8),
    )
    assert (said.context, said.expert, said.sequence_parallel) == (4, 2, True)
    assert (said.recompute, said.precision, said.framework) == (Recompute.SELECTIVE, Precision.FP8, "")
    plain = execution_of(toy_hardware())
    assert (plain.recompute, plain.precision, plain.sharding) == (Recompute.FULL, Precision.BF16, Sharding.OPTIMIZER)
    assert execution_of(toy_hardware(), framework="torchtitan").sharding is Sharding.FULL


# Cost book


def test_each_layout_is_priced_in_its_own_execution() -> None:
    """The term's value is a number that only this execution and layout have."""
    code = {Recompute.NONE: 1.0, Recompute.FULL: 2.0}

    def seconds(batch: OperatorBatch) -> np.ndarray:
        e, rows = batch.execution, batch.layouts
        assert set(rows.context.tolist()) <= {e.context}
        own = 1000.0 * e.context + 100.0 * code[e.recompute] + 10.0 * e.sequence_parallel
        return own + rows.data / 64.0 + rows.tensor / 1024.0 + np.zeros(len(rows))

    term = CostTerm(name="t.s", summary="s", target=Target.OPERATOR, quantity="q", function=seconds)
    axes = Axes(context=(1, 2), sequence_parallel=(False, True), recompute=(Recompute.NONE, Recompute.FULL))
    graph = toy_mini(model=toy_model("actor"))
    book = toy_book(graph, ONE_NODE, seconds={}, extra=[term], axes={"actor_training": axes})
    costs = book.operators["actor_training"]
    assert len({costs.layouts.mode_of(row) for row in range(len(costs.layouts))}) == 4
    row_of = list(costs.whole.terms).index(term)
    for row in range(len(costs.layouts)):
        layout, mode = costs.layouts.layout(row), costs.layouts.mode_of(row)
        own = 1000.0 * layout.context + 100.0 * code[mode.recompute] + 10.0 * mode.sequence_parallel
        assert costs.whole.values[row_of, row] == own + layout.data / 64.0 + layout.tensor / 1024.0
        assignment = Assignment(Allocation(0, layout.gpus), layout, int(costs.layouts.microbatches[row]), mode)
        assert book.row(assignment, "actor_training") == row


def test_without_axes_a_term_is_called_once_per_operator() -> None:
    seen = []

    def seconds(batch: OperatorBatch) -> np.ndarray:
        seen.append(batch.execution)
        return np.ones(len(batch.layouts))

    term = CostTerm(name="t.s", summary="s", target=Target.OPERATOR, quantity="q", function=seconds)
    graph = toy_mini(model=toy_model("actor"))
    toy_book(graph, ONE_NODE, seconds={}, extra=[term])
    assert seen == [execution_of(toy_hardware())] * len(graph.operators)


# Experiment and pins


def space(document: object) -> dict[str, Choices]:
    return read_space(Section(document, "space"))


def test_the_space_reads_as_it_is_written() -> None:
    document = {
        "training": {"cp": [1, 2], "recompute": ["none", "full"], "sequence_parallel": [True]},
        "actor_generation": {"ep": [8], "precision": ["fp8"], "framework": "vllm"},
    }
    found = space(document)
    assert found["training"] == Choices(
        context=(1, 2), recompute=(Recompute.NONE, Recompute.FULL), sequence_parallel=(True,)
    )
    assert {name: entry.document() for name, entry in found.items()} == document
    assert space({"training": {"cp": 2, "recompute": "none"}})["training"].document() == {
        "cp": [2],
        "recompute": ["none"],
    }


WRONG = [
    ({"training": {"cp": [0]}}, ExperimentError, "space.training.cp is [0]"),
    ({"training": {"recompute": ["ful"]}}, ExperimentError, "space.training.recompute names 'ful'"),
    ({"training": {"context": [2]}}, UnknownKeyError, "unknown key 'context' in space.training"),
    ({"generation": {"cp": [2]}}, UnknownKeyError, "unknown key 'cp' in space.generation"),
    ({"inference": {"recompute": ["none"]}}, UnknownKeyError, "unknown key 'recompute' in space.inference"),
    ({"training": {"sequence_parallel": [1]}}, ExperimentError, "space.training.sequence_parallel is [1]"),
    ({"training": {"framework": ["nemo"]}}, ExperimentError, "space.training.framework is ['nemo']"),
]


@pytest.mark.parametrize(("document", "error", "what"), WRONG)
def test_a_wrong_space_is_refused_with_its_key(document, error, what) -> None:
    with pytest.raises(error) as caught:
        space(document)
    assert caught.value.what == what


def test_an_operators_own_entry_counts_before_its_roles() -> None:
    entries = space({"training": {"cp": [1, 2], "recompute": ["none"]}, "critic_training": {"cp": [4]}})
    found = axes_of(entries, "critic_training", Role.TRAINING, [DENSE], toy_hardware())
    assert found == Axes(context=(4,), recompute=(Recompute.NONE,))


def test_of_a_role_an_axis_without_meaning_is_left_out_and_of_an_operator_refused() -> None:
    entries = space({"training": {"ep": [8]}, "critic_training": {"ep": [8]}})
    assert axes_of(entries, "actor_training", Role.TRAINING, [DENSE], toy_hardware()) == Axes()
    assert axes_of(entries, "actor_training", Role.TRAINING, [SPARSE], toy_hardware()) == Axes(expert=(8,))
    with pytest.raises(ExperimentError) as caught:
        axes_of(entries, "critic_training", Role.TRAINING, [DENSE], toy_hardware())
    assert caught.value.what == "space.critic_training.ep has no value that operator 'critic_training' can have"
    assert caught.value.facts == ("ep: m is no mixture of experts",)


def test_precisions_without_peak_are_left_out_and_said() -> None:
    entries = space({"training": {"precision": ["bf16", "fp8"]}})
    assert axes_of(entries, "a", Role.TRAINING, [DENSE], toy_hardware()) == Axes()
    assert list(without_peak(entries, toy_hardware())) == [
        "space.training.precision: toy has no peak of fp8 matrix products; it is left out"
    ]


def pinned(pin: Pin, axes: Axes | None = None):
    return build_structure(
        structure=Structure(staleness=(("actor", 0),)),
        rpeg=toy_mini(model=toy_model("actor")),
        machine=ONE_NODE,
        hardware=toy_hardware(),
        workload=toy_workload(),
        terms=[active(CostTerm(name="t.s", summary="s", target=Target.OPERATOR, quantity="q", function=_one))],
        options=EvaluationOptions(steps=2),
        pins={"actor_training": pin},
        axes=None if axes is None else {"actor_training": axes},
    )


def _one(batch: OperatorBatch) -> np.ndarray:
    return np.ones(len(batch.layouts))


def test_a_pin_fixes_an_axis_that_the_space_does_not_list() -> None:
    found = pinned(Pin(context=4, tensor=2, recompute=Recompute.NONE)).candidates[1]
    assignments = [found.assignment(i) for i in range(len(found))]
    assert {(a.layout.context, a.layout.tensor, a.mode) for a in assignments} == {
        (4, 2, Mode(recompute=Recompute.NONE))
    }


PINS = [
    (Pin(expert=2), "ep: actor is no mixture of experts"),
    (Pin(precision=Precision.FP8), "precision: toy has no peak of fp8 matrix products"),
    (Pin(context=3, tensor=4), "P8: cp=3 * tp=4 needs 12 GPUs, the cluster has 8"),
    (Pin(data=2, context=2, allocation=Allocation(0, 2)), "P8: dp=2 * cp=2 needs 4 GPUs, gpus: 0-1 are 2"),
    (
        Pin(sequence_parallel=True, tensor=1),
        "sequence_parallel: it divides over the tensor-parallel ranks, and tp=1 has one",
    ),
]


@pytest.mark.parametrize(("pin", "reason"), PINS, ids=str)
def test_a_pin_that_cannot_be_met_names_the_rule(pin, reason) -> None:
    with pytest.raises(PinError) as caught:
        pinned(pin)
    assert caught.value.facts == (reason,)


EMPTY = [
    (
        "1x1x8",
        DENSE,
        Axes(context=(16,)),
        ("CP: cp=16 divides a sequence over 16 GPUs, the cluster has 8",),
        ("for cp alone there are layouts with: 1, 2, 4, 8",),
    ),
    (
        "1x1x8",
        SPARSE,
        Axes(expert=(16, 32)),
        (
            "EP: ep=16 divides the experts over 16 GPUs, the cluster has 8",
            "EP: ep=32 divides the experts over 32 GPUs, the cluster has 8",
        ),
        ("for ep alone there are layouts with: 1, 2, 4, 8",),
    ),
    (
        "1x2x1",
        DENSE,
        Axes(sequence_parallel=(True,)),
        ("sequence_parallel: it divides over the tensor-parallel ranks, and tp=1 has one",),
        ("for sequence_parallel alone there are layouts with: false, every legal tp is 1",),
    ),
    (
        "1x2x4",
        DENSE,
        Axes(context=(5,)),
        ("P8: a stage of cp=5 * tp=1 GPUs is more than a node and not whole nodes",),
        ("for cp alone there are layouts with: 1, 2, 4, 8",),
    ),
]


@pytest.mark.parametrize(("cluster", "model", "axes", "rules", "allowed"), EMPTY)
def test_a_space_that_leaves_no_layout_names_operator_rule_and_what_is_allowed(
    cluster, model, axes, rules, allowed
) -> None:
    with pytest.raises(ExperimentError) as caught:
        build_structure(
            structure=Structure(staleness=(("actor", 0),)),
            rpeg=toy_mini(model=attrs.evolve(model, name="actor")),
            machine=machine(cluster),
            hardware=toy_hardware(),
            workload=toy_workload(),
            terms=[active(CostTerm(name="t.s", summary="s", target=Target.OPERATOR, quantity="q", function=_one))],
            options=EvaluationOptions(steps=2),
            axes={"actor_training": axes},
        )
    assert caught.value.what == "space: leaves operator 'actor_training' no layout"
    assert caught.value.facts == (*rules, *allowed)


def test_a_pin_of_a_whole_assignment_leaves_no_choice() -> None:
    mode = Mode(sequence_parallel=True, recompute=Recompute.SELECTIVE)
    assignment = Assignment(Allocation(0, 8), Layout(2, 1, 2, 2), 1, mode)
    found = pinned(Pin.of(assignment)).candidates[1]
    assert [found.assignment(i) for i in range(len(found))] == [assignment]
    assert Pin.of(assignment).document() == {
        "gpus": "0-7",
        "dp": 2,
        "pp": 1,
        "tp": 2,
        "cp": 2,
        "microbatches": 1,
        "sequence_parallel": True,
        "recompute": "selective",
    }
