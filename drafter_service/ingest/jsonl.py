"""JSON lines, a block at a time."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO

import orjson

from drafter_service.ingest.chunk import Chunk, Item, Position
from drafter_service.ingest.files import Opened
from drafter_service.ingest.reading import Reading

MOST_LINE = 32 << 20
"""Bytes; longer lines are left out. A request of a million tokens takes about 7 MB, with its text 12."""
NOT_JSON = "not JSON"
TOO_LONG = f"a line longer than {MOST_LINE >> 20} MiB"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"


def read_jsonl(opened: Opened, start: Position, reading: Reading) -> Iterator[Chunk]:
    """A chunk for each block; positions count bytes and lines."""
    opened.skip(start.offset)
    offset, lines = start
    while True:
        block, left_out, ended = read_lines(opened.data, reading.block_bytes, MOST_LINE)
        if block.startswith(BYTE_ORDER_MARK) and offset == 0:
            block, offset = block[len(BYTE_ORDER_MARK) :], len(BYTE_ORDER_MARK)
        offset += len(block) + left_out
        items: list[Item] = []
        for line in block.removesuffix(b"\n").split(b"\n") if block else ():
            lines += 1
            items += _items(line, opened, lines, reading)
        if left_out:
            lines += 1
            reading.faults.note(TOO_LONG, f"{opened.file.name}:{lines}")
        yield Chunk(items, Position(offset, lines), opened.bytes_read)
        if ended:
            return


def read_lines(stream: BinaryIO, size: int, most: int) -> tuple[bytes, int, bool]:
    """About `size` bytes of whole lines.

    Returns them, how many bytes behind them were left out, of a line longer than `most`, and whether the stream ended.
    """
    block = stream.read(size)
    if not block:
        return b"", 0, True
    if block.endswith(b"\n"):
        return block, 0, False
    rest = stream.readline(most)
    if rest.endswith(b"\n") or len(rest) < most:
        return block + rest, 0, False
    whole = block.rfind(b"\n") + 1
    left_out = len(block) - whole + len(rest)
    while (rest := stream.readline(most)) and not rest.endswith(b"\n"):
        left_out += len(rest)
    return block[:whole], left_out + len(rest), False


def _items(line: bytes, opened: Opened, number: int, reading: Reading) -> list[Item]:
    if not line.strip():
        return []
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        reading.faults.note(NOT_JSON, f"{opened.file.name}:{number}")
        return []
    return reading.items_of(record, opened.file, number)
