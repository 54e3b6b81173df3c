"""Which plugins are installed, from package metadata alone: no plugin is imported here.

Policy: a plugin that the user disabled or whose requirement on rpeg-core does not hold is not loaded; of two
distributions that offer the same kind and name neither is.
"""

from __future__ import annotations

import enum
import importlib.metadata
import re
from collections.abc import Callable, Iterable, Mapping
from importlib.metadata import EntryPoint

import attrs
from packaging.requirements import InvalidRequirement, Requirement
from packaging.specifiers import SpecifierSet
from packaging.utils import canonicalize_name

from rpeg_core._version import __version__
from rpeg_core.plugins.kinds import KINDS

__all__ = [
    "CORE_DISTRIBUTION",
    "DISABLE_VARIABLE",
    "EntryPointSource",
    "PluginInfo",
    "Status",
    "discover",
    "installed_entry_points",
    "parse_disabled",
]

DISABLE_VARIABLE = "RPEG_DISABLE_PLUGINS"
CORE_DISTRIBUTION = "rpeg-core"

EntryPointSource = Callable[[str], Iterable[EntryPoint]]
"""Entry-point group to the entry points in it."""


class Status(enum.StrEnum):
    """What is known about a plugin."""

    AVAILABLE = "available"  # installed and compatible, not imported yet
    OK = "ok"  # imported, its records are in use
    DISABLED = "disabled"
    INCOMPATIBLE = "incompatible"
    IMPORT_FAILED = "import-failed"
    DUPLICATE = "duplicate"
    INVALID = "invalid"

    @property
    def failed(self) -> bool:
        """True when something is wrong, as opposed to wanted by the user."""
        return self not in (Status.AVAILABLE, Status.OK, Status.DISABLED)


@attrs.frozen(kw_only=True)
class PluginInfo:
    """One entry point of one distribution.

    Attributes:
        kind: ``algorithm``, ``hardware``, ``cost``, ``search`` or ``backend``.
        name: of the entry point.
        module: what the entry point names.
        distribution: the distribution that has the entry point.
        version: of the distribution.
        requires_core: its version specifier for rpeg-core, None when it declares none.
        status: what is known about it.
        message: why, empty when available or ok.
    """

    kind: str
    name: str
    module: str
    distribution: str
    version: str
    requires_core: str | None
    status: Status
    message: str = ""

    @property
    def key(self) -> str:
        """``kind:name``, the name it is registered under."""
        return f"{self.kind}:{self.name}"

    @property
    def source(self) -> str:
        """``distribution version``."""
        return f"{self.distribution} {self.version}"


def parse_disabled(text: str) -> frozenset[str]:
    """The entries of ``RPEG_DISABLE_PLUGINS``: ``name`` or ``kind:name``, separated by commas or spaces."""
    return frozenset(re.split(r"[,\s]+", text)) - {""}


def installed_entry_points(group: str) -> Iterable[EntryPoint]:
    """The entry points of the running environment."""
    return importlib.metadata.entry_points(group=group)


def discover(
    *,
    entry_points: EntryPointSource = installed_entry_points,
    disabled: frozenset[str] = frozenset(),
    core_version: str = __version__,
) -> tuple[PluginInfo, ...]:
    """Every installed plugin, sorted by kind, name and distribution.

    Args:
        entry_points: where to look; by default the running environment.
        disabled: see :func:`parse_disabled`.
        core_version: the version that plugins' requirements are checked against.
    """
    infos = []
    for kind in KINDS:
        found = [_info(kind.name, entry, disabled, core_version) for entry in entry_points(kind.group)]
        infos += sorted(found, key=lambda info: (info.name, info.distribution, info.module))
    return _mark_duplicates(infos)


def _info(kind: str, entry: EntryPoint, disabled: frozenset[str], core_version: str) -> PluginInfo:
    requirement = _core_requirement(entry, core_version)
    if {entry.name, f"{kind}:{entry.name}"} & disabled:
        status, message = Status.DISABLED, f"named in {DISABLE_VARIABLE}"
    else:
        status, message = requirement.status, requirement.message
    metadata = entry.dist.metadata if entry.dist is not None else {}
    return PluginInfo(
        kind=kind,
        name=entry.name,
        module=entry.value,
        distribution=metadata.get("Name") or "(unnamed)",
        version=metadata.get("Version") or "(no version)",
        requires_core=requirement.specifier,
        status=status,
        message=message,
    )


@attrs.frozen(kw_only=True)
class _Requirement:
    """What a distribution says about rpeg-core, judged."""

    specifier: str | None
    status: Status
    message: str = ""


def _core_requirement(entry: EntryPoint, core_version: str) -> _Requirement:
    specifiers = SpecifierSet()
    declared = False
    for line in (entry.dist.requires if entry.dist is not None else None) or ():
        try:
            requirement = Requirement(line)
        except InvalidRequirement:
            message = f"its metadata has a requirement that cannot be read: {line!r}"
            return _Requirement(specifier=None, status=Status.INCOMPATIBLE, message=message)
        wanted = requirement.marker is None or requirement.marker.evaluate({"extra": ""})
        if wanted and canonicalize_name(requirement.name) == CORE_DISTRIBUTION:
            specifiers &= requirement.specifier
            declared = True
    if not declared:
        message = f"declares no requirement on {CORE_DISTRIBUTION}"
        return _Requirement(specifier=None, status=Status.AVAILABLE, message=message)
    if not specifiers.contains(core_version, prereleases=True):
        message = f"needs {CORE_DISTRIBUTION} {specifiers}, {core_version} is installed"
        return _Requirement(specifier=str(specifiers), status=Status.INCOMPATIBLE, message=message)
    return _Requirement(specifier=str(specifiers), status=Status.AVAILABLE)


def _mark_duplicates(infos: Iterable[PluginInfo]) -> tuple[PluginInfo, ...]:
    infos = tuple(infos)
    groups: dict[str, list[PluginInfo]] = {}
    for info in infos:
        if info.status is Status.AVAILABLE:
            groups.setdefault(info.key, []).append(info)
    return tuple(_duplicate(info, groups) if len(groups.get(info.key, ())) > 1 else info for info in infos)


def _duplicate(info: PluginInfo, groups: Mapping[str, list[PluginInfo]]) -> PluginInfo:
    if info.status is not Status.AVAILABLE:
        return info
    sources = " and ".join(other.source for other in groups[info.key])
    return attrs.evolve(info, status=Status.DUPLICATE, message=f"{info.kind} {info.name!r} is offered by {sources}")
