"""Bars and curves of characters."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

EIGHTHS = " ▏▎▍▌▋▊▉█"
LEVELS = "▁▂▃▄▅▆▇█"
LEAST_REACH = 0.1
"""A curve that varies by less than this part of its greatest value looks flat."""


def bar(share: float, width: int) -> str:
    """A bar of at most `width` characters; something above nothing is seen."""
    eighths = round(8 * width * min(1.0, max(0.0, share)))
    if share > 0:
        eighths = max(1, eighths)
    return "█" * (eighths // 8) + (EIGHTHS[eighths % 8] if eighths % 8 else "")


def sparkline(values: Sequence[float | None], width: int) -> str:
    """A curve of at most `width` characters, from the least value to the greatest; a gap where there is none."""
    drawn = [mean_of(values[first:end]) for first, end in _parts(len(values), width)]
    known = [value for value in drawn if value is not None]
    if not known:
        return ""
    least, most = min(known), max(known)
    reach = max(most - least, LEAST_REACH * most)
    return "".join(
        " " if value is None else LEVELS[min(7, int(8 * (value - least) / reach)) if reach > 0 else 0]
        for value in drawn
    )


def mean_of(values: Sequence[float | None]) -> float | None:
    """Of those that are known."""
    known = [value for value in values if value is not None]
    return sum(known) / len(known) if known else None


def _parts(length: int, most: int) -> list[tuple[int, int]]:
    """About equal parts of a row, at most so many."""
    count = min(length, most)
    edges = [round(length * index / count) for index in range(count + 1)] if count else [0]
    return list(pairwise(edges))
