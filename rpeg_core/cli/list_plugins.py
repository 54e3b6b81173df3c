"""``rpeg list-plugins``: what is installed, from metadata; with ``--load`` whether it works."""

from __future__ import annotations

import attrs
import click

from rpeg_core._version import __version__
from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.plugins.kinds import KINDS, kind_named

__all__ = ["command"]

COLUMNS = ("kind", "name", "distribution", "version", "status", "message")


@click.command("list-plugins")
@click.option("--kind", "kind_name", metavar="KIND", help="Only this kind: algorithm, hardware, cost, ...")
@click.option("--load", is_flag=True, help="Import every plugin and say whether it works.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(context: CommandContext, kind_name: str | None, load: bool, as_json: bool) -> None:
    """List the installed plugins.

    Without --load no plugin is imported: the status says whether it would be.
    """
    kinds = KINDS if kind_name is None else (kind_named(kind_name),)
    registry = context.registry
    if load:
        for kind in kinds:
            registry.load(kind.name)
    wanted = {kind.name for kind in kinds}
    plugins = [info for info in registry.plugins() if info.kind in wanted]
    if as_json:
        ui.print_json({"rpeg_core": __version__, "plugins": [attrs.asdict(info) for info in plugins]})
        return
    if not plugins:
        what = "plugins" if kind_name is None else f"{kinds[0].name} plugins"
        ui.print_note(f"no {what} are installed\nhint: pip install 'rpeg-core[all]'")
        return
    ui.print_table(COLUMNS, [[getattr(info, column) for column in COLUMNS] for info in plugins])
