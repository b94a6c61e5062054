"""A load: read and parse in one thread, tokenize in the tokenizer's own, learn in the caller's."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from contextlib import closing
from typing import NamedTuple

from drafter_service.ingest.document import Documents
from drafter_service.ingest.encode import encode
from drafter_service.ingest.faults import NO_TOKENIZER, Faults
from drafter_service.ingest.files import File
from drafter_service.ingest.flow import ahead, mapped
from drafter_service.ingest.read import Batch, read_batches
from drafter_service.ingest.reading import Reading
from drafter_service.ingest.resume import Resume
from drafter_service.ingest.sink import Learned, Sink
from ssd.errors import UserError

BATCHES_READ = 2
"""That wait to be tokenized."""
TOKENIZERS = 2
"""Batches that are tokenized at a time: while the ids of one are fetched, the library's threads have the other."""
BATCHES_ENCODED = 16
"""That wait for the sink. They are small, and it may take seconds over one, when it sorts or saves."""
HOPELESS = 1000
"""So many texts, no tokenizer, and not one document so far."""


class Progress(NamedTuple):
    """How far a load is."""

    bytes_read: int
    documents: int
    tokens: int


class Summary(NamedTuple):
    """What came of a load."""

    learned: Learned
    kinds: Counter[str]
    """Files by what they are."""
    faults: Faults
    seconds: float


def load(
    files: Sequence[File], reading: Reading, sink: Sink, resume: Resume, watch: Callable[[Progress], None]
) -> Summary:
    """Learn all files. `watch` is told after each batch. Raises UserError; what was committed until then stays."""
    began = time.perf_counter()
    kinds: Counter[str] = Counter()
    documents = tokens = uncommitted = 0
    with closing(_encoded(files, resume, reading, kinds)) as encoded:
        for batch, some in encoded:
            if resume.is_kept and uncommitted and uncommitted + some.room > sink.window:
                sink.commit()
                resume.write()
                uncommitted = 0
            if len(some):
                sink.accept(some)
            for mark in batch.marks:
                resume.note(*mark)
            documents, tokens, uncommitted = documents + len(some), tokens + len(some.tokens), uncommitted + some.room
            if documents == 0:
                _check_readable(reading, HOPELESS)
            watch(Progress(batch.bytes_read, documents, tokens))
    if documents == 0:
        _check_readable(reading, 1)
    learned = sink.finish()
    resume.write()
    return Summary(learned, kinds, reading.faults, time.perf_counter() - began)


def _encoded(
    files: Sequence[File], resume: Resume, reading: Reading, kinds: Counter[str]
) -> Generator[tuple[Batch, Documents], None, None]:
    """Batches with their documents."""

    def with_documents(batch: Batch) -> tuple[Batch, Documents]:
        return batch._replace(items=[]), encode(batch.items, reading)

    with (
        closing(ahead(read_batches(files, resume, reading, kinds), BATCHES_READ)) as batches,
        closing(mapped(with_documents, batches, TOKENIZERS)) as encoded,
    ):
        yield from ahead(encoded, BATCHES_ENCODED)


def _check_readable(reading: Reading, most: int) -> None:
    """Some text among token ids is only counted when there is no tokenizer; nothing but text is a mistake."""
    fault = reading.faults.by_reason.get(NO_TOKENIZER)
    if fault and fault.count >= most:
        raise UserError(f"{fault.places[0]} is text; give the folder of the model's tokenizer with --tokenizer FOLDER")
