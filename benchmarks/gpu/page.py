"""Write the tables of `docs/gpu.md` from results."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from drafter_service.observability.pages.tables import markdown_table
from ssd.errors import UserError

BEGIN, END = "<!-- figures: begin -->", "<!-- figures: end -->"
NOTHING = "Nothing has been run or measured on a GPU yet. The table below has the targets.\n"
FIGURE_HEADS = ("figure", "measured", "median of", "target", "")
PART_HEADS = ("part", "question", "ended", "s", "commit")

Document = dict[str, Any]


def read_results(path: Path) -> Document:
    """Read a document of results. Raises UserError for a file that does not contain one."""
    try:
        document: Document = json.loads(path.read_text())
        if {"date", "gpu", "versions", "commit", "settings", "parts"} <= document.keys():
            return document
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"cannot read results from {path}: {error}") from None
    raise UserError(f"{path} holds no results of benchmarks.gpu")


def merged(documents: Sequence[Document]) -> Document:
    """Merge results of several runs on one kind of GPU; the last results of a part replace earlier ones.

    Raises UserError for results with different GPUs or settings.
    """
    for field in ("gpu", "settings"):
        if any(document[field] != documents[0][field] for document in documents):
            raise UserError(f"these results differ in their {field}; give those of one run, or of runs that agree")
    parts = {part["name"]: part for document in documents for part in document["parts"]}
    return {**documents[-1], "parts": list(parts.values())}


def update_page(page: Path, document: Document | None) -> None:
    """Write the tables between the page's markers. Raises UserError if the markers are missing."""
    text = page.read_text()
    before, begin, rest = text.partition(BEGIN)
    _, end, after = rest.partition(END)
    if not begin or not end:
        raise UserError(f"{page} has no markers {BEGIN} and {END}; restore them")
    page.write_text(f"{before}{BEGIN}\n{tables(document)}{END}{after}")


def tables(document: Document | None) -> str:
    """Return the Markdown between the markers."""
    if document is None:
        return NOTHING
    settings, versions = document["settings"], document["versions"]
    known = ", ".join(f"{name} {version}" for name, version in versions.items() if version)
    lines = [
        f"{document['date']}, {document['gpu']}, {known}. "
        f"Random weights of the shape {settings['shape']}, {settings['dtype']}; "
        f"steps in flight: {'decided at run time' if settings['in_flight'] is None else settings['in_flight']}.",
        "",
        markdown_table(FIGURE_HEADS, [figure_row(row) for part in document["parts"] for row in part["figures"]]),
        markdown_table(PART_HEADS, [part_row(part) for part in document["parts"]]),
    ]
    return "\n".join(lines)


def figure_row(row: Document) -> tuple[str, ...]:
    """Return the cells under `FIGURE_HEADS`."""
    target = f"{row['sense']} {row['target']:g}" if "target" in row else ""
    verdict = {None: "", True: "reached", False: "**not reached**"}[row.get("met")]
    return row["name"], f"{row['value']:,.4g} {row['unit']}", str(row["of"]), target, verdict


def part_row(part: Document) -> tuple[str, ...]:
    """Return the cells under `PART_HEADS`."""
    return part["name"], part["title"], ending(part), f"{part['seconds']:g}", part["commit"]


def ending(part: Document) -> str:
    """Return how a part ended, with the last line of the reason."""
    reason = (part["reason"].splitlines() or [""])[-1].replace("|", "/")
    return f"{part['status']}: {reason}" if reason else str(part["status"])
