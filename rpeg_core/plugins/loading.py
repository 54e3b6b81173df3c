"""Importing one plugin and collecting its records, such that nothing it does can end the program.

Only Ctrl-C passes; any other exception, ``sys.exit`` included, becomes a status and a message.
"""

from __future__ import annotations

import contextlib
import importlib
import itertools
import re
import sys
from collections.abc import Callable, Iterable
from typing import Any

import attrs
import pluggy

import rpeg_core.records
from rpeg_core import hookspecs
from rpeg_core.errors import suggest
from rpeg_core.plugins.discovery import PluginInfo, Status
from rpeg_core.plugins.kinds import ALGORITHM, BACKEND, COST, HARDWARE, SEARCH, PluginKind
from rpeg_core.records import HardwareProfile, MeasuredHardware, MemoryKind, NoSettings, Target
from rpeg_core.settings import check_settings_class

__all__ = [
    "BrokenPluginError",
    "LoadedPlugin",
    "LoadedRecord",
    "call_hook",
    "check_record",
    "load_plugin",
    "measured",
    "new_manager",
]

_NAME = re.compile(r"[a-z0-9]+([._-][a-z0-9]+)*")
_GUARANTEES = ("baseline", "heuristic", "optimal")
_CAPABILITIES = frozenset({"execute", "export"})


@attrs.frozen(kw_only=True)
class LoadedRecord:
    """A record with where it comes from.

    Attributes:
        record: what the hook returned.
        distribution: name of the distribution.
        version: its version.
        plugin: ``kind:name`` of its entry point.
    """

    record: Any
    distribution: str
    version: str
    plugin: str

    @property
    def name(self) -> str:
        """The name of the record."""
        return self.record.name


@attrs.frozen(kw_only=True)
class LoadedPlugin:
    """A plugin after loading.

    Attributes:
        info: with its final status.
        records: in use, sorted by name; empty unless the status is ok.
        withheld: names of the records that it would offer, as far as known when the status is not ok.
    """

    info: PluginInfo
    records: tuple[LoadedRecord, ...] = ()
    withheld: frozenset[str] = frozenset()


class BrokenPluginError(Exception):
    """A plugin cannot be used: its status, and the message as text."""

    def __init__(self, status: Status, message: str) -> None:
        super().__init__(message)
        self.status = status


def new_manager() -> pluggy.PluginManager:
    """A plugin manager that knows RPEG's hooks and no plugin."""
    manager = pluggy.PluginManager("rpeg")
    manager.add_hookspecs(hookspecs)
    return manager


def load_plugin(info: PluginInfo, kind: PluginKind, manager: pluggy.PluginManager) -> LoadedPlugin:
    """Import the module of ``info``, register it with ``manager`` and collect its records.

    A plugin whose status is not ``available`` is returned as it is.
    """
    if info.status is not Status.AVAILABLE:
        return LoadedPlugin(info=info)
    records: list[Any] = []
    try:
        module = _import(info)
        _register(info, kind, module, manager)
        results = call_hook(manager, module, kind.hook)
        if not results:
            raise BrokenPluginError(Status.INVALID, f"{kind.hook}() returned None")
        records += itertools.chain(*results)
        _check_records(kind, records)
    except BrokenPluginError as broken:
        if manager.has_plugin(info.key):
            manager.unregister(name=info.key)
        return LoadedPlugin(
            info=attrs.evolve(info, status=broken.status, message=str(broken)),
            withheld=frozenset(str(getattr(record, "name", "")) for record in records),
        )
    return LoadedPlugin(
        info=attrs.evolve(info, status=Status.OK),
        records=tuple(
            LoadedRecord(record=record, distribution=info.distribution, version=info.version, plugin=info.key)
            for record in sorted(records, key=lambda record: record.name)
        ),
    )


def call_hook(manager: pluggy.PluginManager, module: object, hook: str, **arguments: object) -> list[list[object]]:
    """What each implementation of ``hook`` in ``module`` alone returns, as a list; None is left out.

    Raises:
        BrokenPluginError: one raised anything but Ctrl-C.
    """
    others = [plugin for plugin in manager.get_plugins() if plugin is not module]
    caller = manager.subset_hook_caller(hook, remove_plugins=others)
    return _guarded(
        lambda: [_one_or_many(result) for result in caller(**arguments)],
        Status.INVALID,
        prefix=f"{hook}() raised ",
    )


def measured(loaded: LoadedRecord, report: Callable[[str], None]) -> LoadedRecord:
    """The profile of a :class:`MeasuredHardware`, measured or found where it was kept; any other record as it is.

    Raises:
        BrokenPluginError: measuring failed, or gave something else than a profile of that name.
    """
    record = loaded.record
    if not isinstance(record, MeasuredHardware):
        return loaded
    profile = _guarded(lambda: record.measure(report), Status.INVALID, prefix=f"measuring {record.name} failed: ")
    if not isinstance(profile, HardwareProfile) or profile.name != record.name:
        found = profile.name if isinstance(profile, HardwareProfile) else type(profile).__name__
        message = f"measuring {record.name} gave {found}; it must give the HardwareProfile of that name"
        raise BrokenPluginError(Status.INVALID, message)
    return attrs.evolve(loaded, record=profile)


def _one_or_many(result: object) -> list[object]:
    if isinstance(result, Iterable) and not isinstance(result, str | bytes):
        return list(result)
    return [result]


