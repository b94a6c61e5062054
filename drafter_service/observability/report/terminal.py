"""A report as tables in the terminal."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from drafter_service.observability.pages.tables import Value
from drafter_service.observability.report import table_rows, units
from drafter_service.observability.report.figures import share
from drafter_service.observability.report.schema import (
    ClientReport,
    Drafting,
    LatencyReport,
    NamespaceReport,
    Report,
    Tally,
)
from drafter_service.observability.report.verdict import (
    by_saving,
    in_shadow,
    log_facts,
    remarks,
    saving,
    service_facts,
    service_remarks,
    worth,
)

MAX_IN_FULL = 3
"""Maximum number of namespaces that are printed in full; with more only the overview is printed."""
BAR_WIDTH = 10
CURVE_WIDTH = 60
ENGINE_WIDTH = 29
POSITIONS = (1, 2, 3, 4, 5, 7, 9, 13, 17, 33, 65)
"""First values of the groups of tallies in each table."""
AGES = (0, 16, 256, 4096, 1 << 16, 1 << 20, 1 << 24, 1 << 28)
PATH_PROB_STEP = 0.1


def print_report(report: Report, console: Console) -> None:
    """Print a sentence about each namespace, then the tables, 80 columns wide in any terminal."""
    namespaces = by_saving(report)
    for line in _head(report):
        console.print(Text(line, "dim"))
    console.print()
    for namespace in namespaces:
        console.print(_summary(namespace, with_worth=len(namespaces) <= MAX_IN_FULL))
    if not namespaces:
        console.print("No namespaces yet: this service has not drafted or learned anything.")
    for remark in service_remarks(report):
        console.print(_remark(remark))
    if len(namespaces) > 1:
        console.print()
        console.print(_overview(report, namespaces))
    if len(namespaces) > MAX_IN_FULL:
        console.print()
        console.print("--namespace NAME shows one of them in full.", style="dim")
        return
    for namespace in namespaces:
        console.print(_in_full(namespace))


def _head(report: Report) -> list[str]:
    taken = units.moment(report.taken_at)
    return [f"{taken} · {' · '.join(service_facts(report.service))}", *log_facts(report.service.log)]


def _summary(namespace: NamespaceReport, *, with_worth: bool) -> Group:
    lines: list[RenderableType] = [
        Text.assemble((units.printable(namespace.name), "bold"), " ", saving(namespace.drafting))
    ]
    if with_worth and (more := worth(namespace.drafting)):
        lines.append(Padding(Text(more, "dim"), (0, 0, 0, 2)))
    if namespace.libraries:
        lines.append(Padding(Text(f"reads {', '.join(map(units.printable, namespace.libraries))}"), (0, 0, 0, 2)))
    if shadow := in_shadow(namespace.shadow):
        lines.append(Padding(Text(shadow), (0, 0, 0, 2)))
    lines += [_remark(remark) for remark in remarks(namespace)]
    return Group(*lines)


def _remark(text: str) -> Padding:
    return Padding(Text(f"! {text}", "yellow"), (0, 0, 0, 2))


def _overview(report: Report, namespaces: Iterable[NamespaceReport]) -> Table:
    table = _table("namespace", "tokens/step", "saved", "hit rate", "accepted", "learned", "full")
    for name, drafting, corpus in (
        *((one.name, one.drafting, one.corpus) for one in namespaces),
        ("all", report.total, None),
    ):
        table.add_row(
            Text(units.printable(name), overflow="ellipsis", no_wrap=True),
            units.ratio(drafting.tokens_per_step),
            units.share(drafting.saved_share),
            units.share(drafting.hit_rate),
            units.share(drafting.acceptance),
            "" if corpus is None else units.count(corpus.learned_tokens),
            "" if corpus is None else units.share(corpus.occupancy),
        )
    return table


def _in_full(namespace: NamespaceReport) -> Group:
    corpus = _list("corpus", table_rows.corpus(namespace))
    engines = _list("engines", table_rows.engines(namespace))
    parts: list[RenderableType] = [
        Rule(Text(units.printable(namespace.name), "bold"), align="left"),
        _drafting(namespace),
        *_over_time(namespace),
    ]
    if namespace.drafting.drafted:
        parts += [
            _side_by_side(
                _groups("position", table_rows.positions(namespace), POSITIONS),
                _groups("text age, tokens", table_rows.ages(namespace), AGES),
            ),
            _side_by_side(
                _calibration(namespace),
                Group(_bars("source", ((tally.source, tally) for tally in namespace.by_source)), Text(), engines),
            ),
            corpus,
        ]
    else:
        parts.append(_side_by_side(corpus, engines))
    if namespace.by_client:
        parts.append(_by_client(namespace.by_client))
    if namespace.by_version:
        parts.append(_values(table_rows.VERSION_HEADS, table_rows.versions(namespace.by_version)))
    if namespace.budget.step_sizes:
        parts.append(_values(table_rows.STEP_HEADS, table_rows.step_sizes(namespace.budget)))
    parts.append(_latencies(namespace.draft_latency, namespace.merge_latency))
    return Group(*(Padding(part, (1, 0, 0, 0)) for part in parts))


def _drafting(namespace: NamespaceReport) -> Table:
    recent = namespace.recent
    columns = [("since the start", namespace.drafting)]
    if recent is not None:
        columns.append((f"last {units.duration(recent.seconds)}", recent.drafting))
    table = _table("", *(head for head, _ in columns))

    def add(label: str, values: Iterable[str]) -> None:
        table.add_row(label, *values)

    drafts: Sequence[Drafting] = [drafting for _, drafting in columns]
    add("tokens per step", (units.ratio(one.tokens_per_step) for one in drafts))
    add("steps saved", (units.share(one.saved_share) for one in drafts))
    add("hit rate (steps with a draft)", (units.share(one.hit_rate) for one in drafts))
    add("acceptance of draft tokens", (units.share(one.acceptance) for one in drafts))
    add("drafted per step", (units.ratio(one.drafted_per_step) for one in drafts))
    add("drafted", (units.count(one.drafted) for one in drafts))
    add("accepted", (units.count(one.accepted) for one in drafts))
    add("output tokens", (units.count(one.committed) for one in drafts))
    if recent is not None:
        add("output tokens/s", ("", units.rate(recent.output_tokens_per_s)))
    return table


def _over_time(namespace: NamespaceReport) -> list[RenderableType]:
    periods = namespace.over_time
    known = [period.tokens_per_step for period in periods if period.tokens_per_step is not None]
    if len(known) < 2:
        return []
    curve = units.sparkline([period.tokens_per_step for period in periods], CURVE_WIDTH)
    begin, end = units.moment(periods[0].begins_at, "%m-%d %H:%M"), units.moment(periods[-1].ends_at, "%m-%d %H:%M UTC")
    table = _table("tokens per step over time", "")
    table.add_row(Text(curve, "green"), f"{units.ratio(min(known))} to {units.ratio(max(known))}")
    table.add_row(Text(begin + end.rjust(len(curve) - len(begin)), "dim"), "")
    return [table]


def _groups(title: str, members: Sequence[table_rows.Row], firsts: Sequence[int]) -> Table:
    return _bars(title, ((row.label, row.tally) for row in table_rows.grouped(members, firsts)))


def _bars(title: str, tallies: Iterable[tuple[str, Tally]]) -> Table:
    """Return a table of tallies with bars."""
    table = _table(title, "accepted", "", "of")
    table.columns[1].justify = "left"
    table.columns[1].min_width = BAR_WIDTH
    for label, tally in tallies:
        bar = Text(units.bar(tally.acceptance or 0.0, BAR_WIDTH), "green")
        table.add_row(label, bar, units.share(tally.acceptance), units.count(tally.drafted))
    return table


def _calibration(namespace: NamespaceReport) -> Table:
    error = namespace.calibration.error
    table = _table("path prob.", "predicted", "accepted", "drafted")
    for label, predicted, accepted, drafted in _tenths(namespace):
        table.add_row(label, units.share(predicted), units.share(accepted), units.count(drafted))
    table.add_section()
    table.add_row("mean error", "", units.share(error), "")
    return table


def _list(title: str, values: Iterable[tuple[str, Value]]) -> Table:
    table = _table(title, "")
    for label, value in values:
        table.add_row(label, value.format(value.number))
    return table


def _latencies(draft: LatencyReport, merge: LatencyReport) -> Table:
    table = _table("latency", *table_rows.QUANTILES, "measured")
    for label, latency in (("draft of a batch", draft), ("merge", merge)):
        values = (value.format(value.number) for _, value in table_rows.quantiles(latency))
        table.add_row(label, *values, units.count(latency.count))
    return table


def _values(heads: Sequence[str], rows: Iterable[tuple[str, *tuple[Value, ...]]]) -> Table:
    table = _table(*heads)
    for label, *values in rows:
        table.add_row(label, *(value.format(value.number) for value in values))
    return table


def _by_client(clients: Iterable[ClientReport]) -> Table:
    table = _table("engine", "connected", "tokens", "per step", "accepted", "late steps")
    for each in clients:
        lines = [units.shortened(name, ENGINE_WIDTH) for name in (each.engine, each.client) if name]
        table.add_row(
            Text("\n".join(lines) or units.UNKNOWN),
            units.count(each.streams),
            units.count(each.committed),
            units.ratio(each.tokens_per_step),
            units.share(each.acceptance),
            f"{units.count(each.late_steps)} ({units.share(each.late_share)})",
        )
    return table


def _table(first: str, *others: str) -> Table:
    """Return a table whose first column is text and whose others are numbers, aligned to the right."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(Text(first))
    for head in others:
        table.add_column(Text(head), justify="right")
    return table


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(left, right)
    return grid


def _tenths(namespace: NamespaceReport) -> list[tuple[str, float | None, float | None, int]]:
    """Return label, predicted share, accepted share and number of draft tokens, by path probability in tenths."""
    tenths = []
    for tenth in range(10):
        least = tenth * PATH_PROB_STEP
        bins = [
            one for one in namespace.calibration.bins if least <= one.least_path_prob + 1e-9 < least + PATH_PROB_STEP
        ]
        drafted = sum(one.drafted for one in bins)
        if drafted:
            predicted = share(sum((one.predicted or 0.0) * one.drafted for one in bins), drafted)
            accepted = share(sum((one.acceptance or 0.0) * one.drafted for one in bins), drafted)
            tenths.append((units.percents(least, least + PATH_PROB_STEP), predicted, accepted, drafted))
    return tenths
