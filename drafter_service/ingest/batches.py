"""All files of a load as batches of similar size: detecting the format of a file, and reading it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import Literal, NamedTuple

import orjson

from drafter_service.ingest.documents import Chunk, Item, RecordError
from drafter_service.ingest.files import File, Opened
from drafter_service.ingest.lines import read_jsonl, read_plain
from drafter_service.ingest.parquet import read_parquet
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.snapshots import read_snapshot
from drafter_service.ingest.token_arrays import read_npy, read_npz
from ssd.corpus.sections import MAGIC
from ssd.errors import UserError

Kind = Literal["JSONL", "Parquet", "npy", "npz", "snapshot", "text", "binary"]

BY_SUFFIX: dict[str, Kind] = {
    ".jsonl": "JSONL",
    ".ndjson": "JSONL",
    ".parquet": "Parquet",
    ".npy": "npy",
    ".npz": "npz",
}
BY_MAGIC: dict[bytes, Kind] = {MAGIC: "snapshot", b"PAR1": "Parquet", b"\x93NUMPY": "npy"}
NOT_LINES = {
    b"PK\x03\x04": "an .npz archive",
    b"\x93NUMPY": "an .npy array",
    b"PAR1": "a Parquet file",
    MAGIC: "a snapshot",
}
"""Actual format of a file named as JSON lines, by its first bytes."""
READERS = {
    "JSONL": read_jsonl,
    "Parquet": read_parquet,
    "npy": read_npy,
    "npz": read_npz,
    "text": read_plain,
}
HEAD_BYTES = 8192
BINARY = "a file that is neither text nor of a known format"


class Batch(NamedTuple):
    """Items of one or more files, in order."""

    items: list[Item]
    bytes_read: int
    """Bytes of all files so far."""


def read_batches(files: Sequence[File], reading: Reading, kinds: Counter[str]) -> Iterator[Batch]:
    """Yield the items of all files, and count files by format in `kinds`. Raises only UserError."""
    return _grouped(_read_files(files, reading, kinds), reading.block_bytes)


def _read_files(files: Sequence[File], reading: Reading, kinds: Counter[str]) -> Iterator[Batch]:
    before = 0
    for file in files:
        yield from _read_file(file, before, reading, kinds)
        before += file.size


def _read_file(file: File, before: int, reading: Reading, kinds: Counter[str]) -> Iterator[Batch]:
    try:
        kind = kind_of(file)
        kinds[kind] += 1
        if kind == "binary":
            reading.faults.record(BINARY, file.name)
        for chunk in read_as(kind, file, reading):
            yield Batch(chunk.items, before + min(chunk.bytes_read, file.size))
    except UserError:
        raise
    except RecordError as problem:
        reading.faults.record(str(problem), file.name)
    except Exception as problem:  # File systems, codecs and pyarrow raise many types.
        reading.faults.record(f"a file that cannot be read ({type(problem).__name__})", file.name)
    yield Batch([], before + file.size)


def _grouped(batches: Iterable[Batch], nbytes: int) -> Iterator[Batch]:
    """Combine batches up to a size."""
    items: list[Item] = []
    bytes_read = size = 0
    for batch in batches:
        items += batch.items
        size += sum(item.nbytes for item in batch.items)
        bytes_read = batch.bytes_read
        if size >= nbytes:
            yield Batch(items, bytes_read)
            items, size = [], 0
    yield Batch(items, bytes_read)


# --- Formats


def kind_of(file: File) -> Kind:
    """Return the format of a file; "binary" is an unknown one. Raises RecordError if its name says another one."""
    kind = BY_SUFFIX.get(file.suffix)
    if kind is not None and kind != "JSONL":
        return kind
    with Opened(file) as opened:
        head = opened.data.read(HEAD_BYTES)
    if kind is None:
        return _by_head(head)
    for magic, name in NOT_LINES.items():
        if head.startswith(magic):
            raise RecordError(f"a file named {file.suffix} that is {name}; rename it")
    return kind


def read_as(kind: Kind, file: File, reading: Reading) -> Iterator[Chunk]:
    """Yield chunks of a file. Raises RecordError and the errors of the libraries used."""
    if kind == "snapshot":
        yield from read_snapshot(file, reading)
    elif kind != "binary":
        with Opened(file) as opened:
            yield from READERS[kind](opened, reading)


def _by_head(head: bytes) -> Kind:
    for magic, kind in BY_MAGIC.items():
        if head.startswith(magic):
            return kind
    if b"\0" in head:
        return "binary"
    return "JSONL" if _begins_with_object(head) else "text"


def _begins_with_object(head: bytes) -> bool:
    """Return whether the first line is a JSON object, or begins like one that is longer than the head."""
    line, end, _ = head.partition(b"\n")
    if not end and len(head) == HEAD_BYTES:
        return line.startswith(b'{"')
    try:
        return isinstance(orjson.loads(line), dict)
    except orjson.JSONDecodeError:
        return False
