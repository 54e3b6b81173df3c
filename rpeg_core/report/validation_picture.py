"""Predicted against measured, one panel per kind of measurement, as SVG by matplotlib."""

from __future__ import annotations

import io
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rpeg_core.report.page import plain
from rpeg_core.report.scatter import COLOURS

if TYPE_CHECKING:
    from rpeg_core.validation.replay import Result

__all__ = ["picture"]

BAND = 0.15
COLUMNS = 4


def picture(results: Sequence[Result]) -> str:
    """The SVG text, equal for equal results; points by GPU, the diagonal and a band of 15 % around it.

    Raises:
        ImportError: matplotlib is not installed (the extra ``plot``).
    """
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure

    kinds = sorted({result.case.kind for result in results})
    gpus = sorted({result.case.gpu for result in results})
    colours = {gpu: COLOURS[index % len(COLOURS)] for index, gpu in enumerate(gpus)}
    columns = min(COLUMNS, len(kinds))
    rows = -(-len(kinds) // columns)
    with matplotlib.rc_context({"svg.hashsalt": "rpeg", "svg.fonttype": "none"}):
        figure = Figure(figsize=(4.6 * columns, 4.4 * rows), layout="constrained")
        FigureCanvasSVG(figure)
        panels = figure.subplots(rows, columns, squeeze=False).ravel()
        for axes, kind in zip(panels, kinds, strict=False):
            members = [result for result in results if result.case.kind == kind]
            scale = 1e9 if kind == "memory" else 1.0
            for gpu in gpus:
                points = [r for r in members if r.case.gpu == gpu]
                if points:
                    xs = [r.case.measured / scale for r in points]
                    ys = [r.predicted / scale for r in points]
                    axes.plot(xs, ys, ".", markersize=5, color=colours[gpu], label=plain(gpu))
            values = [v / scale for r in members for v in (r.case.measured, r.predicted)]
            ends = [min(values) / 1.1, max(values) * 1.1]
            axes.plot(ends, ends, "-", color="#888888", linewidth=1)
            axes.fill_between(
                ends, [v * (1 - BAND) for v in ends], [v * (1 + BAND) for v in ends], color="#888888", alpha=0.15
            )
            unit = "GB" if kind == "memory" else "s"
            axes.set(xscale="log", yscale="log", xlabel=f"measured [{unit}]", ylabel=f"predicted [{unit}]", title=kind)
            axes.legend(frameon=False, fontsize=7)
        for axes in panels[len(kinds) :]:
            axes.set_axis_off()
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()
