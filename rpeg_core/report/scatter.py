"""A picture of curves with both axes logarithmic: in text for a terminal or a pipe, or as SVG by matplotlib.

Proportional growth is a straight diagonal; the dotted line continues the first point of each curve in proportion.
"""

from __future__ import annotations

import io
import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import attrs

from rpeg_core.report.page import plain

if TYPE_CHECKING:
    from rich.text import Text

__all__ = ["Line", "Scatter", "ascii_lines", "rich_lines", "svg"]

GLYPHS = "ox+*#@%&"
SYMBOLS = "●▲■◆▼★✚✖"
COLOURS = ("#4f9bd8", "#d98a2b", "#4fb066", "#a97fdc", "#d9645c", "#43b5a9", "#cbb63a", "#9a9a9a")
KNEE = "K"
HEIGHT = 16
MIN_COLUMNS = 30
LEAST_TICKS = 3
STEPS = (1.0, 2.0, 5.0)
FINE_STEPS = (1.0, 1.2, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)


@attrs.frozen(kw_only=True)
class Line:
    """A curve: points (x, y), both above 0; ``knee`` is the index of one."""

    name: str
    points: tuple[tuple[float, float], ...]
    knee: int | None = None


@attrs.frozen(kw_only=True)
class Scatter:
    """What is drawn. ``x_ticks`` None chooses round numbers; ``proportional`` draws the dotted lines."""

    x_name: str
    y_name: str
    lines: tuple[Line, ...]
    x_ticks: tuple[float, ...] | None = None
    proportional: bool = False

    @property
    def title(self) -> str:
        return f"{self.y_name} against {self.x_name}"

    def x_range(self) -> tuple[float, float]:
        return _range([x for line in self.lines for x, _ in line.points])

    def y_range(self) -> tuple[float, float]:
        return _range([y for line in self.lines for _, y in line.points])


def _range(values: Sequence[float]) -> tuple[float, float]:
    low, high = min(values), max(values)
    return (low, high) if high > low * 1.01 else (low / 1.1, high * 1.1)


