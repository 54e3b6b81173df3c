"""Lowering: every branch of the four stages against nodes and edges drawn by hand.

Notation: ``g@1.0`` is length phase 0 of operator g in step 1; ``COMM Y>t@0`` carries container Y to t in step 0. The
weights W of a toy model have 40000 bytes, completions Y 6400, everything else 3200.
"""

from __future__ import annotations

from collections import Counter, defaultdict

import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.ir import Role, RpegBuilder
from rpeg_core.passes.lower import NodeKind, lower, split_operators
from rpeg_core.passes.unroll import Invocation, required_version, unroll
from rpeg_core.testing.strategies import configurations
from rpeg_core.testing.toys import SKEWED, on, toy_model, toy_workload

GEN, INF, TRAIN = "generation", "inference", "training"


def graph(*, operators, data, tau=0, publish=()):
    """Short graphs: ``operators`` is name -> (role, model); model ``m`` is trained, others are frozen, None is a
    function. ``data`` lists ``"source container targets..."``."""
    b = RpegBuilder("drawn")
    for model in sorted({model for _, model in operators.values() if model is not None}):
        b.model(model, toy_model(model), trainable=model == "m", staleness=tau if model == "m" else 0)
    b.data("X", elements=1600, bytes_per_element=2)
    reads, writes = defaultdict(set), defaultdict(set)
    for source, container, *targets in map(str.split, data):
        if container not in set().union(*writes.values()):
            b.data(container, elements=3200 if container.startswith("Y") else 1600, bytes_per_element=2)
        writes[source].add(container)
        for target in targets:
            reads[target].add(container)
    for name, (role, model) in operators.items():
        inputs = reads[name] or {"X"}
        if role == TRAIN:
            b.training(name, model, reads=inputs)
        elif model is None:
            b.function(name, reads=inputs, writes=writes[name], seconds_per_sample=1.0)
        else:
            add = b.generation if role == GEN else b.inference
            add(name, model, reads=inputs, writes=writes[name])
    for source, container, *targets in map(str.split, data):
        b.connect(source, container, *targets)
    if publish:
        b.publish("t", *publish)
    return b.build()


def pair(tau=0):
    """g -Y-> t of one model."""
    return graph(operators={"g": (GEN, "m"), "t": (TRAIN, "m")}, data=["g Y t"], tau=tau, publish=["g"])


def name(node):
    place = f"{node.operator}@{node.step}" + ("" if node.phase is None else f".{node.phase}")
    container = (node.container or "").replace("W_", "W:")
    return place if node.kind is NodeKind.OP else f"{node.kind.value} {container}>{place}"


def drawn(lowered):
    """(transfers with payload and devices, edges) of an executable graph, sorted."""
    names = [name(node) for node in lowered.nodes]
    assert len(set(names)) == len(names), "the notation is ambiguous here"
    transfers = [
        f"{name(n)} {n.payload_bytes:g} from {n.source} to {n.allocation}"
        for n in lowered.nodes
        if n.kind is not NodeKind.OP
    ]
    return sorted(transfers), sorted(f"{names[a]} > {names[b]}" for a, b in lowered.edges)


def check(rpeg, plan, *, steps=1, transfers, edges, workload=None, split_lengths=True):
    lowered = lower(unroll(rpeg, steps), plan, workload or toy_workload(), split_lengths=split_lengths)
    assert drawn(lowered) == (sorted(transfers), sorted(edges))
    return lowered


# --- Stage 2: data edges


def chain_with_reference():
    """g -Y-> r -L-> t; r is frozen, so that between r and t only the data edge counts."""
    return graph(
        operators={"g": (GEN, "m"), "r": (INF, "ref"), "t": (TRAIN, "m")},
        data=["g Y r", "r L t"],
        publish=["g"],
    )


def test_data_edge_on_the_same_allocation_is_a_precedence():
    plan = {"g": on(0, 2), "r": on(0, 2, tensor=2), "t": on(0, 2)}
    check(chain_with_reference(), plan, transfers=[], edges=["g@0 > r@0", "r@0 > t@0"])


