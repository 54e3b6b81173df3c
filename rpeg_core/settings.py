"""Settings of plugins: attrs classes whose every field has a default and a help text.

A plugin author writes::

    @attrs.frozen(kw_only=True)
    class Settings:
        seed: int = setting(0, help="Seed of the random choices.", minimum=0)
        seconds: float = setting(10.0, help="Wall-clock budget.", unit="s", minimum=0.0)

Field types: ``bool``, ``int``, ``float``, ``str``, ``Literal[...]``, ``tuple[T, ...]``, ``T | None``.
The user sets them under ``settings:`` in the experiment file or with ``--set annealing.seed=3``; text is read
according to the type of the field, so both ways accept the same spellings.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping, Sequence
from typing import Any

import attrs

from rpeg_core.errors import SettingsError, UsageError, suggest

__all__ = [
    "Override",
    "SettingRow",
    "build_settings",
    "check_settings_class",
    "describe",
    "parse_override",
    "setting",
]

_KEY = "rpeg"


@attrs.frozen(kw_only=True)
class _Info:
    """What :func:`setting` keeps in the metadata of a field."""

    help: str
    unit: str | None
    allowed: tuple[Any, ...] | None
    minimum: float | None
    maximum: float | None


@attrs.frozen(kw_only=True)
class SettingRow:
    """One line of ``rpeg show KIND NAME``."""

    name: str
    type: str
    value: object
    unit: str | None
    origin: str
    help: str


@attrs.frozen(kw_only=True)
class Override:
    """One ``--set target.name=text``; ``target`` is a record name, e.g. ``analytical.gemm``."""

    target: str
    name: str
    text: str

    @property
    def origin(self) -> str:
        """What reports and errors show as the origin of the value."""
        return f"--set {self.target}.{self.name}={self.text}"


class _NotAllowedError(Exception):
    """A value does not fit its field."""


def setting(
    default: Any,
    *,
    help: str,
    unit: str | None = None,
    allowed: Sequence[Any] | None = None,
    minimum: float | None = None,
    maximum: float | None = None,
) -> Any:
    """An attrs field of a settings class.

    Args:
        default: the value when the user sets none; checked like a user's value.
        help: one sentence for ``rpeg show``.
        unit: of a physical quantity, e.g. ``s`` or ``B``.
        allowed: the values that are allowed, or None for all of the type.
        minimum: the smallest allowed number.
        maximum: the largest allowed number.

    Constructing the class with a value that is not allowed raises :class:`SettingsError`.
    """
    info = _Info(
        help=help,
        unit=unit,
        allowed=None if allowed is None else tuple(allowed),
        minimum=minimum,
        maximum=maximum,
    )
    return attrs.field(default=default, metadata={_KEY: info}, validator=_validate)


def _validate(instance: object, attribute: attrs.Attribute[Any], value: object) -> None:
    cls = type(instance)
    tp = typing.get_type_hints(cls)[attribute.name]
    try:
        _convert(tp, attribute.metadata[_KEY], value)
    except _NotAllowedError:
        raise _value_error(f"{cls.__name__}.{attribute.name}", tp, attribute.metadata[_KEY], value) from None


def build_settings(
    cls: type, values: Mapping[str, object], *, where: str, origins: Mapping[str, str] | None = None
) -> Any:
    """An instance of the settings class ``cls`` with ``values`` over its defaults.

    Args:
        cls: the settings class of a record.
        values: field name to value, from a file (typed) or from the command line (text).
        where: key path that errors show, e.g. ``settings.annealing``.
        origins: field name to origin, e.g. ``experiment.yaml`` or ``--set annealing.seed=3``.

    Raises:
        SettingsError: an unknown name, a wrong type, or a value that is not allowed.
    """
    fields = attrs.fields_dict(cls)
    hints = typing.get_type_hints(cls)
    origins = origins or {}
    converted = {}
    for name, value in values.items():
        source = [f"from: {origins[name]}"] if name in origins else []
        if name not in fields:
            allowed = ", ".join(sorted(fields)) or "none, it has no settings"
            raise SettingsError(
                f"{where}.{name} is not a setting",
                facts=[*source, f"allowed: {allowed}"],
                hint=suggest(str(name), fields),
            )
        info = fields[name].metadata[_KEY]
        try:
            converted[name] = _convert(hints[name], info, value)
        except _NotAllowedError:
            raise _value_error(f"{where}.{name}", hints[name], info, value, source) from None
    try:
        return cls(**converted)
    except (TypeError, ValueError) as error:  # a check of the plugin itself, across several fields
        raise SettingsError(f"{where} is not allowed: {error}") from error


def describe(
    cls: type, instance: object | None = None, origins: Mapping[str, str] | None = None
) -> tuple[SettingRow, ...]:
    """The settings of ``cls`` as defined, with the values of ``instance`` or the defaults."""
    values = cls() if instance is None else instance
    hints = typing.get_type_hints(cls)
    origins = origins or {}
    return tuple(
        SettingRow(
            name=field.name,
            type=_type_name(hints[field.name], field.metadata[_KEY]),
            value=getattr(values, field.name),
            unit=field.metadata[_KEY].unit,
            origin=origins.get(field.name, "default"),
            help=field.metadata[_KEY].help,
        )
        for field in attrs.fields(cls)
    )


def parse_override(text: str) -> Override:
    """Read the argument of ``--set``.

    Raises:
        UsageError: it is not of the form ``NAME.SETTING=VALUE``.
    """
    path, equals, value = text.partition("=")
    target, dot, name = path.strip().rpartition(".")
    if not (equals and dot and target and name):
        raise UsageError(
            f"--set {text!r} cannot be read",
            facts=["allowed: NAME.SETTING=VALUE, e.g. annealing.seed=3"],
        )
    return Override(target=target, name=name, text=value.strip())


def check_settings_class(cls: object) -> tuple[str, ...]:
    """The reasons why ``cls`` cannot be a settings class; empty when it is one."""
    if not (isinstance(cls, type) and attrs.has(cls)):
        return (f"settings is {cls!r}; it must be an attrs class",)
    try:
        hints = typing.get_type_hints(cls)
    except Exception as error:
        return (f"the types of {cls.__name__} cannot be resolved: {error}",)
    problems = []
    for field in attrs.fields(cls):
        label = f"{cls.__name__}.{field.name}"
        info = field.metadata.get(_KEY)
        if field.default is attrs.NOTHING:
            problems.append(f"{label} has no default")
        if info is None or not info.help.strip():
            problems.append(f"{label} has no help text; define it with rpeg_core.setting(default, help=...)")
        elif not _supported(hints[field.name]):
            problems.append(f"{label} has the type {hints[field.name]!r}, which cannot be read from text")
    if not problems:
        try:
            cls()
        except Exception as error:
            problems.append(f"{cls.__name__}() does not accept its own defaults: {_first_line(error)}")
    return tuple(problems)


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _value_error(label: str, tp: Any, info: _Info, value: object, source: Sequence[str] = ()) -> SettingsError:
    return SettingsError(f"{label} is {value!r}", facts=[*source, f"allowed: {_expected(tp, info)}"])


# Types: what each one is called, and how a value is read.


def _optional(tp: Any) -> Any | None:
    """``T`` when ``tp`` is ``T | None``, else None."""
    if typing.get_origin(tp) not in (typing.Union, types.UnionType):
        return None
    inner = [argument for argument in typing.get_args(tp) if argument is not type(None)]
    return inner[0] if len(inner) == 1 and len(typing.get_args(tp)) == 2 else None


def _element(tp: Any) -> Any | None:
    """``T`` when ``tp`` is ``tuple[T, ...]``, else None."""
    arguments = typing.get_args(tp)
    is_list = typing.get_origin(tp) is tuple and len(arguments) == 2 and arguments[1] is Ellipsis
    return arguments[0] if is_list else None


def _supported(tp: Any) -> bool:
    if (inner := _optional(tp)) is not None:
        return _supported(inner)
    if (inner := _element(tp)) is not None:
        return inner in _SCALARS or typing.get_origin(inner) is typing.Literal
    return tp in _SCALARS or typing.get_origin(tp) is typing.Literal


def _type_name(tp: Any, info: _Info) -> str:
    if (inner := _optional(tp)) is not None:
        return f"{_type_name(inner, info)} or null"
    if (inner := _element(tp)) is not None:
        return f"list of {_type_name(inner, info)}"
    choices = typing.get_args(tp) if typing.get_origin(tp) is typing.Literal else info.allowed
    if choices:
        return " | ".join(str(choice) for choice in choices)
    return tp.__name__


def _expected(tp: Any, info: _Info) -> str:
    if (inner := _optional(tp)) is not None:
        return f"{_expected(inner, info)}, or null"
    if (inner := _element(tp)) is not None:
        return f"a list, each {_expected(inner, info)}"
    choices = typing.get_args(tp) if typing.get_origin(tp) is typing.Literal else info.allowed
    if choices:
        return "one of " + ", ".join(repr(choice) for choice in choices)
    if tp is str:
        return "text"
    if tp is bool:
        return "true or false"
    bounds = []
    if info.minimum is not None:
        bounds.append(f"at least {info.minimum}")
    if info.maximum is not None:
        bounds.append(f"at most {info.maximum}")
    noun = "an integer" if tp is int else "a finite number"
    return f"{noun} of {' and '.join(bounds)}" if bounds else noun


def _convert(tp: Any, info: _Info, value: object) -> object:
    if (inner := _optional(tp)) is not None:
        is_null = value is None or (isinstance(value, str) and value.lower() in ("null", "none"))
        return None if is_null else _convert(inner, info, value)
    if (inner := _element(tp)) is not None:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",")] if value else []
        if not isinstance(value, list | tuple):
            raise _NotAllowedError
        return tuple(_convert(inner, info, item) for item in value)
    if typing.get_origin(tp) is typing.Literal:
        return _choose(typing.get_args(tp), value)
    result = _SCALARS[tp](value)
    if info.allowed is not None:
        return _choose(info.allowed, result)
    if isinstance(result, int | float) and not isinstance(result, bool):
        if info.minimum is not None and result < info.minimum:
            raise _NotAllowedError
        if info.maximum is not None and result > info.maximum:
            raise _NotAllowedError
    return result


def _choose(choices: Sequence[object], value: object) -> object:
    for choice in choices:
        if choice == value and type(choice) is type(value):
            return choice
        if isinstance(value, str) and str(choice) == value:
            return choice
    raise _NotAllowedError


def _read_bool(value: object) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise _NotAllowedError


def _read_int(value: object) -> int:
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    if isinstance(value, str):
        try:
            return int(value)
        except ValueError:
            pass
    raise _NotAllowedError


def _read_float(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise _NotAllowedError
    try:
        number = float(value)
    except (ValueError, OverflowError):
        raise _NotAllowedError from None
    if not math.isfinite(number):
        raise _NotAllowedError
    return number


def _read_str(value: object) -> str:
    if not isinstance(value, str):
        raise _NotAllowedError
    return value


_SCALARS = {bool: _read_bool, int: _read_int, float: _read_float, str: _read_str}
