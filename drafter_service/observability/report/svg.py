"""The parts that plots are made of: scales, ticks, and elements as text."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from html import escape

Scale = Callable[[float], float]

MOST_TICKS = 5


def linear(first: float, last: float, begin: float, end: float) -> Scale:
    """From numbers `first` to `last` to places `begin` to `end`; what lies outside is put at the edge."""
    reach = last - first

    def place(value: float) -> float:
        part = (min(max(value, first), last) - first) / reach if reach > 0 else 0.0
        return begin + part * (end - begin)

    return place


def ticks(most: float, least_step: float = 0.0) -> list[float]:
    """Round numbers from 0 up to `most` or a little more: steps of 1, 2 or 5 times a power of ten."""
    if most <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(most / MOST_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * MOST_TICKS >= most * (1 - 1e-9))
    step = max(step, least_step)
    return [step * index for index in range(math.ceil(most / step - 1e-9) + 1)]


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """An element; `content` is markup already. Underscores of names become hyphens, `kind` becomes the class."""
    return f"<{name}{_written(attributes)}>{content}</{name}>"


def text(words: str, x: float, y: float, **attributes: str | float) -> str:
    """Words at a place."""
    return element("text", escape(words), x=x, y=y, **attributes)


def line(x1: float, y1: float, x2: float, y2: float, **attributes: str | float) -> str:
    """A straight line."""
    return element("line", x1=x1, y1=y1, x2=x2, y2=y2, **attributes)


def rect(x: float, y: float, width: float, height: float, title: str = "", **attributes: str | float) -> str:
    """A rectangle, with what a pointer over it is told."""
    size = {"x": x, "y": y, "width": max(0.0, width), "height": max(0.0, height)}
    return element("rect", _title(title), **size, **attributes)


def circle(x: float, y: float, radius: float, title: str = "", **attributes: str | float) -> str:
    """A circle, with what a pointer over it is told."""
    return element("circle", _title(title), cx=x, cy=y, r=radius, **attributes)


def polyline(points: Iterable[tuple[float, float]], **attributes: str | float) -> str:
    """A line through points."""
    return element("polyline", points=_points(points), **attributes)


def polygon(points: Iterable[tuple[float, float]], **attributes: str | float) -> str:
    """A filled outline."""
    return element("polygon", points=_points(points), **attributes)


def drawing(width: float, height: float, label: str, parts: Sequence[str], kind: str = "") -> str:
    """A whole plot that a screen reader calls `label`."""
    size = f"0 0 {width:g} {height:g}"
    return (
        f'<svg viewBox="{size}" class="{escape(kind)}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def rules(places: Iterable[tuple[float, str]], left: float, right: float) -> list[str]:
    """Horizontal lines of a grid with their labels on the left."""
    parts = []
    for y, label in places:
        parts.append(line(left, y, right, y, kind="grid"))
        parts.append(text(label, left - 8, y + 4, text_anchor="end"))
    return parts


def _title(words: str) -> str:
    return element("title", escape(words)) if words else ""


def _points(points: Iterable[tuple[float, float]]) -> str:
    return " ".join(f"{x:.1f},{y:.1f}" for x, y in points)


def _written(attributes: dict[str, str | float]) -> str:
    return "".join(
        f" {'class' if name == 'kind' else name.replace('_', '-')}="
        f'"{escape(value) if isinstance(value, str) else f"{value:.1f}"}"'
        for name, value in attributes.items()
    )
