"""Panels of a report: titles, rows and charts, which the terminal and the page show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

from drafter_service.observability.pages.tables import Cell, Value
from drafter_service.observability.report import units
from drafter_service.observability.report.charts import Chart, Panel
from drafter_service.observability.report.schema import (
    Drafting,
    LatencyReport,
    NamespaceReport,
    Recent,
    Report,
    ServiceReport,
    StepSize,
)
from ssd.budget.totals import SIZES
from ssd.stats import POSITIONS

Unit = Callable[[float | None], str]


LIST = ("", "")
"""Headings of a list of names and values."""
ACCEPTANCE = Chart("bars", "accepted", {1: "green"}, below=2)
DRAFTING_OVER_TIME = (
    Chart("time", "tokens per step", {1: "green"}, area=1, least=1, reference=(1, "plain decoding, 1")),
    Chart("time", "share", {2: "blue", 3: "amber"}, height=190),
)


class Column(NamedTuple):
    """A column of a table: its heading, and the field and the unit of its values."""

    head: str
    field: str
    unit: Unit = units.count


SUMMARY = (
    (Column("tokens per step", "tokens_per_step", units.ratio), "1 is plain decoding"),
    (Column("steps saved", "saved_share", units.share), "of the target's steps"),
    (Column("hit rate", "hit_rate", units.share), "of steps had a draft"),
    (Column("acceptance", "acceptance", units.share), "of draft tokens"),
    (Column("output tokens", "committed"), "accepted draft tokens and bonus tokens"),
)
"""Key values of a `Drafting`, and what they mean."""
TALLY = (
    Column("acceptance", "acceptance", units.share),
    Column("draft tokens", "drafted"),
    Column("accepted", "accepted"),
)
DRAFTED_PER_STEP = Column("drafted per step", "drafted_per_step", units.ratio)
OVER_TIME = (
    Column("tokens per step", "tokens_per_step", units.ratio),
    Column("hit rate", "hit_rate", units.share),
    Column("acceptance", "acceptance", units.share),
    Column("output tokens", "committed"),
    Column("late steps", "timeouts"),
)
OCCUPANCY = (
    Column("tokens remembered", "corpus_tokens"),
    Column("tokens learned", "learned_tokens"),
    Column("memory", "memory_bytes", units.size),
)
CALIBRATION = (
    Column("predicted", "predicted", units.share),
    Column("accepted", "acceptance", units.share),
    Column("draft tokens", "drafted"),
)
STEPS = (
    Column("steps", "steps"),
    Column("mean duration", "mean_s", units.duration),
    Column("expected", "expected_s", units.duration),
)
VERSIONS = (
    Column("rollouts", "requests"),
    Column("tokens", "committed"),
    Column("per step", "tokens_per_step", units.ratio),
    *TALLY,
)
CLIENTS = (
    Column("connected", "streams"),
    Column("tokens", "committed"),
    Column("per step", "tokens_per_step", units.ratio),
    Column("accepted", "acceptance", units.share),
    Column("late steps", "late_steps"),
    Column("late", "late_share", units.share),
)
LATENCY = (
    *(Column(name, f"{name}_s", units.duration) for name in ("p50", "p90", "p99", "longest", "mean")),
    Column("number measured", "count"),
)
CORPUS = (
    Column("tokens remembered", "tokens"),
    Column("requests remembered", "requests"),
    Column("capacity, tokens", "capacity_tokens"),
    Column("full", "occupancy", units.share),
    Column("tokens learned in total", "learned_tokens"),
    Column("times overwritten", "turnovers", units.ratio),
    Column("time to overwrite all", "turnover_s", units.duration),
    Column("tokens not draftable yet", "waiting_tokens"),
    Column("requests forgotten", "forgotten_requests"),
    Column("merges", "merges"),
    Column("merges into the base tier", "base_merges"),
    Column("full sorts", "full_builds"),
)
SERVICE = (
    Column("uptime", "uptime_s", units.duration),
    Column("resident memory", "memory_bytes", units.size),
    Column("requests and streams refused", "refused"),
)
LOG = (
    Column("shared log: tokens written", "published_tokens"),
    Column("tokens read", "consumed_tokens"),
    Column("lag", "lag_s", units.duration),
    Column("duplicates", "duplicates"),
    Column("tokens dropped", "dropped_tokens"),
    Column("malformed entries", "malformed"),
    Column("gaps", "gaps"),
    Column("errors", "errors"),
)
ACTIVITY = (
    Column("engines connected", "streams"),
    Column("sequences running", "sequences"),
    Column("duplicate texts", "duplicates"),
)
CLIENT_TOTALS = (
    Column("late steps, without drafts", "timeouts"),
    Column("late answers dropped", "dropped"),
    Column("sequences sent again", "resyncs"),
    Column("reconnects", "reconnects"),
)


def namespace_panels(namespace: NamespaceReport) -> list[Panel]:
    """Return the panels of a namespace for which there is data."""
    panels = [
        _over_time(namespace),
        _positions(namespace),
        _ages(namespace),
        _calibration(namespace),
        _versions(namespace),
        _engines(namespace),
        _sources(namespace),
        _step_sizes(namespace),
        _latency("Draft latency", "One message: drafts for the whole batch.", "messages", namespace.draft_latency),
        _latency("Merge latency", "Time to make requests draftable.", "merges", namespace.merge_latency),
        _occupancy(namespace),
        _corpus(namespace),
        _activity(namespace),
    ]
    return [panel for panel in panels if panel.rows]


def service_panel(service: ServiceReport) -> Panel:
    """Return the panel of the process and its shared log."""
    rows = _values(service, SERVICE) + ([] if service.log is None else _values(service.log, LOG))
    return Panel("The service", f"ssd-drafter {units.printable(service.version)}", LIST, rows)


def summary(drafting: Drafting, recent: Recent | None) -> Panel:
    """Return the key values of a namespace, since the start and lately."""
    parts = [drafting] if recent is None else [drafting, recent.drafting]
    columns = (*(column for column, _ in SUMMARY), DRAFTED_PER_STEP, *TALLY[1:])
    rows: list[Sequence[Cell]] = [(column.head, *(_value(part, column) for part in parts)) for column in columns]
    note = ""
    if recent is not None:
        rate = units.rate(recent.output_tokens_per_s)
        note = f"Since the start, and in the last {units.duration(recent.seconds)}: {rate} output tokens/s."
    return Panel("Drafting", note, ("", "in total", "recent")[: 1 + len(parts)], rows)


def overview(report: Report, namespaces: Iterable[NamespaceReport]) -> Panel:
    """Return the panel with a row for each namespace, and one for all."""
    columns = [column for column, _ in SUMMARY]
    rows: list[Sequence[Cell]] = [
        (units.shortened(each.name), *_cells(each.drafting, columns), Value(each.corpus.tokens, units.count))
        for each in namespaces
    ]
    rows.append(("all", *_cells(report.total, columns), ""))
    return Panel("Namespaces", "", ("namespace", *(column.head for column in columns), "remembered"), rows)


# --- Parts of panels


def _value(item: object, column: Column) -> Value:
    return Value(getattr(item, column.field), column.unit)


def _cells(item: object, columns: Iterable[Column]) -> list[Value]:
    return [_value(item, column) for column in columns]


def _values(item: object, columns: Iterable[Column]) -> list[Sequence[Cell]]:
    """Return a row for each column, without values that are not known."""
    pairs = ((column.head, _value(item, column)) for column in columns)
    return [(head, value) for head, value in pairs if value.number is not None]


def _table(
    title: str,
    note: str,
    head: str,
    columns: Sequence[Column],
    items: Sequence[object],
    names: Iterable[Cell],
    **more: Any,
) -> Panel:
    """Return a panel with a row for each of `items`, which begins with its name."""
    rows = [(name, *_cells(item, columns)) for name, item in zip(names, items, strict=True)]
    return Panel(title, note, (head, *(column.head for column in columns)), rows, **more)


# --- Drafting


def _over_time(namespace: NamespaceReport) -> Panel:
    periods = namespace.over_time
    if all(period.tokens_per_step is None for period in periods):
        periods = []
    names = [Value(period.begins_at, units.moment) for period in periods]
    note = "The shaded area is the gain over plain decoding."
    return _table("Over time", note, "from", OVER_TIME, periods, names, charts=DRAFTING_OVER_TIME, is_wide=True)


def _positions(namespace: NamespaceReport) -> Panel:
    known = namespace.by_position
    names = [units.span(each.position, None if each.position == POSITIONS else each.position) for each in known]
    columns = (*TALLY, Column("of all drafts", "accepted_share_of_drafts", units.share))
    note = "Share of verified tokens that were accepted."
    return _table("By position in the draft", note, "position", columns, known, names, charts=[ACCEPTANCE])


def _ages(namespace: NamespaceReport) -> Panel:
    known = namespace.age.bins
    median = units.count(namespace.age.median_tokens)
    note = f"Median age of the text that accepted tokens come from, in tokens learned since: {median}."
    names = [units.span(each.least_tokens, each.most_tokens) for each in known]
    return _table("By age of the text", note, "age, tokens", TALLY, known, names, charts=[ACCEPTANCE])


def _sources(namespace: NamespaceReport) -> Panel:
    known = namespace.by_source if namespace.drafting.drafted else []
    note = "corpus: other requests; local: the request itself; fallback: in no match."
    if namespace.libraries:
        note += f" library: {', '.join(map(units.printable, namespace.libraries))}."
    names = [each.source for each in known]
    return _table("By source", note, "source", TALLY, known, names, charts=[ACCEPTANCE])


def _calibration(namespace: NamespaceReport) -> Panel:
    known = namespace.calibration
    names = [units.percents(one.least_path_prob, one.most_path_prob) for one in known.bins]
    note = f"Predicted and actual acceptance differ by {units.share(known.error)} on average."
    chart = Chart("diagonal", "accepted", {2: "green"})
    return _table("Calibration", note, "path probability", CALIBRATION, known.bins, names, charts=[chart])


def _versions(namespace: NamespaceReport) -> Panel:
    known = namespace.by_version or []
    note = "Rollouts that ended, by the training step of the policy: the versions whose rollouts ended last."
    names = [str(each.version) for each in known]
    return _table("Versions of the policy", note, "version", VERSIONS, known, names, is_wide=True)


def _step_sizes(namespace: NamespaceReport) -> Panel:
    budget = namespace.budget
    note = f"{units.counted(budget.withheld_tokens, 'draft token')} were not worth the time. "
    note += f"{units.counted(budget.ignored_steps, 'step')} with impossible values were ignored."
    names = [_size(each) for each in budget.step_sizes]
    chart = Chart("rows", "duration", {2: "blue", 3: "gray"}, dashed=3)
    return _table("Steps of engines", note, "tokens", STEPS, budget.step_sizes, names, charts=[chart])


def _size(size: StepSize) -> str:
    most = size.most_tokens
    return f"> {1 << SIZES - 2:,}" if most is None else units.span(most // 2 + 1, most)


def _latency(title: str, note: str, counted: str, known: LatencyReport) -> Panel:
    quantiles = (f"{column.head} {column.unit(getattr(known, column.field))}" for column in LATENCY)
    names = [
        f"> {units.duration(one.least_s)}" if one.most_s is None else units.duration(one.most_s) for one in known.bins
    ]
    rows = [(name, Value(one.count, units.count)) for name, one in zip(names, known.bins, strict=True)]
    chart = Chart("bars", counted, {1: "blue"})
    return Panel(title, f"{note} {', '.join(quantiles)}.", ("up to", counted), rows, [chart])


# --- Corpus and engines


def _occupancy(namespace: NamespaceReport) -> Panel:
    corpus, periods = namespace.corpus, namespace.over_time if namespace.corpus.tokens else []
    note = f"Overwritten {units.ratio(corpus.turnovers)} times"
    if corpus.turnover_s is not None:
        note += f"; once more in {units.duration(corpus.turnover_s)} at the present rate"
    names = [Value(period.ends_at, units.moment) for period in periods]
    chart = Chart("time", "tokens", {1: "violet"}, area=1, reference=(corpus.capacity_tokens, "capacity"))
    return _table("Occupancy", f"{note}.", "until", OCCUPANCY, periods, names, charts=[chart])


def _corpus(namespace: NamespaceReport) -> Panel:
    known = namespace.corpus
    note = f"{units.counted(known.tokens, 'token')} of {units.counted(known.requests, 'request')}."
    memory = ("memory", Value(namespace.memory_bytes, units.size))
    return Panel("The corpus", note, LIST, [*_values(known, CORPUS), memory])


def _activity(namespace: NamespaceReport) -> Panel:
    note = " · ".join(units.shortened(part) for part in (namespace.model.name, namespace.model.adapter) if part)
    withheld = ("draft tokens withheld", Value(namespace.budget.withheld_tokens, units.count))
    rows = [*_values(namespace, ACTIVITY), *_values(namespace.clients, CLIENT_TOTALS), withheld]
    return Panel("Activity", note, LIST, rows)


def _engines(namespace: NamespaceReport) -> Panel:
    known = namespace.by_client
    names = [
        " · ".join(units.shortened(name) for name in (each.engine, each.client) if name) or units.UNKNOWN
        for each in known
    ]
    return _table("Engines", "Since the namespace was loaded.", "engine", CLIENTS, known, names, is_wide=True)
