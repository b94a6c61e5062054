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
COLORS = ("green", "blue", "violet", "amber", "gray")


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.rollouts`."""
    steps, epochs, settings = document["steps"], document["epochs"], document["settings"]
    found = document["differences"]
    cards = [
        charts.card("results that differ", "none" if not found else str(len(found)), "tokens, rewards, losses, weights"),
        charts.card("rollouts, with drafts / without", f"{document['ratio']:.2f}", "seconds, last third of the steps"),
        charts.card("tokens per step", f"{epochs[-1]['tokens_per_step']:.2f}", f"{epochs[0]['tokens_per_step']:.2f} in the first epoch"),
        charts.card("reward", f"{steps[-1]['reward']:.2f}", f"{steps[0]['reward']:.2f} in the first step"),
    ]
    panels = [
        charts.panel("Rollouts", "Seconds of each training step.", _timing(steps), _table(steps)),
        charts.panel("Tokens per step", "With drafts, by epoch.", _lines("epoch", [("green", _column(epochs, "tokens_per_step"))])),
        charts.panel("Reward", "Mean of each training step; equal in both runs.", _lines("training step", [("green", _column(steps, "reward"))])),
        charts.panel("Length of outputs", "Tokens, mean of each training step.", _lines("training step", [("green", _column(steps, "mean_tokens"))])),
        charts.panel("Accepted draft tokens", "Share of each source, by epoch.", _sources(epochs)),
        charts.panel("Targets", "", target_table(document["targets"]), kind="across"),
    ]
    title = "Rollouts of reinforcement learning, with and without drafts"
    lead = (
        f"Drafter {document['drafter']}, {settings['engines']} engine(s), {settings['problems']} problems, "
        f"{settings['samples']} samples each, {len(steps)} training steps, {document['cores']} cores, {document['date']}."
    )
    header = f"<h1>{escape(title)}</h1><p class='soft'>{escape(lead)}</p>"
    main = f'{charts.cards(cards)}<div class="plots">{"".join(panels)}</div>'
    return charts.page(title, header, main, "python -m benchmarks.rollouts")


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[float | None]:
    return [row[name] for row in rows]


def _timing(steps: Sequence[Mapping[str, Any]]) -> str:
    series = [("gray", _column(steps, "without_s")), ("green", _column(steps, "with_s"))]
    return _lines("training step", series) + charts.legend([("line gray", "without drafts"), ("line green", "with drafts")])


def _sources(epochs: Sequence[Mapping[str, Any]]) -> str:
    names = sorted({name for epoch in epochs for name in epoch["share_of_accepted"]})
    colors = dict(zip(names, COLORS, strict=False))
    series = [(color, [epoch["share_of_accepted"].get(name) or 0.0 for epoch in epochs]) for name, color in colors.items()]
    return _lines("epoch", series) + charts.legend([(f"line {color}", name) for name, color in colors.items()])


def _lines(x_name: str, series: Series) -> str:
    """Return a chart of values by number, from 0."""
    known = [value for _, values in series for value in values if value is not None]
    marks = charts.ticks(max(known, default=1.0))
    count = max((len(values) for _, values in series), default=1)
    x, y = FRAME.x_scale(0, max(1, count - 1)), FRAME.y_scale(0, marks[-1])
    parts = charts.y_axis(FRAME, y, marks, lambda value: f"{value:g}")
    parts += charts.x_axis(FRAME, x, [(mark, f"{mark:g}") for mark in charts.ticks(max(1, count - 1), 1) if mark < count])
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
