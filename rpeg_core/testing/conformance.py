"""Does a plugin keep the contract of its kind? One list of checks behind a command, a function and a decorator.

In a shell, ``rpeg check hardware:gh200``. In the tests of a plugin::

    from rpeg_core.testing.conformance import parametrize_checks
    from rpeg_plugin_acme import rpeg_hardware


    @parametrize_checks(rpeg_hardware())
    def test_conforms(check):
        check()

Checks need no other plugin and no hardware. A check that passes promises little more than its one sentence; that
numbers are *right* is for the tests of the plugin.

.. versionadded:: 0.1
"""

from __future__ import annotations

import contextlib
import enum
import functools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import attrs

import rpeg_core.records
from rpeg_core.errors import RpegError
from rpeg_core.plugins.kinds import ALGORITHM, BACKEND, COST, HARDWARE, KINDS, SEARCH, PluginKind
from rpeg_core.testing.checks import algorithm, backend, cost, hardware, search
from rpeg_core.testing.checks.common import record_rules, settings_rules
from rpeg_core.testing.checks.outcome import CheckFailedError, CheckSkippedError, RecordCheck

__all__ = [
    "CheckFailedError",
    "CheckResult",
    "CheckSkippedError",
    "Outcome",
    "checks_for",
    "conformance",
    "parametrize_checks",
]

Check = Callable[[], None]
"""Raises when the record does not conform: :class:`CheckFailedError`, or whatever the plugin raised."""

_OF_KIND: Mapping[str, Callable[[Any], tuple[RecordCheck, ...]]] = {
    ALGORITHM.name: lambda record: algorithm.CHECKS,
    HARDWARE.name: hardware.checks,
    COST.name: cost.checks,
    SEARCH.name: search.checks,
    BACKEND.name: backend.checks,
}


class Outcome(enum.StrEnum):
    """How a check ended."""

    PASSED = "passed"
    FAILED = "failed"
    SKIPPED = "skipped"


@attrs.frozen(kw_only=True)
class CheckResult:
    """One check of one record.

    Attributes:
        record: the name of the record.
        check: the name of the check.
        outcome: how it ended.
        message: why, empty when passed.
    """

    record: str
    check: str
    outcome: Outcome
    message: str = ""


def checks_for(record: Any) -> Iterator[tuple[str, Check]]:
    """(name, check) of every check that applies to a record of any kind.

    Raises:
        TypeError: it is no record of a plugin.
    """
    kind = _kind_of(record)
    yield "record", functools.partial(record_rules, kind, record)
    yield "settings", functools.partial(settings_rules, record)
    for name, check in _OF_KIND[kind.name](record):
        yield name, functools.partial(check, record)


def conformance(record: Any) -> tuple[CheckResult, ...]:
    """Run every check of a record; what the plugin prints goes to stderr.

    Raises:
        TypeError: it is no record of a plugin.
    """
    return tuple(_result(record, name, check) for name, check in checks_for(record))


def parametrize_checks(records: Iterable[Any], *, expected_failures: Mapping[str, str] | None = None) -> Any:
    """A pytest decorator: the test gets each check of each record as its argument ``check``, and calls it.

    Args:
        records: records of any kinds, e.g. what the hook of the plugin returns.
        expected_failures: ``record-check``, the id that pytest shows, to the reason why it may fail; when it passes
            the test fails.

    Raises:
        ValueError: an expected failure names no check.
    """
    import pytest

    reasons = dict(expected_failures or {})
    parameters = []
    for record in records:
        for name, check in checks_for(record):
            label = f"{record.name}-{name}"
            reason = reasons.pop(label, None)
            marks = [] if reason is None else [pytest.mark.xfail(reason=reason, strict=True)]
            parameters.append(pytest.param(_skipping(check), id=label, marks=marks))
    if reasons:
        raise ValueError(f"expected_failures names no check: {', '.join(sorted(reasons))}")
    return pytest.mark.parametrize("check", parameters)


def _kind_of(record: Any) -> PluginKind:
    for kind in KINDS:
        if isinstance(record, tuple(getattr(rpeg_core.records, name) for name in kind.records)):
            return kind
    expected = ", ".join(name for kind in KINDS for name in kind.records)
    raise TypeError(f"{type(record).__name__} is no record of a plugin; allowed: {expected}")


def _skipping(check: Check) -> Check:
    @functools.wraps(check)
    def run() -> None:
        import pytest

        try:
            check()
        except CheckSkippedError as reason:
            pytest.skip(str(reason))

    return run


def _result(record: Any, name: str, check: Check) -> CheckResult:
    outcome, message = Outcome.PASSED, ""
    try:
        with contextlib.redirect_stdout(sys.stderr):
            check()
    except KeyboardInterrupt:
        raise
    except CheckSkippedError as reason:
        outcome, message = Outcome.SKIPPED, str(reason)
    except BaseException as error:  # as for loading: nothing that a plugin raises ends the program
        outcome, message = Outcome.FAILED, _text(error)
    return CheckResult(record=str(record.name), check=name, outcome=outcome, message=message)


def _text(error: BaseException) -> str:
    if isinstance(error, CheckFailedError):
        return str(error)
    if isinstance(error, RpegError):
        return "; ".join([error.what, *error.facts])
    return f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
