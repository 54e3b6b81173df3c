"""Loading: each way in which a plugin can be broken has its status and message, and harms no other plugin."""

from __future__ import annotations

import sys

import pytest

from rpeg_core.errors import PluginError

HEAD = "import attrs\nfrom rpeg_core.records import *\nfrom rpeg_core import hookimpl\n"

SEARCH = HEAD + (
    "@hookimpl\n"
    "def rpeg_search_strategies():\n"
    "    return SearchStrategy(\n"
    "        name={name!r}, summary={summary!r}, guarantee={guarantee!r}, run=print{more}\n"
    "    )\n"
)

BROKEN = {
    "import error": (
        "import no_such_module_at_all\n",
        "import-failed",
        "ModuleNotFoundError: No module named 'no_such_module_at_all'",
    ),
    "exit on import": ("import sys\nsys.exit(3)\n", "import-failed", "SystemExit: 3"),
    "bare BaseException": (
        "class Stop(BaseException): pass\nraise Stop\n",
        "import-failed",
        "Stop",
    ),
    "syntax error": ("def (:\n", "import-failed", "SyntaxError: invalid syntax ({module}.py, line 1)"),
    "no hook": (
        "def rpeg_hardware():\n    return []\n",
        "invalid",
        "no function of '{module}' marked @hookimpl implements rpeg_hardware()",
    ),
    "misspelt hook": (
        HEAD + "@hookimpl\ndef rpeg_hardwares():\n    return []\n",
        "invalid",
        "rpeg_hardwares() is marked @hookimpl, but there is no such hook; did you mean 'rpeg_hardware'?",
    ),
    "unknown argument": (
        HEAD + "@hookimpl\ndef rpeg_hardware(colour):\n    return []\n",
        "invalid",
        "PluginValidationError: Plugin 'hardware:broken' for hook 'rpeg_hardware'",
    ),
    "hook raises": (
        HEAD + "@hookimpl\ndef rpeg_hardware():\n    raise KeyError('memory')\n",
        "invalid",
        "rpeg_hardware() raised KeyError: 'memory'",
    ),
    "hook raises while it yields": (
        HEAD + "@hookimpl\ndef rpeg_hardware():\n    yield from ()\n    raise SystemExit\n",
        "invalid",
        "rpeg_hardware() raised SystemExit",
    ),
    "returns None": (
        HEAD + "@hookimpl\ndef rpeg_hardware():\n    pass\n",
        "invalid",
        "rpeg_hardware() returned None",
    ),
    "wrong return type": (
        HEAD + "@hookimpl\ndef rpeg_hardware():\n    return {'name': 'x'}\n",
        "invalid",
        "rpeg_hardware() returned str; it must return HardwareProfile or MeasuredHardware records",
    ),
    "text instead of records": (
        HEAD + "@hookimpl\ndef rpeg_hardware():\n    return 'gh200'\n",
        "invalid",
        "rpeg_hardware() returned str; it must return HardwareProfile or MeasuredHardware records",
    ),
}


@pytest.mark.parametrize("case", sorted(BROKEN))
def test_a_broken_plugin_has_its_status_and_message_and_others_still_work(installed, case) -> None:
    source, status, message = BROKEN[case]
    module = installed.add("rpeg-plugin-broken", "rpeg.hardware", "broken", source)
    installed.hardware("rpeg-plugin-good", "good")
    registry = installed.registry()
    assert [record.name for record in registry.records("hardware")] == ["good"]
    broken, good = registry.plugins()
    assert (str(broken.status), broken.message) == (status, message.format(module=module))
    assert (str(good.status), good.message) == ("ok", "")
    assert registry.problems == (
        f"plugin hardware:broken (rpeg-plugin-broken 0.1.0) is not used: {status}: {broken.message}",
    )


def test_the_user_may_still_interrupt_a_plugin(installed) -> None:
    installed.add("rpeg-plugin-slow", "rpeg.hardware", "slow", "raise KeyboardInterrupt\n")
    with pytest.raises(KeyboardInterrupt):
        installed.registry().records("hardware")


