"""The five kinds of plugin. Nothing here imports a record: ``--help`` and ``list-plugins`` stay light."""

from __future__ import annotations

import attrs

from rpeg_core.errors import UsageError, suggest

__all__ = ["ALGORITHM", "BACKEND", "COST", "HARDWARE", "KINDS", "SEARCH", "PluginKind", "kind_named"]


@attrs.frozen(kw_only=True)
class PluginKind:
    """One kind.

    Attributes:
        name: singular, as in ``rpeg show KIND`` and ``kind:name``.
        plural: the heading in lists.
        group: the entry-point group.
        hook: the hook that returns its records.
        record: the class of its records, in :mod:`rpeg_core.records`.
        also: another class that they may be of.
    """

    name: str
    plural: str
    group: str
    hook: str
    record: str
    also: str | None = None

    @property
    def records(self) -> tuple[str, ...]:
        """The names of all classes that a record may be of."""
        return (self.record,) if self.also is None else (self.record, self.also)


ALGORITHM = PluginKind(
    name="algorithm",
    plural="algorithms",
    group="rpeg.algorithms",
    hook="rpeg_algorithms",
    record="AlgorithmTemplate",
)
HARDWARE = PluginKind(
    name="hardware",
    plural="hardware",
    group="rpeg.hardware",
    hook="rpeg_hardware",
    record="HardwareProfile",
    also="MeasuredHardware",
)
COST = PluginKind(
    name="cost",
    plural="costs",
    group="rpeg.costs",
    hook="rpeg_cost_terms",
    record="CostTerm",
)
SEARCH = PluginKind(
    name="search",
    plural="searches",
    group="rpeg.search",
    hook="rpeg_search_strategies",
    record="SearchStrategy",
)
BACKEND = PluginKind(
    name="backend",
    plural="backends",
    group="rpeg.backends",
    hook="rpeg_backends",
    record="BackendSpec",
)

KINDS = (ALGORITHM, HARDWARE, COST, SEARCH, BACKEND)


def kind_named(text: str) -> PluginKind:
    """The kind whose singular or plural is ``text``.

    Raises:
        UsageError: there is none.
    """
    for kind in KINDS:
        if text in (kind.name, kind.plural):
            return kind
    names = [kind.name for kind in KINDS]
    raise UsageError(
        f"{text!r} is not a kind of plugin",
        facts=[f"allowed: {', '.join(names)}"],
        hint=suggest(text, names),
    )
