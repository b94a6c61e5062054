"""Numbers and curves as text. An unknown number (None) is a dash."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import UTC, datetime
from itertools import pairwise

UNKNOWN = TO = "\N{EN DASH}"
SCALES = ("", "k", "M", "G", "T", "P", "E")
BYTE_SCALES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
CURVE_LEVELS = "▁▂▃▄▅▆▇█"
MIN_EXTENT = 0.1
"""Minimum range of a curve as a share of its maximum, so that a curve with less variation, mere noise, looks flat."""
DURATIONS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def count(value: float | None) -> str:
    """Format a count: 9,412, 12.3k, 4.56M."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value < 9999.5 else _scaled(value, 1000, SCALES)


def counted(value: float, noun: str) -> str:
    """Format a count with a noun whose plural ends in -s: 1 step, 12.3k steps."""
    return f"{count(value)} {noun}" if value == 1 else f"{count(value)} {noun}s"


def size(value: float | None) -> str:
    """Format bytes: 812 B, 12.3 MiB."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f} B" if value < 1000 else _scaled(value, 1024, BYTE_SCALES, " ")


def share(value: float | None) -> str:
    """Format a share: 58%, 4.2%, 0.03%."""
    if value is None:
        return UNKNOWN
    percent = 100 * value
    if percent == 0 or percent >= 9.995:
        # Only exactly 1 is 100%.
        return "99.9%" if 99.5 <= percent < 100 else f"{percent:.0f}%"
    return "<0.01%" if percent < 0.01 else f"{percent:.2g}%"


def ratio(value: float | None) -> str:
    """Format a plain number, such as tokens per step: 2.41, 13.5, 1,204."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else count(value)


def duration(seconds: float | None) -> str:
    """Format a duration: 340 µs, 12.3 ms, 4.2 s, 3 d 4 h."""
    if seconds is None:
        return UNKNOWN
    if seconds == 0:
        return "0 s"
    for unit, scale in (("µs", 1e6), ("ms", 1e3), ("s", 1.0)):
        if seconds * scale < (999.5 if scale > 1 else 119.5):
            return f"{_three_digits(seconds * scale)} {unit}"
    if seconds >= 10_000 * 86_400:
        return f"{count(seconds / 86_400)} d"
    for whole, name, part, part_name in DURATIONS:
        if seconds >= 2 * whole:
            parts = int(seconds % whole // part) if seconds < 10 * whole else 0
            return f"{int(seconds // whole)} {name}" + (f" {parts} {part_name}" if parts else "")
    return f"{seconds / 60:.0f} min"


def moment(seconds: float | None, form: str = "%Y-%m-%d %H:%M UTC") -> str:
    """Format a time, given in seconds since 1970, in UTC."""
    try:
        return UNKNOWN if seconds is None else datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def span(least: int, most: int | None) -> str:
    """Format a range of counts; None: no upper bound."""
    if most is None:
        return f"{count(least)}+"
    return count(least) if least == most else f"{count(least)}{TO}{count(most)}"


def percents(least: float, most: float) -> str:
    """Format a range of shares, such as 45 to 50 %."""
    return f"{100 * least:.0f}{TO}{100 * most:.0f}%"


def printable(text: str) -> str:
    """Return `text` with line breaks and terminal escapes replaced."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def shortened(text: str, most: int = 60) -> str:
    """Return `printable` text, cut to at most `most` characters."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def sparkline(values: Sequence[float | None], width: int) -> str:
    """Return a curve of at most `width` characters, scaled from the minimum to the maximum; None leaves a gap."""
    count = min(len(values), width)
    edges = [round(len(values) * index / count) for index in range(count + 1)] if count else [0]
    means = [_mean(values[first:end]) for first, end in pairwise(edges)]
    known = [mean for mean in means if mean is not None]
    if not known:
        return ""
    least, most = min(known), max(known)
    extent = max(most - least, MIN_EXTENT * most)
    return "".join(
        " " if mean is None else CURVE_LEVELS[min(7, int(8 * (mean - least) / extent)) if extent > 0 else 0]
        for mean in means
    )


def _mean(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _scaled(value: float, base: int, names: tuple[str, ...], gap: str = "") -> str:
    power = 0
    while value >= (999.5 if base == 1000 else 1000) and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{_three_digits(value)}{gap}{names[power]}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
