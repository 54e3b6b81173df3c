"""Where numbers come from: the cost terms with their distributions, the hardware profile with its sources."""

from __future__ import annotations

from rpeg_core.costing.book import CostBook
from rpeg_core.report.page import Column, Grid, Grouping

__all__ = ["cost_terms", "hardware"]


def cost_terms(book: CostBook) -> Grid:
    """Every cost term in use."""
    return Grid(
        title="cost terms",
        columns=(Column("from"), Column("term"), Column("what")),
        rows=tuple((f"{a.distribution} {a.version}", a.term.name, a.term.summary) for a in book.terms),
        grouping=Grouping.HEADED,
    )


def hardware(book: CostBook) -> Grid:
    """Every number of the hardware profile that names a source."""
    return Grid(
        title=f"where the numbers of {book.hardware.name} come from",
        columns=(Column("number"), Column("source")),
        rows=tuple(sorted(book.hardware.sources.items())),
    )
