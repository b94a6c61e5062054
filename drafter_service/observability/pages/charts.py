"""Charts as SVG: elements, scales, axes and a legend, and curves for rows of tables."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from itertools import groupby
from typing import Literal, NamedTuple

Scale = Callable[[float], float]
"""Function from a value to a position in pixels."""
Point = tuple[float, float]

MAX_TICKS = 5
DASHED = "dashed"
"""Class of dashed lines in charts and legends."""


class Frame(NamedTuple):
    """Size and margins of a chart in pixels."""

    width: float = 400
    height: float = 268
    left: float = 62
    right: float = 12
    top: float = 14
    bottom: float = 44

    @property
    def right_edge(self) -> float:
        """Right end of the plotting area."""
        return self.width - self.right

    @property
    def floor(self) -> float:
        """Lower end of the plotting area."""
        return self.height - self.bottom

    def x_scale(self, first: float, last: float) -> Scale:
        """Return a scale from `first` at the left end of the plotting area to `last` at its right end."""
        return linear(first, last, self.left, self.right_edge)

    def y_scale(self, first: float, last: float) -> Scale:
        """Return a scale from `first` at the lower end of the plotting area to `last` at its upper end."""
        return linear(first, last, self.floor, self.top)


# --- Scales and ticks


def linear(first: float, last: float, begin: float, end: float) -> Scale:
    """Return a scale from the values `first` to `last` to the positions `begin` to `end`; it clips values outside."""
    extent = last - first

    def position(value: float) -> float:
        part = (min(max(value, first), last) - first) / extent if extent > 0 else 0.0
        return begin + part * (end - begin)

    return position


def ticks(largest: float, min_step: float = 0.0) -> list[float]:
    """Return round numbers from 0 to `largest` or slightly more, in steps of 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * MAX_TICKS >= largest * (1 - 1e-9))
    step = max(step, min_step)
    return [step * index for index in range(math.ceil(largest / step - 1e-9) + 1)]


# --- SVG elements


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """Return an element; `content` is markup. In attribute names `_` becomes `-`, and `kind` becomes `class`."""
    return f"<{name}{_attributes(attributes)}>{content}</{name}>"