@pytest.mark.parametrize("where", [on(2, 4), on(1, 3), on(0, 1), on(0, 4)], ids=["off", "part", "in", "around"])
def test_data_edge_between_allocations_is_a_comm_with_all_bytes(where):
    plan = {"g": on(0, 2), "r": where, "t": on(0, 2)}
    check(
        chain_with_reference(),
        plan,
        transfers=[
            f"COMM Y>r@0 6400 from 0-1 to {where.allocation}",
            f"COMM L>t@0 3200 from {where.allocation} to 0-1",
        ],
        edges=["g@0 > COMM Y>r@0", "COMM Y>r@0 > r@0", "r@0 > COMM L>t@0", "COMM L>t@0 > t@0"],
    )


def test_two_containers_between_one_pair_are_two_transfers():
    rpeg = graph(operators={"g": (GEN, "ref"), "r": (INF, "rew")}, data=["g Y r", "g L r"])
    check(
        rpeg,
        {"g": on(0), "r": on(1)},
        transfers=["COMM L>r@0 3200 from 0 to 1", "COMM Y>r@0 6400 from 0 to 1"],
        edges=["g@0 > COMM Y>r@0", "COMM Y>r@0 > r@0", "g@0 > COMM L>r@0", "COMM L>r@0 > r@0"],
    )


# --- Stage 3: weights within a step

Y_COMM = ["g@0 > COMM Y>t@0", "COMM Y>t@0 > t@0"]


@pytest.mark.parametrize(
    ("tau", "serve", "train", "transfers", "edges"),
    [
        pytest.param(1, on(0, 2), on(2, 4), ["Y"], Y_COMM, id="shadow pair"),
        pytest.param(0, on(0, 2), on(0, 2), [], ["g@0 > t@0"], id="same layout"),
        pytest.param(1, on(0, 2), on(0, 2), [], ["g@0 > t@0"], id="same layout async"),
        pytest.param(
            0,
            on(0, 2),
            on(0, 2, tensor=2),
            ["W"],
            ["g@0 > t@0", "g@0 > RESHARD W:m>t@0", "RESHARD W:m>t@0 > t@0"],
            id="other layout",
        ),
        pytest.param(
            1,
            on(0, 2),
            on(0, 2, pipeline=2, microbatches=2),
            [],
            ["g@0 > t@0"],
            id="other layout async",
        ),
        pytest.param(0, on(0, 2), on(2, 4), ["Y"], ["g@0 > t@0", *Y_COMM], id="disjoint sync"),
        pytest.param(1, on(0, 2), on(1, 3), ["Y"], ["g@0 > t@0", *Y_COMM], id="partial overlap async"),
        pytest.param(1, on(0, 4), on(1), ["Y"], ["g@0 > t@0", *Y_COMM], id="nested async"),
    ],
)
def test_weights_within_a_step(tau, serve, train, transfers, edges):
    texts = {
        "Y": f"COMM Y>t@0 6400 from {serve.allocation} to {train.allocation}",
        "W": f"RESHARD W:m>t@0 40000 from {train.allocation} to {train.allocation}",
    }
    check(pair(tau), {"g": serve, "t": train}, transfers=[texts[t] for t in transfers], edges=edges)


def test_microbatches_are_no_part_of_the_layout():
    plan = {
        "g": on(0, 2, pipeline=2, microbatches=2),
        "t": on(0, 2, pipeline=2, microbatches=1),
    }
    check(pair(), plan, transfers=[], edges=["g@0 > t@0"])


def test_a_frozen_model_is_never_resharded():
    rpeg = graph(operators={"r": (INF, "ref"), "s": (INF, "ref")}, data=["r Y s"])
    check(rpeg, {"r": on(0, 2), "s": on(0, 2, tensor=2)}, transfers=[], edges=["r@0 > s@0"])


def triple(tau=0, order=("g", "i", "t")):
    """g -Y-> i -V-> t of one model, as in PPO with a shared actor and critic."""
    roles = {"g": (GEN, "m"), "i": (INF, "m"), "t": (TRAIN, "m")}
    return graph(
        operators={name: roles[name] for name in order},
        data=["g Y i", "i V t"],
        tau=tau,
        publish=["g", "i"],
    )


@pytest.mark.parametrize("order", [("g", "i", "t"), ("t", "i", "g"), ("i", "t", "g")])
def test_only_neighbours_in_data_order_are_paired_whatever_the_declaration_order(order):
    # (g, i) other layout, (i, t) other layout; (g, t) has the same one and needs nothing
    plan = {"g": on(0, 2), "i": on(0, 2, tensor=2), "t": on(0, 2)}
    check(
        triple(order=order),
        plan,
        transfers=["RESHARD W:m>i@0 40000 from 0-1 to 0-1", "RESHARD W:m>t@0 40000 from 0-1 to 0-1"],
        edges=[
            "g@0 > i@0",
            "g@0 > RESHARD W:m>i@0",
            "RESHARD W:m>i@0 > i@0",
            "i@0 > t@0",
            "i@0 > RESHARD W:m>t@0",
            "RESHARD W:m>t@0 > t@0",
        ],
    )


