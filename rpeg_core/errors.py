"""Every error that RPEG raises on purpose.

Each class has a stable ``code`` (documented, tested word for word) and the exit code of the command line.
The text has one form::

    error[code]: what (name and value)
      a fact: where, what is allowed
      another fact
    hint: the next step
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence

from rpeg_core.cli.exit_codes import ExitCode

__all__ = [
    "BackendError",
    "CostTermError",
    "DataError",
    "ExecutionError",
    "ExperimentError",
    "GraphError",
    "MissingPluginError",
    "ModelConfigError",
    "NoFeasiblePlanError",
    "OutputError",
    "PinError",
    "PlanFileError",
    "PluginError",
    "RpegError",
    "SettingsError",
    "TopologyError",
    "TraceFileError",
    "UnknownKeyError",
    "UnknownModelError",
    "UsageError",
    "suggest",
]


class RpegError(Exception):
    """The base of all errors below; raised itself never.

    Args:
        what: one line with the name and the value that is wrong.
        facts: one line each: where it is, what is allowed, what was compared.
        hint: the next step, or None when the facts already say it.

    Attributes:
        document: what a command that was asked for JSON has to say beside the error; not sent between processes.
    """

    code: str = "rpeg"
    exit_code: ExitCode = ExitCode.INTERNAL

    def __init__(self, what: str, *, facts: Sequence[str] = (), hint: str | None = None) -> None:
        super().__init__(what)
        self.what = what
        self.facts = tuple(facts)
        self.hint = hint
        self.document: Mapping[str, object] = {}

    def __str__(self) -> str:
        lines = [f"error[{self.code}]: {self.what}", *(f"  {fact}" for fact in self.facts)]
        if self.hint is not None:
            lines.append(f"hint: {self.hint}")
        return "\n".join(lines)

    def __reduce__(self) -> tuple[object, ...]:
        """Pickle with all parts (search workers send errors between processes)."""
        return _rebuild, (type(self), self.what, self.facts, self.hint)


def _rebuild(cls: type[RpegError], what: str, facts: tuple[str, ...], hint: str | None) -> RpegError:
    return cls(what, facts=facts, hint=hint)


class UsageError(RpegError):
    """The command line does not make sense."""

    code = "usage"
    exit_code = ExitCode.USAGE


class SettingsError(RpegError):
    """A plugin setting has an unknown name, a wrong type or a value that is not allowed."""

    code = "settings"
    exit_code = ExitCode.USAGE


class MissingPluginError(RpegError):
    """No installed plugin offers what was named."""

    code = "missing-plugin"
    exit_code = ExitCode.PLUGIN


class PluginError(RpegError):
    """An installed plugin cannot be used, or broke its contract."""

    code = "plugin"
    exit_code = ExitCode.PLUGIN


class CostTermError(RpegError):
    """A cost term raised, or returned something other than finite non-negative float64 values."""

    code = "cost-term"
    exit_code = ExitCode.PLUGIN


class BackendError(RpegError):
    """A backend cannot be used on this machine or for this plan."""

    code = "backend"
    exit_code = ExitCode.PLUGIN


class ExperimentError(RpegError):
    """A value of the experiment file is not allowed."""

    code = "experiment"
    exit_code = ExitCode.BAD_INPUT


class UnknownKeyError(RpegError):
    """A file has a key that nothing reads."""

    code = "unknown-key"
    exit_code = ExitCode.BAD_INPUT


class ModelConfigError(RpegError):
    """A model configuration cannot be read or describes an unsupported architecture."""

    code = "model-config"
    exit_code = ExitCode.BAD_INPUT


class UnknownModelError(RpegError):
    """A named model is neither bundled nor a file."""

    code = "unknown-model"
    exit_code = ExitCode.BAD_INPUT


class TopologyError(RpegError):
    """The cluster cannot hold what was asked for."""

    code = "topology"
    exit_code = ExitCode.BAD_INPUT


class GraphError(RpegError):
    """A graph breaks a well-formedness rule of its level."""

    code = "graph"
    exit_code = ExitCode.BAD_INPUT


class PinError(RpegError):
    """A pinned part of the plan breaks one of the legality rules P1 to P8."""

    code = "pin"
    exit_code = ExitCode.BAD_INPUT


class PlanFileError(RpegError):
    """A plan file cannot be read, or does not fit its experiment."""

    code = "plan-file"
    exit_code = ExitCode.BAD_INPUT


class TraceFileError(RpegError):
    """A trace file cannot be read or written."""

    code = "trace-file"
    exit_code = ExitCode.BAD_INPUT


class DataError(RpegError):
    """A line of a data file, prompts or preference pairs, cannot be used."""

    code = "data"
    exit_code = ExitCode.BAD_INPUT


class OutputError(RpegError):
    """The result of a command cannot be written to standard output."""

    code = "output"
    exit_code = ExitCode.OUTPUT


class NoFeasiblePlanError(RpegError):
    """Search ended and no configuration fits."""

    code = "no-feasible-plan"
    exit_code = ExitCode.NO


class ExecutionError(RpegError):
    """A run was started and failed."""

    code = "execution"
    exit_code = ExitCode.EXECUTION_FAILED


def suggest(name: str, allowed: Iterable[str]) -> str | None:
    """``did you mean 'x'?`` for the allowed name closest to ``name``, or None when none is close."""
    lowered = {candidate.lower(): candidate for candidate in sorted(allowed, reverse=True)}
    close = difflib.get_close_matches(name.lower(), sorted(lowered), n=1)
    return f"did you mean {lowered[close[0]]!r}?" if close else None
