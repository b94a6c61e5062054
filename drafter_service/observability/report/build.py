"""What is known of a running service, to a report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict

from drafter_service.observability.facts import (
    CorpusFacts,
    LogFacts,
    ModelIdentity,
    NamespaceFacts,
    Passage,
    ServiceFacts,
)
from drafter_service.observability.history import Sample
from drafter_service.observability.latency import BOUNDS_S, Latency
from drafter_service.observability.report.figures import finite, ratio, share, total_of
from drafter_service.observability.report.periods import ordered, periods, recent
from drafter_service.observability.report.schema import (
    SCHEMA_VERSION,
    Clients,
    CorpusReport,
    DurationBin,
    LatencyReport,
    ModelReport,
    NamespaceReport,
    PassageReport,
    Recent,
    Report,
    ServiceReport,
    SharedLog,
    Tables,
)
from drafter_service.observability.report.tallies import copy_of, tables


def build_report(facts: ServiceFacts) -> Report:
    """The report of a running service. It reads counters that grow meanwhile, and changes nothing."""
    return service_report(facts, [namespace_report(namespace, facts.now) for namespace in facts.namespaces])


def service_report(facts: ServiceFacts, namespaces: Iterable[NamespaceReport]) -> Report:
    """The same, of namespaces whose part is made already: who must not be held up makes one at a time (1 ms)."""
    namespaces = sorted(namespaces, key=lambda namespace: namespace.name)
    return Report(
        schema_version=SCHEMA_VERSION,
        taken_at=finite(facts.now),
        service=ServiceReport(
            version=facts.version,
            started_at=finite(facts.started_at),
            uptime_s=max(0.0, finite(facts.now - facts.started_at)),
            memory_bytes=facts.memory_bytes,
            refused=facts.refused,
            log=None if facts.log is None else _log(facts.log),
        ),
        total=total_of(namespace.drafting for namespace in namespaces),
        namespaces=namespaces,
    )


def _log(log: LogFacts) -> SharedLog:
    # Clocks of replicas differ: an entry may seem to come from the future.
    return SharedLog(**{**asdict(log), "lag_s": max(0.0, finite(log.lag_s))})


def namespace_report(facts: NamespaceFacts, now: float) -> NamespaceReport:
    """The part of one namespace, at `now`, seconds since 1970."""
    known = tables(copy_of(facts.stats.counters))
    samples = ordered(facts.history.samples, _sample(facts, known, now))
    of_late = recent(samples)
    return NamespaceReport(
        name=facts.name,
        model=_model(facts.model),
        recent=of_late,
        over_time=periods(samples),
        corpus=_corpus(facts.corpus, of_late),
        draft_latency=_latency(facts.draft_latency),
        merge_latency=_latency(facts.merge_latency),
        clients=Clients(**asdict(facts.clients)),
        memory_bytes=facts.memory_bytes,
        streams=facts.streams,
        sequences=facts.sequences,
        duplicates=facts.duplicates,
        passages=None if facts.passages is None else [_passage(passage) for passage in facts.passages],
        **dict(known),
    )


def _sample(facts: NamespaceFacts, known: Tables, now: float) -> Sample:
    """The totals of now."""
    drafting = known.drafting
    return Sample(
        time=now,
        steps=drafting.steps,
        committed=drafting.committed,
        hits=drafting.hits,
        drafted=drafting.drafted,
        accepted=drafting.accepted,
        corpus_tokens=facts.corpus.tokens,
        appended_tokens=facts.corpus.appended_tokens,
        memory_bytes=facts.memory_bytes,
        timeouts=facts.clients.timeouts,
    )


def _model(model: ModelIdentity) -> ModelReport:
    return ModelReport(
        name=model.name,
        tokenizer=model.tokenizer,
        adapter=model.adapter,
        vocabulary_size=model.vocabulary_size or None,
    )


def _corpus(facts: CorpusFacts, of_late: Recent | None) -> CorpusReport:
    pace = 0.0 if of_late is None else of_late.learned_tokens_per_s
    return CorpusReport(
        tokens=facts.tokens,
        requests=facts.requests,
        capacity_tokens=facts.capacity,
        occupancy=share(facts.tokens, facts.capacity),
        learned_tokens=facts.appended_tokens,
        turnovers=ratio(facts.appended_tokens, facts.capacity),
        turnover_s=ratio(facts.capacity, pace),
        waiting_tokens=max(0, facts.waiting_tokens),
        forgotten_requests=facts.forgotten,
        merges=facts.merges,
        base_merges=facts.base_merges,
        full_builds=facts.full_builds,
    )


def _latency(latency: Latency) -> LatencyReport:
    counts = latency.counts.copy()  # It may be written meanwhile.
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


def _passage(passage: Passage) -> PassageReport:
    return PassageReport(accepted=passage.accepted, age_tokens=passage.age_tokens, tokens=passage.tokens.tolist())
