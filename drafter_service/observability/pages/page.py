"""Whole pages: their frame, and the cards and panels that they consist of."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import cache
from html import escape
from importlib.resources import files

from drafter_service.observability.pages.tables import Cell, cell_markup

POLICY = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
"""Content security policy: nothing is loaded and no script runs, even if a text on the page contains markup."""


def card(name: str, value: Cell, hint: str = "", more: str = "", kind: str = "") -> str:
    """Return a large value with its name above and a hint below, followed by the markup `more`."""
    below = f"<p>{escape(hint)}</p>" if hint else ""
    return f'<div class="card {kind}"><span>{escape(name)}</span><b>{cell_markup(value)}</b>{below}{more}</div>'


def cards(parts: Iterable[str]) -> str:
    """Return cards in a row that wraps."""
    return f'<div class="cards">{"".join(parts)}</div>'


def panel(title: str, note: str, content: str, data: str = "", kind: str = "") -> str:
    """Return a heading, a sentence and content. `data` is the same as a table, collapsed.

    kind: `across` takes the whole width.
    """
    folded = f"<details><summary>as a table</summary>{data}</details>" if data else ""
    caption = f"<figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"
    return f'<figure class="{kind}">{caption}{content}{folded}</figure>'


def panels(parts: Iterable[str]) -> str:
    """Return panels in rows that wrap."""
    return f'<div class="plots">{"".join(parts)}</div>'


def small_print(sentences: Iterable[str]) -> str:
    """Return a paragraph for each sentence, in small letters."""
    return "".join(f'<p class="soft">{escape(sentence)}</p>' for sentence in sentences)


def remarks(sentences: Iterable[str]) -> str:
    """Return a highlighted paragraph for each sentence."""
    return "".join(f'<p class="remark" role="note">{escape(sentence)}</p>' for sentence in sentences)


def facts(known: Mapping[str, object]) -> str:
    """Return names and values in one line, for the foot of a page."""
    return " · ".join(f"{name}: {value}" for name, value in known.items())


@cache
def style_sheet() -> str:
    """Return the style sheet that all pages share."""
    return files(__package__).joinpath("page.css").read_text(encoding="utf-8")


def page(title: str, main: str, foot: str, *, heading: str = "", lead: str = "", more: str = "") -> str:
    """Return a whole document; `main` and `more` are markup.

    heading: a sentence below the title, which is then small; lead: the sentence after it, followed by `more`.
    """
    head = (
        f'<p class="kicker">{escape(title)}</p><h1>{escape(heading)}</h1>' if heading else f"<h1>{escape(title)}</h1>"
    )
    below = f'<p class="lead">{escape(lead)}</p>' if lead else ""
    return f"""<!doctype html>
<html lang="en">
<head><meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{POLICY}"><link rel="icon" href="data:,">
<title>{escape(title)}</title><style>{style_sheet()}</style></head>
<body>
<header>{head}{below}{more}</header>
<main>{main}</main>
<footer>{escape(foot)}</footer>
</body></html>
"""
