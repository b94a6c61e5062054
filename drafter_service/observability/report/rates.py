"""What happened between two reports, by the second."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from drafter_service.observability.latency import BOUNDS_S, quantile
from drafter_service.observability.report.figures import drafting_of, total_of
from drafter_service.observability.report.schema import Drafting, LatencyReport, NamespaceReport, Report


class Rates(NamedTuple):
    """Of one namespace, or of all. None: not known, as before the second report."""

    name: str
    corpus_tokens: int
    streams: int
    sequences: int
    tokens_per_s: float | None = None
    steps_per_s: float | None = None
    drafts_per_s: float | None = None
    learned_per_s: float | None = None
    acceptance: float | None = None
    tokens_per_step: float | None = None
    draft_p50_s: float | None = None
    draft_p99_s: float | None = None


class _Growth(NamedTuple):
    """What was added to the counters of a namespace."""

    drafting: Drafting
    learned_tokens: int
    latencies: Counter[float]
    """How many drafts took at most so many seconds, and more than the bound before."""


def rates_of(before: Report | None, now: Report) -> list[Rates]:
    """Of each namespace in the report of now, and last of all together."""
    seconds = _seconds(before, now)
    known = {} if before is None or seconds is None else {one.name: one for one in before.namespaces}
    growths = [_growth(known.get(one.name), one) for one in now.namespaces]
    rows = [
        _rates(
            Rates(one.name, one.corpus.tokens, one.streams or 0, one.sequences or 0),
            growth,
            seconds,
        )
        for one, growth in zip(now.namespaces, growths, strict=True)
    ]
    total = Rates(
        "all",
        sum(row.corpus_tokens for row in rows),
        sum(row.streams for row in rows),
        sum(row.sequences for row in rows),
    )
    return [*rows, _rates(total, _together([growth for growth in growths if growth is not None]), seconds)]


def _seconds(before: Report | None, now: Report) -> float | None:
    """Between two reports of the same run of a service; else None."""
    if before is None or before.service is None or now.service is None:
        return None
    if before.service.started_at != now.service.started_at or before.taken_at >= now.taken_at:
        return None
    return now.taken_at - before.taken_at


def _growth(before: NamespaceReport | None, now: NamespaceReport) -> _Growth | None:
    # A namespace that was dropped and made again begins anew.
    if before is None or before.drafting.steps > now.drafting.steps:
        return None
    old, new = before.drafting, now.drafting
    drafting = drafting_of(
        new.steps - old.steps,
        new.committed - old.committed,
        new.hits - old.hits,
        new.drafted - old.drafted,
        new.accepted - old.accepted,
    )
    learned = max(0, (now.corpus.learned_tokens or 0) - (before.corpus.learned_tokens or 0))
    return _Growth(drafting, learned, _counts(now.draft_latency) - _counts(before.draft_latency))


def _counts(latency: LatencyReport | None) -> Counter[float]:
    bins = [] if latency is None else latency.bins
    return Counter({math.inf if one.most_s is None else one.most_s: one.count for one in bins})


def _together(growths: Sequence[_Growth]) -> _Growth | None:
    if not growths:
        return None
    return _Growth(
        total_of(growth.drafting for growth in growths),
        sum(growth.learned_tokens for growth in growths),
        sum((growth.latencies for growth in growths), Counter()),
    )


def _rates(rates: Rates, growth: _Growth | None, seconds: float | None) -> Rates:
    if growth is None or seconds is None:
        return rates
    drafting, latencies = growth.drafting, sorted(growth.latencies.items())
    return rates._replace(
        tokens_per_s=drafting.committed / seconds,
        steps_per_s=drafting.steps / seconds,
        drafts_per_s=drafting.hits / seconds,
        learned_per_s=growth.learned_tokens / seconds,
        acceptance=drafting.acceptance,
        tokens_per_step=drafting.tokens_per_step,
        draft_p50_s=_quantile(latencies, 0.5),
        draft_p99_s=_quantile(latencies, 0.99),
    )


def _quantile(latencies: list[tuple[float, int]], share: float) -> float | None:
    if not latencies:
        return None
    # Of those beyond the last bound nothing more is known than that.
    return quantile(latencies, share, BOUNDS_S[-1])
