"""The page of a run: targets, tokens per step over time with the faults, delays of replication, and processes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.support.targets import target_panel
from drafter_service.observability.pages import charts as svg
from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import Axis, Frame, Scale, Series, line_chart
from drafter_service.observability.pages.tables import html_table

Document = Mapping[str, Any]
FRAMES = Frame(width=900, height=350, left=70, right=20, top=30), Frame(height=320)
COLORS = ("blue", "violet")
"""Colors of the engines."""


def render_page(document: Document) -> str:
    """Return the page of a document of `benchmarks.cluster`."""
    mixed, delay = document["mixed"], document["delay_ms"]
    cards = [
        pages.card("tokens per step, two engines / one", f"{mixed['ratio']:.3f}", "mixed traffic, from empty corpora"),
        pages.card("a sidecar drafts what the other learned", f"{delay['p50']:.0f} ms", f"p99 {delay['p99']:.0f} ms"),
        pages.card("failed requests", f"{document['failed']}", f"of {document['requests']:,} with faults"),
        pages.card("acknowledged texts lost", f"{_sum(document, 'lost')}", f"of {_sum(document, 'acknowledged')}"),
    ]
    panels = [
        pages.panel(
            "Tokens per step",
            "Repeated traffic that has been learned, by round of its prompts. Shaded: from each fault to its end.",
            _timeline(document),
            kind="across",
        ),
        pages.panel("Faults", "One at a time, under load.", _faults(document), kind="across"),
        pages.panel(
            "Delay of replication",
            "From the end of a request at one sidecar until the other one drafts its text: share of probes.",
            _delays(delay["all"]),
        ),
        pages.panel("Processes", "During the mixed traffic with two engines.", _processes(document["processes"])),
        pages.panel("Cost of replication", "Text that one sidecar learns and nobody drafts.", _cost(document["cost"])),
        target_panel(document["targets"]),
    ]
    lead = f"Engines: {document['engine']}. {document['cores']} cores, {document['date']}, {document['seconds']} s."
    main = pages.cards(cards) + pages.panels(panels)
    return pages.page("Two engines, two sidecars, one corpus", main, "python -m benchmarks.cluster", lead=lead)


def _sum(document: Document, name: str) -> int:
    return sum(fault.get(name, 0) for fault in document["faults"])


def _timeline(document: Document) -> str:
    windows = [window for window in document["windows"] if window["tokens_per_step"] is not None]
    names = sorted(document["mixed"]["by_engine"])
    series = [
        Series(f"engine {name}", color, [(each["ended"], each["by_engine"][number] or 0) for each in windows])
        for number, (name, color) in enumerate(zip(names, COLORS, strict=True))
    ]
    series.append(Series("both engines", "green", [(each["ended"], each["tokens_per_step"]) for each in windows]))
    largest = max(value for each in series for _, value in each.points)

    def faults(frame: Frame, x: Scale, _: Scale) -> list[str]:
        parts = []
        for fault in document["faults"]:
            if "fault_at" in fault:
                left, right = x(fault["fault_at"]), x(fault["healed_at"])
                height = frame.floor - frame.top
                parts.append(svg.rect(left, frame.top, right - left, height, fault["title"], kind="volume amber"))
                if frame is FRAMES[0]:
                    parts.append(svg.text(fault["name"], left, frame.top - 8))
        return parts

    return line_chart(
        "Tokens per step over time",
        Axis.to(windows[-1]["ended"], "seconds", "{:,.0f}".format, is_exact=True),
        Axis.to(largest, "tokens per step"),
        series,
        frames=FRAMES,
        behind=faults,
        remarks=[("amber pale", "faults")],
    )


def _delays(delays: Sequence[float]) -> str:
    shares = [(share, f"{share:.0%}") for share in (0, 0.25, 0.5, 0.75, 1)]
    points = [(delay, (number + 1) / len(delays)) for number, delay in enumerate(delays)]
    return line_chart(
        "Share of probes by delay",
        Axis.to(max(delays), "milliseconds"),
        Axis("share of probes", 0, 1, shares),
        [Series("share of probes", "green", points)],
    )


def _faults(document: Document) -> str:
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
    before = ("fault", "requests", "failed", "texts lost", "tokens per step before")
    return html_table((*before, "lowest", "after", "recovered after"), rows, kinds=("name", *[""] * 6, "name"))


def _processes(processes: Sequence[Mapping[str, Any]]) -> str:
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
    return html_table(heads, rows)


def _cost(cost: Mapping[str, Any]) -> str:
    rows = [("text learned", f"{cost['tokens_per_s']:,} tokens/s")]
    rows += [
        (f"{name}, processor time", f"{value:.2f} us per token") for name, value in cost["cpu_us_per_token"].items()
    ]
    rows += [
        (f"{name}, bytes to and from Redis", f"{value:.1f} per token")
        for name, value in cost["bytes_per_token"].items()
    ]
    return html_table(("", ""), rows, kinds=("name", ""))
