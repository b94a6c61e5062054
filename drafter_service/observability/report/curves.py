"""Plots over time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import groupby
from typing import NamedTuple

from drafter_service.observability.report import svg, units
from drafter_service.observability.report.schema import Period

STEPS_S = tuple(
    [60 * minutes for minutes in (1, 2, 5, 10, 15, 30)]
    + [3600 * hours for hours in (1, 2, 3, 6, 12)]
    + [86_400 * days for days in (1, 2, 5, 10, 30, 90, 365)]
)
DAY_S = 86_400


class Frame(NamedTuple):
    """Where a plot is drawn."""

    width: float
    height: float
    left: float = 46
    right: float = 12
    top: float = 14
    bottom: float = 26
    kind: str = ""

    @property
    def inner(self) -> tuple[float, float]:
        """Where it begins and ends from left to right."""
        return self.left, self.width - self.right


WIDE, NARROW = Frame(1080, 330, kind="wide"), Frame(400, 330, kind="narrow")
SMALL = Frame(400, 250)
SHARES_HEIGHT, GAP = 78, 30


def drafting_over_time(periods: Sequence[Period]) -> str:
    """Tokens per step, and hit rate and acceptance below; a wide form and one for small screens."""
    return _drafting(periods, WIDE) + _drafting(periods, NARROW)


def _drafting(periods: Sequence[Period], frame: Frame) -> str:
    x = svg.linear(periods[0].begins_at, periods[-1].ends_at, *frame.inner)
    floor = frame.height - frame.bottom - SHARES_HEIGHT - GAP
    known = [period.tokens_per_step for period in periods if period.tokens_per_step is not None]
    # What lies above plain decoding is what counts; below it there is hardly ever anything.
    base = 1.0 if min(known) >= 1 else 0.0
    marks = [base + mark for mark in svg.ticks(max([2.0, *known]) - base)]
    y = svg.linear(marks[0], marks[-1], floor, frame.top)
    below = frame.height - frame.bottom
    share_y = svg.linear(0, 1, below, below - SHARES_HEIGHT)
    parts = [
        *svg.rules(((y(mark), f"{mark:g}") for mark in marks), *frame.inner),
        *svg.rules(((share_y(mark), units.share(mark)) for mark in (0.0, 0.5, 1.0)), *frame.inner),
        *_dates(periods, frame, x),
    ]
    for run in _runs(periods):
        points = _curve(run, "tokens_per_step", x, y)
        parts.append(svg.polygon([(points[0][0], y(1)), *points, (points[-1][0], y(1))], kind="gain"))
        parts.append(svg.polyline(points, kind="line with"))
        for name, kind in (("hit_rate", "hit"), ("acceptance", "kept")):
            parts.append(svg.polyline(_curve(run, name, x, share_y), kind=f"line thin {kind}"))
    parts.append(svg.line(frame.left, y(1), frame.width - frame.right, y(1), kind="plain"))
    parts.append(svg.text("1 = plain decoding", frame.width - frame.right, y(1) - 6, text_anchor="end", kind="halo"))
    parts += [_spot(period, frame, x, y(period.tokens_per_step or 0.0)) for period in periods]
    label = f"Tokens per step over time, now {units.ratio(known[-1] if known else None)}; hit rate and acceptance below"
    return svg.drawing(frame.width, frame.height, label, parts, frame.kind)


def corpus_over_time(periods: Sequence[Period], capacity: int | None) -> str:
    """Tokens remembered, and the most that can be."""
    frame = SMALL
    x = svg.linear(periods[0].begins_at, periods[-1].ends_at, *frame.inner)
    most = max([1, capacity or 0, *(period.corpus_tokens for period in periods)])
    marks = svg.ticks(most, least_step=1)
    floor = frame.height - frame.bottom
    y = svg.linear(0, marks[-1], floor, frame.top)
    points = [(x(period.ends_at), y(period.corpus_tokens)) for period in periods]
    points.insert(0, (frame.left, points[0][1]))
    parts = [
        *svg.rules(((y(mark), units.count(mark)) for mark in marks), *frame.inner),
        *_dates(periods, frame, x),
        svg.polygon([(points[0][0], floor), *points, (points[-1][0], floor)], kind="volume"),
        svg.polyline(points, kind="line corpus"),
    ]
    if capacity:
        parts.append(svg.line(frame.left, y(capacity), frame.width - frame.right, y(capacity), kind="plain"))
        parts.append(svg.text("capacity", frame.width - frame.right, y(capacity) + 14, text_anchor="end", kind="halo"))
    for period in periods:
        words = f"{units.moment(period.ends_at)}: {units.count(period.corpus_tokens)} tokens"
        parts.append(_strip(period, frame, x, words))
    label = f"Tokens remembered over time, now {units.count(periods[-1].corpus_tokens)}"
    return svg.drawing(frame.width, frame.height, label, parts)


def spark(values: Sequence[float | None]) -> str:
    """A curve without axes, for a row of a table."""
    known = [value for value in values if value is not None]
    if len(known) < 2:
        return ""
    x, y = svg.linear(0, len(values) - 1, 1, 99), svg.linear(min(known), max(known), 21, 3)
    points = [(x(index), y(value)) for index, value in enumerate(values) if value is not None]
    label = f"Tokens per step, {units.ratio(min(known))} to {units.ratio(max(known))}"
    return svg.drawing(100, 24, label, [svg.polyline(points, kind="line with")], "spark")


def middle(period: Period) -> float:
    """Halfway through a period, in seconds since 1970."""
    return (period.begins_at + period.ends_at) / 2


def time_ticks(begin: float, end: float, at_most: int) -> list[tuple[float, str]]:
    """Round moments between two, with what is written there."""
    step = next((step for step in STEPS_S if (end - begin) / step <= at_most), None)
    if step is None:
        step = STEPS_S[-1] * math.ceil((end - begin) / at_most / STEPS_S[-1])
    first = math.ceil(begin / step)
    moments = [step * number for number in range(first, int(end // step) + 1)]
    return [(moment, units.moment(moment, "%b %-d" if moment % DAY_S == 0 else "%H:%M")) for moment in moments]


def _runs(periods: Iterable[Period]) -> list[list[Period]]:
    """Periods in a row in which there was something to see."""
    grouped = groupby(periods, lambda period: period.tokens_per_step is not None)
    return [list(run) for is_known, run in grouped if is_known]


def _curve(run: Sequence[Period], name: str, x: svg.Scale, y: svg.Scale) -> list[tuple[float, float]]:
    """Points of a figure of periods in a row, where it is known; a line for a period that stands alone."""
    if len(run) == 1:
        height = y(getattr(run[0], name) or 0.0)
        return [(x(run[0].begins_at), height), (x(run[0].ends_at), height)]
    values = [(period, getattr(period, name)) for period in run]
    return [(x(middle(period)), y(value)) for period, value in values if value is not None]


def _dates(periods: Sequence[Period], frame: Frame, x: svg.Scale) -> list[str]:
    at_most = 8 if frame.width > 600 else 4
    marks = time_ticks(periods[0].begins_at, periods[-1].ends_at, at_most)
    y, least, most = frame.height - 8, frame.left + 10, frame.width - frame.right - 18
    return [svg.text(words, min(max(x(moment), least), most), y, text_anchor="middle") for moment, words in marks]


def _spot(period: Period, frame: Frame, x: svg.Scale, y: float) -> str:
    """What a pointer over a period is shown."""
    seconds = period.ends_at - period.begins_at
    words = (
        f"{units.moment(period.begins_at)}, {units.duration(seconds)}: "
        f"{units.ratio(period.tokens_per_step)} tokens a step, hit rate {units.share(period.hit_rate)}, "
        f"acceptance {units.share(period.acceptance)}, {units.rate(period.committed / seconds)} tokens/s"
    )
    place = x(middle(period))
    mark = "" if period.tokens_per_step is None else svg.circle(place, y, 4.5)
    guide = svg.line(place, frame.top, place, frame.height - frame.bottom)
    return svg.element("g", guide + mark + _strip(period, frame, x, words), kind="spot")


def _strip(period: Period, frame: Frame, x: svg.Scale, words: str) -> str:
    left, right = x(period.begins_at), x(period.ends_at)
    return svg.rect(left, frame.top, right - left, frame.height - frame.top - frame.bottom, words, kind="strip")
