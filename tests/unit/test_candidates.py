"""Legal choices P1-P8 against shards placed one by one on (rack, node, GPU) coordinates."""

from __future__ import annotations

import itertools
from collections import Counter, defaultdict

import attrs
import numpy as np
import pytest

from rpeg_core.planning.assignment import Assignment, Layout
from rpeg_core.planning.axes import Axes
from rpeg_core.planning.candidates import (
    illegal_assignment,
    illegal_layout,
    legal_candidates,
    legal_layouts,
    origins,
)
from rpeg_core.spec.machine import Allocation, DeviceSpace
from rpeg_core.testing.toys import on, toy_model, toy_workload

# --- the brute force: coordinates, no formula of the code under test


def gpu_coordinates(machine):
    """(rack, node, gpu) of every GPU in flat order, racks outermost."""
    return list(itertools.product(range(machine.racks), range(machine.nodes_per_rack), range(machine.gpus_per_node)))


def all_boxes(machine):
    """Every box of GPUs: origin, extent and its sorted coordinates."""
    sizes = (machine.racks, machine.nodes_per_rack, machine.gpus_per_node)
    for extent in itertools.product(*(range(1, n + 1) for n in sizes)):
        for origin in itertools.product(*(range(n - e + 1) for n, e in zip(sizes, extent, strict=True))):
            sides = (range(o, o + e) for o, e in zip(origin, extent, strict=True))
            yield origin, extent, list(itertools.product(*sides))


def shards(layout):
    """(replica, stage, context rank, tensor rank) of every logical shard, replica-major."""
    degrees = (layout.data, layout.pipeline, layout.context, layout.tensor)
    return itertools.product(*map(range, degrees))


