"""The tables of a report in few rows, for a terminal: a label, a share, and how many draft tokens it is of."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from drafter_service.observability.report import units
from drafter_service.observability.report.figures import share
from drafter_service.observability.report.schema import NamespaceReport, Tally

POSITIONS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 33, 65)
"""The first of each group, here and below."""
MATCH_LENGTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64)
AGES = (0, 16, 256, 4096, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
MOST_POSITION, MOST_MATCH_LENGTH = 129, 64
"""They stand for everything from there on."""
ODDS_TOGETHER = 0.1

Row = tuple[str, float | None, int]


def positions(namespace: NamespaceReport) -> list[Row]:
    """Acceptance by place in the draft."""
    return _groups([(tally.position, tally) for tally in namespace.by_position], POSITIONS, MOST_POSITION)


def lengths(namespace: NamespaceReport) -> list[Row]:
    """Acceptance by match length."""
    tallies = [(tally.match_length, tally) for tally in namespace.by_match_length]
    return _groups(tallies, MATCH_LENGTHS, MOST_MATCH_LENGTH)


def ages(namespace: NamespaceReport) -> list[Row]:
    """Acceptance by age of the text, in tokens."""
    tallies = [(tally.least_tokens, tally) for tally in namespace.age.bins]
    return _groups(tallies, AGES, None)


def sources(namespace: NamespaceReport) -> list[Row]:
    """Acceptance by source."""
    return [(tally.source, tally.acceptance, tally.drafted) for tally in namespace.by_source]


def odds(namespace: NamespaceReport) -> list[tuple[str, float | None, float | None, int]]:
    """By odds in tenths: promised, kept, and of how many."""
    rows = []
    for tenth in range(10):
        least = tenth * ODDS_TOGETHER
        bins = [
            one for one in namespace.calibration.bins if least <= one.least_path_prob + 1e-9 < least + ODDS_TOGETHER
        ]
        drafted = sum(one.drafted for one in bins)
        if drafted:
            promised = share(sum((one.predicted or 0.0) * one.drafted for one in bins), drafted)
            kept = share(sum((one.acceptance or 0.0) * one.drafted for one in bins), drafted)
            rows.append((units.percents(least, least + ODDS_TOGETHER), promised, kept, drafted))
    return rows


def _groups(tallies: Iterable[tuple[int, Tally]], firsts: Sequence[int], most: int | None) -> list[Row]:
    rows = []
    for first, following in zip(firsts, (*firsts[1:], None), strict=True):
        members = [(key, tally) for key, tally in tallies if first <= key and (following is None or key < following)]
        drafted, accepted = sum(tally.drafted for _, tally in members), sum(tally.accepted for _, tally in members)
        if drafted:
            rows.append((_label(first, following, most), share(accepted, drafted), drafted))
    return rows


def _label(first: int, following: int | None, most: int | None) -> str:
    return units.span(first, None if following is None or first == most else following - 1)
