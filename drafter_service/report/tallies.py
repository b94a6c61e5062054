"""Counters to the tables of a report."""

from __future__ import annotations

from typing import Literal

import numpy as np

from drafter_service.report.figures import drafting_of, share
from drafter_service.report.schema import (
    Age,
    AgeTally,
    Calibration,
    Drafting,
    LengthTally,
    OddsBin,
    PositionTally,
    SourceTally,
    Tables,
    Tally,
)
from ssd.draft import Source
from ssd.stats import ACCEPTED, AGES, COUNT, HITS, KEPT_COUNT, ODDS_BINS, PROMISED, VERIFIED, Counters

SOURCE_NAMES: dict[Source, Literal["corpus", "local"]] = {Source.CORPUS: "corpus", Source.LOCAL: "local"}


def copy_of(counters: Counters) -> Counters:
    """The counters as they are now, whatever a damaged file may have put there made 0."""
    return Counters(*(np.maximum(np.nan_to_num(array, posinf=0.0), 0) for array in counters))


def tables(counters: Counters) -> Tables:
    """All that the counters say; `counters` as from `copy_of`."""
    return Tables(
        drafting=_drafting(counters),
        by_position=_by_position(counters),
        by_match_length=_by_match_length(counters),
        by_source=_by_source(counters),
        age=_age(counters),
        calibration=_calibration(counters),
    )


def _drafting(counters: Counters) -> Drafting:
    steps, committed, hits = counters.steps.tolist()
    drafted, accepted = (sum(column) for column in counters.by_source.T.tolist())
    return drafting_of(steps, committed, hits, drafted, accepted)


def _by_position(counters: Counters) -> list[PositionTally]:
    table = counters.by_position
    hits = int(counters.steps[HITS])
    return [
        PositionTally(
            position=index + 1,
            accepted_share_of_drafts=share(int(table[index, ACCEPTED]), hits),
            **dict(_tally(table[index])),
        )
        for index in range(_used(table)[1])
    ]


def _by_match_length(counters: Counters) -> list[LengthTally]:
    table = counters.by_length
    return [
        LengthTally(match_length=index, **dict(_tally(table[index])))
        for index in np.flatnonzero(table[:, VERIFIED]).tolist()
    ]


def _by_source(counters: Counters) -> list[SourceTally]:
    return [
        SourceTally(source=name, **dict(_tally(counters.by_source[source]))) for source, name in SOURCE_NAMES.items()
    ]


def _age(counters: Counters) -> Age:
    table = counters.by_age
    first, end = _used(table)
    bins = [
        AgeTally(
            least_tokens=_least_age(index),
            most_tokens=_least_age(index + 1) - 1 if index < AGES - 1 else None,
            **dict(_tally(table[index])),
        )
        for index in range(first, end)
    ]
    return Age(median_tokens=_median_age(bins), bins=bins)


def _calibration(counters: Counters) -> Calibration:
    table = counters.calibration
    bins = [
        OddsBin(
            least_odds=index / ODDS_BINS,
            most_odds=(index + 1) / ODDS_BINS,
            drafted=int(table[index, COUNT]),
            promised=share(table[index, PROMISED], table[index, COUNT]),
            kept=share(table[index, KEPT_COUNT], table[index, COUNT]),
        )
        for index in np.flatnonzero(table[:, COUNT]).tolist()
    ]
    differences = np.abs(table[:, PROMISED] - table[:, KEPT_COUNT]).tolist()
    return Calibration(error=share(sum(differences), sum(table[:, COUNT].tolist())), bins=bins)


def _tally(row: np.ndarray) -> Tally:
    drafted, accepted = row.tolist()
    return Tally(drafted=drafted, accepted=accepted, acceptance=share(accepted, drafted))


def _used(table: np.ndarray) -> tuple[int, int]:
    """The first and last + 1 row in which something was drafted."""
    used = np.flatnonzero(table[:, VERIFIED])
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)


def _least_age(bits: int) -> int:
    return 0 if bits == 0 else 1 << (bits - 1)


def _median_age(bins: list[AgeTally]) -> int | None:
    accepted, seen = sum(entry.accepted for entry in bins), 0
    for entry in bins:
        seen += entry.accepted
        if accepted and 2 * seen >= accepted:
            return entry.most_tokens
    return None
