"""The greedy list scheduler on drawn DAGs; each runs again with operator names reversed."""

from __future__ import annotations

import itertools
from collections import defaultdict

import attrs
import networkx as nx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from rpeg_core.ir import RpegBuilder
from rpeg_core.passes.lower import ExecutableGraph, Node, NodeKind, lower
from rpeg_core.passes.schedule import Segments, downstream_ranks, reserved, schedule, violations
from rpeg_core.passes.unroll import unroll
from rpeg_core.spec.machine import Allocation
from rpeg_core.testing.strategies import configurations


@attrs.frozen
class Drawn:
    """A drawn DAG: node names, the executable graph and the seconds of its nodes."""

    names: tuple[str, ...]
    graph: ExecutableGraph
    seconds: tuple[float, ...]

    def run(self, *, gpus=4, reserve_source=False):
        result = schedule(self.graph, self.seconds, gpus, reserve_source=reserve_source)
        assert violations(self.graph, self.seconds, result, reserve_source=reserve_source) == []
        check_by_gpu(self.graph, self.seconds, result, gpus, reserve_source)
        return result

    def times(self, **options):
        """Name -> (start, finish)."""
        result = self.run(**options)
        return dict(zip(self.names, zip(result.start_s, result.finish_s, strict=True), strict=True))

    def order(self, **options):
        return [self.names[i] for i in self.run(**options).order]

    def ranks(self):
        return dict(zip(self.names, downstream_ranks(self.graph, self.seconds), strict=True))


def gpus_of(text):
    first, _, last = text.partition("-")
    return Allocation(int(first), int(last or first) + 1)


@pytest.fixture(params=["names as drawn", "names reversed"])
def draw(request):
    """``draw(operators, nodes, edges)``: the operators in the graph's order; a node is ``"GPUs seconds"``, named
    ``a@0``, ``a@0.1`` (phase), ``COMM a@0`` or ``RESHARD a@0`` with a tag behind it when needed; a COMM is
    ``"source>destination seconds"``; edges are ``"before > after > ..."``."""

    def draw_dag(operators, nodes, *edges):
        operators = operators.split()
        renamed = dict(zip(operators, operators, strict=True))
        if request.param == "names reversed":
            renamed = dict(zip(sorted(operators), sorted(operators, reverse=True), strict=True))
        b = RpegBuilder("drawn")
        prompts = b.data("X", elements=1, bytes_per_element=1)
        for index, name in enumerate(operators):
            out = b.data(f"out{index}", elements=1, bytes_per_element=1)
            b.function(renamed[name], reads=[prompts], writes=[out], seconds_per_sample=0.0)
        made, seconds = [], []
        for index, (label, text) in enumerate(nodes.items()):
            where, duration = text.split()
            source, _, destination = where.rpartition(">")
            kind, place = label.split()[:2] if " " in label else ("OP", label)
            operator, _, step = place.partition("@")
            step, _, phase = step.partition(".")
            allocation = gpus_of(destination)
            is_op = kind == "OP"
            made.append(
                Node(
                    index=index,
                    kind=NodeKind[kind],
                    operator=renamed[operator],
                    step=int(step),
                    phase=int(phase) if phase else None,
                    allocation=allocation,
                    source=None if is_op else gpus_of(source) if source else allocation,
                    container=None if is_op else "X",
                )
            )
            seconds.append(float(duration))
        names = tuple(nodes)
        pairs = set()
        for chain in edges:
            ends = [names.index(end) for end in chain.split(" > ")]
            pairs.update(itertools.pairwise(ends))
        graph = ExecutableGraph(rpeg=b.build(), steps=8, nodes=tuple(made), edges=tuple(sorted(pairs)))
        return Drawn(names, graph, tuple(seconds))

    return draw_dag


def check_by_gpu(graph, seconds, result, gpus, reserve_source):
    """Def. A.11 GPU by GPU, and that no node could start earlier."""
    ends = defaultdict(list)
    for before, after in graph.edges:
        assert result.finish_s[before] <= result.start_s[after]
        ends[after].append(result.finish_s[before])
    position = {node: place for place, node in enumerate(result.order)}
    assert sorted(position) == list(range(len(graph.nodes)))
    for gpu in range(gpus):
        here = []
        for node in graph.nodes:
            held = [node.allocation]
            if reserve_source and node.source is not None:
                held.append(node.source)
            if any(a.start <= gpu < a.stop for a in held):
                here.append(node.index)
        here.sort(key=position.get)
        for before, after in itertools.pairwise(here):
            assert result.finish_s[before] <= result.start_s[after]
            ends[after].append(result.finish_s[before])
        busy = sum(seconds[node] for node in here)
        assert result.makespan_s >= busy or result.makespan_s == pytest.approx(busy)
        assert result.busy_s[segment_of(result.segments, gpu)] == pytest.approx(busy)
    for node in graph.nodes:
        assert result.start_s[node.index] == max(ends[node.index], default=0.0), "starts late"
    starts = [result.start_s[node] for node in result.order]
    assert starts == sorted(starts)
    assert result.makespan_s == max(result.finish_s, default=0.0)


