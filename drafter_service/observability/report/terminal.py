"""A report as tables in the terminal."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.text import Text

from drafter_service.observability.pages import units
from drafter_service.observability.pages.charts import Panel
from drafter_service.observability.pages.tables import Value, cell_text, console_table
from drafter_service.observability.report.panels import namespace_panels, overview, service_panel, summary
from drafter_service.observability.report.schema import NamespaceReport, Report
from drafter_service.observability.report.verdict import (
    NOTHING,
    by_saving,
    in_shadow,
    remarks,
    saving,
    service_remarks,
    worth,
)

MAX_IN_FULL = 3
"""Maximum number of namespaces that are printed in full; with more only the overview is printed."""
CURVE_WIDTH = 44


def print_report(report: Report, console: Console) -> None:
    """Print a sentence about each namespace, then the tables, 80 columns wide in any terminal."""
    namespaces = by_saving(report)
    console.print(
        Text(f"{units.moment(report.taken_at)} · ssd-drafter {units.printable(report.service.version)}", "dim")
    )
    console.print()
    for namespace in namespaces:
        _print_sentences(namespace, console, with_worth=len(namespaces) <= MAX_IN_FULL)
    if not namespaces:
        console.print(" ".join(NOTHING))
    _print_remarks(service_remarks(report), console)
    if len(namespaces) > 1:
        _print_panel(overview(report, namespaces), console)
    if len(namespaces) > MAX_IN_FULL:
        console.print("--namespace NAME shows one of them in full.", style="dim")
    else:
        for namespace in namespaces:
            console.print(Rule(Text(units.printable(namespace.name), "bold"), align="left"))
            for panel in (summary(namespace.drafting, namespace.recent), *namespace_panels(namespace)):
                _print_panel(panel, console)
    _print_panel(service_panel(report.service), console)


def _print_sentences(namespace: NamespaceReport, console: Console, *, with_worth: bool) -> None:
    console.print(Text.assemble((units.printable(namespace.name), "bold"), " ", saving(namespace.drafting)))
    lines = [worth(namespace.drafting) if with_worth else "", in_shadow(namespace.shadow)]
    if namespace.libraries:
        lines.append(f"reads {', '.join(map(units.printable, namespace.libraries))}")
    for line in filter(None, lines):
        console.print(Padding(Text(line), (0, 0, 0, 2)))
    _print_remarks(remarks(namespace), console)


def _print_remarks(sentences: Sequence[str], console: Console) -> None:
    for sentence in sentences:
        console.print(Padding(Text(f"! {sentence}", "yellow"), (0, 0, 0, 2)))


def _print_panel(panel: Panel, console: Console) -> None:
    console.print()
    console.print(Text.assemble((panel.title, "bold"), f". {panel.note}" if panel.note else ""))
    chart = panel.chart
    if chart is not None and chart.kind == "time":
        curves = [_curve(panel, column) for column in chart.columns]
        console.print(console_table(("", "over time", "from, to"), curves))
        return
    rows = [[units.shortened(cell_text(cell)) for cell in row] for row in panel.rows]
    console.print(console_table(panel.heads, rows))


def _curve(panel: Panel, column: int) -> tuple[str, str, str]:
    """Return a column's heading, its values as a curve, and the smallest and largest one."""
    cells = [cell for cell in (row[column] for row in panel.rows) if isinstance(cell, Value)]
    known = [cell.number for cell in cells if cell.number is not None] or [0.0]
    extent = f"{cells[0].format(min(known))} to {cells[0].format(max(known))}"
    return panel.heads[column], units.sparkline([cell.number for cell in cells], CURVE_WIDTH), extent
