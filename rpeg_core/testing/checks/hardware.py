"""Hardware profiles: every number is positive and has a source, and distance costs."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from typing import Any

from rpeg_core.cli.show import numbers
from rpeg_core.records import HardwareProfile, MeasuredHardware
from rpeg_core.spec.machine import AlphaBeta, Tier
from rpeg_core.testing.checks.accuracy import errors_of_profile
from rpeg_core.testing.checks.outcome import CheckFailedError, RecordCheck, require

__all__ = ["checks"]

COUNTS = ("gpus_per_node", "device.memory_bytes", "non_gemm_reference_batch")
MAY_BE_ZERO = ("non_gemm_layer_s", "efficiency.gamma_m_rows", "efficiency.gamma_k_columns")


def sources(record: HardwareProfile) -> None:
    """Every number has a source, and every source a number."""
    paths = [path for path, _ in numbers(record)]
    require(
        [
            *(f"{path} has no source" for path in paths if not str(record.sources.get(path) or "").strip()),
            *(f"the source {path!r} belongs to no number" for path in record.sources if path not in paths),
        ]
    )


def quantities(record: HardwareProfile) -> None:
    """Numbers are finite and positive; counts are whole; a node has a GPU."""
    problems = []
    for path, value in numbers(record):
        zero_allowed = path in MAY_BE_ZERO or path.endswith("latency_s") or path.startswith("software.")
        if isinstance(value, bool) or not math.isfinite(value) or value < 0 or (value == 0 and not zero_allowed):
            problems.append(f"{path} is {value!r}; allowed: a finite number {'>=' if zero_allowed else '>'} 0")
        elif path in COUNTS and not isinstance(value, int):
            problems.append(f"{path} is {value!r}; allowed: a whole number")
    require(problems)


def tiers(record: HardwareProfile) -> None:
    """One entry per tier, and a farther one is not faster."""
    if len(record.tiers) != len(Tier):
        require(
            [f"tiers has {len(record.tiers)} entries; allowed: {len(Tier)}, one per {', '.join(t.name for t in Tier)}"]
        )
    problems = []
    for near, far in itertools.pairwise(Tier):
        for traffic in ("collective", "p2p"):
            problems += _faster(
                getattr(record.tiers[near], traffic), getattr(record.tiers[far], traffic), near, far, traffic
            )
    require(problems)


def _faster(near_link: AlphaBeta, far_link: AlphaBeta, near: Tier, far: Tier, traffic: str) -> list[str]:
    names = f"tiers.{far.name.lower()}.{traffic}", f"tiers.{near.name.lower()}.{traffic}"
    problems = []
    if far_link.latency_s < near_link.latency_s:
        problems.append(
            f"{names[0]}.latency_s is below that of {names[1]}: {far_link.latency_s} < {near_link.latency_s}"
        )
    if far_link.bandwidth_bytes_per_s > near_link.bandwidth_bytes_per_s:
        problems.append(
            f"{names[0]}.bandwidth_bytes_per_s is above that of {names[1]}: "
            f"{far_link.bandwidth_bytes_per_s} > {near_link.bandwidth_bytes_per_s}"
        )
    return problems


def default_costs(record: HardwareProfile) -> None:
    """It names the cost models that an experiment gets without ``costs:``."""
    names = record.default_costs
    if not isinstance(names, tuple) or not names or not all(isinstance(name, str) and name for name in names):
        require([f"default_costs is {names!r}; allowed: a tuple of names, e.g. ('analytical',)"])


def keeps(record: MeasuredHardware) -> None:
    """What was measured is kept: asked again, it gives the same numbers."""
    profile, again = _profile(record), _profile(record)
    if profile != again:
        differing = [path for (path, a), (_, b) in zip(numbers(profile), numbers(again), strict=False) if a != b]
        require([f"measured again, these are different: {', '.join(differing) or 'sources'}"])


_CHECKS: tuple[RecordCheck, ...] = (
    ("sources", sources),
    ("quantities", quantities),
    ("tiers", tiers),
    ("default-costs", default_costs),
    ("errors", errors_of_profile),
)


def checks(record: HardwareProfile | MeasuredHardware) -> tuple[RecordCheck, ...]:
    """The checks of a profile; of one that is to be measured, what it measures is checked, on this machine."""
    if isinstance(record, HardwareProfile):
        return _CHECKS
    return (("keeps", keeps), *((name, _of_the_profile(check)) for name, check in _CHECKS))


def _of_the_profile(check: Callable[[Any], None]) -> Callable[[Any], None]:
    return lambda record: check(_profile(record))


def _profile(record: MeasuredHardware) -> HardwareProfile:
    profile = record.measure(lambda text: None)
    if not isinstance(profile, HardwareProfile) or profile.name != record.name:
        raise CheckFailedError(f"measure gave {profile!r}; it must give the HardwareProfile {record.name!r}")
    return profile