def test_with_staleness_only_serving_operators_share_a_version():
    # tau = 1, everything on the same GPUs: i gets g's version in its own layout, t has a newer one of its own
    plan = {"g": on(0, 2), "i": on(0, 2, tensor=2), "t": on(0, 2)}
    check(
        triple(tau=1),
        plan,
        transfers=["RESHARD W:m>i@0 40000 from 0-1 to 0-1"],
        edges=["g@0 > i@0", "g@0 > RESHARD W:m>i@0", "RESHARD W:m>i@0 > i@0", "i@0 > t@0"],
    )


def test_a_shadow_pair_is_judged_pair_by_pair():
    # tau = 1: (g, i) overlap -> precedence; (i, t) disjoint -> nothing beside the data
    plan = {"g": on(0, 2), "i": on(1), "t": on(2, 4)}
    check(
        triple(tau=1),
        plan,
        transfers=["COMM Y>i@0 6400 from 0-1 to 1", "COMM V>t@0 3200 from 1 to 2-3"],
        edges=[
            "g@0 > i@0",
            "g@0 > COMM Y>i@0",
            "COMM Y>i@0 > i@0",
            "i@0 > COMM V>t@0",
            "COMM V>t@0 > t@0",
        ],
    )


# --- Stage 4: weights across steps


def within_step(serve, train, tau=0):
    """Transfers and edges of Stages 2 and 3 of ``pair`` over two steps."""
    transfers, edges = [], []
    for k in range(2):
        y, w = f"COMM Y>t@{k}", f"RESHARD W:m>t@{k}"
        if serve.allocation != train.allocation:
            transfers.append(f"{y} 6400 from {serve.allocation} to {train.allocation}")
            edges += [f"g@{k} > {y}", f"{y} > t@{k}"]
        if tau == 0 or not serve.allocation.disjoint(train.allocation):
            edges.append(f"g@{k} > t@{k}")
        if serve.allocation == train.allocation and serve.layout != train.layout:
            transfers.append(f"{w} 40000 from {train.allocation} to {train.allocation}")
            edges += [f"g@{k} > {w}", f"{w} > t@{k}"]
    return transfers, [*edges, "t@0 > t@1"]


@pytest.mark.parametrize(
    ("serve", "train", "node"),
    [
        pytest.param(on(0, 2), on(0, 2), None, id="same layout"),
        pytest.param(on(0, 2, tensor=2), on(0, 2), "RESHARD 40000", id="other layout"),
        pytest.param(on(0, 2), on(2, 4), "COMM 40000", id="disjoint"),
        pytest.param(on(0), on(2, 4), "COMM 40000", id="disjoint of other size"),
        pytest.param(on(2, 6), on(0, 4), "COMM 20000", id="half overlap"),  # (4 - 2) / 4
        pytest.param(on(3, 5), on(0, 4), "COMM 30000", id="overlap of other size"),  # (4 - 1) / 4
        pytest.param(on(0), on(0, 4), "COMM 30000", id="serving inside"),  # (4 - 1) / 4
        pytest.param(on(0, 8), on(0, 2), "COMM 30000", id="training inside"),  # (8 - 2) / 8
    ],
)
def test_publication(serve, train, node):
    transfers, edges = within_step(serve, train)
    if node is None:
        edges.append("t@0 > g@1")
    else:
        kind, payload = node.split()
        source = train.allocation if kind == "COMM" else serve.allocation
        transfers.append(f"{kind} W:m>g@1 {payload} from {source} to {serve.allocation}")
        edges += [f"t@0 > {kind} W:m>g@1", f"{kind} W:m>g@1 > g@1"]
    check(pair(), {"g": serve, "t": train}, steps=2, transfers=transfers, edges=edges)


