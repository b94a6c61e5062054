"""The page of a long run: memory and latency over time, and what each process uses at the start and at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import drafter_service.observability.charts as charts
from benchmarks.cluster.page import target_table
from drafter_service.observability.charts import Frame

Document = Mapping[str, Any]
FRAME = Frame(width=900, height=260, left=70, right=20, top=20)


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.soak`."""
    p99, curves = document["latency_ms"]["p99"], document["curves"]
    minutes = [second / 60 for second in curves["seconds"]]
    growth = max(each["growth"] for each in document["processes"])
    cards = [
        charts.card("requests", f"{document['requests']:,}", f"{document['error_count']} errors"),
        charts.card("largest growth of memory", f"{growth:+.1%}", "of any process, after the warm-up"),
        charts.card("latency, p99", f"{p99[1]:.0f} ms", f"{p99[0]:.0f} ms after the warm-up"),
        charts.card("files", f"{document['files'][1]}", f"{document['files'][0]} after the warm-up"),
    ]
    panels = charts.panel(
        "Latency of requests, p99",
        "By time of the request.",
        curve(minutes, curves["latency_p99_ms"], "ms"),
        kind="across",
    )
    for name, memory in curves["memory_mb"].items():
        panels += charts.panel(
            f"Memory of {name}", "Proportional set size.", curve(minutes, memory, "MB"), kind="across"
        )
    panels += charts.panel("Processes", "After the warm-up, and at the end.", _processes(document), kind="across")
    panels += charts.panel("Targets", "", target_table(document["targets"]), kind="across")
    title = "A cluster under constant load"
    lead = (
        f"Engines: {document['engine']}. {document['seconds'] / 60:.0f} minutes, {document['cores']} cores, "
        f"{document['date']}. The {document['part_s'] / 60:.1f} minutes after a warm-up of the same length are "
        "compared with the last ones."
    )
    header = f"<h1>{escape(title)}</h1><p class='soft'>{escape(lead)}</p>"
    main = f'{charts.cards(cards)}<div class="plots">{panels}</div>'
    return charts.page(title, header, main, "python -m benchmarks.soak")


def curve(minutes: Sequence[float], values: Sequence[float | None], unit: str) -> str:
    """Return a chart of values over time."""
    known = [(minute, value) for minute, value in zip(minutes, values, strict=True) if value is not None]
    marks = charts.ticks(max(value for _, value in known) * 1.1)
    x, y = FRAME.x_scale(0, minutes[-1]), FRAME.y_scale(0, marks[-1])
    parts = charts.y_axis(FRAME, y, marks, lambda value: f"{value:g}")
    parts += charts.x_axis(FRAME, x, [(mark, f"{mark:g}") for mark in charts.ticks(minutes[-1])])
    parts += [charts.x_title(FRAME, "minutes"), charts.y_title(FRAME, unit)]
    parts.append(charts.polyline([(x(minute), y(value)) for minute, value in known], kind="line green"))
    return charts.chart(FRAME, f"{unit} over time", parts)


def _processes(document: Document) -> str:
    heads = ("process", "memory, MB", "growth", "threads", "descriptors", "cores")
    rows = []
    for each in document["processes"]:
        memory = " / ".join(f"{value:,.1f}" for value in each["memory_mb"])
        counts = [" / ".join(map(str, each[kind])) for kind in ("threads", "descriptors")]
        cores = " / ".join(f"{value:.2f}" for value in each["cores"])
        rows.append((each["name"], memory, f"{each['growth']:+.2%}", *counts, cores))
    return charts.table(heads, rows)
