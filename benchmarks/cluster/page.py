"""The page of a run: targets, tokens per step over time with the faults, delays of replication, and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape
from typing import Any

import drafter_service.observability.charts as charts
from drafter_service.observability.charts import Frame

Document = Mapping[str, Any]
WIDE, NARROW = Frame(width=900, height=350, left=70, right=20, top=30), Frame(height=320)
HALF = Frame()
COLORS = ("blue", "violet")
"""Colors of the engines."""


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.cluster`."""
    mixed, delay = document["mixed"], document["delay_ms"]
    cards = [
        charts.card("tokens per step, two engines / one", f"{mixed['ratio']:.3f}", "mixed traffic, from empty corpora"),
        charts.card("a sidecar drafts what the other learned", f"{delay['p50']:.0f} ms", f"p99 {delay['p99']:.0f} ms"),
        charts.card("failed requests", f"{document['failed']}", f"of {document['requests']:,} with faults"),
        charts.card("acknowledged texts lost", f"{_sum(document, 'lost')}", f"of {_sum(document, 'acknowledged')}"),
    ]
    panels = (
        charts.panel(
            "Tokens per step",
            "Repeated traffic that has been learned, by round of its prompts. Shaded: from each fault to its end.",
            _timeline(document, WIDE, "wide") + _timeline(document, NARROW, "narrow") + _legend(document),
            kind="across",
        )
        + charts.panel("Faults", "One at a time, under load.", _faults(document), kind="across")
        + charts.panel(
            "Delay of replication",
            "From the end of a request at one sidecar until the other one drafts its text: share of probes.",
            _delays(delay["all"]),
        )
        + charts.panel("Processes", "During the mixed traffic with two engines.", process_table(document["processes"]))
        + charts.panel(
            "Cost of replication", "Text that one sidecar learns and nobody drafts.", _cost(document["cost"])
        )
        + charts.panel("Targets", "", target_table(document["targets"]), kind="across")
    )
    main = f'{charts.cards(cards)}<div class="plots">{panels}</div>'
    title = "Two engines, two sidecars, one corpus"
    lead = f"Engines: {document['engine']}. {document['cores']} cores, {document['date']}, {document['seconds']} s."
    header = f"<h1>{escape(title)}</h1><p class='soft'>{escape(lead)}</p>"
    return charts.page(title, header, main, "python -m benchmarks.cluster")


def _sum(document: Document, name: str) -> int:
    return sum(fault.get(name, 0) for fault in document["faults"])


def _timeline(document: Document, frame: Frame, kind: str) -> str:
    windows = [window for window in document["windows"] if window["tokens_per_step"] is not None]
    values = [value for window in windows for value in (window["tokens_per_step"], *window["by_engine"]) if value]
    marks = charts.ticks(max(values))
    seconds = charts.ticks(windows[-1]["ended"])
    x, y = frame.x_scale(0, windows[-1]["ended"]), frame.y_scale(0, marks[-1])
    parts = []
    for fault in document["faults"]:
        if "fault_at" in fault:
            left, right = x(fault["fault_at"]), x(fault["healed_at"])
            parts.append(
                charts.rect(left, frame.top, right - left, frame.floor - frame.top, fault["title"], kind="area amber")
            )
            parts.append(charts.line(left, frame.top, left, frame.floor, kind="dashed"))
            if frame is WIDE:
                parts.append(charts.text(fault["name"], left, frame.top - 8))
    parts += charts.y_axis(frame, y, marks, lambda value: f"{value:g}")
    parts += charts.x_axis(frame, x, [(second, f"{second:,.0f}") for second in seconds[:-1]])
    parts += [charts.x_title(frame, "seconds"), charts.y_title(frame, "tokens per step")]
    for number, color in enumerate(COLORS):
        points = [(x(window["ended"]), y(window["by_engine"][number] or 0)) for window in windows]
        parts.append(charts.polyline(points, kind=f"line {color}"))
    parts.append(
        charts.polyline([(x(each["ended"]), y(each["tokens_per_step"])) for each in windows], kind="line green")
    )
    return charts.chart(frame, "Tokens per step over time", parts, kind)


def _legend(document: Document) -> str:
    names = sorted(document["mixed"]["by_engine"])
    entries = [("line green", "both engines")]
    entries += [(f"line {color}", f"engine {name}") for color, name in zip(COLORS, names, strict=True)]
    return charts.legend(entries)


def _delays(delays: Sequence[float]) -> str:
    marks = charts.ticks(max(delays))
    x, y = HALF.x_scale(0, marks[-1]), HALF.y_scale(0, 1)
    points = [(x(delay), y((number + 1) / len(delays))) for number, delay in enumerate(delays)]
    parts = charts.y_axis(HALF, y, (0, 0.25, 0.5, 0.75, 1), lambda share: f"{share:.0%}")
    parts += charts.x_axis(HALF, x, [(mark, f"{mark:g}") for mark in marks])
    parts += [charts.x_title(HALF, "milliseconds"), charts.polyline(points, kind="line green")]
    return charts.chart(HALF, "Share of probes by delay", parts)


def _faults(document: Document) -> str:
    heads = (
        "fault",
        "requests",
        "failed",
        "texts lost",
        "tokens per step before",
        "lowest",
        "after",
        "recovered after",
    )
    rows = []
    for fault in document["faults"]:
        if "skipped" in fault:
            rows.append((fault["title"], *[""] * 6, f"skipped: {fault['skipped']}"))
            continue
        figures = [f"{fault[name]:.2f}" if name in fault else "" for name in ("before", "lowest", "after")]
        seconds = fault.get("seconds")
        recovered = "not within a minute" if seconds is None else f"{seconds:.0f} s"
        lost = f"{fault['lost']} of {fault['acknowledged']}"
        title = fault["title"] + ("" if fault["took_effect"] else " (without effect)")
        rows.append((title, f"{fault['requests']}", f"{fault['failed']}", lost, *figures, recovered))
    return charts.table(heads, rows, kinds=("name", *[""] * 6, "name"))


def process_table(processes: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of the resources of processes."""
    heads = ("process", "cores", "memory, MB", "threads", "descriptors")
    rows = [
        (
            each["name"],
            f"{each['cores']:.2f}",
            f"{each['memory_mb']:,.0f}",
            f"{each['threads']}",
            f"{each['descriptors']}",
        )
        for each in processes
    ]
    return charts.table(heads, rows)


def _cost(cost: Mapping[str, Any]) -> str:
    rows = [("text learned", f"{cost['tokens_per_s']:,} tokens/s")]
    rows += [
        (f"{name}, processor time", f"{value:.2f} us per token") for name, value in cost["cpu_us_per_token"].items()
    ]
    rows += [
        (f"{name}, bytes to and from Redis", f"{value:.1f} per token")
        for name, value in cost["bytes_per_token"].items()
    ]
    return charts.table(("", ""), rows, kinds=("name", ""))


def target_table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return a table of targets."""
    return charts.table(
        ("target", "", "measured", ""),
        [
            (
                row["name"],
                f"{row['sense']} {row['target']}",
                f"{row['value']:.4g}",
                "reached" if row["met"] else "missed",
            )
            for row in rows
        ],
        kinds=("name", "", "", ""),
    )
