"""``rpeg check``: whether installed plugins keep the contract of their kind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import attrs
import click

from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import MissingPluginError, suggest
from rpeg_core.plugins.discovery import PluginInfo, Status
from rpeg_core.plugins.kinds import KINDS

if TYPE_CHECKING:
    from rpeg_core.plugins.loading import LoadedRecord
    from rpeg_core.plugins.registry import Registry

__all__ = ["command"]

COLUMNS = ("record", "check", "outcome", "message")
FAILED, SKIPPED = "failed", "skipped"
LOADS = "loads"
"""The check of a plugin that has no records because it cannot be used."""


@attrs.frozen(kw_only=True)
class _Row:
    """One line of the answer."""

    record: str
    check: str
    outcome: str
    message: str


@click.command("check")
@click.argument("target", metavar="[TARGET]", required=False)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(context: CommandContext, target: str | None, as_json: bool) -> int:
    """Check that plugins keep the contract of their kind.

    TARGET is a distribution or KIND:NAME, e.g. rpeg-plugin-gh200, hardware:gh200 or cost:analytical; without it
    every installed plugin is checked. Ends with 3 when a check failed.
    """
    registry = context.registry
    for kind in KINDS:
        registry.load(kind.name)
    rows = list(_rows(registry, target))
    failed = [row for row in rows if row.outcome == FAILED]
    if as_json:
        ui.print_json({"checks": [attrs.asdict(row) for row in rows], "ok": not failed})
    elif rows:
        ui.print_table(COLUMNS, [attrs.astuple(row) for row in rows])
    if not rows:
        ui.print_note("no plugins are installed\nhint: pip install 'rpeg-core[all]'")
    elif failed:
        ui.print_note(f"{len(failed)} of {len(rows)} checks failed")
    return ExitCode.PLUGIN if failed else ExitCode.DONE


def _rows(registry: Registry, target: str | None) -> Iterator[_Row]:
    from rpeg_core.testing.conformance import conformance

    unusable = [info for info in registry.plugins() if info.status is not Status.OK and _is_meant(info, target)]
    records = [
        (kind.name, loaded)
        for kind in KINDS
        for loaded in registry.records(kind.name)
        if target is None or target in _labels(kind.name, loaded)
    ]
    if target is not None and not records and not unusable:
        raise _unknown(registry, target)
    for info in unusable:
        # A plugin that the user disabled is nobody's fault, unless it is asked about by name.
        outcome = SKIPPED if info.status is Status.DISABLED and target is None else FAILED
        yield _Row(record=info.key, check=LOADS, outcome=outcome, message=f"{info.status}: {info.message}")
    with ui.progress("checking") as show:
        for kind, loaded in records:
            show(f"{kind}:{loaded.name}")
            for result in conformance(loaded.record):
                yield _Row(
                    record=f"{kind}:{result.record}",
                    check=result.check,
                    outcome=str(result.outcome),
                    message=result.message,
                )


def _is_meant(info: PluginInfo, target: str | None) -> bool:
    return target is None or target in (info.distribution, info.key)


def _labels(kind: str, loaded: LoadedRecord) -> set[str]:
    """What a user may call a record: a cost term also by its model, any record by its plugin or distribution."""
    model = loaded.name.partition(".")[0]
    return {
        loaded.distribution,
        loaded.plugin,
        f"{kind}:{loaded.name}",
        *([f"{kind}:{model}"] if kind == "cost" else []),
    }


def _unknown(registry: Registry, target: str) -> MissingPluginError:
    known: Sequence[str] = sorted(
        {label for kind in KINDS for loaded in registry.records(kind.name) for label in _labels(kind.name, loaded)}
        | {label for info in registry.plugins() for label in (info.distribution, info.key)}
    )
    return MissingPluginError(
        f"no installed plugin is called {target!r}",
        facts=["allowed: a distribution, or KIND:NAME as `rpeg list-plugins` and `rpeg show KIND` print them"],
        hint=suggest(target, known) or "rpeg list-plugins",
    )
