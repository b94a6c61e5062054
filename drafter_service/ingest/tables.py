"""Tables: CSV and TSV with a header, Parquet, Arrow. Each row is a record; columns of token ids stay arrays."""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterator
from importlib import import_module
from itertools import pairwise, repeat
from typing import Any

from drafter_service.ingest.chats import parsed, words
from drafter_service.ingest.documents import RecordError
from drafter_service.ingest.files import Opened
from drafter_service.ingest.formats import FIELDS, IDS, LIKELY, read_records
from drafter_service.ingest.json_text import MAX_JSON, NOT_UTF8, is_unicode
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.sessions import Record
from ssd.errors import missing_extra

MAX_ROWS = 4096
PROBED_ROWS = 8
"""Number of first rows by which the columns to read are selected."""
DELIMITERS = ",\t;|"
MAX_NAME = 100
OBJECTS = frozenset(
    words(
        "choices candidates attributes mapping requests chunkedPrompt samples resps filtered_resps history trajectory"
        " steps messages contents conversations conversation code_list implementations tool_calls tools"
        " metadata headers usage"
    )
)
"""Columns that never have texts of a model or user."""
NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?", re.IGNORECASE)
BAD_ROW = "a row of CSV with broken quotes, or with more cells than the header"
LOST_LINE = "a line of CSV after a broken quote"
NO_HEADER = "CSV whose first line has no names of columns, or one of them twice; write a header"


def is_csv(head: bytes) -> bool:
    """Return whether a text begins with a header of CSV that has a known column, and with a row of as many cells."""
    rows = csv.reader(io.StringIO(head.decode(errors="replace"), newline=""), delimiter=_delimiter(head))
    try:
        first, second = next(rows, []), next(rows, [])
    except csv.Error:
        return False
    return len(first) == len(second) > 1 and not FIELDS.isdisjoint(first)


def read_csv(opened: Opened, reading: Reading) -> Iterator[Record]:
    """Yield the rows of a table. Empty cells are None; those that are JSON are decoded, except where they may be texts.

    Numbers in columns with the name of an output remain numbers, which are counts or scores, unless the user names it.
    Raises RecordError if there is no header.
    """
    csv.field_size_limit(MAX_JSON)
    lines = io.TextIOWrapper(opened.data, "utf-8", "surrogateescape", newline="")
    rows = csv.reader(lines, delimiter=_delimiter(opened.head), strict=True)
    try:
        header = next(rows, [])
    except csv.Error:
        raise RecordError(NO_HEADER) from None
    # The name of the first column may be empty: pandas writes an index without one.
    names = {name for name in header[:1] + list(filter(None, header[1:])) if len(name) <= MAX_NAME}
    if len(names) < len(header) or any(name.replace(".", "").isdigit() for name in names):
        raise RecordError(NO_HEADER)
    outputs = [not reading.fields and LIKELY.search(name) is not None for name in header]
    decoders = [str if _is_text(name, reading.fields) else parsed for name in header]
    number = 0
    while True:
        number += 1
        lines_before = rows.line_num
        place = f"{opened.file.name}:{number}"
        if number % MAX_ROWS == 0:
            opened.advance()
        try:
            row = next(rows)
        except StopIteration:
            return
        except csv.Error:
            row = [""] * (len(header) + 1)
            for _ in range(rows.line_num - lines_before - 1):  # A quote that is not closed ends with the file.
                reading.faults.record(LOST_LINE, place)
        if len(row) > len(header) or not is_unicode("".join(row)):
            reading.faults.record(BAD_ROW if len(row) > len(header) else NOT_UTF8, place)
        elif row:
            cells = {
                name: float(cell) if is_output and NUMBER.fullmatch(cell) else decode(cell) if cell else None
                for name, is_output, decode, cell in zip(header, outputs, decoders, row, strict=False)
            }
            yield Record(cells, place)


def _is_text(column: str, fields: tuple[str, ...]) -> bool:
    """Return whether a model or user may have written the texts of a column. Readers decode messages and bodies in it.

    fields: those that the user names.
    """
    return (column in FIELDS or column in fields) and column not in IDS | OBJECTS


