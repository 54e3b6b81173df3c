"""Which hardware profile a GPU name of a table means."""

from __future__ import annotations

from collections.abc import Mapping

from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.validation.rows import Unusable

__all__ = ["ALIASES", "profile_of_gpu"]

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
