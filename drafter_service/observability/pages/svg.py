"""Elements of SVG, and the frame of a chart."""

from __future__ import annotations

from collections.abc import Iterable
from html import escape
from typing import NamedTuple

DOT = 3.5
"""Radius of a dot, in pixels."""


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


def svg(frame: Frame, label: str, parts: Iterable[str], kind: str = "") -> str:
    """Return a whole chart; screen readers read `label`."""
    size = f"0 0 {frame.width:g} {frame.height:g}"
    return (
        f'<svg viewBox="{size}" class="{escape(kind)}" role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    )


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """Return an element; `content` is markup. In attribute names `_` becomes `-`, and `kind` becomes `class`."""
    written = "".join(
        f" {'class' if name == 'kind' else name.replace('_', '-')}="
        f'"{escape(value) if isinstance(value, str) else f"{value:.1f}"}"'
        for name, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>"


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


def circle(x: float, y: float, title: str = "", **attributes: str | float) -> str:
    """Return a dot with a tooltip."""
    return element("circle", _tooltip(title), cx=x, cy=y, r=DOT, **attributes)


def polyline(points: Iterable[tuple[float, float]], **attributes: str | float) -> str:
    """Return a line through points."""
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), **attributes)


def _tooltip(words: str) -> str:
    return element("title", escape(words)) if words else ""
