"""Host memory in words: what a plan's trainings would take there, and free of their GPUs."""

from __future__ import annotations

from typing import Any

import attrs

from rpeg_core.costing.host import HostMemory
from rpeg_core.report import words

__all__ = ["host_document", "host_sentence"]


def host_sentence(memory: HostMemory, limit_bytes: float) -> str:
    """One sentence against ``limit_bytes`` of a node."""
    if not memory.states:
        return "host memory: no cost term says what an optimizer's state would take there"
    freed = ", ".join(f"{words.gigabytes(state.freed_bytes)} per GPU of {state.operator}" for state in memory.states)
    over = memory.node_bytes > limit_bytes
    return (
        f"host memory: keeping optimizer states there would free {freed} and take {words.gigabytes(memory.node_bytes)} "
        f"of a node's {words.gigabytes(limit_bytes)}" + (", more than it has" if over else "")
    )


def host_document(memory: HostMemory, limit_bytes: float) -> dict[str, Any]:
    """The same as numbers."""
    return {
        "states": [attrs.asdict(state) for state in memory.states],
        "node_bytes": memory.node_bytes,
        "limit_bytes": limit_bytes,
        "fits": memory.node_bytes <= limit_bytes,
    }
