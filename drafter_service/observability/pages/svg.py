"""SVG: elements, scales and frames of charts."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

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
