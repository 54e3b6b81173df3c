"""Which hardware profile a GPU name of a table means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.validation.rows import Unusable

if TYPE_CHECKING:
    from rpeg_core.plugins.registry import Registry

__all__ = ["ALIASES", "InstalledProfiles", "profile_of_gpu"]


class InstalledProfiles(Mapping[str, HardwareProfile]):
    """The hardware profiles of a registry by name; one of this machine is measured when a table names it."""

    def __init__(self, registry: Registry) -> None:
        self._registry = registry
        self._names = tuple(loaded.record.name for loaded in registry.records("hardware"))

    def __getitem__(self, name: str) -> HardwareProfile:
        if name not in self._names:
            raise KeyError(name)
        return self._registry.get("hardware", name).record

    def __iter__(self) -> Iterator[str]:
        return iter(self._names)

    def __len__(self) -> int:
        return len(self._names)


ALIASES = {
    "a100-sxm-80gb": "a100-80gb",
    "a100-80gb": "a100-80gb",
    "a100-sxm-40gb": "a100-40gb",
    "h100-sxm-80gb": "h100",
    "h100-96gb-hbm2e-500w": "h100-hbm2e",
}
"""Names in tables that differ from the profile's, lower case."""


def profile_of_gpu(gpu: str, profiles: Mapping[str, HardwareProfile]) -> HardwareProfile:
    """The installed profile of a GPU.

    Raises:
        Unusable: none is installed.
    """
    name = ALIASES.get(gpu.lower(), gpu.lower())
    if name not in profiles:
        raise Unusable(f"no installed profile is called {name!r}")
    return profiles[name]
