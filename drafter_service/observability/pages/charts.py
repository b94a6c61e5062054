"""Panels: tables with a title, and the same numbers as charts in SVG."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from itertools import groupby, pairwise
from typing import Literal, NamedTuple

from drafter_service.observability.pages import units
from drafter_service.observability.pages.page import panel as panel_markup
from drafter_service.observability.pages.tables import Cell, Value, cell_text, html_table

Scale = Callable[[float], float]
"""Function from a value to a position in pixels."""

SHARES = [(value, units.share(value)) for value in (0.0, 0.25, 0.5, 0.75, 1.0)]
MAX_TICKS, MAX_LABELS, MAX_TIMES = 5, 8, 4
"""Maximum number of labels of a y axis, of an x axis, and of an axis of times."""
DAY_S = 86_400
TIME_STEPS_S = tuple(
    [60 * minutes for minutes in (1, 2, 5, 10, 15, 30)]
    + [3600 * hours for hours in (1, 2, 3, 6, 12)]
    + [DAY_S * days for days in (1, 2, 5, 10, 30, 90, 365)]
)
MAX_BAR = 48.0
"""Maximum width of a bar, in pixels."""
DASHED = "dashed"
"""Class of dashed lines in charts and legends."""


class Chart(NamedTuple):
    """Columns of a table, drawn as bars, or as lines over the rows or over the times that rows begin with."""

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


# --- Scales and axes


class Axis(NamedTuple):
    """The range of an axis, and its labels."""

    title: str
    """With the unit."""
    first: float
    last: float
    marks: Sequence[tuple[float, str]]
    """Values with their labels, ascending."""

    def between(self, begin: float, end: float) -> Scale:
        """Return a scale from `first` at the position `begin` to `last` at `end`; it clips values outside."""
        extent = self.last - self.first

        def position(value: float) -> float:
            part = (min(max(value, self.first), self.last) - self.first) / extent if extent > 0 else 0.0
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


def _x_axis(chart: Chart, panel: Panel) -> tuple[Axis, list[float]]:
    """Return the lower axis, and the place of each row on it."""
    head, count = panel.heads[0], len(panel.rows)
    if chart.kind == "time":
        times = [value or 0.0 for value in _numbers(panel, 0)]
        return _time_axis(times[0], times[-1]), times
    names = [cell_text(row[0]) for row in panel.rows]
    every = max(1, -(-count // (MAX_LABELS - 2 if chart.kind == "bars" else MAX_LABELS)))
    if chart.kind == "bars":
        marks = [(float(place), names[place].partition(units.TO)[0]) for place in range(0, count, every)]
        return Axis(head, -0.5, count - 0.5, marks), [float(place) for place in range(count)]
    marks = [(float(place), names[place].rpartition(units.TO)[2]) for place in range(0, count, every)]
    return Axis(head, 0, max(1, count - 1), marks), [float(place) for place in range(count)]


def _time_axis(begin: float, end: float) -> Axis:
    """Return an axis with a few round times."""
    step = next((step for step in TIME_STEPS_S if (end - begin) / step <= MAX_TIMES), None)
    if step is None:
        step = TIME_STEPS_S[-1] * math.ceil((end - begin) / MAX_TIMES / TIME_STEPS_S[-1])
    moments = [step * number for number in range(math.ceil(begin / step), int(end // step) + 1)]
    marks = [(moment, units.moment(moment, "%b %-d" if moment % DAY_S == 0 else "%H:%M")) for moment in moments]
    return Axis("time (UTC)", begin, end, marks)


def _y_axis(chart: Chart, panel: Panel) -> Axis:
    cell = panel.rows[0][next(iter(chart.columns))]
    unit = cell.format if isinstance(cell, Value) else units.count
    if unit is units.share:
        return Axis(chart.y_title, 0, 1, SHARES)
    values = [value for column in chart.columns for value in _numbers(panel, column) if value is not None]
    least = chart.least if min(values) >= chart.least else 0.0
    largest = max([*values, *([chart.reference[0]] if chart.reference else [])])
    marks = [least + mark for mark in ticks(max(largest, least + 1e-9) - least, 1.0 if unit is units.count else 0.0)]
    return Axis(chart.y_title, least, marks[-1], [(mark, unit(mark)) for mark in marks])


# --- Charts


class Series(NamedTuple):
    """Values that are drawn in one color."""

    name: str
    """For the legend."""
    color: str
    """`DASHED` for a dashed line."""
    points: Sequence[tuple[float, float | None]]
    """Height None: not known; a line has a gap there."""
    style: Literal["line", "area", "bar"]

    @property
    def line(self) -> str:
        """Class of its line."""
        return self.color if self.color == DASHED else f"line {self.color}"


def _draw(chart: Chart, panel: Panel) -> str:
    """Return a chart of a table with its legend."""
    (x, places), y = _x_axis(chart, panel), _y_axis(chart, panel)
    words = [element("title", escape(_tooltip(panel.heads, row))) for row in panel.rows]
    series = [
        Series(
            panel.heads[column],
            DASHED if column == chart.dashed else color,
            list(zip(places, _numbers(panel, column), strict=True)),
            "bar" if chart.kind == "bars" else "area" if column == chart.area else "line",
        )
        for column, color in chart.columns.items()
    ]
    left, top = x.between(LEFT, RIGHT), y.between(FLOOR, TOP)
    parts = [*_left_axis(y), *_lower_axis(left, x)]
    if chart.reference is not None:
        parts.append(_level(top(chart.reference[0]), DASHED))
    for each in series:
        parts += _marks(each, left, top, words if chart.kind == "rows" and each.color != DASHED else None)
    if chart.kind != "rows":
        edges = [*places, x.last] if chart.kind == "time" else [place - 0.5 for place in [*places, len(places)]]
        parts += [
            _rect(begin, TOP, end - begin, FLOOR - TOP, "strip", text)
            for (begin, end), text in zip(pairwise(map(left, edges)), words, strict=True)
        ]
    entries = [(each.line if each.style == "line" else each.color, each.name) for each in series]
    known = [] if chart.reference is None else [(DASHED, chart.reference[1])]
    # Screen readers read the label.
    label = f"{panel.title}: {', '.join(panel.heads[column] for column in chart.columns)}"
    size = f'viewBox="0 0 {WIDTH:g} {HEIGHT:g}"'
    drawing = f'<svg {size} role="img" aria-label="{escape(label)}">{"".join(parts)}</svg>'
    return drawing + legend([*entries, *known])


def _marks(series: Series, x: Scale, y: Scale, words: Sequence[str] | None) -> list[str]:
    """Return the marks of a series; words: tooltips of its points, which are dots then."""
    known = [(x(place), y(height)) for place, height in series.points if height is not None]
    if series.style == "bar":
        slot = x(0.5) - x(-0.5)
        width = min(MAX_BAR, slot - min(4.0, 0.2 * slot))
        return [
            _rect(place - width / 2, height, width, FLOOR - height, f"bar {series.color}") for place, height in known
        ]
    parts, dot = [], f"dot {series.color}"
    for is_known, run in groupby(series.points, lambda point: point[1] is not None):
        placed = [(x(place), y(height or 0.0)) for place, height in run] if is_known else []
        if series.style == "area" and placed:
            parts.append(_polyline([(placed[0][0], FLOOR), *placed, (placed[-1][0], FLOOR)], f"area {series.color}"))
        if len(placed) == 1 and words is None:
            parts.append(_dot(placed[0], dot))
        if placed:
            parts.append(_polyline(placed, series.line))
    shown = [text for text, (_, height) in zip(words or (), series.points, strict=False) if height is not None]
    return parts + [_dot(place, dot, text) for place, text in zip(known, shown, strict=False)]


def _numbers(panel: Panel, column: int) -> list[float | None]:
    return [cell.number if isinstance(cell, Value) else None for cell in (row[column] for row in panel.rows)]


def _tooltip(heads: Sequence[str], row: Sequence[Cell]) -> str:
    facts = (f"{head} {cell_text(cell)}" for head, cell in zip(heads[1:], row[1:], strict=True))
    return f"{cell_text(row[0])}: {', '.join(facts)}"


def _left_axis(axis: Axis) -> list[str]:
    """Return horizontal grid lines with their labels, and the vertical title."""
    scale, parts = axis.between(FLOOR, TOP), []
    for value, label in axis.marks:
        height = scale(value)
        parts += [_level(height, "grid"), _text(label, LEFT - 8, height + 4, text_anchor="end")]
    place = f"translate(12 {(TOP + FLOOR) / 2:.1f}) rotate(-90)"
    return [*parts, element("text", escape(axis.title), transform=place, text_anchor="middle", kind="axis")]


def _lower_axis(scale: Scale, axis: Axis) -> list[str]:
    """Return labels below the plotting area, shifted where they would leave the chart, and the title."""
    places = [(min(max(scale(value), LEFT + 10), RIGHT - 18), label) for value, label in axis.marks]
    labels = [_text(label, place, FLOOR + 17, text_anchor="middle") for place, label in places]
    return [*labels, _text(axis.title, (LEFT + RIGHT) / 2, HEIGHT - 6, text_anchor="middle", kind="axis")]


def legend(entries: Iterable[tuple[str, str]]) -> str:
    """Return the meaning of colors, from pairs of class and name."""
    spans = (f'<span><i class="{color}"></i>{escape(name)}</span>' for color, name in entries)
    return f'<div class="legend">{"".join(spans)}</div>'
