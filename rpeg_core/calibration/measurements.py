"""What a backend measures for ``rpeg calibrate``: times of single kernels, of messages and of whole operators."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import attrs
import numpy as np

from rpeg_core.costing.batches import Layouts, OperatorBatch, execution_of
from rpeg_core.ir import Role
from rpeg_core.planning.assignment import Mode
from rpeg_core.spec.machine import DeviceSpace, HardwareProfile
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.software import Software
from rpeg_core.spec.workload import Workload

__all__ = ["CalibrationRequest", "GemmTime", "Measurements", "MessageTime", "OperatorTime", "layouts_of"]


@attrs.frozen(kw_only=True)
class CalibrationRequest:
    """How to measure.

    Attributes:
        progress: told the share that is done, 0 to 1, and in a few words what is measured next.
        quick: a fraction of the measurements, to try the way.
        device: ``auto``, ``cpu`` or ``cuda``.
    """

    progress: Callable[[float, str], None] = lambda share, what: None
    quick: bool = False
    device: str = "auto"


@attrs.frozen(kw_only=True)
class GemmTime:
    """``rows x inner`` by ``inner x columns``."""

    rows: int
    columns: int
    inner: int
    seconds: float


@attrs.frozen(kw_only=True)
class MessageTime:
    """An AllReduce (``all_reduce``) of a buffer of so many bytes on each of ``ranks``, or one message (``p2p``)."""

    pattern: str
    ranks: int
    bytes: int
    seconds: float


@attrs.frozen(kw_only=True)
class OperatorTime:
    """One operator as the backend executes it, without dispatching.

    Attributes:
        name: of the configuration, for people.
        role: what it does.
        model: its model.
        workload: sequences and lengths; bytes per element.
        data, pipeline, tensor, microbatches: its layout.
        seconds: the shortest of the repetitions.
        node: whether dispatching it is part of the time, as in a run.
        mode: how it was executed.
    """

    name: str
    role: Role
    model: ModelSpec
    workload: Workload
    data: int
    pipeline: int
    tensor: int
    microbatches: int
    seconds: float
    node: bool = False
    mode: Mode = attrs.field(factory=Mode)

    @property
    def layout(self) -> tuple[int, int, int, int]:
        """Pd, Pp, Pt and microbatches."""
        return self.data, self.pipeline, self.tensor, self.microbatches

    def batch(self, hardware: HardwareProfile, layouts: Sequence[tuple[int, int, int, int]] = ()) -> OperatorBatch:
        """What cost terms price, on a machine of one node: in its own layout, or in others."""
        chosen = tuple(layouts) or (self.layout,)
        widest = max(data * pipeline * tensor for data, pipeline, tensor, _ in chosen)
        generates = self.role is Role.GENERATION
        return OperatorBatch(
            role=self.role,
            model=self.model,
            seconds_per_sample=None,
            workload=self.workload,
            machine=DeviceSpace(racks=1, nodes_per_rack=1, gpus_per_node=max(widest, hardware.gpus_per_node)),
            hardware=hardware,
            layouts=layouts_of(chosen),
            settings=None,
            execution=execution_of(hardware, mode=self.mode),
            sequences=self.workload.sequences,
            prefill=generates,
            phases=self.workload.phases if generates else (),
        )


@attrs.frozen(kw_only=True)
class Measurements:
    """All of a machine.

    Attributes:
        device: in words, e.g. the name of the processor.
        versions: of the software that was measured, in words.
        devices: GPUs, or cores, of this machine.
        memory_bytes: of one device.
        bytes_per_element: of the measured weights.
        gemms, messages, operators: the times.
        copy_bytes_per_s: read plus written, of a large copy.
        node_s: between the dispatch of a node and its begin, its end and the next dispatch; None: not measured.
        software: what is a fact of the backend; its times are still to be fitted.
        seconds: how long measuring took.
        at: local time, ISO 8601.
    """

    device: str
    versions: str
    devices: int
    memory_bytes: int
    bytes_per_element: int
    gemms: tuple[GemmTime, ...]
    messages: tuple[MessageTime, ...]
    operators: tuple[OperatorTime, ...]
    copy_bytes_per_s: float
    node_s: float | None
    software: Software
    seconds: float
    at: str


def layouts_of(chosen: Sequence[tuple[int, int, int, int]]) -> Layouts:
    """Layouts inside a node, each Pd, Pp, Pt and microbatches, as arrays."""
    data, pipeline, tensor, microbatches = np.array(chosen, np.int64).T
    inside = np.zeros(len(chosen), np.int64)
    return Layouts(
        data=data,
        pipeline=pipeline,
        tensor=tensor,
        microbatches=microbatches,
        gpus=data * pipeline * tensor,
        data_tier=inside,
        stage_tier=inside,
        stages_per_node=pipeline,
    )
