"""A tampered trace is refused by the rule that should catch it, with the seal as it was and with a forged one."""

from __future__ import annotations

import copy
import hashlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from rpeg_plugin_simulator import Durations, run_window

from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.runtime.trace import TraceHeader, TraceWriter, read_lines
from rpeg_core.runtime.verify import Verdict, verify
from rpeg_core.runtime.window import Window
from rpeg_core.testing.toys import on, toy_actor_critic, toy_plan, toy_ppo, toy_workload

DIGEST = "sha256:of the plan"
STEPS = 3
WINDOW = Window(
    toy_ppo(tau=1),
    toy_plan(
        actor_generation=on(0, 2, tensor=2),
        reference_inference=on(2),
        reward_inference=on(3),
        critic_inference=on(2),
        actor_training=on(0, 2),
        critic_training=on(2, 4, pipeline=2, microbatches=2),
    ),
    toy_workload(),
)

Lines = list[dict[str, Any]]


def seconds_of(node: Node) -> float:
    return 1.5 if node.kind is NodeKind.OP else 0.25


SMALL = toy_actor_critic(tau=1)
SMALL_WINDOW = Window(
    SMALL,
    toy_plan(generation=on(0, 2, tensor=2), value_inference=on(0, 2), training=on(1)),
    toy_workload(),
)
"""Data and weights move, weights are resharded and overlap."""


def accepted(path: Path, window: Window) -> Lines:
    """The lines of a trace without their chains."""
    with TraceWriter(path, TraceHeader(plan=DIGEST, backend="simulator", steps=STEPS, clock="virtual")) as writer:
        run_window(window, Durations(window, toy_workload(), seconds_of), STEPS, record=writer.write)
    assert verify(read_lines(path), window, DIGEST).complete
    return [{k: v for k, v in json.loads(line).items() if k != "chain"} for line in path.read_text().splitlines()]