def segment_of(segments, gpu):
    return next(i for i in range(segments.count) if segments.bounds[i] <= gpu < segments.bounds[i + 1])


# --- precedence, devices, earliest start


def test_independent_nodes_on_disjoint_gpus_run_together(draw):
    # GPU 0  a───
    # GPU 1  b─────
    dag = draw("a b", {"a@0": "0 3", "b@0": "1 5"})
    assert dag.times() == {"a@0": (0, 3), "b@0": (0, 5)}


def test_a_node_waits_for_its_latest_predecessor(draw):
    # a(3) ─┐
    #       ├─> c       b lasts longer
    # b(5) ─┘
    dag = draw("a b c", {"a@0": "0 3", "b@0": "1 5", "c@0": "2 1"}, "a@0 > c@0", "b@0 > c@0")
    assert dag.times()["c@0"] == (5, 6)


def test_a_node_waits_for_all_its_gpus(draw):
    # GPU 0  a───
    # GPU 1  b─────c─     c holds 0 and 1, and has the smallest rank
    # GPU 0        c─
    dag = draw("a b c", {"a@0": "0 3", "b@0": "1 5", "c@0": "0-1 1"})
    assert dag.times() == {"a@0": (0, 3), "b@0": (0, 5), "c@0": (5, 6)}


def test_partly_overlapping_allocations_exclude_each_other(draw):
    # a holds 0-1, b holds 1-2, c holds 2-3; ranks 3, 2, 1: a and c run together, then b
    dag = draw("a b c", {"a@0": "0-1 3", "b@0": "1-2 2", "c@0": "2-3 1"})
    assert dag.times() == {"a@0": (0, 3), "b@0": (3, 5), "c@0": (0, 1)}


def test_the_smallest_earliest_start_goes_first_not_the_largest_rank(draw):
    # p(2) on GPU 1 -> b(9) on GPU 0;  a(3) on GPU 0 could start at 0, b only at 2
    dag = draw("p a b", {"p@0": "1 2", "a@0": "0 3", "b@0": "0 9"}, "p@0 > b@0")
    assert dag.times() == {"p@0": (0, 2), "a@0": (0, 3), "b@0": (3, 12)}


def test_a_transfer_holds_its_destination_only(draw):
    # g(2) on 0 -> COMM(3) 0>1 -> r(1) on 1;   a(4) on 0 runs beside the transfer
    dag = draw(
        "g r a",
        {"g@0": "0 2", "COMM r@0": "0>1 3", "r@0": "1 1", "a@0": "0 4"},
        "g@0 > COMM r@0 > r@0",
    )
    assert dag.times() == {"g@0": (0, 2), "COMM r@0": (2, 5), "r@0": (5, 6), "a@0": (2, 6)}


def test_a_transfer_holds_its_source_too_when_asked(draw):
    # the same DAG: a waits for the transfer
    dag = draw(
        "g r a",
        {"g@0": "0 2", "COMM r@0": "0>1 3", "r@0": "1 1", "a@0": "0 4"},
        "g@0 > COMM r@0 > r@0",
    )
    times = dag.times(reserve_source=True)
    assert times == {"g@0": (0, 2), "COMM r@0": (2, 5), "r@0": (5, 6), "a@0": (5, 9)}


def test_reserved_gpus(draw):
    nodes = draw("a", {"a@0": "0 1", "COMM a@0": "1-2>0 1", "RESHARD a@0": "0-1 1"}).graph.nodes
    first, comm, reshard = nodes
    for source in (False, True):
        assert reserved(first, reserve_source=source) == (Allocation(0, 1),)
        assert reserved(reshard, reserve_source=source) == (Allocation(0, 2),)
    assert reserved(comm, reserve_source=False) == (Allocation(0, 1),)
    assert reserved(comm, reserve_source=True) == (Allocation(0, 1), Allocation(1, 3))


# --- ties, in their order


@pytest.mark.parametrize("transfer", ["COMM b@0", "RESHARD b@0"])
def test_tie_1_a_transfer_goes_before_an_operator_of_larger_rank(draw, transfer):
    # GPU 0:  a(9) and the transfer(1), both ready at 0; a has rank 9 and the earlier index
    dag = draw("a b", {"a@0": "0 9", transfer: "0 1"})
    assert dag.order() == [transfer, "a@0"]


