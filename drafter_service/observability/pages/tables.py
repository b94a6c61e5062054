"""Tables of text and numbers: for pages, for Markdown and for the console."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

from drafter_service.observability.pages.svg import Frame, rect, svg

if TYPE_CHECKING:
    from rich.table import Table


class Value(NamedTuple):
    """A number and the function that formats it for display. None: not known."""

    number: float | None
    format: Callable[[float | None], str]


class Markup(NamedTuple):
    """The content of a table cell that is markup already; such cells are on pages only."""

    html: str


Cell = str | Value | Markup


def cell_text(cell: Cell) -> str:
    """Return the text of a cell, empty for markup."""
    return cell if isinstance(cell, str) else cell.format(cell.number) if isinstance(cell, Value) else ""


def cell_markup(cell: Cell) -> str:
    """Return the markup of a cell; a number has its exact value in addition to the formatted one."""
    if isinstance(cell, Markup):
        return cell.html
    text = escape(cell_text(cell))
    if isinstance(cell, str) or cell.number is None:
        return text
    return f'<data value="{cell.number!r}">{text}</data>'


def with_bars(heads: Sequence[str], rows: Sequence[Sequence[str]], colors: Mapping[str, str]) -> list[list[Cell]]:
    """Return rows with bars below the numbers of some columns, from 0 to the largest number of the column.

    colors: by heading.
    """
    filled: list[list[Cell]] = [list(row) for row in rows]
    frame = Frame(100, 6)
    for column, color in [(place, colors[head]) for place, head in enumerate(heads) if head in colors]:
        numbers = [float(row[column].rstrip("x") or 0) for row in rows]
        for row, number in zip(filled, numbers, strict=True):
            text, width = cell_text(row[column]), frame.width * number / max(*numbers, 1e-9)
            bar = svg(frame, text, [rect(0, 0, width, frame.height, kind=f"bar {color}")], "inline")
            row[column] = Markup(escape(text) + bar)
    return filled


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Cell]], kinds: Sequence[str] = ()) -> str:
    """Return a table that scrolls where it is too wide.

    kinds: a class for each column: `minor` columns are hidden on small screens, `name` columns wrap. Default: none.
    """
    kinds = kinds or [""] * len(heads)
    top = f"<thead>{_row('th', heads, kinds)}</thead>" if any(heads) else ""
    body = "".join(_row("td", row, kinds) for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _row(tag: str, cells: Sequence[Cell], kinds: Sequence[str]) -> str:
    parts = (
        f'<{tag} class="{kind}">{cell_markup(cell)}</{tag}>' if kind else f"<{tag}>{cell_markup(cell)}</{tag}>"
        for cell, kind in zip(cells, kinds, strict=True)
    )
    return f"<tr>{''.join(parts)}</tr>"


def markdown_table(heads: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Return a table in Markdown, with a line break at its end."""
    return "".join(f"| {' | '.join(line)} |\n" for line in (heads, ["---"] * len(heads), *rows))


def console_table(heads: Sequence[str], rows: Sequence[Sequence[str]], title: str = "") -> Table:
    """Return a table for the console: rows whose first cell is a name and the others figures."""
    from rich import box
    from rich.markup import escape as plain
    from rich.table import Table

    table = Table(title=title or None, box=box.SIMPLE, padding=(0, 1, 0, 0), show_header=any(heads))
    table.add_column(heads[0], overflow="fold")
    for column, head in enumerate(heads[1:], start=1):
        # Headings may wrap between words, and nothing is cut.
        words = [*head.split(), *(row[column] for row in rows)]
        table.add_column(head, justify="right", width=max(map(len, words), default=1))
    for row in rows:
        table.add_row(*map(plain, row))
    return table
