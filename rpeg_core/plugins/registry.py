"""The plugins of one process: loaded per kind when first asked for, looked up by name.

Policy: a plugin that fails is a warning (:attr:`Registry.problems`) unless the user named what it offers;
then it is the error. With ``strict`` every failure is an error. Installing a package never changes a
result: of two plugins that offer the same record, or terms of the same cost model, neither is used.
"""

from __future__ import annotations

import difflib
import importlib.metadata
import itertools
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path

import attrs

from rpeg_core._version import __version__
from rpeg_core.diagnostics import Diagnostic
from rpeg_core.errors import MissingPluginError, PluginError, suggest
from rpeg_core.plugins.discovery import (
    CORE_DISTRIBUTION,
    DISABLE_VARIABLE,
    EntryPointSource,
    PluginInfo,
    Status,
    discover,
    installed_entry_points,
    parse_disabled,
)
from rpeg_core.plugins.kinds import COST, HARDWARE, KINDS, PluginKind, kind_named
from rpeg_core.plugins.loading import (
    BrokenPluginError,
    LoadedPlugin,
    LoadedRecord,
    call_hook,
    load_plugin,
    measured,
    new_manager,
)
from rpeg_core.spec.machine import is_profile_file

__all__ = ["LoadedDiagnostic", "Registry"]


@attrs.frozen(kw_only=True)
class LoadedDiagnostic:
    """A remark on a plan and the plugin that made it."""

    diagnostic: Diagnostic
    plugin: str
    distribution: str
    version: str


