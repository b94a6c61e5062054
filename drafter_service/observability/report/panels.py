"""The list of panels of a report: titles, rows and charts, which the terminal and the page show."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from drafter_service.observability.pages import units
from drafter_service.observability.pages.charts import Chart, Panel
from drafter_service.observability.pages.tables import Cell, Value
from drafter_service.observability.report.schema import (
    Drafting,
    DurationBin,
    LatencyReport,
    NamespaceReport,
    Period,
    Recent,
    Report,
    ServiceReport,
    StepSize,
)
from ssd.budget.totals import SIZES
from ssd.stats import POSITIONS

Columns = Mapping[str, str]
"""Fields of a part of the report by the heading of their column."""
UNITS = (
    (("_s",), units.duration),
    (("_bytes",), units.size),
    (("_share", "_rate", "_of_drafts", "acceptance", "occupancy", "predicted"), units.share),
    (("_per_step", "turnovers"), units.ratio),
)
"""Formats of fields by the ends of their names; other fields are counts."""


class Table(NamedTuple):
    """A panel of a namespace with a row for each of some parts of its report."""

    title: str
    note: str | Callable[[NamespaceReport], str]
    head: str
    """Heading of the names of rows."""
    items: Callable[[NamespaceReport], Sequence[Any]]
    """Function that returns the parts; without any there is no panel."""
    name: Callable[[Any], Cell]
    """Function that returns the name of a part's row."""
    columns: Columns
    chart: Chart | Callable[[NamespaceReport], Chart] | None = None
    is_wide: bool = False


SUMMARY = (
    ("tokens per step", "tokens_per_step", "1 is plain decoding"),
    ("steps saved", "saved_share", "of the target's steps"),
    ("hit rate", "hit_rate", "of steps had a draft"),
    ("acceptance", "acceptance", "of draft tokens"),
    ("output tokens", "committed", "accepted draft tokens and bonus tokens"),
)
"""Key values of a `Drafting`: heading, field, and what they mean."""
KEY_VALUES = {head: field for head, field, _ in SUMMARY}
TOKENS_PER_STEP = {"tokens": "committed", "per step": "tokens_per_step"}
LATE = {"late steps": "late_steps", "late": "late_share"}
TALLY = {"acceptance": "acceptance", "draft tokens": "drafted", "accepted": "accepted"}
CORPUS = {
    "tokens remembered": "tokens",
    "requests remembered": "requests",
    "capacity, tokens": "capacity_tokens",
    "full": "occupancy",
    "tokens learned in total": "learned_tokens",
    "times overwritten": "turnovers",
    "time to overwrite all": "turnover_s",
    "tokens not draftable yet": "waiting_tokens",
    "requests forgotten": "forgotten_requests",
    "merges": "merges",
    "merges into the base tier": "base_merges",
    "full sorts": "full_builds",
}
SERVICE = {"uptime": "uptime_s", "resident memory": "memory_bytes", "requests and streams refused": "refused"}
LOG = {
    "shared log: tokens written": "published_tokens",
    "tokens read": "consumed_tokens",
    "lag": "lag_s",
    "duplicates": "duplicates",
    "tokens dropped": "dropped_tokens",
    "malformed entries": "malformed",
    "gaps": "gaps",
    "errors": "errors",
}
ACTIVITY = {"engines connected": "streams", "sequences running": "sequences", "duplicate texts": "duplicates"}
CLIENT_TOTALS = {
    "late steps, without drafts": "timeouts",
    "late answers dropped": "dropped",
    "sequences sent again": "resyncs",
    "reconnects": "reconnects",
}
LIST = ("", "")
"""Headings of a list of names and values."""
ACCEPTANCE = Chart("bars", "accepted", {1: "green"})
"""The chart of a `TALLY`."""


def _latency(title: str, note: str, counted: str, find: Callable[[NamespaceReport], LatencyReport]) -> Table:
    """Return the table of a distribution of durations."""

    def with_quantiles(namespace: NamespaceReport) -> str:
        known = find(namespace)
        names = ("p50", "p90", "p99", "longest", "mean")
        quantiles = (f"{name} {units.duration(getattr(known, f'{name}_s'))}" for name in names)
        return f"{note} {', '.join(quantiles)}, number measured {units.count(known.count)}."

    def up_to(part: DurationBin) -> str:
        return units.duration(part.most_s) if part.most_s is not None else f"> {units.duration(part.least_s)}"

    return Table(
        title, with_quantiles, "up to", lambda it: find(it).bins, up_to, {counted: "count"},
        Chart("bars", counted, {1: "blue"}),
    )  # fmt: skip


