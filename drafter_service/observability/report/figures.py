"""Tables and ratios of a report, computed from counters and from samples over time.

A ratio is always a finite number, or None where its denominator is zero.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from itertools import pairwise
from typing import Any, Literal

import numpy as np

from drafter_service.observability.facts import Sample
from drafter_service.observability.report.schema import (
    Age,
    AgeTally,
    Calibration,
    CounterTables,
    Drafting,
    PathProbBin,
    Period,
    PositionTally,
    Recent,
    SourceTally,
)
from ssd.stats import ACCEPTED, AGES, COUNT, HITS, OBSERVED, PREDICTED, PROB_BINS, VERIFIED, Counters
from ssd.types import Source

MAX_PERIODS = 96
"""A curve of this many points is smooth, and 100 namespaces of them stay below 4 MB of JSON."""
RECENT_S = 3600.0
MAX_TIME = 1e12
"""Upper bound of plausible times, in seconds since 1970."""
SOURCE_NAMES: dict[Source, Literal["corpus", "local", "fallback", "library"]] = {
    Source.CORPUS: "corpus",
    Source.LOCAL: "local",
    Source.FALLBACK: "fallback",
    Source.LIBRARY: "library",
}


# --- Ratios


def ratio(part: float, whole: float) -> float | None:
    """Return `part / whole`, at least 0; None for a `whole` of 0 or a result that is not finite."""
    value = part / whole if whole > 0 else math.inf
    return max(0.0, value) if math.isfinite(value) else None


def share(part: float, whole: float) -> float | None:
    """Return `ratio`, at most 1: counters that are read while they grow may be inconsistent with one another."""
    value = ratio(part, whole)
    return None if value is None else min(1.0, value)


def finite(value: float) -> float:
    """Return `value` if it is finite, else 0."""
    return float(value) if math.isfinite(value) else 0.0


def drafting_of(steps: int, committed: int, hits: int, drafted: int, accepted: int) -> Drafting:
    """Return these totals with the ratios computed from them; negative totals count as 0."""
    steps, committed, hits, drafted, accepted = (max(0, total) for total in (steps, committed, hits, drafted, accepted))
    saved = max(0, committed - steps) if steps else 0
    return Drafting(
        steps=steps,
        committed=committed,
        hits=hits,
        drafted=drafted,
        accepted=accepted,
        saved_steps=saved,
        saved_share=share(saved, committed) if steps else None,
        hit_rate=share(hits, steps),
        acceptance=share(accepted, drafted),
        tokens_per_step=ratio(committed, steps),
        drafted_per_step=ratio(drafted, steps),
        break_even_cost=ratio(saved, drafted) if steps else None,
    )


def sum_drafting(parts: Iterable[Drafting]) -> Drafting:
    """Return the totals of several namespaces with the ratios computed from them."""
    totals = [(part.steps, part.committed, part.hits, part.drafted, part.accepted) for part in parts]
    return drafting_of(*(sum(column) for column in zip(*totals, strict=True))) if totals else drafting_of(0, 0, 0, 0, 0)


# --- Counters to tables


def tables(counters: Counters) -> CounterTables:
    """Return the tables of counters. Values that only a damaged file may hold (negative, not finite) count as 0."""
    counters = Counters(*(np.maximum(np.nan_to_num(array, posinf=0.0), 0) for array in counters))
    steps, committed, hits = counters.steps.tolist()
    drafted, accepted = (sum(column) for column in counters.by_source.T.tolist())
    return CounterTables(
        drafting=drafting_of(steps, committed, hits, drafted, accepted),
        by_position=_by_position(counters),
        by_source=_by_source(counters),
        age=_age(counters),
        calibration=_calibration(counters),
    )


def _by_position(counters: Counters) -> list[PositionTally]:
    hits = int(counters.steps[HITS])
    rows = counters.by_position[: _used(counters.by_position)[1]].tolist()
    return [
        PositionTally(position=index + 1, accepted_share_of_drafts=share(row[ACCEPTED], hits), **_tally(*row))
        for index, row in enumerate(rows)
    ]


def _by_source(counters: Counters) -> list[SourceTally]:
    rows = counters.by_source.tolist()
    return [
        SourceTally(source=name, **_tally(*rows[source]))
        for source, name in SOURCE_NAMES.items()
        if source is not Source.LIBRARY or rows[source][VERIFIED]
    ]


def _age(counters: Counters) -> Age:
    first, end = _used(counters.by_age)
    bins = [
        AgeTally(
            least_tokens=_min_age(index),
            most_tokens=_min_age(index + 1) - 1 if index < AGES - 1 else None,
            **_tally(*row),
        )
        for index, row in enumerate(counters.by_age[first:end].tolist(), first)
    ]
    return Age(median_tokens=_median_age(bins), bins=bins)


def _calibration(counters: Counters) -> Calibration:
    rows = counters.calibration.tolist()
    bins = [
        PathProbBin(
            least_path_prob=index / PROB_BINS,
            most_path_prob=(index + 1) / PROB_BINS,
            drafted=int(row[COUNT]),
            predicted=share(row[PREDICTED], row[COUNT]),
            acceptance=share(row[OBSERVED], row[COUNT]),
        )
        for index, row in enumerate(rows)
        if row[COUNT]
    ]
    differences = sum(abs(row[PREDICTED] - row[OBSERVED]) for row in rows)
    return Calibration(error=share(differences, sum(row[COUNT] for row in rows)), bins=bins)


def _tally(drafted: int, accepted: int) -> dict[str, Any]:
    """Return the fields of a `Tally`."""
    return {"drafted": drafted, "accepted": accepted, "acceptance": share(accepted, drafted)}


def _used(table: np.ndarray) -> tuple[int, int]:
    """Return the first and last + 1 row in which something was drafted."""
    used = np.flatnonzero(table[:, VERIFIED])
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)


def _min_age(bits: int) -> int:
    return 0 if bits == 0 else 1 << (bits - 1)


def _median_age(bins: list[AgeTally]) -> int | None:
    """Return the upper bound of the bin that contains the median of the accepted tokens."""
    accepted, seen = sum(entry.accepted for entry in bins), 0
    for entry in bins:
        seen += entry.accepted
        if accepted and 2 * seen >= accepted:
            return entry.most_tokens
    return None


# --- Samples over time to periods


def ordered(samples: Sequence[Sample], now: Sample) -> list[Sample]:
    """Return past samples in ascending order, with `now` last; samples with implausible times are dropped."""
    kept: list[Sample] = []
    for sample in samples:
        if 0 <= sample.time < now.time and (not kept or sample.time > kept[-1].time):
            kept.append(sample)
    return [*kept, now] if now.time < MAX_TIME else []


def periods(samples: Sequence[Sample]) -> list[Period]:
    """Return at most `MAX_PERIODS` periods of similar length; `samples` as from `ordered`."""
    if len(samples) < 2:
        return []
    times = np.array([sample.time for sample in samples])
    edges = np.searchsorted(times, np.linspace(times[0], times[-1], MAX_PERIODS + 1))
    chosen = [samples[index] for index in np.unique(edges.clip(max=len(samples) - 1)).tolist()]
    return [_period(begin, end) for begin, end in pairwise(chosen)]


def recent(samples: Sequence[Sample]) -> Recent | None:
    """Return the changes in the last hour, or since the first sample; `samples` as from `ordered`."""
    if len(samples) < 2:
        return None
    end = samples[-1]
    older = [sample for sample in samples if sample.time <= end.time - RECENT_S]
    begin = older[-1] if older else samples[0]
    seconds, change = end.time - begin.time, _change(begin, end)
    return Recent(
        seconds=seconds,
        drafting=drafting_of(change.steps, change.committed, change.hits, change.drafted, change.accepted),
        output_tokens_per_s=ratio(change.committed, seconds) or 0.0,
        learned_tokens_per_s=ratio(change.appended_tokens, seconds) or 0.0,
    )


def _change(begin: Sample, end: Sample) -> Sample:
    """Return the growth of each total; 0 where a counter was reset."""
    return Sample(end.time, *[max(0, after - before) for before, after in zip(begin[1:], end[1:], strict=True)])


def _period(begin: Sample, end: Sample) -> Period:
    change = _change(begin, end)
    return Period(
        begins_at=begin.time,
        ends_at=end.time,
        steps=change.steps,
        committed=change.committed,
        hits=change.hits,
        drafted=change.drafted,
        accepted=change.accepted,
        timeouts=change.timeouts,
        learned_tokens=change.appended_tokens,
        hit_rate=share(change.hits, change.steps),
        acceptance=share(change.accepted, change.drafted),
        tokens_per_step=ratio(change.committed, change.steps),
        corpus_tokens=max(0, end.corpus_tokens),
        memory_bytes=max(0, end.memory_bytes),
    )
