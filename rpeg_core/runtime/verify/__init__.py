"""Verification: proves from a trace that what ran is what was planned, or names every broken rule and the records.

The plan gives the executable graph; the trace is read once, line by line, and each group of rules is told of every
record. What is kept is the steps in progress and as many finished ones as a node can look back on, so that memory does
not grow with the length of a run that is accepted. docs/verification.md lists the rules.
"""

from __future__ import annotations

from rpeg_core.runtime.verify.findings import Finding, Verdict
from rpeg_core.runtime.verify.rules import RULES, Rule
from rpeg_core.runtime.verify.verification import verify, verify_plan

__all__ = ["RULES", "Finding", "Rule", "Verdict", "verify", "verify_plan"]
