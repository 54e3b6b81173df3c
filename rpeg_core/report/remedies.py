"""Remedies in words: one line for each change, with what it brings and what it costs in time."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rpeg_core.planning.changes import MORE_GPUS, OTHER_GPUS
from rpeg_core.planning.remedies import LITTLE_ROOM, Remedies, Remedy
from rpeg_core.report import words

__all__ = ["changes", "first_step", "headroom"]

NO_DIFFERENCE = 0.005
"""Relative difference of two times that is called none."""


def changes(remedies: Remedies) -> list[str]:
    """A line per remedy, then the keys that were tried in vain."""
    lines = []
    if remedies.found and remedies.present is not None and not remedies.present.assignments:
        speed = words.tokens_per_s(remedies.present.tokens_per_s)
        lines.append(f"cheapest changes, against {speed} if memory were no limit:")
    elif remedies.found:
        lines.append("cheapest changes:")
    lines += [f"{_what(remedy)}: fits ({_room(remedy)}), {_cost(remedy, remedies)}" for remedy in remedies.found]
    if remedies.tried:
        lines.append(f"found nothing that fits by changing {_keys(remedies.tried)}")
    if remedies.untried:
        why = "stopped before" if remedies.stopped else "no time was left for"
        lines.append(f"{why} changing {_keys(remedies.untried)}")
    return lines


def _keys(keys: Sequence[str]) -> str:
    """The keys, those of one entry of ``space:`` together."""
    entries: dict[str, list[str]] = {}
    for key in keys:
        entry, _, axis = key.rpartition(".")
        entries.setdefault(entry if entry.startswith("space.") else key, []).append(axis)
    return words.listing(
        [f"{entry} ({', '.join(axes)})" if entry.startswith("space.") else entry for entry, axes in entries.items()]
    )


def headroom(remedies: Remedies, share: float) -> Iterator[str]:
    """What would give a plan more room that takes ``share`` of the usable memory."""
    yield f"little room: the fullest GPU takes {words.percent(share)} of what is usable"
    for remedy in remedies.found:
        yield f"more room with {_what(remedy)} ({_room(remedy)}), {_cost(remedy, remedies)}"
    if not remedies.found:
        yield f"no change was found that leaves {words.percent(1 - LITTLE_ROOM)} of it free"


def first_step(remedies: Remedies) -> str | None:
    """What to do first: the cheapest change that needs nothing bought."""
    if not remedies.found:
        return None
    best = remedies.found[0]
    if best.asks_for == OTHER_GPUS:
        return f"GPUs with {best.value} GB would do, {best.note}"
    if best.key == "pin" or best.key.startswith("pin."):
        return f"in {best.key} set {best.value}"
    return f"set {best.key}: {best.value}" + (f", and {best.note}" if best.note else "")


def _what(remedy: Remedy) -> str:
    key = remedy.key.removeprefix("pin.")
    if key == "pin":
        pairs = zip(remedy.instead_of.split("; "), remedy.value.split("; "), strict=True)
        return "; ".join(f"{before} -> {after.partition(' ')[2]}" for before, after in pairs)
    if remedy.asks_for == OTHER_GPUS:
        return f"GPUs with {remedy.value} GB instead of {remedy.instead_of} ({key}; {remedy.note})"
    arrow = f"{key} {remedy.instead_of} -> {remedy.value}" + (f", {remedy.note}" if remedy.note else "")
    return arrow + (
        f" (×{float(remedy.value) / float(remedy.instead_of):g} GPUs)" if remedy.asks_for == MORE_GPUS else ""
    )


def _room(remedy: Remedy) -> str:
    return f"{remedy.peak_bytes / 1e9:,.1f} of {words.gigabytes(remedy.usable_bytes)}"


def _cost(remedy: Remedy, remedies: Remedies) -> str:
    """``step 4.1 s -> 4.6 s (+12%)``; tokens/s where a step is not the same work."""
    present = remedies.present
    if present is None or remedy.slowdown is None:
        return f"{words.tokens_per_s(remedy.tokens_per_s)} or more"
    change = "same speed" if abs(remedy.slowdown) < NO_DIFFERENCE else f"{100 * remedy.slowdown:+.0f}% time"
    if remedy.key.startswith("workload."):
        return f"{words.tokens_per_s(present.tokens_per_s)} -> {words.tokens_per_s(remedy.tokens_per_s)} ({change})"
    return f"step {words.seconds(present.step_s)} -> {words.seconds(remedy.step_s)} ({change})"
