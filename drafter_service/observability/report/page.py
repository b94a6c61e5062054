"""A report as one HTML page that loads nothing: figures first, then plots, each with its table."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from html import escape
from importlib.resources import files

from drafter_service.observability.report import curves, units
from drafter_service.observability.report.panels import panels
from drafter_service.observability.report.parts import Figure, written
from drafter_service.observability.report.schema import Drafting, NamespaceReport, Report
from drafter_service.observability.report.upkeep import service_panel
from drafter_service.observability.report.verdict import by_saving, remarks, saving, service_remarks, worth

MOST_IN_FULL = 12
"""A namespace in full is 0.1 to 0.2 MB of page; those that save least are rows of the table only."""
POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Nothing is loaded and no script runs, whatever a name or passage holds."""


def render_page(report: Report) -> str:
    """The whole page."""
    namespaces = by_saving(report)
    title = "What drafting is worth"
    style = files("drafter_service.observability.report").joinpath("style.css").read_text(encoding="utf-8")
    own = "" if report.service is None else service_panel(report.service)
    body = _one(namespaces[0], own) if len(namespaces) == 1 else _many(report, namespaces, own)
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">
<title>{title}</title><style>{style}</style></head>
<body>
<header><p class="kicker">{title}</p>{_lead(report, namespaces)}{_remarks(service_remarks(report))}</header>
<main>{body}</main>
<footer>{_foot(report)}</footer>
</body></html>
"""


def _lead(report: Report, namespaces: Sequence[NamespaceReport]) -> str:
    if not namespaces:
        return "<h1>Nothing yet: nobody has drafted or learned anything here.</h1>"
    who = units.shortened(namespaces[0].name) if len(namespaces) == 1 else f"Drafting from {len(namespaces)} namespaces"
    return f'<h1>{escape(who)} {escape(saving(report.total))}</h1><p class="soft">{escape(worth(report.total))}</p>'


def _foot(report: Report) -> str:
    taken = units.moment(report.taken_at)
    if report.service is None:
        return f"From a snapshot of {taken}. What only a running service knows is left out."
    return escape(f"{taken} · ssd-drafter {report.service.version}")


def _one(namespace: NamespaceReport, more: str = "") -> str:
    """A namespace in full; `more` is a panel beside its own."""
    plots = f'<div class="plots">{"".join(panels(namespace))}{more}</div>'
    return _remarks(remarks(namespace)) + _cards(namespace.drafting, namespace) + plots


def _many(report: Report, namespaces: Sequence[NamespaceReport], more: str) -> str:
    parts = [_cards(report.total, None), _overview(namespaces)] if namespaces else []
    for index, namespace in enumerate(namespaces[:MOST_IN_FULL]):
        is_open = " open" if index == 0 else ""
        name = f"<h2>{escape(units.shortened(namespace.name))}</h2>"
        sentence = f'<p class="soft">{escape(saving(namespace.drafting))}</p>'
        parts.append(f'<details class="whole"{is_open}><summary>{name}{sentence}</summary>{_one(namespace)}</details>')
    if len(namespaces) > MOST_IN_FULL:
        rest = len(namespaces) - MOST_IN_FULL
        parts.append(f"<section><p class='soft'>{rest} more in the table; --namespace shows one in full.</p></section>")
    return "".join([*parts, f'<div class="plots">{more}</div>'])


def _remarks(sentences: Iterable[str]) -> str:
    return "".join(f'<p class="remark" role="note">{escape(sentence)}</p>' for sentence in sentences)


def _cards(drafting: Drafting, namespace: NamespaceReport | None) -> str:
    """The figures that people ask for first, with those of late below."""
    late = None if namespace is None or namespace.recent is None else namespace.recent
    of_late = None if late is None else late.drafting
    when = "" if late is None else f"last {units.duration(late.seconds)}"
    shown = [
        ("tokens per step", "tokens_per_step", units.ratio, "1 is plain decoding"),
        ("steps saved", "saved_share", units.share, "of the target's steps"),
        ("hit rate", "hit_rate", units.share, "of steps had a draft"),
        ("accepted", "acceptance", units.share, "of draft tokens"),
        ("output tokens", "committed", units.count, f"in {units.count(drafting.steps)} steps"),
    ]
    cards = []
    for index, (name, field, unit, hint) in enumerate(shown):
        late_words = ""
        if of_late is not None and field != "committed" and getattr(of_late, field) is not None:
            late_words = f"<p><em>{escape(unit(getattr(of_late, field)))}</em>, {escape(when)}</p>"
        figure = written(Figure(getattr(drafting, field), unit))
        cards.append(
            f'<div class="card{"" if index else " first"}"><span>{name}</span><b>{figure}</b>'
            f"<p>{escape(hint)}</p>{late_words}</div>"
        )
    return f'<div class="cards">{"".join(cards)}</div>'


def _overview(namespaces: Sequence[NamespaceReport]) -> str:
    heads = (
        "<th>namespace</th><th>tokens per step</th><th class='minor'>over time</th><th>saved</th>"
        "<th class='minor'>hit rate</th><th class='minor'>accepted</th><th class='minor'>output tokens</th>"
        "<th class='minor'>remembered</th>"
    )
    rows = []
    for one in namespaces:
        drafting, curve = one.drafting, [period.tokens_per_step for period in one.over_time or []]
        cells = [
            ("name", escape(units.shortened(one.name))),
            ("", written(Figure(drafting.tokens_per_step, units.ratio))),
            ("minor", curves.spark(curve)),
            ("", written(Figure(drafting.saved_share, units.share))),
            ("minor", written(Figure(drafting.hit_rate, units.share))),
            ("minor", written(Figure(drafting.acceptance, units.share))),
            ("minor", written(Figure(drafting.committed, units.count))),
            ("minor", written(Figure(one.corpus.tokens, units.count))),
        ]
        rows.append("<tr>" + "".join(f'<td class="{kind}">{cell}</td>' for kind, cell in cells) + "</tr>")
    table = f"<table><thead><tr>{heads}</tr></thead><tbody>{''.join(rows)}</tbody></table>"
    return f'<section><h2>Namespaces</h2><div class="scroll">{table}</div></section>'