def test_a_stale_publication_skips_a_step():
    # tau = 1, disjoint: g@0 and g@1 use version 0; g@2 waits for the update of step 0 only
    check(
        pair(tau=1),
        {"g": on(0), "t": on(1)},
        steps=3,
        transfers=[
            "COMM Y>t@0 6400 from 0 to 1",
            "COMM Y>t@1 6400 from 0 to 1",
            "COMM Y>t@2 6400 from 0 to 1",
            "COMM W:m>g@2 40000 from 1 to 0",
        ],
        edges=[
            *(edge for k in range(3) for edge in (f"g@{k} > COMM Y>t@{k}", f"COMM Y>t@{k} > t@{k}")),
            "t@0 > t@1",
            "t@1 > t@2",
            "t@0 > COMM W:m>g@2",
            "COMM W:m>g@2 > g@2",
        ],
    )


def publications(rpeg, plan, steps=2):
    """Weights transfers into serving operators and every edge between t@0 and the serving operators of step 1."""
    transfers, edges = drawn(lower(unroll(rpeg, steps), plan, toy_workload()))
    ends = {"t@0", "g@1", "i@1"}
    return (
        [t for t in transfers if " W:m>" in t and "@1 " in t and ">t@" not in t],
        [e for e in edges if ("W:m>g@1" in e or "W:m>i@1" in e or set(e.split(" > ")) < ends) and ">t@" not in e],
    )


def test_two_consumers_on_the_same_allocation_and_layout_share_the_transfer():
    plan = {"g": on(0, 2), "i": on(0, 2), "t": on(2, 4)}
    assert publications(triple(), plan) == (
        ["COMM W:m>g@1 40000 from 2-3 to 0-1"],
        ["COMM W:m>g@1 > g@1", "COMM W:m>g@1 > i@1", "g@1 > i@1", "t@0 > COMM W:m>g@1"],
    )


def test_two_consumers_on_the_same_allocation_and_layout_share_the_reshard():
    plan = {"g": on(0, 2, tensor=2), "i": on(0, 2, tensor=2), "t": on(0, 2)}
    assert publications(triple(), plan) == (
        ["RESHARD W:m>g@1 40000 from 0-1 to 0-1"],
        ["RESHARD W:m>g@1 > g@1", "RESHARD W:m>g@1 > i@1", "g@1 > i@1", "t@0 > RESHARD W:m>g@1"],
    )


def test_two_consumers_in_the_training_layout_both_just_wait():
    plan = {"g": on(0, 2), "i": on(0, 2), "t": on(0, 2)}
    assert publications(triple(), plan) == ([], ["g@1 > i@1", "t@0 > g@1", "t@0 > i@1"])


@pytest.mark.parametrize("where", [on(4, 6), on(0, 4), on(1, 3)])
def test_two_consumers_on_other_allocations_get_their_own_transfers(where):
    plan = {"g": on(0, 2), "i": where, "t": on(6, 8)}
    transfers, _ = publications(triple(), plan)
    assert transfers == [
        "COMM W:m>g@1 40000 from 6-7 to 0-1",
        f"COMM W:m>i@1 40000 from 6-7 to {where.allocation}",
    ]


@pytest.mark.parametrize("tau", [0, 1])
def test_a_reshard_within_the_step_installs_the_version_for_its_target(tau):
    # g gets version 1 by COMM and passes it on to i in i's layout: no second transfer from t
    plan = {"g": on(0, 2), "i": on(0, 2, tensor=2), "t": on(2, 4)}
    rpeg = triple(tau=tau)
    lowered = lower(unroll(rpeg, 2 + tau), plan, toy_workload())
    transfers, edges = drawn(lowered)
    k = 1 + tau
    assert [t for t in transfers if "W:m" in t and f"@{k} " in t] == [
        f"COMM W:m>g@{k} 40000 from 2-3 to 0-1",
        f"RESHARD W:m>i@{k} 40000 from 0-1 to 0-1",
    ]
    into = [e for e in edges if e.endswith(f"> i@{k}")]
    assert into == [f"RESHARD W:m>i@{k} > i@{k}", f"g@{k} > i@{k}", f"t@0 > i@{k}"]
    versions = {name(n): n.version for n in lowered.nodes if n.step == k and n.operator in "gi"}
    assert set(versions.values()) == {1}


def test_layouts_that_differ_in_microbatches_only_are_equal_installations():
    plan = {
        "g": on(0, 2, pipeline=2, microbatches=2),
        "i": on(0, 2, pipeline=2, microbatches=1),
        "t": on(2, 4),
    }
    transfers, _ = publications(triple(), plan)
    assert transfers == ["COMM W:m>g@1 40000 from 2-3 to 0-1"]