def test_what_a_plugin_prints_while_it_loads_goes_to_stderr(installed, capsys) -> None:
    source = HEAD + "print('hello')\n@hookimpl\ndef rpeg_hardware():\n    print('again')\n    return []\n"
    installed.add("rpeg-plugin-loud", "rpeg.hardware", "loud", source)
    installed.registry().records("hardware")
    captured = capsys.readouterr()
    assert (captured.out, captured.err) == ("", "hello\nagain\n")


def test_an_incompatible_plugin_is_never_imported(installed) -> None:
    module = installed.hardware("rpeg-plugin-new", "new", requires=["rpeg-core>=9"])
    registry = installed.registry()
    assert registry.records("hardware") == ()
    assert module not in sys.modules
    assert registry.problems == (
        "plugin hardware:new (rpeg-plugin-new 0.1.0) is not used: incompatible: "
        "needs rpeg-core >=9, 0.1.0 is installed",
    )


def test_an_entry_point_must_name_a_module(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1", module="fake_module")
    info = next(installed.path.glob("*.dist-info")) / "entry_points.txt"
    info.write_text("[rpeg.hardware]\nx1 = fake_module:rpeg_hardware\n")
    registry = installed.registry()
    registry.load("hardware")
    assert registry.plugins()[0].message == ("its entry point names 'fake_module:rpeg_hardware'; it must name a module")


def test_two_entry_points_of_one_kind_may_not_name_the_same_module(installed) -> None:
    module = installed.hardware("rpeg-plugin-x1", "x1", "x1")
    info = next(installed.path.glob("*.dist-info")) / "entry_points.txt"
    info.write_text(f"[rpeg.hardware]\nx1 = {module}\nx1-again = {module}\n")
    registry = installed.registry()
    assert [record.name for record in registry.records("hardware")] == ["x1"]
    assert [(info.name, str(info.status), info.message) for info in registry.plugins()] == [
        ("x1", "ok", ""),
        ("x1-again", "invalid", f"its module {module!r} is the entry point 'hardware:x1' already"),
    ]


def test_one_module_may_serve_two_kinds(installed) -> None:
    source = HEAD + (
        "@hookimpl\ndef rpeg_hardware():\n    return []\n\n"
        "@hookimpl\ndef rpeg_search_strategies():\n"
        "    return SearchStrategy(name='s', summary='S.', guarantee='optimal', run=print)\n"
    )
    module = installed.add("rpeg-plugin-both", "rpeg.hardware", "both", source)
    info = next(installed.path.glob("*.dist-info")) / "entry_points.txt"
    info.write_text(f"[rpeg.hardware]\nboth = {module}\n[rpeg.search]\nboth = {module}\n")
    registry = installed.registry()
    assert registry.records("hardware") == ()
    assert [record.plugin for record in registry.records("search")] == ["search:both"]
    assert registry.problems == ()


BAD_SEARCH = {
    "name": (
        {"name": "My Search"},
        "SearchStrategy 'My Search': name must be lower-case letters, digits, '.', '_' and '-'",
    ),
    "summary": ({"summary": ""}, "SearchStrategy 's': summary must be one line of text"),
    "guarantee": (
        {"guarantee": "best"},
        "SearchStrategy 's': guarantee is 'best'; it must be one of baseline, heuristic, optimal",
    ),
    "settings without attrs": (
        {"more": ", settings=dict"},
        "SearchStrategy 's': settings is <class 'dict'>; it must be an attrs class",
    ),
    "settings without help": (
        {"more": ", settings=attrs.make_class('Settings', {'seed': attrs.field(default=0, type=int)})"},
        "SearchStrategy 's': Settings.seed has no help text; define it with rpeg_core.setting(default, help=...)",
    ),
}


@pytest.mark.parametrize("case", sorted(BAD_SEARCH))
def test_a_bad_record_names_the_record_and_the_rule(installed, case) -> None:
    changes, message = BAD_SEARCH[case]
    values = {"name": "s", "summary": "S.", "guarantee": "optimal", "more": "", **changes}
    installed.add("rpeg-plugin-s", "rpeg.search", "s", SEARCH.format(**values))
    registry = installed.registry()
    with pytest.raises(PluginError) as caught:
        registry.get("search", "s")
    assert str(caught.value) == (
        "error[plugin]: search 's' cannot be used\n"
        "  plugin: search:s from rpeg-plugin-s 0.1.0\n"
        "  status: invalid\n"
        f"  reason: {message}\n"
        "hint: report it to the authors of rpeg-plugin-s"
    )


COST = HEAD + "@hookimpl\ndef rpeg_cost_terms():\n    return CostTerm(summary='S.', quantity='q', {more})\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "name='toy', target=Target.OPERATOR, function=print",
            "CostTerm 'toy': name must be 'model.term'",
        ),
        (
            "name='toy.a', target='op', function=print",
            "CostTerm 'toy.a': target is 'op'; it must be a Target",
        ),
        (
            "name='toy.a', target=Target.MEMORY, function=print",
            "CostTerm 'toy.a': memory must be a MemoryKind when target is Target.MEMORY, else None",
        ),
        (
            "name='toy.a', target=Target.TRANSFER, function=print, memory=MemoryKind.WEIGHTS",
            "CostTerm 'toy.a': memory must be a MemoryKind when target is Target.MEMORY, else None",
        ),
        ("name='toy.a', target=Target.OPERATOR, function=3", "CostTerm 'toy.a': function must be callable"),
    ],
)
def test_a_bad_cost_term_names_the_rule(installed, more, message) -> None:
    installed.add("rpeg-plugin-toy", "rpeg.costs", "toy", COST.format(more=more))
    registry = installed.registry()
    registry.load("cost")
    assert registry.plugins()[0].message == message


