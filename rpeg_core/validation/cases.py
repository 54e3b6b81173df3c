"""Cases: measured rows that can be replayed, and the rows that cannot, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from rpeg_core.costing.batches import MemoryBatch, OperatorBatch
from rpeg_core.ir import Role
from rpeg_core.spec.execution import Precision
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.validation.profiles import profile_of_gpu
from rpeg_core.validation.rows import Unusable, read_rows, usable
from rpeg_core.validation.training import Setup, setup_of_row, training_batch

__all__ = ["Case", "Part", "Skipped", "Table", "memory_cases", "training_cases"]

TRAINING_COLUMNS = (
    "gpu",
    "n_gpus",
    "model",
    "layers",
    "hidden",
    "ffn",
    "heads",
    "vocab",
    "seq_len",
    "global_batch",
    "micro_batch",
    "tp",
    "pp",
    "precision",
    "step_time_s",
)


@attrs.frozen(eq=False)
class Part:
    """One priced batch of a case and how often it counts."""

    batch: OperatorBatch | MemoryBatch
    times: float


@attrs.frozen(kw_only=True)
class Case:
    """One measured run.

    Attributes:
        id, source, gpu, model, precision, grade: as the table says; empty when it does not.
        kind: which error target it belongs to: ``training-16bit``, ``training-8bit``, ``training-moe``.
        measured: seconds.
        setup: the run; of a composed case, that of its first part.
        parts: what is priced, and how often it counts; empty for training, which is one batch.
        apart: the first part runs beside the others: the longer of both counts.
        without: names of terms that the measurement does not include.
        overheads: further seconds or bytes by name, which no operator has.
    """

    id: str
    source: str
    gpu: str
    model: str
    precision: str
    grade: str
    kind: str
    measured: float
    setup: Setup
    parts: tuple[Part, ...] = ()
    overheads: tuple[tuple[str, float], ...] = ()
    without: tuple[str, ...] = ()
    apart: bool = False

    def batches(self) -> tuple[tuple[OperatorBatch | MemoryBatch, float], ...]:
        """What the cost terms price, and how often each counts."""
        if not self.parts:
            return ((training_batch(self.setup), 1.0),)
        return tuple((attrs.evolve(part.batch, hardware=self.setup.hardware), part.times) for part in self.parts)


@attrs.frozen(kw_only=True)
class Skipped:
    """A row that was not replayed, and why."""

    id: str
    source: str
    reason: str


@attrs.frozen(kw_only=True)
class Table:
    """The cases of one file and its skipped rows, in the file's order."""

    path: Path
    cases: tuple[Case, ...]
    skipped: tuple[Skipped, ...]


def training_cases(path: Path, profiles: Mapping[str, HardwareProfile]) -> Table:
    """The training runs of a table.

    Raises:
        ExperimentError: the file cannot be read or lacks required columns.
    """
    cases, skipped = [], []
    for number, row in enumerate(read_rows(path, TRAINING_COLUMNS), start=2):
        name, source = row.text("id", f"line {number}"), row.text("source", "")
        try:
            setup = usable(lambda row=row: setup_of_row(row, profile_of_gpu(row.text("gpu"), profiles)))
            measured = row.number("step_time_s")
        except Unusable as reason:
            skipped.append(Skipped(id=name, source=source, reason=str(reason)))
            continue
        if setup.model.moe is not None:
            kind = "training-moe"
        else:
            kind = "training-16bit" if setup.execution.precision is Precision.BF16 else "training-8bit"
        cases.append(
            Case(
                id=name,
                source=source,
                gpu=row.text("gpu"),
                model=row.text("model"),
                precision=row.text("precision"),
                grade=row.text("grade", ""),
                kind=kind,
                measured=measured,
                setup=setup,
            )
        )
    return Table(path=path, cases=tuple(cases), skipped=tuple(skipped))


def memory_cases(path: Path, profiles: Mapping[str, HardwareProfile]) -> Table:
    """The training runs of a table whose peak memory is known, in bytes.

    Peaks of what the allocator reserved include its reserve; peaks of allocated bytes do not.

    Raises:
        ExperimentError: the file cannot be read or lacks required columns.
    """
    cases, skipped = [], []
    columns = tuple(column for column in TRAINING_COLUMNS if column != "step_time_s")
    for number, row in enumerate(read_rows(path, columns), start=2):
        if not row.known("memory_gb"):
            continue
        name, source = row.text("id", f"line {number}"), row.text("source", "")
        kind = row.text("memory_kind", "")
        try:
            setup = usable(lambda row=row: setup_of_row(row, profile_of_gpu(row.text("gpu"), profiles)))
            unit = 2**30 if "GiB" in kind and "MiB" not in kind else 1e9
            measured = row.number("memory_gb") * unit
        except Unusable as reason:
            skipped.append(Skipped(id=name, source=source, reason=f"memory: {reason}"))
            continue
        batch = MemoryBatch(
            role=Role.TRAINING,
            model=setup.model,
            seconds_per_sample=None,
            workload=setup.workload,
            machine=setup.machine,
            hardware=setup.hardware,
            layouts=setup.layouts,
            settings=None,
            execution=setup.execution,
            trainable=True,
        )
        cases.append(
            Case(
                id=name,
                source=source,
                gpu=row.text("gpu"),
                model=row.text("model"),
                precision=row.text("precision"),
                grade=row.text("grade", ""),
                kind="memory",
                measured=measured,
                setup=setup,
                parts=(Part(batch, 1.0),),
                without=("reserve",) if "alloc" in kind and not kind.startswith("peak reserved") else (),
            )
        )
    return Table(path=path, cases=tuple(cases), skipped=tuple(skipped))
