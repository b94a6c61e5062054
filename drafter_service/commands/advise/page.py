"""The HTML page of the advice."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape

from drafter_service.commands.advise.advice import Advice, Group
from drafter_service.commands.advise.trials import Outcome
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import Axis, Series, line_chart
from drafter_service.observability.pages.svg import Frame
from drafter_service.observability.pages.tables import Cell, Value, html_table
from drafter_service.observability.report import units

FRAMES = (Frame(480, 260, right=16, top=16),)
COLORS = {
    ("ssd", "path"): "green",
    ("ssd", "tree"): "blue",
    ("ngram", "path"): "amber",
    ("classic", "path"): "violet",
    ("arctic", "tree"): "gray",
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
    settings = _settings(settings_toml, advice.vllm)
    panels = [_by_concurrency(advice), _growth(advice), _kept(advice), _groups(advice), settings]
    main = pages.cards(cards) + pages.panels(panels)
    notes = pages.small_print(advice.notes)
    return pages.page("Advice for this traffic", main, pages.facts(facts), lead=advice.verdict, more=notes)


def _by_concurrency(advice: Advice) -> str:
    """Chart the speed-up of each drafter and shape against requests at once."""
    lines: dict[tuple[str, str], list[Outcome]] = {}
    for one in sorted(advice.speedups, key=lambda one: one.trial.concurrency):
        lines.setdefault((one.trial.drafter, one.trial.draft_shape), []).append(one)
    numbers = sorted({one.trial.concurrency for one in advice.speedups})
    chart = line_chart(
        "Predicted speed-up by concurrency",
        Axis.of([str(count) for count in numbers], "requests at once"),
        Axis.to(max(one.speedup for one in advice.speedups), "speed-up", "{:g}x".format),
        [
            Series(
                " ".join(key),
                COLORS[key],
                [(numbers.index(one.trial.concurrency), one.speedup) for one in line],
                words=[
                    f"{' '.join(key)}, {units.counted(one.trial.concurrency, 'request')} at once: {one.speedup:.2f}x"
                    for one in line
                ],
            )
            for key, line in lines.items()
        ],
        frames=FRAMES,
        reference=NO_DRAFTS,
    )
    note = f"Predicted from the cost profile and the acceptance on {sample_of(advice)}."
    return pages.panel("Speed-up by concurrency", note, chart, html_table(HEADS, rows_of(advice)))


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


def _growth(advice: Advice) -> str:
    """Chart tokens per step while the corpus grows."""
    most = advice.growth[-1][0]
    ends = [(share * most, units.count(share * most)) for share in (0, 0.25, 0.5, 0.75, 1)]
    chart = line_chart(
        "Tokens per step while the corpus grows",
        Axis("output tokens seen", 0, most, ends),
        Axis.to(max(value for _, value in advice.growth), "tokens per step"),
        [Series("tokens per step of each part", "green", advice.growth, "area")],
        frames=FRAMES,
        reference=NO_DRAFTS,
    )
    rows = [(units.count(tokens), f"{value:.2f}") for tokens, value in advice.growth]
    note = f"From an empty corpus, over {units.count(most)} output tokens; each point is the part of the log before it."
    return pages.panel("While the corpus grows", note, chart, html_table(("tokens", "tokens per step"), rows))


def _kept(advice: Advice) -> str:
    """Chart how much of the gain a corpus of limited capacity keeps."""
    if not advice.kept:
        return pages.panel("Capacity", "No accepted token came from an earlier request.", "")
    chart = line_chart(
        "Share of accepted tokens whose source is still remembered, by capacity",
        Axis.of([units.count(age) for age, _ in advice.kept], "tokens remembered", at_most=6),
        Axis("accepted tokens kept", 0, 1, [(share, units.share(share)) for share in (0, 0.25, 0.5, 0.75, 1)]),
        [Series("accepted tokens kept", "violet", [(place, share) for place, (_, share) in enumerate(advice.kept)])],
        frames=FRAMES,
    )
    per_hour = advice.tokens_per_hour
    rows = [
        (units.count(age), units.duration(age / per_hour * 3600) if per_hour else "", units.share(share))
        for age, share in advice.kept
    ]
    heads = ("tokens remembered", "time to fill", "accepted tokens kept")
    note = "Share of the accepted tokens from earlier requests whose newest source a corpus of this size still holds."
    return pages.panel("Capacity, and how long text stays useful", note, chart, html_table(heads, rows))


def _groups(advice: Advice) -> str:
    heads = ("requests", "number", "share of output", "tokens per step")
    tables = html_table(heads, map(_group_cells, advice.groups), map(_group_cells, advice.sizes))
    note = "By the first tokens of the prompt, and by the length of the output."
    return pages.panel("Which requests gain", note, tables, kind="across")


def _group_cells(group: Group) -> tuple[Cell, ...]:
    return (
        group.name,
        Value(group.requests, units.count),
        Value(group.share, units.share),
        Value(group.tokens_per_step, units.ratio),
    )


def _settings(toml: str, vllm: str) -> str:
    note = "Save as ssd-drafter.toml and start: ssd-drafter serve --config ssd-drafter.toml."
    flags = f"<p>Then: vllm serve MODEL ...</p><pre>{escape(vllm)}</pre>" if vllm else ""
    return pages.panel("Settings", note, f"<pre>{escape(toml)}</pre>{flags}")
