"""Panels of what keeps drafting going: corpus, latencies, engines, and the service itself."""

from __future__ import annotations

from drafter_service.observability.report import curves, plots, units
from drafter_service.observability.report.parts import Cell, Figure, list_of, panel
from drafter_service.observability.report.schema import LatencyReport, NamespaceReport, ServiceReport


def latencies(namespace: NamespaceReport) -> list[str]:
    """How long drafts and merges took."""
    kinds = (
        ("Draft latency", "One message: drafts for the whole batch of an engine.", namespace.draft_latency),
        ("Merge latency", "Finished requests made draftable; drafting goes on meanwhile.", namespace.merge_latency),
    )
    return [_latency(title, note, known) for title, note, known in kinds if known is not None and known.count]


def occupancy(namespace: NamespaceReport) -> list[str]:
    """How the corpus filled."""
    corpus, periods = namespace.corpus, namespace.over_time
    if not periods or not corpus.tokens:
        return []
    rows = [
        (
            units.moment(period.ends_at),
            Figure(period.corpus_tokens, units.count),
            Figure(period.learned_tokens, units.count),
            Figure(period.memory_bytes, units.size),
        )
        for period in periods
    ]
    note = f"Written through {units.ratio(corpus.turnovers)} times"
    if corpus.turnover_s is not None:
        note += f"; at the pace of late, all is overwritten in {units.duration(corpus.turnover_s)}"
    plot = curves.corpus_over_time(periods, corpus.capacity_tokens)
    return [panel("Occupancy", f"{note}.", plot, ("until", "tokens remembered", "tokens learned", "memory"), rows)]


def corpus(namespace: NamespaceReport) -> list[str]:
    """What the corpus holds, and what became of it."""
    known = namespace.corpus
    rows = (
        ("tokens remembered", Figure(known.tokens, units.count)),
        ("requests remembered", Figure(known.requests, units.count)),
        ("capacity, tokens", Figure(known.capacity_tokens, units.count)),
        ("learned ever, tokens", Figure(known.learned_tokens, units.count)),
        ("not draftable yet, tokens", Figure(known.waiting_tokens, units.count)),
        ("requests forgotten", Figure(known.forgotten_requests, units.count)),
        ("merges", Figure(known.merges, units.count)),
        ("large merges", Figure(known.base_merges, units.count)),
        ("sorted from scratch", Figure(known.full_builds, units.count)),
        ("memory", Figure(namespace.memory_bytes, units.size)),
    )
    full = "" if known.occupancy is None else f", {units.share(known.occupancy)} full"
    note = f"{units.count(known.tokens)} tokens of {units.count(known.requests)} requests{full}."
    return [panel("The corpus", note, list_of(row for row in rows if row[1].value is not None))]


def engines(namespace: NamespaceReport) -> list[str]:
    """Who drafts, and what their clients counted."""
    clients = namespace.clients
    if clients is None:
        return []
    rows = (
        ("engines that draft now", namespace.streams),
        ("sequences now", namespace.sequences),
        ("steps without drafts: too late", clients.timeouts),
        ("late answers dropped", clients.dropped),
        ("sequences told again", clients.resyncs),
        ("reconnects", clients.reconnects),
        ("texts offered again", namespace.duplicates),
    )
    shown = list_of((name, Figure(value, units.count)) for name, value in rows)
    model = namespace.model
    note = "" if model is None else " · ".join(part for part in (model.name, model.adapter) if part)
    return [panel("Engines", note, shown)]


def service_panel(service: ServiceReport) -> str:
    """The process, and the log that it shares with others."""
    rows = [
        ("up for", Figure(service.uptime_s, units.duration)),
        ("resident memory", Figure(service.memory_bytes, units.size)),
        ("requests and streams refused", Figure(service.refused, units.count)),
    ]
    log = service.log
    if log is not None:
        rows += [
            ("shared log: tokens written", Figure(log.published_tokens, units.count)),
            ("tokens read", Figure(log.consumed_tokens, units.count)),
            ("behind by", Figure(log.lag_s, units.duration)),
            ("entries behind", Figure(log.lag_entries, units.count)),
            ("duplicates", Figure(log.duplicates, units.count)),
            ("tokens dropped", Figure(log.dropped_tokens, units.count)),
            ("malformed entries", Figure(log.malformed, units.count)),
            ("gaps", Figure(log.gaps, units.count)),
            ("errors", Figure(log.errors, units.count)),
        ]
    return panel("The service", f"ssd-drafter {service.version}", list_of(rows))


def _latency(title: str, note: str, known: LatencyReport) -> str:
    quantiles = (
        ("p50", known.p50_s),
        ("p90", known.p90_s),
        ("p99", known.p99_s),
        ("longest", known.longest_s),
        ("mean", known.mean_s),
    )
    rows: list[tuple[Cell, ...]] = [(name, Figure(value, units.duration)) for name, value in quantiles]
    rows.append(("measured", Figure(known.count, units.count)))
    return panel(title, note, plots.durations(known, title), ("", ""), rows)
