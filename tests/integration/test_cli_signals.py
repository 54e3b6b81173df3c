"""What a command that waits for workers does when its terminal is closed; real terminals, real signals."""

from __future__ import annotations

import fcntl
import os
import pty
import signal
import subprocess
import sys
import termios
import textwrap
from pathlib import Path

import pytest

COMMAND = """
    import sys
    from pathlib import Path

    from rpeg_core.cli import ui
    from rpeg_core.cli.backends import interruptible

    with ui.live() as show, interruptible("stopping") as pressed:
        show(["running"])
        Path("ready").touch()
        was_set = pressed.wait(float(sys.argv[1]))
    ui.print_text("the result")
    Path("ended").write_text(str(was_set))
"""


def start(folder: Path, terminal: int, seconds: float, *, ignored: bool = False) -> subprocess.Popen[bytes]:
    """The command in a session of its own that the terminal controls, once it waits for ``seconds``."""

    def take_terminal() -> None:
        os.setsid()
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)
        if ignored:  # as nohup does
            signal.signal(signal.SIGHUP, signal.SIG_IGN)

    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(COMMAND), str(seconds)],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(p for p in sys.path if p)},
        stdin=terminal,
        stdout=terminal,
        stderr=terminal,
        preexec_fn=take_terminal,
    )
    while not (folder / "ready").exists():
        assert process.poll() is None
    return process


@pytest.mark.parametrize("ignored", [False, True], ids=["closed", "closed under nohup"])
def test_a_closed_terminal_ends_a_command_in_good_order(tmp_path: Path, ignored: bool) -> None:
    outer, inner = pty.openpty()
    process = start(tmp_path, inner, 1.0 if ignored else 60.0, ignored=ignored)
    os.close(inner)
    os.close(outer)
    status = process.wait(60)
    if ignored:  # it is not told to stop; its result has nowhere to go
        assert status != -signal.SIGHUP
        assert not (tmp_path / "ended").exists() or (tmp_path / "ended").read_text() == "False"
    else:
        assert status == 0
        assert (tmp_path / "ended").read_text() == "True"