def _periods(namespace: NamespaceReport) -> Sequence[Period]:
    """Return the periods if any had steps."""
    return namespace.over_time if any(one.tokens_per_step is not None for one in namespace.over_time) else []


def _turnover(namespace: NamespaceReport) -> str:
    corpus = namespace.corpus
    again = f"; once more in {units.duration(corpus.turnover_s)} at the present rate"
    return f"Overwritten {units.ratio(corpus.turnovers)} times{'' if corpus.turnover_s is None else again}."


def _sources(namespace: NamespaceReport) -> str:
    note = "corpus: other requests; local: the request itself; fallback: in no match."
    return f"{note} library: {', '.join(map(units.printable, namespace.libraries))}." if namespace.libraries else note


def _tokens_of(size: StepSize) -> str:
    most = size.most_tokens
    return f"> {1 << SIZES - 2:,}" if most is None else units.span(most // 2 + 1, most)


TABLES = (
    Table(
        "Over time",
        "The shaded area is the gain over plain decoding.",
        "from",
        _periods,
        lambda one: Value(one.begins_at, units.moment),
        {"tokens per step": "tokens_per_step", "output tokens": "committed", "late steps": "timeouts"},
        Chart("time", "tokens per step", {1: "green"}, area=1, least=1, reference=(1, "plain decoding, 1")),
    ),
    Table(
        "Hit rate and acceptance over time",
        "Shares of the steps that had a draft, and of the draft tokens that were accepted.",
        "from",
        _periods,
        lambda one: Value(one.begins_at, units.moment),
        {"hit rate": "hit_rate", "acceptance": "acceptance"},
        Chart("time", "share", {1: "blue", 2: "amber"}),
    ),
    Table(
        "By position in the draft",
        "Share of verified tokens that were accepted.",
        "position",
        lambda it: it.by_position,
        lambda one: units.span(one.position, None if one.position == POSITIONS else one.position),
        {**TALLY, "of all drafts": "accepted_share_of_drafts"},
        ACCEPTANCE,
    ),
    Table(
        "By age of the text",
        lambda it: (
            "Median age of the text that accepted tokens come from, in tokens learned since: "
            f"{units.count(it.age.median_tokens)}."
        ),
        "age, tokens",
        lambda it: it.age.bins,
        lambda one: units.span(one.least_tokens, one.most_tokens),
        TALLY,
        ACCEPTANCE,
    ),
    Table(
        "Calibration",
        lambda it: f"Predicted and actual acceptance differ by {units.share(it.calibration.error)} on average.",
        "path probability",
        lambda it: it.calibration.bins,
        lambda one: units.percents(one.least_path_prob, one.most_path_prob),
        {"predicted": "predicted", "accepted": "acceptance", "draft tokens": "drafted"},
        Chart("rows", "share", {1: "gray", 2: "green"}, dashed=1),
    ),
    Table(
        "Versions of the policy",
        "Rollouts that ended, by the training step of the policy: the versions whose rollouts ended last.",
        "version",
        lambda it: it.by_version or [],
        lambda one: str(one.version),
        {"rollouts": "requests", **TOKENS_PER_STEP, **TALLY},
        is_wide=True,
    ),
    Table(
        "Engines",
        "Since the namespace was loaded.",
        "engine",
        lambda it: it.by_client,
        lambda one: " · ".join(map(units.shortened, filter(None, (one.engine, one.client)))) or units.UNKNOWN,
        {
            "connected": "streams",
            **TOKENS_PER_STEP,
            "accepted": "acceptance",
            "late steps": "late_steps",
            "late": "late_share",
        },
        is_wide=True,
    ),
    Table(
        "Copies of the corpus",
        "Engines that draft from a copy in their own process, connected now.",
        "engine",
        lambda it: it.copies,
        lambda one: units.shortened(one.engine) or units.UNKNOWN,
        {"tokens": "tokens", "changes not sent yet": "missing_changes"},
    ),
    Table(
        "By source",
        _sources,
        "source",
        lambda it: it.by_source if it.drafting.drafted else [],
        lambda one: one.source,
        TALLY,
        ACCEPTANCE,
    ),
    Table(
        "Steps of engines",
        lambda it: (
            f"{units.counted(it.budget.withheld_tokens, 'draft token')} were not worth the time. "
            f"{units.counted(it.budget.ignored_steps, 'step')} with impossible values were ignored."
        ),
        "tokens",
        lambda it: it.budget.step_sizes,
        _tokens_of,
        {"steps": "steps", "mean duration": "mean_s", "expected": "expected_s"},
        Chart("rows", "duration", {2: "blue", 3: "gray"}, dashed=3),
    ),
    _latency("Draft latency", "One message: drafts for the whole batch.", "messages", lambda it: it.draft_latency),
    _latency("Merge latency", "Time to make requests draftable.", "merges", lambda it: it.merge_latency),
    Table(
        "Occupancy",
        _turnover,
        "until",
        lambda it: it.over_time if it.corpus.tokens else [],
        lambda one: Value(one.ends_at, units.moment),
        {"tokens remembered": "corpus_tokens", "tokens learned": "learned_tokens", "memory": "memory_bytes"},
        lambda it: Chart("time", "tokens", {1: "violet"}, area=1, reference=(it.corpus.capacity_tokens, "capacity")),
    ),
)
"""The panels of a namespace, in their order; those of the corpus and of its activity follow."""


def namespace_panels(namespace: NamespaceReport) -> list[Panel]:
    """Return the panels of a namespace for which there is data."""
    corpus, model = namespace.corpus, namespace.model
    panels = [_panel(table, namespace) for table in TABLES if table.items(namespace)]
    memory = ("memory", value_of(namespace, "memory_bytes"))
    held = f"{units.counted(corpus.tokens, 'token')} of {units.counted(corpus.requests, 'request')}."
    panels.append(Panel("The corpus", held, LIST, [*_values(corpus, CORPUS), memory]))
    withheld = ("draft tokens withheld", value_of(namespace.budget, "withheld_tokens"))
    rows = [*_values(namespace, ACTIVITY), *_values(namespace.clients, CLIENT_TOTALS), withheld]
    names = " · ".join(map(units.shortened, filter(None, (model.name, model.adapter))))
    return [*panels, Panel("Activity", names, LIST, rows)]


def service_panel(service: ServiceReport) -> Panel:
    """Return the panel of the process and its shared log."""
    rows = _values(service, SERVICE) + ([] if service.log is None else _values(service.log, LOG))
    return Panel("The service", f"ssd-drafter {units.printable(service.version)}", LIST, rows)


def summary(drafting: Drafting, recent: Recent | None) -> Panel:
    """Return the key values of a namespace, since the start and lately."""
    parts = [drafting] if recent is None else [drafting, recent.drafting]
    columns = {**KEY_VALUES, "drafted per step": "drafted_per_step", **TALLY}
    rows: list[Sequence[Cell]] = [(head, *(value_of(part, field) for part in parts)) for head, field in columns.items()]
    note = ""
    if recent is not None:
        rate = units.ratio(recent.output_tokens_per_s)
        note = f"Since the start, and in the last {units.duration(recent.seconds)}: {rate} output tokens/s."
    return Panel("Drafting", note, ("", "in total", "recent")[: 1 + len(parts)], rows)


def overview(report: Report, namespaces: Iterable[NamespaceReport]) -> Panel:
    """Return the panel with a row for each namespace, and one for all."""
    rows: list[Sequence[Cell]] = [
        (units.shortened(each.name), *_cells(each.drafting, KEY_VALUES), value_of(each.corpus, "tokens"))
        for each in namespaces
    ]
    rows.append(("all", *_cells(report.total, KEY_VALUES), ""))
    return Panel("Namespaces", "", ("namespace", *KEY_VALUES, "remembered"), rows)


def value_of(part: object, field: str) -> Value:
    """Return a field of a part of a report with its format."""
    return Value(getattr(part, field), next((unit for ends, unit in UNITS if field.endswith(ends)), units.count))


def _panel(table: Table, namespace: NamespaceReport) -> Panel:
    note = table.note if isinstance(table.note, str) else table.note(namespace)
    rows: list[Sequence[Cell]] = [(table.name(item), *_cells(item, table.columns)) for item in table.items(namespace)]
    chart = table.chart(namespace) if callable(table.chart) else table.chart
    return Panel(table.title, note, (table.head, *table.columns), rows, chart, table.is_wide)


def _cells(part: object, columns: Columns) -> list[Value]:
    return [value_of(part, field) for field in columns.values()]


def _values(part: object, columns: Columns) -> list[Sequence[Cell]]:
    """Return a row for each column, without values that are not known."""
    return [
        (head, value) for head, value in zip(columns, _cells(part, columns), strict=True) if value.number is not None
    ]
