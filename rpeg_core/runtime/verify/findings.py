"""What verification found, and its answer."""

from __future__ import annotations

import collections
from collections.abc import Mapping

import attrs

from rpeg_core.runtime.trace import TraceHeader
from rpeg_core.runtime.verify.rules import RULES, Rule

__all__ = ["LIMIT", "Finding", "Findings", "Verdict"]

LIMIT = 20
"""Findings kept per rule; the others are counted."""


@attrs.frozen(kw_only=True)
class Finding:
    """One break of a rule.

    Attributes:
        rule: the broken rule.
        message: what is wrong, with values.
        lines: numbers of the records in the trace file; empty when a record is missing.
        node: label of the node, None when no one node is meant.
    """

    rule: Rule
    message: str
    lines: tuple[int, ...] = ()
    node: str | None = None

    def __str__(self) -> str:
        where = "" if not self.lines else f"line{'s' * (len(self.lines) > 1)} {', '.join(map(str, self.lines))}: "
        return where + ("" if self.node is None else f"{self.node}: ") + self.message


class Findings:
    """Collects findings, :data:`LIMIT` of a rule."""

    def __init__(self) -> None:
        self._found: dict[Rule, list[Finding]] = {rule: [] for rule in RULES}
        self._counts: collections.Counter[Rule] = collections.Counter()

    def add(self, rule: Rule, message: str, *lines: int, node: str | None = None) -> None:
        """Add one; ``lines`` in the order in which the message speaks of them."""
        self._counts[rule] += 1
        if self._counts[rule] <= LIMIT:
            self._found[rule].append(Finding(rule=rule, message=message, lines=lines, node=node))

    @property
    def all(self) -> tuple[Finding, ...]:
        """By rule, then in the order found."""
        return tuple(finding for found in self._found.values() for finding in found)

    @property
    def counts(self) -> Mapping[Rule, int]:
        """How often each broken rule was broken, in the order of the rules."""
        return {rule: self._counts[rule] for rule in RULES if self._counts[rule]}


@attrs.frozen(kw_only=True)
class Verdict:
    """The answer.

    Attributes:
        header: of the trace, None when it has none.
        findings: breaks of rules, at most :data:`LIMIT` of each.
        counts: broken rule -> how often.
        steps_complete: steps ``0 .. steps_complete - 1`` ended with all their nodes.
        nodes: nodes that ended.
        unfinished: labels of nodes that were dispatched and did not end, at most :data:`LIMIT`.
        lines: of the file.
        stopped: why the run ended early, None when it did not.
    """

    header: TraceHeader | None
    findings: tuple[Finding, ...]
    counts: Mapping[Rule, int]
    steps_complete: int
    nodes: int
    unfinished: tuple[str, ...]
    lines: int
    stopped: str | None

    @property
    def accepted(self) -> bool:
        """Whether what ran is what was planned, as far as it ran."""
        return not self.findings

    @property
    def complete(self) -> bool:
        """Whether it ran to the end."""
        return self.accepted and self.header is not None and self.steps_complete == self.header.steps
