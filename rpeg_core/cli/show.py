"""``rpeg show``: what plugins offer, and the bundled models, in full."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import attrs
import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.errors import UsageError, suggest
from rpeg_core.plugins.kinds import ALGORITHM, COST, HARDWARE, KINDS, PluginKind
from rpeg_core.plugins.loading import LoadedRecord
from rpeg_core.plugins.registry import Registry
from rpeg_core.records import CostTerm, Target
from rpeg_core.settings import describe
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import Tier

__all__ = ["command"]

Table = tuple[Sequence[str], Sequence[Sequence[object]]]
"""Columns and rows."""

MODEL = "model"

ERROR_COLUMNS = ("of", "experts", "framework named", "bias of log", "deviation of log", "rows", "source")
ROLE_COLUMNS = ("role", "trainable", "head", "optional")
SETTING_COLUMNS = ("name", "type", "value", "unit", "origin", "help")


@click.command("show")
@click.argument("kind_name", metavar="KIND")
@click.argument("name", metavar="[NAME]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(context: CommandContext, kind_name: str, name: str | None, as_json: bool) -> None:
    """Show what is available, or one of it in full.

    KIND is algorithm, hardware, cost, search, backend or model. With NAME: the settings with their values,
    units and origins; for hardware every number with its source; for a cost model its terms.
    """
    if kind_name in (MODEL, f"{MODEL}s"):
        page = _models() if name is None else _model(name)
    else:
        kind = _kind(kind_name)
        page = _list(context.registry, kind) if name is None else _one(context.registry, kind, name)
    page.print(as_json=as_json)


@attrs.frozen(kw_only=True)
class _Page:
    """What is shown: facts, then tables by title; or, for JSON, the same as a document."""

    facts: Mapping[str, object] = attrs.field(factory=dict)
    tables: Mapping[str, Table]

    def print(self, *, as_json: bool) -> None:
        if as_json:
            ui.print_json(self._document())
            return
        if self.facts:
            ui.print_fields(self.facts)
        for columns, rows in self.tables.values():
            if self.facts:
                ui.print_text("")
            ui.print_table(columns, rows)

    def _document(self) -> dict[str, object]:
        document: dict[str, object] = {name: _plain(value) for name, value in self.facts.items()}
        for title, (columns, rows) in self.tables.items():
            document[title] = [
                {column: _plain(value) for column, value in zip(columns, row, strict=True)} for row in rows
            ]
        return document


def _kind(text: str) -> PluginKind:
    for kind in KINDS:
        if text in (kind.name, kind.plural):
            return kind
    names = [*(kind.name for kind in KINDS), MODEL]
    raise UsageError(f"there is no kind {text!r}", facts=[f"allowed: {', '.join(names)}"], hint=suggest(text, names))


def _list(registry: Registry, kind: PluginKind) -> _Page:
    rows = [
        (loaded.name, loaded.record.summary, loaded.distribution, loaded.version)
        for loaded in registry.records(kind.name)
    ]
    if not rows:
        ui.print_note(f"no {kind.name} plugins are installed\nhint: pip install 'rpeg-core[all]'")
    return _Page(tables={kind.plural: (("name", "summary", "distribution", "version"), rows)})


def _one(registry: Registry, kind: PluginKind, name: str) -> _Page:
    if kind is COST:
        terms = registry.cost_terms([name])
        if [term.name for term in terms] != [name]:
            return _cost_model(name, terms)
    loaded = registry.get(kind.name, name)
    if kind is HARDWARE:
        return _hardware(loaded)
    tables: dict[str, Table] = {"settings": (SETTING_COLUMNS, _settings(loaded.record.settings))}
    if kind is ALGORITHM:
        tables = {"roles": (ROLE_COLUMNS, [attrs.astuple(role) for role in loaded.record.roles]), **tables}
    if kind is COST and loaded.record.errors:
        tables = {**tables, "errors": (ERROR_COLUMNS, _errors(loaded.record.errors))}
    return _Page(facts={**_identity(loaded), **_details(loaded.record)}, tables=tables)


def _identity(loaded: LoadedRecord) -> dict[str, object]:
    return {
        "name": loaded.name,
        "summary": loaded.record.summary,
        "distribution": loaded.distribution,
        "version": loaded.version,
    }


def _details(record: Any) -> dict[str, object]:
    """The fields of a record that are neither code, settings nor shown already."""
    skipped = {"name", "summary", "settings", "roles", "run", "prepare", "errors", "axes", "frameworks"}
    found = {
        field.name: _text(value)
        for field in attrs.fields(type(record))
        if field.name not in skipped and not callable(value := getattr(record, field.name))
    }
    return {**found, **_execution([record])} if isinstance(record, CostTerm) else found


def _execution(terms: Sequence[CostTerm]) -> dict[str, object]:
    """The axes that all terms know, and the frameworks by role whose coefficients one of them has."""
    priced = [term.axes for term in terms if term.target is not Target.TRANSFER]
    axes = frozenset.intersection(*priced) if priced else frozenset()
    found: dict[str, object] = {"axes": _text(axes)} if axes else {}
    for role in sorted({role for term in terms for role in term.frameworks}):
        found[f"frameworks for {role}"] = _text({name for term in terms for name in term.frameworks.get(role, ())})
    return found


def _errors(errors: Sequence[TermError]) -> list[tuple[object, ...]]:
    """Measured errors with the conditions under which they count."""
    words = {None: "", True: "yes", False: "no"}
    return [
        (
            "step" if error.of_step else ", ".join(error.roles),
            words[error.mixture],
            words[error.named_framework],
            round(error.log_bias, 4),
            round(error.log_std, 4),
            error.rows,
            error.source,
        )
        for error in errors
    ]


def _settings(cls: type) -> list[tuple[object, ...]]:
    return [attrs.astuple(row, recurse=False) for row in describe(cls)]


def _cost_model(name: str, terms: Sequence[LoadedRecord]) -> _Page:
    records = [term.record for term in terms]
    return _Page(
        facts={
            "name": name,
            "distribution": terms[0].distribution,
            "version": terms[0].version,
            **_execution(records),
        },
        tables={
            "terms": (
                ("name", "target", "quantity", "memory", "summary"),
                [
                    (
                        record.name,
                        _text(record.target),
                        record.quantity,
                        _text(record.memory),
                        record.summary,
                    )
                    for record in records
                ],
            ),
            "settings": (
                ("term", *SETTING_COLUMNS),
                [(record.name, *row) for record in records for row in _settings(record.settings)],
            ),
        },
    )


# Hardware: every number with its unit, read off the name of the field, and its source.

_UNITS = (
    ("_flops_per_s", "FLOP/s"),
    ("_bytes_per_s", "B/s"),
    ("_bytes", "B"),
    ("_s", "s"),
    ("_rows", "rows"),
    ("_columns", "columns"),
    ("_per_hour", "USD/h"),
    ("_batch", "sequences"),
    ("gpus_per_node", "GPUs"),
)


def _hardware(loaded: LoadedRecord) -> _Page:
    profile = loaded.record
    rows = [(path, value, _unit(path), profile.sources.get(path)) for path, value in numbers(profile)]
    return _Page(
        facts={**_identity(loaded), "default_costs": profile.default_costs},
        tables={
            "values": (("name", "value", "unit", "source"), rows),
            **({"errors": (ERROR_COLUMNS, _errors(profile.errors))} if profile.errors else {}),
        },
    )


def numbers(value: Any, path: str = "") -> Iterator[tuple[str, object]]:
    """(dotted path as in ``sources``, number) of every number inside a profile, as they are defined."""
    if attrs.has(type(value)):
        for field in attrs.fields(type(value)):
            yield from numbers(getattr(value, field.name), f"{path}.{field.name}" if path else field.name)
    elif path == "tiers":
        for tier, item in zip(Tier, value, strict=True):
            yield from numbers(item, f"{path}.{tier.name.lower()}")
    elif isinstance(value, int | float):
        yield path, value


def _unit(path: str) -> str | None:
    return next((unit for suffix, unit in _UNITS if path.endswith(suffix)), None)


# Models


def _models() -> _Page:
    from rpeg_core.spec.public_models import public_model, public_model_names

    rows = [
        (spec.name, spec.family, spec.total_parameters, spec.layers, spec.hidden)
        for spec in map(public_model, public_model_names())
    ]
    return _Page(tables={"models": (("name", "family", "total_parameters", "layers", "hidden"), rows)})


def _model(name: str) -> _Page:
    from rpeg_core.spec.public_models import public_model

    spec = public_model(name)
    counts = ("total_parameters", "active_parameters", "layer_parameters", "embedding_parameters")
    rows = [*_flat(spec.to_dict(), ""), *((count, getattr(spec, count)) for count in counts)]
    return _Page(tables={"values": (("name", "value"), rows)})


def _flat(values: Mapping[str, object], prefix: str) -> Iterator[tuple[str, object]]:
    for name, value in values.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{name}.")
        elif value is not None:
            yield f"{prefix}{name}", value


def _text(value: object) -> object:
    """A field of a record as a reader wants it."""
    if isinstance(value, enum.Enum):
        return value.value
    if isinstance(value, frozenset | set):
        return tuple(sorted(map(str, value)))
    return value


def _plain(value: object) -> object:
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value
