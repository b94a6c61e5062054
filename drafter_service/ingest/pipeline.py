"""A load: one thread reads and parses, the tokenizer's threads tokenize, and the caller's thread learns."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import closing
from typing import TypeVar

from drafter_service.ingest.containers import read_batches
from drafter_service.ingest.documents import NO_TOKENIZER, Item, Sink, Totals
from drafter_service.ingest.files import File
from drafter_service.ingest.reading import Reading, encode
from ssd.errors import UserError

A = TypeVar("A")

TOKENIZERS = 2
"""Batches that are tokenized at the same time: while the ids of one are copied, the library tokenizes the other."""
BATCHES_AHEAD = 16
"""Batches that are read and tokenized ahead of the sink. They are small, and the sink takes seconds when it sorts or
saves."""
MAX_UNREADABLE = 1000
"""Number of texts after which a load without a tokenizer fails if it has no document."""


def load(files: Sequence[File], reading: Reading, sink: Sink, watch: Callable[[int, int], None]) -> Totals:
    """Learn all files, and return what the sink has learned.

    watch: called after each batch with the numbers of bytes and of tokens so far. Raises UserError, also if the files
    contain no documents.
    """
    documents = tokens = 0
    with closing(read_all(files, reading, encode)) as encoded:
        for bytes_read, batch in encoded:
            if len(batch):
                sink.accept(batch)
            documents += len(batch)
            tokens += len(batch.tokens)
            if documents == 0:
                check_readable(reading, MAX_UNREADABLE)
            watch(bytes_read, tokens)
    if documents == 0:
        check_readable(reading, 1)
        reasons = reading.faults.summary or "the files contain no documents"
        raise UserError(f"nothing was learned: {reasons}; docs/operations.md lists the accepted formats")
    return sink.finish()


def read_all(
    files: Sequence[File], reading: Reading, convert: Callable[[list[Item], Reading], A]
) -> Generator[tuple[int, A], None, None]:
    """Yield, for each batch, the bytes read so far and what `convert` makes of its items, in threads."""
    batches = read_batches(files, reading)
    reader = ThreadPoolExecutor(1, "warm-reader")
    tokenizers = ThreadPoolExecutor(TOKENIZERS, "warm-tokenizer")

    def read() -> tuple[int, Future[A]] | None:
        batch = next(batches, None)
        return None if batch is None else (batch.bytes_read, tokenizers.submit(convert, batch.items, reading))

    try:
        ahead = deque(reader.submit(read) for _ in range(BATCHES_AHEAD))
        while (found := ahead.popleft().result()) is not None:
            ahead.append(reader.submit(read))
            bytes_read, converted = found
            yield bytes_read, converted.result()
    finally:
        reader.shutdown(cancel_futures=True)
        tokenizers.shutdown(cancel_futures=True)


def check_readable(reading: Reading, most: int) -> None:
    """Raise UserError if a load without a tokenizer finds only text; some text among token ids is only counted."""
    fault = reading.faults.by_reason.get(NO_TOKENIZER)
    if fault and fault.count >= most:
        raise UserError(f"{fault.places[0]} is text; give the folder of the model's tokenizer with --tokenizer FOLDER")
