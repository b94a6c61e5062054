"""Build reports from the facts of a running service."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from itertools import pairwise

import numpy as np

from drafter_service.observability.facts import (
    BOUNDS_S,
    Engine,
    EngineUse,
    Latency,
    NamespaceFacts,
    Sample,
    ServiceFacts,
)
from drafter_service.observability.report.schema import (
    SCHEMA_VERSION,
    Age,
    AgeTally,
    BudgetReport,
    Calibration,
    ClientReport,
    CounterTables,
    Drafting,
    DurationBin,
    LatencyReport,
    ModelReport,
    NamespaceReport,
    PathProbBin,
    Period,
    PositionTally,
    Recent,
    Report,
    ServiceReport,
    ShadowReport,
    SourceTally,
    StepSize,
    VersionReport,
    ratio,
    share,
)
from ssd.budget.totals import SIZES, BudgetTotals
from ssd.stats import (
    ACCEPTED,
    AGES,
    COUNT,
    HITS,
    OBSERVED,
    PREDICTED,
    PROB_BINS,
    VERIFIED,
    Counters,
    Stats,
    VersionTotals,
)
from ssd.types import Source

MAX_PERIODS = 96
"""A curve of this many points is smooth, and 100 namespaces of them stay below 4 MB of JSON."""
RECENT_S = 3600.0
TOTALS = ("drafted", "accepted", "steps", "committed", "hits")
"""Fields of a `HitTally` that are counted."""


def build_report(facts: ServiceFacts) -> Report:
    """Return the report of a running service. It only reads; the counters may grow concurrently."""
    namespaces = sorted((namespace_report(each, facts.now) for each in facts.namespaces), key=lambda each: each.name)
    return Report(
        schema_version=SCHEMA_VERSION,
        taken_at=facts.now,
        service=ServiceReport(
            version=facts.version,
            started_at=facts.started_at,
            uptime_s=max(0.0, facts.now - facts.started_at),
            memory_bytes=facts.memory_bytes,
            refused=facts.refused,
            set_aside={name: list(files) for name, files in sorted(facts.set_aside.items())},
            log=facts.log,
        ),
        total=Drafting(**{name: sum(getattr(each.drafting, name) for each in namespaces) for name in TOTALS}),
        namespaces=namespaces,
    )


def namespace_report(facts: NamespaceFacts, now: float) -> NamespaceReport:
    """Return the report of one namespace; `now` in seconds since 1970."""
    samples = _ordered(facts.history.samples, facts.sample(now))
    recent = _recent(samples)
    turnover_s = None if recent is None else ratio(facts.corpus.capacity_tokens, recent.learned_tokens_per_s)
    clients = sorted((_client(engine, use) for engine, use in facts.uses.items()), key=lambda each: -each.committed)
    same = ("name", "memory_bytes", "streams", "sequences", "duplicates")
    return NamespaceReport(
        **{name: getattr(facts, name) for name in same},
        model=ModelReport(**asdict(facts.model) | {"vocab_size": facts.model.vocab_size or None}),
        recent=recent,
        over_time=_periods(samples),
        corpus=facts.corpus.model_copy(update={"turnover_s": turnover_s}),
        draft_latency=_latency(facts.draft_latency),
        merge_latency=_latency(facts.merge_latency),
        clients=facts.clients.model_copy(),
        by_client=clients,
        by_version=_by_version(facts),
        shadow=_shadow(facts.shadow),
        budget=_budget(facts.budget),
        copies=list(facts.copies),
        libraries=list(facts.libraries),
        **dict(_tables(facts.stats.counters)),
    )


def _tally(stats: Stats | VersionTotals) -> dict[str, int]:
    """Return the counts of a `StepTally`."""
    names = {"steps": "steps", "committed": "committed", "drafted": "verified", "accepted": "accepted"}
    return {field: getattr(stats, name) for field, name in names.items()}


def _client(engine: Engine, use: EngineUse) -> ClientReport:
    counts = {name: getattr(use, name) for name in ("streams", "offered", "engine_steps", "late_steps")}
    return ClientReport(client=engine.client, engine=engine.name, **counts, **_tally(use.stats))


def _by_version(facts: NamespaceFacts) -> list[VersionReport] | None:
    return [
        VersionReport(version=version, requests=totals.requests, **_tally(totals))
        for version, totals in sorted(facts.stats.by_version.items())
    ] or None


def _shadow(stats: Stats) -> ShadowReport | None:
    return ShadowReport(drafting=_tables(stats.counters).drafting) if stats.steps else None


def _budget(totals: BudgetTotals) -> BudgetReport:
    bounds = [*(1 << power for power in range(SIZES - 1)), None]
    sizes = [
        StepSize(most_tokens=bound, steps=int(steps), mean_s=seconds / steps, expected_s=expected_s / steps)
        for bound, (steps, seconds, expected_s) in zip(bounds, totals.sizes.tolist(), strict=True)
        if steps
    ]
    return BudgetReport(withheld_tokens=totals.withheld, ignored_steps=totals.ignored, step_sizes=sizes)


def _latency(latency: Latency) -> LatencyReport:
    counts = latency.counts.copy()  # The original may change concurrently.
    used = [index for index, count in enumerate(counts) if count]
    if not used:
        return LatencyReport(count=0, bins=[])
    bins = [
        DurationBin(least_s=least, most_s=most, count=count)
        for least, most, count in zip((0.0, *BOUNDS_S), (*BOUNDS_S, None), counts, strict=True)
    ]
    return LatencyReport(
        count=sum(counts),
        mean_s=ratio(latency.total_s, sum(counts)),
        p50_s=latency.quantile(0.5),
        p90_s=latency.quantile(0.9),
        p99_s=latency.quantile(0.99),
        longest_s=latency.longest_s,
        bins=bins[used[0] : used[-1] + 1],
    )


# --- Counters to tables


def _tables(counters: Counters) -> CounterTables:
    """Return the tables of counters. Values that only a damaged file may hold (negative, not finite) count as 0."""
    counters = Counters(*(np.maximum(np.nan_to_num(array, posinf=0.0), 0) for array in counters))
    steps, committed, hits = counters.steps.tolist()
    drafted, accepted = (sum(column) for column in counters.by_source.T.tolist())
    return CounterTables(
        drafting=Drafting(drafted=drafted, accepted=accepted, steps=steps, committed=committed, hits=hits),
        by_position=_by_position(counters),
        by_source=_by_source(counters),
        age=_age(counters),
        calibration=_calibration(counters),
    )


def _by_position(counters: Counters) -> list[PositionTally]:
    hits = int(counters.steps[HITS])
    return [
        PositionTally(
            position=index + 1, drafted=drafted, accepted=accepted, accepted_share_of_drafts=share(accepted, hits)
        )
        for index, (drafted, accepted) in enumerate(counters.by_position[: _used(counters.by_position)[1]].tolist())
    ]


def _by_source(counters: Counters) -> list[SourceTally]:
    rows = counters.by_source.tolist()
    return [
        SourceTally(source=source.name.lower(), drafted=rows[source][VERIFIED], accepted=rows[source][ACCEPTED])  # type: ignore[arg-type]
        for source in Source
        if source is not Source.LIBRARY or rows[source][VERIFIED]
    ]


def _age(counters: Counters) -> Age:
    first, end = _used(counters.by_age)
    bounds = [0, *(1 << bits for bits in range(AGES))]
    bins = [
        AgeTally(
            least_tokens=bounds[index],
            most_tokens=bounds[index + 1] - 1 if index < AGES - 1 else None,
            drafted=drafted,
            accepted=accepted,
        )
        for index, (drafted, accepted) in enumerate(counters.by_age[first:end].tolist(), first)
    ]
    return Age(median_tokens=_median_age(bins), bins=bins)


def _used(table: np.ndarray) -> tuple[int, int]:
    """Return the first and last + 1 row in which something was drafted."""
    used = np.flatnonzero(table[:, VERIFIED])
    return (int(used[0]), int(used[-1]) + 1) if len(used) else (0, 0)


def _median_age(bins: Sequence[AgeTally]) -> int | None:
    """Return the upper bound of the bin that contains the median of the accepted tokens."""
    accepted, seen = sum(entry.accepted for entry in bins), 0
    for entry in bins:
        seen += entry.accepted
        if accepted and 2 * seen >= accepted:
            return entry.most_tokens
    return None


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


# --- Samples over time to periods


def _ordered(samples: Sequence[Sample], now: Sample) -> list[Sample]:
    """Return past samples in ascending order, with `now` last; samples with implausible times are dropped."""
    kept: list[Sample] = []
    for sample in samples:
        if 0 <= sample.time < now.time and (not kept or sample.time > kept[-1].time):
            kept.append(sample)
    return [*kept, now]


def _periods(samples: Sequence[Sample]) -> list[Period]:
    """Return at most `MAX_PERIODS` periods of similar length; `samples` as from `_ordered`."""
    if len(samples) < 2:
        return []
    times = np.array([sample.time for sample in samples])
    edges = np.searchsorted(times, np.linspace(times[0], times[-1], MAX_PERIODS + 1))
    chosen = [samples[index] for index in np.unique(edges.clip(max=len(samples) - 1)).tolist()]
    return [
        Period(
            begins_at=begin.time,
            ends_at=end.time,
            learned_tokens=change.appended_tokens,
            timeouts=change.timeouts,
            corpus_tokens=max(0, end.corpus_tokens),
            memory_bytes=max(0, end.memory_bytes),
            **_steps(change),
        )
        for begin, end in pairwise(chosen)
        for change in [_change(begin, end)]
    ]


def _recent(samples: Sequence[Sample]) -> Recent | None:
    """Return the changes since the first sample of the last hour, None without one; `samples` as from `_ordered`.

    An older sample may be from before a time in which the service did not run.
    """
    end = samples[-1]
    begin = next(sample for sample in samples if sample.time >= end.time - RECENT_S)
    if begin is end:
        return None
    seconds, change = end.time - begin.time, _change(begin, end)
    return Recent(
        seconds=seconds,
        drafting=Drafting(**_steps(change)),
        output_tokens_per_s=ratio(change.committed, seconds) or 0.0,
        learned_tokens_per_s=ratio(change.appended_tokens, seconds) or 0.0,
    )


def _change(begin: Sample, end: Sample) -> Sample:
    """Return the growth of each total; 0 where a counter was reset."""
    return Sample(end.time, *[max(0, after - before) for before, after in zip(begin[1:], end[1:], strict=True)])


def _steps(change: Sample) -> dict[str, int]:
    """Return the counts of a `HitTally`."""
    return {name: getattr(change, name) for name in TOTALS}
