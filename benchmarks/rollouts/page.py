"""The page of two runs: rewards, seconds of rollouts, tokens per step, and the sources of accepted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import drafter_service.observability.charts as charts
from benchmarks.cluster.page import target_table
from drafter_service.observability.charts import Frame

Document = Mapping[str, Any]
Series = Sequence[tuple[str, Sequence[float | None]]]
"""Colors and values."""
FRAME = Frame()
STEP = "training step"
COLORS = ("green", "blue", "violet", "amber", "gray")


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.rollouts`."""
    steps, epochs, settings = document["steps"], document["epochs"], document["settings"]
    count, rates = len(document["differences"]), _column(epochs, "tokens_per_step")
    rewards = _column(steps, "reward")
    cards = [
        charts.card("results that differ", str(count), "of tokens, rewards, losses and final weights"),
        charts.card("rollouts, with drafts / without", f"{document['ratio']:.2f}", "seconds, last third of the steps"),
        charts.card("tokens per step", f"{rates[-1]:.2f}", f"{rates[0]:.2f} in the first epoch"),
        charts.card("reward", f"{rewards[-1]:.2f}", f"{rewards[0]:.2f} in the first training step"),
    ]
    panels = [
        charts.panel("Rollouts", "Seconds of each training step.", _timing(steps), _table(steps)),
        charts.panel("Tokens per step", "With drafts, by epoch.", _lines("epoch", [("green", rates)])),
        charts.panel("Reward", "Mean, equal in both runs.", _lines(STEP, [("green", rewards)])),
        charts.panel("Output", "Mean tokens.", _lines(STEP, [("green", _column(steps, "mean_tokens"))])),
        charts.panel("Accepted draft tokens", "Share of each source, by epoch.", _sources(epochs)),
        charts.panel("Targets", "", target_table(document["targets"]), kind="across"),
    ]
    title = "Rollouts of reinforcement learning, with and without drafts"
    lead = (
        f"Drafter {document['drafter']}, {settings['engines']} engine(s), {settings['problems']} problems, "
        f"{settings['samples']} samples each, {len(steps)} training steps, {document['cores']} cores, "
        f"{document['date']}."
    )
    header = f"<h1>{escape(title)}</h1><p class='soft'>{escape(lead)}</p>"
    main = f'{charts.cards(cards)}<div class="plots">{"".join(panels)}</div>'
    return charts.page(title, header, main, "python -m benchmarks.rollouts")


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _timing(steps: Sequence[Mapping[str, Any]]) -> str:
    names = charts.legend([("line gray", "without drafts"), ("line green", "with drafts")])
    return _lines(STEP, [("gray", _column(steps, "without_s")), ("green", _column(steps, "with_s"))]) + names


def _sources(epochs: Sequence[Mapping[str, Any]]) -> str:
    shares = _column(epochs, "share_of_accepted")
    colors = dict(zip(sorted({name for share in shares for name in share}), COLORS, strict=False))
    series = [(color, [share.get(name) or 0.0 for share in shares]) for name, color in colors.items()]
    return _lines("epoch", series) + charts.legend([(f"line {color}", name) for name, color in colors.items()])


def _lines(x_name: str, series: Series) -> str:
    """Return a chart of values by number, from 0."""
    known = [value for _, values in series for value in values if value is not None]
    marks = charts.ticks(max(known, default=1.0))
    count = max((len(values) for _, values in series), default=1)
    x, y = FRAME.x_scale(0, max(1, count - 1)), FRAME.y_scale(0, marks[-1])
    parts = charts.y_axis(FRAME, y, marks, lambda value: f"{value:g}")
    numbers = [mark for mark in charts.ticks(max(1, count - 1), 1) if mark < count]
    parts += charts.x_axis(FRAME, x, [(number, f"{number:g}") for number in numbers])
    parts.append(charts.x_title(FRAME, x_name))
    for color, values in series:
        points = [(x(number), y(value)) for number, value in enumerate(values) if value is not None]
        parts.append(charts.polyline(points, kind=f"line {color}"))
    return charts.chart(FRAME, f"By {x_name}", parts)


def _table(steps: Sequence[Mapping[str, Any]]) -> str:
    heads = ("step", "reward", "tokens", "without drafts, s", "with, s", "tokens per step")
    rows = [
        (
            f"{number}",
            f"{step['reward']:.3f}",
            f"{step['output_tokens']:,}",
            f"{step['without_s']:.2f}",
            f"{step['with_s']:.2f}",
            f"{step['tokens_per_step']:.2f}",
        )
        for number, step in enumerate(steps)
    ]
    return charts.table(heads, rows)
