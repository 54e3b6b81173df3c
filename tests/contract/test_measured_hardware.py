"""Hardware that is measured: listed for free, measured once when named, an error of its plugin when that fails."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from rpeg_core.errors import PluginError
from rpeg_core.plugins.registry import Registry

MODULE = """
from rpeg_core import AlphaBeta, Device, GemmEfficiency, HardwareProfile, LinkTier, MeasuredHardware, hookimpl

measured = []
LINK = LinkTier(collective=AlphaBeta(1e-6, 1e11), p2p=AlphaBeta(1e-6, 1e11))

def measure(report):
    measured.append(1)
    report("measuring")
    {action}
    return HardwareProfile(
        name={name!r}, summary="x", gpus_per_node=4,
        device=Device(memory_bytes=80_000, memory_bandwidth_bytes_per_s=2e12, peak_flops_per_s=1e14),
        tiers=(LINK, LINK, LINK), efficiency=GemmEfficiency(gamma_m_rows=512.0, gamma_k_columns=256.0),
        non_gemm_layer_s=1e-4, non_gemm_reference_batch=8,
    )

@hookimpl
def rpeg_hardware():
    yield MeasuredHardware(name="mine", summary="x", measure=measure)
"""


def test_it_is_measured_when_named_and_once(installed: Any) -> None:
    module = installed.add("acme", "rpeg.hardware", "mine", MODULE.format(name="mine", action="pass"))
    told: list[str] = []
    registry = Registry(disabled=frozenset(), entry_points=installed.entry_points, report=told.append)
    (listed,) = registry.records("hardware")
    assert (listed.name, sys.modules[module].measured) == ("mine", [])
    profile = registry.get("hardware", "mine").record
    assert (profile.name, profile.gpus_per_node) == ("mine", 4)
    assert registry.get("hardware", "mine").record is profile
    assert (sys.modules[module].measured, told) == ([1], ["measuring"])


@pytest.mark.parametrize(
    ("name", "action", "reason"),
    [
        ("mine", "raise OSError('no clock')", "measuring mine failed: OSError: no clock"),
        ("other", "pass", "measuring mine gave other; it must give the HardwareProfile of that name"),
        ("mine", "return 3", "measuring mine gave int; it must give the HardwareProfile of that name"),
    ],
)
def test_a_measurement_that_fails_is_the_plugins_error(installed: Any, name: str, action: str, reason: str) -> None:
    installed.add("acme", "rpeg.hardware", "mine", MODULE.format(name=name, action=action))
    with pytest.raises(PluginError) as caught:
        installed.registry().get("hardware", "mine")
    assert caught.value.what == "hardware 'mine' cannot be used"
    assert f"reason: {reason}" in caught.value.facts
