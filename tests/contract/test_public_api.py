"""``import rpeg_core``: every public name is there, and costs nothing until used."""

from __future__ import annotations

import subprocess
import sys

import pytest

import rpeg_core


def test_the_names_are_sorted_and_each_one_can_be_imported() -> None:
    assert rpeg_core.__all__ == sorted(rpeg_core.__all__)
    missing = [name for name in rpeg_core.__all__ if not hasattr(rpeg_core, name)]
    assert missing == []


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="module 'rpeg_core' has no attribute 'Planet'"):
        _ = rpeg_core.Planet


def test_what_a_hardware_or_cost_plugin_imports_is_light() -> None:
    script = (
        "import sys\n"
        "from rpeg_core import AlphaBeta, CostTerm, HardwareProfile, RpegError, hookimpl, setting\n"
        "print(sorted({'numpy', 'networkx', 'numba', 'torch', 'yaml', 'rich', 'click'} & set(sys.modules)))\n"
    )
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert done.stdout == "[]\n"