@pytest.fixture(scope="module")
def lines(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Three steps of PPO."""
    return accepted(tmp_path_factory.mktemp("accepted") / "run.jsonl", WINDOW)


@pytest.fixture(scope="module")
def small(tmp_path_factory: pytest.TempPathFactory) -> Lines:
    """Three steps of an actor-critic."""
    return accepted(tmp_path_factory.mktemp("accepted") / "run.jsonl", SMALL_WINDOW)


def forged(lines: Lines) -> bytes:
    """The file with a chain that fits, made here from its description in docs/verification.md."""
    chain, out = "", b""
    for line in lines:
        body = json.dumps(line).encode()[:-1]
        chain = hashlib.sha256(chain.encode() + body).hexdigest()[:16]
        out += body + b', "chain": "' + chain.encode() + b'"}\n'
    return out


@pytest.fixture
def judge(tmp_path: Path) -> Callable[..., Verdict]:
    def run(content: bytes, window: Window = WINDOW) -> Verdict:
        path = tmp_path / "run.jsonl"
        path.write_bytes(content)
        return verify(read_lines(path), window, DIGEST)

    return run


def broken(verdict: Verdict) -> set[str]:
    return {rule.id for rule in verdict.counts}


# Kinds of tampering: each takes the lines and changes them in place.


def find(lines: Lines, record: str, **fields: Any) -> int:
    """Position of the first such record; ``label`` and the like are of the dispatch of the same node."""
    names = {}
    for position, line in enumerate(lines):
        if line["record"] == "dispatch":
            names[line["node"]] = line
        subject = line if line["record"] == "dispatch" else {**names.get(line.get("node"), {}), **line}
        if line["record"] == record and all(subject.get(name) == value for name, value in fields.items()):
            return position
    raise LookupError((record, fields))


def dispatch(lines: Lines, **fields: Any) -> dict[str, Any]:
    return lines[find(lines, "dispatch", **fields)]


def own(lines: Lines, label: str) -> list[int]:
    """Positions of all records of a node."""
    node = dispatch(lines, label=label)["node"]
    return [position for position, line in enumerate(lines) if line.get("node") == node]


def weights(lines: Lines, step: int = 2) -> dict[str, Any]:
    return dispatch(lines, container="W_critic", step=step, kind="COMM")


def wrong_digest(lines: Lines) -> None:
    lines[0]["plan"] = "sha256:of another"


def no_digest(lines: Lines) -> None:
    lines[0]["plan"] = None


def more_steps(lines: Lines) -> None:
    lines[0]["steps"] += 1


def fewer_steps(lines: Lines) -> None:
    lines[0]["steps"] -= 1


def astronomically_many_steps(lines: Lines) -> None:
    lines[0]["steps"] = 10**15


def no_steps(lines: Lines) -> None:
    lines[0]["steps"] = 0


def another_clock(lines: Lines) -> None:
    lines[0]["clock"] = "sun"


def other_gpus(lines: Lines) -> None:
    dispatch(lines, label="reward_inference@1")["allocation"] = {"start": 2, "stop": 3}


def other_degrees(lines: Lines) -> None:
    dispatch(lines, label="actor_generation@1")["layout"] = {"data": 2, "pipeline": 1, "tensor": 1}


def other_microbatches(lines: Lines) -> None:
    dispatch(lines, label="critic_training@1")["microbatches"] = 4


def other_step(lines: Lines) -> None:
    dispatch(lines, label="actor_training@1")["step"] = 2


def swapped_steps(lines: Lines) -> None:
    """Two invocations of one operator exchange their place in the run."""
    for line in lines:
        nodes = [dispatch(lines, label=f"actor_training@{step}")["node"] for step in (0, 1)]
        if line.get("node") in nodes and line["record"] != "dispatch":
            line["node"] = nodes[1 - nodes.index(line["node"])]


def too_stale(lines: Lines) -> None:
    lines[find(lines, "bind", label="actor_generation@2")]["version"] = 0


def too_fresh(lines: Lines) -> None:
    lines[find(lines, "bind", label="actor_generation@2")]["version"] = 3


def fresher_than_planned(lines: Lines) -> None:
    """A version that is there and allowed by the staleness, but not what the plan says."""
    lines[find(lines, "bind", label="critic_inference@1")]["version"] = 1


def other_model(lines: Lines) -> None:
    lines[find(lines, "bind", label="reference_inference@0")]["model"] = "reward"


def missing_bind(lines: Lines) -> None:
    del lines[find(lines, "bind", label="critic_training@1")]


def bind_of_data(lines: Lines) -> None:
    at = find(lines, "dispatch", container="rewards", step=1)
    lines.insert(at + 1, {"record": "bind", "time_s": lines[at]["time_s"], "node": lines[at]["node"],
                          "model": "reward", "version": 0})  # fmt: skip


def missing_node(lines: Lines) -> None:
    for position in reversed(own(lines, "reward_inference@1")):
        del lines[position]


def missing_start(lines: Lines) -> None:
    del lines[find(lines, "start", label="reward_inference@1")]


def missing_end(lines: Lines) -> None:
    del lines[find(lines, "end", label="actor_training@2")]


def missing_dispatch(lines: Lines) -> None:
    del lines[find(lines, "dispatch", label="reward_inference@1")]


def duplicated_node(lines: Lines) -> None:
    positions = own(lines, "reward_inference@1")
    for position in reversed(positions):
        lines.insert(positions[-1] + 1, {**lines[position], "time_s": lines[positions[-1]]["time_s"]})


def late_duplicate(lines: Lines) -> None:
    lines.insert(-1, {**lines[find(lines, "end", label="actor_generation@0")], "time_s": lines[-2]["time_s"]})


def extra_node(lines: Lines) -> None:
    end = {**lines[find(lines, "end", label="actor_training@2")], "node": 10_000}
    lines.insert(-1, {**end, "time_s": lines[-2]["time_s"]})


def negative_node(lines: Lines) -> None:
    lines.insert(-1, {"record": "end", "time_s": lines[-2]["time_s"], "node": -1})


def missing_transfer(lines: Lines) -> None:
    label = weights(lines)["label"]
    for position in reversed(own(lines, label)):
        del lines[position]


def missing_bytes(lines: Lines) -> None:
    del lines[find(lines, "transfer", container="W_critic", step=2)]


def wrong_bytes(lines: Lines) -> None:
    lines[find(lines, "transfer", container="completions", step=1)]["bytes"] += 1


def bytes_of_an_operator(lines: Lines) -> None:
    at = find(lines, "end", label="reward_inference@1")
    lines.insert(at, {**lines[at], "record": "transfer", "bytes": 1.0})


def wrong_source(lines: Lines) -> None:
    weights(lines)["source"] = {"start": 0, "stop": 2}


def wrong_destination(lines: Lines) -> None:
    weights(lines)["allocation"] = {"start": 3, "stop": 4}


def wrong_container(lines: Lines) -> None:
    dispatch(lines, container="rewards", step=1)["container"] = "values"


def moved(lines: Lines, label: str, before: str, record: str = "dispatch") -> None:
    """Dispatch, bind and start of a node move, with their times, to just before a record of another node."""
    records = [
        lines[position] for position in own(lines, label) if lines[position]["record"] not in ("end", "transfer")
    ]
    for line in records:
        lines.remove(line)
    at = find(lines, record, label=before)
    for line in reversed(records):
        lines.insert(at, {**line, "time_s": lines[at]["time_s"]})


def started_before_its_predecessor_ended(lines: Lines) -> None:
    moved(lines, "actor_training@0", before="critic_inference@0", record="end")


def overlapping_use(lines: Lines) -> None:
    """The reward model's scores arrive where the critic is working."""
    moved(lines, "critic_inference@1", before="reference_inference@1", record="end")


def earlier_start(lines: Lines) -> None:
    """Only the time is changed."""
    lines[find(lines, "start", label="critic_training@1")]["time_s"] = 0.0


def end_before_start(lines: Lines) -> None:
    at = find(lines, "end", label="reward_inference@0")
    lines[at]["time_s"] = lines[find(lines, "start", label="reward_inference@0")]["time_s"] - 0.1


def later_end(lines: Lines) -> None:
    lines[find(lines, "end", label="actor_training@0")]["time_s"] += 100.0


def end_for_a_start(lines: Lines) -> None:
    lines[find(lines, "start", label="reward_inference@0")]["record"] = "end"


def swapped_order(lines: Lines) -> None:
    at = find(lines, "end", label="reward_inference@0")
    own_start = find(lines, "start", label="reward_inference@0")
    lines[at], lines[own_start] = lines[own_start], lines[at]


def swapped_across_nodes(lines: Lines) -> None:
    """The end of a node and what was dispatched for it at the same time."""
    end = find(lines, "end", label="actor_generation@0")
    after = next(i for i in range(end, len(lines)) if lines[i]["record"] == "dispatch")
    lines.insert(end, lines.pop(after))


def release(lines: Lines, label: str) -> int:
    """Position of the release of what a node made."""
    node = dispatch(lines, label=label)["node"]
    return next(i for i, line in enumerate(lines) if line["record"] == "release" and line["artifact"]["node"] == node)


def arrival(lines: Lines) -> str:
    """The transfer of rewards that critic training reads in step 1."""
    return dispatch(lines, container="rewards", operator="critic_training", step=1)["label"]


def released_early(lines: Lines, before: str) -> None:
    line = lines.pop(release(lines, arrival(lines)))
    at = find(lines, before, label="critic_training@1")
    lines.insert(at, {**line, "time_s": lines[at]["time_s"]})


def early_release(lines: Lines) -> None:
    """While its reader runs."""
    released_early(lines, before="end")


def read_after_release(lines: Lines) -> None:
    released_early(lines, before="dispatch")


def released_twice(lines: Lines) -> None:
    at = release(lines, "critic_inference@0")
    lines.insert(at, dict(lines[at]))


def released_long_after(lines: Lines) -> None:
    lines.insert(-1, {**lines[release(lines, "critic_inference@0")], "time_s": lines[-2]["time_s"]})


def never_released(lines: Lines) -> None:
    del lines[release(lines, "critic_inference@1")]


def result_released(lines: Lines) -> None:
    node = dispatch(lines, label="actor_training@2")
    artifact = {"node": node["node"], "container": "W_actor", **{k: node[k] for k in ("allocation", "layout")}}
    lines.insert(-1, {"record": "release", "time_s": lines[-2]["time_s"], "artifact": artifact})


def released_elsewhere(lines: Lines) -> None:
    lines[release(lines, "critic_inference@1")]["artifact"]["allocation"] = {"start": 0, "stop": 1}


def missing_input(lines: Lines) -> None:
    dispatch(lines, label="actor_training@1")["inputs"].pop()


def added_input(lines: Lines) -> None:
    inputs = dispatch(lines, label="actor_training@1")["inputs"]
    inputs.append(dispatch(lines, label="critic_training@1")["inputs"][-1])


def repeated_input(lines: Lines) -> None:
    inputs = dispatch(lines, label="actor_training@1")["inputs"]
    inputs.append(inputs[0])


def used_before_published(lines: Lines) -> None:
    """The critic of step 2 is served before the weights that it is bound to arrived."""
    moved(lines, "critic_inference@2", before=weights(lines)["label"], record="end")


def goes_on_after_the_stop(lines: Lines) -> None:
    at = find(lines, "end", label="actor_training@1")
    lines.insert(at, {"record": "stop", "time_s": lines[at]["time_s"], "reason": "Ctrl-C", "steps_done": 1})


def stopped_with_more_steps_than_it_has(lines: Lines) -> None:
    at = find(lines, "end", label="actor_training@1")
    stop = {"record": "stop", "time_s": lines[at]["time_s"], "reason": "Ctrl-C", "steps_done": 2}
    lines[at:-1] = [stop]


def begun_later(lines: Lines) -> None:
    lines[0]["first_step"] = 1


def begun_after_the_end(lines: Lines) -> None:
    lines[0]["first_step"] = STEPS


def begun_before_the_start(lines: Lines) -> None:
    lines[0]["first_step"] = -1


def negative_bytes_between_workers(lines: Lines) -> None:
    lines[find(lines, "transfer", container="completions", step=1)]["wire_bytes"] = -1.0


def truncated(lines: Lines) -> None:
    del lines[-10:]


def truncated_but_closed(lines: Lines) -> None:
    del lines[-10:-1]


def without_header(lines: Lines) -> None:
    del lines[0]


def two_headers(lines: Lines) -> None:
    lines.insert(1, dict(lines[0]))


def closed_in_the_middle(lines: Lines) -> None:
    lines.insert(20, {"record": "close"})


def field_of_another_type(lines: Lines) -> None:
    lines[5]["time_s"] = "0.0"


def unknown_field(lines: Lines) -> None:
    lines[5]["colour"] = "red"


def infinite_time(lines: Lines) -> None:
    lines[5]["time_s"] = float("inf")


KINDS: dict[Callable[[Lines], None], set[str]] = {
    wrong_digest: {"V3"},
    no_digest: {"V3"},
    no_steps: {"V3", "V4"},
    another_clock: {"V3"},
    more_steps: {"V4"},
    fewer_steps: {"V4"},
    astronomically_many_steps: {"V4"},
    other_gpus: {"V5"},
    other_degrees: {"V5"},
    other_microbatches: {"V5"},
    other_step: {"V5"},
    swapped_steps: {"V6", "V7", "V8"},
    too_stale: {"V6", "V14"},
    too_fresh: {"V6", "V13", "V14"},
    fresher_than_planned: {"V6"},
    other_model: {"V6"},
    missing_bind: {"V6"},
    bind_of_data: {"V6"},
    missing_node: {"V4", "V8"},
    missing_start: {"V4"},
    missing_end: {"V4"},
    missing_dispatch: {"V4"},
    duplicated_node: {"V4"},
    late_duplicate: {"V4"},
    extra_node: {"V4"},
    negative_node: {"V4"},
    missing_transfer: {"V4", "V8", "V11", "V13"},
    missing_bytes: {"V10"},
    wrong_bytes: {"V10"},
    bytes_of_an_operator: {"V10"},
    wrong_source: {"V10"},
    wrong_destination: {"V10"},
    wrong_container: {"V10"},
    started_before_its_predecessor_ended: {"V8", "V11"},
    overlapping_use: {"V9"},
    earlier_start: {"V7", "V8", "V9"},
    end_before_start: {"V7"},
    later_end: {"V7", "V8", "V9"},
    end_for_a_start: {"V4"},
    swapped_order: {"V7"},
    swapped_across_nodes: {"V8", "V9"},
    early_release: {"V12"},
    read_after_release: {"V11", "V12"},
    released_twice: {"V12"},
    released_long_after: {"V12"},
    never_released: {"V12"},
    result_released: {"V12"},
    released_elsewhere: {"V12"},
    missing_input: {"V11"},
    added_input: {"V11"},
    repeated_input: {"V11"},
    used_before_published: {"V8", "V11", "V13"},
    goes_on_after_the_stop: {"V7"},
    stopped_with_more_steps_than_it_has: {"V4"},
    begun_later: {"V4"},
    begun_after_the_end: {"V3", "V4"},
    begun_before_the_start: {"V3"},
    negative_bytes_between_workers: {"V10"},
    truncated: {"V1", "V4"},
    truncated_but_closed: {"V4"},
    without_header: {"V1"},
    two_headers: {"V1"},
    closed_in_the_middle: {"V1"},
    field_of_another_type: {"V1"},
    unknown_field: {"V1"},
    infinite_time: {"V1"},
}
"""What is done to the trace -> rules that must name it even when the chain was forged to fit."""


@pytest.mark.parametrize("tamper", KINDS, ids=lambda tamper: tamper.__name__)
def test_tampering_is_named_by_its_rules_even_with_a_forged_seal(
    lines: Lines, judge: Callable[..., Verdict], tamper: Callable[[Lines], None]
) -> None:
    changed = copy.deepcopy(lines)
    tamper(changed)
    verdict = judge(forged(changed))
    assert KINDS[tamper] <= broken(verdict)
    assert "V2" not in broken(verdict)
    last = forged(changed).count(b"\n")
    assert all(1 <= number <= last for finding in verdict.findings for number in finding.lines)


def test_every_rule_is_tested() -> None:
    assert set().union(*KINDS.values()) | {"V2"} == {f"V{number}" for number in range(1, 15)}


# One field changed: every field of every record.

UNJUDGED = {("header", "backend"), ("header", "schema"), ("transfer", "wire_bytes")}
"""Fields that only the seal protects; ``time_s`` as far as the order stays legal. Another schema is another format."""


def leaves(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any]]:
    pairs = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    if not isinstance(value, dict | list):
        yield path, value
    for key, inner in pairs:
        yield from leaves(inner, (*path, key))