def text(words: str, x: float, y: float, **attributes: str | float) -> str:
    """Return text at a position."""
    return element("text", escape(words), x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: str | float) -> str:
    """Return a straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def rect(x: float, y: float, width: float, height: float, title: str = "", **attributes: str | float) -> str:
    """Return a rectangle with a tooltip."""
    size = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
    return element("rect", _tooltip(title), **size, **attributes)


def circle(x: float, y: float, radius: float, title: str = "", **attributes: str | float) -> str:
    """Return a circle with a tooltip."""
    return element("circle", _tooltip(title), cx=x, cy=y, r=radius, **attributes)


def polyline(points: Iterable[Point], **attributes: str | float) -> str:
    """Return a line through points."""
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **attributes)


def _tooltip(words: str) -> str:
    return element("title", escape(words)) if words else ""


def _attributes(attributes: dict[str, str | float]) -> str:
    return "".join(
        f" {'class' if name == 'kind' else name.replace('_', '-')}="
        f'"{escape(value) if isinstance(value, str) else f"{value:.1f}"}"'
        for name, value in attributes.items()
    )


# --- Charts


def chart(frame: Frame, label: str, parts: Iterable[str], kind: str = "") -> str:
    """Return a whole chart; screen readers read `label`."""
    size = f"0 0 {frame.width:g} {frame.height:g}"
    return (
        f'<svg viewBox="{size}" class="{escape(kind)}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def for_screens(draw: Callable[[Frame, str], str], frames: Sequence[Frame]) -> str:
    """Return a chart that `draw` returns for a frame and a class; of two frames the second is for narrow screens."""
    kinds = ("wide", "narrow") if len(frames) > 1 else ("",)
    return "".join(draw(frame, kind) for frame, kind in zip(frames, kinds, strict=True))


# --- Charts

DOT = 3.5
"""Radius of a dot, in pixels."""
MAX_BAR = 48.0
"""Maximum width of a bar, in pixels."""
LABEL_GAP, LABEL_DROP = 8, 17
"""Gap between the left axis and its labels, and between the plotting area and the base line of those below it."""
BELOW_HEIGHT, BELOW_GAP = 34, 22
"""Height of the bars below a bar chart, and of the gap above them, in pixels."""


class Axis(NamedTuple):
    """The range of an axis, and its labels."""

    title: str
    """With the unit."""
    first: float
    last: float
    marks: Sequence[tuple[float, str]]
    """Values with their labels, ascending."""

    @classmethod
    def to(
        cls,
        largest: float,
        title: str,
        written: Callable[[float], str] = "{:g}".format,
        *,
        min_step: float = 0.0,
        is_exact: bool = False,
    ) -> Axis:
        """Return an axis from 0 to a round number of at least `largest`; is_exact: to `largest` itself."""
        values = ticks(largest, min_step)
        last = largest if is_exact and largest > 0 else values[-1]
        return cls(title, 0.0, last, [(value, written(value)) for value in values if value <= last])

    @classmethod
    def of(cls, labels: Sequence[str], title: str, at_most: int = 8) -> Axis:
        """Return an axis of things that are placed at their index; `at_most` labels are shown."""
        every = max(1, -(-len(labels) // at_most))
        marks = [(float(place), label) for place, label in enumerate(labels) if place % every == 0]
        return cls(title, 0.0, max(1.0, len(labels) - 1), marks)


class Series(NamedTuple):
    """Values that are drawn in one color."""

    name: str
    """For the legend."""
    color: str
    points: Sequence[tuple[float, float | None]]
    """Height None: not known; a line has a gap there."""
    style: Literal["line", "area", "dashed", "dots"] = "line"
    words: Sequence[str] = ()
    """Tooltips of the points, which then have dots; `dots` needs them."""


def line_chart(
    label: str,
    x: Axis,
    y: Axis,
    series: Sequence[Series],
    *,
    frames: Sequence[Frame] = (Frame(),),
    reference: tuple[float, str] | None = None,
    behind: Callable[[Frame, Scale, Scale], Iterable[str]] = lambda _frame, _x, _y: (),
    remarks: Sequence[tuple[str, str]] = (),
) -> str:
    """Return a chart with its legend; screen readers read `label`.

    frames: see `for_screens`. reference: a value of a dashed horizontal line, and its meaning. behind: returns
    what is drawn behind the series. remarks: further entries of the legend.
    """

    def draw(frame: Frame, kind: str) -> str:
        left, top = frame.x_scale(x.first, x.last), frame.y_scale(y.first, y.last)
        parts = [*behind(frame, left, top), *_left_axis(frame, y), *_lower_axis(frame, left, x)]
        if reference is not None:
            parts.append(line(frame.left, top(reference[0]), frame.right_edge, top(reference[0]), kind=DASHED))
        for each in series:
            parts += _marks(each, left, top, max(0.0, y.first))
        return chart(frame, label, parts, kind)

    named = [(_legend_class(each), each.name) for each in series]
    known = [] if reference is None else [(DASHED, reference[1])]
    return for_screens(draw, frames) + legend([*named, *known, *remarks])


def _marks(series: Series, x: Scale, y: Scale, base: float) -> list[str]:
    parts = []
    for run in _runs(series.points):
        placed = [(x(value), y(height)) for value, height in run]
        if series.style == "area":
            outline = [(placed[0][0], y(base)), *placed, (placed[-1][0], y(base))]
            parts.append(polyline(outline, kind=f"area {series.color}"))
        if series.style != "dots":
            parts.append(polyline(placed, kind=DASHED if series.style == "dashed" else f"line {series.color}"))
        if len(run) == 1 and not series.words:
            parts.append(circle(*placed[0], DOT, kind=f"dot {series.color}"))
    if series.words:
        parts += [
            circle(x(value), y(height), DOT, words, kind=f"dot {series.color}")
            for (value, height), words in zip(series.points, series.words, strict=True)
            if height is not None
        ]
    return parts


def _runs(points: Sequence[tuple[float, float | None]]) -> list[list[Point]]:
    """Return runs of consecutive points whose heights are known."""
    grouped = groupby(points, lambda point: point[1] is not None)
    return [[(value, height) for value, height in run if height is not None] for is_known, run in grouped if is_known]


def bar_chart(
    label: str,
    x: Axis,
    y: Axis,
    bars: Sequence[Series],
    *,
    below: tuple[Axis, Series] | None = None,
    words: Sequence[str] = (),
) -> str:
    """Return a chart of bars, which are placed at their index, with its legend; screen readers read `label`.

    below: an axis and series of bars in a low chart below. words: tooltips of the places.
    """
    frame = Frame()
    places = len(bars[0].points)
    left = frame.x_scale(-0.5, places - 0.5)
    upper = frame if below is None else frame._replace(bottom=frame.bottom + BELOW_HEIGHT + BELOW_GAP)
    parts = [*_lower_axis(frame, left, x), *_left_axis(upper, y)]
    for each in bars:
        parts += _bars(upper, y, each, f"bar {each.color}")
    if below is not None:
        lower = frame._replace(top=frame.floor - BELOW_HEIGHT)
        parts += [*_left_axis(lower, below[0]), *_bars(lower, below[0], below[1], f"volume {below[1].color}")]
    parts += [hover_strip(frame, left(place - 0.5), left(place + 0.5), tooltip) for place, tooltip in enumerate(words)]
    shown = [each for each in bars if any(height is not None for _, height in each.points)]
    colors = [(each.color, each.name) for each in (shown if below is None else [*shown, below[1]])]
    return chart(frame, label, parts) + legend(colors)


def hover_strip(frame: Frame, left: float, right: float, words: str) -> str:
    """Return an invisible full-height strip with a tooltip; it is shaded under the pointer."""
    return rect(left, frame.top, right - left, frame.floor - frame.top, words, kind="strip")


def _left_axis(frame: Frame, axis: Axis) -> list[str]:
    """Return horizontal grid lines with their labels, and the vertical title."""
    scale, parts = frame.y_scale(axis.first, axis.last), []
    for value, label in axis.marks:
        height = scale(value)
        parts.append(line(frame.left, height, frame.right_edge, height, kind="grid"))
        parts.append(text(label, frame.left - LABEL_GAP, height + 4, text_anchor="end"))
    place = f"translate(12 {(frame.top + frame.floor) / 2:.1f}) rotate(-90)"
    return [*parts, element("text", escape(axis.title), transform=place, text_anchor="middle", kind="axis")]


def _lower_axis(frame: Frame, scale: Scale, axis: Axis) -> list[str]:
    """Return labels below the plotting area, shifted where they would leave the chart, and the title."""
    least, most, height = frame.left + 10, frame.right_edge - 18, frame.floor + LABEL_DROP
    places = [(min(max(scale(value), least), most), label) for value, label in axis.marks]
    labels = [text(label, place, height, text_anchor="middle") for place, label in places]
    middle = (frame.left + frame.right_edge) / 2
    return [*labels, text(axis.title, middle, frame.height - 6, text_anchor="middle", kind="axis")]


def _bars(frame: Frame, y: Axis, series: Series, kind: str) -> list[str]:
    top = frame.y_scale(y.first, y.last)
    slot = (frame.right_edge - frame.left) / len(series.points)
    width = min(MAX_BAR, slot - min(4.0, 0.2 * slot))
    return [
        rect(frame.left + (place + 0.5) * slot - width / 2, top(height), width, frame.floor - top(height), kind=kind)
        for place, height in series.points
        if height is not None
    ]


def _legend_class(series: Series) -> str:
    return {"line": f"line {series.color}", "dashed": DASHED}.get(series.style, series.color)


def sparkline(values: Sequence[float | None], label: str) -> str:
    """Return a small curve without axes, for a table row; empty where fewer than two values are known."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    x, y = linear(0, len(values) - 1, 1, 99), linear(min(known), max(known), 21, 3)
    points = [(x(index), y(value)) for index, value in enumerate(values) if value is not None]
    return chart(Frame(100, 24), label, [polyline(points, kind="line green")], "spark")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the meaning of colors, from pairs of classes and name; a name without a class is a remark."""
    spans = (
        f'<span><i class="{color}"></i>{escape(name)}</span>' if color else f"<span>{escape(name)}</span>"
        for color, name in entries
    )
    return f'<div class="legend">{"".join(spans)}</div>'
