"""What commands share: the registry of plugins of this invocation."""

from __future__ import annotations

from typing import TYPE_CHECKING

import click

from rpeg_core.cli import ui

if TYPE_CHECKING:
    from rpeg_core.plugins.registry import Registry

__all__ = ["CommandContext", "pass_context"]


class CommandContext:
    """Made once per invocation of ``rpeg``; a command receives it by ``@pass_context``."""

    def __init__(self) -> None:
        self.strict_plugins = False
        self._registry: Registry | None = None

    @property
    def registry(self) -> Registry:
        """The plugins; made when first asked for, so that ``--help`` looks at none."""
        if self._registry is None:
            from rpeg_core.plugins.registry import Registry

            self._registry = Registry(strict=self.strict_plugins, report=ui.print_note)
        return self._registry

    @property
    def problems(self) -> tuple[str, ...]:
        """Warnings about plugins, for the end of the command."""
        return () if self._registry is None else self._registry.problems


pass_context = click.make_pass_decorator(CommandContext)
