"""Discovery: what metadata alone says about each plugin."""

from __future__ import annotations

import sys

import attrs
import pytest

from rpeg_core.plugins.discovery import PluginInfo, Status, discover, parse_disabled

REFUSE = "raise SystemExit('imported during discovery')"


def found(installed, **options: object) -> dict[str, PluginInfo]:
    return {info.key: info for info in discover(entry_points=installed.entry_points, **options)}


def test_each_entry_point_is_described_and_none_is_imported(installed) -> None:
    module = installed.add("rpeg-plugin-x1", "rpeg.hardware", "x1", REFUSE, version="0.1.7")
    assert discover(entry_points=installed.entry_points) == (
        PluginInfo(
            kind="hardware",
            name="x1",
            module=module,
            distribution="rpeg-plugin-x1",
            version="0.1.7",
            requires_core="<0.2,>=0.1",
            status=Status.AVAILABLE,
        ),
    )
    assert module not in sys.modules


def test_info_is_frozen(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    (info,) = discover(entry_points=installed.entry_points)
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        info.status = Status.OK


def test_plugins_are_sorted_by_kind_then_name_whatever_the_order_of_installation(installed) -> None:
    for name in ("zeta", "alpha"):
        installed.add(f"rpeg-plugin-{name}", "rpeg.search", name, REFUSE)
        installed.add(f"rpeg-plugin-{name}-algorithm", "rpeg.algorithms", name, REFUSE)
    assert list(found(installed)) == ["algorithm:alpha", "algorithm:zeta", "search:alpha", "search:zeta"]


def test_groups_of_other_programs_are_ignored(installed) -> None:
    installed.add("some-tool", "console_scripts", "tool", REFUSE)
    assert found(installed) == {}


@pytest.mark.parametrize(
    ("requires", "status", "message"),
    [
        (["rpeg-core>=0.1,<0.2"], "available", ""),
        (["RPEG_core~=0.1.0", "numpy"], "available", ""),
        (["rpeg-core>=0.2,<0.3"], "incompatible", "needs rpeg-core <0.3,>=0.2, 0.1.0 is installed"),
        (
            ["rpeg-core>=0.1", "rpeg-core<0.1.0"],
            "incompatible",
            "needs rpeg-core <0.1.0,>=0.1, 0.1.0 is installed",
        ),
        (["rpeg-core>=9 ; extra == 'all'", "rpeg-core"], "available", ""),
        (["numpy"], "available", "declares no requirement on rpeg-core"),
        (
            ["rpeg-core >>= 1"],
            "incompatible",
            "its metadata has a requirement that cannot be read: 'rpeg-core >>= 1'",
        ),
    ],
)
def test_the_requirement_on_core_is_checked(installed, requires, status, message) -> None:
    installed.add("rpeg-plugin-x1", "rpeg.hardware", "x1", REFUSE, requires=requires)
    info = found(installed, core_version="0.1.0")["hardware:x1"]
    assert (info.status, info.message) == (status, message)


def test_a_development_version_of_core_satisfies_the_range_it_belongs_to(installed) -> None:
    installed.add("rpeg-plugin-x1", "rpeg.hardware", "x1", REFUSE)
    assert found(installed, core_version="0.1.1.dev3")["hardware:x1"].status == "available"


@pytest.mark.parametrize("entry", ["x1", "hardware:x1"])
def test_a_plugin_can_be_disabled_by_name_or_by_kind_and_name(installed, entry) -> None:
    installed.add("rpeg-plugin-x1", "rpeg.hardware", "x1", REFUSE)
    installed.add("rpeg-plugin-x2", "rpeg.hardware", "x2", REFUSE)
    infos = found(installed, disabled=frozenset([entry]))
    assert (infos["hardware:x1"].status, infos["hardware:x1"].message) == (
        "disabled",
        "named in RPEG_DISABLE_PLUGINS",
    )
    assert infos["hardware:x2"].status == "available"


def test_disabling_one_kind_leaves_the_other_of_the_same_name(installed) -> None:
    installed.add("rpeg-plugin-x1", "rpeg.hardware", "x1", REFUSE)
    installed.add("rpeg-plugin-x1-cost", "rpeg.costs", "x1", REFUSE)
    infos = found(installed, disabled=frozenset(["cost:x1"]))
    assert {key: str(info.status) for key, info in infos.items()} == {
        "hardware:x1": "available",
        "cost:x1": "disabled",
    }


def test_two_distributions_with_the_same_kind_and_name_are_both_duplicates_and_both_named(installed) -> None:
    installed.add("rpeg-plugin-x1", "rpeg.hardware", "x1", REFUSE)
    installed.add("other-x1", "rpeg.hardware", "x1", REFUSE, version="2.0")
    infos = discover(entry_points=installed.entry_points)
    assert [(info.distribution, str(info.status), info.message) for info in infos] == [
        (name, "duplicate", "hardware 'x1' is offered by other-x1 2.0 and rpeg-plugin-x1 0.1.0")
        for name in ("other-x1", "rpeg-plugin-x1")
    ]


def test_a_disabled_or_incompatible_plugin_does_not_make_a_duplicate(installed) -> None:
    installed.add("rpeg-plugin-x1", "rpeg.hardware", "x1", REFUSE)
    installed.add("other-x1", "rpeg.hardware", "x1", REFUSE, requires=["rpeg-core>=9"])
    assert [info.status for info in discover(entry_points=installed.entry_points)] == [
        "incompatible",
        "available",
    ]


def test_the_variable_is_split_at_commas_and_spaces() -> None:
    assert parse_disabled(" gh200, cost:analytical\tppo,,") == {"gh200", "cost:analytical", "ppo"}
    assert parse_disabled("") == frozenset()
