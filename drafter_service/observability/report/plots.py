"""Charts of a report, as SVG."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby

from drafter_service.observability.pages import charts, svg
from drafter_service.observability.pages.charts import Axis, Series
from drafter_service.observability.pages.svg import Frame, Scale
from drafter_service.observability.report import units
from drafter_service.observability.report.schema import Calibration, LatencyReport, Period, SourceTally, StepSize
from drafter_service.observability.report.table_rows import Row

FRAME = Frame()
TIME = "time (UTC)"
WIDE, NARROW = Frame(width=1080, height=348), Frame(width=400, height=348)
LOWER_HEIGHT, LOWER_GAP = 78, 30
"""Height of the lower chart of `drafting_over_time`, and of the gap above it, in pixels."""
VOLUME_HEIGHT, VOLUME_GAP = 34, 22
FEW_TOKENS = 30
"""Minimum number of draft tokens of a reliable share; shares of fewer are drawn paler."""
MAX_RADIUS = 11.0
QUANTILE_LABELS_HEIGHT = 32
"""Height of the labels of p50 and p99 above the bars, in pixels."""
MIN_BINS = 8
"""Minimum number of bins of a chart of durations; with fewer the bars would be too wide."""
QUARTERS = (0.0, 0.25, 0.5, 0.75, 1.0)
SOURCE_COLORS = {"corpus": "violet", "local": "amber", "fallback": "gray", "library": "blue"}
TIME_STEPS_S = tuple(
    [60 * minutes for minutes in (1, 2, 5, 10, 15, 30)]
    + [3600 * hours for hours in (1, 2, 3, 6, 12)]
    + [86_400 * days for days in (1, 2, 5, 10, 30, 90, 365)]
)
DAY_S = 86_400


# --- Over time


def drafting_over_time(periods: Sequence[Period]) -> str:
    """Chart tokens per step, with hit rate and acceptance below."""
    return svg.for_screens(lambda frame, kind: _drafting(periods, frame, kind), (WIDE, NARROW))


def _drafting(periods: Sequence[Period], frame: Frame, kind: str) -> str:
    x = frame.x_scale(periods[0].begins_at, periods[-1].ends_at)
    upper = frame._replace(bottom=frame.bottom + LOWER_HEIGHT + LOWER_GAP)
    lower = frame._replace(top=frame.floor - LOWER_HEIGHT)
    known = [period.tokens_per_step for period in periods if period.tokens_per_step is not None]
    # The axis starts at 1, plain decoding, unless a value is below it.
    base = 1.0 if min(known) >= 1 else 0.0
    marks = [base + mark for mark in svg.ticks(max([2.0, *known]) - base)]
    y, lower_y = upper.y_scale(marks[0], marks[-1]), lower.y_scale(0, 1)
    parts = [
        *svg.y_axis(upper, y, marks, "{:g}".format),
        *svg.y_axis(lower, lower_y, (0.0, 0.5, 1.0), units.share),
        *_dates(periods, frame, x),
        svg.y_title(upper, "tokens per step"),
        svg.y_title(lower, "share"),
    ]
    for run in _runs(periods):
        points = _curve(run, "tokens_per_step", x, y)
        parts.append(svg.area(points, y(1), "green"))
        parts.append(svg.polyline(points, kind="line green"))
        for name, color in (("hit_rate", "blue"), ("acceptance", "amber")):
            parts.append(svg.polyline(_curve(run, name, x, lower_y), kind=f"line thin {color}"))
    parts.append(svg.reference_line(frame, y(1)))
    parts += [_spot(period, frame, x, y(period.tokens_per_step or 0.0)) for period in periods]
    label = f"Tokens per step over time, now {units.ratio(known[-1])}; hit rate and acceptance below"
    return svg.chart(frame, label, parts, kind)


def corpus_over_time(periods: Sequence[Period], capacity: int | None) -> str:
    """Chart the number of remembered tokens, with the capacity as a line."""
    first, last = periods[0].begins_at, periods[-1].ends_at
    most = max([1, capacity or 0, *(period.corpus_tokens for period in periods)])
    points = [(period.ends_at, float(period.corpus_tokens)) for period in periods]

    def strips(frame: Frame, x: Scale, _: Scale) -> list[str]:
        return [
            svg.hover_strip(
                frame,
                x(period.begins_at),
                x(period.ends_at),
                f"{units.moment(period.ends_at)}: {units.counted(period.corpus_tokens, 'token')}",
            )
            for period in periods
        ]

    return charts.line_chart(
        f"Tokens remembered over time, now {units.count(periods[-1].corpus_tokens)}",
        Axis(TIME, first, last, time_ticks(first, last, 4)),
        Axis.to(most, "tokens", units.count, min_step=1),
        [Series("tokens remembered", "violet", [(first, points[0][1]), *points], "area")],
        reference=(capacity, "capacity") if capacity else None,
        behind=strips,
    )


def time_ticks(begin: float, end: float, at_most: int) -> list[tuple[float, str]]:
    """Return round times from `begin` to `end`, in seconds since 1970, with their labels."""
    step = next((step for step in TIME_STEPS_S if (end - begin) / step <= at_most), None)
    if step is None:
        step = TIME_STEPS_S[-1] * math.ceil((end - begin) / at_most / TIME_STEPS_S[-1])
    first = math.ceil(begin / step)
    moments = [step * number for number in range(first, int(end // step) + 1)]
    return [(moment, units.moment(moment, "%b %-d" if moment % DAY_S == 0 else "%H:%M")) for moment in moments]


def _dates(periods: Sequence[Period], frame: Frame, x: Scale) -> list[str]:
    at_most = 8 if frame.width > 600 else 4
    marks = time_ticks(periods[0].begins_at, periods[-1].ends_at, at_most)
    return [*svg.x_axis(frame, x, marks), svg.x_title(frame, TIME)]


def _runs(periods: Iterable[Period]) -> list[list[Period]]:
    """Return runs of consecutive periods for which tokens per step are known."""
    grouped = groupby(periods, lambda period: period.tokens_per_step is not None)
    return [list(run) for is_known, run in grouped if is_known]


def _curve(run: Sequence[Period], name: str, x: Scale, y: Scale) -> list[svg.Point]:
    """Return the points of a field over consecutive periods; a horizontal line for a single period."""
    if len(run) == 1:
        height = y(getattr(run[0], name) or 0.0)
        return [(x(run[0].begins_at), height), (x(run[0].ends_at), height)]
    values = [(period, getattr(period, name)) for period in run]
    return [(x(_middle(period)), y(value)) for period, value in values if value is not None]


def _spot(period: Period, frame: Frame, x: Scale, y: float) -> str:
    """Return the marks and the tooltip that appear under the pointer."""
    seconds = period.ends_at - period.begins_at
    words = (
        f"{units.moment(period.begins_at)}, {units.duration(seconds)}: "
        f"{units.ratio(period.tokens_per_step)} tokens per step, hit rate {units.share(period.hit_rate)}, "
        f"acceptance {units.share(period.acceptance)}, {units.rate(period.committed / seconds)} tokens/s"
    )
    middle = x(_middle(period))
    mark = "" if period.tokens_per_step is None else svg.circle(middle, y, 4.5)
    guide = svg.line(middle, frame.top, middle, frame.floor)
    strip = svg.hover_strip(frame, x(period.begins_at), x(period.ends_at), words)
    return svg.element("g", guide + mark + strip, kind="spot")


def _middle(period: Period) -> float:
    return (period.begins_at + period.ends_at) / 2


# --- Counter tables as bars


def shares(rows: Sequence[Row], label: str, x_title: str, name: str, labels: int) -> str:
    """Chart acceptance as bars, with the numbers of draft tokens below; about `labels` bars are labeled.

    name: template of the name of a row in its tooltip.
    """
    frame = FRAME
    upper = frame._replace(bottom=frame.bottom + VOLUME_HEIGHT + VOLUME_GAP)
    lower = frame._replace(top=frame.floor - VOLUME_HEIGHT)
    most = max(1, *(row.tally.drafted for row in rows), 1)
    y, volume_y = upper.y_scale(0, 1), lower.y_scale(0, most)
    slot = (frame.right_edge - frame.left) / len(rows)
    gap = min(4.0, slot * 0.2)
    parts = svg.y_axis(upper, y, QUARTERS, units.share)
    parts += svg.y_axis(lower, volume_y, (0, most), units.count)
    parts += [svg.y_title(upper, "accepted"), svg.y_title(lower, "tokens"), svg.x_title(frame, x_title)]
    every = max(1, math.ceil(len(rows) / labels))
    for index, row in enumerate(rows):
        tally = row.tally
        left, width = frame.left + index * slot + gap / 2, slot - gap
        top, volume_top = y(tally.acceptance or 0.0), volume_y(tally.drafted)
        kind = "bar green" if tally.drafted >= FEW_TOKENS else "bar green pale"
        parts.append(svg.rect(left, top, width, upper.floor - top, kind=kind))
        parts.append(svg.rect(left, volume_top, width, frame.floor - volume_top, kind="volume violet"))
        words = f"{name.format(row.label)}: {units.share(tally.acceptance)} of {units.count(tally.drafted)} accepted"
        parts.append(svg.hover_strip(frame, left - gap / 2, left - gap / 2 + slot, words))
        if index % every == 0:
            drop = frame.floor + svg.X_LABEL_DROP
            parts.append(svg.text(row.start, left + width / 2, drop, text_anchor="middle"))
    colors = [("green", "accepted"), ("green pale", f"accepted of fewer than {FEW_TOKENS}"), ("violet", "draft tokens")]
    has_few = any(row.tally.acceptance is not None and row.tally.drafted < FEW_TOKENS for row in rows)
    return svg.chart(frame, label, parts) + charts.legend(colors if has_few else [colors[0], colors[2]])


def calibration(known: Calibration) -> str:
    """Chart predicted probabilities against the shares that were accepted; perfect predictions are on the diagonal."""
    frame = FRAME
    x, y = frame.x_scale(0, 1), frame.y_scale(0, 1)
    parts = svg.y_axis(frame, y, QUARTERS, units.share)
    parts += svg.x_axis(frame, x, [(mark, units.share(mark)) for mark in (0.0, 0.5, 1.0)])
    parts += [svg.y_title(frame, "accepted"), svg.x_title(frame, "predicted")]
    parts.append(svg.line(x(0), y(0), x(1), y(1), kind=svg.DASHED))
    placed = [
        (one, x(one.predicted), y(one.acceptance))
        for one in known.bins
        if one.predicted is not None and one.acceptance is not None
    ]
    parts.append(svg.polyline([(left, top) for _, left, top in placed], kind="line thin green"))
    most = max((one.drafted for one, _, _ in placed), default=1)
    for one, left, top in placed:
        words = (
            f"predicted {units.share(one.predicted)}, accepted {units.share(one.acceptance)} "
            f"of {units.count(one.drafted)} draft tokens"
        )
        radius = max(3.0, MAX_RADIUS * math.sqrt(one.drafted / most))
        parts.append(svg.circle(left, top, radius, words, kind="dot green"))
    label = f"Predicted and actual acceptance, mean difference {units.share(known.error)}; the diagonal is perfect"
    colors = [
        ("green", f"areas in proportion to draft tokens, at most {units.count(most)}"),
        (svg.DASHED, "perfect"),
    ]
    return svg.chart(frame, label, parts) + charts.legend(colors)


def sources(tallies: Sequence[SourceTally]) -> str:
    """Chart how drafted and accepted tokens divide over the sources, as two stacked bars."""
    frame, parts = Frame(height=132), []
    drafted = sum(tally.drafted for tally in tallies)
    accepted = sum(tally.accepted for tally in tallies)
    for row, (name, whole) in enumerate((("drafted", drafted), ("accepted", accepted))):
        top, left = 28 + row * 56, 0.0
        parts.append(svg.text(f"{units.count(whole)} {name}", 0, top - 8))
        for tally in tallies:
            number = getattr(tally, name)
            part = number / whole if whole else 0.0
            words = f"{tally.source}: {units.count(number)} {name}, {units.share(part)}"
            kind, width = f"bar {SOURCE_COLORS[tally.source]}", max(0.0, frame.width * part - 2)
            parts.append(svg.rect(left, top, width, 26, words, kind=kind, rx=4))
            if part > 0.12:
                parts.append(svg.text(units.share(part), left + 8, top + 18, kind="on-bar"))
            left += frame.width * part
    known = ", ".join(f"{tally.source} {units.share(tally.acceptance)} accepted" for tally in tallies)
    return svg.chart(frame, f"Draft tokens by source: {known}", parts)


# --- Durations


def durations(known: LatencyReport, title: str, counted: str) -> str:
    """Chart a histogram of durations over a logarithmic axis, with median and 99th percentile.

    counted: what was measured, in the plural.
    """
    frame = FRAME
    marks = svg.ticks(max([1, *(one.count for one in known.bins)]), min_step=1)
    y = frame._replace(top=frame.top + QUANTILE_LABELS_HEIGHT).y_scale(0, marks[-1])
    slots = max(MIN_BINS, len(known.bins))
    slot, every = (frame.right_edge - frame.left) / slots, max(1, math.ceil(slots / 5))
    parts = svg.y_axis(frame, y, marks, units.count)
    parts += [svg.y_title(frame, counted), svg.x_title(frame, "duration")]
    for index, one in enumerate(known.bins):
        left, top = frame.left + index * slot, y(one.count)
        upper = "and more" if one.most_s is None else f"to {units.duration(one.most_s)}"
        words = f"{units.duration(one.least_s)} {upper}: {units.count(one.count)}"
        parts.append(svg.rect(left + 0.5, top, slot - 1, frame.floor - top, kind="bar blue"))
        parts.append(svg.hover_strip(frame, left, left + slot, words))
        if index % every == 0:
            drop = frame.floor + svg.X_LABEL_DROP
            parts.append(svg.text(units.duration(one.least_s), left, drop, text_anchor="middle"))
    parts += _quantile(frame, known, "p50", known.p50_s, slot, frame.top + 8)
    parts += _quantile(frame, known, "p99", known.p99_s, slot, frame.top + 24)
    label = f"{title}: half within {units.duration(known.p50_s)}, 99% within {units.duration(known.p99_s)}"
    return svg.chart(frame, label, parts)


def step_times(sizes: Sequence[StepSize]) -> str:
    """Chart the mean durations of steps, and the expected ones, against their numbers of tokens."""
    longest = max(max(size.mean_s, size.expected_s) for size in sizes)
    scale, unit = (1e3, "ms") if longest < 1 else (1.0, "s")
    labels = [units.count(size.most_tokens) if size.most_tokens else "more" for size in sizes]
    words = [
        f"{label} tokens: {units.duration(size.mean_s)}, expected {units.duration(size.expected_s)}, "
        f"{units.counted(size.steps, 'step')}"
        for label, size in zip(labels, sizes, strict=True)
    ]
    expected = [(float(place), scale * size.expected_s) for place, size in enumerate(sizes)]
    measured = [(float(place), scale * size.mean_s) for place, size in enumerate(sizes)]
    return charts.line_chart(
        "Mean duration of steps by number of tokens",
        Axis.of(labels, "tokens of a step, at most", at_most=len(labels)),
        Axis.to(scale * longest, unit),
        [Series("expected", "gray", expected, "dashed"), Series("mean duration", "blue", measured, words=words)],
    )


def _quantile(frame: Frame, known: LatencyReport, name: str, value: float | None, slot: float, y: float) -> list[str]:
    """Return a vertical line at a quantile, with its label at the height `y`."""
    x = _quantile_x(frame, known, value, slot)
    is_right = x > (frame.left + frame.width) / 2
    shift, anchor = (-5, "end") if is_right else (5, "start")
    return [
        svg.line(x, frame.top + 4, x, frame.floor, kind=svg.DASHED),
        svg.text(f"{name} {units.duration(value)}", x + shift, y, text_anchor=anchor, kind="halo"),
    ]


def _quantile_x(frame: Frame, known: LatencyReport, seconds: float | None, slot: float) -> float:
    """Return the right edge of a quantile's bin; a quantile is the upper bound of its bin, or the longest duration."""
    for index, one in enumerate(known.bins):
        if one.most_s is None or (seconds or 0.0) <= one.most_s * (1 + 1e-9):
            return frame.left + (index + 1) * slot
    return frame.right_edge
