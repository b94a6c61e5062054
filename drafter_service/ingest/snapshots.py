"""Snapshots of corpora as sources: their requests, oldest first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import numpy as np

from drafter_service.ingest.documents import Chunk, Item, RecordError
from drafter_service.ingest.files import File
from drafter_service.ingest.reading import Reading
from ssd.corpus.requests import NO_NAME, id_of_hash
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.sections import SnapshotError, read_sections
from ssd.corpus.snapshot import DEPTH

COPIED_AT_ONCE = 1 << 22
"""Number of bytes of a remote snapshot that are copied at a time."""
DAMAGED = "a snapshot that is damaged or incomplete"


class Request(NamedTuple):
    """A request of a snapshot."""

    name: int
    """Hash of its id, `NO_NAME` if it has none."""
    time: float
    tag: int
    tokens: np.ndarray
    """uint32 [N]."""


def read_snapshot(file: File, reading: Reading) -> Iterator[Chunk]:
    """Yield chunks of requests. Raises RecordError for a damaged snapshot."""
    try:
        sections = _sections(file)
        text, depth = sections["text"], int(sections["facts"][DEPTH])
        columns = [sections[f"requests.{name}"] for name in ("first", "name", "time", "tag")]
    except (SnapshotError, KeyError):
        raise RecordError(DAMAGED) from None
    items: list[Item] = []
    size = 0
    for number, (end, request) in enumerate(_whole(_pieces(text, *columns), depth), 1):
        name = f"{file.name}:{number}" if request.name == NO_NAME else id_of_hash(request.name)
        items.append(Item(name, None, request.tokens, time=request.time, tag=request.tag))
        size += request.tokens.nbytes
        if size >= reading.block_bytes:
            yield Chunk(items, file.size * end // len(text))
            items, size = [], 0
    yield Chunk(items, file.size)


def _pieces(
    text: np.ndarray, firsts: np.ndarray, names: np.ndarray, times: np.ndarray, tags: np.ndarray
) -> Iterator[tuple[int, Request]]:
    """Yield the requests, or pieces of long ones, each after the position at which it ends."""
    ends = np.append(firsts, len(text))[1:]
    rows = zip(firsts.tolist(), ends.tolist(), names.tolist(), times.tolist(), tags.tolist(), strict=True)
    for first, end, name, time, tag in rows:
        # A separator follows each, and those of forgotten requests.
        tokens = text[first:end]
        yield end, Request(name, time, tag, tokens[: int((tokens == SEPARATOR).argmax())].copy())


def _whole(pieces: Iterator[tuple[int, Request]], depth: int) -> Iterator[tuple[int, Request]]:
    """Join the pieces of each long request: a piece begins with the last `depth` tokens of the piece before it."""
    last: tuple[int, Request] | None = None
    for end, request in pieces:
        if last is not None:
            before = last[1]
            shared = before.tokens[max(0, len(before.tokens) - depth) :]
            is_piece = before[:3] == request[:3] and np.array_equal(shared, request.tokens[depth - len(shared) : depth])
            if not is_piece:
                yield last
            else:
                tokens = np.concatenate((before.tokens[: len(before.tokens) - len(shared)], request.tokens))
                request = request._replace(tokens=tokens)
        last = end, request
    if last is not None:
        yield last


def _sections(file: File) -> dict[str, np.ndarray]:
    """Return the arrays of a snapshot. Raises SnapshotError."""
    if file.is_local:
        return read_sections(Path(file.path))
    # A copy without a name: it is gone once the arrays are, however the process ends.
    with tempfile.TemporaryFile() as copy, file.fs.open(file.path, "rb") as remote:
        shutil.copyfileobj(remote, copy, COPIED_AT_ONCE)
        copy.flush()
        return read_sections(Path(f"/dev/fd/{copy.fileno()}"))
