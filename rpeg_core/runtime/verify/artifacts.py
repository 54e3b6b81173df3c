"""What nodes read, and when that is released (rules V11, V12)."""

from __future__ import annotations

from collections.abc import Iterator

from rpeg_core.ir import Role
from rpeg_core.passes.lower import Node, NodeKind
from rpeg_core.runtime.protocol import Artifact
from rpeg_core.runtime.trace import Dispatched, Ended, Released
from rpeg_core.runtime.verify.check import Check
from rpeg_core.runtime.verify.findings import Findings
from rpeg_core.runtime.verify.ledger import Ledger, NodeRecord, Traced
from rpeg_core.runtime.verify.rules import READS, RELEASES

__all__ = ["Artifacts"]

_Key = tuple[int, int, str]
"""(step, position, container); initial weights ``i`` are at step -1, position ``-1 - i``."""


class Artifacts(Check):
    """V11 reads, V12 releases."""

    def __init__(self, ledger: Ledger, findings: Findings) -> None:
        super().__init__(ledger, findings)
        self._given = self._readers_of_given()
        self._live: dict[_Key, int | None] = dict.fromkeys(self._given)  # -> line of the end of the maker
        self._released: dict[_Key, int] = {}  # -> line; as long as its step is kept

    def node(self, line: int, record: NodeRecord, traced: Traced) -> None:
        if isinstance(record, Dispatched):
            self._read(line, record, traced)
        elif isinstance(record, Ended):
            for container in traced.shape.writes[traced.position]:
                self._live[traced.step, traced.position, container] = line

    def release(self, line: int, record: Released) -> None:
        key = self._key(record.artifact)
        what = _words(record.artifact)
        if key is None or self.window.artifact(*key) != record.artifact:
            self.findings.add(RELEASES, f"releases {what}; there is no such artifact", line)
            return
        label = None if key[1] < 0 else self.window.node(key[0], key[1]).label
        if key in self._released or (key not in self._live and self._is_old(key)):
            lines = [line, self._released[key]] if key in self._released else [line]
            self.findings.add(RELEASES, f"releases {what} again", *lines, node=label)
            return
        if key not in self._live:
            self.findings.add(RELEASES, f"releases {what} before it is made", line, node=label)
        elif self._is_result(key):
            self.findings.add(RELEASES, f"releases {what}, the result of the run", line, node=label)
        for step, position in self._readers(key):
            if not self.ledger.has_ended(step, position):
                reader = self.window.node(step, position).label
                self.findings.add(RELEASES, f"releases {what} before its reader {reader} ended", line, node=label)
        self._live.pop(key, None)
        if not self._is_old(key):
            self._released[key] = line

    def forget(self, step: int) -> None:
        for position, containers in enumerate(self.window.shape(step).writes):
            for container in containers:
                self._released.pop((step, position, container), None)

    def finish(self, *, stopped: bool) -> None:
        if stopped or self.ledger.steps_complete < self.ledger.steps:
            return
        for key, line in self._live.items():
            if not self._is_result(key) and self._given.get(key, True):  # nothing in this run reads the others
                artifact = self.window.artifact(*key)
                lines = () if line is None else (line,)
                self.findings.add(RELEASES, f"{_words(artifact)} is never released", *lines)

    def _read(self, line: int, record: Dispatched, traced: Traced) -> None:
        keys = [
            (traced.step - back if maker >= 0 else -1, maker, container)
            for back, maker, container in traced.shape.reads[traced.position]
        ]
        expected = [self.window.artifact(*key) for key in keys]
        for found in record.inputs:
            if found not in expected:
                self.broken(READS, traced, f"reads {_words(found)}, which is not planned", line)
        for artifact in expected:
            if artifact not in record.inputs:
                self.broken(READS, traced, f"does not read {_words(artifact)}, as planned", line)
        if set(record.inputs) == set(expected) and list(record.inputs) != expected:
            self.broken(READS, traced, "reads its artifacts in another order than planned, or one of them twice", line)
        for key, artifact in zip(keys, expected, strict=True):
            if key in self._released:
                found_line = self._released[key]
                self.broken(READS, traced, f"reads {_words(artifact)}, which was released", line, found_line)
            elif key not in self._live:
                self.broken(READS, traced, f"reads {_words(artifact)}, which is not there", line)

    def _readers_of_given(self) -> dict[_Key, list[tuple[int, int]]]:
        """What is there at the start, initial weights and what earlier steps made for later ones -> who reads it."""
        first, steps, steady = self.ledger.first_step, self.ledger.steps, self.window.steady_step
        readers: dict[_Key, list[tuple[int, int]]] = {}
        for step in range(min(first, steady), steady):
            for position, reads in enumerate(self.window.shape(step).reads):
                for _, maker, container in reads:
                    if maker < 0:
                        known = readers.setdefault((-1, maker, container), [])
                        known += [(step, position)] if step < steps else []
        for step in range(max(0, first - steady), first):  # no edge spans more steps
            shape = self.window.shape(step)
            for position, (made, by_container) in enumerate(zip(shape.writes, shape.readers, strict=True)):
                for container, later in zip(made, by_container, strict=True):
                    found = [(step + ahead, reader) for ahead, reader in later if step + ahead >= first]
                    if found:
                        readers[step, position, container] = [each for each in found if each[0] < steps]
        return readers

    def _readers(self, key: _Key) -> Iterator[tuple[int, int]]:
        step, position, container = key
        if key in self._given or position < 0:
            yield from self._given.get(key, ())
            return
        shape = self.window.shape(step)
        for ahead, reader in shape.readers[position][shape.writes[position].index(container)]:
            if step + ahead < self.ledger.steps:
                yield step + ahead, reader

    def _key(self, artifact: Artifact) -> _Key | None:
        """None when no planned node makes it."""
        if artifact.node < 0:
            known = -1 - artifact.node < len(self.window.initial)
            return (-1, artifact.node, artifact.container) if known else None
        step, position = self.window.locate(artifact.node)
        if step >= self.ledger.steps or artifact.container not in self.window.shape(step).writes[position]:
            return None
        return step, position, artifact.container

    def _is_old(self, key: _Key) -> bool:
        return key[1] >= 0 and key[0] < self.ledger.oldest

    def _is_result(self, key: _Key) -> bool:
        step, position, _ = key
        return step == self.ledger.steps - 1 and position >= 0 and self._trains(self.window.node(step, position))

    def _trains(self, node: Node) -> bool:
        return node.kind is NodeKind.OP and self.window.rpeg.operator(node.operator).role is Role.TRAINING


def _words(artifact: Artifact) -> str:
    maker = "the start" if artifact.node < 0 else f"node {artifact.node}"
    layout = "" if artifact.layout is None else f" in {artifact.layout}"
    return f"{artifact.container} of {maker} on GPUs {artifact.allocation}{layout}"
