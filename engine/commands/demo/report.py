"""The report of a run: a table for the console, run.json, and run.html, a self-contained page."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path

from drafter_service.observability.measuring.results import write
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import Axis, Series, line_chart
from drafter_service.observability.pages.svg import Frame
from drafter_service.observability.pages.tables import html_table
from engine.commands.demo.measure import Measurement, Part, Summary
from engine.commands.reports import made_with

JSON_FILE, PAGE_FILE = "run.json", "run.html"
FRAMES = Frame(width=900, height=420, left=70, right=20, top=20), Frame(height=360)
KIND_COLORS = {"new": "blue", "near repeat": "amber", "exact repeat": "violet"}
LINES = (("without drafts", "plain_tokens_per_s", "gray"), ("with drafts", "drafted_tokens_per_s", "green"))
"""Label, field of `Part` and color of the lines of the plot."""
COLUMNS = (
    "",
    "requests",
    "new",
    "corpus tokens",
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
    versions = made_with()
    document = {
        "identical": summary.identical,
        "differing_requests": summary.differing,
        "loop_share": summary.loop_share,
        "whole": asdict(summary.whole),
        "kinds": {kind: asdict(part) for kind, part in summary.kinds.items()},
        "tasks": {task: asdict(part) for task, part in summary.tasks.items()},
        "tenths": [asdict(part) for part in summary.tenths],
        "settings": dict(settings),
        "versions": versions,
        "requests": [asdict(measurement) for measurement in measurements],
    }
    page = render_page(summary, measurements, {**settings, **versions})
    write(out, {JSON_FILE: json.dumps(document, indent=1) + "\n", PAGE_FILE: page})


def table_rows(summary: Summary) -> list[list[tuple[str, ...]]]:
    """Return groups of rows with `COLUMNS`: by tenth, by kind of request or task, and the whole workload."""
    tenths = [(str(number), *_cells(part, f"{part.corpus_tokens:,}")) for number, part in enumerate(summary.tenths, 1)]
    by_kind = summary.tasks.items() or summary.kinds.items()  # All tasks are new.
    kinds = [(kind.removesuffix(" repeat"), *_cells(part)) for kind, part in by_kind]
    return [tenths, kinds, [("all", *_cells(summary.whole))]]


def _cells(part: Part, corpus_tokens: str = "") -> tuple[str, ...]:
    return (
        f"{part.requests:,}",
        f"{part.new:,}",
        corpus_tokens,
        f"{part.tokens_per_step:.2f}",
        f"{part.plain_tokens_per_s:,.0f}",
        f"{part.drafted_tokens_per_s:,.0f}",
        f"{part.speedup:.2f}x",
        f"{part.acceptance:.0%}",
    )


def render_page(summary: Summary, measurements: Sequence[Measurement], facts: Mapping[str, object]) -> str:
    """Return the page; facts: names and values that are shown at its foot."""
    whole, new = summary.whole, summary.kinds["new"]
    in_all, in_new = f"all {whole.requests} requests", f"{new.requests} requests"
    cards = [
        pages.card("speed-up", f"{whole.speedup:.2f}x", in_all, kind="green"),
        pages.card("speed-up of new requests", f"{new.speedup:.2f}x", in_new),
        pages.card("tokens per step", f"{whole.tokens_per_step:.2f}", in_all),
        pages.card("tokens per step of new requests", f"{new.tokens_per_step:.2f}", in_new),
        pages.card("outputs with and without drafts", "identical" if summary.identical else "DIFFERENT", in_all),
        pages.card("share of loops in the output", f"{summary.loop_share:.0%}", in_all),
    ]
    main = pages.cards(cards) + _plot(summary.tenths, measurements) + html_table(COLUMNS, *table_rows(summary))
    lead = f"{whole.requests} requests, one at a time, each run without drafts and with them."
    return pages.page("Tokens per second as the corpus grows", main, pages.facts(facts), lead=lead)


def _plot(tenths: Sequence[Part], measurements: Sequence[Measurement]) -> str:
    """Return a chart of tokens per second over the size of the corpus: a dot per request, lines through the tenths."""
    rates = [m.output_tokens / m.drafted_s for m in measurements]
    # Draw a few very fast repeats at the upper edge, since they would compress the scale.
    largest = max(max(part.drafted_tokens_per_s for part in tenths) * 1.6, sorted(rates)[int(0.9 * (len(rates) - 1))])
    dots = []
    for kind, color in KIND_COLORS.items():
        own = [(m, rate) for m, rate in zip(measurements, rates, strict=True) if m.kind == kind]
        words = [
            f"{kind}, {m.output_tokens} tokens, {rate:,.0f} tokens/s, {m.output_tokens / m.steps:.1f} per step"
            for m, rate in own
        ]
        points = [(m.corpus_tokens, rate) for m, rate in own]
        dots.append(Series(f"{kind}, with drafts", color, points, "dots", words))
    lines = [
        Series(f"{label}, by tenth", color, [(part.corpus_tokens, getattr(part, field)) for part in tenths])
        for label, field, color in LINES
    ]
    return line_chart(
        "Tokens per second by corpus size",
        Axis.to(max(1, measurements[-1].corpus_tokens), "tokens in the corpus", "{:,.0f}".format),
        Axis.to(largest, "tokens/s", "{:,.0f}".format),
        [*dots, *lines],
        frames=FRAMES,
        remarks=[("", "one dot per request; dots at the upper edge are faster still")],
    )
