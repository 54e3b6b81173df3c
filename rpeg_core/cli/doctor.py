"""``rpeg doctor``: whether this installation works, and what it can do on this machine."""

from __future__ import annotations

import os
import platform
from collections.abc import Callable
from pathlib import Path

import attrs
import click

from rpeg_core._version import __version__
from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext, pass_context
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.plugins.kinds import BACKEND, KINDS
from rpeg_core.plugins.registry import Registry

__all__ = ["command"]

EXECUTING = "megatron"
INSTALL_EXECUTING = "pip install 'rpeg-core[run]'"


@attrs.frozen(kw_only=True)
class _PluginRow:
    kind: str
    name: str
    distribution: str
    version: str
    status: str
    records: int
    message: str


@attrs.frozen(kw_only=True)
class _BackendRow:
    name: str
    can: tuple[str, ...]
    usable: bool
    reason: str


@click.command("doctor")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
@pass_context
def command(context: CommandContext, as_json: bool) -> int:
    """Check this installation: versions, every plugin loaded, backends, cores, memory, cache.

    Ends with 3 when a plugin failed.
    """
    machine = _machine()
    registry = context.registry
    plugins = _plugins(registry)
    backends, broken = _backends(registry)
    failed = broken or any(info.status.failed for info in registry.plugins())
    if as_json:
        ui.print_json(
            {
                **machine,
                "plugins": [attrs.asdict(row) for row in plugins],
                "backends": [attrs.asdict(row) for row in backends],
                "ok": not failed,
            }
        )
    else:
        ui.print_fields(machine)
        _print_rows(_PluginRow, plugins)
        _print_rows(_BackendRow, backends)
    if not plugins:
        ui.print_note("no plugins are installed\nhint: pip install 'rpeg-core[all]'")
    elif EXECUTING not in {row.name for row in backends}:
        ui.print_note(f"plans cannot be executed here: backend {EXECUTING} is not installed\nhint: {INSTALL_EXECUTING}")
    return ExitCode.PLUGIN if failed else ExitCode.DONE


def _print_rows(cls: type, rows: list[_PluginRow] | list[_BackendRow]) -> None:
    if rows:
        ui.print_text("")
        ui.print_table([field.name for field in attrs.fields(cls)], [attrs.astuple(row, recurse=False) for row in rows])


def _machine() -> dict[str, object]:
    cache, writable = _numba_cache()
    return {
        "python": platform.python_version(),
        "rpeg_core": __version__,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "memory_bytes": os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
        "numba_cache": str(cache),
        "numba_cache_writable": writable,
    }


def _numba_cache() -> tuple[Path, bool]:
    """Where numba keeps the compiled search, and whether it can; else each process compiles anew."""
    chosen = os.environ.get("NUMBA_CACHE_DIR")
    package = Path(__file__).parents[1] / "planning" / "__pycache__"
    user = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "numba"
    candidates = [Path(chosen)] if chosen else [package, user]
    usable = [path for path in candidates if _can_write(path)]
    return (usable[0], True) if usable else (candidates[0], False)


def _can_write(path: Path) -> bool:
    while not path.exists():
        path = path.parent
    return path.is_dir() and os.access(path, os.W_OK)


def _plugins(registry: Registry) -> list[_PluginRow]:
    counts: dict[str, int] = {}
    for kind in KINDS:
        for loaded in registry.records(kind.name):
            counts[loaded.plugin] = counts.get(loaded.plugin, 0) + 1
    return [
        _PluginRow(
            kind=info.kind,
            name=info.name,
            distribution=info.distribution,
            version=info.version,
            status=str(info.status),
            records=counts.get(info.key, 0),
            message=info.message,
        )
        for info in registry.plugins()
    ]


def _backends(registry: Registry) -> tuple[list[_BackendRow], bool]:
    """The backends, and whether a probe broke its contract."""
    rows, broken = [], False
    for loaded in registry.records(BACKEND.name):
        reason, failed = _probe(loaded.record.probe)
        broken |= failed
        rows.append(
            _BackendRow(
                name=loaded.name,
                can=tuple(sorted(loaded.record.can)),
                usable=reason is None,
                reason=reason or "",
            )
        )
    return rows, broken


def _probe(probe: Callable[[], str | None]) -> tuple[str | None, bool]:
    try:
        reason = probe()
    except Exception as error:
        return f"probe() raised {type(error).__name__}: {error}", True
    if reason is None or isinstance(reason, str):
        return reason, False
    return f"probe() returned {type(reason).__name__}; it must return text or None", True
