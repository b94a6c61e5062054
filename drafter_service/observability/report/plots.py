"""Plots of tables: acceptance, calibration, sources, durations."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from drafter_service.observability.report import svg, units
from drafter_service.observability.report.schema import Calibration, LatencyReport, SourceTally

WIDTH, HEIGHT = 400, 250
LEFT, RIGHT, TOP, BOTTOM = 46, 12, 14, 26
VOLUME_HEIGHT, GAP = 34, 22
FEW_TOKENS = 30
"""Shares of fewer draft tokens are drawn paler: the next one may move them by several percent."""
MOST_RADIUS = 11.0
LABELS_HEIGHT = 32
"""Of p50 and p99, above the bars."""
LEAST_BINS = 8
"""Of fewer durations the bars would be blocks."""


class Bar(NamedTuple):
    """A share, and how many it is a share of."""

    label: str
    """What is written below."""
    name: str
    """What a pointer over it is told."""
    share: float | None
    volume: int


def shares(bars: Sequence[Bar], label: str, labels: int) -> str:
    """Shares as bars from 0 to 100 %, and below them how many draft tokens they are of; about `labels` are labelled."""
    floor = HEIGHT - BOTTOM - VOLUME_HEIGHT - GAP
    y = svg.linear(0, 1, floor, TOP)
    below = HEIGHT - BOTTOM
    volume_y = svg.linear(0, max(1, *(bar.volume for bar in bars), 1), below, below - VOLUME_HEIGHT)
    slot = (WIDTH - LEFT - RIGHT) / len(bars)
    gap = min(4.0, slot * 0.2)
    parts = svg.rules(((y(mark), units.share(mark)) for mark in (0.0, 0.25, 0.5, 0.75, 1.0)), LEFT, WIDTH - RIGHT)
    parts.append(svg.line(LEFT, below, WIDTH - RIGHT, below, kind="grid"))
    parts.append(svg.text("draft tokens", LEFT, below - VOLUME_HEIGHT - 5))
    every = max(1, math.ceil(len(bars) / labels))
    for index, bar in enumerate(bars):
        left, width = LEFT + index * slot + gap / 2, slot - gap
        top, volume_top = y(bar.share or 0.0), volume_y(bar.volume)
        kind = "share" if bar.volume >= FEW_TOKENS else "share few"
        parts.append(svg.rect(left, top, width, floor - top, kind=kind))
        parts.append(svg.rect(left, volume_top, width, below - volume_top, kind="volume"))
        words = f"{bar.name}: {units.share(bar.share)} of {units.count(bar.volume)} accepted"
        parts.append(svg.rect(left - gap / 2, TOP, slot, below - TOP, words, kind="strip"))
        if index % every == 0:
            parts.append(svg.text(bar.label, left + width / 2, HEIGHT - 8, text_anchor="middle"))
    return svg.drawing(WIDTH, HEIGHT, label, parts)


def calibration(known: Calibration) -> str:
    """Odds promised against odds kept; what is right lies on the diagonal."""
    x, y = svg.linear(0, 1, LEFT, WIDTH - RIGHT), svg.linear(0, 1, HEIGHT - BOTTOM, TOP)
    parts = svg.rules(((y(mark), units.share(mark)) for mark in (0.0, 0.25, 0.5, 0.75, 1.0)), LEFT, WIDTH - RIGHT)
    for mark, anchor in ((0.0, "start"), (0.5, "middle"), (1.0, "end")):
        parts.append(svg.text(units.share(mark), x(mark), HEIGHT - 8, text_anchor=anchor))
    parts.append(svg.line(x(0), y(0), x(1), y(1), kind="plain"))
    placed = [
        (one, x(one.promised), y(one.kept)) for one in known.bins if one.promised is not None and one.kept is not None
    ]
    parts.append(svg.polyline([(left, top) for _, left, top in placed], kind="line thin with"))
    most = max((one.drafted for one, _, _ in placed), default=1)
    for one, left, top in placed:
        words = (
            f"promised {units.share(one.promised)}, kept {units.share(one.kept)}, "
            f"of {units.count(one.drafted)} draft tokens"
        )
        radius = max(3.0, MOST_RADIUS * math.sqrt(one.drafted / most))
        parts.append(svg.circle(left, top, radius, words, kind="dot"))
    label = f"Odds promised and kept, {units.share(known.error)} apart on average; the diagonal is perfect"
    return svg.drawing(WIDTH, HEIGHT, label, parts)


def sources(tallies: Sequence[SourceTally]) -> str:
    """How draft tokens, and those accepted, divide over the sources."""
    height, parts = 132, []
    drafted = sum(tally.drafted for tally in tallies)
    accepted = sum(tally.accepted for tally in tallies)
    for row, (name, whole) in enumerate((("drafted", drafted), ("accepted", accepted))):
        top, left = 28 + row * 56, 0.0
        parts.append(svg.text(f"{units.count(whole)} {name}", 0, top - 8))
        for tally in tallies:
            number = getattr(tally, name)
            part = number / whole if whole else 0.0
            words = f"{tally.source}: {units.count(number)} {name}, {units.share(part)}"
            parts.append(
                svg.rect(left, top, max(0.0, WIDTH * part - 2), 26, words, kind=f"source {tally.source}", rx=4)
            )
            if part > 0.12:
                parts.append(svg.text(units.share(part), left + 8, top + 18, kind="on"))
            left += WIDTH * part
    known = ", ".join(f"{tally.source} {units.share(tally.acceptance)} accepted" for tally in tallies)
    return svg.drawing(WIDTH, height, f"Draft tokens by source: {known}", parts)


def durations(known: LatencyReport, what: str) -> str:
    """How often something took how long, the bins on a logarithmic scale, with its median and 99th percentile."""
    floor = HEIGHT - BOTTOM
    most = max([1, *(one.count for one in known.bins)])
    marks = svg.ticks(most, least_step=1)
    y = svg.linear(0, marks[-1], floor, TOP + LABELS_HEIGHT)
    slot = (WIDTH - LEFT - RIGHT) / max(LEAST_BINS, len(known.bins))
    parts = svg.rules(((y(mark), units.count(mark)) for mark in marks), LEFT, WIDTH - RIGHT)
    every = max(1, math.ceil(max(LEAST_BINS, len(known.bins)) / 5))
    for index, one in enumerate(known.bins):
        left, top = LEFT + index * slot, y(one.count)
        upper = "longer" if one.most_s is None else f"to {units.duration(one.most_s)}"
        words = f"{units.duration(one.least_s)} {upper}: {units.count(one.count)}"
        parts.append(svg.rect(left + 0.5, top, slot - 1, floor - top, kind="time"))
        parts.append(svg.rect(left, TOP, slot, floor - TOP, words, kind="strip"))
        if index % every == 0:
            parts.append(
                svg.text(units.duration(one.least_s), left, HEIGHT - 8, text_anchor="middle" if index else "start")
            )
    for name, quantile in (("p50", known.p50_s), ("p99", known.p99_s)):
        place = _place(known, quantile, slot)
        parts.append(svg.line(place, TOP + 4, place, floor, kind="plain"))
        is_right = place > (LEFT + WIDTH) / 2
        words = f"{name} {units.duration(quantile)}"
        y_text = TOP + 4 if name == "p50" else TOP + 20
        parts.append(
            svg.text(
                words,
                place + (-5 if is_right else 5),
                y_text + 4,
                text_anchor="end" if is_right else "start",
                kind="halo",
            )
        )
    label = f"{what}: half within {units.duration(known.p50_s)}, 99% within {units.duration(known.p99_s)}"
    return svg.drawing(WIDTH, HEIGHT, label, parts)


def _place(known: LatencyReport, seconds: float | None, slot: float) -> float:
    """Where a quantile lies: it is the upper bound of its bin, or the longest of all."""
    for index, one in enumerate(known.bins):
        if one.most_s is None or (seconds or 0.0) <= one.most_s * (1 + 1e-9):
            return LEFT + (index + 1) * slot
    return WIDTH - RIGHT
