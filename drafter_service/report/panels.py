"""What the page shows of one namespace: panels, each a heading, a plot, and the same as a table."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from drafter_service.report import curves, plots, units
from drafter_service.report.plots import Bar
from drafter_service.report.schema import LatencyReport, NamespaceReport

OPEN_POSITION, OPEN_MATCH_LENGTH = 129, 64
"""They stand for everything from there on."""


class Figure(NamedTuple):
    """A number, and how people read it."""

    value: float | None
    unit: Callable[[float | None], str]


Cell = str | Figure


def written(cell: Cell) -> str:
    """A cell as markup; a figure keeps its exact value beside what people read."""
    if isinstance(cell, str):
        return escape(cell)
    if cell.value is None:
        return units.UNKNOWN
    return f'<data value="{cell.value!r}">{escape(cell.unit(cell.value))}</data>'


def panels(namespace: NamespaceReport) -> str:
    """All panels of which something is known."""
    makers = (
        _over_time,
        _worth,
        _positions,
        _lengths,
        _calibration,
        _sources,
        _ages,
        _corpus,
        _latencies,
        _engines,
        _passages,
    )
    return '<div class="plots">' + "".join(panel for maker in makers for panel in maker(namespace)) + "</div>"


def _over_time(namespace: NamespaceReport) -> list[str]:
    periods = namespace.over_time or []
    if not any(period.tokens_per_step is not None for period in periods):
        return []
    key = (("var(--with)", "tokens per step"), ("var(--new)", "hit rate"), ("var(--near)", "acceptance"))
    rows = [
        (
            units.moment(period.begins_at),
            Figure(period.tokens_per_step, units.ratio),
            Figure(period.hit_rate, units.share),
            Figure(period.acceptance, units.share),
            Figure(period.committed, units.count),
            Figure(period.timeouts, units.count),
        )
        for period in periods
    ]
    heads = ("from", "tokens per step", "hit rate", "acceptance", "output tokens", "late steps")
    plot = curves.drafting_over_time(periods) + _key(key)
    note = "The shaded area is what drafts add to plain decoding."
    return [_panel("Over time", note, plot, heads, rows, "across")]


def _worth(namespace: NamespaceReport) -> list[str]:
    drafting = namespace.drafting
    if not drafting.drafted:
        return []
    rows = [
        (f"{100 * estimate.cost:g}% of a step", Figure(estimate.speedup, lambda value: f"{units.ratio(value)}x"))
        for estimate in drafting.estimates
    ]
    table = _table(("if verifying a token costs", "decoding is as fast as"), rows)
    note = (
        f"{units.ratio(drafting.drafted_per_step)} draft tokens are verified a step. "
        f"They pay while one costs less than {units.share(drafting.break_even_cost)} of a step."
    )
    return [_panel("What that is worth", note, table)]


def _positions(namespace: NamespaceReport) -> list[str]:
    tallies = namespace.by_position
    if not tallies:
        return []
    names = [f"{tally.position}{'+' if tally.position == OPEN_POSITION else ''}" for tally in tallies]
    bars = [
        Bar(name, f"position {name}", tally.acceptance, tally.drafted)
        for name, tally in zip(names, tallies, strict=True)
    ]
    rows = [
        (
            name,
            Figure(tally.acceptance, units.share),
            Figure(tally.accepted_share_of_drafts, units.share),
            Figure(tally.drafted, units.count),
            Figure(tally.accepted, units.count),
        )
        for name, tally in zip(names, tallies, strict=True)
    ]
    heads = ("position", "accepted", "of all drafts", "draft tokens", "accepted")
    plot = plots.shares(bars, "Acceptance by position in the draft", 12)
    return [_panel("By position in the draft", "Accepted, given that everything before it was.", plot, heads, rows)]


def _lengths(namespace: NamespaceReport) -> list[str]:
    tallies = {tally.match_length: tally for tally in namespace.by_match_length}
    if not tallies:
        return []
    bars = []
    for length in range(max(tallies) + 1):
        name, tally = f"{length}{'+' if length == OPEN_MATCH_LENGTH else ''}", tallies.get(length)
        share, volume = (None, 0) if tally is None else (tally.acceptance, tally.drafted)
        bars.append(Bar(name, f"{name} tokens matched", share, volume))
    rows = [
        (
            f"{length}{'+' if length == OPEN_MATCH_LENGTH else ''}",
            Figure(tally.acceptance, units.share),
            Figure(tally.drafted, units.count),
            Figure(tally.accepted, units.count),
        )
        for length, tally in tallies.items()
    ]
    plot = plots.shares(bars, "Acceptance by match length", 9)
    note = "How many of the context's last tokens were found again."
    return [_panel("By match length", note, plot, ("tokens", "accepted", "draft tokens", "accepted"), rows)]


def _calibration(namespace: NamespaceReport) -> list[str]:
    known = namespace.calibration
    if not known.bins:
        return []
    rows = [
        (
            f"{100 * one.least_odds:.0f}–{100 * one.most_odds:.0f}%",
            Figure(one.promised, units.share),
            Figure(one.kept, units.share),
            Figure(one.drafted, units.count),
        )
        for one in known.bins
    ]
    note = f"Odds promised (across) and kept (up): {units.share(known.error)} apart on average."
    plot = plots.calibration(known)
    return [_panel("Calibration", note, plot, ("odds", "promised", "kept", "draft tokens"), rows)]


def _sources(namespace: NamespaceReport) -> list[str]:
    tallies = namespace.by_source
    if not namespace.drafting.drafted:
        return []
    key = (("var(--corpus)", "corpus: other requests"), ("var(--near)", "local: the request itself"))
    rows = [
        (
            tally.source,
            Figure(tally.acceptance, units.share),
            Figure(tally.drafted, units.count),
            Figure(tally.accepted, units.count),
        )
        for tally in tallies
    ]
    plot = plots.sources(tallies) + _key(key)
    heads = ("source", "accepted", "draft tokens", "accepted")
    return [_panel("By source", "Where draft tokens were found.", plot, heads, rows)]


def _ages(namespace: NamespaceReport) -> list[str]:
    age = namespace.age
    if not age.bins:
        return []
    spans = [units.span(tally.least_tokens, tally.most_tokens) for tally in age.bins]
    bars = [
        Bar(units.count(tally.least_tokens), f"{span} tokens old", tally.acceptance, tally.drafted)
        for span, tally in zip(spans, age.bins, strict=True)
    ]
    rows = [
        (
            span,
            Figure(tally.acceptance, units.share),
            Figure(tally.drafted, units.count),
            Figure(tally.accepted, units.count),
        )
        for span, tally in zip(spans, age.bins, strict=True)
    ]
    note = f"Half of what was accepted is at most {units.count(age.median_tokens)} tokens old."
    plot = plots.shares(bars, "Acceptance by age of the text", 6)
    heads = ("tokens since", "accepted", "draft tokens", "accepted")
    return [_panel("By age of the text", note, plot, heads, rows)]


def _corpus(namespace: NamespaceReport) -> list[str]:
    corpus, periods = namespace.corpus, namespace.over_time or []
    rows = (
        ("tokens remembered", Figure(corpus.tokens, units.count)),
        ("requests remembered", Figure(corpus.requests, units.count)),
        ("capacity, tokens", Figure(corpus.capacity_tokens, units.count)),
        ("learned ever, tokens", Figure(corpus.learned_tokens, units.count)),
        ("times written through", Figure(corpus.turnovers, units.ratio)),
        ("all overwritten in", Figure(corpus.turnover_s, units.duration)),
        ("not draftable yet, tokens", Figure(corpus.waiting_tokens, units.count)),
        ("requests forgotten", Figure(corpus.forgotten_requests, units.count)),
        ("merges", Figure(corpus.merges, units.count)),
        ("large merges", Figure(corpus.base_merges, units.count)),
        ("sorted from scratch", Figure(corpus.full_builds, units.count)),
        ("memory", Figure(namespace.memory_bytes, units.size)),
    )
    full = "" if corpus.occupancy is None else f", {units.share(corpus.occupancy)} full"
    note = f"{units.count(corpus.tokens)} tokens of {units.count(corpus.requests)} requests{full}."
    shown = [_panel("The corpus", note, _list(row for row in rows if row[1].value is not None))]
    if periods and corpus.tokens:
        heads = ("until", "tokens remembered", "tokens learned", "memory")
        table = [
            (
                units.moment(period.ends_at),
                Figure(period.corpus_tokens, units.count),
                Figure(period.learned_tokens, units.count),
                Figure(period.memory_bytes, units.size),
            )
            for period in periods
        ]
        plot = curves.corpus_over_time(periods, corpus.capacity_tokens)
        note = f"Written through {units.ratio(corpus.turnovers)} times; all is overwritten in {units.duration(corpus.turnover_s)}."
        shown.insert(0, _panel("Occupancy", note, plot, heads, table))
    return shown


def _latencies(namespace: NamespaceReport) -> list[str]:
    kinds = (
        ("Draft latency", "One message: drafts for the whole batch of an engine.", namespace.draft_latency),
        ("Merge latency", "Finished requests made draftable; drafting goes on meanwhile.", namespace.merge_latency),
    )
    return [_latency(title, note, known) for title, note, known in kinds if known is not None and known.count]


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
    return _panel(title, note, plots.durations(known, title), ("", ""), rows)


def _engines(namespace: NamespaceReport) -> list[str]:
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
        ("drafts ahead of asking", clients.ahead),
        ("texts offered again", namespace.duplicates),
    )
    shown = _list((name, Figure(value, units.count)) for name, value in rows)
    model = namespace.model
    note = "" if model is None else " · ".join(part for part in (model.name, model.adapter) if part)
    return [_panel("Engines", note, shown)]


def _passages(namespace: NamespaceReport) -> list[str]:
    if namespace.passages is None:
        return []
    rows = [
        (
            Figure(passage.accepted, units.count),
            Figure(passage.age_tokens, units.count),
            " ".join(map(str, passage.tokens)) if passage.text is None else passage.text,
        )
        for passage in namespace.passages
    ]
    table = _table(("accepted", "tokens since", "passage"), rows)
    return [_panel("Most productive passages", "This is text of users.", table, kind="across")]


def _panel(
    title: str,
    note: str,
    content: str,
    heads: Sequence[str] = (),
    rows: Iterable[Sequence[Cell]] = (),
    kind: str = "",
) -> str:
    table = f"<details><summary>as a table</summary>{_table(heads, rows)}</details>" if heads else ""
    caption = f"<figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"
    return f'<figure class="{kind}">{caption}{content}{table}</figure>'


def _table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(_cell(cell) for cell in row) + "</tr>" for row in rows)
    return f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>'


def _cell(cell: Cell) -> str:
    kind = ' class="text"' if isinstance(cell, str) and len(cell) > 40 else ""
    return f"<td{kind}>{written(cell)}</td>"


def _list(rows: Iterable[tuple[str, Figure]]) -> str:
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{written(figure)}</dd>' for name, figure in rows)}</dl>"


def _key(entries: Iterable[tuple[str, str]]) -> str:
    spans = (f'<span><i style="--tone: {tone}"></i>{escape(name)}</span>' for tone, name in entries)
    return f'<div class="key">{"".join(spans)}</div>'
