"""Plain text and source files: one document each, very long ones in pieces."""

from __future__ import annotations

from collections.abc import Iterator

from drafter_service.ingest.chunk import Chunk, Position
from drafter_service.ingest.files import Opened
from drafter_service.ingest.jsonl import read_lines
from drafter_service.ingest.reading import Reading

PIECE_BYTES = 1 << 16
"""Longer files are cut at the end of a line. What is matched is at most 32 tokens long, so little is lost there."""
MOST_LINE = 1 << 20
NOT_UTF8 = "text that is not UTF-8"
TOO_LONG = f"a line of text longer than {MOST_LINE >> 20} MiB"


def read_plain(opened: Opened, start: Position, reading: Reading) -> Iterator[Chunk]:
    """A chunk for each piece; positions count bytes and lines. Names of documents end with their first line."""
    opened.skip(start.offset)
    offset, lines = start
    while True:
        piece, left_out, ended = read_lines(opened.data, PIECE_BYTES, MOST_LINE)
        place = f"{opened.file.name}:{lines + 1}"
        offset += len(piece) + left_out
        lines += piece.count(b"\n") + (1 if left_out else 0)
        if left_out:
            reading.faults.note(TOO_LONG, f"{opened.file.name}:{lines}")
        items = []
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            reading.faults.note(NOT_UTF8, place)
            text = ""
        if text.strip() and (item := reading.text_item(text, place)):
            items.append(item)
        yield Chunk(items, Position(offset, lines), opened.bytes_read)
        if ended:
            return
