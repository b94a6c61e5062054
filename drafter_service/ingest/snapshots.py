"""Snapshots of corpora as sources: their requests, oldest first."""

from __future__ import annotations

import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from drafter_service.ingest.documents import Item, RecordError
from drafter_service.ingest.files import File, Opened
from drafter_service.ingest.reading import Reading
from ssd.corpus.requests import NO_NAME, id_of_hash
from ssd.corpus.ring import SEPARATOR
from ssd.corpus.sections import SnapshotError, read_sections
from ssd.corpus.snapshot import DEPTH

COPIED_AT_ONCE = 1 << 22
"""Number of bytes of a remote snapshot that are copied at a time."""
DAMAGED = "a snapshot that is damaged or incomplete"


def read_snapshot(opened: Opened, _: Reading) -> Iterator[Item]:
    """Yield the requests. Raises RecordError for a damaged snapshot."""
    opened.seekable()
    try:
        sections = _sections(opened.file)
        text, depth = sections["text"], int(sections["facts"][DEPTH])
        columns = [sections[f"requests.{name}"].tolist() for name in ("first", "name", "time", "tag")]
    except (SnapshotError, KeyError):
        raise RecordError(DAMAGED) from None
    for number, (end, name, time, tag, tokens) in enumerate(_requests(text, columns, depth), 1):
        opened.bytes_read = opened.file.size * end // len(text)
        request = f"{opened.file.name}:{number}" if name == NO_NAME else id_of_hash(name)
        yield Item(request, None, tokens, time=time, tag=tag)


def _requests(
    text: np.ndarray, columns: list[list[Any]], depth: int
) -> Iterator[tuple[int, int, float, int, np.ndarray]]:
    """Yield the requests: the position at which each ends, the hash of its id, time, tag and tokens, uint32 [N].

    Joins the pieces of each long request: a piece begins with the last `depth` tokens of the piece before it.
    """
    last = None
    for first, *facts, end in zip(*columns, [*columns[0], len(text)][1:], strict=True):
        # A separator follows each, and those of forgotten requests.
        tokens = text[first:end]
        tokens = tokens[: int((tokens == SEPARATOR).argmax())].copy()
        if last is not None:
            before = last[-1]
            shared = before[max(0, len(before) - depth) :]
            if [*last[1:-1]] == facts and np.array_equal(shared, tokens[depth - len(shared) : depth]):
                tokens = np.concatenate((before[: len(before) - len(shared)], tokens))
            else:
                yield last
        last = end, *facts, tokens
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
