"""How the functions of this package are compiled and cached."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from rpeg_core.planning.compiled.kernel import KERNEL_FINGERPRINT
from rpeg_core.planning.compiled.kernel import jit as compile_and_cache

__all__ = ["BOUNDS_FINGERPRINT", "jit", "jit_for"]

BOUNDS_FINGERPRINT = hashlib.sha256(
    KERNEL_FINGERPRINT.encode() + b"".join(path.read_bytes() for path in sorted(Path(__file__).parent.glob("*.py")))
).hexdigest()
"""Changes whenever the compiled code of the bounds, or of what they call, does."""


def jit_for(fingerprint: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """A decorator that compiles and caches under a name that contains ``fingerprint``.

    numba's cache notices changes of the file that holds a function, not of what the function calls or of constants
    from elsewhere; files of the cache are named after the function.
    """

    def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
        function.__qualname__ = f"{function.__name__}_{fingerprint[:12]}"
        return compile_and_cache(function)

    return decorate


jit = jit_for(BOUNDS_FINGERPRINT)