def _guarded(function: Callable[[], Any], status: Status, prefix: str = "") -> Any:
    """The result of ``function``; whatever it raises but Ctrl-C breaks the plugin with ``status``.

    What plugin code prints goes to stderr: stdout belongs to the command's result.
    """
    try:
        with contextlib.redirect_stdout(sys.stderr):
            return function()
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        first = (str(error).splitlines() or [""])[0]
        text = f"{type(error).__name__}: {first}" if first else type(error).__name__
        raise BrokenPluginError(status, prefix + text) from error


def _import(info: PluginInfo) -> Any:
    if ":" in info.module or not all(part.isidentifier() for part in info.module.split(".")):
        message = f"its entry point names {info.module!r}; it must name a module"
        raise BrokenPluginError(Status.INVALID, message)
    return _guarded(lambda: importlib.import_module(info.module), Status.IMPORT_FAILED)


def _register(info: PluginInfo, kind: PluginKind, module: Any, manager: pluggy.PluginManager) -> None:
    registered = manager.get_name(module)
    if registered is None:
        _guarded(lambda: manager.register(module, info.key), Status.INVALID)
        _require_known_hooks(module, manager)
    elif registered.split(":")[0] == kind.name:
        message = f"its module {info.module!r} is the entry point {registered!r} already"
        raise BrokenPluginError(Status.INVALID, message)
    if not any(caller.name == kind.hook for caller in manager.get_hookcallers(module) or ()):
        message = f"no function of {info.module!r} marked @hookimpl implements {kind.hook}()"
        raise BrokenPluginError(Status.INVALID, message)


def _require_known_hooks(module: Any, manager: pluggy.PluginManager) -> None:
    known = [name for name in vars(hookspecs) if name.startswith("rpeg_")]
    for caller in manager.get_hookcallers(module) or ():
        if not caller.has_spec():
            hint = suggest(caller.name, known)
            message = f"{caller.name}() is marked @hookimpl, but there is no such hook"
            raise BrokenPluginError(Status.INVALID, f"{message}; {hint}" if hint else message)


def _check_records(kind: PluginKind, records: Iterable[Any]) -> None:
    problems = [problem for record in records for problem in check_record(kind, record)]
    names = [record.name for record in records if not problems]
    problems += [f"two records are named {name!r}" for name in sorted(set(names)) if names.count(name) > 1]
    if problems:
        raise BrokenPluginError(Status.INVALID, "; ".join(problems))


# What a record must look like; whether its functions work is for the conformance checks (rpeg_core.testing).


def check_record(kind: PluginKind, record: Any) -> tuple[str, ...]:
    """The reasons why ``record`` cannot be used; empty when it can."""
    expected = tuple(getattr(rpeg_core.records, name) for name in kind.records)
    if not isinstance(record, expected):
        returned = type(record).__name__
        return (f"{kind.hook}() returned {returned}; it must return {' or '.join(kind.records)} records",)
    label = f"{type(record).__name__} {record.name!r}"
    problems = []
    if not isinstance(record.name, str) or not _NAME.fullmatch(record.name):
        problems.append(f"{label}: name must be lower-case letters, digits, '.', '_' and '-'")
    if not isinstance(record.summary, str) or not record.summary.strip() or "\n" in record.summary:
        problems.append(f"{label}: summary must be one line of text")
    problems += [f"{label}: {problem}" for problem in _FURTHER_CHECKS.get(kind.name, _no_checks)(record)]
    settings = getattr(record, "settings", NoSettings)
    problems += [f"{label}: {problem}" for problem in check_settings_class(settings)]
    return tuple(problems)


def _no_checks(record: Any) -> Iterable[str]:
    return ()


def _check_algorithm(record: Any) -> Iterable[str]:
    if not callable(record.build):
        yield "build must be callable"
    names = [role.name for role in record.roles]
    if len(set(names)) < len(names):
        yield "two roles have the same name"
    if not any(role.trainable for role in record.roles):
        yield "no role is trainable"


def _check_hardware(record: Any) -> Iterable[str]:
    if isinstance(record, MeasuredHardware) and not callable(record.measure):
        yield "measure must be callable"


def _check_cost_term(record: Any) -> Iterable[str]:
    if record.name.count(".") != 1:
        yield "name must be 'model.term'"
    if not isinstance(record.target, Target):
        yield f"target is {record.target!r}; it must be a Target"
    elif (record.target is Target.MEMORY) != isinstance(record.memory, MemoryKind):
        yield "memory must be a MemoryKind when target is Target.MEMORY, else None"
    if record.host is not None and record.memory is not MemoryKind.TRAINING_STATE:
        yield "host must be None unless memory is MemoryKind.TRAINING_STATE"
    if not callable(record.function):
        yield "function must be callable"


def _check_strategy(record: Any) -> Iterable[str]:
    if record.guarantee not in _GUARANTEES:
        yield f"guarantee is {record.guarantee!r}; it must be one of {', '.join(_GUARANTEES)}"
    if not callable(record.run):
        yield "run must be callable"


def _check_backend(record: Any) -> Iterable[str]:
    if not record.can or not record.can <= _CAPABILITIES:
        yield f"can is {sorted(record.can)}; it must be a non-empty subset of {sorted(_CAPABILITIES)}"
    if not callable(record.probe):
        yield "probe must be callable"
    if ("execute" in record.can) != callable(record.open):
        yield "open must be callable when can has 'execute', else None"
    if ("export" in record.can) != callable(record.render):
        yield "render must be callable when can has 'export', else None"


_FURTHER_CHECKS: dict[str, Callable[[Any], Iterable[str]]] = {
    ALGORITHM.name: _check_algorithm,
    HARDWARE.name: _check_hardware,
    COST.name: _check_cost_term,
    SEARCH.name: _check_strategy,
    BACKEND.name: _check_backend,
}
