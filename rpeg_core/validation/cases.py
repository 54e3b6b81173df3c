"""Cases: measured rows that can be replayed, and the rows that cannot, with the reason."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import attrs

from rpeg_core.costing.batches import OperatorBatch
from rpeg_core.spec.execution import Precision
from rpeg_core.spec.machine import HardwareProfile
from rpeg_core.validation.profiles import profile_of_gpu
from rpeg_core.validation.rows import Unusable, read_rows
from rpeg_core.validation.training import Setup, setup_of_row, training_batch

__all__ = ["Case", "Skipped", "Table", "training_cases"]

TRAINING_COLUMNS = ("gpu", "n_gpus", "model", "layers", "hidden", "ffn", "heads", "vocab", "seq_len", "global_batch",
                    "micro_batch", "tp", "pp", "precision", "step_time_s")


@attrs.frozen(kw_only=True)
class Case:
    """One measured run.

    Attributes:
        id, source, gpu, model, precision, grade: as the table says; empty when it does not.
        kind: which error target it belongs to: ``training-16bit``, ``training-8bit``, ``training-moe``.
        measured: seconds.
        setup: the run.
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

    def batch(self) -> OperatorBatch:
        """What the cost terms price."""
        return training_batch(self.setup)


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
            setup = setup_of_row(row, profile_of_gpu(row.text("gpu"), profiles))
            measured = row.number("step_time_s")
            if measured <= 0:
                raise Unusable(f"step_time_s is {measured:g}")
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
