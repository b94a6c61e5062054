"""A report in the terminal, for a person who asks whether it is worth it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from rich import box
from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from drafter_service.observability.report import units
from drafter_service.observability.report.bars import bar, sparkline
from drafter_service.observability.report.grouped import Row, ages, lengths, odds, positions, sources
from drafter_service.observability.report.schema import (
    Clients,
    CorpusReport,
    Drafting,
    LatencyReport,
    NamespaceReport,
    PassageReport,
    Report,
)
from drafter_service.observability.report.verdict import (
    by_saving,
    log_facts,
    remarks,
    saving,
    service_facts,
    service_remarks,
    worth,
)

MOST_IN_FULL = 3
"""More namespaces than this are rows of a table."""
BAR_WIDTH = 10
CURVE_WIDTH = 60
SHOWN_PASSAGE = 300
"""Characters of a passage."""


def print_report(report: Report, console: Console) -> None:
    """The verdict of each namespace first, then what it rests on. Made for 80 columns; wider ones stay empty."""
    namespaces = by_saving(report)
    for line in _head(report):
        console.print(Text(line, "dim"))
    console.print()
    for namespace in namespaces:
        console.print(_verdict(namespace, with_worth=len(namespaces) <= MOST_IN_FULL))
    if not namespaces:
        console.print("No namespace yet: nobody has drafted or learned anything here.")
    for remark in service_remarks(report):
        console.print(_remark(remark))
    if len(namespaces) > 1:
        console.print()
        console.print(_overview(report, namespaces))
    if len(namespaces) > MOST_IN_FULL:
        console.print()
        console.print("--namespace NAME shows one of them in full.", style="dim")
        return
    for namespace in namespaces:
        console.print(_in_full(namespace))


def _head(report: Report) -> list[str]:
    taken = units.moment(report.taken_at)
    if report.service is None:
        return [f"snapshot of {taken}; what only a running service knows is left out"]
    return [f"{taken} · {' · '.join(service_facts(report.service))}", *log_facts(report.service.log)]


def _verdict(namespace: NamespaceReport, *, with_worth: bool) -> Group:
    lines: list[RenderableType] = [
        Text.assemble((units.printable(namespace.name), "bold"), " ", saving(namespace.drafting))
    ]
    if with_worth and (more := worth(namespace.drafting)):
        lines.append(Padding(Text(more, "dim"), (0, 0, 0, 2)))
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
    corpus = _corpus(namespace.corpus, namespace.memory_bytes)
    engines = Text() if namespace.clients is None else _engines(namespace, namespace.clients)
    parts: list[RenderableType] = [
        Rule(Text(units.printable(namespace.name), "bold"), align="left"),
        _figures(namespace),
        *_curve(namespace),
    ]
    if namespace.drafting.drafted:
        parts += [
            _side_by_side(_bars("position", positions(namespace)), _bars("match length", lengths(namespace))),
            _side_by_side(
                _bars("text age, tokens", ages(namespace)),
                Group(_bars("source", sources(namespace)), Text(), engines),
            ),
            _side_by_side(_calibration(namespace), corpus),
        ]
    else:
        parts.append(_side_by_side(corpus, engines))
    if namespace.draft_latency is not None and namespace.merge_latency is not None:
        parts.append(_latencies(namespace.draft_latency, namespace.merge_latency))
    if namespace.passages is not None:
        parts.append(_passages(namespace.passages))
    return Group(*(Padding(part, (1, 0, 0, 0)) for part in parts))


def _figures(namespace: NamespaceReport) -> Table:
    recent = namespace.recent
    columns = [("since the start", namespace.drafting)]
    if recent is not None:
        columns.append((f"last {units.duration(recent.seconds)}", recent.drafting))
    table = _table("", *(head for head, _ in columns))

    def add(label: str, figures: Iterable[str]) -> None:
        table.add_row(label, *figures)

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


def _curve(namespace: NamespaceReport) -> list[RenderableType]:
    periods = namespace.over_time or []
    known = [period.tokens_per_step for period in periods if period.tokens_per_step is not None]
    if len(known) < 2:
        return []
    curve = sparkline([period.tokens_per_step for period in periods], CURVE_WIDTH)
    begin, end = units.moment(periods[0].begins_at, "%m-%d %H:%M"), units.moment(periods[-1].ends_at, "%m-%d %H:%M UTC")
    table = _table("tokens per step over time", "")
    table.add_row(Text(curve, "green"), f"{units.ratio(min(known))} to {units.ratio(max(known))}")
    table.add_row(Text(begin + end.rjust(len(curve) - len(begin)), "dim"), "")
    return [table]


def _bars(title: str, rows: Iterable[Row]) -> Table:
    """Labels, shares and how many they are shares of."""
    table = _table(title, "accepted", "", "of")
    table.columns[1].justify = "left"
    table.columns[1].min_width = BAR_WIDTH
    for label, share, drafted in rows:
        table.add_row(label, Text(bar(share or 0.0, BAR_WIDTH), "green"), units.share(share), units.count(drafted))
    return table


def _calibration(namespace: NamespaceReport) -> Table:
    error = namespace.calibration.error
    table = _table("odds", "promised", "kept", "drafted")
    for label, promised, kept, drafted in odds(namespace):
        table.add_row(label, units.share(promised), units.share(kept), units.count(drafted))
    table.add_section()
    table.add_row("off by", "", units.share(error), "")
    return table


def _corpus(corpus: CorpusReport, memory_bytes: int | None) -> Table:
    return _list(
        "corpus",
        [
            ("tokens", f"{units.count(corpus.tokens)} of {units.count(corpus.capacity_tokens)}"),
            ("full", units.share(corpus.occupancy)),
            ("requests", corpus.requests),
            ("tokens learned ever", corpus.learned_tokens),
            ("times written through", units.ratio(corpus.turnovers)),
            ("all overwritten in", units.duration(corpus.turnover_s)),
            ("not draftable yet", corpus.waiting_tokens),
            ("requests forgotten", corpus.forgotten_requests),
            ("merges", corpus.merges),
            ("large merges", corpus.base_merges),
            ("sorted from scratch", corpus.full_builds),
            ("memory", units.size(memory_bytes)),
        ],
    )


def _list(title: str, figures: Iterable[tuple[str, str | int | None]]) -> Table:
    table = _table(title, "")
    for label, figure in figures:
        table.add_row(label, figure if isinstance(figure, str) else units.count(figure))
    return table


def _latencies(draft: LatencyReport, merge: LatencyReport) -> Table:
    table = _table("latency", "p50", "p90", "p99", "longest", "measured")
    for label, latency in (("draft of a batch", draft), ("merge", merge)):
        table.add_row(
            label,
            units.duration(latency.p50_s),
            units.duration(latency.p90_s),
            units.duration(latency.p99_s),
            units.duration(latency.longest_s),
            units.count(latency.count),
        )
    return table


def _engines(namespace: NamespaceReport, clients: Clients) -> Table:
    return _list(
        "engines",
        [
            ("that draft now", namespace.streams),
            ("sequences now", namespace.sequences),
            ("steps without drafts: late", clients.timeouts),
            ("late answers dropped", clients.dropped),
            ("sequences told again", clients.resyncs),
            ("reconnects", clients.reconnects),
            ("texts offered again", namespace.duplicates),
        ],
    )


def _passages(passages: Iterable[PassageReport]) -> Table:
    table = _table("accepted", "age", "most productive passages")
    table.columns[2].justify = "left"
    for passage in passages:
        text = " ".join(map(str, passage.tokens)) if passage.text is None else passage.text
        text = units.printable(text.replace("\n", "⏎"))
        shown = text if len(text) <= SHOWN_PASSAGE else text[:SHOWN_PASSAGE] + "…"
        table.add_row(units.count(passage.accepted), units.count(passage.age_tokens), Text(shown))
    return table


def _table(first: str, *others: str) -> Table:
    """A table whose first column is words and whose others are figures."""
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, padding=(0, 1, 0, 0), pad_edge=False, header_style="bold")
    table.add_column(Text(first))
    for head in others:
        table.add_column(Text(head), justify="right")
    return table


def _side_by_side(left: RenderableType, right: RenderableType) -> Table:
    grid = Table.grid(padding=(0, 4, 0, 0))
    grid.add_row(left, right)
    return grid
