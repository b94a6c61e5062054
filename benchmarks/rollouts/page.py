"""The page of two runs: rewards, seconds of rollouts, tokens per step, and the sources of accepted tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.targets import target_panel
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import Axis, Series, line_chart
from drafter_service.observability.pages.tables import html_table

Document = Mapping[str, Any]
STEP = "training step"
COLORS = ("green", "blue", "violet", "amber", "gray")


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.rollouts`."""
    steps, epochs, settings = document["steps"], document["epochs"], document["settings"]
    count, rates = len(document["differences"]), _column(epochs, "tokens_per_step")
    rewards = _column(steps, "reward")
    cards = [
        pages.card("results that differ", str(count), "of tokens, rewards, losses and final weights"),
        pages.card("rollouts, with drafts / without", f"{document['ratio']:.2f}", "seconds, last third of the steps"),
        pages.card("tokens per step", f"{rates[-1]:.2f}", f"{rates[0]:.2f} in the first epoch"),
        pages.card("reward", f"{rewards[-1]:.2f}", f"{rewards[0]:.2f} in the first training step"),
    ]
    timing = {"without drafts": _column(steps, "without_s"), "with drafts": _column(steps, "with_s")}
    panels = [
        pages.panel(
            "Rollouts",
            "Seconds of each training step.",
            _lines(STEP, "seconds", timing, ("gray", "green")),
            _table(steps),
        ),
        _panel("Tokens per step", "With drafts, by epoch.", "epoch", rates),
        _panel("Reward", "Mean, equal in both runs.", STEP, rewards),
        _panel("Output", "Mean tokens.", STEP, _column(steps, "mean_tokens")),
        pages.panel("Accepted draft tokens", "Share of each source, by epoch.", _sources(epochs)),
        target_panel(document["targets"]),
    ]
    title = "Rollouts of reinforcement learning, with and without drafts"
    lead = (
        f"Drafter {document['drafter']}, {settings['engines']} engine(s), {settings['problems']} problems, "
        f"{settings['samples']} samples each, {len(steps)} training steps, {document['cores']} cores, "
        f"{document['date']}."
    )
    return pages.page(title, pages.cards(cards) + pages.panels(panels), "python -m benchmarks.rollouts", lead=lead)


def _column(rows: Sequence[Mapping[str, Any]], name: str) -> list[Any]:
    return [row[name] for row in rows]


def _panel(title: str, note: str, x: str, values: Sequence[float | None]) -> str:
    return pages.panel(title, note, _lines(x, title.lower(), {title.lower(): values}))


def _sources(epochs: Sequence[Mapping[str, Any]]) -> str:
    shares = _column(epochs, "share_of_accepted")
    names = sorted({name for share in shares for name in share})[: len(COLORS)]
    return _lines("epoch", "share", {name: [share.get(name) or 0.0 for share in shares] for name in names})


def _lines(x: str, y: str, values: Mapping[str, Sequence[float | None]], colors: Sequence[str] = COLORS) -> str:
    """Return a chart of values by number, from 0."""
    largest = max((value for each in values.values() for value in each if value is not None), default=1.0)
    count = max(map(len, values.values()), default=1)
    series = [
        Series(name, color, [(number, value) for number, value in enumerate(each) if value is not None])
        for color, (name, each) in zip(colors, values.items(), strict=False)
    ]
    return line_chart(
        f"{y} by {x}", Axis.to(max(1, count - 1), x, min_step=1, is_exact=True), Axis.to(largest, y), series
    )


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
    return html_table(heads, rows)
