"""Figures as people read them. What is not known is a dash."""

from __future__ import annotations

from datetime import UTC, datetime

UNKNOWN = TO = "\N{EN DASH}"
SCALES = ("", "k", "M", "G", "T", "P", "E")
BYTE_SCALES = ("B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB")
MOST_SCALED = 1e21
DURATIONS = ((86_400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s"))


def count(value: float | None) -> str:
    """A number of things: 9,412, then 12.3k, 4.56M."""
    if value is None:
        return UNKNOWN
    return f"{value:,.0f}" if value < 9999.5 else _scaled(value, 1000, SCALES)


def size(value: float | None) -> str:
    """Bytes: 812 B, 12.3 MiB."""
    if value is None:
        return UNKNOWN
    return f"{value:.0f} B" if value < 1000 else _scaled(value, 1024, BYTE_SCALES, " ")


def share(value: float | None) -> str:
    """A part of something: 58%, 4.2%, 0.03%."""
    if value is None:
        return UNKNOWN
    percent = 100 * value
    if percent == 0 or percent >= 9.995:
        # Nearly all is not all.
        return "99.9%" if 99.5 <= percent < 100 else f"{percent:.0f}%"
    return "<0.01%" if percent < 0.01 else f"{percent:.2g}%"


def ratio(value: float | None) -> str:
    """A plain number, such as tokens per step: 2.41, 13.5, 1,204."""
    if value is None:
        return UNKNOWN
    return f"{value:.2f}" if value < 9.995 else f"{value:.1f}" if value < 99.95 else count(value)


def rate(value: float | None) -> str:
    """So many a second: 0.4, 12, 3,104."""
    if value is None:
        return UNKNOWN
    return f"{value:.2g}" if 0 < value < 9.95 else count(value)


def duration(seconds: float | None) -> str:
    """A time that something takes: 340 µs, 12.3 ms, 4.2 s, 3 d 4 h."""
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
            rest = int(seconds % whole // part) if seconds < 10 * whole else 0
            return f"{int(seconds // whole)} {name}" + (f" {rest} {part_name}" if rest else "")
    return f"{seconds / 60:.0f} min"


def moment(seconds: float, form: str = "%Y-%m-%d %H:%M UTC") -> str:
    """A point in time, from seconds since 1970, in UTC."""
    try:
        return datetime.fromtimestamp(seconds, UTC).strftime(form)
    except (OverflowError, ValueError, OSError):
        return UNKNOWN


def span(least: int, most: int | None) -> str:
    """From one number up to another, or without a bound."""
    if most is None:
        return f"{count(least)}+"
    return count(least) if least == most else f"{count(least)}{TO}{count(most)}"


def percents(least: float, most: float) -> str:
    """From one part up to another: 45 to 50% as one range."""
    return f"{100 * least:.0f}{TO}{100 * most:.0f}%"


def printable(text: str) -> str:
    """`text` on one line, with nothing in it that a terminal would obey."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in text)


def shortened(text: str, most: int = 60) -> str:
    """`printable`, at most so many characters of it."""
    text = printable(text)
    return text if len(text) <= most else text[: most - 1] + "…"


def _scaled(value: float, base: int, names: tuple[str, ...], gap: str = "") -> str:
    if value >= MOST_SCALED:
        return f"{value:.3g}{gap}{names[0]}"
    power = 0
    while value >= (999.5 if base == 1000 else 1000) and power < len(names) - 1:
        value, power = value / base, power + 1
    return f"{_three_digits(value)}{gap}{names[power]}"


def _three_digits(value: float) -> str:
    return f"{value:,.0f}" if value >= 99.95 else f"{value:.1f}" if value >= 9.995 else f"{value:.2f}"
