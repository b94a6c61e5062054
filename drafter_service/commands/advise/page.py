"""The HTML page of the advice."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

import drafter_service.observability.charts as charts
from drafter_service.commands.advise.advice import Advice, Group, Speedup
from drafter_service.observability.charts import Frame, Value
from drafter_service.observability.report import units

FRAME = Frame(480, 260, right=16, top=16)
COLORS = {
    ("ssd", "path"): "green",
    ("ssd", "tree"): "blue",
    ("ngram", "path"): "amber",
    ("classic", "path"): "violet",
    ("arctic", "tree"): "gray",
}
NO_DRAFTS = (charts.DASHED, "no drafts, 1")
HEADS = ("drafter", "shape", "max draft", "concurrency", "tokens per step", "drafted", "speed-up")


def render_page(advice: Advice, settings_toml: str, facts: Sequence[tuple[str, str]]) -> str:
    """Return the page; settings_toml: the recommended settings as a file; facts: how it was computed."""
    best = advice.best
    over = f"over {units.count(best.output_tokens)} output tokens"
    cards = [
        charts.card(
            "predicted speed-up",
            f"{best.speedup:.2f}x",
            f"{units.counted(best.concurrency, 'request')} at once",
            kind="green",
        ),
        charts.card("tokens per step", f"{best.tokens_per_step:.2f}", over),
        charts.card("drafted per step", f"{best.drafted_per_step:.1f}", f"{best.draft_shape} drafts"),
    ]
    for name, share in (("other users' text", advice.other_users), ("other sessions' text", advice.other_sessions)):
        if share is not None:
            cards.append(charts.card(f"from {name}", units.share(share), "of accepted draft tokens"))
    settings = _settings(settings_toml, advice.vllm)
    panels = [_by_concurrency(advice), _growth(advice), _kept(advice), _groups(advice), settings]
    notes = "".join(f"<p class='soft'>{escape(note)}</p>" for note in advice.notes)
    header = f"<h1>Advice for this traffic</h1><p>{escape(advice.verdict)}</p>{notes}"
    footer = " · ".join(f"{escape(name)}: {escape(value)}" for name, value in facts)
    main = f"{charts.cards(cards)}<section class='plots'>{''.join(panels)}</section>"
    return charts.page("Advice for this traffic", header, main, footer)


def _by_concurrency(advice: Advice) -> str:
    """Chart the speed-up of each drafter and shape against requests at once."""
    lines: dict[tuple[str, str], list[Speedup]] = {}
    for one in sorted(advice.speedups, key=lambda one: one.concurrency):
        lines.setdefault((one.drafter, one.draft_shape), []).append(one)
    numbers = sorted({one.concurrency for one in advice.speedups})
    marks = charts.ticks(max(one.speedup for one in advice.speedups))
    y = FRAME.y_scale(0, marks[-1])
    x = FRAME.x_scale(0, max(1, len(numbers) - 1))
    parts = charts.y_axis(FRAME, y, marks, lambda mark: f"{mark:g}x")
    parts += charts.x_axis(FRAME, x, [(place, str(count)) for place, count in enumerate(numbers)])
    parts += [charts.x_title(FRAME, "requests at once"), charts.y_title(FRAME, "speed-up")]
    parts.append(charts.reference_line(FRAME, y(1)))
    for key, line in lines.items():
        points = [(x(numbers.index(one.concurrency)), y(one.speedup)) for one in line]
        parts.append(charts.polyline(points, kind=f"line {COLORS[key]}"))
        for (left, top), one in zip(points, line, strict=True):
            words = f"{' '.join(key)}, {units.counted(one.concurrency, 'request')} at once: {one.speedup:.2f}x"
            parts.append(charts.circle(left, top, 3.5, words, kind=f"dot {COLORS[key]}"))
    legend = charts.legend([*((COLORS[key], " ".join(key)) for key in lines), NO_DRAFTS])
    note = f"Predicted from the cost profile and the acceptance on {sample_of(advice)}."
    chart = charts.chart(FRAME, "Predicted speed-up by concurrency", parts)
    return charts.panel("Speed-up by concurrency", note, legend + chart, charts.table(HEADS, rows_of(advice)))


def sample_of(advice: Advice) -> str:
    """Return a phrase for the part of the log that the rows of `rows_of` were measured on."""
    return f"the first {units.counted(advice.speedups[0].output_tokens, 'output token')} of this log"


def rows_of(advice: Advice) -> list[tuple[str, ...]]:
    """Return a row for each trial that compares settings, with the columns `HEADS`."""
    return [_cells_of(one) for one in [*advice.speedups, *advice.lengths]]


def _cells_of(one: Speedup) -> tuple[str, ...]:
    return (
        one.drafter,
        "padded" if one.is_padded else one.draft_shape,
        str(one.max_draft),
        str(one.concurrency),
        f"{one.tokens_per_step:.2f}",
        f"{one.drafted_per_step:.1f}",
        f"{one.speedup:.2f}x",
    )


def _growth(advice: Advice) -> str:
    """Chart tokens per step while the corpus grows."""
    marks = charts.ticks(max(value for _, value in advice.growth))
    y, most = FRAME.y_scale(0, marks[-1]), advice.growth[-1][0]
    x, points = FRAME.x_scale(0, most), [(tokens, value) for tokens, value in advice.growth]
    parts = charts.y_axis(FRAME, y, marks, lambda mark: f"{mark:g}")
    ends = [(share * most, units.count(share * most)) for share in (0, 0.25, 0.5, 0.75, 1)]
    parts += charts.x_axis(FRAME, x, ends)
    parts += [charts.x_title(FRAME, "output tokens seen"), charts.y_title(FRAME, "tokens per step")]
    placed = [(x(tokens), y(value)) for tokens, value in points]
    parts += [charts.area(placed, y(0), "green"), charts.polyline(placed, kind="line green")]
    parts.append(charts.reference_line(FRAME, y(1)))
    rows = [(units.count(tokens), f"{value:.2f}") for tokens, value in points]
    legend = charts.legend([("green", "tokens per step of each part"), NO_DRAFTS])
    chart = legend + charts.chart(FRAME, "Tokens per step while the corpus grows", parts)
    note = f"From an empty corpus, over {units.count(most)} output tokens; each point is the part of the log before it."
    return charts.panel("While the corpus grows", note, chart, charts.table(("tokens", "tokens per step"), rows))


def _kept(advice: Advice) -> str:
    """Chart how much of the gain a corpus of limited capacity keeps."""
    if not advice.kept:
        return charts.panel("Capacity", "No accepted token came from an earlier request.", "")
    y, x = FRAME.y_scale(0, 1), FRAME.x_scale(0, max(1, len(advice.kept) - 1))
    every = max(1, -(-len(advice.kept) // 6))
    parts = charts.y_axis(FRAME, y, (0, 0.25, 0.5, 0.75, 1), units.share)
    labels = [(place, units.count(age)) for place, (age, _) in enumerate(advice.kept) if place % every == 0]
    parts += charts.x_axis(FRAME, x, labels)
    parts += [charts.x_title(FRAME, "tokens remembered"), charts.y_title(FRAME, "accepted tokens kept")]
    placed = [(x(place), y(share)) for place, (_, share) in enumerate(advice.kept)]
    parts.append(charts.polyline(placed, kind="line violet"))
    per_hour = advice.tokens_per_hour
    rows = [
        (units.count(age), units.duration(age / per_hour * 3600) if per_hour else "", units.share(share))
        for age, share in advice.kept
    ]
    heads = ("tokens remembered", "time to fill", "accepted tokens kept")
    legend = charts.legend([("violet", "accepted tokens kept")])
    label = "Share of accepted tokens whose source is still remembered, by capacity"
    chart = legend + charts.chart(FRAME, label, parts)
    note = "Share of the accepted tokens from earlier requests whose newest source a corpus of this size still holds."
    return charts.panel("Capacity, and how long text stays useful", note, chart, charts.table(heads, rows))


def _groups(advice: Advice) -> str:
    heads = ("requests", "number", "share of output", "tokens per step")
    tables = charts.table(heads, map(_group_cells, advice.groups), map(_group_cells, advice.sizes))
    note = "By the first tokens of the prompt, and by the length of the output."
    return charts.panel("Which requests gain", note, tables, kind="across")


def _group_cells(group: Group) -> tuple[charts.Cell, ...]:
    return (
        group.name,
        Value(group.requests, units.count),
        Value(group.share, units.share),
        Value(group.tokens_per_step, units.ratio),
    )


def _settings(toml: str, vllm: str) -> str:
    note = "Save as ssd-drafter.toml and start: ssd-drafter serve --config ssd-drafter.toml."
    flags = f"<p>Then: vllm serve MODEL ...</p><pre>{escape(vllm)}</pre>" if vllm else ""
    return charts.panel("Settings", note, f"<pre>{escape(toml)}</pre>{flags}")