BACKEND = HEAD + "@hookimpl\ndef rpeg_backends():\n    return BackendSpec(name='b', summary='S.', {more})\n"


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (
            "can=frozenset({'fly'}), probe=print",
            "BackendSpec 'b': can is ['fly']; it must be a non-empty subset of ['execute', 'export']",
        ),
        (
            "can=frozenset({'execute'}), probe=print",
            "BackendSpec 'b': open must be callable when can has 'execute', else None",
        ),
        (
            "can=frozenset({'export'}), probe=None, render=print",
            "BackendSpec 'b': probe must be callable",
        ),
    ],
)
def test_a_bad_backend_names_the_rule(installed, more, message) -> None:
    installed.add("rpeg-plugin-b", "rpeg.backends", "b", BACKEND.format(more=more))
    registry = installed.registry()
    registry.load("backend")
    assert registry.plugins()[0].message == message


ALGORITHM = HEAD + (
    "@hookimpl\ndef rpeg_algorithms():\n"
    "    return AlgorithmTemplate(name='a', summary='S.', build=print, roles={roles})\n"
)


@pytest.mark.parametrize(
    ("roles", "message"),
    [
        (
            "(ModelRole(name='m', trainable=False, head='lm'),)",
            "AlgorithmTemplate 'a': no role is trainable",
        ),
        (
            "(ModelRole(name='m', trainable=True, head='lm'),) * 2",
            "AlgorithmTemplate 'a': two roles have the same name",
        ),
    ],
)
def test_a_bad_algorithm_names_the_rule(installed, roles, message) -> None:
    installed.add("rpeg-plugin-a", "rpeg.algorithms", "a", ALGORITHM.format(roles=roles))
    registry = installed.registry()
    registry.load("algorithm")
    assert registry.plugins()[0].message == message


def test_a_plugin_may_not_return_two_records_of_one_name(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1", "same", "same")
    registry = installed.registry()
    registry.load("hardware")
    assert registry.plugins()[0].message == "two records are named 'same'"
