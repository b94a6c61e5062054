"""Files of lines: JSON lines, plain text and source code."""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import BinaryIO

import orjson

from drafter_service.ingest.documents import Chunk, Item, RecordError
from drafter_service.ingest.files import Opened
from drafter_service.ingest.reading import Reading

MAX_JSON_LINE = 32 << 20
"""Maximum length of a line in bytes; longer lines are skipped. A request of a million tokens has about 7 MB, 12 MB with
its text."""
NOT_JSON = "not JSON"
JSON_TOO_LONG = f"a line longer than {MAX_JSON_LINE >> 20} MiB"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
PIECE_BYTES = 1 << 16
"""Maximum size of a document in bytes. Longer files are split at the end of a line; matches have at most 32 tokens, so
little is lost."""
MAX_TEXT_LINE = 1 << 20
NOT_UTF8 = "text that is not UTF-8"
VLLM_LOG = "a log of vLLM, which has prompts but no outputs; record responses too"
VLLM_LINE = re.compile(rb"^[^\n]{0,99}INFO \d\d-\d\d [^\n]{0,99}Received request \S+:", re.MULTILINE)
TEXT_TOO_LONG = f"a line of text longer than {MAX_TEXT_LINE >> 20} MiB"


def read_jsonl(opened: Opened, reading: Reading) -> Iterator[Chunk]:
    """Yield a chunk for each block."""
    lines = 0
    while True:
        block, skipped, ended = read_lines(opened.data, reading.block_bytes, MAX_JSON_LINE)
        if lines == 0:
            block = block.removeprefix(BYTE_ORDER_MARK)
        items: list[Item] = []
        for line in block.removesuffix(b"\n").split(b"\n") if block else ():
            lines += 1
            items += _json_items(line, opened, lines, reading)
        if skipped:
            lines += 1
            reading.faults.record(JSON_TOO_LONG, f"{opened.file.name}:{lines}")
        yield Chunk(items, opened.bytes_read)
        if ended:
            return


def read_lines(stream: BinaryIO, size: int, most: int) -> tuple[bytes, int, bool]:
    """Read about `size` bytes of whole lines.

    Return them, the number of bytes skipped after them because a line is longer than `most`, and whether the stream
    has ended.
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
    skipped = len(block) - whole + len(rest)
    while (rest := stream.readline(most)) and not rest.endswith(b"\n"):
        skipped += len(rest)
    return block[:whole], skipped + len(rest), False


def _json_items(line: bytes, opened: Opened, number: int, reading: Reading) -> list[Item]:
    if not line.strip():
        return []
    try:
        record = orjson.loads(line)
    except orjson.JSONDecodeError:
        reading.faults.record(NOT_JSON, f"{opened.file.name}:{number}")
        return []
    return reading.items_of(record, opened.file, number)


def read_plain(opened: Opened, reading: Reading) -> Iterator[Chunk]:
    """Yield a chunk with one document for each piece.

    Names of documents end with the number of their first line. Raises RecordError for a log of vLLM.
    """
    lines = 0
    while True:
        piece, skipped, ended = read_lines(opened.data, PIECE_BYTES, MAX_TEXT_LINE)
        if lines == 0 and VLLM_LINE.search(piece):
            raise RecordError(VLLM_LOG)
        place = f"{opened.file.name}:{lines + 1}"
        lines += piece.count(b"\n") + (1 if skipped else 0)
        if skipped:
            reading.faults.record(TEXT_TOO_LONG, f"{opened.file.name}:{lines}")
        items = []
        try:
            text = piece.decode()
        except UnicodeDecodeError:
            reading.faults.record(NOT_UTF8, place)
            text = ""
        if text.strip() and (item := reading.text_item(text, place)):
            items.append(item)
        yield Chunk(items, opened.bytes_read)
        if ended:
            return
