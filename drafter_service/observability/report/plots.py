"""Charts of a report."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

from drafter_service.observability.pages import svg
from drafter_service.observability.pages.charts import Axis, Series, bar_chart, line_chart
from drafter_service.observability.pages.svg import Frame, Scale
from drafter_service.observability.report import units
from drafter_service.observability.report.schema import Calibration, LatencyReport, Period, StepSize, Tally

WIDE, NARROW = Frame(width=1080), Frame()
WIDE_LOW, NARROW_LOW = Frame(width=1080, height=150), Frame(height=150)
FEW_TOKENS = 30
"""Minimum number of draft tokens of a reliable share; shares of fewer are drawn paler."""
MIN_BINS = 8
"""Minimum number of bins of a chart of durations; with fewer the bars would be too wide."""
SHARES = Axis("accepted", 0, 1, [(value, units.share(value)) for value in (0.0, 0.25, 0.5, 0.75, 1.0)])
TIME_STEPS_S = tuple(
    [60 * minutes for minutes in (1, 2, 5, 10, 15, 30)]
    + [3600 * hours for hours in (1, 2, 3, 6, 12)]
    + [86_400 * days for days in (1, 2, 5, 10, 30, 90, 365)]
)
DAY_S = 86_400


# --- Over time


def drafting_over_time(periods: Sequence[Period]) -> str:
    """Chart tokens per step, with hit rate and acceptance below."""
    known = [period.tokens_per_step for period in periods if period.tokens_per_step is not None]
    y = Axis.to(max([2.0, *known]), "tokens per step")
    if min(known) >= 1:  # The axis starts at 1, plain decoding.
        marks = [1 + value for value in svg.ticks(max([2.0, *known]) - 1)]
        y = Axis(y.title, 1, marks[-1], [(mark, f"{mark:g}") for mark in marks])
    shares = [
        Series("hit rate: steps with a draft", "blue", _points(periods, "hit_rate")),
        Series("acceptance: accepted draft tokens", "amber", _points(periods, "acceptance")),
    ]
    return line_chart(
        f"Tokens per step over time, now {units.ratio(known[-1])}",
        _time_axis(periods),
        y,
        [Series("tokens per step", "green", _points(periods, "tokens_per_step"), "area")],
        frames=(WIDE, NARROW),
        reference=(1, "plain decoding, 1"),
        behind=_strips(periods),
    ) + line_chart(
        "Hit rate and acceptance over time",
        _time_axis(periods),
        SHARES._replace(title="share", marks=SHARES.marks[::2]),
        shares,
        frames=(WIDE_LOW, NARROW_LOW),
    )


def corpus_over_time(periods: Sequence[Period], capacity: int) -> str:
    """Chart the number of remembered tokens, with the capacity as a line."""
    most = max([1, capacity, *(period.corpus_tokens for period in periods)])
    return line_chart(
        f"Tokens remembered over time, now {units.count(periods[-1].corpus_tokens)}",
        _time_axis(periods),
        Axis.to(most, "tokens", units.count, min_step=1),
        [Series("tokens remembered", "violet", _points(periods, "corpus_tokens"), "area")],
        reference=(capacity, "capacity"),
        behind=_strips(periods),
    )


def _points(periods: Sequence[Period], field: str) -> list[tuple[float, float | None]]:
    return [(_middle(period), getattr(period, field)) for period in periods]


def _middle(period: Period) -> float:
    return (period.begins_at + period.ends_at) / 2


def _strips(periods: Sequence[Period]) -> Callable[[Frame, Scale, Scale], list[str]]:
    """Return a function that draws a strip with a tooltip for each period."""

    def strips(frame: Frame, x: Scale, _y: Scale) -> list[str]:
        return [
            svg.hover_strip(
                frame,
                x(period.begins_at),
                x(period.ends_at),
                f"{units.moment(period.begins_at)}, {units.duration(period.ends_at - period.begins_at)}: "
                f"{units.ratio(period.tokens_per_step)} tokens per step, hit rate {units.share(period.hit_rate)}, "
                f"acceptance {units.share(period.acceptance)}, {units.counted(period.committed, 'output token')}, "
                f"{units.counted(period.corpus_tokens, 'token')} remembered",
            )
            for period in periods
        ]

    return strips


def _time_axis(periods: Sequence[Period]) -> Axis:
    """Return an axis with at most four round times."""
    begin, end = periods[0].begins_at, periods[-1].ends_at
    step = next((step for step in TIME_STEPS_S if (end - begin) / step <= 4), None)
    if step is None:
        step = TIME_STEPS_S[-1] * math.ceil((end - begin) / 4 / TIME_STEPS_S[-1])
    moments = [step * number for number in range(math.ceil(begin / step), int(end // step) + 1)]
    marks = [(moment, units.moment(moment, "%b %-d" if moment % DAY_S == 0 else "%H:%M")) for moment in moments]
    return Axis("time (UTC)", begin, end, marks)


# --- Draft tokens


def tallies(label: str, x_title: str, names: Sequence[str], known: Sequence[Tally]) -> str:
    """Chart acceptance as bars, with the numbers of draft tokens below."""
    shown: list[list[tuple[float, float | None]]] = [[], []]
    for place, tally in enumerate(known):
        is_few = tally.drafted < FEW_TOKENS
        shown[is_few].append((place, tally.acceptance))
        shown[not is_few].append((place, None))
    most = max(1, *(tally.drafted for tally in known), 1)
    volumes = Series("draft tokens", "violet", [(place, tally.drafted) for place, tally in enumerate(known)])
    return bar_chart(
        label,
        Axis.of([name.partition(units.TO)[0] for name in names], x_title, at_most=8),
        SHARES,
        [
            Series("accepted", "green", shown[False]),
            Series(f"accepted of fewer than {FEW_TOKENS}", "green pale", shown[True]),
        ],
        below=(Axis("tokens", 0, most, [(0, "0"), (most, units.count(most))]), volumes),
        words=[
            f"{name}: {units.share(tally.acceptance)} of {units.count(tally.drafted)} accepted"
            for name, tally in zip(names, known, strict=True)
        ],
    )


def calibration(known: Calibration) -> str:
    """Chart predicted probabilities against the shares that were accepted; perfect predictions are on the diagonal."""
    bins = [(one.predicted, one) for one in known.bins if one.predicted is not None]
    words = [
        f"predicted {units.share(one.predicted)}, accepted {units.share(one.acceptance)} "
        f"of {units.count(one.drafted)} draft tokens"
        for _, one in bins
    ]
    return line_chart(
        f"Predicted and actual acceptance, mean difference {units.share(known.error)}; the diagonal is perfect",
        SHARES._replace(title="predicted", marks=SHARES.marks[::2]),
        SHARES,
        [
            Series("perfect", "gray", [(0, 0), (1, 1)], "dashed"),
            Series("accepted", "green", [(predicted, one.acceptance) for predicted, one in bins], words=words),
        ],
    )


# --- Durations


def durations(known: LatencyReport, title: str, counted: str) -> str:
    """Chart a histogram of durations over a logarithmic axis.

    counted: what was measured, in the plural.
    """
    names = [units.duration(one.most_s or one.least_s) for one in known.bins]
    counts = [(float(place), float(one.count)) for place, one in enumerate(known.bins)]
    empty = range(len(names), MIN_BINS)
    return bar_chart(
        f"{title}: half within {units.duration(known.p50_s)}, 99% within {units.duration(known.p99_s)}",
        Axis.of([*names, *("" for _ in empty)], "duration, at most", at_most=5),
        Axis.to(max(one.count for one in known.bins), counted, units.count, min_step=1),
        [Series(f"{units.count(known.count)} {counted}", "blue", [*counts, *((place, None) for place in empty)])],
        words=[
            f"{units.duration(one.least_s)} {'and more' if one.most_s is None else f'to {units.duration(one.most_s)}'}"
            f": {units.count(one.count)}"
            for one in known.bins
        ],
    )


def step_times(sizes: Sequence[StepSize], names: Sequence[str]) -> str:
    """Chart the mean durations of steps, and the expected ones, against their numbers of tokens."""
    words = [
        f"{name} tokens: {units.duration(size.mean_s)}, expected {units.duration(size.expected_s)}, "
        f"{units.counted(size.steps, 'step')}"
        for name, size in zip(names, sizes, strict=True)
    ]
    longest = max(max(size.mean_s, size.expected_s) for size in sizes)
    return line_chart(
        "Mean duration of steps by number of tokens",
        Axis.of([units.count(size.most_tokens) if size.most_tokens else "more" for size in sizes], "tokens, at most"),
        Axis.to(longest, "duration", units.duration),
        [
            Series("expected", "gray", [(place, size.expected_s) for place, size in enumerate(sizes)], "dashed"),
            Series("mean duration", "blue", [(place, size.mean_s) for place, size in enumerate(sizes)], words=words),
        ],
    )
