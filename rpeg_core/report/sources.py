"""Where numbers come from: the cost terms with their distributions, the hardware profile with its sources."""

from __future__ import annotations

from rpeg_core.costing.book import CostBook
from rpeg_core.report.page import Column, Grid

__all__ = ["cost_terms", "hardware"]


def cost_terms(book: CostBook) -> Grid:
    """Every cost term in use."""
    return Grid(
        title="cost terms",
        columns=(Column("term"), Column("what"), Column("from")),
        rows=tuple((a.term.name, a.term.summary, f"{a.distribution} {a.version}") for a in book.terms),
    )


def hardware(book: CostBook) -> Grid:
    """Every number of the hardware profile that names a source."""
    return Grid(
        title=f"where the numbers of {book.hardware.name} come from",
        columns=(Column("number"), Column("source")),
        rows=tuple(sorted(book.hardware.sources.items())),
    )
