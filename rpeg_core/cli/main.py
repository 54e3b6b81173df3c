"""The ``rpeg`` command: a table of commands that are imported when used, and the one place that ends a run.

Every way to end has its exit code (:class:`rpeg_core.cli.exit_codes.ExitCode`) and, when it is an error, the
text form of :class:`rpeg_core.errors.RpegError`.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
import traceback
from collections.abc import Sequence

import click

from rpeg_core._version import __version__
from rpeg_core.cli import ui
from rpeg_core.cli.context import CommandContext
from rpeg_core.cli.exit_codes import ExitCode
from rpeg_core.errors import MissingPluginError, OutputError, PluginError, RpegError, UsageError, suggest

__all__ = ["cli", "main"]

COMMANDS = {
    "init": ("rpeg_core.cli.init:command", "Write an experiment file to start from."),
    "plan": ("rpeg_core.cli.plan:command", "Search for the best plan of an experiment."),
    "predict": ("rpeg_core.cli.predict:command", "Time and memory of a plan that the experiment pins."),
    "explain": ("rpeg_core.cli.explain:command", "Show where the time and memory of a plan go."),
    "sweep": ("rpeg_core.cli.sweep:command", "Plan over GPU counts, hardware, batch sizes or lengths."),
    "profile-lengths": ("rpeg_core.cli.profile_lengths:command", "Measure how long the actor's responses are."),
    "run": ("rpeg_core.cli.run:command", "Execute a plan and compare its time with the prediction."),
    "verify": ("rpeg_core.cli.verify:command", "Check that a trace is a run of a plan."),
    "calibrate": ("rpeg_core.cli.calibrate:command", "Measure this machine and write its hardware profile."),
    "validate-model": ("rpeg_core.cli.validate_model:command", "Compare predictions with measured runs."),
    "list-plugins": ("rpeg_core.cli.list_plugins:command", "List the installed plugins."),
    "show": ("rpeg_core.cli.show:command", "Show what plugins offer, with settings, units and sources."),
    "doctor": ("rpeg_core.cli.doctor:command", "Check this installation."),
    "check": ("rpeg_core.cli.check:command", "Check that plugins keep the contract of their kind."),
}
"""Command name to ``module:attribute`` and the line that ``rpeg --help`` shows."""


class LazyGroup(click.Group):
    """Imports the module of a command when that command is used, and none for ``--help``."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(COMMANDS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        if cmd_name not in COMMANDS:
            return None
        module, _, attribute = COMMANDS[cmd_name][0].partition(":")
        command: click.Command = getattr(importlib.import_module(module), attribute)
        if not any(parameter.name == "strict_plugins" for parameter in command.params):
            command.params.append(_strict_plugins())
        return command

    def resolve_command(
        self, ctx: click.Context, args: list[str]
    ) -> tuple[str | None, click.Command | None, list[str]]:
        if args and not args[0].startswith("-") and args[0] not in COMMANDS:
            raise UsageError(
                f"there is no command {args[0]!r}",
                facts=[f"allowed: {', '.join(COMMANDS)}"],
                hint=suggest(args[0], COMMANDS),
            )
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        with formatter.section("Commands"):
            formatter.write_dl([(name, text) for name, (_, text) in COMMANDS.items()])


def _strict_plugins() -> click.Option:
    def remember(ctx: click.Context, parameter: click.Parameter, value: bool) -> None:
        ctx.ensure_object(CommandContext).strict_plugins = value

    return click.Option(
        ["--strict-plugins"],
        is_flag=True,
        expose_value=False,
        is_eager=True,
        callback=remember,
        help="Make any plugin that fails an error.",
    )


@click.group(
    cls=LazyGroup,
    invoke_without_command=True,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.version_option(__version__, prog_name="rpeg", message="%(prog)s %(version)s")
@click.pass_context
def cli(ctx: click.Context) -> None:
    """Plan RL post-training of LLMs: placement, parallelism, schedule and memory."""
    if ctx.invoked_subcommand is None:
        ui.print_text(ctx.get_help())


def main(argv: Sequence[str] | None = None) -> int:
    """Run ``rpeg`` with ``argv`` (default: the arguments of this process); returns the exit code."""
    given = sys.argv[1:] if argv is None else list(argv)
    as_json = "--json" in given[: given.index("--") if "--" in given else None]
    context = CommandContext()
    try:
        result = cli.main(args=argv, prog_name="rpeg", standalone_mode=False, obj=context)
    except (MissingPluginError, PluginError) as error:  # it says what the warnings would
        return _fail(error, as_json)
    except OutputError as error:
        _forget_output()
        return _fail(error, as_json=False)
    except RpegError as error:
        _warn(context)
        return _fail(error, as_json)
    except click.UsageError as error:
        path = error.ctx.command_path if error.ctx is not None else "rpeg"
        what = error.format_message().rstrip(".")
        return _fail(UsageError(what[:1].lower() + what[1:], hint=f"{path} --help"), as_json)
    except click.ClickException as error:
        return _fail(UsageError(error.format_message()), as_json)
    except (click.Abort, KeyboardInterrupt):
        ui.print_error("interrupted")
        _document("interrupted", "interrupted", ExitCode.INTERRUPTED, as_json)
        return ExitCode.INTERRUPTED
    except SystemExit:  # click's answer to a reader that closed the pipe early, e.g. `rpeg plan FILE | head`
        return ExitCode.PIPE
    except Exception as error:
        _warn(context)
        if os.environ.get("RPEG_DEBUG"):
            ui.print_note(traceback.format_exc().rstrip())
        what = f"{type(error).__name__}: {error}"
        ui.print_error(f"error[internal]: {what}\nhint: set RPEG_DEBUG=1 for the traceback")
        _document("internal", what, ExitCode.INTERNAL, as_json)
        return ExitCode.INTERNAL
    _warn(context)
    return result if isinstance(result, int) else ExitCode.DONE


def _fail(error: RpegError, as_json: bool) -> int:
    ui.print_error(str(error))
    _document(error.code, error.what, error.exit_code, as_json, error)
    return error.exit_code


def _document(code: str, what: str, exit_code: ExitCode, as_json: bool, error: RpegError | None = None) -> None:
    """The one JSON document of a command that ended with an error, when it was asked for JSON."""
    if not as_json:
        return
    facts, hint = ([], None) if error is None else (list(error.facts), error.hint)
    found = {"code": code, "what": what, "facts": facts, "hint": hint, "exit_code": int(exit_code)}
    with contextlib.suppress(OutputError, BrokenPipeError):  # the exit code says it all the same
        ui.print_json({**({} if error is None else error.document), "error": found})


def _forget_output() -> None:
    """Let what standard output could not take go to nowhere, or else Python would try again at its end."""
    with contextlib.suppress(OSError, AttributeError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn(context: CommandContext) -> None:
    for problem in context.problems:
        ui.print_warning(problem)
