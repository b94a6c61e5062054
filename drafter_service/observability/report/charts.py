"""Panels: tables with a title, and charts of their columns, bars or lines, declared by `Chart`."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Literal, NamedTuple

from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import (
    Axis,
    Frame,
    Scale,
    Series,
    bar_chart,
    hover_strip,
    line_chart,
    ticks,
)
from drafter_service.observability.pages.tables import Cell, Value, cell_text, html_table
from drafter_service.observability.report import units

WIDE = Frame(width=1080)
FEW_TOKENS = 30
"""Minimum number of draft tokens of a reliable share; bars of fewer are paler."""
SHARES = [(value, units.share(value)) for value in (0.0, 0.25, 0.5, 0.75, 1.0)]
TIME_STEPS_S = tuple(
    [60 * minutes for minutes in (1, 2, 5, 10, 15, 30)]
    + [3600 * hours for hours in (1, 2, 3, 6, 12)]
    + [86_400 * days for days in (1, 2, 5, 10, 30, 90, 365)]
)
DAY_S = 86_400


class Chart(NamedTuple):
    """Columns of a table, drawn as bars, or as lines over the rows, over the times that rows begin with, or over the
    first column of numbers, with a diagonal."""

    kind: Literal["bars", "rows", "time", "diagonal"]
    y_title: str
    columns: Mapping[int, str]
    """Color by column."""
    dashed: int = 0
    """Column that is a dashed line; 0: none."""
    area: int = 0
    """Column whose line has an area below; 0: none."""
    below: int = 0
    """Column of numbers of draft tokens, which are bars below the others; 0: none."""
    least: float = 0.0
    """Where the y axis begins if no value is below."""
    reference: tuple[float, str] | None = None
    """A value that is a dashed line, and its meaning."""
    height: float = Frame().height


class Panel(NamedTuple):
    """A table with a title and a sentence, and the same data as a chart."""

    title: str
    note: str
    heads: Sequence[str]
    """Headings of the columns; empty for a list of names and values."""
    rows: Sequence[Sequence[Cell]]
    charts: Sequence[Chart] = ()
    """Without any, the page shows the table itself."""
    is_wide: bool = False
    """Whether it takes the whole width of a page."""


def render_panel(panel: Panel) -> str:
    """Return a panel of a page: its charts with the table folded below, or the table itself."""
    title, note, heads, rows, charts, is_wide = panel
    table = html_table(heads, rows, kinds=("name", *[""] * (len(heads) - 1)))
    drawn = "".join(_draw(chart, title, heads, rows, is_wide=is_wide) for chart in charts)
    return pages.panel(title, note, drawn or table, table if drawn else "", "across" if is_wide else "")


def _draw(chart: Chart, title: str, heads: Sequence[str], rows: Sequence[Sequence[Cell]], *, is_wide: bool) -> str:
    """Return a chart of a table with its legend."""
    names = [cell_text(row[0]) for row in rows]
    words = [_tooltip(heads, row) for row in rows]
    values = [value for column in chart.columns for value in _numbers(rows, column) if value is not None]
    y = _y_axis(chart, values, rows[0][next(iter(chart.columns))])
    label = f"{title}: {', '.join(heads[column] for column in chart.columns)}"
    if chart.kind == "bars":
        bars, below = _bars(chart, heads, rows)
        starts = [name.partition(units.TO)[0] for name in names]
        return bar_chart(label, Axis.of(starts, heads[0], at_most=6), y, bars, below=below, words=words)
    places: list[float] = [float(place) for place in range(len(rows))]
    x = Axis.of([name.rpartition(units.TO)[2] for name in names], heads[0])
    if chart.kind == "time":
        places = [value or 0.0 for value in _numbers(rows, 0)]
        x = _time_axis(places[0], places[-1])
    elif chart.kind == "diagonal":
        places = [value or 0.0 for value in _numbers(rows, 1)]
        x = Axis(heads[1], 0, 1, SHARES[::2])
    series = [
        Series(
            heads[column],
            color,
            list(zip(places, _numbers(rows, column), strict=True)),
            "dashed" if column == chart.dashed else "area" if column == chart.area else "line",
            words if chart.kind != "time" and column != chart.dashed else (),
        )
        for column, color in chart.columns.items()
    ]
    if chart.kind == "diagonal":
        series.append(Series(f"{heads[1]} = {y.title}", "gray", [(0, 0), (1, 1)], "dashed"))
    frame = Frame(height=chart.height)

    def strips(frame: Frame, left: Scale, _top: Scale) -> list[str]:
        """Return a strip with a tooltip from each time to the next one."""
        edges = pairwise([*map(left, places), frame.right_edge])
        return [hover_strip(frame, begin, end, text) for (begin, end), text in zip(edges, words, strict=True)]

    return line_chart(
        label,
        x,
        y,
        series,
        frames=(WIDE._replace(height=chart.height), frame) if is_wide else (frame,),
        reference=chart.reference,
        behind=strips if chart.kind == "time" else lambda *_: (),
    )


def _numbers(rows: Sequence[Sequence[Cell]], column: int) -> list[float | None]:
    return [cell.number if isinstance(cell, Value) else None for cell in (row[column] for row in rows)]


def _tooltip(heads: Sequence[str], row: Sequence[Cell]) -> str:
    facts = (f"{head} {cell_text(cell)}" for head, cell in zip(heads[1:], row[1:], strict=True))
    return f"{cell_text(row[0])}: {', '.join(facts)}"


def _y_axis(chart: Chart, values: Sequence[float], cell: Cell) -> Axis:
    unit = cell.format if isinstance(cell, Value) else units.count
    if unit is units.share:
        return Axis(chart.y_title, 0, 1, SHARES)
    least = chart.least if min(values) >= chart.least else 0.0
    largest = max([*values, *([chart.reference[0]] if chart.reference else [])])
    marks = [least + mark for mark in ticks(max(largest, least + 1e-9) - least, 1.0 if unit is units.count else 0.0)]
    return Axis(chart.y_title, least, marks[-1], [(mark, unit(mark)) for mark in marks])


def _bars(
    chart: Chart, heads: Sequence[str], rows: Sequence[Sequence[Cell]]
) -> tuple[list[Series], tuple[Axis, Series] | None]:
    """Return the bars of the chart's column, and of the column below."""
    [(column, color)] = chart.columns.items()
    heights = _numbers(rows, column)
    if not chart.below:
        return [Series(heads[column], color, list(enumerate(heights)))], None
    volumes = [value or 0.0 for value in _numbers(rows, chart.below)]
    pairs = list(zip(heights, volumes, strict=True))
    many = [height if volume >= FEW_TOKENS else None for height, volume in pairs]
    few = [height if volume < FEW_TOKENS else None for height, volume in pairs]
    bars = [
        Series(heads[column], color, list(enumerate(many))),
        Series(f"of fewer than {FEW_TOKENS}", f"{color} pale", list(enumerate(few))),
    ]
    most = max([1.0, *volumes])
    axis = Axis("tokens", 0, most, [(0, "0"), (most, units.count(most))])
    return bars, (axis, Series(heads[chart.below], "violet", list(enumerate(volumes))))


def _time_axis(begin: float, end: float) -> Axis:
    """Return an axis with at most four round times."""
    step = next((step for step in TIME_STEPS_S if (end - begin) / step <= 4), None)
    if step is None:
        step = TIME_STEPS_S[-1] * math.ceil((end - begin) / 4 / TIME_STEPS_S[-1])
    moments = [step * number for number in range(math.ceil(begin / step), int(end // step) + 1)]
    marks = [(moment, units.moment(moment, "%b %-d" if moment % DAY_S == 0 else "%H:%M")) for moment in moments]
    return Axis("time (UTC)", begin, end, marks)
