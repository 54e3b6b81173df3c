"""The rules that a trace is held to; ids are stable."""

from __future__ import annotations

import attrs

__all__ = [
    "BINDING",
    "EXCLUSIVE",
    "FILE",
    "HEADER",
    "NODES",
    "ORDER",
    "PREDECESSORS",
    "PUBLISHED",
    "READS",
    "RELEASES",
    "RULES",
    "SEAL",
    "STALENESS",
    "TRANSFERS",
    "VERSIONS",
    "Rule",
]


@attrs.frozen
class Rule:
    """One thing that every trace of a plan has in common."""

    id: str
    name: str
    statement: str

    def __str__(self) -> str:
        return f"{self.id} {self.name}: {self.statement}"


FILE = Rule("V1", "file", "Every line is a record: the header first, the closing line last.")
SEAL = Rule("V2", "seal", "No line was changed, added, removed or moved after it was written.")
HEADER = Rule("V3", "header", "The header names the plan by its digest, a known clock and at least one step.")
NODES = Rule(
    "V4",
    "nodes",
    "Every node of the planned graph is dispatched, started and ended once, and no other; a stopped run may miss some.",
)
BINDING = Rule(
    "V5",
    "binding",
    "An operator runs on the planned GPUs, with the planned degrees and microbatches, in its step and length phase.",
)
VERSIONS = Rule(
    "V6",
    "versions",
    "A node is bound to the planned model and version once: max(0, k - tau) serving, k training; a fused training to "
    "both of its models.",
)
ORDER = Rule(
    "V7",
    "order",
    "A node is dispatched, bound, started and ended in this order; time never runs back; nothing follows a stop.",
)
PREDECESSORS = Rule("V8", "predecessors", "A node is dispatched only after all its predecessors ended.")
EXCLUSIVE = Rule(
    "V9", "exclusivity", "No two nodes hold one GPU at once; a transfer holds its destination and its source."
)
TRANSFERS = Rule(
    "V10", "transfers", "A transfer moves its container and the bytes that lowering predicts between the planned GPUs."
)
READS = Rule("V11", "reads", "A node reads the planned artifacts, each of them made before and not yet released.")
RELEASES = Rule(
    "V12", "releases", "An artifact is released once, after its last reader ended; the weights that result are kept."
)
PUBLISHED = Rule(
    "V13", "published", "A version is used only after its training step ended and where a transfer brought it."
)
STALENESS = Rule("V14", "staleness", "A serving operator uses weights at most tau steps old, training the newest.")

RULES = (
    FILE,
    SEAL,
    HEADER,
    NODES,
    BINDING,
    VERSIONS,
    ORDER,
    PREDECESSORS,
    EXCLUSIVE,
    TRANSFERS,
    READS,
    RELEASES,
    PUBLISHED,
    STALENESS,
)
