"""A hardware profile as a file, which ``cluster.hardware: ./profile.yaml`` names: YAML, or JSON, which YAML contains.

The keys are the fields of :class:`rpeg_core.spec.machine.HardwareProfile`; ``tiers`` is a mapping of the names of
:class:`rpeg_core.spec.machine.Tier`. ``calibration``, what the numbers were fitted to, is for people.
"""

from __future__ import annotations

import contextlib
import math
import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import attrs

from rpeg_core.errors import ExperimentError, OutputError
from rpeg_core.spec.accuracy import TermError
from rpeg_core.spec.machine import Device, HardwareProfile, LinkTier, Tier
from rpeg_core.spec.sections import read_yaml

__all__ = ["profile_document", "read_profile", "write_profile"]

SCHEMA = 1
HINT = "`rpeg calibrate --output FILE` writes one"


def profile_document(profile: HardwareProfile, calibration: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The content of a file."""
    values = attrs.asdict(profile, filter=lambda _, value: value is not None)
    values["tiers"] = dict(zip((tier.name.lower() for tier in Tier), values["tiers"], strict=True))
    values["default_costs"] = list(profile.default_costs)
    values["sources"] = dict(sorted(profile.sources.items()))
    if profile.errors is not None:
        values["errors"] = [_error_document(error) for error in profile.errors]
    found = {"schema": SCHEMA, **values}
    return found if calibration is None else {**found, "calibration": dict(calibration)}


def _error_document(error: TermError) -> dict[str, Any]:
    values = attrs.asdict(error, filter=lambda _, value: value is not None)
    ranges = {name: list(pair) for name, pair in error.ranges.items()}
    names = {name: list(getattr(error, name)) for name in ("hardware", "precisions", "roles")}
    return {**values, "ranges": ranges, **names}


def write_profile(path: Path, profile: HardwareProfile, calibration: Mapping[str, Any] | None = None) -> None:
    """Write a file, whole or not at all.

    Raises:
        OutputError: it cannot be written.
    """
    import yaml

    text = yaml.safe_dump(profile_document(profile, calibration), sort_keys=False, allow_unicode=True, width=120)
    name = None
    try:
        with tempfile.NamedTemporaryFile(
            "w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8"
        ) as file:
            name = file.name
            file.write(text)
        os.chmod(name, 0o644)
        os.replace(name, path)
    except OSError as error:
        raise OutputError(f"cannot write {path}", facts=[error.strerror or str(error)]) from error
    finally:
        if name is not None:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)


def read_profile(path: Path) -> HardwareProfile:
    """The profile of a file, named by its path.

    Raises:
        ExperimentError: it cannot be read or is not a profile; all that is wrong is in the one error.
    """
    document = read_yaml(path, hint=HINT)
    if not isinstance(document, Mapping) or document.get("schema") != SCHEMA:
        raise ExperimentError(
            f"{path} is not a hardware profile", facts=[f"allowed: a mapping with schema: {SCHEMA}"], hint=HINT
        )
    values = {key: value for key, value in document.items() if key not in ("schema", "calibration")}
    problems: list[str] = []
    try:
        profile = _structured(values)
        problems = list(_problems(profile))
    except _MalformedError as malformed:
        problems = list(malformed.problems)
    if problems:
        raise ExperimentError(f"{path} is not a hardware profile", facts=problems, hint=HINT)
    return attrs.evolve(profile, name=str(path))


class _MalformedError(Exception):
    def __init__(self, problems: list[str]) -> None:
        super().__init__(*problems)
        self.problems = problems


def _structured(values: Mapping[str, Any]) -> HardwareProfile:
    import cattrs

    converter = cattrs.Converter(forbid_extra_keys=True)
    converter.register_structure_hook(float, _number)
    converter.register_structure_hook(int, _whole)
    converter.register_structure_hook(bool, _flag)
    converter.register_structure_hook(str, _text)
    converter.register_structure_hook_func(
        lambda kind: kind == tuple[LinkTier, LinkTier, LinkTier], lambda value, _: _tiers(value, converter)
    )
    try:
        return converter.structure(values, HardwareProfile)
    except (cattrs.BaseValidationError, ValueError, TypeError) as error:
        raise _MalformedError(sorted(set(cattrs.transform_error(error, "profile", _words)))) from error


def _words(error: BaseException, kind: type | None) -> str:
    from cattrs.v import format_exception

    return str(error) if type(error) is ValueError else format_exception(error, kind)


def _tiers(value: Any, converter: Any) -> tuple[LinkTier, LinkTier, LinkTier]:
    names = [tier.name.lower() for tier in Tier]
    if not isinstance(value, Mapping) or sorted(value) != sorted(names):
        raise ValueError(f"tiers needs exactly the keys {', '.join(names)}")
    near, middle, far = (converter.structure(value[name], LinkTier) for name in names)
    return near, middle, far


def _number(value: Any, _: Any) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise ValueError(f"{value!r} is not a finite number")
    return float(value)


def _whole(value: Any, _: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ValueError(f"{value!r} is not a whole number")
    return value


def _flag(value: Any, _: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError(f"{value!r} is not true or false")
    return value


def _text(value: Any, _: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r} is not text")
    return value


def _problems(profile: HardwareProfile) -> list[str]:
    found = []
    positive = {
        **{f"device.{field.name}": getattr(profile.device, field.name) for field in attrs.fields(Device)},
        "gpus_per_node": profile.gpus_per_node,
        "non_gemm_reference_batch": profile.non_gemm_reference_batch,
    }
    if profile.software is not None:
        positive["software.stream_share"] = profile.software.stream_share
        positive["software.attention_share"] = profile.software.attention_share
    found += [f"{path} is {value!r}; allowed: a number > 0" for path, value in positive.items() if _is_low(value)]
    at_least_zero = {
        "efficiency.gamma_m_rows": profile.efficiency.gamma_m_rows,
        "efficiency.gamma_k_columns": profile.efficiency.gamma_k_columns,
        "non_gemm_layer_s": profile.non_gemm_layer_s,
    }
    if profile.software is not None:
        software = attrs.asdict(profile.software)
        at_least_zero |= {f"software.{name}": value for name, value in software.items() if isinstance(value, float)}
    return found + [
        f"{path} is {value!r}; allowed: a number >= 0" for path, value in at_least_zero.items() if value < 0
    ]


def _is_low(value: Any) -> bool:
    return value is not None and value <= 0
