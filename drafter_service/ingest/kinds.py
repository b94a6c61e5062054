"""What a file is, by its name, or by how it begins."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import orjson

from drafter_service.ingest.chunk import Chunk, Position
from drafter_service.ingest.files import File, Opened
from drafter_service.ingest.jsonl import read_jsonl
from drafter_service.ingest.parquet import read_parquet
from drafter_service.ingest.plain import read_plain
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.snapshots import read_snapshot
from drafter_service.ingest.token_arrays import read_npy, read_npz, read_raw
from ssd.corpus.sections import MAGIC

Kind = Literal["JSONL", "Parquet", "npy", "npz", "raw tokens", "snapshot", "text", "binary"]

BY_SUFFIX: dict[str, Kind] = {
    ".jsonl": "JSONL",
    ".ndjson": "JSONL",
    ".parquet": "Parquet",
    ".npy": "npy",
    ".npz": "npz",
    ".bin": "raw tokens",
}
BY_MAGIC: dict[bytes, Kind] = {MAGIC: "snapshot", b"PAR1": "Parquet", b"\x93NUMPY": "npy"}
READERS = {
    "JSONL": read_jsonl,
    "Parquet": read_parquet,
    "npy": read_npy,
    "npz": read_npz,
    "raw tokens": read_raw,
    "text": read_plain,
}
HEAD_BYTES = 8192


def kind_of(file: File) -> Kind:
    """What a file is; "binary" is nothing that can be read."""
    return BY_SUFFIX.get(file.suffix) or _by_head(file)


def read_as(kind: Kind, file: File, start: Position, reading: Reading) -> Iterator[Chunk]:
    """Chunks of a file from a position on. Raises RecordError, and whatever the file's own library raises."""
    if kind == "snapshot":
        yield from read_snapshot(file, start, reading)
    elif kind != "binary":
        with Opened(file) as opened:
            yield from READERS[kind](opened, start, reading)


def _by_head(file: File) -> Kind:
    with Opened(file) as opened:
        head = opened.data.read(HEAD_BYTES)
    for magic, kind in BY_MAGIC.items():
        if head.startswith(magic):
            return kind
    if b"\0" in head:
        return "binary"
    return "JSONL" if _begins_with_object(head) else "text"


def _begins_with_object(head: bytes) -> bool:
    """Whether the first line is a JSON object, or the beginning of one that is longer than the head."""
    line, end, _ = head.partition(b"\n")
    if not end and len(head) == HEAD_BYTES:
        return line.startswith(b'{"')
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False
