"""The file of a trace: written line by line while the run goes on, each line sealed by the hash of all before it.

The *chain* of a line is the start of SHA-256 over the chain of the line before and the line itself without its chain.
A changed, missing, added or moved line is found and named without reading the rest of the file; a cut file lacks the
closing line. This notices accidents and careless edits. It is no signature: whoever can run this module can write
the chain anew.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
import types
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import IO, Any, Self

import attrs
import cattrs
from cattrs.errors import ForbiddenExtraKeysError
from cattrs.gen import make_dict_unstructure_fn, override

from rpeg_core.errors import TraceFileError
from rpeg_core.planning.assignment import Layout
from rpeg_core.runtime.trace.records import (
    SCHEMA,
    Bound,
    Dispatched,
    Ended,
    Record,
    Released,
    Started,
    Stopped,
    TraceHeader,
    Transferred,
)

__all__ = ["SCHEMA", "Closed", "Line", "TraceWriter", "opened", "read_lines", "read_records"]

CHAIN_DIGITS = 16
"""Hexadecimal digits of a chain: 64 bits."""

_CHAINED = re.compile(rb'(.*), "chain": "([0-9a-f]{%d})"\}\n' % CHAIN_DIGITS, re.DOTALL)


@attrs.frozen
class Closed:
    """The last line: nothing is missing before it."""


@attrs.frozen(kw_only=True)
class Line:
    """One line of a trace file.

    Attributes:
        number: from 1.
        content: what it says, None when it is no record.
        problem: why it is none.
        intact: whether its chain holds: neither it nor what stands before it was changed since it was written.
    """

    number: int
    content: TraceHeader | Record | Closed | None
    problem: str | None = None
    intact: bool = True


_RECORDS: Mapping[str, type] = types.MappingProxyType(
    {
        "header": TraceHeader,
        "dispatch": Dispatched,
        "bind": Bound,
        "start": Started,
        "end": Ended,
        "transfer": Transferred,
        "release": Released,
        "stop": Stopped,
        "close": Closed,
    }
)
_NO_RECORD = (
    ValueError,
    KeyError,
    TypeError,
    AttributeError,
    ArithmeticError,
    RecursionError,
    ForbiddenExtraKeysError,
)
"""What :func:`_content` raises for a line that is no record."""

_NAMES = types.MappingProxyType({cls: name for name, cls in _RECORDS.items()})


class TraceWriter:
    """Writes a trace while the run goes on; what it keeps in memory does not grow.

    A context manager. When an exception leaves it, the closing line is not written: such a file says of itself that it
    is incomplete. A run that was stopped, or whose workers failed, writes a :class:`Stopped` instead.

    Raises:
        TraceFileError: the file cannot be written.
    """

    def __init__(self, path: Path | str, header: TraceHeader) -> None:
        self._file = opened(path, "wb")
        self._chain = ""
        self._line(header)

    def write(self, record: Record) -> None:
        """Append a record."""
        self._line(record)

    def flush(self) -> None:
        """Hand to the operating system what was written, so that it outlives this process."""
        self._file.flush()

    def close(self) -> None:
        """Write the closing line and close the file."""
        self._line(Closed())
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: object, traceback: object) -> None:
        if kind is None:
            self.close()
        else:
            self._file.close()

    def _line(self, content: TraceHeader | Record | Closed) -> None:
        fields = {"record": _NAMES[type(content)], **_CONVERTER.unstructure(content)}
        body = json.dumps(fields).encode()[:-1]
        self._chain = _link(self._chain, body)
        self._file.write(body + f', "chain": "{self._chain}"}}\n'.encode())


def read_lines(path: Path | str) -> Iterator[Line]:
    """The lines of a trace file, one after another, whatever their state.

    Raises:
        TraceFileError: the file cannot be read, is empty, or has another schema.
    """
    chain = ""
    number = 0
    with opened(path, "rb") as file:
        for number, raw in enumerate(file, start=1):
            chained = _CHAINED.fullmatch(raw)
            intact = chained is not None and _link(chain, chained[1]) == chained[2].decode()
            chain = chained[2].decode() if chained is not None else chain
            try:
                content, problem = _content(raw, number), None
            except _NO_RECORD as error:
                content, problem = None, f"{type(error).__name__}: {error}"
            if isinstance(content, TraceHeader) and content.schema != SCHEMA:
                raise TraceFileError(f"{path} has schema {content.schema}", facts=[f"allowed: {SCHEMA}"])
            yield Line(number=number, content=content, problem=problem, intact=intact)
    if number == 0:
        raise TraceFileError(f"{path} is empty", facts=["a trace starts with a header"])


def read_records(path: Path | str) -> Iterator[TraceHeader | Record]:
    """The header and the records of a trace file that is whole.

    Raises:
        TraceFileError: see :func:`read_lines`; a line is no record, was changed, or the closing line is missing.
    """
    last = None
    for line in read_lines(path):
        if line.content is None:
            raise TraceFileError(f"line {line.number} of {path} is not a trace record", facts=[str(line.problem)])
        if not line.intact or isinstance(last, Closed):
            raise TraceFileError(
                f"{path} was changed after it was written",
                facts=[f"line {line.number} does not follow from the lines before it"],
                hint="`rpeg verify PLAN TRACE` names every broken rule",
            )
        last = line.content
        if not isinstance(last, Closed):
            yield last
    if not isinstance(last, Closed):
        raise TraceFileError(
            f"{path} is incomplete",
            facts=["the closing line is missing: the run was killed, or the file was cut"],
            hint="`rpeg verify PLAN TRACE` names every broken rule",
        )


def opened(path: Path | str, mode: str) -> IO[Any]:
    """Open a file of a trace.

    Raises:
        TraceFileError: it cannot be opened.
    """
    try:
        return Path(path).open(mode, encoding=None if "b" in mode else "utf-8")
    except OSError as error:
        verb = "read" if "r" in mode else "write"
        raise TraceFileError(f"cannot {verb} {path}", facts=[error.strerror or str(error)]) from error


def _link(before: str, body: bytes) -> str:
    return hashlib.sha256(before.encode() + body).hexdigest()[:CHAIN_DIGITS]


def _content(raw: bytes, number: int) -> TraceHeader | Record | Closed:
    fields = json.loads(raw)
    cls = _RECORDS[fields.pop("record")]
    if (cls is TraceHeader) != (number == 1):
        raise ValueError("the first line, and no other, is the header")
    fields.pop("chain", None)
    content: TraceHeader | Record | Closed = _CONVERTER.structure(fields, cls)
    return content


def _converter() -> cattrs.Converter:
    """Strict: every field must be there, no other, and of its type, so that a changed file is noticed."""
    converter = cattrs.Converter(forbid_extra_keys=True, detailed_validation=False)

    def exact(value: object, cls: type) -> object:
        if type(value) is not cls and not (cls is float and type(value) is int):
            raise TypeError(f"{value!r} is not of type {cls.__name__}")
        if cls is float and not math.isfinite(value):  # type: ignore[arg-type]
            raise ValueError(f"{value!r} is not a finite number")
        return cls(value)

    for cls in (int, float, str):
        converter.register_structure_hook(cls, exact)
    # Degrees beyond the paper's are written where they are not 1.
    further = {name: override(omit_if_default=True) for name in ("context", "expert")}
    converter.register_unstructure_hook(Layout, make_dict_unstructure_fn(Layout, converter, **further))
    return converter


_CONVERTER = _converter()