def test_tie_2_the_larger_rank_goes_first(draw):
    # GPU 0:  a(2), b(1) -> c(5) on GPU 1:  rank a = 2, b = 6
    dag = draw("a b c", {"a@0": "0 2", "b@0": "0 1", "c@0": "1 5"}, "b@0 > c@0")
    assert dag.order() == ["b@0", "c@0", "a@0"]
    assert dag.times() == {"b@0": (0, 1), "c@0": (1, 6), "a@0": (1, 3)}


def test_tie_2_holds_between_transfers_too(draw):
    # GPU 0 gets x and y;  y -> b(5) has the larger rank
    dag = draw(
        "a b",
        {"COMM a@0": "2>0 1", "COMM b@0": "3>0 1", "a@0": "0 1", "b@0": "0 5"},
        "COMM a@0 > a@0",
        "COMM b@0 > b@0",
    )
    assert dag.order() == ["COMM b@0", "COMM a@0", "b@0", "a@0"]


def test_tie_3_the_earlier_operator_goes_first_even_in_a_later_step(draw):
    # equal ranks on GPU 0; b@0 is the earlier node and step, a the earlier operator
    dag = draw("a b", {"b@0": "0 2", "a@1": "0 2"})
    assert dag.order() == ["a@1", "b@0"]


def test_tie_3_the_order_of_the_graph_counts_not_the_names(draw):
    dag = draw("b a", {"a@0": "0 2", "b@1": "0 2"})
    assert dag.order() == ["b@1", "a@0"]


def test_tie_4_the_earlier_step_goes_first(draw):
    dag = draw("a", {"a@2": "0 2", "a@0": "0 2", "a@1": "0 2"})
    assert dag.order() == ["a@0", "a@1", "a@2"]


def test_tie_5_the_earlier_node_goes_first(draw):
    dag = draw("a", {"COMM a@0 second": "1>0 2", "COMM a@0 first": "2>0 2"})
    assert dag.order() == ["COMM a@0 second", "COMM a@0 first"]


# --- ranks


def test_rank_is_the_longest_path_to_a_sink(draw):
    # a(1) ─> b(2) ─> d(4)
    #    └──> c(5) ──┘         rank d = 4, b = 6, c = 9, a = 10; e(3) alone
    dag = draw(
        "a b c d e",
        {"a@0": "0 1", "b@0": "1 2", "c@0": "2 5", "d@0": "0 4", "e@0": "3 3"},
        "a@0 > b@0 > d@0",
        "a@0 > c@0 > d@0",
    )
    assert dag.ranks() == {"a@0": 10, "b@0": 6, "c@0": 9, "d@0": 4, "e@0": 3}


def test_phases_inherit_the_rank_of_their_head_and_nothing_else_does(draw):
    # p(1) -> g.0(2) -> g.1(2) -> g.2(2), COMM(1) behind g.2: natural ranks 8, 7, 5, 3, 1
    dag = draw(
        "p g r",
        {"p@0": "1 1", "g@0.0": "0 2", "g@0.1": "0 2", "g@0.2": "0 2", "COMM r@0.2": "0>1 1", "g@1.0": "0 3"},
        "p@0 > g@0.0 > g@0.1 > g@0.2 > COMM r@0.2",
    )
    ranks = {"p@0": 8, "g@0.0": 7, "g@0.1": 7, "g@0.2": 7, "COMM r@0.2": 1, "g@1.0": 3}
    assert dag.ranks() == ranks


def test_inherited_ranks_keep_other_work_out_of_a_chain(draw):
    # GPU 0: g.0 -> g.1 -> g.2 (2 s each, natural ranks 6, 4, 2) and u (5 s, rank 5)
    # without inheritance u would start at 2, between g.0 and g.1
    nodes = {"u@0": "0 5", "g@0.0": "0 2", "g@0.1": "0 2", "g@0.2": "0 2"}
    dag = draw("u g", nodes, "g@0.0 > g@0.1 > g@0.2")
    assert dag.order() == ["g@0.0", "g@0.1", "g@0.2", "u@0"]
    whole = draw("u g h i", {"u@0": "0 5", "g@0": "0 2", "h@0": "0 2", "i@0": "0 2"}, "g@0 > h@0 > i@0")
    assert whole.order() == ["g@0", "u@0", "h@0", "i@0"], "three operators are no chain"


