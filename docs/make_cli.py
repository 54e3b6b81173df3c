"""Write docs/cli.md from the help of every command: ``python docs/make_cli.py``.

A test compares the file with what this makes.
"""

from __future__ import annotations

from pathlib import Path

import click

from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.cli.main import COMMANDS, cli

__all__ = ["PAGE", "render"]

PAGE = Path(__file__).with_name("cli.md")
WIDTH = 100

INTRODUCTION = """\
# Commands

<!-- Made by docs/make_cli.py from the help texts in rpeg_core/cli; change those. -->

Results go to stdout, progress and warnings to stderr. In a pipe tables are tab-separated and nothing is cut;
`--json` prints one document whose first key is its schema number; of a command that ends with an error it has the
key `error` with `code`, `what`, `facts`, `hint` and `exit_code`.

| exit code | |
|---|---|
{codes}

| environment | |
|---|---|
| `RPEG_DISABLE_PLUGINS` | plugins not to load: `name` or `kind:name`, separated by commas or blanks |
| `RPEG_DEBUG` | when set, a defect of RPEG shows its traceback |
| `NO_COLOR` | when set, no colours |
| `XDG_CACHE_HOME` | where the measurement of the hardware profile `host` is kept, in `rpeg/`; by default `~/.cache` |
| `NUMBA_CACHE_DIR` | where the compiled search is kept; by default beside the package, or in the user's cache |
"""

MEANINGS = {
    ExitCode.DONE: "done",
    ExitCode.NO: "the answer is no: no plan fits, a verification failed",
    ExitCode.USAGE: "the command line or a setting is wrong",
    ExitCode.PLUGIN: "a plugin is missing, broken, or misbehaved",
    ExitCode.BAD_INPUT: "a file is wrong",
    ExitCode.EXECUTION_FAILED: "a run was started and failed",
    ExitCode.INTERNAL: "a defect of RPEG",
    ExitCode.OUTPUT: "standard output is closed, or its file cannot take the result",
    ExitCode.INTERRUPTED: "Ctrl-C; `rpeg plan` has written the best plan so far, `rpeg run` a valid trace, "
    "`rpeg profile-lengths` what it measured; the last two also after SIGTERM, and SIGHUP as of a closed terminal",
    ExitCode.PIPE: "who read standard output stopped before its end",
}


def render() -> str:
    """The whole page."""
    codes = "\n".join(f"| {code.value} | {MEANINGS[code]} |" for code in ExitCode)
    sections = [_section("rpeg", cli)]
    with click.Context(cli, info_name="rpeg") as context:
        sections += [_section(f"rpeg {name}", cli.get_command(context, name)) for name in COMMANDS]
    return "\n".join([INTRODUCTION.format(codes=codes), *sections])


def _section(name: str, command: click.Command) -> str:
    context = click.Context(
        command, info_name=name, terminal_width=WIDTH, max_content_width=WIDTH, help_option_names=["-h", "--help"]
    )
    return f"## {name}\n\n```text\n{command.get_help(context)}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
