"""A report as one HTML page that loads nothing: key values first, then charts, each with its table."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from drafter_service.observability.pages import page as pages
from drafter_service.observability.pages.charts import sparkline
from drafter_service.observability.pages.tables import Cell, Markup, Value, html_table
from drafter_service.observability.report import units
from drafter_service.observability.report.panels import namespace_panels, service_panel
from drafter_service.observability.report.schema import Drafting, NamespaceReport, Report
from drafter_service.observability.report.verdict import by_saving, in_shadow, remarks, saving, service_remarks, worth

MAX_IN_FULL = 12
"""Maximum number of namespaces shown in full, 0.1 to 0.2 MB of page each. Those that save least are only rows of the
overview."""
TITLE = "What drafting saves"
OVERVIEW = (
    ("namespace", "name"),
    ("tokens per step", ""),
    ("over time", "minor"),
    ("saved", ""),
    ("hit rate", "minor"),
    ("accepted", "minor"),
    ("output tokens", "minor"),
    ("remembered", "minor"),
)
"""Headings and classes of the columns."""


def render_page(report: Report) -> str:
    """Return the whole page."""
    namespaces = by_saving(report)
    heading, lead = _heading(report, namespaces)
    service = service_panel(report.service)
    main = _one(namespaces[0], service) if len(namespaces) == 1 else _many(report, namespaces, service)
    more = pages.remarks(service_remarks(report))
    return pages.page(TITLE, main, _foot(report), heading=heading, lead=lead, more=more)


def _heading(report: Report, namespaces: Sequence[NamespaceReport]) -> tuple[str, str]:
    """Return what was saved, and what that is worth."""
    if not namespaces:
        return "No drafts yet: this service has not drafted or learned anything.", ""
    what = (
        units.shortened(namespaces[0].name) if len(namespaces) == 1 else f"Drafting from {len(namespaces)} namespaces"
    )
    return f"{what} {saving(report.total)}", worth(report.total)


def _foot(report: Report) -> str:
    taken = units.moment(report.taken_at)
    return f"{taken} · ssd-drafter {report.service.version}"


def _one(namespace: NamespaceReport, more: str = "") -> str:
    """Return a namespace in full, followed by the panel `more`."""
    head = pages.remarks(remarks(namespace)) + pages.small_print(filter(None, [in_shadow(namespace.shadow)]))
    return head + _cards(namespace.drafting, namespace) + pages.panels([*namespace_panels(namespace), more])


def _many(report: Report, namespaces: Sequence[NamespaceReport], more: str) -> str:
    parts = [_cards(report.total, None), _overview(namespaces)] if namespaces else []
    for index, namespace in enumerate(namespaces[:MAX_IN_FULL]):
        is_open = " open" if index == 0 else ""
        name = f"<h2>{escape(units.shortened(namespace.name))}</h2>"
        sentence = pages.small_print([saving(namespace.drafting)])
        parts.append(f'<details class="whole"{is_open}><summary>{name}{sentence}</summary>{_one(namespace)}</details>')
    if len(namespaces) > MAX_IN_FULL:
        others = len(namespaces) - MAX_IN_FULL
        rest = pages.small_print([f"{others} more in the table; --namespace shows one in full."])
        parts.append(f"<section>{rest}</section>")
    return "".join([*parts, pages.panels([more])])


def _cards(drafting: Drafting, namespace: NamespaceReport | None) -> str:
    """Return the key values, each with its recent value below."""
    recent = None if namespace is None else namespace.recent
    shown = [
        ("tokens per step", "tokens_per_step", units.ratio, "1 is plain decoding"),
        ("steps saved", "saved_share", units.share, "of the target's steps"),
        ("hit rate", "hit_rate", units.share, "of steps had a draft"),
        ("accepted", "acceptance", units.share, "of draft tokens"),
        ("output tokens", "committed", units.count, f"in {units.counted(drafting.steps, 'step')}"),
    ]
    cards = []
    for index, (name, field, unit, hint) in enumerate(shown):
        lately = None if recent is None or field == "committed" else getattr(recent.drafting, field)
        more = ""
        if recent is not None and lately is not None:
            more = f"<p><em>{escape(unit(lately))}</em>, last {escape(units.duration(recent.seconds))}</p>"
        value = Value(getattr(drafting, field), unit)
        cards.append(pages.card(name, value, hint, more, "" if index else "green"))
    return pages.cards(cards)


def _overview(namespaces: Sequence[NamespaceReport]) -> str:
    heads, kinds = zip(*OVERVIEW, strict=True)
    table = html_table(heads, [_overview_row(namespace) for namespace in namespaces], kinds=kinds)
    return f"<section><h2>Namespaces</h2>{table}</section>"


def _overview_row(namespace: NamespaceReport) -> tuple[Cell, ...]:
    drafting = namespace.drafting
    values = [period.tokens_per_step for period in namespace.over_time]
    known = [value for value in values if value is not None] or [0.0]
    label = f"Tokens per step, {units.ratio(min(known))} to {units.ratio(max(known))}"
    return (
        units.shortened(namespace.name),
        Value(drafting.tokens_per_step, units.ratio),
        Markup(sparkline(values, label)),
        Value(drafting.saved_share, units.share),
        Value(drafting.hit_rate, units.share),
        Value(drafting.acceptance, units.share),
        Value(drafting.committed, units.count),
        Value(namespace.corpus.tokens, units.count),
    )
