"""Two closed-form cost models for RPEG: ``analytical``, the default, and ``paper``.

Every term is pure and vectorised over layouts. Equations, choices and sources: README.md.
"""

from __future__ import annotations

from rpeg_core import CostTerm, hookimpl
from rpeg_plugin_analytical.terms import analytical_terms, paper_terms

__all__ = ["rpeg_cost_terms"]


@hookimpl
def rpeg_cost_terms() -> tuple[CostTerm, ...]:
    """All terms of both models."""
    return (*analytical_terms(), *paper_terms())
