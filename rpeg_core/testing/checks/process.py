"""Asking a plugin something in a fresh interpreter: with another hash seed, or with nothing imported yet."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from collections.abc import Callable
from typing import Any

from rpeg_core.testing.checks.outcome import CheckFailedError, CheckSkippedError

__all__ = ["in_new_process"]

TIMEOUT_S = 120

CHILD = """
import pickle, sys
sys.path[:] = pickle.load(sys.stdin.buffer)
try:
    function, arguments = pickle.loads(pickle.load(sys.stdin.buffer))
except ModuleNotFoundError as error:
    sys.exit(f"cannot import: {error}")
sys.stdout.write(function(*arguments))
"""


def in_new_process(function: Callable[..., str], *arguments: Any, hash_seed: int = 0) -> str:
    """``function(*arguments)``, which is text, from an interpreter with that hash seed.

    Raises:
        CheckSkippedError: function or arguments cannot be reached by name, e.g. they were made in a test.
        CheckFailedError: it raised there.
    """
    try:
        call = pickle.dumps((function, arguments))
    except (pickle.PicklingError, AttributeError, TypeError) as error:
        raise CheckSkippedError(f"a new process cannot find it by name: {error}") from error
    done = subprocess.run(
        [sys.executable, "-c", CHILD],
        input=pickle.dumps(sys.path) + pickle.dumps(call),
        env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
        capture_output=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    last = (done.stderr.decode(errors="replace").splitlines() or [""])[-1]
    if done.returncode and last.startswith("cannot import: "):
        raise CheckSkippedError(f"a new process {last}")
    if done.returncode:
        raise CheckFailedError(f"in a new process: {last}")
    return done.stdout.decode()