def ticks(low: float, high: float, most: int) -> list[float]:
    """Round numbers within a range, at most ``most`` of them, evenly thinned."""
    for steps in (STEPS, FINE_STEPS):
        exponents = range(math.floor(math.log10(low)), math.floor(math.log10(high)) + 1)
        found = [step * 10.0**e for e in exponents for step in steps if low <= step * 10.0**e <= high]
        if len(found) >= LEAST_TICKS:
            return found[:: -(-len(found) // most)]
    return [low, high]


def number(value: float) -> str:
    """``512``, ``12k``, ``1.5M``, ``0.25``."""
    for unit, name in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if value >= unit:
            return f"{value / min(unit, 1e3 if name == 'k' else unit):.3g}{name}"
    return f"{value:.4g}" if value >= 1 else f"{value:.2g}"


def ascii_lines(picture: Scatter, *, width: int) -> list[str]:
    """The picture in plain ASCII, ``width`` columns wide."""
    return [text.plain for text in _lines(picture, width, GLYPHS, "|", "-", "+", ".", ":")]


def rich_lines(picture: Scatter, *, width: int) -> list[Text]:
    """The picture for a terminal."""
    return _lines(picture, width, SYMBOLS, "│", "─", "┤", "·", "˙")


def _lines(
    picture: Scatter, width: int, glyphs: str, upright: str, level: str, mark: str, dot: str, faint: str
) -> list[Text]:
    from rich.text import Text

    y_low, y_high = picture.y_range()
    x_low, x_high = picture.x_range()
    y_ticks = ticks(y_low, y_high, HEIGHT // 3)
    margin = max(len(number(value)) for value in y_ticks) + 1
    columns = max(MIN_COLUMNS, width - margin - 4)

    def column(x: float) -> int:
        return round(_share(x, x_low, x_high) * (columns - 1))

    def row(y: float) -> int:
        return HEIGHT - 1 - round(_share(y, y_low, y_high) * (HEIGHT - 1))

    cells: dict[tuple[int, int], tuple[str, str]] = {}
    for line in picture.lines:
        if picture.proportional:
            (x0, y0), last = line.points[0], line.points[-1][0]
            for c in range(column(x0), column(last) + 1):
                x = x_low * (x_high / x_low) ** (c / (columns - 1))
                r = row(y0 * x / x0)
                if r >= 0:
                    cells.setdefault((r, c), (faint, "bright_black"))
    for line, colour in zip(picture.lines, _cycle(COLOURS), strict=False):
        for (xa, ya), (xb, yb) in zip(line.points, line.points[1:], strict=False):
            a, b = sorted([(column(xa), row(ya)), (column(xb), row(yb))])
            steps = max(b[0] - a[0], abs(b[1] - a[1]), 1)
            for i in range(steps + 1):
                place = (round(a[1] + (b[1] - a[1]) * i / steps), round(a[0] + (b[0] - a[0]) * i / steps))
                cells[place] = (dot, colour)
    for line, colour, glyph in zip(picture.lines, _cycle(COLOURS), _cycle(glyphs), strict=False):
        for index, (x, y) in enumerate(line.points):
            knee = index == line.knee
            cells[row(y), column(x)] = (KNEE if knee else glyph, f"bold black on {colour}" if knee else colour)
    labels = {row(value): number(value) for value in y_ticks}
    drawn = []
    for r in range(HEIGHT):
        text = Text(f"{labels.get(r, ''):>{margin}} {mark if r in labels else upright}", style="bright_black")
        for c in range(columns):
            character, style = cells.get((r, c), (" ", ""))
            text.append(character, style=style)
        text.rstrip()
        drawn.append(text)
    x_ticks = picture.x_ticks or ticks(x_low, x_high, columns // 12)
    drawn.append(Text(" " * (margin + 1) + "+" + level * columns, style="bright_black"))
    drawn.append(Text(_axis([(column(x), number(x)) for x in x_ticks], margin + 2), "bright_black"))
    drawn.extend(_legend(picture, glyphs, faint))
    return drawn


def _axis(marks: Sequence[tuple[int, str]], left: int) -> str:
    """Tick labels, each centred under its column; one that would touch its neighbour is left out."""
    text = " " * left
    for column, written in marks:
        start = max(left + column - len(written) // 2, 0)
        if start > len(text) or len(text) == left:
            text = text[:start].ljust(start) + written
    return text


def _legend(picture: Scatter, glyphs: str, faint: str) -> list[Text]:
    from rich.text import Text

    found = []
    for line, colour, glyph in zip(picture.lines, _cycle(COLOURS), _cycle(glyphs), strict=False):
        if line.name:
            found.append(Text.assemble((f" {glyph}", colour), f"  {plain(line.name)}"))
    if any(line.knee is not None for line in picture.lines):
        found.append(Text(f" {KNEE}  knee", style="bright_black"))
    if picture.proportional:
        found.append(Text(f" {faint}  in proportion to the first point", style="bright_black"))
    return found


def _share(value: float, low: float, high: float) -> float:
    return math.log(value / low) / math.log(high / low)


def _cycle(values: str | tuple[str, ...]) -> Sequence[str]:
    import itertools

    return itertools.cycle(values)


def svg(pictures: Sequence[Scatter]) -> str:
    """The pictures side by side, by matplotlib, which must be installed; the text is the same for equal pictures."""
    import matplotlib
    from matplotlib.backends.backend_svg import FigureCanvasSVG
    from matplotlib.figure import Figure
    from matplotlib.ticker import FuncFormatter, NullFormatter

    with matplotlib.rc_context({"svg.hashsalt": "rpeg", "svg.fonttype": "none", "axes.spines.top": False}):
        figure = Figure(figsize=(6.4 * len(pictures), 4.8), layout="constrained")
        FigureCanvasSVG(figure)
        for axes, picture in zip(figure.subplots(1, len(pictures), squeeze=False)[0], pictures, strict=True):
            named = False
            for line, colour, marker in zip(picture.lines, _cycle(COLOURS), _cycle("o^sDv*Pp"), strict=False):
                xs, ys = zip(*line.points, strict=True)
                axes.plot(xs, ys, marker=marker, color=colour, label=plain(line.name) or picture.y_name)
                if picture.proportional:
                    axes.plot([xs[0], xs[-1]], [ys[0], ys[0] * xs[-1] / xs[0]], ":", color=colour, linewidth=1)
                if line.knee is not None:
                    x, y = line.points[line.knee]
                    ring = {"markersize": 12, "markerfacecolor": "none", "linestyle": "", "color": colour}
                    axes.plot([x], [y], marker="o", label="_" if named else "knee", **ring)
                    named = True
            axes.set(xscale="log", yscale="log", xlabel=picture.x_name, ylabel=picture.y_name)
            axes.spines["right"].set_visible(False)
            low, high = picture.y_range()
            axes.set_ylim(low / 1.1, high * 1.1)
            x_ticks = picture.x_ticks or ticks(*picture.x_range(), 6)
            for axis, values in ((axes.xaxis, x_ticks), (axes.yaxis, ticks(*picture.y_range(), 6))):
                axis.set_ticks(list(values))
                axis.set_major_formatter(FuncFormatter(lambda value, _: number(value)))
                axis.set_minor_formatter(NullFormatter())
            if named or len(picture.lines) > 1:
                axes.legend(frameon=False)
        target = io.StringIO()
        figure.savefig(target, format="svg", metadata={"Date": None})
    return target.getvalue()
