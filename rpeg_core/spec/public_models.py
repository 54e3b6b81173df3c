"""The bundled table of public models, and the function that turns a user's model reference into a ModelSpec.

The table is ``data/public_models.json``: for each model its name on the Hugging Face hub, the names of
variants with the same dimensions, the source, and the keys of its ``config.json`` that are read.
"""

from __future__ import annotations

import difflib
import functools
import json
from collections.abc import Mapping
from importlib import resources
from pathlib import Path
from typing import Any

import attrs

from rpeg_core.errors import ModelConfigError, UnknownModelError
from rpeg_core.spec.model_configs import model_from_config, model_from_inline
from rpeg_core.spec.models import ModelSpec

__all__ = ["load_model", "public_model", "public_model_names"]


@attrs.frozen(kw_only=True, slots=True)
class _Entry:
    """One row of the table under one of its names."""

    name: str
    source: str
    config: Mapping[str, Any]


@functools.cache
def _table() -> tuple[tuple[str, ...], Mapping[str, _Entry]]:
    """The canonical names, sorted, and the entries by lower-case name (variants included)."""
    text = resources.files("rpeg_core.spec").joinpath("data/public_models.json").read_text(encoding="utf-8")
    rows = json.loads(text)["models"]
    entries: dict[str, _Entry] = {}
    for row in rows:
        for name in (row["name"], *row.get("variants", ())):
            entry = _Entry(name=name, source=row["source"], config=row["config"])
            if entries.setdefault(name.lower(), entry) is not entry:
                raise ModelConfigError(f"public_models.json has {name!r} twice")
    return tuple(sorted(row["name"] for row in rows)), entries


def public_model_names() -> tuple[str, ...]:
    """Names of the bundled models, sorted; variants such as ``-Instruct`` resolve too but are not listed."""
    return _table()[0]


def public_model(name: str) -> ModelSpec:
    """The bundled model of that name (case-insensitive), with an LM head.

    Raises:
        UnknownModelError: no such model; the three closest names are given.
    """
    entry = _table()[1].get(name.lower())
    if entry is None:
        raise UnknownModelError(
            f"model {name!r} is neither a bundled public model nor a config.json",
            facts=[f"closest bundled names: {', '.join(_closest(name))}"],
            hint="name a bundled model, the path of a config.json, or give inline dimensions",
        )
    return model_from_config(entry.config, entry.name, entry.source)


def _closest(name: str) -> list[str]:
    """The three canonical names closest to ``name``, compared with and without the organization."""

    def likeness(candidate: str) -> float:
        pairs = [(name, candidate), (name, candidate.rpartition("/")[2])]
        return max(difflib.SequenceMatcher(None, a.lower(), b.lower()).ratio() for a, b in pairs)

    return sorted(public_model_names(), key=lambda candidate: (-likeness(candidate), candidate))[:3]


def load_model(reference: str | Mapping[str, Any], *, base_dir: Path, name: str = "inline") -> ModelSpec:
    """ModelSpec with an LM head for what a user wrote under ``models``.

    Args:
        reference: a bundled public name; the path of a ``config.json`` or of a folder holding one, relative
            to ``base_dir``; or a mapping of inline dimensions. A bundled name wins over an equal path.
        base_dir: folder of the experiment file.
        name: name given to a model with inline dimensions.

    Raises:
        UnknownModelError: a string that is neither a bundled name nor an existing path.
        UnknownKeyError: an inline key that is no dimension.
        ModelConfigError: the config cannot be read or is not supported.
    """
    if isinstance(reference, Mapping):
        return model_from_inline(reference, name)
    if reference.lower() in _table()[1]:
        return public_model(reference)
    path = base_dir / Path(reference).expanduser()
    if path.is_dir():
        path = path / "config.json"
    if path.is_file():
        return _from_file(path)
    if path.name.endswith(".json") or reference.startswith((".", "/", "~")):
        raise ModelConfigError(f"no model config at {reference!r}", facts=[f"looked at: {path}"])
    return public_model(reference)


def _from_file(path: Path) -> ModelSpec:
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise ModelConfigError(f"{path} cannot be read as JSON", facts=[str(error)]) from error
    if not isinstance(config, dict):
        raise ModelConfigError(f"{path} holds {type(config).__name__}, not a JSON object")
    name = path.resolve().parent.name if path.name == "config.json" else path.stem
    return model_from_config(config, name, str(path))
