"""The exit codes of the ``rpeg`` command; public, so that scripts and CI can name them."""

from __future__ import annotations

import enum

__all__ = ["ExitCode"]


class ExitCode(enum.IntEnum):
    """What the exit status of ``rpeg`` says."""

    DONE = 0
    """The command did what was asked."""

    NO = 1
    """The answer is no: no feasible plan, a verification failed."""

    USAGE = 2
    """The command line or a setting is wrong."""

    PLUGIN = 3
    """A plugin is missing, broken, or misbehaved."""

    BAD_INPUT = 4
    """A file that the user gave is wrong."""

    EXECUTION_FAILED = 5
    """A backend started a run and the run failed."""

    INTERNAL = 70
    """A defect of RPEG itself."""

    OUTPUT = 74
    """The result could not be written to standard output."""

    INTERRUPTED = 130
    """Ctrl-C."""

    PIPE = 141
    """Whoever read standard output stopped before its end, e.g. head."""