def test_an_installation_in_another_layout_is_not_reused():
    # g and j share GPUs 0-1 but not the layout, and i between them in data order is elsewhere: j gets its own
    rpeg = graph(
        operators={"g": (GEN, "m"), "i": (INF, "m"), "j": (INF, "m"), "t": (TRAIN, "m")},
        data=["g Y i", "i V j", "j Z t"],
        publish=["g", "i", "j"],
    )
    plan = {"g": on(0, 2), "i": on(4), "j": on(0, 2, tensor=2), "t": on(2, 4)}
    lowered = lower(unroll(rpeg, 2), plan, toy_workload())
    installs = [(n.operator, n.kind, str(n.layout)) for n in lowered.nodes if n.container == "W_m"]
    assert installs == [
        ("g", NodeKind.COMM, "dp2 pp1 tp1"),
        ("i", NodeKind.COMM, "dp1 pp1 tp1"),
        ("j", NodeKind.COMM, "dp1 pp1 tp2"),
    ]


def test_every_version_is_installed_anew():
    lowered = lower(unroll(triple(), 4), {"g": on(0), "i": on(0), "t": on(1)}, toy_workload())
    installs = [n for n in lowered.nodes if n.kind is NodeKind.COMM and n.model == "m"]
    assert [(n.operator, n.step, n.version) for n in installs] == [("g", 1, 1), ("g", 2, 2), ("g", 3, 3)]


# --- Stage 1: length phases; 1/2, 1/4, 1/4 of the sequences finish in phase 0, 1, 2

SKEWED_LENGTHS = toy_workload(response_lengths=SKEWED)
G_CHAIN = ["g@0.0 > g@0.1", "g@0.1 > g@0.2"]


def phase_edges(source, target, container="Y"):
    """The drawn ladder: source phase q > COMM q > target phase q, and the target's chain."""
    rungs = []
    for q in range(3):
        comm = f"COMM {container}>{target}@0.{q}"
        rungs += [f"{source}@0.{q} > {comm}", f"{comm} > {target}@0.{q}"]
    return [*rungs, f"{target}@0.0 > {target}@0.1", f"{target}@0.1 > {target}@0.2"]


def phase_comms(target, source, where, container="Y"):
    return [
        f"COMM {container}>{target}@0.{q} {payload} from {source} to {where}"
        for q, payload in enumerate((3200, 1600, 1600))
    ]


def fan(*assessments):
    """g -Y-> each assessment (frozen), nothing else."""
    operators = {"g": (GEN, "ref"), **{a: (INF, a) for a in assessments}}
    return graph(operators=operators, data=["g Y " + " ".join(assessments)])


def test_a_disjoint_inference_is_split_with_its_generation():
    #  g.0 ───> g.1 ───> g.2
    #   │        │        │        COMM 1/2, 1/4, 1/4 of Y
    #  r.0 ───> r.1 ───> r.2
    lowered = check(
        fan("r"),
        {"g": on(0), "r": on(1)},
        workload=SKEWED_LENGTHS,
        transfers=phase_comms("r", 0, 1),
        edges=[*G_CHAIN, *phase_edges("g", "r")],
    )
    assert {n.phase for n in lowered.nodes if n.operator == "g"} == {0, 1, 2}


def test_an_overlapping_inference_waits_for_the_last_phase():
    # r on GPU 2 is split; s on g's GPUs and u on one of them are not
    check(
        fan("r", "s", "u"),
        {"g": on(0, 2), "r": on(2), "s": on(0, 2), "u": on(1)},
        workload=SKEWED_LENGTHS,
        transfers=[*phase_comms("r", "0-1", 2), "COMM Y>u@0 6400 from 0-1 to 1"],
        edges=[
            *G_CHAIN,
            *phase_edges("g", "r"),
            "g@0.2 > s@0",
            "g@0.2 > COMM Y>u@0",
            "COMM Y>u@0 > u@0",
        ],
    )