class Registry:
    """Access to plugins; a command makes one and passes it on.

    Args:
        disabled: plugins not to load, ``name`` or ``kind:name``; by default ``RPEG_DISABLE_PLUGINS``.
        strict: make every plugin that fails an error.
        entry_points: entry-point group to entry points; by default those of the running environment.
        report: told in one line what a plugin does that takes its time, e.g. measuring this machine.
    """

    def __init__(
        self,
        *,
        disabled: frozenset[str] | None = None,
        strict: bool = False,
        entry_points: EntryPointSource = installed_entry_points,
        report: Callable[[str], None] | None = None,
    ) -> None:
        if disabled is None:
            disabled = parse_disabled(os.environ.get(DISABLE_VARIABLE, ""))
        self._strict, self._report = strict, report or _ignore
        self._measured: dict[str, LoadedRecord] = {}
        self._manager = new_manager()
        self._infos = discover(entry_points=entry_points, disabled=disabled)
        self._loaded: dict[str, tuple[LoadedPlugin, ...]] = {}
        self._problems: dict[str, None] = {}  # an ordered set
        known = {label for info in self._infos for label in (info.name, info.key)}
        for entry in sorted(disabled - known):
            self._problems[f"{DISABLE_VARIABLE} names {entry!r}, which is not installed"] = None

    @property
    def problems(self) -> tuple[str, ...]:
        """What went wrong so far in plugins that nobody named: one line each, in order, each once."""
        return tuple(self._problems)

    def plugins(self) -> tuple[PluginInfo, ...]:
        """Every plugin with its status now; those of a kind not loaded yet are at best ``available``."""
        infos: list[PluginInfo] = []
        for kind in KINDS:
            if kind.name in self._loaded:
                infos += [plugin.info for plugin in self._loaded[kind.name]]
            else:
                infos += [info for info in self._infos if info.kind == kind.name]
        return tuple(infos)

    def load(self, kind: str) -> None:
        """Load the plugins of one kind, if not done.

        Raises:
            UsageError: there is no such kind.
            PluginError: a plugin failed and the registry is strict.
        """
        self._plugins_of(kind_named(kind))

    def records(self, kind: str) -> tuple[LoadedRecord, ...]:
        """All usable records of a kind, sorted by name; hardware that is to be measured is not measured here."""
        found = [record for plugin in self._plugins_of(kind_named(kind)) for record in plugin.records]
        return tuple(sorted(found, key=lambda record: record.name))

    def get(self, kind: str, name: str) -> LoadedRecord:
        """The record of that name; of hardware its profile, measured now if it has to be, or read from its file.

        Raises:
            PluginError: a plugin that would offer it is disabled, incompatible, broken or a duplicate, or measuring
                failed.
            MissingPluginError: no installed plugin offers it.
            ExperimentError: hardware is a file that is no profile.
        """
        if kind_named(kind) is HARDWARE and is_profile_file(name):
            return self._file(name)
        for record in self.records(kind):
            if record.name == name:
                return record if kind_named(kind) is not HARDWARE else self._profile(record)
        raise self._not_found(kind_named(kind), name)

    def _file(self, name: str) -> LoadedRecord:
        if name not in self._measured:
            from rpeg_core.spec.profile_file import read_profile  # imports yaml, which lists of plugins do not need

            self._measured[name] = LoadedRecord(
                record=read_profile(Path(name).resolve()),
                distribution=CORE_DISTRIBUTION,
                version=__version__,
                plugin="hardware:file",
            )
        return self._measured[name]

    def _profile(self, record: LoadedRecord) -> LoadedRecord:
        if record.name not in self._measured:
            try:
                self._measured[record.name] = measured(record, self._report)
            except BrokenPluginError as broken:
                (info,) = (info for info in self.plugins() if info.key == record.plugin)
                failed = attrs.evolve(info, status=broken.status, message=str(broken))
                raise _plugin_error(f"hardware {record.name!r} cannot be used", failed) from broken
        return self._measured[record.name]

    def cost_terms(self, selection: Sequence[str]) -> tuple[LoadedRecord, ...]:
        """The terms that ``selection`` names, each once, in the order of the selection, then by name.

        Args:
            selection: full names (``analytical.gemm``) or models (``analytical``: all its terms).

        Raises:
            PluginError: a plugin that would offer one is disabled, incompatible, broken or a duplicate.
            MissingPluginError: no installed plugin offers one.
        """
        chosen: dict[str, LoadedRecord] = {}
        for entry in selection:
            matching = [term for term in self.records(COST.name) if entry in _labels(COST, term.name)]
            if not matching:
                raise self._not_found(COST, entry)
            for term in matching:
                chosen.setdefault(term.name, term)
        return tuple(chosen.values())

    def observers(self, hook: str, **arguments: object) -> None:
        """Call an observer hook of every loaded plugin; what one raises becomes a problem, reported once."""
        for info, module in self._modules():
            self._call(info, module, hook, **arguments)

    def check_plan(self, plan: object) -> tuple[LoadedDiagnostic, ...]:
        """What the loaded plugins remark on a plan; a check that fails becomes a problem, reported once."""
        found = []
        for info, module in self._modules():
            for item in self._call(info, module, "rpeg_check_plan", plan=plan):
                if isinstance(item, Diagnostic):
                    found.append(
                        LoadedDiagnostic(
                            diagnostic=item,
                            plugin=info.key,
                            distribution=info.distribution,
                            version=info.version,
                        )
                    )
                else:
                    message = f"rpeg_check_plan() returned {type(item).__name__}, not Diagnostic records"
                    self._problems[f"{_where(info)}: {message}"] = None
        return tuple(found)

    def _call(self, info: PluginInfo, module: object, hook: str, **arguments: object) -> list[object]:
        try:
            return list(itertools.chain(*call_hook(self._manager, module, hook, **arguments)))
        except BrokenPluginError as broken:
            self._problems[f"{_where(info)}: {broken}"] = None
            return []

    def _modules(self) -> Iterable[tuple[PluginInfo, object]]:
        for info in self.plugins():
            module = self._manager.get_plugin(info.key)
            if module is not None:
                yield info, module

    def _plugins_of(self, kind: PluginKind) -> tuple[LoadedPlugin, ...]:
        if kind.name not in self._loaded:
            infos = [info for info in self._infos if info.kind == kind.name]
            plugins = _without_duplicates(kind, [load_plugin(info, kind, self._manager) for info in infos])
            self._loaded[kind.name] = plugins
            for plugin in plugins:
                self._settle(plugin.info)
        return self._loaded[kind.name]

    def _settle(self, info: PluginInfo) -> None:
        if not info.status.failed:
            return
        if info.status is Status.DUPLICATE and self._manager.has_plugin(info.key):
            self._manager.unregister(name=info.key)
        if self._strict:
            raise _plugin_error(f"plugin {info.key!r} cannot be used", info)
        self._problems[f"{_where(info)} is not used: {info.status}: {info.message}"] = None

    def _not_found(self, kind: PluginKind, name: str) -> MissingPluginError | PluginError:
        plugins = self._plugins_of(kind)
        for plugin in plugins:
            if plugin.info.status is not Status.OK and _meant(kind, plugin, name):
                return _plugin_error(f"{kind.name} {name!r} cannot be used", plugin.info)
        offered = {label for plugin in plugins for record in plugin.records for label in _labels(kind, record.name)}
        return MissingPluginError(
            f"no installed plugin offers {kind.name} {name!r}",
            facts=[
                f"installed: {', '.join(sorted(offered)) or 'none'}",
                *(
                    f"not used: {info.key} ({info.source}): {info.status}: {info.message}"
                    for info in (plugin.info for plugin in plugins)
                    if info.status is not Status.OK
                ),
            ],
            hint=suggest(name, offered) or f"pip install {_distribution_for(name)}",
        )


