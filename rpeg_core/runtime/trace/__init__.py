"""What a run did: one record per dispatch, version bind, start, end, transfer and release.

As a file, JSON lines: a header, the records in the order in which they happened, and a closing line::

    {"record": "header", "plan": "sha256:...", "backend": "simulator", "steps": 8, ..., "chain": "e01f..."}
    {"record": "dispatch", "time_s": 0.0, "node": 0, "label": "actor_generation@0", ..., "chain": "07d2..."}
    {"record": "end", "time_s": 4.0, "node": 0, "chain": "5a0c..."}
    {"record": "close", "chain": "91bd..."}

A run that goes on from a checkpoint has a file of its own, whose header says ``first_step``; node numbers and steps
count over both runs.

A record keeps each fact once: what a node is stands in its dispatch, the version in its bind, bytes in its transfer.
Times are those of the controller's clock. A start may be written late, when the controller learns of it: after its
dispatch and before what else happened to the node; all other records stand where their time belongs.
"""

from __future__ import annotations

from rpeg_core.runtime.trace.files import SCHEMA, Closed, Line, TraceWriter, read_lines
from rpeg_core.runtime.trace.records import (
    Bound,
    Dispatched,
    Ended,
    Record,
    Released,
    Started,
    Stopped,
    TraceHeader,
    Transferred,
    dispatch_records,
    release_record,
)
from rpeg_core.runtime.trace.trace import Trace

__all__ = [
    "SCHEMA",
    "Bound",
    "Closed",
    "Dispatched",
    "Ended",
    "Line",
    "Record",
    "Released",
    "Started",
    "Stopped",
    "Trace",
    "TraceHeader",
    "TraceWriter",
    "Transferred",
    "dispatch_records",
    "read_lines",
    "release_record",
]
