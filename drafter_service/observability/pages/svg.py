"""SVG: elements, scales, axes and areas of charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

Scale = Callable[[float], float]
"""Function from a value to a position in pixels."""
Point = tuple[float, float]

MAX_TICKS = 5
LABEL_GAP = 8
"""Gap between an axis and its labels, in pixels."""
X_LABEL_DROP = 17
"""Distance of the base line of the lower axis' labels from the plotting area, in pixels."""
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
    return element("polyline", points=_points(points), **attributes)


def polygon(points: Iterable[Point], **attributes: str | float) -> str:
    """Return a filled outline."""
    return element("polygon", points=_points(points), **attributes)


def _tooltip(words: str) -> str:
    return element("title", escape(words)) if words else ""


def _points(points: Iterable[Point]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


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


def y_axis(frame: Frame, y: Scale, marks: Iterable[float], written: Callable[[float], str]) -> list[str]:
    """Return horizontal grid lines with labels on the left."""
    parts = []
    for mark in marks:
        parts.append(line(frame.left, y(mark), frame.right_edge, y(mark), kind="grid"))
        parts.append(text(written(mark), frame.left - LABEL_GAP, y(mark) + 4, text_anchor="end"))
    return parts


def x_axis(frame: Frame, x: Scale, marks: Iterable[tuple[float, str]]) -> list[str]:
    """Return labels below the plotting area, shifted where they would leave the chart."""
    least, most = frame.left + 10, frame.right_edge - 18
    return [
        text(words, min(max(x(mark), least), most), frame.floor + X_LABEL_DROP, text_anchor="middle")
        for mark, words in marks
    ]


def x_title(frame: Frame, words: str) -> str:
    """Return the title of the lower axis, with its unit."""
    middle = (frame.left + frame.right_edge) / 2
    return text(words, middle, frame.height - 6, text_anchor="middle", kind="axis")


def y_title(frame: Frame, words: str) -> str:
    """Return the vertical title of the left axis, with its unit."""
    place = f"translate(12 {(frame.top + frame.floor) / 2:.1f}) rotate(-90)"
    return element("text", escape(words), transform=place, text_anchor="middle", kind="axis")


def reference_line(frame: Frame, y: float) -> str:
    """Return a dashed horizontal line; its meaning belongs into the legend, as `DASHED`."""
    return line(frame.left, y, frame.right_edge, y, kind="dashed")


def area(points: Sequence[Point], base: float, kind: str) -> str:
    """Return the area between a curve and the horizontal line at the height `base`."""
    return polygon([(points[0][0], base), *points, (points[-1][0], base)], kind=f"area {kind}")


def hover_strip(frame: Frame, left: float, right: float, words: str) -> str:
    """Return an invisible full-height strip with a tooltip; it is shaded under the pointer."""
    return rect(left, frame.top, right - left, frame.floor - frame.top, words, kind="strip")


def for_screens(draw: Callable[[Frame, str], str], frames: Sequence[Frame]) -> str:
    """Return a chart that `draw` returns for a frame and a class; of two frames the second is for narrow screens."""
    kinds = ("wide", "narrow") if len(frames) > 1 else ("",)
    return "".join(draw(frame, kind) for frame, kind in zip(frames, kinds, strict=True))
