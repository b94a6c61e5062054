"""Panels of the report page for a namespace and for the service."""

from __future__ import annotations

from collections.abc import Iterable

from drafter_service.observability.pages.charts import legend
from drafter_service.observability.pages.page import panel
from drafter_service.observability.pages.svg import DASHED
from drafter_service.observability.pages.tables import Cell, Value, description_list, html_table
from drafter_service.observability.report import plots, table_rows, units
from drafter_service.observability.report.plots import SOURCE_COLORS
from drafter_service.observability.report.schema import LatencyReport, NamespaceReport, ServiceReport, Tally

TALLY_HEADS = ("acceptance", "draft tokens", "accepted")
SOURCE_NAMES = {
    "corpus": "corpus: other requests",
    "local": "local: the request itself",
    "fallback": "fallback: in no match",
    "library": "library: namespaces that this one reads",
}


def namespace_panels(namespace: NamespaceReport) -> list[str]:
    """Return all panels for which there is data, each with a chart and the same data as a table."""
    makers = (
        _over_time,
        _positions,
        _ages,
        _calibration,
        _sources,
        _versions,
        _step_sizes,
        _latencies,
        _occupancy,
        _corpus,
        _engines,
    )
    return [markup for maker in makers for markup in maker(namespace)]


def service_panel(service: ServiceReport) -> str:
    """Return the panel of the process and its shared log."""
    rows = [
        ("uptime", Value(service.uptime_s, units.duration)),
        ("resident memory", Value(service.memory_bytes, units.size)),
        ("requests and streams refused", Value(service.refused, units.count)),
    ]
    log = service.log
    if log is not None:
        rows += [
            ("shared log: tokens written", Value(log.published_tokens, units.count)),
            ("tokens read", Value(log.consumed_tokens, units.count)),
            ("lag", Value(log.lag_s, units.duration)),
            ("duplicates", Value(log.duplicates, units.count)),
            ("tokens dropped", Value(log.dropped_tokens, units.count)),
            ("malformed entries", Value(log.malformed, units.count)),
            ("gaps", Value(log.gaps, units.count)),
            ("errors", Value(log.errors, units.count)),
        ]
    return panel("The service", f"ssd-drafter {service.version}", description_list(rows))


# --- Drafting


def _over_time(namespace: NamespaceReport) -> list[str]:
    periods = namespace.over_time
    if not any(period.tokens_per_step is not None for period in periods):
        return []
    rows = [
        (
            units.moment(period.begins_at),
            Value(period.tokens_per_step, units.ratio),
            Value(period.hit_rate, units.share),
            Value(period.acceptance, units.share),
            Value(period.committed, units.count),
            Value(period.timeouts, units.count),
        )
        for period in periods
    ]
    heads = ("from", "tokens per step", "hit rate", "acceptance", "output tokens", "late steps")
    colors = (
        ("green", "tokens per step"),
        (DASHED, "plain decoding, 1"),
        ("blue", "hit rate: steps with a draft"),
        ("amber", "acceptance: accepted draft tokens"),
    )
    plot = plots.drafting_over_time(periods) + legend(colors)
    return [
        panel("Over time", "The shaded area is the gain over plain decoding.", plot, html_table(heads, rows), "across")
    ]


def _positions(namespace: NamespaceReport) -> list[str]:
    known = table_rows.positions(namespace)
    if not known:
        return []
    shares = [Value(tally.accepted_share_of_drafts, units.share) for tally in namespace.by_position]
    lines = [(row.label, of_drafts, *_tally_cells(row.tally)) for row, of_drafts in zip(known, shares, strict=True)]
    plot = plots.shares(known, "Acceptance by position in the draft", "position in the draft", "position {}", 12)
    data = html_table(("position", "of all drafts", *TALLY_HEADS), lines)
    return [panel("By position in the draft", "Share of verified tokens that were accepted.", plot, data)]


def _ages(namespace: NamespaceReport) -> list[str]:
    known = table_rows.ages(namespace)
    if not known:
        return []
    median = units.count(namespace.age.median_tokens)
    note = f"Median age of the text that accepted tokens come from, in tokens learned since: {median}."
    plot = plots.shares(known, "Acceptance by age of the text", "age (tokens learned since)", "age {}", 6)
    return [panel("By age of the text", note, plot, _tally_table("tokens since", known))]


def _calibration(namespace: NamespaceReport) -> list[str]:
    known = namespace.calibration
    if not known.bins:
        return []
    rows = [
        (
            units.percents(one.least_path_prob, one.most_path_prob),
            Value(one.predicted, units.share),
            Value(one.acceptance, units.share),
            Value(one.drafted, units.count),
        )
        for one in known.bins
    ]
    note = f"Predicted and actual acceptance differ by {units.share(known.error)} on average."
    data = html_table(("path probability", "predicted", "accepted", "draft tokens"), rows)
    return [panel("Calibration", note, plots.calibration(known), data)]