def name(path: tuple[Any, ...]) -> tuple[str, ...]:
    return tuple(key for key in path if isinstance(key, str))


def changed(line: dict[str, Any], path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    line = copy.deepcopy(line)
    place: Any = line
    for key in path[:-1]:
        place = place[key]
    place[path[-1]] = value
    return line


def one_field_changed(lines: Lines) -> Iterator[tuple[int, tuple[str, ...], dict[str, Any]]]:
    """(position, name of the field, changed line): each field gets the next value that it has anywhere, or one more."""
    pool: dict[tuple[str, ...], list[Any]] = {}
    for line in lines:
        for path, value in leaves(line):
            known = pool.setdefault((line["record"], *name(path)), [])
            if value not in known:
                known.append(value)
    for position, line in enumerate(lines):
        for path, value in leaves(line):
            known = pool[line["record"], *name(path)]
            other = known[(known.index(value) + 1) % len(known)]
            if other == value:
                other = value + 1 if isinstance(value, int | float) else f"{value}x"
            yield position, name(path), changed(line, path, other)


def test_any_one_field_changed_is_found_by_the_seal_where_it_is(small: Lines, judge: Callable[..., Verdict]) -> None:
    whole = forged(small).splitlines(keepends=True)
    for position, field, line in one_field_changed(small):
        if field != ("schema",):
            chain = whole[position][whole[position].rindex(b', "chain"') :]
            content = [*whole[:position], json.dumps(line).encode()[:-1] + chain, *whole[position + 1 :]]
            verdict = judge(b"".join(content), SMALL_WINDOW)
            assert sealed_at(verdict) == [(position + 1,)], (position, field)


@pytest.mark.parametrize("change", [b" ", b"0"], ids=["space", "digit"])
def test_any_line_changed_is_found_by_the_seal_where_it_is(
    small: Lines, judge: Callable[..., Verdict], change: bytes
) -> None:
    whole = forged(small).splitlines(keepends=True)
    for position, line in enumerate(whole):
        at = line.index(b", ")
        touched = line[:at] + change + line[at:]
        verdict = judge(b"".join([*whole[:position], touched, *whole[position + 1 :]]), SMALL_WINDOW)
        assert sealed_at(verdict) == [(position + 1,)]


def sealed_at(verdict: Verdict) -> list[tuple[int, ...]]:
    return [finding.lines for finding in verdict.findings if finding.rule.name == "seal"]


def test_any_one_field_changed_is_named_by_a_rule_even_with_a_forged_seal(
    small: Lines, judge: Callable[..., Verdict]
) -> None:
    expected = {
        "dispatch": {"V4", "V5", "V10", "V11"},
        "bind": {"V4", "V6"},
        "start": {"V4"},
        "end": {"V4"},
        "transfer": {"V4", "V10"},
        "release": {"V12"},
        "header": {"V3", "V4"},
        "close": {"V1"},
    }
    for position, field, line in one_field_changed(small):
        record = small[position]["record"]
        if field == ("time_s",) or (record, *field) in UNJUDGED:
            continue
        verdict = judge(forged([*small[:position], line, *small[position + 1 :]]), SMALL_WINDOW)
        assert broken(verdict) & ({"V1"} if field == ("record",) else expected[record]), (position, field, line)
        assert record == "header" or any(position + 1 in finding.lines for finding in verdict.findings)


def test_a_time_out_of_order_is_named_even_with_a_forged_seal(small: Lines, judge: Callable[..., Verdict]) -> None:
    """A time between those of its neighbours is what no rule but the seal can tell from the truth."""
    first = next(i for i, line in enumerate(small) if line.get("time_s", 0.0) > 0.0)
    for position in range(first + 1, len(small) - 2):
        for time_s in (0.0, 1e6):
            line = {**small[position], "time_s": time_s}
            rules = broken(judge(forged([*small[:position], line, *small[position + 1 :]]), SMALL_WINDOW))
            assert "V7" in rules, (position, time_s)


def test_cut_at_any_byte(lines: Lines, judge: Callable[..., Verdict]) -> None:
    content = forged(lines)
    for size in range(1, len(content), 997):
        assert "V1" in broken(judge(content[:size]))
    assert "V1" in broken(judge(content[:-1])) or "V2" in broken(judge(content[:-1]))
    assert "V1" in broken(judge(content + b"\n"))