def packing_is_exact(layout, gpus_per_node, nodes):
    """P1 and P8 of shards laid onto ``nodes`` (one node per shard, in shard order).

    A tensor group stays in one node, and so does a stage, unless it is larger: then it has nodes of its own. A replica
    puts as many stages on every node it uses as a node can hold of it; with several nodes each is filled.
    """
    groups, homes, stages = defaultdict(set), defaultdict(set), defaultdict(set)
    for (replica, stage, context, _), node in zip(shards(layout), nodes, strict=True):
        groups[replica, stage, context].add(node)
        homes[replica, stage].add(node)
        stages[replica, node].add(stage)
    if any(len(used) > 1 for used in groups.values()):
        return False
    stage_gpus = layout.context * layout.tensor
    if stage_gpus <= gpus_per_node and any(len(used) > 1 for used in homes.values()):
        return False
    guests = Counter(node for used in homes.values() for node in used)
    if stage_gpus > gpus_per_node and max(guests.values()) > 1:
        return False
    fitting = min(layout.pipeline, max(1, gpus_per_node // stage_gpus))
    if any(len(found) != fitting for found in stages.values()):
        return False
    load = Counter(nodes)
    return len(load) == 1 or set(load.values()) == {gpus_per_node}


def box_is_legal(machine, layout, origin, extent, coordinates):
    if len(coordinates) != layout.gpus:  # P8: one shard per GPU
        return False
    if any(o % e for o, e in zip(origin, extent, strict=True)):  # P7
        return False
    racks, nodes, _ = extent
    if racks > 1 and nodes != machine.nodes_per_rack:  # P6: within a rack, or whole racks
        return False
    return packing_is_exact(layout, machine.gpus_per_node, [c[:2] for c in coordinates])


def shares_are_equal(items, ranks):
    """``items`` heads can be divided over ``ranks``, each rank the same number and each head once."""
    load = Counter(rank for rank, _ in zip(itertools.cycle(range(ranks)), range(items), strict=False))
    return len(load) == ranks and len(set(load.values())) == 1


def model_splits(model, tensor):
    divided, replicated = (model.kv_heads, tensor), (tensor, model.kv_heads)
    kv = shares_are_equal(*divided) or shares_are_equal(*replicated)
    return shares_are_equal(model.heads, tensor) and kv and shares_are_equal(model.ffn, tensor)


def packing_rules(machine, layout, boxes):
    """P6 or P8 when no box holds the layout; both when it is larger than the cluster."""
    if any(box_is_legal(machine, layout, *box) for box in boxes):
        return set()
    if layout.gpus > machine.gpus:
        return {"P6", "P8"}
    endless = [i // machine.gpus_per_node for i in range(layout.gpus)]  # nodes without racks and without end
    fits_nodes = layout.tensor <= machine.gpus_per_node
    exact = fits_nodes and packing_is_exact(layout, machine.gpus_per_node, endless)
    return {"P6"} if exact else {"P8"}


def degree_rules(machine, workload, model, layout, mb):
    """Every rule among P1-P5 that (layout, mb) breaks."""
    pd, pp, pt = layout.data, layout.pipeline, layout.tensor
    broken = set()
    if machine.gpus_per_node % pt or not model_splits(model, pt):
        broken.add("P1")
    if model.layers % pp or pp not in (1, *range(2, model.layers + 1, 2)):
        broken.add("P2")
    if workload.prompts % pd or pd > len(gpu_coordinates(machine)):
        broken.add("P3")
    local = workload.prompts * workload.rollouts_per_prompt / pd
    if pp == 1 and mb != 1:
        broken.add("P4")
    if pp > 1 and (local % mb or mb < pp or local / mb < 8):
        broken.add("P5")
    return broken


def machine_of(text):
    racks, nodes, gpus = map(int, text.split("x"))
    return DeviceSpace(racks=racks, nodes_per_rack=nodes, gpus_per_node=gpus)


GQA = attrs.evolve(toy_model("gqa", layers=4), kv_heads=2)  # tp=4 and 8 replicate KV heads
FEW_HEADS = attrs.evolve(toy_model("few", layers=12), heads=4, kv_heads=4, head_dim=2)  # no tp=8
ODD_HEADS = attrs.evolve(toy_model("odd", layers=6), heads=6, kv_heads=3, head_dim=2)  # 3 KV heads on 2 ranks: no
WIDE = attrs.evolve(toy_model("wide", layers=4), heads=24, kv_heads=24, ffn=48)  # tp=3 and 6 on 6-GPU nodes

CASES = [
    *(
        (cluster, layers, batch)
        for cluster in ("1x1x4", "1x2x4", "2x2x2")
        for layers, batch in ((2, (8, 1)), (4, (16, 2)), (6, (24, 1)), (12, (12, 8)), (30, (8, 32)))
    ),
    ("1x1x8", 2, (16, 1)),
    ("1x1x8", 4, (64, 1)),
    ("1x1x8", 6, (12, 4)),
    ("1x1x8", 12, (24, 8)),
    ("1x1x8", 30, (2, 64)),
    ("1x1x8", GQA, (16, 4)),
    ("2x3x4", 4, (24, 2)),
    ("2x3x4", 6, (12, 4)),
    ("2x3x4", 12, (48, 4)),
    ("2x3x4", 30, (6, 64)),
    ("1x4x8", 2, (32, 1)),
    ("1x4x8", 12, (32, 3)),
    ("1x4x8", 30, (64, 4)),
    ("1x4x8", FEW_HEADS, (8, 16)),
    ("3x1x4", 4, (24, 2)),
    ("3x1x4", 12, (12, 12)),
    ("1x2x4", ODD_HEADS, (8, 8)),
    ("2x1x6", WIDE, (24, 2)),
]


def case_name(value):
    return value if isinstance(value, str) else getattr(value, "name", str(value)).replace(", ", "-")


@pytest.mark.parametrize(("cluster", "model", "batch"), CASES, ids=case_name)
def test_candidates_are_exactly_the_brute_force(cluster, model, batch):
    machine = machine_of(cluster)
    model = toy_model("m", layers=model) if isinstance(model, int) else model
    workload = toy_workload(prompts=batch[0], rollouts_per_prompt=batch[1])
    coordinates = gpu_coordinates(machine)
    flat = {c: i for i, c in enumerate(coordinates)}
    boxes = defaultdict(list)
    for origin, extent, inside in all_boxes(machine):
        boxes[len(inside)].append((origin, extent, inside))

    expected = set()
    degrees = itertools.product(
        range(1, len(coordinates) + 2), range(1, model.layers + 2), range(1, machine.gpus_per_node + 2)
    )
    for pd, pp, pt in degrees:
        layout = Layout(pd, pp, pt)
        packing = packing_rules(machine, layout, boxes[layout.gpus])
        local = workload.sequences // pd
        # all counts for some layouts, the divisors and their neighbours for the rest: the grid is large
        counts = {1, 2, 3, pp - 1, pp, pp + 1, local // 8, local // 4, local, *_divisors(local)} - {0, -1}
        for mb in sorted(counts):
            broken = packing | degree_rules(machine, workload, model, layout, mb)
            reason = illegal_layout(machine, workload, model, layout, mb)
            assert (reason is None) == (not broken), (layout, mb, reason, broken)
            assert reason is None or reason[:2] in broken, (layout, mb, reason, broken)
            if not broken:
                for box in boxes[layout.gpus]:
                    if box_is_legal(machine, layout, *box):
                        numbers = [flat[c] for c in box[2]]
                        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "not an interval"
                        expected.add((layout, mb, numbers[0], numbers[-1] + 1))

    found = legal_candidates("v", machine, workload, model)
    listed = [
        (a.layout, a.microbatches, a.allocation.start, a.allocation.stop)
        for a in (found.assignment(i) for i in range(len(found)))
    ]
    assert listed == sorted(expected)


def _divisors(value):
    return [d for d in range(1, value + 1) if value % d == 0]


CONTEXT_CASES = [("1x1x8", 4, (16, 4)), ("1x4x4", 4, (8, 8)), ("2x3x4", 6, (12, 4)), ("1x3x6", 2, (6, 8))]


@pytest.mark.parametrize(("cluster", "layers", "batch"), CONTEXT_CASES, ids=case_name)
def test_with_context_parallelism_too(cluster, layers, batch):
    """As above, with every context degree up to a node and a half."""
    machine, model = machine_of(cluster), toy_model("m", layers=layers)
    workload = attrs.evolve(toy_workload(prompts=batch[0], rollouts_per_prompt=batch[1]), prompt_tokens=100)
    flat = {c: i for i, c in enumerate(gpu_coordinates(machine))}
    boxes = defaultdict(list)
    for origin, extent, inside in all_boxes(machine):
        boxes[len(inside)].append((origin, extent, inside))
    contexts = tuple(range(1, 3 * machine.gpus_per_node // 2 + 1))

    expected = set()
    for pd, pp, pt, pc in itertools.product(_divisors(batch[0]), range(1, layers + 1), (1, 2, 3, 4, 8), contexts):
        layout = Layout(pd, pp, pt, pc)
        packing = packing_rules(machine, layout, boxes[layout.gpus])
        for mb in _divisors(workload.sequences // pd):
            broken = packing | degree_rules(machine, workload, model, layout, mb)
            reason = illegal_layout(machine, workload, model, layout, mb)
            assert (reason is None) == (not broken), (layout, mb, reason, broken)
            assert reason is None or reason[:2] in broken, (layout, mb, reason, broken)
            if not broken:
                for box in boxes[layout.gpus]:
                    if box_is_legal(machine, layout, *box):
                        numbers = [flat[c] for c in box[2]]
                        assert numbers == list(range(numbers[0], numbers[-1] + 1)), "not an interval"
                        expected.add((layout, mb, numbers[0], numbers[-1] + 1))
    found = legal_candidates("v", machine, workload, model, axes=Axes(context=contexts))
    listed = [
        (a.layout, a.microbatches, a.allocation.start, a.allocation.stop)
        for a in (found.assignment(i) for i in range(len(found)))
    ]
    assert listed == sorted(expected)
    assert {layout.context for layout, *_ in listed} > {1}


@pytest.mark.parametrize("cluster", ["1x2x4", "2x2x2", "2x3x4"])
def test_an_interval_is_legal_exactly_when_a_box_with_these_gpus_is(cluster):
    machine = machine_of(cluster)
    workload, model = toy_workload(prompts=24, rollouts_per_prompt=8), toy_model("m", layers=12)
    flat = {c: i for i, c in enumerate(gpu_coordinates(machine))}
    boxes = [(box, [flat[c] for c in box[2]]) for box in all_boxes(machine)]
    for layout, mb in legal_layouts(machine, workload, model):
        legal = {
            (numbers[0], numbers[-1] + 1)
            for box, numbers in boxes
            if len(numbers) == layout.gpus and box_is_legal(machine, layout, *box)
        }
        for start, stop in itertools.combinations(range(-1, machine.gpus + 2), 2):
            reason = illegal_assignment(machine, workload, model, Assignment(Allocation(start, stop), layout, mb))
            assert (reason is None) == ((start, stop) in legal), (start, stop, layout, reason)


@pytest.mark.parametrize("cluster", ["1x1x8", "2x2x2", "2x3x4", "3x1x4"])
def test_tiers_of_a_layout_are_those_of_its_gpus_at_every_origin(cluster):
    machine = machine_of(cluster)
    workload, model = toy_workload(prompts=24, rollouts_per_prompt=8), toy_model("m", layers=12)
    coordinates = gpu_coordinates(machine)

    def tier(gpus):
        racks, nodes = {c[0] for c in gpus}, {c[:2] for c in gpus}
        return 2 if len(racks) > 1 else 1 if len(nodes) > 1 else 0

    candidates = legal_candidates("v", machine, workload, model, axes=Axes(context=(1, 2, 3, 4, 8)))
    rows = candidates.layouts
    for i in range(len(candidates)):
        a, row = candidates.assignment(i), candidates.layout[i]
        gpus = coordinates[a.allocation.start : a.allocation.stop]
        stage = a.layout.context * a.layout.tensor
        replica = a.layout.pipeline * stage
        replicas = [gpus[first : first + replica] for first in range(0, len(gpus), replica)]
        stages = max(1, Counter(c[:2] for c in replicas[0])[gpus[0][:2]] // stage)
        assert rows.gpus[row] == len(gpus)
        assert rows.data_tier[row] == tier(gpus), a
        assert rows.stage_tier[row] == max(map(tier, replicas)), a
        assert rows.stages_per_node[row] == stages, a


def test_a_function_is_only_data_parallel():
    machine = machine_of("1x2x4")
    found = legal_candidates("reward", machine, toy_workload(prompts=12), None)
    listed = {(str(c.allocation), str(c.layout), c.microbatches) for c in map(found.assignment, range(len(found)))}
    # dp divides 12: 1 to 4 in a node (3 at its first GPU only); 6 leaves GPUs idle; 12 is too many
    singles = {(str(i), "dp1 pp1 tp1", 1) for i in range(8)}
    pairs = {(f"{i}-{i + 1}", "dp2 pp1 tp1", 1) for i in (0, 2, 4, 6)}
    rest = {
        ("0-2", "dp3 pp1 tp1", 1),
        ("4-6", "dp3 pp1 tp1", 1),
        ("0-3", "dp4 pp1 tp1", 1),
        ("4-7", "dp4 pp1 tp1", 1),
    }
    assert listed == singles | pairs | rest


def test_origins_by_hand():
    # 2 racks of 3 nodes of 4 GPUs; rack 1 starts at GPU 12
    machine = machine_of("2x3x4")
    assert origins(machine, Layout(1, 1, 1)) == tuple(range(24))
    assert origins(machine, Layout(2, 1, 1)) == (0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22)
    assert origins(machine, Layout(3, 1, 1)) == (0, 4, 8, 12, 16, 20)  # 3 of 4 GPUs: the node's first GPU
    assert origins(machine, Layout(2, 1, 4)) == (0, 12)  # 2 of 3 nodes: the rack's first node
    assert origins(machine, Layout(3, 1, 4)) == (0, 12)  # a whole rack
    assert origins(machine, Layout(6, 1, 4)) == (0,)  # both racks
    assert origins(machine, Layout(4, 1, 4)) == ()  # 4 nodes are not whole racks of 3
    assert origins(machine_of("3x1x4"), Layout(2, 1, 4)) == (0,)  # 2 of 3 racks
    assert origins(machine_of("4x1x4"), Layout(2, 1, 4)) == (0, 8)


# --- the sentence for each broken rule

KV_REASON = "P1: 3 KV heads neither divide tp=2 nor are divisible by it"
FUNCTION_REASON = "a function without a model is only data parallel: pp=1 and tp=1"

LAYOUT_REASONS = [
    ("1x1x4", 4, (16, 2), Layout(0, 1, 1), 1, "dp must be at least 1, not 0"),
    ("1x1x4", 4, (16, 2), Layout(1, 1, 1), 0, "microbatches must be at least 1, not 0"),
    ("1x1x4", None, (16, 2), Layout(1, 1, 2), 1, FUNCTION_REASON),
    ("1x1x4", 4, (16, 2), Layout(1, 1, 3), 1, "P1: tp=3 does not divide the 4 GPUs of a node"),
    ("1x4x8", FEW_HEADS, (16, 2), Layout(1, 1, 8), 1, "P1: 4 attention heads are not divisible by tp=8"),
    ("1x1x4", ODD_HEADS, (16, 2), Layout(1, 1, 2), 1, KV_REASON),
    ("1x1x4", 6, (16, 2), Layout(1, 4, 1), 4, "P2: pp=4 does not divide the 6 layers of m"),
    (
        "1x1x4",
        6,
        (16, 2),
        Layout(1, 3, 1),
        4,
        "P2: pp=3 is odd; a pipeline has 1 or an even number of stages",
    ),
    ("1x1x4", 4, (16, 2), Layout(3, 1, 1), 1, "P3: dp=3 does not divide the 16 prompts of a step"),
    ("1x1x4", 4, (16, 2), Layout(8, 1, 1), 1, "P3: dp=8 exceeds the 4 GPUs of the cluster"),
    ("1x1x4", 4, (16, 2), Layout(1, 1, 1), 2, "P4: without a pipeline there is 1 microbatch, not 2"),
    (
        "1x1x4",
        4,
        (16, 2),
        Layout(1, 2, 1),
        3,
        "P5: 3 microbatches do not divide the 32 sequences of a replica",
    ),
    ("1x1x4", 4, (16, 2), Layout(1, 4, 1), 2, "P5: 2 microbatches do not fill a pipeline of 4 stages"),
    ("1x1x4", 4, (16, 2), Layout(1, 2, 1), 8, "P5: 32 sequences in 8 microbatches are fewer than 8 each"),
    ("2x3x4", 4, (16, 2), Layout(4, 1, 4), 1, "P6: 4 nodes are more than a rack of 3 and not whole racks"),
    ("2x2x2", 4, (16, 2), Layout(8, 1, 2), 1, "P6: 4 racks are needed, the cluster has 2"),
    (
        "1x4x8",
        12,
        (16, 8),
        Layout(1, 12, 1),
        16,
        "P8: 8 pipeline stages fit a node of 8 GPUs at tp=1, which does not divide pp=12",
    ),
    (
        "1x4x8",
        12,
        (16, 8),
        Layout(2, 6, 1),
        8,
        "P8: 1 replica(s) of 6 GPUs leave some of the 8 GPUs of a node idle, so dp=2 cannot continue on the next node",
    ),
    ("1x2x4", 4, (24, 2), Layout(6, 1, 1), 1, "P8: dp=6 does not fill whole nodes of 4 replica(s)"),
]


@pytest.mark.parametrize(
    ("cluster", "model", "batch", "layout", "mb", "sentence"),
    LAYOUT_REASONS,
    ids=[r[-1][:24] for r in LAYOUT_REASONS],
)
def test_the_reason_names_the_rule_and_the_values(cluster, model, batch, layout, mb, sentence):
    model = toy_model("m", layers=model) if isinstance(model, int) else model
    workload = toy_workload(prompts=batch[0], rollouts_per_prompt=batch[1])
    assert illegal_layout(machine_of(cluster), workload, model, layout, mb) == sentence


@pytest.mark.parametrize(
    ("assignment", "sentence"),
    [
        (on(0, 4, data=2), "P8: GPUs 0-3 are 4, dp2 pp1 tp1 needs 2"),
        (on(3, 4, data=2), "P8: GPUs 3 are 1, dp2 pp1 tp1 needs 2"),
        (on(8, 10), "P7: GPUs 8-9 are outside the cluster's 0-7"),
        (on(-2, 0), "P7: GPUs -2--1 are outside the cluster's 0-7"),
        (
            on(3, 5),
            "P7: an allocation of 2 GPUs for dp2 pp1 tp1 cannot start at GPU 3; the nearest aligned start is 2",
        ),
        (
            on(2, 6, tensor=2),
            "P7: an allocation of 4 GPUs for dp2 pp1 tp2 cannot start at GPU 2; the nearest aligned start is 0",
        ),
        (on(0, 2, microbatches=2), "P4: without a pipeline there is 1 microbatch, not 2"),
        (on(2, 4), None),
    ],
)
def test_the_reason_of_an_assignment(assignment, sentence):
    reason = illegal_assignment(machine_of("1x2x4"), toy_workload(), toy_model("m"), assignment)
    assert reason == sentence


# --- the table


def test_find_is_the_inverse_of_assignment():
    found = legal_candidates("v", machine_of("2x2x2"), toy_workload(rollouts_per_prompt=4), toy_model("m"))
    assert [found.find(found.assignment(i)) for i in range(len(found))] == list(range(len(found)))
    assert found.find(on(1, 3)) is None
    assert found.find(on(0, 2, microbatches=2)) is None


def test_take_keeps_the_given_order():
    found = legal_candidates("v", machine_of("1x1x4"), toy_workload(), toy_model("m"))
    chosen = found.take(np.array([5, 0, 2]))
    assert [chosen.assignment(i) for i in range(3)] == [found.assignment(i) for i in (5, 0, 2)]
    assert chosen.operator == "v"


def test_the_order_is_layout_then_microbatches_then_start():
    found = legal_candidates("v", machine_of("1x2x4"), toy_workload(rollouts_per_prompt=8), toy_model("m"))
    keys = [(a.layout, a.microbatches, a.allocation) for a in map(found.assignment, range(len(found)))]
    assert keys == sorted(keys)
    assert len(set(keys)) == len(keys)
