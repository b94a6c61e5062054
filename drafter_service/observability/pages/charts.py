"""Panels: tables with a title, and the same numbers as charts in SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape
from itertools import groupby
from typing import Literal, NamedTuple

from drafter_service.observability.pages import units
from drafter_service.observability.pages.page import panel as panel_markup
from drafter_service.observability.pages.tables import Cell, Value, cell_text, html_table

SHARES = [(value, units.share(value)) for value in (0.0, 0.25, 0.5, 0.75, 1.0)]
MAX_TICKS = 5
MAX_LABELS = {"bars": 6, "rows": 8, "time": 3}
"""Maximum number of labels of a y axis, and of an x axis by kind of chart."""
MAX_BAR = 48.0
"""Maximum width of a bar, in pixels."""
DASHED = "dashed"
"""Class of dashed lines in charts and legends."""


class Chart(NamedTuple):
    """Columns of a table, drawn as bars, or as lines over the rows, whose names may be times."""

    kind: Literal["bars", "rows", "time"]
    y_title: str
    columns: Mapping[int, str]
    """Color by column."""
    dashed: int = 0
    """Column that is a dashed line; 0: none."""
    area: int = 0
    """Column whose line has an area below; 0: none."""
    least: float = 0.0
    """Where the y axis begins if no value is below."""
    reference: tuple[float, str] | None = None
    """A value that is a dashed line, and its meaning."""


class Panel(NamedTuple):
    """A table with a title and a sentence, and the same data as a chart."""

    title: str
    note: str
    heads: Sequence[str]
    """Headings of the columns; empty for a list of names and values."""
    rows: Sequence[Sequence[Cell]]
    chart: Chart | None = None
    """Without one, the page shows the table itself."""
    is_wide: bool = False
    """Whether it takes the whole width of a page."""


def render_panel(panel: Panel) -> str:
    """Return a panel of a page: its chart with the table folded below, or the table itself."""
    table = html_table(panel.heads, panel.rows)
    drawn = "" if panel.chart is None else _draw(panel.chart, panel)
    kind = "across" if panel.is_wide else ""
    return panel_markup(panel.title, panel.note, drawn or table, table if drawn else "", kind)


# --- SVG

WIDTH, HEIGHT = 400.0, 268.0
"""Size of a chart, in pixels."""
LEFT, RIGHT, TOP, FLOOR = 62.0, WIDTH - 12, 14.0, HEIGHT - 44
"""Edges of the plotting area."""
DOT = 3.5
"""Radius of a dot."""


def element(name: str, content: str = "", /, **attributes: str | float) -> str:
    """Return an element; `content` is markup. In attribute names `_` becomes `-`, and `kind` becomes `class`."""
    written = "".join(
        f" {'class' if name == 'kind' else name.replace('_', '-')}="
        f'"{escape(value) if isinstance(value, str) else f"{value:.1f}"}"'
        for name, value in attributes.items()
    )
    return f"<{name}{written}>{content}</{name}>"


def _text(words: str, x: float, y: float, **attributes: str | float) -> str:
    return element("text", escape(words), x=x, y=y, **attributes)


def _level(y: float, kind: str) -> str:
    """Return a horizontal line over the plotting area."""
    return element("line", x1=LEFT, y1=y, x2=RIGHT, y2=y, kind=kind)


def _rect(x: float, y: float, width: float, height: float, kind: str, content: str = "") -> str:
    return element("rect", content, x=x, y=y, width=max(0.0, width), height=max(0.0, height), kind=kind)


def _dot(place: tuple[float, float], kind: str, content: str = "") -> str:
    return element("circle", content, cx=place[0], cy=place[1], r=DOT, kind=kind)


def _polyline(points: Iterable[tuple[float, float]], kind: str) -> str:
    return element("polyline", points=" ".join(f"{x:.1f},{y:.1f}" for x, y in points), kind=kind)


# --- Charts


def ticks(largest: float, min_step: float = 0.0) -> list[float]:
    """Return round numbers from 0 to `largest` or slightly more, in steps of 1, 2 or 5 times a power of ten."""
    if largest <= 0:
        return [0.0, 1.0]
    power = 10.0 ** math.floor(math.log10(largest / MAX_TICKS))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor * MAX_TICKS >= largest * (1 - 1e-9))
    step = max(step, min_step)
    return [step * index for index in range(math.ceil(largest / step - 1e-9) + 1)]


def _draw(chart: Chart, panel: Panel) -> str:
    """Return a chart of a table with its legend."""
    count, marks = len(panel.rows), _y_marks(chart, panel)
    (least, _), (largest, _) = marks[0], marks[-1]
    slot = (RIGHT - LEFT) / (count if chart.kind == "bars" else max(1, count - 1))
    places = [LEFT + slot * (index + 0.5 * (chart.kind == "bars")) for index in range(count)]

    def height(value: float) -> float:
        return FLOOR + (TOP - FLOOR) * (min(max(value, least), largest) - least) / (largest - least)

    words = [element("title", escape(_tooltip(panel.heads, row))) for row in panel.rows]
    parts = [*_left_axis(chart.y_title, [(height(value), label) for value, label in marks])]
    parts += _lower_axis(chart, panel, places)
    known = []
    if chart.reference is not None:
        parts.append(_level(height(chart.reference[0]), DASHED))
        known.append((DASHED, chart.reference[1]))
    entries = []
    for column, color in chart.columns.items():
        heights = [None if value is None else height(value) for value in _numbers(panel, column)]
        points = list(zip(places, heights, strict=True))
        is_line = chart.kind != "bars" and column != chart.area
        kind = DASHED if column == chart.dashed else f"line {color}" if is_line else color
        entries.append((kind, panel.heads[column]))
        if chart.kind == "bars":
            width = min(MAX_BAR, slot - min(4.0, 0.2 * slot))
            parts += [_rect(x - width / 2, y, width, FLOOR - y, f"bar {color}") for x, y in points if y is not None]
            continue
        parts += _line(points, kind if is_line else f"line {color}", "" if is_line else f"area {color}")
        for index, (x, y) in enumerate(points):
            is_alone = all(place is None for place in (*heights[max(0, index - 1) : index], *heights[index + 1 :][:1]))
            if y is not None and (kind != DASHED if chart.kind == "rows" else is_alone):
                parts.append(_dot((x, y), f"dot {color}", words[index] if chart.kind == "rows" else ""))
    if chart.kind != "rows":
        for place, text in zip(places, words, strict=True):
            begin, end = max(LEFT, place - slot / 2), min(RIGHT, place + slot / 2)
            parts.append(_rect(begin, TOP, end - begin, FLOOR - TOP, "strip", text))
    # Screen readers read the label.
    label = f"{panel.title}: {', '.join(panel.heads[column] for column in chart.columns)}"
    size = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
    drawing = f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    return drawing + legend([*entries, *known])


def _line(points: Iterable[tuple[float, float | None]], kind: str, area: str) -> Iterable[str]:
    """Yield a line, with gaps where a height is not known, and the area below it, if `area` is a class."""
    for _, run in groupby(points, lambda point: point[1] is None):
        placed = [(x, y) for x, y in run if y is not None]
        if placed and area:
            yield _polyline([(placed[0][0], FLOOR), *placed, (placed[-1][0], FLOOR)], area)
        if placed:
            yield _polyline(placed, kind)


def _numbers(panel: Panel, column: int) -> list[float | None]:
    return [cell.number if isinstance(cell, Value) else None for cell in (row[column] for row in panel.rows)]


def _tooltip(heads: Sequence[str], row: Sequence[Cell]) -> str:
    facts = (f"{head} {cell_text(cell)}" for head, cell in zip(heads[1:], row[1:], strict=True))
    return f"{cell_text(row[0])}: {', '.join(facts)}"


def _y_marks(chart: Chart, panel: Panel) -> list[tuple[float, str]]:
    """Return the values with labels on the y axis, ascending."""
    cell = panel.rows[0][next(iter(chart.columns))]
    unit = cell.format if isinstance(cell, Value) else units.count
    if unit is units.share:
        return SHARES
    values = [value for column in chart.columns for value in _numbers(panel, column) if value is not None]
    least = chart.least if min(values) >= chart.least else 0.0
    largest = max([*values, *([chart.reference[0]] if chart.reference else [])])
    marks = ticks(max(largest, least + 1e-9) - least, 1.0 if unit is units.count else 0.0)
    return [(least + mark, unit(least + mark)) for mark in marks]


def _left_axis(title: str, marks: Iterable[tuple[float, str]]) -> Iterable[str]:
    """Yield horizontal grid lines with their labels, and the vertical title; marks: heights and labels."""
    for height, label in marks:
        yield _level(height, "grid")
        yield _text(label, LEFT - 8, height + 4, text_anchor="end")
    place = f"translate(12 {(TOP + FLOOR) / 2:.1f}) rotate(-90)"
    yield element("text", escape(title), transform=place, text_anchor="middle", kind="axis")


def _lower_axis(chart: Chart, panel: Panel, places: Sequence[float]) -> Iterable[str]:
    """Yield labels of some rows below the plotting area, shifted where they would leave the chart, and the title."""
    room = 38 if chart.kind == "time" else 18
    for index in range(0, len(places), -(-len(places) // MAX_LABELS[chart.kind])):
        cell = panel.rows[index][0]
        if chart.kind == "time" and isinstance(cell, Value):
            label = units.moment(cell.number, "%b %-d %H:%M")
        else:
            least, _, most = cell_text(cell).rpartition(units.TO)
            label = least or most if chart.kind == "bars" else most
        yield _text(label, min(max(places[index], LEFT + 10), RIGHT - room), FLOOR + 17, text_anchor="middle")
    title = "time (UTC)" if chart.kind == "time" else panel.heads[0]
    yield _text(title, (LEFT + RIGHT) / 2, HEIGHT - 6, text_anchor="middle", kind="axis")


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the meaning of colors, from pairs of class and name."""
    spans = (f'<span><i class="{color}"></i>{escape(name)}</span>' for color, name in entries)
    return f'<div class="legend">{"".join(spans)}</div>'
