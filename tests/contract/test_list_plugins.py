"""``rpeg list-plugins`` and what every command shares: exit codes, the form of errors, what is imported."""

from __future__ import annotations

import json
import resource

import pytest

from rpeg_core.cli import ui
from rpeg_core.cli.main import COMMANDS, main

HEAVY = ("torch", "numpy", "networkx", "numba", "scipy", "rich", "yaml", "cattrs")

IMPORTED = """
import sys
from rpeg_core.cli.main import main
code = main({arguments!r})
print("imported:", *sorted(name for name in sys.modules if name in {heavy!r} or name.startswith("fake_")))
sys.exit(code)
"""


def table(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.splitlines()]


def test_with_nothing_installed_it_lists_nothing_and_says_how_to_get_plugins(installed) -> None:
    done = installed.rpeg("list-plugins")
    assert (done.returncode, done.stdout, done.stderr) == (
        0,
        "",
        "no plugins are installed\nhint: pip install 'rpeg-core[all]'\n",
    )


def test_each_status_that_metadata_tells_is_listed(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1", version="0.1.2")
    installed.search("rpeg-plugin-off", "off")
    installed.hardware("rpeg-plugin-new", "new", requires=["rpeg-core>=9"])
    installed.costs("rpeg-plugin-toy", "toy", "toy.a")
    installed.costs("other-toy", "toy", "toy.a")
    done = installed.rpeg("list-plugins", env={"RPEG_DISABLE_PLUGINS": "off"})
    twice = "cost 'toy' is offered by other-toy 0.1.0 and rpeg-plugin-toy 0.1.0"
    assert (done.returncode, done.stderr) == (0, "")
    assert table(done.stdout) == [
        ["kind", "name", "distribution", "version", "status", "message"],
        [
            "hardware",
            "new",
            "rpeg-plugin-new",
            "0.1.0",
            "incompatible",
            "needs rpeg-core >=9, 0.1.0 is installed",
        ],
        ["hardware", "x1", "rpeg-plugin-x1", "0.1.2", "available", ""],
        ["cost", "toy", "other-toy", "0.1.0", "duplicate", twice],
        ["cost", "toy", "rpeg-plugin-toy", "0.1.0", "duplicate", twice],
        ["search", "off", "rpeg-plugin-off", "0.1.0", "disabled", "named in RPEG_DISABLE_PLUGINS"],
    ]


def test_load_shows_what_works_and_warns_about_what_does_not(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    installed.add("rpeg-plugin-zap", "rpeg.search", "zap", "import sys; sys.exit('bye')\n")
    done = installed.rpeg("list-plugins", "--load")
    assert done.returncode == 0
    assert [row[4:] for row in table(done.stdout)] == [
        ["status", "message"],
        ["ok", ""],
        ["import-failed", "SystemExit: bye"],
    ]
    assert done.stderr == (
        "warning: plugin search:zap (rpeg-plugin-zap 0.1.0) is not used: import-failed: SystemExit: bye\n"
    )


def test_strict_plugins_makes_the_failure_the_error(installed) -> None:
    module = installed.add("rpeg-plugin-zap", "rpeg.search", "zap", "import sys; sys.exit('bye')\n")
    done = installed.rpeg("list-plugins", "--load", "--strict-plugins")
    assert (done.returncode, done.stdout, done.stderr) == (
        3,
        "",
        "error[plugin]: plugin 'search:zap' cannot be used\n"
        "  plugin: search:zap from rpeg-plugin-zap 0.1.0\n"
        "  status: import-failed\n"
        "  reason: SystemExit: bye\n"
        f"hint: python -c 'import {module}' shows where it fails\n",
    )


def test_json_is_one_document_with_a_schema_number(installed) -> None:
    module = installed.hardware("rpeg-plugin-x1", "x1")
    done = installed.rpeg("list-plugins", "--json")
    assert json.loads(done.stdout) == {
        "schema": 1,
        "rpeg_core": "0.1.0",
        "plugins": [
            {
                "kind": "hardware",
                "name": "x1",
                "module": module,
                "distribution": "rpeg-plugin-x1",
                "version": "0.1.0",
                "requires_core": "<0.2,>=0.1",
                "status": "available",
                "message": "",
            }
        ],
    }


def test_kind_selects_and_an_unknown_kind_is_a_usage_error(installed) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    installed.search("rpeg-plugin-hop", "hop")
    assert [row[1] for row in table(installed.rpeg("list-plugins", "--kind", "search").stdout)[1:]] == ["hop"]
    done = installed.rpeg("list-plugins", "--kind", "serch")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.splitlines()[0] == "error[usage]: 'serch' is not a kind of plugin"


@pytest.mark.parametrize("arguments", [["list-plugins"], ["list-plugins", "--json"], ["--help"], ["--version"]])
def test_neither_help_nor_list_plugins_imports_a_plugin_or_anything_heavy(installed, arguments) -> None:
    installed.hardware("rpeg-plugin-x1", "x1")
    done = installed.python("-c", IMPORTED.format(arguments=arguments, heavy=HEAVY))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "imported:"


def test_loading_hardware_imports_no_search_plugin_and_nothing_heavy(installed) -> None:
    module = installed.hardware("rpeg-plugin-x1", "x1")
    installed.search("rpeg-plugin-hop", "hop")
    done = installed.python("-c", IMPORTED.format(arguments=["show", "hardware", "x1"], heavy=HEAVY))
    assert done.stdout.splitlines()[-1] == f"imported: {module}"


def test_list_plugins_answers_in_a_third_of_a_second(installed) -> None:
    for index in range(15):
        installed.hardware(f"rpeg-plugin-x{index}", f"x{index}")
    installed.rpeg("list-plugins")  # writes the bytecode

    def seconds(*arguments: str) -> float:
        """Processor time of the command, which other work on the machine does not stretch."""
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        installed.python(*arguments)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime

    started = min(seconds("-c", "pass") for _ in range(5))
    listed = min(seconds("-m", "rpeg_core", "list-plugins") for _ in range(5))
    assert listed - started < 0.3


def test_help_lists_every_command_with_its_line() -> None:
    ran: list[str] = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ui, "print_text", ran.append)
        assert main([]) == 0
    for name, (_, line) in COMMANDS.items():
        assert f"{name} " in ran[0]
        assert line in ran[0]


@pytest.mark.parametrize(
    ("arguments", "stderr"),
    [
        (
            ["list-plugin"],
            "error[usage]: there is no command 'list-plugin'\n"
            f"  allowed: {', '.join(COMMANDS)}\n"
            "hint: did you mean 'list-plugins'?\n",
        ),
        (
            ["list-plugins", "--colour"],
            "error[usage]: no such option '--colour'\nhint: rpeg list-plugins --help\n",
        ),
        (["show"], "error[usage]: missing argument 'KIND'\nhint: rpeg show --help\n"),
    ],
)
def test_a_wrong_command_line_has_the_form_of_every_error(arguments, stderr, capsys) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr() == ("", stderr)


@pytest.mark.parametrize(
    ("raised", "code", "stderr"),
    [
        (
            ZeroDivisionError("division by zero"),
            70,
            "error[internal]: ZeroDivisionError: division by zero\nhint: set RPEG_DEBUG=1 for the traceback\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_a_defect_and_an_interrupt_have_their_exit_codes(monkeypatch, capsys, raised, code, stderr) -> None:
    def fail(*arguments: object) -> None:
        raise raised

    monkeypatch.delenv("RPEG_DEBUG", raising=False)
    monkeypatch.setattr("rpeg_core.cli.context.CommandContext.registry", property(fail))
    assert main(["list-plugins"]) == code
    assert capsys.readouterr().err.lstrip("\n") == stderr


def test_the_traceback_of_a_defect_is_shown_on_request(monkeypatch, capsys) -> None:
    def fail(*arguments: object) -> None:
        raise ZeroDivisionError

    monkeypatch.setenv("RPEG_DEBUG", "1")
    monkeypatch.setattr("rpeg_core.cli.context.CommandContext.registry", property(fail))
    assert main(["list-plugins"]) == 70
    assert "Traceback (most recent call last)" in capsys.readouterr().err


def test_a_reader_that_stops_early_sees_no_traceback(installed) -> None:
    for index in range(3):
        installed.hardware(f"rpeg-plugin-x{index}", f"x{index}")
    script = (
        "import os, sys\n"
        "reader, writer = os.pipe(); os.close(reader); os.dup2(writer, 1)\n"
        "from rpeg_core.cli.main import main\n"
        "sys.exit(main(['list-plugins']))\n"
    )
    assert installed.python("-c", script).stderr == ""


def test_text_of_plugins_is_never_markup_nor_terminal_control(monkeypatch, capsys) -> None:
    monkeypatch.setattr(ui, "is_terminal", lambda stream=None: True)
    ui.print_table(["a [b]", "n"], [["[red]x[/red] [", 1], ["\x1b[31mred\x07", 2]])
    out = capsys.readouterr().out
    assert "[red]x[/red] [" in out
    assert " [31mred " in out
    assert "\x1b[31m" not in out


def test_in_a_pipe_cells_are_complete_and_one_row_is_one_line(capsys) -> None:
    ui.print_table(["a", "b", "c"], [["x" * 500, "two\nlines\there", None], [0.1, True, ("p", "q")]])
    assert capsys.readouterr().out == ("a\tb\tc\n" + "x" * 500 + "\ttwo lines here\t\n" + "0.1\ttrue\tp, q\n")
