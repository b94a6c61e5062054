"""Samples of totals to what happened in between."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import numpy as np

from drafter_service.observability.history import Sample
from drafter_service.observability.report.figures import drafting_of, ratio, share
from drafter_service.observability.report.schema import Period, Recent

MOST_PERIODS = 96
"""A curve of so many points is smooth, and 100 namespaces of them stay below 4 MB of JSON."""
RECENT_S = 3600.0
LATEST = 1e12
"""Seconds since 1970 that no sound clock shows."""


def ordered(samples: Sequence[Sample], now: Sample) -> list[Sample]:
    """Samples, each later than the one before, with the totals of now behind those of the past."""
    kept: list[Sample] = []
    for sample in samples:
        if 0 <= sample.time < now.time and (not kept or sample.time > kept[-1].time):
            kept.append(sample)
    return [*kept, now] if now.time < LATEST else []


def periods(samples: Sequence[Sample]) -> list[Period]:
    """About equally long ones, as many as the samples allow; `samples` as from `ordered`."""
    if len(samples) < 2:
        return []
    times = np.array([sample.time for sample in samples])
    edges = np.searchsorted(times, np.linspace(times[0], times[-1], MOST_PERIODS + 1))
    chosen = [samples[index] for index in np.unique(edges.clip(max=len(samples) - 1)).tolist()]
    return [_period(begin, end) for begin, end in pairwise(chosen)]


def recent(samples: Sequence[Sample]) -> Recent | None:
    """The last hour, or as much of it as is known; `samples` as from `ordered`."""
    if len(samples) < 2:
        return None
    end = samples[-1]
    older = [sample for sample in samples if sample.time <= end.time - RECENT_S]
    begin = older[-1] if older else samples[0]
    seconds, grown = end.time - begin.time, _growth(begin, end)
    return Recent(
        seconds=seconds,
        drafting=drafting_of(grown.steps, grown.committed, grown.hits, grown.drafted, grown.accepted),
        output_tokens_per_s=ratio(grown.committed, seconds) or 0.0,
        learned_tokens_per_s=ratio(grown.appended_tokens, seconds) or 0.0,
    )


def _growth(begin: Sample, end: Sample) -> Sample:
    """What was added; nothing where counters began anew."""
    return Sample(end.time, *[max(0, after - before) for before, after in zip(begin[1:], end[1:], strict=True)])


def _period(begin: Sample, end: Sample) -> Period:
    grown = _growth(begin, end)
    return Period(
        begins_at=begin.time,
        ends_at=end.time,
        steps=grown.steps,
        committed=grown.committed,
        hits=grown.hits,
        drafted=grown.drafted,
        accepted=grown.accepted,
        timeouts=grown.timeouts,
        learned_tokens=grown.appended_tokens,
        hit_rate=share(grown.hits, grown.steps),
        acceptance=share(grown.accepted, grown.drafted),
        tokens_per_step=ratio(grown.committed, grown.steps),
        corpus_tokens=max(0, end.corpus_tokens),
        memory_bytes=max(0, end.memory_bytes),
    )
