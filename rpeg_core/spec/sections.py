"""Reading a YAML file as mappings with key paths, so that an error can say where a value stands."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import yaml

from rpeg_core.errors import ExperimentError, UnknownKeyError, suggest

__all__ = ["Section", "read_yaml"]


class _Loader(yaml.SafeLoader):
    """YAML, but of two equal keys neither wins silently."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        first: dict[object, int] = {}
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode) or key.tag == "tag:yaml.org,2002:merge":
                continue
            line = key.start_mark.line + 1
            if key.value in first:
                raise ExperimentError(
                    f"the key {key.value!r} is there twice",
                    facts=[f"in {key.start_mark.name}, lines {first[key.value]} and {line}"],
                    hint="remove one of them",
                )
            first[key.value] = line
        return super().construct_mapping(node, deep)


INIT = "`rpeg init` writes a commented experiment file"


def read_yaml(path: Path, *, hint: str = INIT) -> object:
    """The document of a YAML file; ``hint`` says how to get one that can be read.

    Raises:
        ExperimentError: it cannot be read, is not valid YAML, or repeats a key of a mapping.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ExperimentError(
            f"cannot read {path}",
            facts=[getattr(error, "strerror", None) or str(error)],
            hint=hint,
        ) from error
    try:
        return _document(text, path)
    except RecursionError:
        raise ExperimentError(f"{path} is nested too deeply") from None
    except yaml.YAMLError as error:
        raise ExperimentError(f"{path} is not valid YAML", facts=[_problem(error)]) from error


def _document(text: str, path: Path) -> object:
    loader = _Loader(text)  # refuses characters that YAML does not have
    loader.name = str(path)
    try:
        return loader.get_single_data()
    finally:
        loader.dispose()


def _problem(error: yaml.YAMLError) -> str:
    if isinstance(error, yaml.reader.ReaderError):
        return f"character {error.position + 1}: #x{error.character:04x} is not allowed in YAML"
    mark, problem = getattr(error, "problem_mark", None), getattr(error, "problem", None)
    if mark is None or problem is None:
        return " ".join(str(error).split())
    return f"line {mark.line + 1}, column {mark.column + 1}: {problem}"


class Section:
    """A mapping of the file with its key path; reads typed values or raises."""

    def __init__(self, values: object, path: str) -> None:
        if not isinstance(values, Mapping):
            name = path or "the experiment"
            raise ExperimentError(f"{name} is {_show(values)}", facts=["allowed: a mapping of keys to values"])
        self.values: Mapping[str, Any] = values
        self.path = path

    def only(self, *keys: str) -> None:
        for key in self.values:
            if key not in keys:
                where = f"in {self.path}" if self.path else "at the top level"
                raise UnknownKeyError(
                    f"unknown key {key!r} {where}",
                    facts=[f"allowed: {', '.join(keys)}"],
                    hint=suggest(str(key), keys),
                )

    def key(self, name: str) -> str:
        return f"{self.path}.{name}" if self.path else name

    def get(self, name: str) -> Any:
        return self.values.get(name)

    def section(self, name: str, *, optional: bool = False) -> Section:
        if self.get(name) is None:
            if optional:
                return Section({}, self.key(name))
            if name in self.values:
                raise self._empty(name, "a mapping of keys to values")
            raise ExperimentError(f"{self.key(name)} is missing", hint=INIT)
        return Section(self.values[name], self.key(name))

    def text(self, name: str, default: str | None = None) -> str:
        return self._value(name, default, lambda v: isinstance(v, str) and v, "a name")

    def architecture(self, name: str) -> str | Mapping[str, Any]:
        allowed = "a public name, a path or dimensions"
        return self._value(name, None, lambda v: isinstance(v, Mapping) or (isinstance(v, str) and v), allowed)

    def choice(self, name: str, allowed: Sequence[str]) -> str:
        return self._value(name, None, lambda v: v in allowed, ", ".join(allowed))

    def boolean(self, name: str, default: bool) -> bool:
        return self._value(name, default, lambda v: isinstance(v, bool), "true or false")

    def integer(
        self, name: str, default: int | None = None, *, minimum: int | None = None, maximum: int | None = None
    ) -> int:
        allowed = "a whole number" + ("" if minimum is None else f" >= {minimum}")
        allowed += "" if maximum is None else f" and <= {maximum}"

        def fits(value: object) -> bool:
            if not isinstance(value, int) or isinstance(value, bool):
                return False
            return (minimum is None or value >= minimum) and (maximum is None or value <= maximum)

        return self._value(name, default, fits, allowed)

    def number(self, name: str, default: float | None = None, *, above: float | None = None) -> float:
        allowed = "a number" + ("" if above is None else f" > {above:g}")

        def fits(value: object) -> bool:
            return (
                isinstance(value, int | float)
                and not isinstance(value, bool)
                and value == value  # not NaN
                and abs(value) != float("inf")
                and (above is None or value > above)
            )

        return float(self._value(name, default, fits, allowed))

    def sequence(self, name: str, kind: type, allowed: str, default: Sequence[Any] = ()) -> Sequence[Any]:
        """A list of ``kind``; a single value is a list of one."""
        value = self.get(name)
        if value is None:
            return default
        items = value if isinstance(value, list | tuple) else [value]
        if not items or any(type(item) is not kind for item in items):
            raise ExperimentError(f"{self.key(name)} is {_show(value)}", facts=[f"allowed: {allowed}"])
        return items

    def _empty(self, name: str, allowed: str) -> ExperimentError:
        return ExperimentError(f"{self.key(name)} is empty", facts=[f"allowed: {allowed}"])

    def _value(self, name: str, default: Any, fits: Callable[[Any], Any], allowed: str) -> Any:
        value = self.get(name)
        if value is None:
            if default is None and name in self.values:
                raise self._empty(name, allowed)
            if default is None:
                raise ExperimentError(f"{self.key(name)} is missing", facts=[f"allowed: {allowed}"])
            return default
        if not fits(value):
            raise ExperimentError(f"{self.key(name)} is {_show(value)}", facts=[f"allowed: {allowed}"])
        return value


def _show(value: object) -> str:
    return "empty" if value is None else repr(value)
