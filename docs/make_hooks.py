"""Write docs/hooks.md from rpeg_core/hookspecs.py: ``python docs/make_hooks.py``.

A test compares the file with what this makes.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from pathlib import Path

from rpeg_core import hookspecs

__all__ = ["PAGE", "hooks", "render", "signature"]

PAGE = Path(__file__).with_name("hooks.md")

INTRODUCTION = """\
# Hooks

<!-- Made by docs/make_hooks.py from the docstrings of rpeg_core/hookspecs.py; change those. -->

A plugin is a Python module that an entry point names. It implements a hook by a function of the hook's name
marked with `@hookimpl`:

```toml
# pyproject.toml
[project]
name = "rpeg-plugin-acme"
dependencies = ["rpeg-core>=0.1,<0.2"]

[project.entry-points."rpeg.hardware"]
acme = "rpeg_plugin_acme"
```

`rpeg list-plugins --load` says whether the plugin works, and if not, why. A plugin that fails is left out
with a warning; it never stops a command that does not need it. An implementation may take fewer arguments
than the hook has, but no others.

The records are described in `rpeg_core/records.py` and `rpeg_core/diagnostics.py`.
"""


def hooks() -> dict[str, Callable[..., object]]:
    """Every hook specification by name, in the order of the module."""
    return {name: value for name, value in vars(hookspecs).items() if name.startswith("rpeg_")}


def signature(name: str, hook: Callable[..., object]) -> str:
    """The signature as the heading shows it."""
    return f"{name}{inspect.signature(hook)}".replace("'", "")


def render() -> str:
    """The whole page."""
    sections = [f"## `{signature(name, hook)}`\n\n{_body(hook)}" for name, hook in hooks().items()]
    return "\n".join([INTRODUCTION, *sections])


def _body(hook: Callable[..., object]) -> str:
    text, _, example = inspect.getdoc(hook).partition("Example::\n")
    text = re.sub(r"``([^`]*)``", r"`\1`", text)
    text = re.sub(r"\.\. versionadded:: (.*)", r"Since version \1.", text)
    text = re.sub(r"^(Called|Returns|On failure):", r"**\1:**", text, flags=re.MULTILINE)
    return f"{text}```python\n{inspect.cleandoc(example)}\n```\n"


if __name__ == "__main__":
    PAGE.write_text(render(), encoding="utf-8")