def _sources(namespace: NamespaceReport) -> list[str]:
    tallies = namespace.by_source
    if not namespace.drafting.drafted:
        return []
    colors = [
        (SOURCE_COLORS[tally.source], f"{SOURCE_NAMES[tally.source]}, {units.share(tally.acceptance)} accepted")
        for tally in tallies
    ]
    data = html_table(("source", *TALLY_HEADS), [(tally.source, *_tally_cells(tally)) for tally in tallies])
    note = "Where draft tokens were found."
    if namespace.libraries:
        note += f" The namespace reads {', '.join(namespace.libraries)}."
    return [panel("By source", note, plots.sources(tallies) + legend(colors), data)]


def _tally_cells(tally: Tally) -> tuple[Value, Value, Value]:
    """Return the cells under `TALLY_HEADS`."""
    return (
        Value(tally.acceptance, units.share),
        Value(tally.drafted, units.count),
        Value(tally.accepted, units.count),
    )


def _tally_table(head: str, known: Iterable[table_rows.Row]) -> str:
    return html_table((head, *TALLY_HEADS), [(row.label, *_tally_cells(row.tally)) for row in known])


# --- Latencies, corpus, engines


def _step_sizes(namespace: NamespaceReport) -> list[str]:
    budget = namespace.budget
    if not budget.step_sizes:
        return []
    note = f"{units.counted(budget.withheld_tokens, 'draft token')} were not worth the time. "
    note += f"{units.counted(budget.ignored_steps, 'step')} with impossible values were ignored."
    plot = plots.step_times(budget.step_sizes)
    return [panel("Steps of engines", note, plot, html_table(table_rows.STEP_HEADS, table_rows.step_sizes(budget)))]


def _versions(namespace: NamespaceReport) -> list[str]:
    if not namespace.by_version:
        return []
    note = "Rollouts that ended, by the training step of the policy: the versions whose rollouts ended last."
    data = html_table(table_rows.VERSION_HEADS, table_rows.versions(namespace.by_version))
    return [panel("Versions of the policy", note, data, kind="across")]


def _latencies(namespace: NamespaceReport) -> list[str]:
    kinds = (
        ("Draft latency", "One message: drafts for the whole batch of an engine.", "messages", namespace.draft_latency),
        (
            "Merge latency",
            "Time to make finished requests draftable; drafting continues.",
            "merges",
            namespace.merge_latency,
        ),
    )
    return [_latency(title, note, counted, known) for title, note, counted, known in kinds if known.count]


def _latency(title: str, note: str, counted: str, known: LatencyReport) -> str:
    lines: list[tuple[Cell, ...]] = [
        *table_rows.quantiles(known),
        ("mean", Value(known.mean_s, units.duration)),
        ("number measured", Value(known.count, units.count)),
    ]
    plot = plots.durations(known, title, counted) + legend([("blue", f"{units.count(known.count)} {counted}")])
    return panel(title, note, plot, html_table(("", ""), lines))


def _occupancy(namespace: NamespaceReport) -> list[str]:
    corpus, periods = namespace.corpus, namespace.over_time
    if not periods or not corpus.tokens:
        return []
    rows = [
        (
            units.moment(period.ends_at),
            Value(period.corpus_tokens, units.count),
            Value(period.learned_tokens, units.count),
            Value(period.memory_bytes, units.size),
        )
        for period in periods
    ]
    note = f"Overwritten {units.ratio(corpus.turnovers)} times"
    if corpus.turnover_s is not None:
        note += f"; once more in {units.duration(corpus.turnover_s)} at the present rate"
    plot = plots.corpus_over_time(periods, corpus.capacity_tokens)
    data = html_table(("until", "tokens remembered", "tokens learned", "memory"), rows)
    return [panel("Occupancy", f"{note}.", plot, data)]


def _corpus(namespace: NamespaceReport) -> list[str]:
    known = namespace.corpus
    full = "" if known.occupancy is None else f", {units.share(known.occupancy)} full"
    note = f"{units.counted(known.tokens, 'token')} of {units.counted(known.requests, 'request')}{full}."
    return [panel("The corpus", note, description_list(table_rows.corpus(namespace)))]


def _engines(namespace: NamespaceReport) -> list[str]:
    model = namespace.model
    note = " · ".join(part for part in (model.name, model.adapter) if part)
    by_client = (
        (
            each.engine or units.UNKNOWN,
            each.client or units.UNKNOWN,
            Value(each.streams, units.count),
            Value(each.committed, units.count),
            Value(each.tokens_per_step, units.ratio),
            Value(each.acceptance, units.share),
            Value(each.late_steps, units.count),
            Value(each.late_share, units.share),
        )
        for each in namespace.by_client
    )
    content = description_list(table_rows.engines(namespace))
    heads = ("engine", "client", "connected", "tokens", "per step", "accepted", "late steps", "late")
    kinds = ("name", "name", "", "", "", "", "", "")
    return [panel("Engines", note, content + html_table(heads, by_client, kinds=kinds), kind="across")]
