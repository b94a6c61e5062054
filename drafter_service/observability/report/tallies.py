"""Counters to the tables of a report."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np

from drafter_service.observability.report.figures import drafting_of, share
from drafter_service.observability.report.schema import (
    Age,
    AgeTally,
    Calibration,
    Drafting,
    LengthTally,
    PathProbBin,
    PositionTally,
    SourceTally,
    Tables,
)
from ssd.stats import ACCEPTED, AGES, COUNT, HITS, KEPT_COUNT, ODDS_BINS, PROMISED, VERIFIED, Counters
from ssd.types import Source

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
    hits = int(counters.steps[HITS])
    rows = counters.by_position[: _used(counters.by_position)[1]].tolist()
    return [
        PositionTally(position=index + 1, accepted_share_of_drafts=share(row[ACCEPTED], hits), **_tally(*row))
        for index, row in enumerate(rows)
    ]


def _by_match_length(counters: Counters) -> list[LengthTally]:
    rows = enumerate(counters.by_length.tolist())
    return [LengthTally(match_length=index, **_tally(*row)) for index, row in rows if row[VERIFIED]]


def _by_source(counters: Counters) -> list[SourceTally]:
    rows = counters.by_source.tolist()
    return [SourceTally(source=name, **_tally(*rows[source])) for source, name in SOURCE_NAMES.items()]


def _age(counters: Counters) -> Age:
    first, end = _used(counters.by_age)
    bins = [
        AgeTally(
            least_tokens=_least_age(index),
            most_tokens=_least_age(index + 1) - 1 if index < AGES - 1 else None,
            **_tally(*row),
        )
        for index, row in enumerate(counters.by_age[first:end].tolist(), first)
    ]
    return Age(median_tokens=_median_age(bins), bins=bins)


def _calibration(counters: Counters) -> Calibration:
    rows = counters.calibration.tolist()
    bins = [
        PathProbBin(
            least_path_prob=index / ODDS_BINS,
            most_path_prob=(index + 1) / ODDS_BINS,
            drafted=int(row[COUNT]),
            predicted=share(row[PROMISED], row[COUNT]),
            acceptance=share(row[KEPT_COUNT], row[COUNT]),
        )
        for index, row in enumerate(rows)
        if row[COUNT]
    ]
    apart = sum(abs(row[PROMISED] - row[KEPT_COUNT]) for row in rows)
    return Calibration(error=share(apart, sum(row[COUNT] for row in rows)), bins=bins)


def _tally(drafted: int, accepted: int) -> dict[str, Any]:
    """The fields of a `Tally`."""
    return {"drafted": drafted, "accepted": accepted, "acceptance": share(accepted, drafted)}


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
