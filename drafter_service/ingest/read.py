"""All files of a load, one after the other, as batches of about the same size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

from drafter_service.ingest.chunk import Item, Position
from drafter_service.ingest.faults import RecordError
from drafter_service.ingest.files import File
from drafter_service.ingest.kinds import kind_of, read_as
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.resume import Resume
from ssd.errors import UserError

BINARY = "a file that is neither text nor of a known kind"


class Mark(NamedTuple):
    """How far a file was read."""

    file: File
    position: Position
    is_done: bool


class Batch(NamedTuple):
    """Items of one or more files, in order."""

    items: list[Item]
    marks: list[Mark]
    bytes_read: int
    """Of all files so far, those that were read by an earlier load included."""


def read_batches(files: Sequence[File], resume: Resume, reading: Reading, kinds: Counter[str]) -> Iterator[Batch]:
    """What an earlier load has not read yet; `kinds` counts the files. Raises UserError only."""
    return _grouped(_read_files(files, resume, reading, kinds), reading.block_bytes)


def _read_files(files: Sequence[File], resume: Resume, reading: Reading, kinds: Counter[str]) -> Iterator[Batch]:
    before = 0
    for file in files:
        start = resume.start_of(file)
        if start is not None:
            yield from _read_file(file, start, before, reading, kinds)
        before += file.size


def _read_file(file: File, position: Position, before: int, reading: Reading, kinds: Counter[str]) -> Iterator[Batch]:
    try:
        kind = kind_of(file)
        kinds[kind] += 1
        if kind == "binary":
            reading.faults.note(BINARY, file.name)
        for chunk in read_as(kind, file, position, reading):
            position = chunk.position
            yield Batch(chunk.items, [Mark(file, position, False)], before + min(chunk.bytes_read, file.size))
    except UserError:
        raise
    except RecordError as problem:
        reading.faults.note(str(problem), file.name)
    except Exception as problem:  # Whatever a file system, a codec or pyarrow has against a file.
        # Not done: an error of the network may be gone at the next load.
        reading.faults.note(f"a file that cannot be read ({type(problem).__name__})", file.name)
        return
    yield Batch([], [Mark(file, position, True)], before + file.size)


def _grouped(batches: Iterable[Batch], weight: int) -> Iterator[Batch]:
    """Batches put together until they weigh enough. How they are cut depends only on where reading began."""
    items: list[Item] = []
    marks: dict[str, Mark] = {}
    bytes_read = size = 0
    for batch in batches:
        items += batch.items
        size += sum(item.weight for item in batch.items)
        marks |= {mark.file.name: mark for mark in batch.marks}
        bytes_read = batch.bytes_read
        if size >= weight:
            yield Batch(items, list(marks.values()), bytes_read)
            items, marks, size = [], {}, 0
    if marks:
        yield Batch(items, list(marks.values()), bytes_read)
