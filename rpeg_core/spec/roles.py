"""``models:``: for each role the architecture, the head, and where its first weights come from."""

from __future__ import annotations

from pathlib import Path

import attrs

from rpeg_core.errors import ExperimentError
from rpeg_core.spec.models import Head, ModelSpec
from rpeg_core.spec.public_models import load_model
from rpeg_core.spec.sections import Section

__all__ = ["Role", "read_roles"]

ALLOWED = "allowed: exactly one of config (a public name, a path or dimensions) and same_as (another role)"


@attrs.frozen(kw_only=True)
class Role:
    """One entry of ``models:``.

    Attributes:
        spec: its architecture, head applied.
        head_given: whether the user stated the head.
        weights: absolute path of the folder with its first weights, None when a backend makes them up.
        same_as: the role that it repeats, None when it stands for itself.
    """

    spec: ModelSpec
    head_given: bool
    weights: str | None
    same_as: str | None


def read_roles(section: Section, base_dir: Path) -> dict[str, Role]:
    """Every role of the section, in its order; relative paths are taken from ``base_dir``.

    Raises:
        ExperimentError: an entry has no or two architectures, repeats none that exists, or names a missing folder.
        UnknownKeyError: a key does not exist.
        ModelConfigError, UnknownModelError: an architecture cannot be resolved.
    """
    found: dict[str, Role] = {}
    pending = dict.fromkeys(section.values)
    for name in [*pending, *pending]:  # a second round resolves same_as that points forward
        role = _role(name, section, found, base_dir)
        if role is not None:
            found[name] = role
    return {name: found[name] for name in section.values}


def _role(name: str, section: Section, found: dict[str, Role], base_dir: Path) -> Role | None:
    """The role, None when the one that it repeats was not read yet."""
    entry = section.section(name)
    entry.only("config", "same_as", "head", "weights", "spec")
    given = [key for key in ("config", "same_as", "spec") if entry.get(key) is not None]
    resolved = "spec" in given  # as a plan keeps it; its weights may be on another machine
    weights = _weights(entry, base_dir, must_exist=not resolved)
    if not given and weights is not None:
        given = ["weights"]
    if len(given) != 1 and given != ["same_as", "spec"]:
        raise ExperimentError(f"{entry.path} has {', '.join(given) or 'no architecture'}", facts=[ALLOWED])
    same_as = _same_as(name, entry, section) if "same_as" in given else None
    if resolved:
        spec = ModelSpec.from_dict(entry.section("spec").values)
    elif same_as is not None:
        if same_as not in found:
            return None
        spec, weights = found[same_as].spec, weights or found[same_as].weights
    elif given == ["weights"]:
        spec = load_model(str(weights), base_dir=base_dir, name=name)
    else:
        spec = load_model(entry.architecture("config"), base_dir=base_dir, name=name)
    head_given = entry.get("head") is not None
    if head_given:
        spec = spec.with_head(Head(entry.choice("head", [head.value for head in Head])))
    return Role(spec=spec, head_given=head_given, weights=weights, same_as=same_as)


def _same_as(name: str, entry: Section, section: Section) -> str:
    target = entry.text("same_as")
    if target not in section.values or target == name or "same_as" in section.section(target).values:
        allowed = [r for r in section.values if r != name and "same_as" not in section.section(r).values]
        raise ExperimentError(
            f"{entry.path}.same_as is {target!r}",
            facts=[f"allowed: {', '.join(allowed) or 'no role here'}"],
        )
    return target


def _weights(entry: Section, base_dir: Path, *, must_exist: bool) -> str | None:
    if entry.get("weights") is None:
        return None
    given = entry.text("weights")
    path = (base_dir / Path(given).expanduser()).resolve()
    if must_exist and not path.is_dir():
        raise ExperimentError(
            f"{entry.key('weights')} is {given!r}",
            facts=[
                f"{'not a folder' if path.exists() else 'there is no folder'}: {path}",
                "allowed: a folder in the format of Hugging Face: config.json, *.safetensors",
            ],
        )
    return str(path)