def test_chains_of_different_steps_have_different_heads(draw):
    # g@0 leads to more work than g@1; phases do not mix between steps
    dag = draw(
        "g z",
        {"g@1.0": "0 1", "g@1.1": "0 1", "g@0.0": "0 1", "g@0.1": "0 1", "z@0": "1 9"},
        "g@0.0 > g@0.1 > z@0",
        "g@1.0 > g@1.1",
    )
    assert dag.order() == ["g@0.0", "g@0.1", "z@0", "g@1.0", "g@1.1"]
    assert dag.ranks()["g@1.1"] == 2
    assert dag.ranks()["g@0.1"] == 11


# --- results


def test_busy_time_is_per_segment_and_counts_reservations(draw):
    # GPU 0-1 a(3), GPU 1-2 b(2), GPU 3 idle but for COMM(4) 0>3
    dag = draw("a b", {"a@0": "0-1 3", "b@0": "1-2 2", "COMM b@0": "0>3 4"})
    result = dag.run(gpus=5)
    assert result.segments.bounds == (0, 1, 2, 3, 4, 5)
    assert result.busy_s == (3, 5, 2, 4, 0)
    assert result.makespan_s == 5
    assert dag.run(gpus=5, reserve_source=True).busy_s == (7, 5, 2, 4, 0)


def test_gpus_of_overlapping_source_and_destination_are_busy_once(draw):
    result = draw("a", {"COMM a@0": "0-1>1-2 4"}).run(gpus=3, reserve_source=True)
    assert result.busy_s == (4, 4, 4)


def test_nodes_without_duration_take_no_time_but_keep_their_place(draw):
    # a(0) -> b(3) -> c(0) on GPU 0
    dag = draw("a b c", {"a@0": "0 0", "b@0": "0 3", "c@0": "0 0"}, "a@0 > b@0 > c@0")
    assert dag.times() == {"a@0": (0, 0), "b@0": (0, 3), "c@0": (3, 3)}


def test_an_empty_graph_has_no_makespan(draw):
    result = draw("a", {}).run()
    assert (result.makespan_s, result.order, result.busy_s) == (0.0, (), (0.0,))


def test_segments_are_cut_at_every_end():
    segments = Segments.of([Allocation(0, 4), Allocation(2, 6), Allocation(4, 6)], 8)
    assert segments.bounds == (0, 2, 4, 6, 8)
    assert segments.count == 4
    assert [segments.allocation(i) for i in range(4)] == [Allocation(i, i + 2) for i in (0, 2, 4, 6)]
    assert list(segments.within(Allocation(2, 6))) == [1, 2]
    assert Segments.of([], 3).bounds == (0, 3)


def test_violations_names_each_broken_rule(draw):
    #  a(2) -> b(2), both on GPU 0
    dag = draw("a a2", {"a@0": "0 2", "a@1": "0 2"}, "a@0 > a@1")
    label = [node.label for node in dag.graph.nodes]
    good = dag.run()

    def broken(start, finish):
        return violations(dag.graph, dag.seconds, attrs.evolve(good, start_s=tuple(start), finish_s=tuple(finish)))

    assert broken([0, 2], [2, 4]) == []
    assert broken([0, 2], [2, 5]) == [f"S1: {label[1]} does not last 2.0 s"]
    assert broken([2, 0], [4, 2]) == [f"S2: {label[1]} starts before {label[0]} ends"]
    assert broken([0, 1], [2, 3]) == [
        f"S2: {label[1]} starts before {label[0]} ends",
        f"S3: {label[0]} and {label[1]} hold the same GPUs at the same time",
    ]


@given(configurations(), st.integers(1, 3), st.booleans(), st.data())
@settings(max_examples=80, deadline=None)
def test_any_schedule_is_sound(configuration, steps, reserve_source, data):
    graph = lower(unroll(configuration.rpeg, steps), configuration.plan, configuration.workload)
    count, gpus = len(graph.nodes), configuration.machine.gpus
    durations = st.one_of(st.integers(0, 3).map(float), st.floats(0, 10, allow_subnormal=False))
    seconds = data.draw(st.lists(durations, min_size=count, max_size=count))
    result = schedule(graph, seconds, gpus, reserve_source=reserve_source)
    assert violations(graph, seconds, result, reserve_source=reserve_source) == []
    check_by_gpu(graph, seconds, result, gpus, reserve_source)

    view = nx.DiGraph()
    view.add_nodes_from(range(count))
    view.add_edges_from(graph.edges)
    longest = dict.fromkeys(view, 0.0)
    for node in nx.topological_sort(view):
        longest[node] = seconds[node] + max((longest[p] for p in view.predecessors(node)), default=0.0)
    path = max(longest.values())
    assert result.makespan_s >= path or result.makespan_s == pytest.approx(path)
    assert max(downstream_ranks(graph, seconds)) == pytest.approx(path)