@pytest.mark.parametrize(
    ("where", "workload", "split_lengths"),
    [
        (on(1), SKEWED_LENGTHS, True),  # GPU 1 is one of g's
        (on(2), SKEWED_LENGTHS, False),  # ablation A1
        (on(2), toy_workload(), True),  # one phase
        (on(1, 3), SKEWED_LENGTHS, True),  # partial overlap
    ],
    ids=["inside", "switched off", "one phase", "partial overlap"],
)
def test_nothing_is_split_without_a_disjoint_inference(where, workload, split_lengths):
    check(
        fan("r"),
        {"g": on(0, 2), "r": where},
        workload=workload,
        split_lengths=split_lengths,
        transfers=[f"COMM Y>r@0 6400 from 0-1 to {where.allocation}"],
        edges=["g@0 > COMM Y>r@0", "COMM Y>r@0 > r@0"],
    )


def test_generation_on_its_training_gpus_feeding_only_training_is_not_split():
    check(
        pair(tau=1),
        {"g": on(0), "t": on(1)},
        workload=SKEWED_LENGTHS,
        transfers=["COMM Y>t@0 6400 from 0 to 1"],
        edges=Y_COMM,
    )


def test_other_inputs_of_a_split_inference_arrive_before_its_first_phase():
    # r on GPU 1 and s on GPU 2 are split; s also reads L, which r has written after its last phase
    rpeg = graph(
        operators={"g": (GEN, "ref"), "r": (INF, "r"), "s": (INF, "s")},
        data=["g Y r s", "r L s"],
    )
    check(
        rpeg,
        {"g": on(0), "r": on(1), "s": on(2)},
        workload=SKEWED_LENGTHS,
        transfers=[*phase_comms("r", 0, 1), *phase_comms("s", 0, 2), "COMM L>s@0 3200 from 1 to 2"],
        edges=[
            *G_CHAIN,
            *phase_edges("g", "r"),
            *phase_edges("g", "s"),
            "r@0.2 > COMM L>s@0",
            "COMM L>s@0 > s@0.0",
        ],
    )


def test_split_inferences_on_one_allocation_are_joined_last_to_first():
    rpeg = graph(
        operators={"g": (GEN, "ref"), "r": (INF, "r"), "s": (INF, "s")},
        data=["g Y r s", "r L s"],
    )
    check(
        rpeg,
        {"g": on(0), "r": on(1), "s": on(1)},
        workload=SKEWED_LENGTHS,
        transfers=[*phase_comms("r", 0, 1), *phase_comms("s", 0, 1)],
        edges=[*G_CHAIN, *phase_edges("g", "r"), *phase_edges("g", "s"), "r@0.2 > s@0.0"],
    )


def two_generations():
    """g -Y-> r and s; h -Yh-> r."""
    return graph(
        operators={"g": (GEN, "ref"), "h": (GEN, "rew"), "r": (INF, "r"), "s": (INF, "s")},
        data=["g Y r s", "h Yh r"],
    )


def test_two_generations_feed_one_inference_phase_by_phase():
    check(
        two_generations(),
        {"g": on(0), "h": on(1), "r": on(2), "s": on(0)},
        workload=SKEWED_LENGTHS,
        transfers=[*phase_comms("r", 0, 2), *phase_comms("r", 1, 2, "Yh")],
        edges=[
            *G_CHAIN,
            "h@0.0 > h@0.1",
            "h@0.1 > h@0.2",
            *phase_edges("g", "r"),
            *phase_edges("h", "r", "Yh")[:6],
            "g@0.2 > s@0",
        ],
    )


def test_an_inference_that_overlaps_one_of_its_generations_is_not_split():
    # r shares GPU 1 with h; g is split all the same because of s on GPU 3
    check(
        two_generations(),
        {"g": on(0), "h": on(1), "r": on(1), "s": on(3)},
        workload=SKEWED_LENGTHS,
        transfers=["COMM Y>r@0 6400 from 0 to 1", *phase_comms("s", 0, 3)],
        edges=[
            *G_CHAIN,
            *phase_edges("g", "s"),
            "g@0.2 > COMM Y>r@0",
            "COMM Y>r@0 > r@0",
            "h@0 > r@0",
        ],
    )


