"""The page of a long run: memory and latency over time, and what each process uses at the start and at the end."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.targets import target_panel
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import Axis, Series, line_chart
from drafter_service.observability.pages.svg import Frame
from drafter_service.observability.pages.tables import html_table

Document = Mapping[str, Any]
FRAMES = Frame(width=900, height=260, left=70, right=20, top=20), Frame()


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.soak`."""
    p99, curves = document["latency_ms"]["p99"], document["curves"]
    minutes = [second / 60 for second in curves["seconds"]]
    growth = max(each["growth"] for each in document["processes"])
    cards = [
        pages.card("requests", f"{document['requests']:,}", f"{document['error_count']} errors"),
        pages.card("largest growth of memory", f"{growth:+.1%}", "of any process, after the warm-up"),
        pages.card("latency, p99", f"{p99[1]:.0f} ms", f"{p99[0]:.0f} ms after the warm-up"),
        pages.card("files", f"{document['files'][1]}", f"{document['files'][0]} after the warm-up"),
    ]
    latency = curve(minutes, curves["latency_p99_ms"], "latency, p99", "ms")
    panels = [pages.panel("Latency of requests, p99", "By time of the request.", latency, kind="across")]
    panels += [
        pages.panel(
            f"Memory of {name}", "Proportional set size.", curve(minutes, memory, "memory", "MB"), kind="across"
        )
        for name, memory in curves["memory_mb"].items()
    ]
    panels.append(pages.panel("Processes", "After the warm-up, and at the end.", _processes(document), kind="across"))
    panels.append(target_panel(document["targets"]))
    lead = (
        f"Engines: {document['engine']}. {document['seconds'] / 60:.0f} minutes, {document['cores']} cores, "
        f"{document['date']}. The {document['part_s'] / 60:.1f} minutes after a warm-up of the same length are "
        "compared with the last ones."
    )
    main = pages.cards(cards) + pages.panels(panels)
    return pages.page("A cluster under constant load", main, "python -m benchmarks.soak", lead=lead)


def curve(minutes: Sequence[float], values: Sequence[float | None], name: str, unit: str) -> str:
    """Return a chart of values over time."""
    known = [(minute, value) for minute, value in zip(minutes, values, strict=True) if value is not None]
    return line_chart(
        f"{name} over time",
        Axis.to(minutes[-1], "minutes", is_exact=True),
        Axis.to(max(value for _, value in known) * 1.1, unit),
        [Series(name, "green", known)],
        frames=FRAMES,
    )


def _processes(document: Document) -> str:
    heads = ("process", "memory, MB", "growth", "threads", "descriptors", "cores")
    rows = []
    for each in document["processes"]:
        memory = " / ".join(f"{value:,.1f}" for value in each["memory_mb"])
        counts = [" / ".join(map(str, each[kind])) for kind in ("threads", "descriptors")]
        cores = " / ".join(f"{value:.2f}" for value in each["cores"])
        rows.append((each["name"], memory, f"{each['growth']:+.2%}", *counts, cores))
    return html_table(heads, rows)
