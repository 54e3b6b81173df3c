"""What the commands that use a backend share: its settings, and Ctrl-C while its workers run."""

from __future__ import annotations

import contextlib
import signal
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from rpeg_core.cli import ui
from rpeg_core.errors import UsageError, suggest

if TYPE_CHECKING:
    from rpeg_core.records import BackendSpec

__all__ = ["backend_settings", "interruptible"]


def backend_settings(
    record: BackendSpec, settings: Mapping[str, Mapping[str, Any]], overrides: Sequence[str], why: str
) -> Any:
    """A backend's settings: those of the experiment, then of the command line.

    Args:
        record: the backend.
        settings: of the experiment.
        overrides: ``--set`` texts.
        why: nothing but the backend can be set here, in words.

    Raises:
        UsageError: an override is not of this backend.
        SettingsError: a setting does not exist or has a value that is not allowed.
    """
    from rpeg_core.settings import build_settings, parse_override

    values: dict[str, object] = dict(settings.get(record.name, {}))
    origins = dict.fromkeys(values, f"settings.{record.name}")
    for override in map(parse_override, overrides):
        if override.target != record.name:
            raise UsageError(
                f"{override.origin} does not belong to backend {record.name!r}",
                facts=[f"allowed: {record.name}.KEY=VALUE; {why}"],
                hint=suggest(override.target, [record.name]),
            )
        values[override.name] = override.text
        origins[override.name] = override.origin
    return build_settings(record.settings, values, where=f"settings.{record.name}", origins=origins)


@contextlib.contextmanager
def interruptible(note: str) -> Iterator[threading.Event]:
    """Set by the first Ctrl-C, by SIGTERM as a batch system sends it, or by SIGHUP as a terminal that is closed does.

    ``note`` answers. The second gives up. A SIGHUP that is ignored, as under ``nohup``, stays ignored.
    """
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def cancel(number: int, _: object) -> None:
        if number == signal.SIGHUP:
            ui.forget_closed_terminals(terminals)
        if pressed.is_set():
            raise KeyboardInterrupt
        pressed.set()
        ui.print_note(note)

    terminals = ui.terminals()
    numbers = [signal.SIGINT, signal.SIGTERM]
    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:
        numbers.append(signal.SIGHUP)
    before = {number: signal.signal(number, cancel) for number in numbers}
    try:
        yield pressed
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
