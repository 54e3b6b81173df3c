"""Settings of plugins: reading values, naming what is wrong, describing."""

from __future__ import annotations

from typing import Literal

import attrs
import pytest

from rpeg_core.errors import SettingsError, UsageError
from rpeg_core.settings import (
    Override,
    SettingRow,
    build_settings,
    check_settings_class,
    describe,
    parse_override,
    setting,
)


@attrs.frozen(kw_only=True)
class Toy:
    seed: int = setting(0, help="Seed.", minimum=0)
    seconds: float = setting(10.0, help="Budget.", unit="s", minimum=0.0, maximum=3600.0)
    polish: bool = setting(True, help="Polish at the end.")
    label: str = setting("a", help="A label.")
    cooling: Literal["constant", "geometric"] = setting("constant", help="Schedule.")
    degree: int = setting(2, help="Degree.", allowed=(1, 2, 4))
    shares: tuple[float, ...] = setting((0.5,), help="Shares.", minimum=0.0)
    limit: int | None = setting(None, help="Limit.", minimum=1)


def build(**values: object) -> Toy:
    return build_settings(Toy, values, where="settings.toy")


def error_text(**values: object) -> str:
    with pytest.raises(SettingsError) as caught:
        build(**values)
    return str(caught.value)


@pytest.mark.parametrize(
    ("name", "given", "expected"),
    [
        ("seed", 3, 3),
        ("seed", "3", 3),
        ("seconds", 5, 5.0),
        ("seconds", "1e-3", 0.001),
        ("polish", False, False),
        ("polish", "False", False),
        ("label", "12", "12"),
        ("cooling", "geometric", "geometric"),
        ("degree", "4", 4),
        ("shares", [1, 2.5], (1.0, 2.5)),
        ("shares", "1,2.5", (1.0, 2.5)),
        ("limit", None, None),
        ("limit", "null", None),
        ("limit", "7", 7),
    ],
)
def test_values_of_files_and_text_of_the_command_line_are_read_alike(
    name: str, given: object, expected: object
) -> None:
    value = getattr(build(**{name: given}), name)
    assert value == expected
    assert type(value) is type(expected)


@pytest.mark.parametrize(
    ("name", "value", "allowed"),
    [
        ("seed", "x", "an integer of at least 0"),
        ("seed", -1, "an integer of at least 0"),
        ("seed", True, "an integer of at least 0"),
        ("seed", 1.0, "an integer of at least 0"),
        ("seconds", "soon", "a finite number of at least 0.0 and at most 3600.0"),
        ("seconds", float("nan"), "a finite number of at least 0.0 and at most 3600.0"),
        ("seconds", 3601, "a finite number of at least 0.0 and at most 3600.0"),
        ("polish", 1, "true or false"),
        ("label", 12, "text"),
        ("cooling", "linear", "one of 'constant', 'geometric'"),
        ("degree", 3, "one of 1, 2, 4"),
        ("shares", [1, -1], "a list, each a finite number of at least 0.0"),
        ("shares", 1.0, "a list, each a finite number of at least 0.0"),
        ("limit", 0, "an integer of at least 1, or null"),
    ],
)
def test_a_value_that_is_not_allowed_is_named_with_what_is(name: str, value: object, allowed: str) -> None:
    assert error_text(**{name: value}) == (f"error[settings]: settings.toy.{name} is {value!r}\n  allowed: {allowed}")


def test_an_unknown_name_is_an_error_with_a_suggestion() -> None:
    assert error_text(sed=1) == (
        "error[settings]: settings.toy.sed is not a setting\n"
        "  allowed: cooling, degree, label, limit, polish, seconds, seed, shares\n"
        "hint: did you mean 'seed'?"
    )


def test_the_origin_of_a_wrong_value_is_named() -> None:
    override = parse_override("toy.seed=-3")
    with pytest.raises(SettingsError) as caught:
        build_settings(Toy, {override.name: override.text}, where="settings.toy", origins={"seed": override.origin})
    assert str(caught.value) == (
        "error[settings]: settings.toy.seed is '-3'\n  from: --set toy.seed=-3\n  allowed: an integer of at least 0"
    )


def test_settings_made_in_python_are_checked_too() -> None:
    with pytest.raises(SettingsError, match=r"Toy\.seed is -1"):
        Toy(seed=-1)


def test_a_check_across_fields_keeps_its_message() -> None:
    @attrs.frozen(kw_only=True)
    class Pair:
        low: int = setting(1, help="Low.")
        high: int = setting(2, help="High.")

        def __attrs_post_init__(self) -> None:
            if self.low > self.high:
                raise ValueError("low is above high")

    with pytest.raises(SettingsError) as caught:
        build_settings(Pair, {"low": 3}, where="settings.pair")
    assert str(caught.value) == "error[settings]: settings.pair is not allowed: low is above high"


def test_describe_gives_name_type_value_unit_origin_and_help() -> None:
    rows = describe(Toy, build(seconds=5), {"seconds": "a.yaml"})
    assert rows[1] == SettingRow(name="seconds", type="float", value=5.0, unit="s", origin="a.yaml", help="Budget.")
    assert [(row.name, row.type, row.origin) for row in rows if row.name != "seconds"] == [
        ("seed", "int", "default"),
        ("polish", "bool", "default"),
        ("label", "str", "default"),
        ("cooling", "constant | geometric", "default"),
        ("degree", "1 | 2 | 4", "default"),
        ("shares", "list of float", "default"),
        ("limit", "int or null", "default"),
    ]


def test_an_override_of_a_cost_term_keeps_the_dot_in_its_name() -> None:
    assert parse_override("analytical.gemm.scale = 2=3") == Override(target="analytical.gemm", name="scale", text="2=3")


@pytest.mark.parametrize("text", ["seed=3", "annealing.seed", ".seed=3", "annealing.=3", ""])
def test_an_override_of_another_form_is_a_usage_error(text: str) -> None:
    with pytest.raises(UsageError) as caught:
        parse_override(text)
    assert str(caught.value) == (
        f"error[usage]: --set {text!r} cannot be read\n  allowed: NAME.SETTING=VALUE, e.g. annealing.seed=3"
    )


def test_a_good_settings_class_has_no_problems() -> None:
    assert check_settings_class(Toy) == ()


def test_each_flaw_of_a_settings_class_is_named() -> None:
    @attrs.define
    class Flawed:
        bare: int
        silent: int = 3
        strange: dict[str, int] = setting(None, help="A mapping.")

    assert check_settings_class(Flawed) == (
        "Flawed.bare has no default",
        "Flawed.bare has no help text; define it with rpeg_core.setting(default, help=...)",
        "Flawed.silent has no help text; define it with rpeg_core.setting(default, help=...)",
        "Flawed.strange has the type dict[str, int], which cannot be read from text",
    )
    assert check_settings_class(dict) == ("settings is <class 'dict'>; it must be an attrs class",)


def test_a_default_that_is_not_allowed_is_a_flaw() -> None:
    @attrs.frozen
    class Flawed:
        seed: int = setting(-1, help="Seed.", minimum=0)

    assert check_settings_class(Flawed) == (
        "Flawed() does not accept its own defaults: error[settings]: Flawed.seed is -1",
    )
