"""The HTML page of the advice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from drafter_service.commands.advise.advice import Advice
from drafter_service.commands.advise.trials import Outcome
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages import units
from drafter_service.observability.pages.charts import Chart, Panel, render_panel
from drafter_service.observability.pages.tables import Cell, Value

COLORS = {
    "ssd path": "green",
    "ssd tree": "blue",
    "ngram path": "amber",
    "classic path": "violet",
    "arctic tree": "gray",
}
NO_DRAFTS = (1.0, "no drafts, 1")
HEADS = ("drafter", "shape", "max draft", "concurrency", "tokens per step", "drafted", "speed-up")


def render_page(advice: Advice, settings_toml: str, facts: Mapping[str, object]) -> str:
    """Return the page; settings_toml: the recommended settings as a file; facts: how it was computed."""
    best = advice.best
    over = f"over {units.count(best.output_tokens)} output tokens"
    at_once = f"{units.counted(best.trial.concurrency, 'request')} at once"
    cards = [
        pages.card("predicted speed-up", f"{best.speedup:.2f}x", at_once, kind="green"),
        pages.card("tokens per step", f"{best.counts.tokens_per_step:.2f}", over),
        pages.card("drafted per step", f"{best.counts.drafted_per_step:.1f}", f"{best.trial.draft_shape} drafts"),
    ]
    for name, share in (("other users' text", advice.other_users), ("other sessions' text", advice.other_sessions)):
        if share is not None:
            cards.append(pages.card(f"from {name}", units.share(share), "of accepted draft tokens"))
    note = "Save as ssd-drafter.toml and start: ssd-drafter serve --config ssd-drafter.toml."
    flags = f"<p>Then: vllm serve MODEL ...</p><pre>{escape(advice.vllm)}</pre>" if advice.vllm else ""
    settings = pages.panel("Settings", note, f"<pre>{escape(settings_toml)}</pre>{flags}")
    main = pages.cards(cards) + pages.panels([*map(render_panel, panels_of(advice)), settings])
    notes = pages.small_print(advice.notes)
    return pages.page("Advice for this traffic", main, pages.facts(facts), lead=advice.verdict, more=notes)


def panels_of(advice: Advice) -> list[Panel]:
    """Return the tables and charts."""
    most = advice.growth[-1][0]
    grown = [(units.count(tokens), Value(value, units.ratio)) for tokens, value in advice.growth]
    hours = advice.tokens_per_hour
    kept = [
        (units.count(age), Value(share, units.share), units.duration(age / hours * 3600) if hours else "")
        for age, share in advice.kept
    ]
    groups: list[Sequence[Cell]] = [
        (group.name, Value(group.requests, units.count), Value(group.share, units.share),
         Value(group.tokens_per_step, units.ratio))
        for group in advice.sizes
    ]  # fmt: skip
    return [
        _by_concurrency(advice),
        Panel(
            "While the corpus grows",
            f"From an empty corpus, over {units.count(most)} output tokens; each point is the part before it.",
            ("output tokens seen", "tokens per step of each part"),
            grown,
            Chart("rows", "tokens per step", {1: "green"}, area=1, reference=NO_DRAFTS),
        ),
        Panel(
            "Capacity, and how long text stays useful",
            "Share of the accepted tokens from earlier requests whose newest source a corpus of this size still holds."
            if kept
            else "No accepted token came from an earlier request.",
            ("tokens remembered", "accepted tokens kept", "time to fill"),
            kept,
            Chart("rows", "accepted tokens kept", {1: "violet"}) if kept else None,
        ),
        Panel("Settings compared", f"On {sample_of(advice)}.", HEADS, rows_of(advice), is_wide=True),
        Panel(
            "Which requests gain",
            "By the length of the output.",
            ("requests", "number", "share of output", "tokens per step"),
            groups,
        ),
    ]


def _by_concurrency(advice: Advice) -> Panel:
    """Return the speed-up of each drafter and shape by requests at once."""
    found: dict[str, dict[int, float]] = {}
    for one in advice.speedups:
        found.setdefault(f"{one.trial.drafter} {one.trial.draft_shape}", {})[one.trial.concurrency] = one.speedup
    rows: list[Sequence[Cell]] = [
        (str(count), *(Value(line.get(count), _times) for line in found.values()))
        for count in sorted({count for line in found.values() for count in line})
    ]
    colors = {column: COLORS[name] for column, name in enumerate(found, start=1)}
    note = f"Predicted from the cost profile and the acceptance on {sample_of(advice)}."
    chart = Chart("rows", "speed-up", colors, reference=NO_DRAFTS)
    return Panel("Speed-up by concurrency", note, ("requests at once", *found), rows, chart)


def _times(value: float | None) -> str:
    return units.UNKNOWN if value is None else f"{value:.2f}x"


def sample_of(advice: Advice) -> str:
    """Return a phrase for the part of the log that the rows of `rows_of` were measured on."""
    return f"the first {units.counted(advice.speedups[0].output_tokens, 'output token')} of this log"


def rows_of(advice: Advice) -> list[tuple[str, ...]]:
    """Return a row for each trial that compares settings, with the columns `HEADS`."""
    return [_cells_of(one) for one in [*advice.speedups, *advice.lengths]]


def _cells_of(one: Outcome) -> tuple[str, ...]:
    return (
        one.trial.drafter,
        "padded" if one.trial.is_padded else one.trial.draft_shape,
        str(one.trial.max_draft),
        str(one.trial.concurrency),
        f"{one.counts.tokens_per_step:.2f}",
        f"{one.counts.drafted_per_step:.1f}",
        f"{one.speedup:.2f}x",
    )
