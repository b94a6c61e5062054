"""A report as one HTML page that loads nothing: key values first, then charts, each with its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape

from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages import units
from drafter_service.observability.pages.charts import Panel, render_panel
from drafter_service.observability.pages.tables import cell_text, html_table
from drafter_service.observability.report.panels import SUMMARY, namespace_panels, overview, service_panel, value_of
from drafter_service.observability.report.schema import Drafting, NamespaceReport, Recent, Report
from drafter_service.observability.report.verdict import (
    NOTHING,
    by_saving,
    in_shadow,
    remarks,
    saving,
    service_remarks,
    worth,
)

MAX_IN_FULL = 12
"""Maximum number of namespaces shown in full, 0.1 to 0.2 MB of page each. Those that save least are only rows of the
overview."""
TITLE = "What drafting saves"


def render_page(report: Report) -> str:
    """Return the whole page."""
    namespaces = by_saving(report)
    service = service_panel(report.service)
    if len(namespaces) == 1:
        main = _namespace(namespaces[0], [service])
    else:
        main = _overview(report, namespaces) + _panels([service])
    heading, lead = NOTHING
    if namespaces:
        subject = f"Drafting from {len(namespaces)} namespaces"
        subject = units.shortened(namespaces[0].name) if len(namespaces) == 1 else subject
        heading, lead = f"{subject} {saving(report.total)}", worth(report.total)
    foot = f"{units.moment(report.taken_at)} · ssd-drafter {report.service.version}"
    return pages.page(TITLE, main, foot, heading=heading, lead=lead, more=pages.remarks(service_remarks(report)))


def _namespace(namespace: NamespaceReport, more: Sequence[Panel] = ()) -> str:
    """Return a namespace in full, followed by other panels."""
    head = pages.remarks(remarks(namespace)) + pages.small_print(filter(None, [in_shadow(namespace.shadow)]))
    return head + _cards(namespace.drafting, namespace.recent) + _panels([*namespace_panels(namespace), *more])


def _overview(report: Report, namespaces: Sequence[NamespaceReport]) -> str:
    """Return the table of all namespaces, and those in full that save most."""
    if not namespaces:
        return ""
    panel = overview(report, namespaces)
    table = html_table(panel.heads, panel.rows)
    parts = [_cards(report.total, None), f"<section><h2>{panel.title}</h2>{table}</section>"]
    for index, namespace in enumerate(namespaces[:MAX_IN_FULL]):
        name = f"<h2>{escape(units.shortened(namespace.name))}</h2>"
        summary = f"<summary>{name}{pages.small_print([saving(namespace.drafting)])}</summary>"
        is_open = "" if index else " open"
        parts.append(f'<details class="whole"{is_open}>{summary}{_namespace(namespace)}</details>')
    if len(namespaces) > MAX_IN_FULL:
        others = len(namespaces) - MAX_IN_FULL
        rest = pages.small_print([f"{others} more in the table; --namespace shows one in full."])
        parts.append(f"<section>{rest}</section>")
    return "".join(parts)


def _panels(panels: Iterable[Panel]) -> str:
    return pages.panels(map(render_panel, panels))


def _cards(drafting: Drafting, recent: Recent | None) -> str:
    """Return the key values, each with its recent value below."""
    cards = []
    for index, (head, field, hint) in enumerate(SUMMARY):
        more = ""
        if recent is not None:
            lately = escape(cell_text(value_of(recent.drafting, field)))
            more = f"<p><em>{lately}</em>, last {escape(units.duration(recent.seconds))}</p>"
        cards.append(pages.card(head, value_of(drafting, field), hint, more, "" if index else "green"))
    return pages.cards(cards)
