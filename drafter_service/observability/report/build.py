"""Build reports from the facts of a running service."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from drafter_service.observability.facts import (
    BOUNDS_S,
    Engine,
    EngineUse,
    Latency,
    ModelIdentity,
    NamespaceFacts,
    ServiceFacts,
    ShadowUse,
)
from drafter_service.observability.report.figures import (
    finite,
    ordered,
    periods,
    ratio,
    recent,
    share,
    sum_drafting,
    tables,
)
from drafter_service.observability.report.schema import (
    SCHEMA_VERSION,
    BudgetReport,
    ClientReport,
    CorpusReport,
    DurationBin,
    LatencyReport,
    ModelReport,
    NamespaceReport,
    Recent,
    Report,
    ServiceReport,
    ShadowReport,
    StepSize,
    VersionReport,
)
from ssd.budget.totals import SIZES, BudgetTotals
from ssd.stats import VersionTotals


def build_report(facts: ServiceFacts) -> Report:
    """Return the report of a running service. It only reads; the counters may grow concurrently."""
    return service_report(facts, [namespace_report(namespace, facts.now) for namespace in facts.namespaces])


def service_report(facts: ServiceFacts, namespaces: Iterable[NamespaceReport]) -> Report:
    """Return the report of a service from the reports of its namespaces.

    A caller that may not block for long builds one namespace at a time; each takes about 1 ms.
    """
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
            set_aside={name: list(files) for name, files in sorted(facts.set_aside.items())},
            log=facts.log,
        ),
        total=sum_drafting(namespace.drafting for namespace in namespaces),
        namespaces=namespaces,
    )


def namespace_report(facts: NamespaceFacts, now: float) -> NamespaceReport:
    """Return the report of one namespace; `now` in seconds since 1970."""
    known = tables(facts.stats.counters)
    samples = ordered(facts.history.samples, facts.sample(now))
    lately = recent(samples)
    return NamespaceReport(
        name=facts.name,
        model=_model(facts.model),
        recent=lately,
        over_time=periods(samples),
        corpus=_with_rates(facts.corpus, lately),
        draft_latency=_latency(facts.draft_latency),
        merge_latency=_latency(facts.merge_latency),
        clients=facts.clients.model_copy(),
        by_client=_by_client(facts.uses),
        by_version=_by_version(facts.stats.by_version),
        shadow=_shadow(facts.shadow),
        budget=_budget(facts.budget),
        memory_bytes=facts.memory_bytes,
        streams=facts.streams,
        sequences=facts.sequences,
        duplicates=facts.duplicates,
        libraries=list(facts.libraries),
        **dict(known),
    )


def _by_client(uses: Mapping[Engine, EngineUse]) -> list[ClientReport]:
    reports = [_client(engine, use) for engine, use in uses.items()]
    return sorted(reports, key=lambda report: -report.committed)


def _client(engine: Engine, use: EngineUse) -> ClientReport:
    stats = use.stats
    return ClientReport(
        client=engine.client,
        engine=engine.name,
        streams=use.streams,
        steps=stats.steps,
        committed=stats.committed,
        tokens_per_step=ratio(stats.committed, stats.steps),
        offered=use.offered,
        drafted=stats.verified,
        accepted=stats.accepted,
        acceptance=share(stats.accepted, stats.verified),
        engine_steps=use.engine_steps,
        late_steps=use.late_steps,
        late_share=share(use.late_steps, use.engine_steps),
    )


def _by_version(by_version: Mapping[int, VersionTotals]) -> list[VersionReport] | None:
    return [
        VersionReport(
            version=version,
            requests=totals.requests,
            steps=totals.steps,
            committed=totals.committed,
            tokens_per_step=ratio(totals.committed, totals.steps),
            drafted=totals.verified,
            accepted=totals.accepted,
            acceptance=share(totals.accepted, totals.verified),
        )
        for version, totals in sorted(by_version.items())
    ] or None


def _shadow(use: ShadowUse) -> ShadowReport | None:
    if not use.observed and not use.stats.steps:
        return None
    drafting = tables(use.stats.counters).drafting
    return ShadowReport(observed_requests=use.observed, scored_requests=use.scored, drafting=drafting)


def _budget(totals: BudgetTotals) -> BudgetReport:
    bounds = [*(1 << power for power in range(SIZES - 1)), None]
    sizes = [
        StepSize(most_tokens=bound, steps=int(steps), mean_s=seconds / steps, expected_s=expected_s / steps)
        for bound, (steps, seconds, expected_s) in zip(bounds, totals.sizes.tolist(), strict=True)
        if steps
    ]
    return BudgetReport(withheld_tokens=totals.withheld, ignored_steps=totals.ignored, step_sizes=sizes)


def _model(model: ModelIdentity) -> ModelReport:
    return ModelReport(
        name=model.name,
        tokenizer=model.tokenizer,
        adapter=model.adapter,
        vocab_size=model.vocab_size or None,
    )


def _with_rates(corpus: CorpusReport, lately: Recent | None) -> CorpusReport:
    capacity, learned = corpus.capacity_tokens, corpus.learned_tokens
    tokens_per_s = 0.0 if lately is None else lately.learned_tokens_per_s
    derived = {
        "occupancy": share(corpus.tokens, capacity),
        "turnovers": ratio(learned, capacity),
        "turnover_s": ratio(capacity, tokens_per_s),
    }
    return corpus.model_copy(update=derived)


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