def _delimiter(head: bytes) -> str:
    return max(DELIMITERS, key=head.partition(b"\n")[0].decode(errors="replace").count)


# --- With pyarrow


def read_parquet(opened: Opened, reading: Reading) -> Iterator[Record]:
    """Yield the rows of a table, with the columns that are needed. Raises UserError without pyarrow."""
    source = opened.seekable()
    file = _pyarrow("parquet").ParquetFile(source, pre_buffer=False, buffer_size=reading.block_bytes)
    columns = _needed(file, reading.fields)
    row = 0
    for index in range(file.num_row_groups):
        group = file.metadata.row_group(index)
        row_bytes = max(1, group.total_byte_size // max(1, group.num_rows))
        at_once = min(MAX_ROWS, max(1, reading.block_bytes // row_bytes))
        for batch in file.iter_batches(at_once, row_groups=[index], columns=columns):
            yield from _records(batch, opened.file.name, row, reading.fields)
            row += batch.num_rows
            opened.bytes_read = opened.file.size * row // file.metadata.num_rows


def _needed(file: Any, fields: tuple[str, ...]) -> list[str]:
    """Return the columns to read: those that may have known fields, unless the first rows need others, too."""
    names = list(file.schema_arrow.names)
    wanted = {re.split(r"[.\[]", field)[0] for field in fields} | set(fields) or FIELDS
    columns = [name for name in names if name in wanted]
    first = next(file.iter_batches(PROBED_ROWS), None)
    if first is None or len(columns) == len(names):
        return names
    found, found_in_columns = (
        [(read.format, len(read.outputs)) for read in read_records(_records(batch, "", 0, fields), fields)]
        for batch in (first, first.select(columns))
    )
    return columns if found == found_in_columns and any(count for _, count in found) else names


def read_arrow(opened: Opened, reading: Reading) -> Iterator[Record]:
    """Yield the rows of a table in Arrow's file or stream format. Raises UserError without pyarrow."""
    if opened.head.startswith(b"ARROW1"):
        opened.data.read(8)  # A file is a stream after its magic number; its end, which may be missing, is not needed.
    row = 0
    for batch in _pyarrow("ipc").open_stream(opened.data):
        for first in range(0, batch.num_rows, MAX_ROWS):
            yield from _records(batch.slice(first, MAX_ROWS), opened.file.name, row + first, reading.fields)
        row += batch.num_rows
        opened.advance()


def _pyarrow(name: str) -> Any:
    """Return a module of pyarrow, which is an optional dependency. Raises UserError without it."""
    try:
        return import_module(f"pyarrow.{name}")
    except ImportError:
        raise missing_extra("Parquet and Arrow files need pyarrow", "parquet") from None


def _records(batch: Any, label: str, before: int, fields: tuple[str, ...]) -> Iterator[Record]:
    """Yield the rows of a batch, which follow `before` other rows of the file."""
    names = batch.schema.names
    columns = map(_values, names, batch.columns, repeat(fields))
    for number, values in enumerate(zip(*columns, strict=True), before + 1):
        yield Record(dict(zip(names, values, strict=True)), f"{label}:{number}")


def _values(name: str, column: Any, fields: tuple[str, ...]) -> list[Any]:
    """Return the values of a column: token ids as arrays, and JSON decoded except where it may be a text."""
    types, kind = _pyarrow("types"), column.type
    is_list = name in IDS and (types.is_list(kind) or types.is_large_list(kind))
    if not is_list or not types.is_integer(kind.value_type) or column.values.null_count:
        values = column.to_pylist()
        values = [_without_nulls(value) for value in values] if types.is_nested(kind) else values
        return [value if _is_text(name, fields) else parsed(value) for value in values]
    values, offsets = column.values.to_numpy(), column.offsets.to_numpy().tolist()
    return [values[first:end] for first, end in pairwise(offsets)]


def _without_nulls(value: Any) -> Any:
    """Return a value without the null fields of its objects: a column has the fields of all objects in each."""
    if isinstance(value, dict):
        return {name: _without_nulls(inner) for name, inner in value.items() if inner is not None}
    return [_without_nulls(inner) for inner in value] if isinstance(value, list) else value
