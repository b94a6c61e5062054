"""The markup that the page is made of: figures, tables, lists, and panels around them."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from html import escape
from typing import NamedTuple

from drafter_service.observability.report import units
from drafter_service.observability.report.schema import Tally


class Figure(NamedTuple):
    """A number, and how people read it."""

    value: float | None
    unit: Callable[[float | None], str]


Cell = str | Figure


def written(cell: Cell) -> str:
    """A cell as markup; a figure keeps its exact value beside what people read."""
    if isinstance(cell, str):
        return escape(cell)
    if cell.value is None:
        return units.UNKNOWN
    return f'<data value="{cell.value!r}">{escape(cell.unit(cell.value))}</data>'


def panel(
    title: str,
    note: str,
    content: str,
    heads: Sequence[str] = (),
    rows: Iterable[Sequence[Cell]] = (),
    kind: str = "",
) -> str:
    """A heading, a sentence, what is shown, and the same as a table if there are heads for one."""
    table = f"<details><summary>as a table</summary>{table_of(heads, rows)}</details>" if heads else ""
    caption = f"<figcaption><h3>{escape(title)}</h3><p>{escape(note)}</p></figcaption>"
    return f'<figure class="{kind}">{caption}{content}{table}</figure>'


def table_of(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """A table."""
    head = "".join(f"<th>{escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{written(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    top = f"<thead><tr>{head}</tr></thead>" if any(heads) else ""
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def list_of(rows: Iterable[tuple[str, Figure]]) -> str:
    """Figures with their names."""
    return f"<dl>{''.join(f'<dt>{escape(name)}</dt><dd>{written(figure)}</dd>' for name, figure in rows)}</dl>"


def key_of(entries: Iterable[tuple[str, str]]) -> str:
    """What colours mean: a colour and a name each."""
    spans = (f'<span><i style="--tone: {tone}"></i>{escape(name)}</span>' for tone, name in entries)
    return f'<div class="key">{"".join(spans)}</div>'


def cells_of(tally: Tally) -> tuple[Figure, Figure, Figure]:
    """Acceptance, draft tokens, and those accepted."""
    return (
        Figure(tally.acceptance, units.share),
        Figure(tally.drafted, units.count),
        Figure(tally.accepted, units.count),
    )