@pytest.mark.parametrize("where", [0, 1], ids=["same GPUs", "other GPUs"])
def test_a_generation_waits_for_all_rows_of_another(where):
    """g -Y-> h; both are split because r, which reads Y and Yh, has GPUs of its own."""
    rpeg = graph(operators={"g": (GEN, "ref"), "h": (GEN, "rew"), "r": (INF, "r")}, data=["g Y h r", "h Yh r"])
    apart = where != 0
    check(
        rpeg,
        {"g": on(0), "h": on(where), "r": on(2)},
        workload=SKEWED_LENGTHS,
        transfers=[
            *phase_comms("r", 0, 2),
            *phase_comms("r", where, 2, "Yh"),
            *(["COMM Y>h@0 6400 from 0 to 1"] if apart else []),
        ],
        edges=[
            *G_CHAIN,
            "h@0.0 > h@0.1",
            "h@0.1 > h@0.2",
            *(["g@0.2 > COMM Y>h@0", "COMM Y>h@0 > h@0.0"] if apart else ["g@0.2 > h@0.0"]),
            *phase_edges("g", "r"),
            *phase_edges("h", "r", "Yh")[:6],
        ],
    )


def test_a_function_on_its_own_gpus_is_split_like_an_inference():
    rpeg = graph(operators={"g": (GEN, "ref"), "f": (INF, None)}, data=["g Y f"])
    check(
        rpeg,
        {"g": on(0), "f": on(1)},
        workload=SKEWED_LENGTHS,
        transfers=phase_comms("f", 0, 1),
        edges=[*G_CHAIN, *phase_edges("g", "f")],
    )


def test_weights_arrive_before_the_first_phase_and_the_last_one_is_waited_for():
    # tau = 0, g on 0-1, r on 2, t on 0-1 in another layout; two steps
    plan = {"g": on(0, 2), "r": on(2), "t": on(0, 2, tensor=2)}
    lowered = lower(unroll(chain_with_reference(), 2), plan, SKEWED_LENGTHS)
    _, edges = drawn(lowered)
    assert [e for e in edges if "W:m" in e or " > t@" in e] == [
        "COMM L>t@0 > t@0",
        "COMM L>t@1 > t@1",
        "RESHARD W:m>g@1 > g@1.0",
        "RESHARD W:m>t@0 > t@0",
        "RESHARD W:m>t@1 > t@1",
        "g@0.2 > RESHARD W:m>t@0",
        "g@1.2 > RESHARD W:m>t@1",
        "t@0 > RESHARD W:m>g@1",
        "t@0 > t@1",
    ]


def test_split_operators_are_named():
    phases = SKEWED_LENGTHS.phases
    plan = {"g": on(0), "h": on(1), "r": on(1), "s": on(3)}
    assert split_operators(two_generations(), plan, phases) == {"g", "s"}
    assert split_operators(two_generations(), plan, phases[:1]) == frozenset()


# --- what nodes say about themselves


def test_attributes_of_every_kind_of_node():
    plan = {"g": on(0, 2, pipeline=2, microbatches=2), "t": on(2, 4, tensor=2)}
    lowered = lower(unroll(pair(), 2), plan, toy_workload())
    nodes = {name(node): node for node in lowered.nodes}
    op, data, weights = nodes["g@1"], nodes["COMM Y>t@1"], nodes["COMM W:m>g@1"]
    assert (op.allocation, op.layout, op.microbatches) == (plan["g"].allocation, plan["g"].layout, 2)
    assert (op.source, op.container, op.payload_bytes, op.model, op.version) == (None, None, 0.0, "m", 1)
    assert (data.layout, data.microbatches, data.model, data.version) == (None, 0, None, None)
    assert (data.operator, data.step, data.container) == ("t", 1, "Y")
    assert (weights.layout, weights.model, weights.version) == (plan["g"].layout, "m", 1)
    assert (weights.operator, weights.step, weights.container) == ("g", 1, "W_m")
    reshard = lower(unroll(pair(), 2), {"g": on(0, 2), "t": on(0, 2, tensor=2)}, toy_workload())
    into = {name(n): (n.layout, n.version) for n in reshard.nodes if n.kind is NodeKind.RESHARD}
    train, serve = on(0, 2, tensor=2).layout, on(0, 2).layout
    assert into == {
        "RESHARD W:m>t@0": (train, 0),
        "RESHARD W:m>t@1": (train, 1),
        "RESHARD W:m>g@1": (serve, 1),
    }


def test_neighbours_are_the_edges():
    lowered = lower(unroll(pair(), 2), {"g": on(0), "t": on(1)}, toy_workload())
    forward = {(a, b) for a, after in enumerate(lowered.successors()) for b in after}
    backward = {(a, b) for b, before in enumerate(lowered.predecessors()) for a in before}
    assert forward == backward == set(lowered.edges)
    assert len(set(lowered.edges)) == len(lowered.edges)


# --- any configuration


