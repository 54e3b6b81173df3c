"""What all groups of rules have in common."""

from __future__ import annotations

from rpeg_core.runtime.trace import Record, Released
from rpeg_core.runtime.verify.findings import Findings
from rpeg_core.runtime.verify.ledger import Ledger, NodeRecord, Traced
from rpeg_core.runtime.verify.rules import Rule

__all__ = ["Check"]


class Check:
    """A group of rules; the verification tells it of the trace in the order of the file.

    Args:
        ledger: what is known of the nodes; does not include the record that a method is told of yet.
        findings: where breaks go.
    """

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        self.ledger, self.findings = ledger, findings
        self.window = ledger.window

    def record(self, line: int, record: Record) -> None:
        """Any record, before it is known to belong to a node of the plan."""

    def node(self, line: int, record: NodeRecord, traced: Traced) -> None:
        """The first record of its kind of a planned node."""

    def release(self, line: int, record: Released) -> None:
        """A release."""

    def forget(self, step: int) -> None:
        """Nothing to come looks back on this step."""

    def finish(self, *, stopped: bool) -> None:
        """The end of the trace; ``stopped``: the run says that it ended early."""

    def broken(self, rule: Rule, traced: Traced, message: str, *lines: int | None) -> None:
        """Report a break at a node; lines that are None are left out."""
        self.findings.add(rule, message, *(line for line in lines if line is not None), node=traced.label)
