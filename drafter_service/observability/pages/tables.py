"""Tables of text and numbers: for pages, for Markdown and for the console."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Sequence
from html import escape
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from rich.table import Table


class Value(NamedTuple):
    """A number and the function that formats it for display. None: not known."""

    number: float | None
    format: Callable[[float | None], str]


class Bar(NamedTuple):
    """A text with a bar below, whose length is a share of the longest."""

    text: str
    share: float


Cell = str | Value | Bar


def cell_text(cell: Cell) -> str:
    """Return the text of a cell."""
    if isinstance(cell, Value):
        return cell.format(cell.number)
    return cell if isinstance(cell, str) else cell.text


def cell_markup(cell: Cell) -> str:
    """Return the markup of a cell; a number has its exact value in addition to the formatted one."""
    text = escape(cell_text(cell))
    if isinstance(cell, Bar):
        return f'{text}<meter value="{cell.share:.3f}"></meter>'
    if isinstance(cell, str) or cell.number is None:
        return text
    return f'<data value="{cell.number!r}">{text}</data>'


def with_bars(heads: Sequence[str], rows: Sequence[Sequence[str]], columns: Container[str]) -> list[list[Cell]]:
    """Return rows with bars below the numbers of the columns with these headings, from 0 to their largest number."""
    filled: list[list[Cell]] = [list(row) for row in rows]
    for column in [column for column, head in enumerate(heads) if head in columns]:
        numbers = [float(row[column].rstrip("x") or 0) for row in rows]
        for row, text, number in zip(filled, rows, numbers, strict=True):
            row[column] = Bar(text[column], number / max(*numbers, 1e-9))
    return filled


def html_table(heads: Sequence[str], rows: Iterable[Sequence[Cell]]) -> str:
    """Return a table that scrolls where it is too wide."""
    top = f"<thead>{_row('th', heads)}</thead>" if any(heads) else ""
    body = "".join(_row("td", row) for row in rows)
    return f'<div class="scroll"><table>{top}<tbody>{body}</tbody></table></div>'


def _row(tag: str, cells: Sequence[Cell]) -> str:
    return f"<tr>{''.join(f'<{tag}>{cell_markup(cell)}</{tag}>' for cell in cells)}</tr>"


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
