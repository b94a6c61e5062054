"""Snapshots of corpora as sources: their requests, oldest first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

import numpy as np

from drafter_service.ingest.documents import Chunk, Item, RecordError
from drafter_service.ingest.files import File
from drafter_service.ingest.reading import Reading
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.sections import SnapshotError, read_sections

COPIED_AT_ONCE = 1 << 22
"""Number of bytes of a remote snapshot that are copied at a time."""
DAMAGED = "a snapshot that is damaged or incomplete"


def read_snapshot(file: File, reading: Reading) -> Iterator[Chunk]:
    """Yield chunks of requests. Raises RecordError for a damaged snapshot."""
    try:
        sections = _sections(file)
        text, firsts, names = (sections[name] for name in ("text", "requests.first", "requests.name"))
    except (SnapshotError, KeyError):
        raise RecordError(DAMAGED) from None
    offset = number = 0
    while offset < len(text):
        end = _chunk_end(text, offset, reading.block_bytes // text.itemsize)
        items = []
        for first, last in _requests(text, offset, end):
            number += 1
            items.append(Item(_name(file, number, int(first), firsts, names), None, text[first:last].copy()))
        offset = end
        yield Chunk(items, file.size * offset // len(text))


def _sections(file: File) -> dict[str, np.ndarray]:
    """Return the arrays of a snapshot. Raises SnapshotError."""
    if file.is_local:
        return read_sections(Path(file.path))
    # A copy without a name: it is gone once the arrays are, however the process ends.
    with tempfile.TemporaryFile() as copy, file.fs.open(file.path, "rb") as remote:
        shutil.copyfileobj(remote, copy, COPIED_AT_ONCE)
        copy.flush()
        return read_sections(Path(f"/dev/fd/{copy.fileno()}"))


def _chunk_end(text: np.ndarray, first: int, size: int) -> int:
    """Return the position after the last separator among the `size` tokens from `first` on, or after the next one."""
    while True:
        ends = np.flatnonzero(text[first : first + size] == SEPARATOR)
        if len(ends):
            return first + int(ends[-1]) + 1
        if first + size >= len(text):
            return len(text)
        size *= 2


def _requests(text: np.ndarray, first: int, end: int) -> Iterator[tuple[int, int]]:
    """Yield the beginning and end of each request. Forgotten text consists of separators."""
    for last in (first + np.flatnonzero(text[first:end] == SEPARATOR)).tolist():
        if last > first:
            yield first, last
        first = last + 1


def _name(file: File, number: int, first: int, firsts: np.ndarray, names: np.ndarray) -> str:
    """Return a name from the hash of the request's name, so that the same request is recognized in any snapshot."""
    row = int(np.searchsorted(firsts, first, side="right")) - 1
    hashed = int(names[row]) if row >= 0 else 0
    return f"#{hashed & 0xFFFF_FFFF_FFFF_FFFF:016x}" if hashed else f"{file.name}:{number}"
