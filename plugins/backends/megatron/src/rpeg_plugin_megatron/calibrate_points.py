"""What ``rpeg calibrate`` measures with this backend: shapes, messages and operators, by kind of device. No torch."""

from __future__ import annotations

import attrs

from rpeg_core.ir import Role
from rpeg_core.planning.assignment import Layout
from rpeg_core.spec.model_configs import model_from_inline
from rpeg_core.spec.models import ModelSpec
from rpeg_core.spec.workload import Workload

__all__ = ["Point", "Points", "points"]


@attrs.frozen(kw_only=True)
class Point:
    """One operator to measure."""

    role: Role
    model: ModelSpec
    workload: Workload
    layout: Layout
    microbatches: int = 1

    @property
    def name(self) -> str:
        w = self.workload
        return (
            f"{self.role.value}, d {self.model.hidden} x {self.model.layers}, {w.sequences} x "
            f"({w.prompt_tokens} + {w.response_tokens}), {self.layout}"
        )


@attrs.frozen(kw_only=True)
class Points:
    """All measurements on one machine.

    Attributes:
        gemms: (rows, columns, inner).
        copy_bytes: of one large copy.
        message_bytes: of AllReduce and point-to-point.
        operators: in order.
    """

    gemms: tuple[tuple[int, int, int], ...]
    copy_bytes: int
    message_bytes: tuple[int, ...]
    operators: tuple[Point, ...]


def points(*, cpu: bool, ranks: int, quick: bool) -> Points:
    """The measurements for ``ranks`` workers on CPU cores or GPUs."""
    rows = (1, 4, 16, 64, 256, 1024) if cpu else (1, 16, 128, 512, 2048, 8192)
    weights = (
        ((64, 64), (128, 64), (256, 256), (704, 256), (256, 704), (1024, 512), (1024, 1024))
        if cpu
        else ((1024, 1024), (4096, 1024), (4096, 4096), (11008, 4096), (4096, 11008), (8192, 8192))
    )
    if quick:
        rows, weights = rows[::2], weights[::2]
    messages = tuple(4**k for k in range(2, 13)) if cpu else tuple(4**k for k in range(2, 15))
    return Points(
        gemms=tuple((m, n, k) for m in rows for n, k in weights),
        copy_bytes=64 * 2**20 if cpu else 2**30,
        message_bytes=messages[::4] if quick else messages,
        operators=_operators(cpu=cpu, ranks=ranks, quick=quick),
    )


def _model(hidden: int, layers: int, heads: int, ffn: int, vocab: int) -> ModelSpec:
    dimensions = {
        "layers": layers,
        "hidden": hidden,
        "heads": heads,
        "kv_heads": max(2, heads // 2),
        "ffn": ffn,
        "vocab": vocab,
        "gated_ffn": True,
        "tied_embeddings": False,
    }
    return model_from_inline(dimensions, f"d{hidden}")


def _operators(*, cpu: bool, ranks: int, quick: bool) -> tuple[Point, ...]:
    width = 4 if cpu else 2
    if cpu:
        tiny = _model(32, 2, 4, 64, 16)
        small, medium, large = _model(64, 4, 4, 176, 64), _model(128, 2, 4, 352, 512), _model(256, 4, 8, 704, 1024)
        shapes = {
            tiny: ((16, 4, 4), (256, 4, 4)),
            small: ((8, 8, 16), (64, 16, 16)),
            medium: ((8, 32, 32), (32, 64, 24), (16, 256, 16)),
            large: ((8, 16, 16), (16, 64, 32)),
        }
    else:
        small, medium, large = (
            _model(512, 4, 8, 1408, 32000),
            _model(1024, 8, 16, 2816, 32000),
            _model(2048, 8, 16, 5632, 32000),
        )
        shapes = {
            small: ((8, 64, 32), (64, 128, 64)),
            medium: ((16, 128, 64), (32, 512, 64)),
            large: ((8, 256, 64), (16, 1024, 64)),
        }
    if quick:
        shapes = {model: chosen[:1] for model, chosen in list(shapes.items())[:2]}
    layouts = [(Layout(1, 1, 1), 1)]
    if ranks > 1:
        layouts += [(Layout(2, 1, 1), 1), (Layout(1, 1, 2), 1), (Layout(1, 2, 1), 2)]
    found = []
    for model, chosen in shapes.items():
        for layout, microbatches in layouts:
            for sequences, prompt, response in chosen if layout.gpus == 1 else chosen[-2:]:
                workload = Workload(
                    prompts=sequences, prompt_tokens=prompt, response_tokens=response, bytes_per_element=width
                )
                found += [
                    Point(role=role, model=model, workload=workload, layout=layout, microbatches=microbatches)
                    for role in (Role.GENERATION, Role.INFERENCE, Role.TRAINING)
                ]
    return tuple(found)
