"""The report of a run: a table for the console, run.json, and run.html, a self-contained page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from html import escape
from pathlib import Path

from rich import box
from rich.table import Table

import drafter_service.observability.charts as charts
from drafter_service.observability.charts import Frame
from engine.commands.demo.measure import Measurement, Part, Summary
from engine.commands.reports import package_versions

JSON_FILE, PAGE_FILE = "run.json", "run.html"
WIDE, NARROW = Frame(width=900, height=420, left=70, right=20, top=20), Frame(height=360)
KIND_COLORS = {"new": "blue", "near repeat": "amber", "exact repeat": "violet"}
LINES = (("without drafts", "plain_tokens_per_s", "gray"), ("with drafts", "drafted_tokens_per_s", "green"))
"""Label, field of `Part` and color of the lines of the plot."""
COLUMNS = (
    "",
    "corpus tokens",
    "repeats",
    "tokens per step",
    "tokens/s without",
    "tokens/s with",
    "speed-up",
    "accepted",
)


def write_report(
    summary: Summary, measurements: Sequence[Measurement], settings: Mapping[str, object], out: Path
) -> None:
    """Write run.json and run.html into `out`."""
    versions = package_versions()
    last, new = summary.last_tenth, summary.last_tenth_new
    document = {
        "identical": summary.identical,
        "differing_requests": summary.differing,
        "speedup_last_tenth": last.speedup,
        "tokens_per_step_last_tenth": last.tokens_per_step,
        "speedup_last_tenth_new": new.speedup if new else None,
        "tokens_per_step_last_tenth_new": new.tokens_per_step if new else None,
        "loop_share": summary.loop_share,
        "whole": asdict(summary.whole),
        "kinds": {kind: asdict(part) for kind, part in summary.kinds.items()},
        "tenths": [asdict(part) for part in summary.tenths],
        "settings": dict(settings),
        "versions": versions,
        "requests": [asdict(measurement) for measurement in measurements],
    }
    (out / JSON_FILE).write_text(json.dumps(document, indent=1) + "\n")
    notes = {name: str(value) for name, value in {**settings, **versions}.items()}
    (out / PAGE_FILE).write_text(render_page(summary, measurements, notes), encoding="utf-8")


def console_table(summary: Summary) -> Table:
    """Return the figures as a table for the console."""
    table = Table(title="by tenth of the workload, and by kind of request", box=box.SIMPLE, padding=(0, 1, 0, 0))
    for head in COLUMNS:
        table.add_column(head, justify="right")
    for group in table_rows(summary):
        table.add_section()
        for row in group:
            table.add_row(*row)
    return table


def table_rows(summary: Summary) -> list[list[tuple[str, ...]]]:
    """Return groups of rows with `COLUMNS`: by tenth, by kind of request, and the whole workload."""
    tenths = [(str(number), f"{part.corpus_tokens:,}", *_cells(part)) for number, part in enumerate(summary.tenths, 1)]
    kinds = [(kind.removesuffix(" repeat"), "", *_cells(part)) for kind, part in summary.kinds.items()]
    return [tenths, kinds, [("all", "", *_cells(summary.whole))]]


def _cells(part: Part) -> tuple[str, ...]:
    return (
        f"{part.repeat_share:.0%}",
        f"{part.tokens_per_step:.2f}",
        f"{part.plain_tokens_per_s:,.0f}",
        f"{part.drafted_tokens_per_s:,.0f}",
        f"{part.speedup:.2f}x",
        f"{part.acceptance:.0%}",
    )


def render_page(summary: Summary, measurements: Sequence[Measurement], notes: Mapping[str, str]) -> str:
    """Return the page; its footer shows `notes` as names and values."""
    last, new = summary.last_tenth, summary.last_tenth_new
    in_last, in_all = f"{last.requests} requests", f"{summary.whole.requests} requests"
    cards = [
        charts.card("speed-up in the last tenth", f"{last.speedup:.2f}x", in_last, kind="green"),
        charts.card(
            "speed-up of new requests in it",
            f"{new.speedup:.2f}x" if new else "none",
            f"{new.requests if new else 0} requests",
        ),
        charts.card("tokens per step in the last tenth", f"{last.tokens_per_step:.2f}", in_last),
        charts.card("outputs with and without drafts", "identical" if summary.identical else "DIFFERENT", in_all),
        charts.card("share of loops in the output", f"{summary.loop_share:.0%}", in_all),
    ]
    legend = [(f"line {color}", f"{label}, by tenth") for label, _, color in LINES]
    legend += [(color, f"{kind}, with drafts") for kind, color in KIND_COLORS.items()]
    legend.append(("", "one dot per request; dots at the upper edge are faster still"))
    main = (
        charts.cards(cards)
        + _plot(summary.tenths, measurements, WIDE, "wide")
        + _plot(summary.tenths, measurements, NARROW, "narrow")
        + charts.legend(legend)
        + charts.table(COLUMNS, *table_rows(summary))
    )
    title = "Tokens per second as the corpus grows"
    lead = f"{summary.whole.requests} requests, one at a time, each run without drafts and with them."
    header = f"<h1>{escape(title)}</h1><p class='soft'>{escape(lead)}</p>"
    footer = " · ".join(f"{escape(name)}: {escape(value)}" for name, value in notes.items())
    return charts.page(title, header, main, footer)


def _plot(tenths: Sequence[Part], measurements: Sequence[Measurement], frame: Frame, kind: str) -> str:
    """Return a chart of tokens per second over the size of the corpus: a dot per request, lines through the tenths."""
    rates = [m.output_tokens / m.drafted_s for m in measurements]
    # Draw a few very fast repeats at the upper edge, since they would compress the scale.
    largest = max(max(part.drafted_tokens_per_s for part in tenths) * 1.6, sorted(rates)[int(0.9 * (len(rates) - 1))])
    rate_ticks, token_ticks = charts.ticks(largest), charts.ticks(max(1, measurements[-1].corpus_tokens))
    x = frame.x_scale(0, token_ticks[-1])
    y = frame.y_scale(0, rate_ticks[-1])
    parts = charts.y_axis(frame, y, rate_ticks, lambda rate: f"{rate:,.0f}")
    parts += charts.x_axis(frame, x, [(tokens, f"{tokens:,.0f}") for tokens in token_ticks])
    parts += [charts.x_title(frame, "tokens in the corpus"), charts.y_title(frame, "tokens/s")]
    for m, rate in zip(measurements, rates, strict=True):
        title = f"{m.kind}, {m.output_tokens} tokens, {rate:,.0f} tokens/s, {m.output_tokens / m.steps:.1f} per step"
        parts.append(charts.circle(x(m.corpus_tokens), y(rate), 4, title, kind=f"dot {KIND_COLORS[m.kind]}"))
    for _, field, color in LINES:
        points = [(x(part.corpus_tokens), y(getattr(part, field))) for part in tenths]
        parts.append(charts.polyline(points, kind=f"line {color}"))
    return charts.chart(frame, "Tokens per second by corpus size", parts, kind)
