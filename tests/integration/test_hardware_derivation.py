"""The shipped hardware profiles follow from the measured tables (benchmarks/derive_hardware.py)."""

import importlib.util
import subprocess
import sys
from pathlib import Path

import attrs
import pytest

REPOSITORY = Path(__file__).resolve().parents[2]
DATA = REPOSITORY.parent / "shared" / "data" / "measured"
SCRIPT = REPOSITORY / "benchmarks" / "derive_hardware.py"


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no measured tables at {DATA}")
def test_profiles_equal_what_the_tables_say() -> None:
    command = [sys.executable, str(SCRIPT), "--data", str(DATA), "--check"]
    result = subprocess.run(command, capture_output=True, text=True, check=False)
    assert (result.returncode, result.stderr) == (0, "")


@pytest.mark.skipif(not DATA.is_dir(), reason=f"no measured tables at {DATA}")
def test_a_changed_number_and_a_changed_fit_error_are_named() -> None:
    spec = importlib.util.spec_from_file_location("derive_hardware", SCRIPT)
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    derivation = script.derive(script.read(DATA))["h100"]
    profile = script.shipped()["h100"]
    changed = attrs.evolve(
        profile,
        device=attrs.evolve(profile.device, peak_flops_per_s=8.35e14),
        sources={**profile.sources, "tiers.intra_node.p2p.latency_s": "a guess"},
    )
    assert script.differences(profile, derivation) == []
    assert script.differences(changed, derivation) == [
        "h100: device.peak_flops_per_s is 8.35e+14, derived 8.34346e+14",
        "h100: the source of tiers.intra_node.p2p.latency_s does not say 'median error 19.5%'",
    ]