def gpus(allocation):
    return set(range(allocation.start, allocation.stop))


@given(configurations(), st.integers(1, 4), st.booleans())
@settings(max_examples=80, deadline=None)
def test_any_configuration_lowers_into_a_sound_graph(configuration, steps, split_lengths):
    rpeg, plan, workload = configuration.rpeg, configuration.plan, configuration.workload
    lowered = lower(unroll(rpeg, steps), plan, workload, split_lengths=split_lengths)
    view = nx.DiGraph(lowered.edges)
    view.add_nodes_from(range(len(lowered.nodes)))
    assert nx.is_directed_acyclic_graph(view)
    assert len({node.label for node in lowered.nodes}) == len(lowered.nodes)
    assert [node.index for node in lowered.nodes] == list(range(len(lowered.nodes)))

    chains = defaultdict(list)
    for node in lowered.nodes:
        assert node.allocation == plan[node.operator].allocation
        if node.kind is NodeKind.OP:
            chains[Invocation(node.operator, node.step)].append(node.index)
            assert (node.layout, node.microbatches) == (
                plan[node.operator].layout,
                plan[node.operator].microbatches,
            )
        if node.model is not None:
            assert node.version == required_version(rpeg, Invocation(node.operator, node.step))
    assert set(chains) == {Invocation(op.name, k) for op in rpeg.operators for k in range(steps)}
    assert {len(chain) for chain in chains.values()} <= {1, len(workload.phases) if split_lengths else 1}

    after = {node: nx.descendants(view, node) for node in view}

    def waits(later, earlier):
        return later in after[earlier]

    # data: every byte of a container that crosses allocations is carried once, and phase by phase in order
    expected, carried = Counter(), Counter()
    for edge in rpeg.data_edges:
        for k in range(steps):
            u, v = chains[Invocation(edge.source, k)], chains[Invocation(edge.target, k)]
            roles = [rpeg.operator(end).role for end in (edge.source, edge.target)]
            if len(u) > 1 and len(v) > 1 and roles == [Role.GENERATION, Role.INFERENCE]:
                for phase, (before, target) in enumerate(zip(u, v, strict=True)):
                    (comm,) = (
                        node
                        for node in view.successors(before)
                        if lowered.nodes[node].container == edge.container and target in view[node]
                    )
                    assert lowered.nodes[comm].phase == phase
                    assert set(view.predecessors(comm)) == {before}, "a phase waits for its own phase only"
            else:
                assert waits(v[0], u[-1])
            a, b = plan[edge.source].allocation, plan[edge.target].allocation
            if gpus(a) != gpus(b):
                expected[edge.container, edge.target, k, a] += rpeg.container(edge.container).bytes
    for node in lowered.nodes:
        if node.kind is NodeKind.COMM and node.model is None:
            carried[node.container, node.operator, node.step, node.source] += node.payload_bytes
    assert set(carried) == set(expected)
    assert all(carried[key] == pytest.approx(expected[key], rel=1e-12, abs=1e-9) for key in expected)

    # weights: bytes, and the version that an invocation uses has been made and has arrived
    for node in lowered.nodes:
        if node.kind is NodeKind.OP or node.model is None:
            continue
        full = rpeg.model(node.model).spec.total_parameters * 2
        a, b = gpus(node.source), gpus(node.allocation)
        held = 0 if node.kind is NodeKind.RESHARD else len(a & b)
        assert node.payload_bytes == pytest.approx(full * (1 - held / max(len(a), len(b))))
        assert (node.kind is NodeKind.RESHARD) == (a == b)
    for edge in rpeg.publication_edges:
        for k in range(steps):
            consumer = Invocation(edge.target, k)
            version = required_version(rpeg, consumer)
            if version > 0:
                assert waits(chains[consumer][0], chains[Invocation(edge.source, version - 1)][-1])
            own = chains.get(Invocation(edge.source, version))
            # What is trained in one invocation is there together: a fresher model holds the others up.
            together = {rpeg.staleness[model] for model in rpeg.operator(edge.source).models}
            held_up = own is not None and len(together) == 1 and waits(chains[consumer][0], own[-1])
            assert not held_up, "waits for a later version"
    for op in rpeg.operators:
        if op.role is Role.TRAINING:
            for k in range(1, steps):
                assert waits(chains[Invocation(op.name, k)][0], chains[Invocation(op.name, k - 1)][-1])