def _ignore(text: str) -> None:
    """Nobody wants to know."""


def _labels(kind: PluginKind, name: str) -> set[str]:
    """What a user may call a record: its name, a cost term also by its model."""
    return {name, _claim(kind, name)}


def _claim(kind: PluginKind, name: str) -> str:
    """What only one distribution may offer: the name, for a cost term its model."""
    return name.partition(".")[0] if kind is COST else name


def _without_duplicates(kind: PluginKind, plugins: Sequence[LoadedPlugin]) -> tuple[LoadedPlugin, ...]:
    """Leave out, whole, plugins that claim the same: half a plugin would change results silently."""
    owners: dict[str, list[PluginInfo]] = {}
    for plugin in plugins:
        for claim in sorted({_claim(kind, record.name) for record in plugin.records}):
            owners.setdefault(claim, []).append(plugin.info)
    return tuple(_unless_shared(kind, plugin, owners) for plugin in plugins)


def _unless_shared(kind: PluginKind, plugin: LoadedPlugin, owners: Mapping[str, list[PluginInfo]]) -> LoadedPlugin:
    claims = sorted({_claim(kind, record.name) for record in plugin.records})
    messages = [
        f"{kind.name} {claim!r} is offered by {' and '.join(info.source for info in owners[claim])}"
        for claim in claims
        if len(owners[claim]) > 1
    ]
    if not messages:
        return plugin
    return LoadedPlugin(
        info=attrs.evolve(plugin.info, status=Status.DUPLICATE, message="; ".join(messages)),
        withheld=frozenset(record.name for record in plugin.records),
    )


def _meant(kind: PluginKind, plugin: LoadedPlugin, name: str) -> bool:
    """Whether a plugin that cannot be used is where the user expects ``name`` from.

    The name of an entry point is by convention that of its records or the start of them (``a100-80gb``).
    """
    withheld = {label for record in plugin.withheld for label in _labels(kind, record)}
    entry = plugin.info.name
    return name == entry or name.startswith((f"{entry}-", f"{entry}.")) or name in withheld


def _where(info: PluginInfo) -> str:
    return f"plugin {info.key} ({info.source})"


def _plugin_error(what: str, info: PluginInfo) -> PluginError:
    return PluginError(
        what,
        facts=[f"plugin: {info.key} from {info.source}", f"status: {info.status}", f"reason: {info.message}"],
        hint=_next_step(info),
    )


def _next_step(info: PluginInfo) -> str:
    match info.status:
        case Status.DISABLED:
            return f"take it out of {DISABLE_VARIABLE}"
        case Status.INCOMPATIBLE:
            return f"pip install --upgrade {CORE_DISTRIBUTION} {info.distribution}"
        case Status.DUPLICATE:
            return "pip uninstall one of them"
        case Status.IMPORT_FAILED:
            return f"python -c 'import {info.module}' shows where it fails"
        case _:
            return f"report it to the authors of {info.distribution}"


def _distribution_for(name: str) -> str:
    """The distribution to install for a name: the match or near match in the extra ``[all]``, else by convention."""
    try:
        requirements = importlib.metadata.requires(CORE_DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        requirements = []
    known = [line.split(";")[0].strip() for line in requirements if line.startswith("rpeg-plugin-")]
    name = name.partition(".")[0]
    for distribution in sorted(known, key=len, reverse=True):
        if f"rpeg-plugin-{name}-".startswith(f"{distribution}-"):
            return distribution
    short = [distribution.removeprefix("rpeg-plugin-") for distribution in known]
    close = difflib.get_close_matches(name, short, n=1, cutoff=0.9)
    return f"rpeg-plugin-{close[0] if close else name}"
